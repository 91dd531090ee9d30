"""Offline throughput on nano-vLLM's workload: many requests of random lengths, all there at once.

Prompts of 100 .. 1024 random tokens, 100 .. 1024 output tokens each, temperature 0.6,
end-of-sequence ignored, drawn as nano-vLLM's bench.py draws them. The card's bound: every decode
step must read the weights once and the keys and values of every running sequence once, at the read
bandwidth that is measured on the spot, and the prompts take their matrix products at the measured
rate.
"""

import dataclasses
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import card
import command_line

from tinyvllm_jax import SamplingParams
from tinyvllm_jax.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure tokens per second on random prompts."""

    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    num_seqs: int = 256
    """Requests."""
    min_len: int = 100
    """Fewest prompt tokens, and fewest output tokens."""
    max_len: int = 1024
    """Most prompt tokens, and most output tokens."""
    temperature: float = 0.6
    """Sampling temperature of all requests."""
    repeats: int = 2
    """Runs; all are reported."""
    out: Path | None = None
    """JSON file to write the card to."""


def workload(options: Options, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths; the seed is fixed."""
    rng = random.Random(0)
    between = lambda: rng.randint(options.min_len, options.max_len)
    most = min(10_000, vocab_size - 1)
    prompts = [[rng.randint(0, most) for _ in range(between())] for _ in range(options.num_seqs)]
    return prompts, [between() for _ in range(options.num_seqs)]


def bound_seconds(llm, prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> float:
    """Seconds that the bytes of decoding and the operations of prefill take at the measured
    ceilings.
    """
    runner = llm.model_runner
    steps = max(outputs)
    context = sum(n * len(p) + n * (n + 1) // 2 for p, n in zip(prompts, outputs, strict=True))
    read = steps * runner.weight_bytes + context * runner.kv_bytes_per_token
    products = 2 * sum(map(len, prompts)) * runner.weight_bytes / runner.dtype.itemsize
    return read / card.read_bandwidth() + products / card.matmul_rate(runner.dtype)


def main(argv: Sequence[str] | None = None) -> None:
    options = command_line.parse_plain(Options, argv)
    start = time.monotonic()
    llm = command_line.make_llm(options.engine)
    start_up = time.monotonic() - start
    prompts, lengths = workload(options, llm.model_config.vocab_size)
    params = [
        SamplingParams(temperature=options.temperature, ignore_eos=True, max_tokens=n)
        for n in lengths
    ]
    tokens = sum(lengths)
    bound = bound_seconds(llm, prompts, lengths)
    runs = []
    for _ in range(options.repeats):
        start = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        runs.append(time.monotonic() - start)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == tokens
    result = card.environment() | {
        "benchmark": "throughput",
        "model": options.engine.model,
        "dtype": llm.config.dtype,
        "attention_backend": llm.config.attention_backend,
        "requests": options.num_seqs,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": tokens,
        "start_up_s": round(start_up, 1),
        "output_tokens_per_s": [round(tokens / seconds, 1) for seconds in runs],
        "bound_tokens_per_s": round(tokens / bound, 1),
        "share_of_bound": [round(bound / seconds, 3) for seconds in runs],
        "preemptions": llm.engine.stats.num_preemptions,
        "num_blocks": llm.model_runner.num_blocks,
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    command_line.run(main)
