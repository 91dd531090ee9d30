"""Latency of one request at a time: time to the first token by prompt length, and time for each
after it.

The bound for a decoded token is one read of the weights and of the context's keys and values at the
read bandwidth measured on the spot; for the first token, the prompt's matrix products at the
measured rate.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import card
import command_line

from tinyvllm_jax import LLM, SamplingParams
from tinyvllm_jax.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure time to first token and time per token, one request at a time."""

    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    prompt_lens: tuple[int, ...] = (128, 1024, 4095)
    """Prompt lengths; with output_len they must fit max_model_len."""
    output_len: int = 256
    """Tokens generated for each."""
    repeats: int = 5
    """Runs for each length; the median is reported."""
    out: Path | None = None
    """JSON file to write the card to."""


def measure(llm: LLM, prompt_len: int, output_len: int) -> tuple[float, float]:
    """(seconds to the first token, seconds for each token after it) of one greedy request."""
    prompt = [1 + i % 1000 for i in range(prompt_len)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_len)
    start = time.monotonic()
    stream = llm.stream(prompt, params)
    next(stream)
    first = time.monotonic()
    *_, last = stream
    assert len(last.outputs[0].token_ids) == output_len
    return first - start, (time.monotonic() - first) / max(1, output_len - 1)


def main(argv: Sequence[str] | None = None) -> None:
    options = command_line.parse_plain(Options, argv)
    llm = command_line.make_llm(options.engine)
    limit, longest = llm.config.max_model_len or 0, max(options.prompt_lens)
    if longest + options.output_len > limit:
        raise ValueError(
            f"{longest} prompt and {options.output_len} output tokens exceed max_model_len={limit}"
        )
    runner, bandwidth = llm.model_runner, card.read_bandwidth()
    rate = card.matmul_rate(runner.dtype)
    cases = []
    for prompt_len in options.prompt_lens:
        measure(llm, prompt_len, 2)
        runs = [measure(llm, prompt_len, options.output_len) for _ in range(options.repeats)]
        ttft, per_token = (statistics.median(column) for column in zip(*runs, strict=True))
        context = prompt_len + options.output_len / 2
        token_bound = (runner.weight_bytes + context * runner.kv_bytes_per_token) / bandwidth
        first_bound = 2 * prompt_len * runner.weight_bytes / runner.dtype.itemsize / rate
        cases.append(
            {
                "prompt_tokens": prompt_len,
                "output_tokens": options.output_len,
                "ttft_ms": round(ttft * 1e3, 2),
                "ttft_bound_ms": round(first_bound * 1e3, 2),
                "ms_per_token": round(per_token * 1e3, 3),
                "ms_per_token_bound": round(token_bound * 1e3, 3),
                "share_of_bound": round(token_bound / per_token, 3),
            }
        )
    result = card.environment() | {
        "benchmark": "latency",
        "model": options.engine.model,
        "dtype": llm.config.dtype,
        "cases": cases,
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    command_line.run(main)
