"""Every family and rotary type against Hugging Face: tokens exactly, logprobs closely."""

import json
from pathlib import Path

import pytest

from tests.recorder import recorded_logits, top5_error
from tests.tiny_models import TINY_MODELS, write_checkpoint
from tinyvllm_jax import LLM, SamplingParams

REFERENCES = json.loads((Path(__file__).parents[1] / "data" / "tiny_references.json").read_text())[
    "models"
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def open_tiny(path, **settings) -> LLM:
    defaults = {
        "dtype": "float32", "skip_tokenizer_init": True, "block_size": 8, "max_num_seqs": 4,
        "max_num_batched_tokens": 32, "show_progress": False,
    }  # fmt: skip
    return LLM(str(path), **{**defaults, **settings})


def test_every_model_has_a_reference():
    assert set(REFERENCES) == set(TINY_MODELS)


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_family(name, tmp_path):
    """Alone and batched, with chunked prefill (32 tokens a step) over small blocks."""
    llm = open_tiny(write_checkpoint(tmp_path, name, shards=1 + len(name) % 2))
    prompts = REFERENCES[name]["prompts"]
    ids = [prompt["prompt_token_ids"] for prompt in prompts]
    with recorded_logits(llm) as logits:
        together = llm.generate(ids, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        assert output.outputs[0].token_ids == prompt["output_token_ids"]
        error = top5_error(
            logits[output.request_id], len(prompt["prompt_token_ids"]), prompt["top5"]
        )
        assert error < 1e-4
    alone = [llm.generate(i, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for i in ids]
    assert alone == [prompt["output_token_ids"] for prompt in prompts]
    llm.engine.check_invariants()


def test_dynamic_rope_beyond_the_original_length(tmp_path):
    reference = REFERENCES["llama-dynamic"]["beyond_max_position_embeddings"]
    ids = reference["prompt_token_ids"]
    llm = open_tiny(write_checkpoint(tmp_path, "llama-dynamic"), max_model_len=len(ids))
    with recorded_logits(llm) as logits:
        [output] = llm.generate(ids, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert top5_error(logits[output.request_id], len(ids), [reference["last_top5"]]) < 1e-4
