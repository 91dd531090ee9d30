"""The KV cache update for Hopper in Pallas:Mosaic GPU: TMA takes new rows to their slots.

What was tried (one H200, us a layer): XLA's scatter 12.6-15 and this kernel 20-23 for up to 256
tokens; 26.0 and 24.4 for 8,192. Both are bound by their launch and not by bytes, so "auto" takes
XLA's; the way to win is to join the update with what comes before it.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def check_supported(k_cache: jax.Array) -> None:
    """Raises NotImplementedError, naming the value, for what this kernel cannot do."""
    row_bytes = k_cache.shape[4] * k_cache.dtype.itemsize
    if row_bytes % 16:
        raise NotImplementedError(
            f"mosaic_gpu update copies rows of a multiple of 16 bytes, not {row_bytes}"
        )
    if k_cache.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"mosaic_gpu update needs a bfloat16 or float16 cache, not {k_cache.dtype}"
        )


def _kernel(
    k_ref: Any,  # [T, K, h]
    v_ref: Any,
    slots_ref: Any,  # [T]
    layer_ref: Any,  # [1]
    k_cache_ref: Any,  # [L, N, K, S, h], written
    v_cache_ref: Any,
    k_smem: Any,
    v_smem: Any,
    k_bar: Any,
    v_bar: Any,
    *,
    tokens: int,
):
    num_tokens, block_size = k_ref.shape[0], k_cache_ref.shape[3]
    first = lax.axis_index("t") * tokens
    layer = layer_ref[0]
    plgpu.copy_gmem_to_smem(k_ref.at[pl.ds(first, tokens)], k_smem, k_bar)
    plgpu.copy_gmem_to_smem(v_ref.at[pl.ds(first, tokens)], v_smem, v_bar)
    slots = [slots_ref[jnp.minimum(first + i, num_tokens - 1)] for i in range(tokens)]
    for smem, bar, cache in ((k_smem, k_bar, k_cache_ref), (v_smem, v_bar, v_cache_ref)):
        plgpu.barrier_wait(bar)
        for i, slot in enumerate(slots):
            live = slot >= 0
            if num_tokens % tokens:
                live = jnp.logical_and(live, first + i < num_tokens)

            @pl.when(live)
            def _(smem=smem, cache=cache, slot=slot, i=i):
                block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)
                plgpu.copy_smem_to_gmem(smem.at[i], cache.at[layer, block, :, offset])

    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("interpret",))
def _update(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    num_tokens, num_kv_heads, head_dim = k.shape
    tokens = 1 if num_tokens <= 512 else 8  # enough CTAs to fill 132 SMs before longer ones
    dtype = k_cache.dtype
    # References are how a kernel writes in place: donated caches become aliased operands.
    k_cache_ref, v_cache_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    rows = plgpu.SMEM((tokens, num_kv_heads, head_dim), dtype)
    plgpu.kernel(
        functools.partial(_kernel, tokens=tokens),
        out_type=(),
        scratch_types=[rows, rows, plgpu.Barrier(), plgpu.Barrier()],
        grid=(pl.cdiv(num_tokens, tokens),),
        grid_names=("t",),
        kernel_name="kv_cache_update",
        interpret=interpret,
    )(k.astype(dtype), v.astype(dtype), slot_mapping, layer.reshape(1), k_cache_ref, v_cache_ref)
    return jax.freeze(k_cache_ref), jax.freeze(v_cache_ref)


def update(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `store_kv_cache`.

    Raises:
      NotImplementedError: see `check_supported`.
    """
    check_supported(k_cache)
    return _update(k_cache, v_cache, k, v, slot_mapping, layer, interpret=interpret)
