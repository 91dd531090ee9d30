"""How one request is sampled and when it ends: vLLM's names and defaults, every field checked."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

# At or below this temperature a row is greedy, as in vLLM: the noise could no longer change the
# winner.
GREEDY_TEMPERATURE = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request (names and defaults of vLLM's SamplingParams).

    Raises:
      ValueError: a value is out of range or of the wrong type; the message names the field.
      TypeError: a keyword that is not a field.
    """

    temperature: float = 1.0
    """Softmax temperature; 0 is greedy decoding."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities reach this sum; 1 keeps all."""
    top_k: int = 0
    """Keep only the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest token's probability."""
    seed: int | None = None
    """Makes the request reproducible whatever else is in the batch; None draws from the
    engine's.
    """
    max_tokens: int | None = 16
    """Most tokens to generate; None goes on until max_model_len."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output; they are cut off unless include_stop_str_in_output."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the output, beside the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string (or the text of the stop token) at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)
        put("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise ValueError(
                "top_p must be in (0, 1], got 0; use temperature=0 for greedy decoding"
            )
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        put("top_k", max(0, _integer("top_k", self.top_k, -1, 2**31 - 1)))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(2**63), 2**64 - 1))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1, 2**31 - 1))
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token always wins, so that no random number is needed."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not (low <= value <= high) or math.isinf(value):
        raise ValueError(f"{name} must be finite and in [{low:g}, {high:g}], got {value!r}")
    return value


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
    return int(value)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Sequence) or not all(isinstance(s, str) for s in stop):
        raise ValueError(f"stop must be a string or a list of strings, got {stop!r}")
    if "" in stop:
        raise ValueError(
            "stop holds an empty string, which would end every output at once; remove it"
        )
    return tuple(stop)


def _token_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise ValueError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    return tuple(_integer("stop_token_ids", i, 0, 2**31 - 1) for i in ids)
