"""The SwiGLU feed-forward block (Shazeer 2020, arXiv:2002.05202), gate and up projection fused."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tinyvllm_jax.layers.linear import Linear


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, name: str, *, bias: bool, dtype: Any
    ):
        self.gate_up_proj = Linear(
            hidden_size,
            2 * intermediate_size,
            f"{name}.gate_proj",
            f"{name}.up_proj",
            axes=("ffn", "embed"),
            dtype=dtype,
            bias=bias,
        )
        self.down_proj = Linear(
            intermediate_size,
            hidden_size,
            f"{name}.down_proj",
            axes=("embed", "ffn"),
            dtype=dtype,
            bias=bias,
        )

    def __call__(self, x: jax.Array) -> jax.Array:  # [T, D] -> [T, D]
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)  # [T, F] each
        return self.down_proj(jax.nn.silu(gate) * up)
