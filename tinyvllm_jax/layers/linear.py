"""Linear: one matrix product, possibly of several projections that read the same input."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from tinyvllm_jax.layers.weight import declare


class Linear(nnx.Module):
    """y = x W^T + b with W [out, in], accumulated in float32.

    `names` are Hugging Face module names; several are fused into one matrix, one below the other.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *names: str,
        axes: tuple[str, str],
        dtype: Any,
        bias: bool = False,
    ):
        self.weight = declare(
            (out_size, in_size), dtype, axes, *(f"{name}.weight" for name in names)
        )
        self.bias = (
            declare((out_size,), dtype, axes[:1], *(f"{name}.bias" for name in names))
            if bias
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:  # [T, in] -> [T, out]
        y = matmul(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, in] times weight [out, in] transposed -> [T, out] in float32."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
