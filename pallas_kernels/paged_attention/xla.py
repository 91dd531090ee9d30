"""Paged attention for XLA: any backend, dtype and shape.

Owns one function for decode and prefill. Queries come as tiles [n, R, H, h], each tile within
one sequence: R = 1 for decode, up to 64 for prefill. All tiles walk the context together, one
chunk of KV tokens at a time, with an online softmax in float32. The walk starts and ends where
the tiles need it (a dynamic bound), so the cost follows the longest context and not the width
of the block table. A chunk in which a tile sees nothing leaves that tile's state bit for bit as
it was, so a row's result does not depend on its neighbours' lengths.

What keeps it cheap:
- K and V are gathered by (layer, block, kv head), so that no layer is sliced out of the pool
  and the chunk arrives as [n, K, tokens, h], ready for a batched matmul without a transpose.
  Three small indices also never overflow int32, whatever the size of the pool.
- The group of query heads that shares a kv head is folded into the rows: K and V are never
  repeated.
- V is zeroed, and not only given probability zero, where a tile sees nothing: 0 * NaN is NaN,
  and blocks outside the context may hold anything.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.tiles import max_tiles, query_tiles, sequence_of

_MASKED = -1e30  # a finite "minus infinity": exp(_MASKED - _MASKED) is 1, never NaN
# A decode row has little work a chunk, so its chunks are long; a prefill tile's are bounded by
# the float32 scores, [tiles, H, rows, chunk].
_DECODE_CHUNK = 256
_PREFILL_CHUNK = 128
_MAX_PREFILL_ROWS = 64


def _attend_tiles(
    q: jax.Array,
    positions: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    layer: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None,
    chunk: int,
) -> jax.Array:
    """q [n, R, H, h], positions [n, R] int32 (-1: not a query), block_tables [n, M] ->
    [n, R, H, h] float32. The positions of a tile ascend from row 0, then may be -1."""
    n, rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[2:4]
    group = num_heads // num_kv_heads
    chunk_blocks = max(1, chunk // block_size)
    chunk = chunk_blocks * block_size
    matmul_dtype = jnp.promote_types(q.dtype, k_cache.dtype)

    q = q.reshape(n, rows, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(n, num_kv_heads, group * rows, head_dim).astype(matmul_dtype)
    row_positions = jnp.tile(positions, (1, group))[:, :, None]  # [n, G * R, 1]
    block_tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % chunk_blocks)))
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]

    # Tokens that some row of the tile sees: first <= token < end.
    end = positions.max(axis=1) + 1  # [n]
    first = jnp.zeros_like(end)
    if sliding_window is not None:
        first = jnp.maximum(positions[:, 0] - sliding_window + 1, 0)
    first_chunk = jnp.min(jnp.where(end > 0, first, jnp.max(end))) // chunk
    end_chunk = (jnp.max(end) + (chunk - 1)) // chunk

    def load(cache, blocks):  # -> [n, K, chunk, h]
        x = cache.at[layer, blocks[:, None, :], heads].get(mode="clip")
        return x.reshape(n, num_kv_heads, chunk, head_dim)

    def step(i, carry):
        running_max, total, out = carry
        blocks = lax.dynamic_slice_in_dim(block_tables, i * chunk_blocks, chunk_blocks, axis=1)
        token = i * chunk + jnp.arange(chunk, dtype=jnp.int32)[None, :]
        seen = (token >= first[:, None]) & (token < end[:, None])  # [n, chunk]
        k = load(k_cache, blocks).astype(matmul_dtype)
        v = jnp.where(seen[:, None, :, None], load(v_cache, blocks), 0).astype(matmul_dtype)
        visible = token[:, None, :] <= row_positions  # [n, G * R, chunk]
        if sliding_window is not None:
            visible &= token[:, None, :] > row_positions - sliding_window
        visible = visible[:, None]
        scores = jnp.einsum("nkrh,nkch->nkrc", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores * sm_scale, _MASKED)
        new_max = jnp.maximum(running_max, scores.max(axis=-1, keepdims=True))
        probs = jnp.where(visible, jnp.exp(scores - new_max), 0.0)
        rescale = jnp.exp(running_max - new_max)
        total = total * rescale + probs.sum(axis=-1, keepdims=True)
        out = out * rescale + jnp.einsum(
            "nkrc,nkch->nkrh", probs.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return new_max, total, out

    zeros = jnp.zeros((n, num_kv_heads, group * rows, 1), jnp.float32)
    init = (zeros + _MASKED, zeros, jnp.zeros(q.shape, jnp.float32))
    _, total, out = lax.fori_loop(first_chunk, end_chunk, step, init)
    out = out / jnp.where(total == 0.0, 1.0, total)
    out = out.reshape(n, num_kv_heads, group, rows, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(n, rows, num_heads, head_dim)


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
    out = _attend_tiles(
        q[:, None],
        context_lens[:, None] - 1,
        k_cache,
        v_cache,
        block_tables,
        layer,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        chunk=_DECODE_CHUNK,
    )
    return out[:, 0].astype(q.dtype)


def prefill_rows(num_tokens: int, num_seqs: int) -> int:
    """Rows of a query tile: a power of two in 8..64, near the mean number of new tokens, so that
    the rows that ragged ends leave empty are at most about as many as the tokens."""
    rows = _MAX_PREFILL_ROWS
    while rows > 8 and rows * num_seqs > num_tokens:
        rows //= 2
    return rows


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
    num_tokens, num_seqs = q.shape[0], context_lens.shape[0]
    rows = prefill_rows(num_tokens, num_seqs)
    num_tiles = max_tiles(num_tokens, num_seqs, rows)
    seq, offset, cu_tiles = query_tiles(cu_seqlens_q, num_tiles, rows)

    row = offset[:, None] + jnp.arange(rows, dtype=jnp.int32)  # [n, R] within the sequence
    query_lens = jnp.diff(cu_seqlens_q)
    before = context_lens - query_lens  # tokens in the cache ahead of the new ones
    live = row < query_lens[seq][:, None]
    positions = jnp.where(live, before[seq][:, None] + row, -1)
    packed_row = jnp.minimum(cu_seqlens_q[seq][:, None] + row, num_tokens - 1)
    out = _attend_tiles(
        q[packed_row],
        positions,
        k_cache,
        v_cache,
        block_tables[seq],
        layer,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        chunk=_PREFILL_CHUNK,
    )

    # Back to packed rows, as a gather: every packed row knows its tile and its row there.
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    token_seq = sequence_of(cu_seqlens_q, token)
    in_seq = token - cu_seqlens_q[token_seq]
    tile_row = cu_tiles[token_seq] * rows + in_seq
    owned = (token >= cu_seqlens_q[0]) & (token < cu_seqlens_q[-1])
    out = out.reshape(num_tiles * rows, *q.shape[1:]).at[tile_row].get(mode="clip")
    return jnp.where(owned[:, None, None], out, 0.0).astype(q.dtype)
