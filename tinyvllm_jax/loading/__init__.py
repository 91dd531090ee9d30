"""Checkpoints to device arrays: safetensors, GGUF and converted (orbax) folders, and their tokenizers.

`source.open_model` finds a model by path, hub id or demo name; `load_weights.load_weights` fills a
declared model from what it found.
"""
