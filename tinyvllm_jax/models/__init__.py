"""The models that the engine runs."""

from tinyvllm_jax.models.decoder import Decoder, build_model

__all__ = ["Decoder", "build_model"]
