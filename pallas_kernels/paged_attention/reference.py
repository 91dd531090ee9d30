"""Paged attention in plain jnp and float32: the specification of the other implementations.

Everything is gathered and masked densely, so cost and memory grow with the width of the block
table. The matrix products ask for full float32, which GPUs otherwise round to TF32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_PRECISION = lax.Precision.HIGHEST


def _gather_context(
    cache: jax.Array, block_table: jax.Array, context_len: jax.Array, layer: jax.Array
) -> jax.Array:
    """[L, N, K, S, h], [M] -> [M * S, K, h] float32; slots beyond the context are zero."""
    _, _, num_kv_heads, _, head_dim = cache.shape
    blocks = cache.at[layer, block_table].get(mode="clip")  # [M, K, S, h]
    tokens = jnp.swapaxes(blocks, 1, 2).reshape(-1, num_kv_heads, head_dim)
    in_context = jnp.arange(tokens.shape[0]) < context_len
    return jnp.where(in_context[:, None, None], tokens.astype(jnp.float32), 0.0)


def _attend(
    q: jax.Array,
    positions: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sm_scale: float,
    sliding_window: int | None,
) -> jax.Array:
    """Softmax attention of one sequence: q [n, H, h] at positions [n], k and v [C, K, h] ->
    [n, H, h] float32. A query at position -1 sees nothing and gets zero."""
    n, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q = q.astype(jnp.float32).reshape(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    token = jnp.arange(k.shape[0])
    visible = token <= positions[:, None]  # [n, C]
    if sliding_window is not None:
        visible &= token > positions[:, None] - sliding_window
    visible = visible[:, None, None, :]
    scores = jnp.einsum("nkgh,ckh->nkgc", q, k, precision=_PRECISION) * sm_scale
    scores = jnp.where(visible, scores, -1e30)
    probs = jnp.where(visible, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    total = probs.sum(axis=-1, keepdims=True)
    probs = probs / jnp.where(total == 0.0, 1.0, total)
    out = jnp.einsum("nkgc,ckh->nkgh", probs, v, precision=_PRECISION)
    return out.reshape(n, num_heads, head_dim)


@functools.partial(jax.jit, static_argnames=("sm_scale", "sliding_window"))
def decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    layer: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
) -> jax.Array:
    """See `paged_attention_decode`."""

    def one(q, block_table, context_len):
        k = _gather_context(k_cache, block_table, context_len, layer)
        v = _gather_context(v_cache, block_table, context_len, layer)
        return _attend(q[None], context_len[None] - 1, k, v, sm_scale, sliding_window)[0]

    return jax.vmap(one)(q, block_tables, context_lens).astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("sm_scale", "sliding_window"))
def prefill(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    layer: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
) -> jax.Array:
    """See `paged_attention_prefill`. Rows that no sequence owns are zero."""
    row = jnp.arange(q.shape[0], dtype=jnp.int32)

    def add_sequence(out, sequence):
        block_table, context_len, start, end = sequence
        owned = (row >= start) & (row < end)
        positions = jnp.where(owned, context_len - (end - row), -1)
        k = _gather_context(k_cache, block_table, context_len, layer)
        v = _gather_context(v_cache, block_table, context_len, layer)
        return out + _attend(q, positions, k, v, sm_scale, sliding_window), None

    sequences = (block_tables, context_lens, cu_seqlens_q[:-1], cu_seqlens_q[1:])
    out, _ = lax.scan(add_sequence, jnp.zeros(q.shape, jnp.float32), sequences)
    return out.astype(q.dtype)
