"""The KV cache update as an XLA scatter for K and one for V; in place in a donated cache."""

import jax
import jax.numpy as jnp


@jax.jit
def update(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `store_kv_cache`."""
    num_blocks, block_size = k_cache.shape[1], k_cache.shape[3]
    skipped = slot_mapping < 0
    # Out of bounds is dropped. Every skipped token gets a block of its own, so that the promise of
    # unique indices holds; the index arithmetic never forms layer * blocks * block_size.
    spare = num_blocks + jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    block = jnp.where(skipped, spare, slot_mapping // block_size)
    offset = jnp.where(skipped, 0, slot_mapping % block_size)
    where = (layer, block, slice(None), offset)
    write = lambda cache, new: cache.at[where].set(
        new.astype(cache.dtype), mode="drop", unique_indices=True
    )
    return write(k_cache, k), write(v_cache, v)
