"""The size of the KV cache, and the arrays themselves."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from tinyvllm_jax.config import EngineConfig, ModelConfig
from tinyvllm_jax.engine.batch import StepShapes
from tinyvllm_jax.layers.attention import KVCache

GIB = 2**30


def block_bytes(model: ModelConfig, block_size: int, itemsize: int) -> int:
    """Bytes of one block in all layers, K and V."""
    return 2 * model.num_layers * model.num_kv_heads * block_size * model.head_dim * itemsize


def workspace_bytes(model: ModelConfig, shapes: StepShapes, itemsize: int) -> int:
    """An upper estimate of what the largest step allocates beside weights and cache."""
    widest = 2 * model.intermediate_size + 4 * model.hidden_size
    widest += 3 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    most_tokens = max(shapes.prefill[-1].num_tokens, shapes.decode[-1].num_tokens)
    most_rows = max(shapes.prefill[-1].num_seqs, shapes.decode[-1].num_seqs)
    activations = most_tokens * widest * (itemsize + 4)
    logits = 4 * most_rows * model.vocab_size * 4  # logits, noise and their sorted copies, float32
    return activations + logits


def gpu_cache_bytes(
    config: EngineConfig, *, total: int, limit: int, used_before: int, weights: int, workspace: int
) -> int:
    """Bytes for the cache on a GPU.

    Args:
      config: for gpu_memory_utilization.
      total: bytes of the device.
      limit: bytes that XLA's allocator may take.
      used_before: bytes that this process used before the engine.
      weights: bytes of the engine's weights.
      workspace: bytes to leave for a step.

    Raises:
      ValueError: nothing is left; the message has the numbers.
    """
    share = min(config.gpu_memory_utilization * total, limit - used_before)
    left = int(share) - weights - workspace
    if left <= 0:
        raise ValueError(
            f"no memory is left for the KV cache: the engine may use {share / GIB:.2f} GiB "
            f"(gpu_memory_utilization={config.gpu_memory_utilization} of {total / GIB:.2f} GiB, "
            f"{used_before / GIB:.2f} GiB used before), weights take {weights / GIB:.2f} and a "
            "step up to "
            f"{workspace / GIB:.2f} GiB; raise gpu_memory_utilization, free the device or lower "
            "max_num_batched_tokens or max_num_seqs"
        )
    return left


def cpu_cache_bytes(config: EngineConfig, block: int, available: int) -> int:
    """Bytes for the cache on a CPU: 1 GiB or a tenth of the `available` bytes, or room for one longest
    sequence if that is more, but never more than half of what is available.

    `block` is the bytes of one block.
    """
    assert config.max_model_len is not None
    one_sequence = (-(-config.max_model_len // config.block_size) + 1) * block
    return min(max(one_sequence, min(GIB, available // 10)), available // 2)


def num_blocks(
    config: EngineConfig, model: ModelConfig, shapes: StepShapes, itemsize: int, memory_bytes: int
) -> int:
    """Blocks in the pool, the dummy included.

    Args:
      memory_bytes: bytes that the cache may take, when the config does not fix the number.

    Raises:
      ValueError: not even one sequence of max_model_len fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    assert config.max_model_len is not None and config.max_num_seqs is not None
    size = block_bytes(model, config.block_size, itemsize)
    blocks = (config.kv_cache_memory_bytes or memory_bytes) // size
    per_sequence = shapes.decode[0].blocks_per_seq
    if blocks < per_sequence + 1:
        fits = max(0, blocks - 1) * config.block_size
        raise ValueError(
            f"the KV cache of {blocks * size / GIB:.3f} GiB holds {fits} tokens, but "
            "max_model_len is "
            f"{config.max_model_len}; lower max_model_len to at most {fits}, or raise "
            "gpu_memory_utilization or "
            "kv_cache_memory_bytes"
        )
    return min(blocks, per_sequence * config.max_num_seqs + 1)


def available_host_bytes() -> int:
    """Free memory of this machine, or of its container."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as used,
        ):
            free = min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):  # no cgroup, or no limit in it
        pass
    return free


def allocate_kv_cache(model: ModelConfig, blocks: int, block_size: int, dtype: Any) -> KVCache:
    """A zeroed pool [L, N, K, S, h]: kernels multiply unused slots by zero, so they must be finite.

    Raises:
      MemoryError: the device refused; the message says what to change.
    """
    shape = (model.num_layers, blocks, model.num_kv_heads, block_size, model.head_dim)
    try:
        return jax.block_until_ready(KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))
    except jax.errors.JaxRuntimeError as error:
        size = block_bytes(model, block_size, jnp.dtype(dtype).itemsize) * blocks
        raise MemoryError(
            f"the device has no room for a KV cache of {size / GIB:.2f} GiB; lower "
            "gpu_memory_utilization or "
            f"num_gpu_blocks_override, or free memory that other processes hold ({error})"
        ) from error
