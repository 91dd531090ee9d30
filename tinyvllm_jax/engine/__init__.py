"""The engine: host Python that decides (no jax), and a thin device part that runs what was
decided.
"""
