"""What a request gives back: vLLM's RequestOutput and CompletionOutput, with the timings beside
them.
"""

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass
class RequestMetrics:
    """When things happened to one request: seconds on the `time.monotonic` clock, None until
    then.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token (time to first token)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end of the request."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclasses.dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
      index: position among the completions of the request.
      text: the whole text so far.
      token_ids: all generated ids so far; an end-of-sequence token that ended it is included.
      finish_reason: "stop" (end of sequence, stop string or stop token), "length", "abort"; None
        while running.
      stop_reason: the stop string or stop token id that ended it; None for end of sequence and the
        rest.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestOutput:
    """The state of one request: final from `generate` and `chat`, cumulative from `stream`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
