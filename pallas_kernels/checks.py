"""Checks of arguments that the public functions share."""

import operator

import jax
import jax.numpy as jnp


def check_caches(k_cache: jax.Array, v_cache: jax.Array) -> None:
    """Raises ValueError unless both caches are [L, N, K, S, h], of one shape and floating dtype."""
    if k_cache.ndim != 5 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            "k_cache and v_cache must be alike, [layers, blocks, kv_heads, block_size, head_dim], "
            f"not {k_cache.dtype} {k_cache.shape} and {v_cache.dtype} {v_cache.shape}"
        )
    if not jnp.issubdtype(k_cache.dtype, jnp.floating):
        raise ValueError(f"the caches must be floating point, not {k_cache.dtype}")


def layer_index(layer: int | jax.Array, num_layers: int) -> jax.Array:
    """`layer` as an int32 scalar array.

    A known index is checked against the number of layers: XLA would clamp a wrong one or drop the
    write, and a kernel would leave the pool. An array's value is the caller's to keep in range.

    Raises:
      ValueError: out of range, not a scalar, or not an integer.
    """
    if isinstance(layer, jax.Array):
        if layer.ndim or not jnp.issubdtype(layer.dtype, jnp.integer):
            raise ValueError(f"layer must be an integer scalar, not {layer.dtype} {layer.shape}")
        return layer.astype(jnp.int32)
    try:
        index = operator.index(layer)
    except TypeError:
        raise ValueError(f"layer must be an integer or an int32 scalar, not {layer!r}") from None
    if isinstance(layer, bool) or not 0 <= index < num_layers:
        raise ValueError(f"layer must be in 0 .. {num_layers - 1}, not {layer!r}")
    return jnp.int32(index)
