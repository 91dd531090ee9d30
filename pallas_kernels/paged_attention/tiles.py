"""Cutting packed, ragged queries into tiles of equal height, each within one sequence.

Pure index arithmetic, shared by the XLA and the Mosaic GPU prefill.
"""

import jax
import jax.numpy as jnp


def max_tiles(num_tokens: int, num_seqs: int, rows: int) -> int:
    """The most tiles of `rows` rows that `num_seqs` sequences with `num_tokens` tokens need."""
    return (num_tokens + num_seqs * (rows - 1)) // rows


def sequence_of(cu_lens: jax.Array, indices: jax.Array) -> jax.Array:
    """For each index, the sequence b with cu_lens[b] <= index < cu_lens[b + 1] (the last if none).

    cu_lens [B + 1] ascending, indices [n] -> [n] int32. Compares all pairs: searchsorted's
    default would be a loop on the device, which costs more than these few thousand comparisons.
    """
    seq = jnp.sum(indices[:, None] >= cu_lens[None, 1:], axis=1, dtype=jnp.int32)
    return jnp.minimum(seq, cu_lens.shape[0] - 2)


def query_tiles(
    cu_seqlens_q: jax.Array, num_tiles: int, rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tiles of `rows` rows: (seq [num_tiles], offset [num_tiles], cu_tiles [B + 1]), all int32.

    Tile t holds the new tokens offset[t] : offset[t] + rows of sequence seq[t]; sequence b owns
    the tiles cu_tiles[b] : cu_tiles[b + 1]. Tiles past the last have an offset beyond the end of
    their sequence, so no row of theirs is live.
    """
    query_lens = jnp.diff(cu_seqlens_q)
    tiles_per_seq = (query_lens + (rows - 1)) // rows
    cu_tiles = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(tiles_per_seq)])
    cu_tiles = cu_tiles.astype(jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    seq = sequence_of(cu_tiles, tile)
    return seq, (tile - cu_tiles[seq]) * rows, cu_tiles
