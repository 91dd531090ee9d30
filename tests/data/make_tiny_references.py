"""Makes tiny_references.json: greedy generations of tests/tiny_models.py by Hugging Face models.

Needs torch and transformers, which the tests themselves do not. From the repository's root:

    python -m tests.data.make_tiny_references              # writes tiny_references.json
    python -m tests.data.make_tiny_references --find-seeds # prints the table for tiny_models.py

Every model is built from its config.json, in float32 with eager attention, and recomputes the
whole sequence at each step: no cache, so sliding windows and rotary variants are the plain
formula. EOS is ignored.
"""

import argparse
import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers

from tests import tiny_models

PROMPT_LENGTHS = (1, 7, 45)
MAX_TOKENS = 24
MIN_MARGIN = 0.02  # between the first and the second logit; float32 noise is about 1e-5
MIN_DISTINCT = 12  # different ids among the 24: a loop would hide errors of position
FILE = Path(__file__).parent / "tiny_references.json"


def build_model(name: str, weights: dict[str, np.ndarray]) -> Any:
    """The transformers model of `TINY_MODELS[name]`, which it reads as a config.json file."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(tiny_models.TINY_MODELS[name]))
        config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    state = {key: torch.from_numpy(value) for key, value in weights.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.eval()


def random_prompt(name: str, length: int) -> list[int]:
    """The same ids for the same arguments; ids below 8 are left to special tokens."""
    rng = np.random.default_rng([length, len(name), *name.encode()])
    vocab_size = tiny_models.TINY_MODELS[name]["vocab_size"]
    return rng.integers(8, vocab_size, size=length).tolist()


def last_logits(model: Any, token_ids: list[int]) -> Any:
    """Float32 logits [V] after the last of these tokens, computed without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0, -1]


def top5(logits: Any) -> list[list[float]]:
    """The five largest as [[id, logprob], ...], largest first."""
    values, ids = torch.log_softmax(logits, dim=-1).topk(5)
    return [[i, round(v, 6)] for i, v in zip(ids.tolist(), values.tolist(), strict=True)]


def generate(model: Any, prompt: list[int]) -> dict[str, Any]:
    """Greedy generation of MAX_TOKENS tokens with the five best of every step."""
    result: dict[str, Any] = {
        "prompt_token_ids": prompt,
        "output_token_ids": [],
        "top5": [],
        "margins": [],
    }
    for _ in range(MAX_TOKENS):
        logits = last_logits(model, prompt + result["output_token_ids"])
        first, second = logits.topk(2).values.tolist()
        result["output_token_ids"].append(int(logits.argmax()))
        result["top5"].append(top5(logits))
        result["margins"].append(round(first - second, 6))
    return result


def is_usable(generation: dict[str, Any]) -> bool:
    distinct = len(set(generation["output_token_ids"]))
    return min(generation["margins"]) >= MIN_MARGIN and distinct >= MIN_DISTINCT


def find_seed(name: str) -> int:
    """The first seed of which every generation is usable."""
    for seed in range(1000):
        model = build_model(name, tiny_models.random_weights(name, seed=seed))
        prompts = [random_prompt(name, length) for length in PROMPT_LENGTHS]
        if all(is_usable(generate(model, prompt)) for prompt in prompts):
            return seed
    raise RuntimeError(f"no seed below 1000 makes {name!r} usable")


def reference(name: str) -> dict[str, Any]:
    """The entry of one model in tiny_references.json."""
    weights = tiny_models.random_weights(name)
    digest = hashlib.sha256(b"".join(weights[key].tobytes() for key in sorted(weights)))
    model = build_model(name, weights)
    entry: dict[str, Any] = {
        "weights_sha256": digest.hexdigest(),
        "prompts": [generate(model, random_prompt(name, n)) for n in PROMPT_LENGTHS],
    }
    if not all(is_usable(generation) for generation in entry["prompts"]):
        raise RuntimeError(f"the margins of {name!r} are too small: run with --find-seeds")
    if model.config.rope_parameters["rope_type"] == "dynamic":
        prompt = random_prompt(name, 2 * model.config.max_position_embeddings)
        entry["beyond_max_position_embeddings"] = {
            "prompt_token_ids": prompt,
            "last_top5": top5(last_logits(model, prompt)),
        }
    logits = [last_logits(model, random_prompt(name, n)) for n in PROMPT_LENGTHS]
    margins = [m for generation in entry["prompts"] for m in generation["margins"]]
    print(f"{name:24} logits std {torch.stack(logits).std():.2f} min margin {min(margins):.4f}")
    return entry


def write(models: dict[str, Any]) -> None:
    """Compact JSON, one line a model."""
    head = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "compute": "float32",
        "attn_implementation": "eager",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    lines = [f'"{k}":{json.dumps(v, separators=(",", ":"))}' for k, v in models.items()]
    body = ",\n".join(lines)
    FILE.write_text(f'{json.dumps(head)[:-1]}, "models": {{\n{body}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--find-seeds", action="store_true", help="print seeds, write nothing")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # the models are too small to share, and the sums stay in one order
    if args.find_seeds:
        for name in tiny_models.TINY_MODELS:
            print(f'    "{name}": {find_seed(name)},', flush=True)
    else:
        write({name: reference(name) for name in tiny_models.TINY_MODELS})


if __name__ == "__main__":
    main()
