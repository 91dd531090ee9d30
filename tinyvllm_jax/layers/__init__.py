"""The parts of a decoder as flax.nnx modules whose weights are declared once (see `weight`)."""
