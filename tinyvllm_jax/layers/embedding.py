"""The token table, which a tied model also uses as its output head."""

from typing import Any

import jax
from flax import nnx

from tinyvllm_jax.layers.linear import matmul
from tinyvllm_jax.layers.weight import declare


class Embedding(nnx.Module):
    """Looks up rows of a [V, D] table."""

    def __init__(self, vocab_size: int, hidden_size: int, name: str, *, dtype: Any):
        self.weight = declare(
            (vocab_size, hidden_size), dtype, ("vocab", "embed"), f"{name}.weight"
        )

    def __call__(self, token_ids: jax.Array) -> jax.Array:  # [T] int32 -> [T, D]
        return self.weight[...][token_ids]

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits of a tied head: x [B, D] -> [B, V] in float32."""
        return matmul(x, self.weight[...])
