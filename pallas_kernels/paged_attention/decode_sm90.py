"""Paged decode attention for Hopper in Pallas:Mosaic GPU (flash decoding).

Owns the decode kernel, its configuration heuristic and the merge of its KV splits.

The idea: one query token a sequence gives a matmul of only G = H / K rows a kv head, and wgmma
wants 64 rows. So both products are computed transposed, where KV tokens or head_dim fill the 64
rows of M and the group, padded to 8, is N:
    S^T [tokens, 8]  = K   [tokens, h] @ Q^T [h, 8]       A = K from shared memory
    O^T [h, 8]      += V^T [h, tokens] @ P^T [tokens, 8]  A = V^T from shared memory
Nothing is wasted but the padding of N. A producer warp walks the block table and keeps `stages`
tiles of K and V in flight by TMA (one contiguous box a block and kv head); one warpgroup
computes. The bound is the read of the context's K and V once.

The group is padded to 8 query heads outside the kernel. Inside would be cheaper (the pad costs
36-103 us a step of 28 layers), but layout inference finds no layout for a Q tile in shared memory
that is filled in part or from an offset that is not a multiple of 8.

What was tried (one H200, share of a read-only reduction's bandwidth, H = 32, K = 8, h = 128):
- XLA gather + einsum                                  0.29 at B = 64, context 2048
- Pallas Triton kernel of jax (deprecated)             0.48 the same
- this kernel with 2 splits / 1 split                  0.85 / 0.94 the same
- this kernel, 1 split                                 0.97-0.98 at B = 256, context 2048-8192
- the same, timed within one program                   0.95 at B = 64 and 1.01 at B = 256, context
                                                       2048; 0.51 at B = 8 (docs/performance.md)
- block sizes 16, 32, 64, 128                          within 3 % of each other at B = 64
- e4m3 caches                                          only 1.26x faster than bf16: converting
  tiles through shared memory is the bottleneck, so they are left out.
(FlashAttention-3 on the same machine: 0.93 at B = 64 and 1.00 at B = 256, context 2048.)
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_MASKED = -1e30
_N = 8  # wgmma's smallest N: query heads a step
_LOG2E = math.log2(math.e)
# jax 0.12 searches for ever for a layout of a tile of which only some rows are copied out.
_WHOLE_TILES = jax.__version_info__ >= (0, 12)
_NUM_SMS = 132
_CTAS_PER_SM = 2  # what the shared memory of three stages leaves room for


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """tile: KV tokens a pipeline step (64 or 128); stages: steps in flight;
    num_splits: parts into which every context is cut, each computed by its own CTA."""

    tile: int
    stages: int
    num_splits: int


def default_config(
    batch_size: int, num_kv_heads: int, head_dim: int, capacity: int
) -> DecodeConfig:
    """The configuration for B sequences with block tables of `capacity` tokens.

    Contexts are split only while there are too few (sequence, kv head) pairs to give every SM
    its two CTAs, and never below 256 tokens a split. With enough pairs one split is best: at
    B = 64, K = 8 two splits lost 8 %.
    """
    num_splits = 1
    while (
        batch_size * num_kv_heads * num_splits < _NUM_SMS * _CTAS_PER_SM
        and capacity // (2 * num_splits) >= 256
        and num_splits < 64
    ):
        num_splits *= 2
    # A tile of 16 KB of K: the same bytes in flight for either head_dim.
    return DecodeConfig(tile=64 if head_dim == 128 else 128, stages=3, num_splits=num_splits)


def check_supported(q: jax.Array, k_cache: jax.Array, config: DecodeConfig | None = None) -> None:
    """Raises NotImplementedError, naming the value, for what this kernel cannot do."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[2:4]
    if k_cache.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k_cache.dtype:
        raise NotImplementedError(
            f"mosaic_gpu decode needs q and cache both bfloat16 or both float16, "
            f"not {q.dtype} and {k_cache.dtype}"
        )
    if head_dim not in (64, 128):
        raise NotImplementedError(f"mosaic_gpu decode needs head_dim 64 or 128, not {head_dim}")
    if num_heads // num_kv_heads > _N:
        raise NotImplementedError(
            f"mosaic_gpu decode needs at most {_N} query heads a kv head, "
            f"not {num_heads} / {num_kv_heads}"
        )
    if block_size not in (16, 32, 64, 128):
        raise NotImplementedError(
            f"mosaic_gpu decode needs a block size of 16, 32, 64 or 128, not {block_size}"
        )
    if config is not None and (config.tile not in (64, 128) or config.num_splits < 1):
        raise NotImplementedError(f"mosaic_gpu decode cannot run {config}")


def _kernel(
    q_ref: Any,  # [B, K, 8, h]
    k_ref: Any,  # [L, N, K, S, h]
    v_ref: Any,
    block_tables_ref: Any,  # [B, M]
    context_lens_ref: Any,  # [B]
    layer_ref: Any,  # [1]
    *refs: Any,
    config: DecodeConfig,
    sm_scale: float,
    sliding_window: int | None,
):
    tile, stages, num_splits = config.tile, config.stages, config.num_splits
    if num_splits == 1:
        (out_ref, q_smem, k_smem, v_smem, p_smem, q_bar, k_bar, v_bar, free_bar, out_smem) = refs
    else:
        (out_ref, max_ref, sum_ref, *scratch) = refs
        (q_smem, k_smem, v_smem, p_smem, q_bar, k_bar, v_bar, free_bar) = scratch
    head_dim, dtype, block_size = q_ref.shape[3], q_ref.dtype, k_ref.shape[3]
    b, split, kv_head = lax.axis_index("b"), lax.axis_index("split"), lax.axis_index("kv_head")
    layer = layer_ref[0]
    context_len = context_lens_ref[b]

    # This CTA's KV tiles: begin : begin + num_tiles.
    window_start = 0 if sliding_window is None else jnp.maximum(context_len - sliding_window, 0)
    first_tile = lax.div(window_start, tile) if sliding_window is not None else 0
    end_tile = lax.div(context_len + (tile - 1), tile)
    tiles_per_split = lax.div(end_tile - first_tile + (num_splits - 1), num_splits)
    begin = first_tile + split * tiles_per_split
    num_tiles = jnp.maximum(jnp.minimum(begin + tiles_per_split, end_tile) - begin, 0)
    last_block = jnp.maximum(lax.div(context_len + (block_size - 1), block_size) - 1, 0)

    def fetch(i, slot):
        """Issues the copies of KV tile begin + i into pipeline slot `slot`."""
        # Blocks past the context are replaced by its last one: that copy hits L2, the barrier's
        # byte count stays static, and no table entry or block outside the context is read.
        if block_size >= tile:
            tiles_per_block = block_size // tile
            index = lax.div(begin + i, tiles_per_block)
            block = block_tables_ref[b, jnp.minimum(index, last_block)]
            rows = pl.ds(lax.rem(begin + i, tiles_per_block) * tile, tile)
            for gmem, smem, bar in ((k_ref, k_smem, k_bar), (v_ref, v_smem, v_bar)):
                source = gmem.at[layer, block, kv_head, rows]
                plgpu.copy_gmem_to_smem(source, smem.at[slot], bar.at[slot])
            return
        blocks_per_tile = tile // block_size
        first = (begin + i) * blocks_per_tile
        blocks = [
            block_tables_ref[b, jnp.minimum(first + j, last_block)] for j in range(blocks_per_tile)
        ]
        for gmem, smem, bar in ((k_ref, k_smem, k_bar), (v_ref, v_smem, v_bar)):
            for j, block in enumerate(blocks):
                rows = slice(j * block_size, (j + 1) * block_size)
                source = gmem.at[layer, block, kv_head]
                plgpu.copy_gmem_to_smem(source, smem.at[slot, rows], bar.at[slot])

    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 1)
    def _produce():
        @plgpu.warp_map
        def _per_warp(warp):
            @pl.when(warp == 0)
            def _():
                def body(i, _):
                    slot = lax.rem(i, stages)

                    @pl.when(i >= stages)
                    def _():
                        plgpu.barrier_wait(free_bar.at[slot])

                    fetch(i, slot)
                    return ()

                lax.fori_loop(0, num_tiles, body, ())

    @pl.when(warpgroup == 0)
    def _compute():
        wgmma = plgpu.Layout.WGMMA
        plgpu.copy_gmem_to_smem(q_ref.at[b, kv_head], q_smem, q_bar)
        plgpu.barrier_wait(q_bar)

        def step(i, carry):
            out, running_max, total = carry
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(k_bar.at[slot])

            def scores_of(acc):
                plgpu.wgmma(acc, k_smem.at[slot], q_smem.T)
                return acc[...]

            scores = pl.run_scoped(scores_of, _ACC((tile, _N), jnp.float32))
            token = plgpu.broadcasted_iota(jnp.int32, (tile, _N), 0, layout=wgmma)
            tile_start = (begin + i) * tile
            # exp2 of scores in units of log2: one multiply saved for every exponential.
            scores = scores * (sm_scale * _LOG2E)
            scores = jnp.where(token < context_len - tile_start, scores, _MASKED)
            if sliding_window is not None:
                scores = jnp.where(token >= window_start - tile_start, scores, _MASKED)
            new_max = jnp.maximum(running_max, scores.max(axis=0))
            rescale = jnp.exp2(running_max - new_max)
            probs = jnp.exp2(scores - lax.broadcast_in_dim(new_max, (tile, _N), [1]))
            # The sums stay spread over the tokens and are reduced once, after the loop.
            total = total * lax.broadcast_in_dim(rescale, (tile, _N), [1]) + probs
            p_smem.T[...] = probs.astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(v_bar.at[slot])

            def values_of(acc):
                plgpu.wgmma(acc, v_smem.at[slot].T, p_smem.T)
                return acc[...]

            values = pl.run_scoped(values_of, _ACC((head_dim, _N), jnp.float32))
            out = out * lax.broadcast_in_dim(rescale, (head_dim, _N), [1]) + values

            # Arrive only if the producer will wait: interpret mode wants every phase observed.
            @pl.when(i + stages < num_tiles)
            def _release():
                plgpu.barrier_arrive(free_bar.at[slot])

            return out, new_max, total

        zeros = plgpu.layout_cast(jnp.zeros((head_dim, _N), jnp.float32), wgmma)
        total = plgpu.layout_cast(jnp.zeros((tile, _N), jnp.float32), wgmma)
        minimum = plgpu.layout_cast(jnp.full((_N,), _MASKED, jnp.float32), wgmma.reduce(0))
        out, running_max, total = lax.fori_loop(0, num_tiles, step, (zeros, minimum, total))
        total = total.sum(axis=0)
        if num_splits == 1:
            total = jnp.where(total == 0.0, 1.0, total)
            out = out / lax.broadcast_in_dim(total, (head_dim, _N), [1])
            out_smem.T[...] = out.astype(dtype)
            plgpu.commit_smem()
            rows = out_ref.shape[2]
            plgpu.copy_smem_to_gmem(out_smem.at[:rows], out_ref.at[b, kv_head])
            plgpu.wait_smem_to_gmem(0)
        else:
            # Float32 O^T goes from registers to device memory in rows of 8 floats: layout
            # inference rejects a transposed float32 store to shared memory.
            _store(out_ref.at[b, kv_head, split], out)
            _store(max_ref.at[b, kv_head, split], running_max)
            _store(sum_ref.at[b, kv_head, split], total)


def _store(ref: Any, value: jax.Array) -> None:
    """Stores rows shorter than a cache line, which jax 0.12 refuses unless told it is meant."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:  # jax 0.11
        ref[...] = value


def _merge_splits(
    out: jax.Array, running_max: jax.Array, total: jax.Array, num_heads: int
) -> jax.Array:
    """out [B, K, splits, h, 8] not normalised, running_max (in log2) and total [B, K, splits, 8],
    all float32 -> [B, H, h] float32."""
    batch_size, num_kv_heads, _, head_dim, _ = out.shape
    weight = jnp.exp2(running_max - running_max.max(axis=2, keepdims=True))
    total = (total * weight).sum(axis=2)  # [B, K, 8]
    out = (out * weight[:, :, :, None, :]).sum(axis=2)  # [B, K, h, 8]
    out = out / jnp.where(total == 0.0, 1.0, total)[:, :, None, :]
    out = out[..., : num_heads // num_kv_heads]
    return jnp.swapaxes(out, -1, -2).reshape(batch_size, num_heads, head_dim)


@functools.partial(jax.jit, static_argnames=("sm_scale", "sliding_window", "config", "interpret"))
def _decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    layer: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None,
    config: DecodeConfig,
    interpret: Any = None,
) -> jax.Array:
    batch_size, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[2:4]
    tile, num_splits, dtype = config.tile, config.num_splits, q.dtype
    group = num_heads // num_kv_heads
    if num_splits == 1:
        rows = _N if _WHOLE_TILES else group
        out_type = [jax.ShapeDtypeStruct((batch_size, num_kv_heads, rows, head_dim), dtype)]
    else:
        splits = (batch_size, num_kv_heads, num_splits)
        out_type = [
            jax.ShapeDtypeStruct((*splits, head_dim, _N), jnp.float32),
            jax.ShapeDtypeStruct((*splits, _N), jnp.float32),
            jax.ShapeDtypeStruct((*splits, _N), jnp.float32),
        ]
    copies = max(1, tile // block_size)
    kv_barrier = plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages)
    scratch_types = [
        plgpu.SMEM((_N, head_dim), dtype),
        plgpu.SMEM((config.stages, tile, head_dim), dtype),
        plgpu.SMEM((config.stages, tile, head_dim), dtype),
        plgpu.SMEM((_N, tile), dtype),
        plgpu.Barrier(),
        kv_barrier,
        kv_barrier,
        plgpu.Barrier(num_barriers=config.stages),
        *([plgpu.SMEM((_N, head_dim), dtype)] if num_splits == 1 else []),
    ]
    q = q.reshape(batch_size, num_kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, _N - group), (0, 0)))
    outputs = plgpu.kernel(
        functools.partial(
            _kernel,
            config=config,
            sm_scale=sm_scale,
            sliding_window=sliding_window,
        ),
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(batch_size, num_splits, num_kv_heads),
        grid_names=("b", "split", "kv_head"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention_decode",
        interpret=interpret,
    )(q, k_cache, v_cache, block_tables, context_lens, layer.reshape(1))
    if num_splits == 1:
        return outputs[0][:, :, :group].reshape(batch_size, num_heads, head_dim)
    return _merge_splits(*outputs, num_heads=num_heads).astype(dtype)


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
    config: DecodeConfig | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `paged_attention_decode`.

    V in the slots of a context's last block beyond the context must be finite (it is multiplied
    by probability zero). Blocks outside the context are not read.

    Raises:
      NotImplementedError: see `check_supported`.
    """
    check_supported(q, k_cache, config)
    if config is None:
        capacity = block_tables.shape[1] * k_cache.shape[3]
        config = default_config(q.shape[0], k_cache.shape[2], q.shape[2], capacity)
    return _decode(
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        layer,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        config=config,
        interpret=interpret,
    )
