"""The public function of the KV cache update, and its checks."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_caches, layer_index
from pallas_kernels.dispatch import dispatch
from pallas_kernels.kv_cache_update import reference, update_sm90, xla

_IMPLEMENTATIONS = {
    "mosaic_gpu": update_sm90.update,
    "xla": xla.update,
    "reference": reference.update,
}
# XLA's scatter measured faster than the Mosaic kernel up to 256 tokens (see update_sm90).
_AUTO_ORDER = ("xla",)


def store_kv_cache(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    layer: int | jax.Array,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Writes new K and V into the slots of a paged cache; in place under jit with donation.

    Args:
      k_cache, v_cache: [L, N, K, S, h] block pools of all layers.
      k, v: [T, K, h], cast to the cache's dtype.
      slot_mapping: [T] int32, block * S + offset; -1 skips the token. No slot may come twice.
      layer: which layer of the pools; pass an int32 array to share one lowering among layers.
      implementation: "auto", "mosaic_gpu", "xla" or "reference".

    Returns:
      The updated (k_cache, v_cache).

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      NotImplementedError: the named implementation cannot do this case.
    """
    check_caches(k_cache, v_cache)
    rows = (slot_mapping.shape[0], k_cache.shape[2], k_cache.shape[4])
    if slot_mapping.ndim != 1 or k.shape != rows or v.shape != rows:
        raise ValueError(
            f"slot_mapping must be [T], k and v [T, K, h] = {rows}, not "
            f"{slot_mapping.shape}, {k.shape} and {v.shape}"
        )
    if not (jnp.issubdtype(k.dtype, jnp.floating) and jnp.issubdtype(v.dtype, jnp.floating)):
        raise ValueError(f"k and v must be floating point, not {k.dtype} and {v.dtype}")
    if slot_mapping.dtype != jnp.int32:
        raise ValueError(f"slot_mapping must be int32, not {slot_mapping.dtype}")
    return dispatch(
        implementation,
        _IMPLEMENTATIONS,
        _AUTO_ORDER,
        k_cache,
        v_cache,
        k,
        v,
        slot_mapping,
        layer_index(layer, k_cache.shape[0]),
    )
