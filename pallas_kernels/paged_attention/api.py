"""The public functions of paged attention, and their checks."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_caches, layer_index
from pallas_kernels.dispatch import dispatch
from pallas_kernels.paged_attention import decode_sm90, prefill_sm90, reference, xla

_AUTO_ORDER = ("mosaic_gpu", "xla")
_DECODE = {
    "mosaic_gpu": decode_sm90.decode,
    "xla": xla.decode,
    "reference": reference.decode,
}
_PREFILL = {
    "mosaic_gpu": prefill_sm90.prefill,
    "xla": xla.prefill,
    "reference": reference.prefill,
}


def paged_attention_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    layer: int | jax.Array,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Attention of one query token a sequence over its paged context.

    Args:
      q: [B, H, h] queries; sequence b's is its token context_lens[b] - 1.
      k_cache, v_cache: [L, N, K, S, h] block pools of all layers; H is a multiple of K.
      block_tables: [B, M] int32, the blocks of each sequence in order. Entries past the context
        may be anything.
      context_lens: [B] int32, tokens of each sequence, at most M * S; 0 gives a row of zeros.
      layer: which layer of the pools; pass an int32 array to share one lowering among layers.
      sm_scale: factor on the scores; None is h ** -0.5.
      sliding_window: how many latest tokens a query sees; None is all.
      implementation: "auto", "mosaic_gpu", "xla" or "reference".

    Returns:
      [B, H, h] of q's dtype; the softmax is in float32.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      NotImplementedError: the named implementation cannot do this case.
    """
    _check(q, k_cache, v_cache, block_tables, context_lens, sliding_window)
    if q.shape[0] != context_lens.shape[0]:
        raise ValueError(f"{q.shape[0]} queries for {context_lens.shape[0]} sequences")
    return dispatch(
        implementation,
        _DECODE,
        _AUTO_ORDER,
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        layer_index(layer, k_cache.shape[0]),
        sm_scale=_scale(q, sm_scale),
        sliding_window=sliding_window,
    )


def paged_attention_prefill(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    *,
    layer: int | jax.Array,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention of packed new tokens over their sequences' paged contexts.

    Args:
      q: [T, H, h]; sequence b owns the rows cu_seqlens_q[b] : cu_seqlens_q[b + 1], which are the
        last of its context_lens[b] tokens. Their K and V are in the cache already.
      cu_seqlens_q: [B + 1] int32, ascending.
      The rest is as in `paged_attention_decode`.

    Returns:
      [T, H, h] of q's dtype. Rows that no sequence owns are unspecified.

    Raises:
      ValueError, NotImplementedError: as in `paged_attention_decode`.
    """
    _check(q, k_cache, v_cache, block_tables, context_lens, sliding_window)
    if cu_seqlens_q.shape != (context_lens.shape[0] + 1,):
        raise ValueError(
            f"cu_seqlens_q must have shape {(context_lens.shape[0] + 1,)}, one more than "
            f"context_lens, not {cu_seqlens_q.shape}"
        )
    if cu_seqlens_q.dtype != jnp.int32:
        raise ValueError(f"cu_seqlens_q must be int32, not {cu_seqlens_q.dtype}")
    return dispatch(
        implementation,
        _PREFILL,
        _AUTO_ORDER,
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        layer_index(layer, k_cache.shape[0]),
        sm_scale=_scale(q, sm_scale),
        sliding_window=sliding_window,
    )


def _scale(q: jax.Array, sm_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)


def _check(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    sliding_window: int | None,
) -> None:
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, heads, head_dim], not {q.shape}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must be floating point, not {q.dtype}")
    check_caches(k_cache, v_cache)
    if q.shape[2] != k_cache.shape[4]:
        raise ValueError(f"head_dim of q is {q.shape[2]}, that of the cache {k_cache.shape[4]}")
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"{q.shape[1]} query heads are not a multiple of {k_cache.shape[2]} kv heads"
        )
    if block_tables.ndim != 2 or context_lens.shape != block_tables.shape[:1]:
        raise ValueError(
            "block_tables must be [B, M] and context_lens [B], not "
            f"{block_tables.shape} and {context_lens.shape}"
        )
    if block_tables.dtype != jnp.int32 or context_lens.dtype != jnp.int32:
        raise ValueError(
            "block_tables and context_lens must be int32, not "
            f"{block_tables.dtype} and {context_lens.dtype}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, not {sliding_window}")
