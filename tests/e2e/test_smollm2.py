"""The demo model end to end against Hugging Face's outputs (tests/data), alone and batched.

The references were computed in float32 from float32 weights (as the GGUF holds them) and from the
same weights rounded to bfloat16 (as the safetensors and the converted checkpoint hold them).
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.recorder import recorded_logits, top5_error
from tinyvllm_jax import LLM, SamplingParams
from tinyvllm_jax.loading.source import open_model

DATA = Path(__file__).parents[1] / "data"
SCRIPTS = Path(__file__).parents[2] / "scripts"
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, skip_special_tokens=False)
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "show_progress": False}
TOLERANCE = 1e-3


def reference(name: str) -> list[dict]:
    return json.loads((DATA / name).read_text())["prompts"]


def check(llm: LLM, prompts: list[dict], batches: list[list[int]]) -> None:
    """Generates the prompts in these batches and compares ids, text and logprobs."""
    for batch in batches:
        with recorded_logits(llm) as logits:
            outputs = llm.generate([prompts[i]["prompt"] for i in batch], GREEDY, use_tqdm=False)
        for i, output in zip(batch, outputs, strict=True):
            right = prompts[i]
            assert output.prompt_token_ids == right["prompt_token_ids"]
            # The smallest margin is 0.0026: twice the tolerance fits, so every token must agree.
            assert output.outputs[0].token_ids == right["output_token_ids"], right["name"]
            assert output.outputs[0].text == right["output_text"], right["name"]
            of_request = logits[output.request_id]
            error = top5_error(of_request, len(right["prompt_token_ids"]), right["top5"])
            assert error < TOLERANCE, right["name"]
    llm.engine.check_invariants()


@pytest.fixture(scope="module")
def gguf_llm(demo_model) -> LLM:
    return LLM("smollm2-135m", dtype="float32", **SMALL)


def test_gguf(gguf_llm):
    prompts = reference("smollm2_135m_f32.json")
    check(gguf_llm, prompts, [list(range(8)), [1], [4], [6]])


@pytest.mark.timeout(600)
def test_safetensors(demo_model, tmp_path):
    source = open_model("smollm2-135m")
    assert isinstance(source.weights, Mapping)
    names = list(source.weights)
    half = len(names) // 2
    index = {}
    for number, part in enumerate((names[:half], names[half:]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        tensors = {name: source.weights[name].astype(ml_dtypes.bfloat16) for name in part}
        save_file(tensors, tmp_path / file)
        index.update(dict.fromkeys(part, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    source.hf_config.save_pretrained(tmp_path)
    source.load_tokenizer().save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", **SMALL)
    check(llm, reference("smollm2_135m_bf16.json"), [list(range(8)), [0], [2], [7]])


def test_converted_checkpoint(demo_model, tmp_path):
    """The GGUF, converted to an orbax checkpoint in bfloat16 and opened again in float32."""
    converted = tmp_path / "converted"
    command = [sys.executable, SCRIPTS / "convert_checkpoint.py", "--model", "smollm2-135m"]
    command += ["--output", converted, "--dtype", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "269.0 MB of bfloat16 weights" in done.stdout
    llm = LLM(str(converted), dtype="float32", **SMALL)
    check(llm, reference("smollm2_135m_bf16.json"), [list(range(8)), [3], [5]])
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2 and "is not an empty folder" in again.stderr


def test_chat_and_text(gguf_llm):
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    greedy = SamplingParams(temperature=0, max_tokens=40)
    [output] = gguf_llm.chat(conversation, greedy, use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text
    prompt = gguf_llm.get_tokenizer().apply_chat_template(conversation)
    *partial, last = gguf_llm.stream(prompt, greedy)
    assert last.finished and last.outputs[0].text == output.outputs[0].text
    texts = [step.outputs[0].text for step in [*partial, last]]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))


def test_seeded_sampling_ignores_neighbours(gguf_llm):
    """The same seed alone and among others gives the same tokens."""
    sampled = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1234, max_tokens=24)
    noisy = SamplingParams(temperature=1.3, max_tokens=40)
    prompt = "Once upon a time"
    [alone] = gguf_llm.generate(prompt, sampled, use_tqdm=False)
    among = gguf_llm.generate(
        ["Hello", prompt, "def f(x):", "1 2 3"], [noisy, sampled, noisy, noisy], use_tqdm=False
    )[1]
    assert among.outputs[0].token_ids == alone.outputs[0].token_ids


def test_nothing_compiles_while_serving(gguf_llm, compilations):
    """Mixed lengths, samplers, stops and streams after start-up: not one compilation."""
    samplers = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=1.0, max_tokens=5),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, seed=3, max_tokens=9),
        SamplingParams(max_tokens=4, stop=["e", "a"], ignore_eos=True),
    ]
    for lengths in ([1], [2, 70, 500], [3] * 9, [700, 1, 1], [5, 6]):
        prompts = [list(range(100, 100 + n)) for n in lengths]
        params = [samplers[i % 4] for i in range(len(prompts))]
        gguf_llm.generate(prompts, params, use_tqdm=False)
    list(gguf_llm.stream("Hi", samplers[2]))
    assert compilations() == 0


def test_weights_are_one_copy_of_the_declared_dtype(gguf_llm):
    assert all(leaf.dtype == jnp.float32 for leaf in gguf_llm.model_runner.leaves)
    total = sum(int(np.prod(leaf.shape)) for leaf in gguf_llm.model_runner.leaves)
    assert total == 134_515_008
