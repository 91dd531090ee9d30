"""Sequence: one request's tokens, blocks and progress. Owned by the scheduler, read by batch
staging.

The invariant: `num_computed_tokens` counts the tokens whose K and V are in the cache or will be
once the steps already dispatched have run; it never exceeds `num_tokens`.
"""

import enum
import time
from collections.abc import Sequence as Seq
from typing import Protocol

from tinyvllm_jax.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from tinyvllm_jax.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    """WAITING holds no blocks and no row; RUNNING holds both; FINISHED holds neither."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class TextStream(Protocol):
    """What a sequence needs of a detokenizer (tokenizer.Detokenizer)."""

    def append(self, token_id: int) -> str | None: ...
    def finish(self) -> str | None: ...
    def delta(self, finished: bool) -> str: ...


class Sequence:
    """One prompt and its completion."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        detokenizer: TextStream | None = None,
        prompt: str | None = None,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed
        self.detokenizer = detokenizer
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        room = max(1, max_model_len - self.num_prompt_tokens)
        self.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids or ())

        self.status = SequenceStatus.WAITING
        self.block_table: list[int] = []
        self.row: int | None = None  # index into the device's array of last sampled tokens
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0  # sampled by dispatched steps, not yet read by the host
        self.num_preemptions = 0
        self.text = ""  # what `output` has shown so far
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.metrics = RequestMetrics(arrival_time=time.monotonic())

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those still in flight included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those still in flight included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K and V are still to be computed; 1 means that a decode step suffices."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def longest_num_tokens(self) -> int:
        """Most tokens whose K and V this request can ever need: the last output is never fed
        back.
        """
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def will_finish(self) -> bool:
        """Whether the tokens in flight are the last that the request may have."""
        return self.num_output_tokens >= self.max_tokens

    @property
    def is_finished(self) -> bool:
        """Whether no token will be added any more."""
        return self.status is SequenceStatus.FINISHED

    @property
    def output_token_ids(self) -> list[int]:
        """Ids generated so far and known to the host."""
        return self.token_ids[self.num_prompt_tokens :]

    def append_token(self, token_id: int) -> FinishReason | None:
        """Adds a token that was read from the device; returns the reason if it ends the request."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
        self.token_ids.append(token_id)
        stopped_by_token = token_id in self.eos_token_ids or token_id in self.stop_token_ids
        if self.detokenizer is not None and (
            not stopped_by_token or self.params.include_stop_str_in_output
        ):
            stop_string = self.detokenizer.append(token_id)
            if stop_string is not None and not stopped_by_token:
                self.stop_reason = stop_string
                return "stop"
        if stopped_by_token:
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
            return "stop"
        if len(self.token_ids) - self.num_prompt_tokens < self.max_tokens:
            return None
        stop_string = self.detokenizer.finish() if self.detokenizer is not None else None
        if stop_string is not None:  # completed by the flushed tail
            self.stop_reason = stop_string
            return "stop"
        return "length"

    def finish(self, reason: FinishReason) -> None:
        """Ends the request. Its blocks and row must have been given back."""
        assert not self.block_table and self.row is None
        if self.detokenizer is not None:
            self.detokenizer.finish()
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.metrics.finished_time = time.monotonic()

    def output(self) -> RequestOutput:
        """The request as its user sees it now: text that could still become a stop string is held
        back.
        """
        if self.detokenizer is not None:
            self.text += self.detokenizer.delta(self.is_finished)
        completion = CompletionOutput(
            index=0,
            text=self.text,
            token_ids=self.output_token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.token_ids[: self.num_prompt_tokens],
            outputs=[completion],
            finished=self.is_finished,
            num_cached_tokens=0,
            metrics=self.metrics,
        )
