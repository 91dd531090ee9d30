"""The specification of the KV cache update, one token at a time."""

import jax
import jax.numpy as jnp
from jax import lax


def update(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `store_kv_cache`."""
    block_size = k_cache.shape[3]

    def write(t, caches):
        slot = slot_mapping[t]
        block, offset = jnp.maximum(slot, 0) // block_size, jnp.maximum(slot, 0) % block_size
        written = [
            cache.at[layer, block, :, offset].set(new[t].astype(cache.dtype))
            for cache, new in zip(caches, (k, v), strict=True)
        ]
        return lax.cond(slot >= 0, lambda: tuple(written), lambda: caches)

    return lax.fori_loop(0, slot_mapping.shape[0], write, (k_cache, v_cache))
