"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), in Hugging Face's order of roundings."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from tinyvllm_jax.layers.weight import declare


class RMSNorm(nnx.Module):
    """w * (x / rms(x)) over the last axis; the division in float32, the product in x's dtype."""

    def __init__(self, size: int, name: str, *, eps: float, dtype: Any):
        self.weight = declare((size,), dtype, ("norm",), f"{name}.weight")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size]
        xf = x.astype(jnp.float32)
        xf = xf * lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + self.eps)
        return self.weight[...] * xf.astype(x.dtype)
