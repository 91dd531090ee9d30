"""What the engine does, in a minute: one answer streamed, a batch, and a card of how fast it went.

The card's bound: to decode one token for each running sequence, a step reads every weight once and
the keys and values of every sequence's context once. So bytes read per second, over the memory
bandwidth of the device, is the share of the possible that was reached. The bandwidth is not taken
from a data sheet: `card.read_bandwidth` sums a large array here and now.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import command_line
from card import read_bandwidth

from tinyvllm_jax.config import EngineConfig

if TYPE_CHECKING:
    from tinyvllm_jax import LLM
    from tinyvllm_jax.engine.llm_engine import EngineStats

FIRST = "What is the capital of France?"
QUESTIONS = (
    "Name three colours.",
    "What is water made of?",
    "Write a sentence about the sea.",
    "How many days are in a week?",
    "What do bees make?",
    "Explain what a computer is.",
    "Who wrote Romeo and Juliet?",
    "What is two plus two?",
)


@dataclasses.dataclass(frozen=True)
class Options(command_line.Options):
    """Show what the engine does: one answer streamed, a batch of answers, a card of its speed."""

    num_prompts: int = 16
    """Prompts in the batch."""
    sampling: command_line.Sampling = dataclasses.field(
        default_factory=lambda: command_line.Sampling(temperature=0.0, max_tokens=64)
    )


def read_share(
    *, weight_bytes: int, kv_bytes: int, steps: int, seconds: float, bandwidth: float
) -> float:
    """Share of `bandwidth` [bytes/s] at which `steps` decode steps in `seconds` read their bytes:
    `weight_bytes` in each step, `kv_bytes` in all of them."""
    return (steps * weight_bytes + kv_bytes) / seconds / bandwidth


def main(
    argv: Sequence[str] | None = None,
    *,
    make_llm: Callable[[EngineConfig], "LLM"] = command_line.make_llm,
) -> None:
    options = command_line.parse(Options, argv)
    if options.num_prompts < 1:
        raise ValueError(f"num_prompts must be at least 1, got {options.num_prompts}")
    start = time.monotonic()
    llm = make_llm(options.engine)
    lines = {"start-up": f"{time.monotonic() - start:.1f} s to load and compile"}
    tokenizer = llm.get_tokenizer()

    def ask(question: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"prompt_token_ids": tokenizer.apply_chat_template(messages)}

    print(f"> {FIRST}")
    length, ttft = 0, None
    for output in llm.stream(ask(FIRST), options.sampling):
        text = output.outputs[0].text
        print(text[length:], end="", flush=True)
        length, ttft = len(text), output.metrics.ttft
    print("\n")
    if ttft is not None:
        lines["first token"] = f"{ttft * 1e3:.1f} ms after the request (streamed answer)"

    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(options.num_prompts)]
    before = dataclasses.replace(llm.engine.stats)
    start = time.monotonic()
    progress = sys.stderr.isatty()
    outputs = llm.generate([ask(q) for q in questions], options.sampling, use_tqdm=progress)
    seconds = time.monotonic() - start
    for question, output in list(zip(questions, outputs, strict=True))[: len(QUESTIONS)]:
        print(f"> {question}\n{output.outputs[0].text.strip()}\n")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    lines["batch"] = (
        f"{len(outputs)} prompts, {num_tokens} new tokens in {seconds:.2f} s: "
        f"{num_tokens / seconds:,.1f} tokens/s"
    )
    lines |= decode_lines(llm, before)
    print(f"{'model':<12} {options.engine.model}")
    print("\n".join(f"{name:<12} {value}" for name, value in lines.items()))


def decode_lines(llm: "LLM", before: "EngineStats") -> dict[str, str]:
    """Lines about the device and about the decode-only steps since the counters were `before`."""
    import jax

    device, runner, now = jax.devices()[0], llm.model_runner, llm.engine.stats
    lines = {
        "device": f"{device.device_kind} ({device.platform}), computing in {runner.dtype.name}"
    }
    steps = now.decode_steps - before.decode_steps
    if not steps:
        return lines
    seconds = now.decode_time_s - before.decode_time_s
    tokens = now.decode_only_tokens - before.decode_only_tokens
    context = now.decode_context_tokens - before.decode_context_tokens
    bandwidth = read_bandwidth()
    share = read_share(
        weight_bytes=runner.weight_bytes,
        kv_bytes=context * runner.kv_bytes_per_token,
        steps=steps,
        seconds=seconds,
        bandwidth=bandwidth,
    )
    lines["decode"] = (
        f"{steps} steps of {tokens / steps:.1f} tokens on average, {seconds / steps * 1e3:.2f} ms "
        f"each; a step reads {runner.weight_bytes / 1e6:,.0f} MB of weights"
    )
    lines["bandwidth"] = (
        f"{share:.0%} of {bandwidth / 1e9:,.0f} GB/s: weights and KV that decode steps read, over "
        "the best of several jitted sums of a large array"
    )
    return lines


if __name__ == "__main__":
    command_line.run(main)
