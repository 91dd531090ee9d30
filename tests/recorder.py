"""Records the logits behind every sampled token of a running engine, for comparison with
references.
"""

import contextlib
from collections.abc import Iterator

import numpy as np

from tinyvllm_jax import LLM


@contextlib.contextmanager
def recorded_logits(llm: LLM) -> Iterator[dict[str, dict[int, np.ndarray]]]:
    """Yields {request_id: {number of tokens before: logits [V] float32}}, filled while it is
    open.
    """
    runner, logits_of = llm.model_runner, {}
    run_part, samplers = runner._run_part, runner.samplers
    parts_now = []

    def recording(sampler):
        def call(logits, settings, last_tokens):
            host = np.asarray(logits)
            for i, part in enumerate(parts_now):
                if part.samples:
                    of_request = logits_of.setdefault(part.seq.request_id, {})
                    of_request[part.start + part.num_tokens] = host[i]
            return sampler(logits, settings, last_tokens)

        return call

    def run_recorded(parts, shape, prepare):
        parts_now[:] = parts
        return run_part(parts, shape, prepare)

    runner.samplers = {key: recording(sampler) for key, sampler in samplers.items()}
    runner._run_part = run_recorded
    try:
        yield logits_of
    finally:
        runner.samplers, runner._run_part = samplers, run_part


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[V] float64 logprobs."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def top5_error(logits_of_request: dict[int, np.ndarray], num_prompt: int, top5: list) -> float:
    """Largest |logprob - reference| over the reference's top five of every step."""
    worst = 0.0
    for step, entries in enumerate(top5):
        logprobs = log_softmax(logits_of_request[num_prompt + step])
        worst = max(worst, *(abs(logprobs[token] - logprob) for token, logprob in entries))
    return worst
