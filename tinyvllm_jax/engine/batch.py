"""Staging: a scheduled step as numpy buffers of one of a few fixed shapes, and the layout of those
buffers.

A step crosses to the device as one int32 buffer, its sampling settings as another. The layout is
written once, in `StepShape.split` and `SamplingFields.split`, which slice a numpy buffer on the
host and a traced array on the device alike.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from tinyvllm_jax.engine.scheduler import ScheduledSequence


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The shape of one compiled step.

    Attributes:
      num_tokens: T, tokens of the step, padding included.
      num_seqs: B, sequences of the step, padding included.
      blocks_per_seq: M, width of the block tables.
      is_prefill: False for a decode step, where T = B and each sequence has one token.
    """

    num_tokens: int
    num_seqs: int
    blocks_per_seq: int
    is_prefill: bool

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part of the step's int32 buffer, in order."""
        tokens, seqs = (self.num_tokens,), (self.num_seqs,)
        fields = {
            "token_ids": tokens,  # -1: the row's last sampled token, unseen by the host
            "positions": tokens,
            "slot_mapping": tokens,  # -1: padding
            "context_lens": seqs,  # 0: padding
            "block_tables": (self.num_seqs, self.blocks_per_seq),
        }
        if self.is_prefill:
            fields["cu_seqlens_q"] = (self.num_seqs + 1,)
            fields["last_token_indices"] = seqs  # whose hidden states become logits
        else:
            fields["rows"] = seqs
        return fields

    @property
    def buffer_size(self) -> int:
        """int32 values in the step's buffer."""
        return sum(_aligned_size(shape) for shape in self.fields().values())

    def split(self, buffer: Any) -> dict[str, Any]:
        """Views of a [buffer_size] int32 buffer by field name."""
        parts, start = {}, 0
        for name, shape in self.fields().items():
            parts[name] = buffer[start : start + math.prod(shape)].reshape(shape)
            start += _aligned_size(shape)
        return parts


def _aligned_size(shape: tuple[int, ...]) -> int:
    """int32 values that a field takes: XLA hands parts of the buffer to kernels without copying
    them, and a Mosaic GPU kernel wants its operands at multiples of 256 bytes."""
    return -(-math.prod(shape) // 64) * 64


class SamplingFields:
    """Layout of the sampling buffer [8, B] int32; the last three rows hold float32 bits."""

    INTS = ("rows", "num_tokens", "seed_high", "seed_low", "top_k")
    FLOATS = ("temperature", "top_p", "min_p")
    NUM_ROWS = len(INTS) + len(FLOATS)

    @classmethod
    def split(cls, buffer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """(int32 views by name, views of float32 bits by name), each [B]."""
        ints = {name: buffer[i] for i, name in enumerate(cls.INTS)}
        floats = {name: buffer[len(cls.INTS) + i] for i, name in enumerate(cls.FLOATS)}
        return ints, floats


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """All shapes that an engine compiles: one decode and one prefill shape for each bucket.

    Decode buckets count sequences. XLA has a fast product for a single row only in float32 on a
    CPU; elsewhere one sequence is padded to a few. Prefill buckets count tokens.
    """

    decode: tuple[StepShape, ...]
    prefill: tuple[StepShape, ...]

    @classmethod
    def plan(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        on_gpu: bool,
        dtype: str,
    ) -> "StepShapes":
        """Chooses the buckets: powers of two, on a GPU refined above 64 sequences."""
        blocks = -(-max_model_len // block_size)
        seq_sizes = [8, 16, 32, 64, *range(96, 257, 32)]
        if not on_gpu:
            seq_sizes = [1 if dtype == "float32" else 2, 8, 16, 32]
        seq_buckets = _buckets(seq_sizes, max_num_seqs)
        token_sizes = [64, 128, 256, 512, 1024] if on_gpu else [64, 256, 1024]
        longest = min(max_num_batched_tokens, max_model_len * max_num_seqs)
        decode = tuple(StepShape(n, n, blocks, is_prefill=False) for n in seq_buckets)
        prefill = tuple(
            StepShape(tokens, _at_least(seq_buckets, max(8, tokens // 64)), blocks, is_prefill=True)
            for tokens in _buckets(token_sizes, longest)
        )
        return cls(decode, prefill)

    @property
    def max_num_prefill_seqs(self) -> int:
        """Most sequences in one prefill step."""
        return self.prefill[-1].num_seqs

    def decode_for(self, num_seqs: int) -> StepShape:
        """The smallest decode shape for this many sequences."""
        return next(shape for shape in self.decode if shape.num_seqs >= num_seqs)

    def prefill_for(self, num_tokens: int, num_seqs: int) -> StepShape:
        """The smallest prefill shape for this many tokens of this many sequences."""
        fits = lambda shape: shape.num_tokens >= num_tokens and shape.num_seqs >= num_seqs
        return next(shape for shape in self.prefill if fits(shape))


def _buckets(sizes: Seq[int], largest: int) -> list[int]:
    """The sizes below `largest` and the first that reaches it; doubled on where the list ends."""
    buckets = list(sizes)
    while buckets[-1] < largest:
        buckets.append(2 * buckets[-1])
    return buckets[: bisect.bisect_left(buckets, largest) + 1]


def _at_least(buckets: Seq[int], size: int) -> int:
    """The smallest bucket >= size, or the largest there is."""
    return buckets[min(bisect.bisect_left(buckets, size), len(buckets) - 1)]


def prepare_decode(parts: Seq[ScheduledSequence], shape: StepShape, block_size: int) -> np.ndarray:
    """Stages one token a sequence: the [shape.buffer_size] int32 buffer of a decode step."""
    buffer, fields = _empty(shape)
    for i, part in enumerate(parts):
        seq, position = part.seq, part.start
        known = position < len(seq.token_ids)
        fields["token_ids"][i] = seq.token_ids[position] if known else -1
        fields["positions"][i] = position
        fields["slot_mapping"][i] = (
            seq.block_table[position // block_size] * block_size + position % block_size
        )
        fields["context_lens"][i] = position + 1
        fields["block_tables"][i, : len(seq.block_table)] = seq.block_table
        fields["rows"][i] = seq.row
    return buffer


def prepare_prefill(parts: Seq[ScheduledSequence], shape: StepShape, block_size: int) -> np.ndarray:
    """Stages the chunks of several sequences, packed: the int32 buffer of a prefill step."""
    buffer, fields = _empty(shape)
    end = 0
    for i, part in enumerate(parts):
        seq, start, stop = part.seq, part.start, part.start + part.num_tokens
        positions = np.arange(start, stop, dtype=np.int32)
        blocks = np.asarray(seq.block_table, np.int32)
        here = slice(end, end + part.num_tokens)
        fields["token_ids"][here] = seq.token_ids[start:stop]
        fields["positions"][here] = positions
        fields["slot_mapping"][here] = (
            blocks[positions // block_size] * block_size + positions % block_size
        )
        fields["context_lens"][i] = stop
        fields["block_tables"][i, : len(blocks)] = blocks
        end += part.num_tokens
        fields["cu_seqlens_q"][i + 1] = end
        fields["last_token_indices"][i] = end - 1
    fields["cu_seqlens_q"][len(parts) + 1 :] = end
    return buffer


def _empty(shape: StepShape) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    buffer = np.zeros(shape.buffer_size, np.int32)
    fields = shape.split(buffer)
    fields["slot_mapping"][:] = -1
    return buffer, fields


def prepare_sampling(parts: Seq[ScheduledSequence], num_seqs: int, padding_row: int) -> np.ndarray:
    """Stages sampling settings: [SamplingFields.NUM_ROWS, num_seqs] int32, greedy where there is
    nothing to sample.
    """
    buffer = np.zeros((SamplingFields.NUM_ROWS, num_seqs), np.int32)
    ints, bits = SamplingFields.split(buffer)
    floats = {name: values.view(np.float32) for name, values in bits.items()}
    ints["rows"][:] = padding_row
    for i, part in enumerate(parts):
        if not part.samples:
            continue
        seq, params = part.seq, part.seq.params
        ints["rows"][i] = seq.row
        ints["num_tokens"][i] = part.start + part.num_tokens
        ints["seed_high"][i] = np.uint32(seq.seed >> 32 & 0xFFFFFFFF).view(np.int32)
        ints["seed_low"][i] = np.uint32(seq.seed & 0xFFFFFFFF).view(np.int32)
        ints["top_k"][i] = params.top_k
        floats["temperature"][i] = 0.0 if params.is_greedy else params.temperature
        floats["top_p"][i] = params.top_p
        floats["min_p"][i] = params.min_p
    return buffer
