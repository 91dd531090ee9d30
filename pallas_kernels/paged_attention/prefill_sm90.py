"""Ragged, paged, chunked causal prefill for Hopper in Pallas:Mosaic GPU.

Owns the prefill kernel. The shape of FlashAttention-3 without its ping-pong: two warpgroups of 64
query rows each share every KV tile, and a producer warp walks the block table by TMA. A tile of 128
rows lies within one sequence (tiles.query_tiles); the latest tiles, which see the most, run first.
K and V of the new tokens are already in the cache, so a chunk and a cached prefix look the same.

The bound is the arithmetic: 4 * h operations for each query head and visible (query, key) pair.

What was tried (H200, H = 16, K = 8, h = 128, bfloat16; TFLOP/s for 1 x 4096 new tokens, 2 x 2048 on
prefixes of 2048, and 8 x 512):
- a prototype, timed by single dispatches                 368, 392, 58
- this kernel, timed within one program                   448, 484, 161 (docs/performance.md)
- cuDNN, dense and causal, single dispatches              411 at 1 x 4096
(FlashAttention-3 on such a machine, not paged: 591 at 1 x 4096, 212 at 8 x 512.)
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.tiles import max_tiles, query_tiles

_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_MASKED = -1e30
_LOG2E = math.log2(math.e)
_ROWS = 64  # query rows of a warpgroup: wgmma's M
_WARPGROUPS = 2  # that compute; one more produces
_STAGES = 2  # KV tiles in flight: more do not fit beside Q at h = 128


def check_supported(q: jax.Array, k_cache: jax.Array, sliding_window: int | None = None) -> None:
    """Raises NotImplementedError, naming the value, for what this kernel cannot do."""
    head_dim, block_size = q.shape[2], k_cache.shape[3]
    if k_cache.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k_cache.dtype:
        raise NotImplementedError(
            f"mosaic_gpu prefill needs q and cache both bfloat16 or both float16, "
            f"not {q.dtype} and {k_cache.dtype}"
        )
    if head_dim not in (64, 128):
        raise NotImplementedError(f"mosaic_gpu prefill needs head_dim 64 or 128, not {head_dim}")
    if block_size not in (16, 32, 64, 128):
        raise NotImplementedError(
            f"mosaic_gpu prefill needs a block size of 16, 32, 64 or 128, not {block_size}"
        )
    if sliding_window is not None:
        raise NotImplementedError(
            f"mosaic_gpu prefill has no sliding window, and {sliding_window} was asked for"
        )


def _kernel(
    q_ref: Any,  # [T + 64, H, h]
    k_ref: Any,  # [L, N, K, S, h]
    v_ref: Any,
    block_tables_ref: Any,  # [B, M]
    context_lens_ref: Any,  # [B]
    cu_seqlens_q_ref: Any,  # [B + 1]
    seq_ref: Any,  # [tiles]: the sequence of each query tile
    offset_ref: Any,  # [tiles]: its first row within the sequence's new tokens
    layer_ref: Any,  # [1]
    out_ref: Any,  # [T, H, h]
    q_smem: Any,
    k_smem: Any,
    v_smem: Any,
    out_smem: Any,
    k_bar: Any,
    v_bar: Any,
    k_free: Any,
    v_free: Any,
    p_smem: Any = None,
    *,
    tile: int,
    group: int,
    sm_scale: float,
):
    dtype, block_size = q_ref.dtype, k_ref.shape[3]
    head, warpgroup = lax.axis_index("head"), lax.axis_index("warpgroup")
    index = seq_ref.shape[0] - 1 - lax.axis_index("tile")  # the longest tiles first
    seq, offset = seq_ref[index], offset_ref[index]
    first_row, context_len = cu_seqlens_q_ref[seq], context_lens_ref[seq]
    query_len = cu_seqlens_q_ref[seq + 1] - first_row
    rows = jnp.minimum(query_len - offset, _ROWS * _WARPGROUPS)  # live rows of this tile
    position = context_len - query_len + offset  # of row 0
    live = rows > 0
    num_kv_tiles = jnp.where(live, lax.div(position + rows + (tile - 1), tile), 0)
    num_unmasked = jnp.where(live, lax.div(position + 1, tile), 0)  # all rows see all of these
    layer, kv_head = layer_ref[0], lax.div(head, group)

    @pl.when(warpgroup < _WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        mine = warpgroup * _ROWS

        @pl.when(mine < rows)
        def _load_q():  # through registers: TMA would want aligned rows
            source = q_ref.at[pl.ds(first_row + offset + mine, _ROWS), head]
            layout = plgpu.Layout.WGMMA
            q_smem.at[warpgroup][...] = plgpu.load(source, layout=layout, optimized=False)

        plgpu.commit_smem()
        out = _attend(
            warpgroup, mine, position, num_unmasked, num_kv_tiles,
            q_smem, k_smem, v_smem, p_smem, k_bar, v_bar, k_free, v_free,
            tile=tile, dtype=dtype, sm_scale=sm_scale,
        )  # fmt: skip
        out_smem.at[warpgroup][...] = out.astype(dtype)
        plgpu.commit_smem()
        row = first_row + offset + mine

        @pl.when(rows - mine >= _ROWS)
        def _store_all():
            plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_ref.at[pl.ds(row, _ROWS), head])

        @pl.when(rows - mine < _ROWS)
        def _store_some():  # the rows behind belong to the next sequence
            @pl.loop(0, jnp.maximum(rows - mine, 0))
            def _(r):
                target = out_ref.at[pl.ds(row + r, 1), head]
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, pl.ds(r, 1)], target)

        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _WARPGROUPS)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")
        last_block = jnp.maximum(lax.div(context_len + (block_size - 1), block_size) - 1, 0)

        def blocks_of(i):
            """[(cache index, rows of the tile)] that make KV tile i; none past the context."""
            table = lambda j: block_tables_ref[seq, jnp.minimum(j, last_block)]
            if block_size >= tile:
                per_block = block_size // tile
                part = pl.ds(lax.rem(i, per_block) * tile, tile)
                return [((layer, table(lax.div(i, per_block)), kv_head, part), slice(0, tile))]
            count = tile // block_size
            blocks = [table(i * count + j) for j in range(count)]
            return [
                ((layer, block, kv_head), slice(j * block_size, (j + 1) * block_size))
                for j, block in enumerate(blocks)
            ]

        @plgpu.warp_map
        def _per_warp(warp):
            @pl.when(warp == 0)
            def _():
                def body(i, _):
                    slot = lax.rem(i, _STAGES)
                    parts = blocks_of(i)
                    for gmem, smem, full, free in (
                        (k_ref, k_smem, k_bar, k_free),
                        (v_ref, v_smem, v_bar, v_free),
                    ):

                        @pl.when(i >= _STAGES)
                        def _(free=free):
                            plgpu.barrier_wait(free.at[slot])

                        for source, target in parts:
                            plgpu.copy_gmem_to_smem(
                                gmem.at[source], smem.at[slot, target], full.at[slot]
                            )
                    return ()

                lax.fori_loop(0, num_kv_tiles, body, ())


def _attend(
    warpgroup: Any, mine: Any, position: Any, num_unmasked: Any, num_kv_tiles: Any,
    q_smem: Any, k_smem: Any, v_smem: Any, p_smem: Any, k_bar: Any, v_bar: Any, k_free: Any,
    v_free: Any, *, tile: int, dtype: Any, sm_scale: float,
) -> jax.Array:  # fmt: skip
    """Online softmax of one warpgroup's 64 rows over the KV tiles -> [64, h] float32."""
    head_dim, wgmma = q_smem.shape[-1], plgpu.Layout.WGMMA
    out = plgpu.layout_cast(jnp.zeros((_ROWS, head_dim), jnp.float32), wgmma)
    running_max = plgpu.layout_cast(jnp.full((_ROWS,), _MASKED, jnp.float32), wgmma.reduce(1))
    total = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), wgmma.reduce(1))

    def step(i, carry, masked):
        out, running_max, total = carry
        slot = lax.rem(i, _STAGES)
        plgpu.barrier_wait(k_bar.at[slot])

        def scores_of(acc):
            plgpu.wgmma(acc, q_smem.at[warpgroup], k_smem.at[slot].T)
            return acc[...]

        scores = pl.run_scoped(scores_of, _ACC((_ROWS, tile), jnp.float32))

        @pl.when(i + _STAGES < num_kv_tiles)
        def _():
            plgpu.barrier_arrive(k_free.at[slot])

        scores = scores * (sm_scale * _LOG2E)  # exp2 of these needs one multiply less
        if masked:
            row = plgpu.broadcasted_iota(jnp.int32, (_ROWS, tile), 0, layout=wgmma)
            column = plgpu.broadcasted_iota(jnp.int32, (_ROWS, tile), 1, layout=wgmma)
            visible = row - column >= i * tile - (position + mine)
            scores = jnp.where(visible, scores, _MASKED)
        new_max = jnp.maximum(running_max, scores.max(axis=1))
        rescale = jnp.exp2(running_max - new_max)
        probs = jnp.exp2(scores - lax.broadcast_in_dim(new_max, (_ROWS, tile), [0]))
        total = total * rescale + probs.sum(axis=1)
        out = out * lax.broadcast_in_dim(rescale, (_ROWS, head_dim), [0])
        probs = probs.astype(dtype)
        plgpu.barrier_wait(v_bar.at[slot])
        if p_smem is None:

            def accumulate(acc):
                plgpu.wgmma(acc, probs, v_smem.at[slot])

            out = pl.run_state(accumulate)(_ACC.init(out))
        else:  # interpret mode has neither run_state nor wgmma with A in registers
            p_smem.at[warpgroup][...] = probs
            plgpu.commit_smem()

            def values_of(acc):
                plgpu.wgmma(acc, p_smem.at[warpgroup], v_smem.at[slot])
                return acc[...]

            out = out + pl.run_scoped(values_of, _ACC((_ROWS, head_dim), jnp.float32))

        @pl.when(i + _STAGES < num_kv_tiles)
        def _():
            plgpu.barrier_arrive(v_free.at[slot])

        return out, new_max, total

    carry = (out, running_max, total)
    carry = lax.fori_loop(0, num_unmasked, functools.partial(step, masked=False), carry)
    carry = lax.fori_loop(num_unmasked, num_kv_tiles, functools.partial(step, masked=True), carry)
    out, _, total = carry
    total = jnp.where(total == 0.0, 1.0, total)
    return out / lax.broadcast_in_dim(total, (_ROWS, head_dim), [0])


@functools.partial(jax.jit, static_argnames=("sm_scale", "tile", "interpret"))
def _prefill(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    layer: jax.Array,
    *,
    sm_scale: float,
    tile: int,
    interpret: Any = None,
) -> jax.Array:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[2:4]
    rows = _ROWS * _WARPGROUPS
    num_tiles = max_tiles(num_tokens, context_lens.shape[0], rows)
    seq, offset, _ = query_tiles(cu_seqlens_q, num_tiles, rows)
    copies = max(1, tile // block_size)
    barrier = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=_STAGES)
    scratch_types = [
        plgpu.SMEM((_WARPGROUPS, _ROWS, head_dim), q.dtype),
        plgpu.SMEM((_STAGES, tile, head_dim), q.dtype),
        plgpu.SMEM((_STAGES, tile, head_dim), q.dtype),
        plgpu.SMEM((_WARPGROUPS, _ROWS, head_dim), q.dtype),
        barrier(copies),
        barrier(copies),
        barrier(_WARPGROUPS),
        barrier(_WARPGROUPS),
        *([plgpu.SMEM((_WARPGROUPS, _ROWS, tile), q.dtype)] if interpret else []),
    ]
    # The last tile of the last sequence reads up to 63 rows behind it.
    q = jnp.pad(q, ((0, _ROWS), (0, 0), (0, 0)))
    return plgpu.kernel(
        functools.partial(_kernel, tile=tile, group=num_heads // num_kv_heads, sm_scale=sm_scale),
        out_type=jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), q.dtype),
        scratch_types=scratch_types,
        grid=(num_tiles, num_heads),
        grid_names=("tile", "head"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention_prefill",
        interpret=interpret,
    )(
        q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, seq, offset,
        layer.reshape(1),
    )  # fmt: skip


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
    interpret: Any = None,
) -> jax.Array:
    """See `paged_attention_prefill`.

    V in the slots of a context's last block beyond the context must be finite (it is multiplied by
    probability zero). Blocks outside the context are not read. Rows that no sequence owns are
    whatever was in memory.

    Raises:
      NotImplementedError: see `check_supported`.
    """
    check_supported(q, k_cache, sliding_window)
    return _prefill(
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        layer,
        sm_scale=sm_scale,
        tile=128,
        interpret=interpret,
    )
