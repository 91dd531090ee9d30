"""Scheduler: which tokens the next step computes. Continuous batching with chunked prefill.

It owns the two queues, the rows and (through BlockManager) the blocks. `schedule` describes one
step and advances the sequences as if it had run; `postprocess` adds the sampled tokens once the
host has read them, which is after the next step was scheduled. A sequence therefore may have
tokens in flight, and one that turns out to be finished costs at most one discarded token.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable

from tinyvllm_jax.engine.block_manager import BlockManager
from tinyvllm_jax.engine.sequence import Sequence, SequenceStatus
from tinyvllm_jax.outputs import FinishReason


@dataclasses.dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's part of a step: tokens start .. start + num_tokens - 1 of it.

    Attributes:
      samples: whether the last of them is the sequence's newest, so that the step samples the next.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclasses.dataclass(frozen=True)
class ScheduledBatch:
    """One step: the sequences that decode (one token each) and those that prefill (any number)."""

    decode: tuple[ScheduledSequence, ...]
    prefill: tuple[ScheduledSequence, ...]

    @property
    def parts(self) -> tuple[ScheduledSequence, ...]:
        """All parts, in the order in which the runner returns their tokens."""
        return self.decode + self.prefill


class Scheduler:
    """First come, first served; the newest running sequence is preempted first, and recomputed
    later.

    Args:
      block_manager: the pool.
      max_num_seqs: most sequences that run at once, and rows of the device's token array.
      max_num_batched_tokens: most tokens of a step.
      max_num_prefill_seqs: most sequences that prefill in one step.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_prefill_seqs: int,
    ):
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_prefill_seqs = max_num_prefill_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queues a request.

        Raises:
          ValueError: it could never run, whatever else is running.
        """
        self.check_fits(seq)
        self.waiting.append(seq)

    def check_fits(self, seq: Sequence) -> None:
        """Raises ValueError if the pool is too small for the longest that a request can become."""
        need = self.block_manager.blocks_for(seq.longest_num_tokens)
        if need > self.block_manager.num_usable_blocks:
            size = self.block_manager.block_size
            raise ValueError(
                f"the request needs up to {seq.longest_num_tokens} tokens of KV cache ({need} "
                f"blocks of {size}), "
                f"but the cache has {self.block_manager.num_usable_blocks} blocks; lower "
                "max_tokens, shorten the "
                "prompt or enlarge the cache (gpu_memory_utilization, kv_cache_memory_bytes)"
            )

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def schedule(self) -> ScheduledBatch | None:
        """Chooses the next step, or None if nothing can be dispatched before results are read."""
        preemptions = self.num_preemptions
        decode = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(decode)
        prefill: list[ScheduledSequence] = []
        for seq in self.running:
            if (
                seq.num_uncomputed_tokens > 1
                and budget > 0
                and len(prefill) < self.max_num_prefill_seqs
            ):
                prefill.append(self._advance(seq, min(seq.num_uncomputed_tokens, budget)))
                budget -= prefill[-1].num_tokens
        if self.num_preemptions == preemptions:  # else the pool is full: admit nobody
            self._admit(decode, prefill, budget)
        if not decode and not prefill:
            return None
        return ScheduledBatch(tuple(decode), tuple(prefill))

    def _schedule_decodes(self) -> list[ScheduledSequence]:
        decode: list[ScheduledSequence] = []
        for seq in list(self.running):
            if seq.status is not SequenceStatus.RUNNING:  # preempted for an older one
                continue
            if seq.num_uncomputed_tokens != 1 or seq.will_finish:
                continue
            while not self.block_manager.can_append(seq):
                self.preempt(
                    self.running[-1]
                )  # the newest: itself at worst, never one already scheduled
                if seq.status is not SequenceStatus.RUNNING:
                    break
            else:
                self.block_manager.append(seq)
                decode.append(self._advance(seq, 1))
        return decode

    def _admit(
        self, decode: list[ScheduledSequence], prefill: list[ScheduledSequence], budget: int
    ) -> None:
        while (
            self.waiting
            and self.free_rows
            and budget > 0
            and len(prefill) < self.max_num_prefill_seqs
        ):
            seq = self.waiting[0]
            # A preempted sequence whose last token is still in flight must wait for it. One block
            # for each running sequence stays free, so that an admission does not lead straight to a
            # preemption.
            if seq.num_pending_tokens or not self.block_manager.can_allocate(
                seq, reserve=len(self.running)
            ):
                break
            self.waiting.popleft()
            self.block_manager.allocate(seq)
            seq.row = self.free_rows.pop()
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
            if seq.metrics.first_scheduled_time is None:
                seq.metrics.first_scheduled_time = time.monotonic()
            part = self._advance(seq, min(seq.num_uncomputed_tokens, budget))
            budget -= part.num_tokens
            (decode if part.num_tokens == 1 else prefill).append(part)

    def _advance(self, seq: Sequence, num_tokens: int) -> ScheduledSequence:
        """Counts tokens as computed, and the sampled one as in flight."""
        part = ScheduledSequence(
            seq,
            seq.num_computed_tokens,
            num_tokens,
            samples=num_tokens == seq.num_uncomputed_tokens,
        )
        seq.num_computed_tokens += num_tokens
        seq.num_pending_tokens += part.samples
        return part

    def preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks; it goes to the head of the queue and is computed
        again later.
        """
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    def postprocess(
        self, parts: Iterable[ScheduledSequence], token_ids: Iterable[int]
    ) -> list[Sequence]:
        """Adds the tokens that a step sampled, one for each of its parts; returns the sequences
        that got one.
        """
        updated = []
        for part, token_id in zip(parts, token_ids, strict=True):
            seq = part.seq
            if not part.samples:
                continue
            seq.num_pending_tokens -= 1
            if seq.is_finished:  # ended while this token was in flight
                continue
            reason = seq.append_token(int(token_id))
            if reason is not None:
                self.finish(seq, reason)
            updated.append(seq)
        return updated

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a waiting or running sequence and takes back all it holds."""
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        else:
            self._release(seq)
        seq.finish(reason)

    def _release(self, seq: Sequence) -> None:
        assert seq.row is not None
        self.running.remove(seq)
        self.free_rows.append(seq.row)
        seq.row = None
        self.block_manager.free(seq)

    def check_invariants(self) -> None:
        """Raises AssertionError if blocks or rows were lost, shared or left with a sequence not
        running.
        """
        self.block_manager.check_invariants(self.running)
        rows = sorted([seq.row for seq in self.running if seq.row is not None] + self.free_rows)
        assert rows == list(range(self.max_num_seqs)), f"rows lost or shared: {rows}"
        for seq in self.running:
            assert seq.status is SequenceStatus.RUNNING
            held = len(seq.block_table) * self.block_manager.block_size
            assert seq.num_computed_tokens <= min(seq.num_tokens, held)
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING and not seq.block_table and seq.row is None
