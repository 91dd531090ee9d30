"""ModelRunner: owns the weights, the cache and the compiled steps on the device.

`warmup` compiles every shape that the engine can ever stage; after it nothing compiles. `run`
dispatches a step and returns at once; the result is read later.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from tinyvllm_jax.config import EngineConfig, ModelConfig
from tinyvllm_jax.engine import kv_cache
from tinyvllm_jax.engine.batch import (
    SamplingFields,
    StepShape,
    StepShapes,
    prepare_decode,
    prepare_prefill,
    prepare_sampling,
)
from tinyvllm_jax.engine.scheduler import ScheduledBatch, ScheduledSequence
from tinyvllm_jax.engine.step import decode_step, prefill_step, sample_step, split_model
from tinyvllm_jax.models import Decoder, build_model
from tinyvllm_jax.sampling.sampler import SAMPLING_MODES, SamplingMode


@dataclasses.dataclass(frozen=True)
class InFlightStep:
    """A dispatched step: device arrays that will hold the tokens of its decode and of its
    prefill.
    """

    tokens: list[jax.Array]
    counts: list[int]

    def read(self) -> np.ndarray:
        """Waits for the step: one int32 token for each part of its batch, in order."""
        return np.concatenate(
            [
                np.asarray(tokens)[:count]
                for tokens, count in zip(self.tokens, self.counts, strict=True)
            ]
        )


class ModelRunner:
    """Runs scheduled batches on the default device.

    Args:
      config: resolved settings.
      model_config: the checkpoint's shape.
      load: fills the declared model with weights.
      show_progress: a bar while compiling.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        load: Callable[[Decoder], None],
        *,
        show_progress: bool = True,
    ):
        assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
        self.config = config
        self.block_size = config.block_size
        self.dtype = jnp.dtype(config.dtype)
        device = jax.devices()[0]
        on_gpu = device.platform == "gpu"
        used_before = (device.memory_stats() or {}).get("bytes_in_use", 0) if on_gpu else 0

        model = build_model(
            model_config,
            max_model_len=config.max_model_len,
            dtype=self.dtype,
            backend=config.attention_backend,
        )
        load(model)
        self.structure, self.leaves = split_model(model)
        del model
        self.shapes = StepShapes.plan(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            on_gpu=on_gpu,
            dtype=config.dtype,
        )
        itemsize = self.dtype.itemsize
        is_sized = config.kv_cache_memory_bytes or config.num_gpu_blocks_override
        memory = 0 if is_sized else self._cache_bytes(device, used_before, model_config)
        self.num_blocks = kv_cache.num_blocks(config, model_config, self.shapes, itemsize, memory)
        self.cache = kv_cache.allocate_kv_cache(
            model_config, self.num_blocks, config.block_size, self.dtype
        )
        self.padding_row = config.max_num_seqs
        self.last_tokens = jnp.zeros((config.max_num_seqs + 1,), jnp.int32)
        self.vocab_size = model_config.vocab_size
        self.weight_bytes = model_config.weight_bytes(itemsize)
        self.kv_bytes_per_token = kv_cache.block_bytes(model_config, 1, itemsize)
        self.steps: dict[StepShape, Any] = {}
        self.samplers: dict[tuple[int, SamplingMode], Any] = {}
        self.warmup(show_progress=show_progress)

    def _cache_bytes(self, device: Any, used_before: int, model_config: ModelConfig) -> int:
        """Bytes for the cache, derived from the device's memory. The weights are loaded already."""
        itemsize = self.dtype.itemsize
        if device.platform != "gpu":
            block = kv_cache.block_bytes(model_config, self.block_size, itemsize)
            return kv_cache.cpu_cache_bytes(self.config, block, kv_cache.available_host_bytes())
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit is None:
            raise ValueError(
                "jax's allocator does not tell how much memory the GPU has; set kv_cache_memory_bytes"
            )
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        return kv_cache.gpu_cache_bytes(
            self.config,
            total=int(limit / fraction),
            limit=limit,
            used_before=used_before,
            weights=sum(leaf.nbytes for leaf in self.leaves),
            workspace=kv_cache.workspace_bytes(model_config, self.shapes, itemsize),
        )

    def warmup(self, *, show_progress: bool = True) -> None:
        """Compiles every step and sampler, several at once."""
        abstract = functools.partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype))
        leaves, cache, last_tokens = abstract((self.leaves, self.cache, self.last_tokens))
        int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)

        def lower_step(shape: StepShape):
            make = prefill_step if shape.is_prefill else decode_step
            step = jax.jit(make(self.structure, shape), donate_argnums=1)
            return step.lower(leaves, cache, int32(shape.buffer_size), last_tokens)

        def lower_sampler(num_seqs: int, mode: SamplingMode):
            logits = jax.ShapeDtypeStruct((num_seqs, self.vocab_size), jnp.float32)
            settings = int32(SamplingFields.NUM_ROWS, num_seqs)
            return jax.jit(sample_step(mode)).lower(logits, settings, last_tokens)

        shapes = [*self.shapes.decode, *self.shapes.prefill]
        rows = sorted({shape.num_seqs for shape in shapes})
        modes: list[tuple[int, SamplingMode]] = [
            (num_seqs, mode) for num_seqs in rows for mode in SAMPLING_MODES
        ]
        with (
            concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
            tqdm(
                total=len(shapes) + len(modes), desc="Compiling", disable=not show_progress
            ) as bar,
        ):
            # Tracing holds Python's lock, so it stays here; XLA compiles in the threads meanwhile.
            jobs: dict[Any, concurrent.futures.Future] = {}
            for key in [*shapes, *modes]:
                lowered = lower_step(key) if isinstance(key, StepShape) else lower_sampler(*key)
                jobs[key] = pool.submit(lowered.compile)
                jobs[key].add_done_callback(lambda _: bar.update())
            self.steps = {shape: jobs[shape].result() for shape in shapes}
            self.samplers = {mode: jobs[mode].result() for mode in modes}

    def run(self, batch: ScheduledBatch) -> InFlightStep:
        """Dispatches a batch, its decode part first, without waiting for the device."""
        tokens, counts = [], []
        if batch.decode:
            shape = self.shapes.decode_for(len(batch.decode))
            tokens.append(self._run_part(batch.decode, shape, prepare_decode))
            counts.append(len(batch.decode))
        if batch.prefill:
            num_tokens = sum(part.num_tokens for part in batch.prefill)
            shape = self.shapes.prefill_for(num_tokens, len(batch.prefill))
            tokens.append(self._run_part(batch.prefill, shape, prepare_prefill))
            counts.append(len(batch.prefill))
        return InFlightStep(tokens, counts)

    def _run_part(
        self,
        parts: Sequence[ScheduledSequence],
        shape: StepShape,
        prepare: Callable[[Sequence[ScheduledSequence], StepShape, int], np.ndarray],
    ) -> jax.Array:
        buffer = prepare(parts, shape, self.block_size)
        settings = prepare_sampling(parts, shape.num_seqs, self.padding_row)
        self.cache, logits = self.steps[shape](self.leaves, self.cache, buffer, self.last_tokens)
        sampler = self.samplers[shape.num_seqs, sampling_mode(parts)]
        tokens, self.last_tokens = sampler(logits, settings, self.last_tokens)
        tokens.copy_to_host_async()
        return tokens


def sampling_mode(parts: Sequence[ScheduledSequence]) -> SamplingMode:
    """The cheapest sampler that serves all parts."""
    drawn = [part.seq.params for part in parts if part.samples and not part.seq.params.is_greedy]
    if not drawn:
        return "greedy"
    filtered = any(params.top_k or params.top_p < 1 or params.min_p > 0 for params in drawn)
    return "filtered" if filtered else "random"
