"""LLMEngine: requests in, tokens out. The loop that joins scheduler and runner.

The host works one step ahead of the device: `step` schedules and dispatches a step, and only then
reads the tokens of the step before, so the device never waits for the host to look at a token.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tinyvllm_jax.engine.block_manager import BlockManager
from tinyvllm_jax.engine.scheduler import ScheduledBatch, Scheduler
from tinyvllm_jax.engine.sequence import Sequence
from tinyvllm_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyvllm_jax.tokenizer import Tokenizer

Prompt = str | Seq[int] | dict[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


class StepInFlight(Protocol):
    """A dispatched step; `read` waits for it: one token for each of the batch's parts."""

    def read(self) -> np.ndarray: ...


class Runner(Protocol):
    """What the engine needs of the device (model_runner.ModelRunner, or a fake in tests)."""

    def run(self, batch: ScheduledBatch) -> StepInFlight: ...


@dataclasses.dataclass
class EngineStats:
    """Counters since the engine started. Times are seconds of wall clock.

    Attributes:
      decode_steps, decode_time_s: steps that only decoded, and the time they took.
      decode_only_tokens: tokens that those steps sampled.
      decode_context_tokens: tokens whose K and V those steps read.
      prompt_tokens, generation_tokens: tokens prefilled and tokens sampled, in all steps.
    """

    num_steps: int = 0
    decode_steps: int = 0
    decode_time_s: float = 0.0
    decode_only_tokens: int = 0
    decode_context_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0


class LLMEngine:
    """Continuous batching over one model.

    Args:
      runner: executes batches.
      tokenizer: None if prompts and outputs are token ids only.
      num_blocks, block_size: the pool of the KV cache.
      max_model_len, max_num_seqs, max_num_batched_tokens, max_num_prefill_seqs: limits.
      vocab_size: ids must be below it.
      eos_token_ids: tokens that end an output.
      seed: where the seeds of requests without one come from.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: "Tokenizer | None",
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_prefill_seqs: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
    ):
        self.runner = runner
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.scheduler = Scheduler(
            BlockManager(num_blocks, block_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_prefill_seqs=max_num_prefill_seqs,
        )
        self.stats = EngineStats()
        self._seeds = random.Random(seed)
        self._num_requests = 0
        self._in_flight: tuple[ScheduledBatch, StepInFlight, float] | None = None
        self._last_step_end = 0.0

    def make_sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        """Tokenizes and checks a request, without queueing it.

        Raises:
          ValueError: the request can't be served; the message names the value and the cure.
        """
        text, token_ids = self._tokenize(prompt)
        self._check_ids("the prompt", token_ids)
        if not len(token_ids):
            raise ValueError("the prompt is empty: it must have at least one token")
        if len(token_ids) > self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, but max_model_len is "
                f"{self.max_model_len}; "
                "shorten the prompt or raise max_model_len"
            )
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer; use stop_token_ids or drop skip_tokenizer_init"
            )
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = self.tokenizer.detokenizer(
                params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        self._num_requests += 1
        seq = Sequence(
            str(self._num_requests - 1),
            token_ids,
            params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            detokenizer=detokenizer,
            prompt=text,
        )
        self.scheduler.check_fits(seq)
        return seq

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, Seq[int]]:
        if isinstance(prompt, dict):
            keys = [key for key in ("prompt_token_ids", "prompt") if key in prompt]
            if len(keys) != 1 or len(prompt) != 1:
                raise ValueError(
                    'a prompt dict must be {"prompt": text} or {"prompt_token_ids": ids}, '
                    f"got keys {list(prompt)}"
                )
            wanted = str if keys == ["prompt"] else Seq
            prompt = prompt[keys[0]]
            if not isinstance(prompt, wanted) or (
                wanted is Seq and isinstance(prompt, str | bytes)
            ):
                raise ValueError(f"{keys[0]} has the wrong type: {type(prompt).__name__}")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "a text prompt needs a tokenizer; pass token ids or drop skip_tokenizer_init"
                )
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"the prompt is not valid Unicode text: {error}") from error
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, bytes) or not isinstance(prompt, Seq):
            raise ValueError(
                f"a prompt must be text or a list of token ids, got {type(prompt).__name__}"
            )
        return None, prompt

    def _check_ids(self, name: str, ids: Seq[int]) -> None:
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
                raise ValueError(f"{name} must hold integers, got {token_id!r}")
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"{name} holds token id {token_id}, outside the vocabulary of "
                    f"{self.vocab_size} tokens"
                )

    def add(self, seq: Sequence) -> None:
        """Queues a sequence of make_sequence."""
        self.scheduler.add(seq)

    def abort(self, seq: Sequence) -> None:
        """Ends a request now, wherever it is; its blocks are free at once."""
        if not seq.is_finished:
            self.scheduler.finish(seq, "abort")

    @property
    def has_unfinished(self) -> bool:
        """Whether a step is in flight or any request is waiting or running."""
        return self.scheduler.has_unfinished or self._in_flight is not None

    def step(self) -> list[Sequence]:
        """Dispatches a step and reads the one before; returns the sequences that got a token."""
        batch = self.scheduler.schedule()
        dispatched = None
        if batch is not None:
            with self._aborting_on_error(batch):
                dispatched = batch, self.runner.run(batch), time.monotonic()
        previous, self._in_flight = self._in_flight, dispatched
        if previous is None:
            return []
        batch, step, dispatch_time = previous
        with self._aborting_on_error(batch):
            token_ids = step.read()
        updated = self.scheduler.postprocess(batch.parts, token_ids)
        self._count(batch, dispatch_time)
        return updated

    @contextlib.contextmanager
    def _aborting_on_error(self, batch: ScheduledBatch) -> Iterator[None]:
        """A step that fails takes its own requests with it, and no others."""
        try:
            yield
        except BaseException:
            for part in batch.parts:
                self.abort(part.seq)
            raise

    def drain(self) -> None:
        """Reads a step that is still in flight when no request needs it any more."""
        if self._in_flight is not None and not self.scheduler.has_unfinished:
            self.step()

    def _count(self, batch: ScheduledBatch, dispatch_time: float) -> None:
        now = time.monotonic()
        # The device began this step when it was dispatched or when it was done with the one before.
        elapsed = now - max(dispatch_time, self._last_step_end)
        self._last_step_end = now
        stats = self.stats
        stats.num_steps += 1
        stats.num_preemptions = self.scheduler.num_preemptions
        stats.generation_tokens += sum(part.samples for part in batch.parts)
        stats.prompt_tokens += sum(part.num_tokens for part in batch.prefill)
        if not batch.prefill:
            stats.decode_steps += 1
            stats.decode_time_s += elapsed
            stats.decode_only_tokens += len(batch.decode)
            stats.decode_context_tokens += sum(part.start + 1 for part in batch.decode)

    def check_invariants(self) -> None:
        """Raises AssertionError if blocks or rows were lost, shared or leaked."""
        self.scheduler.check_invariants()
