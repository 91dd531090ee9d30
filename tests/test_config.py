"""EngineConfig: checked, and resolved once by a pure function."""

import types

import numpy as np
import pytest
from transformers import AutoConfig

from tests.tiny_models import TINY_MODELS
from tinyvllm_jax import EngineConfig
from tinyvllm_jax.config import ModelConfig
from tinyvllm_jax.engine.batch import StepShapes
from tinyvllm_jax.engine.kv_cache import (
    block_bytes,
    cpu_cache_bytes,
    gpu_cache_bytes,
    num_blocks,
    workspace_bytes,
)
from tinyvllm_jax.engine.model_runner import ModelRunner

GIB = 2**30


def model_config(**changes) -> ModelConfig:
    settings = {**TINY_MODELS["llama"], **changes}
    return ModelConfig.from_hf(AutoConfig.for_model(settings.pop("model_type"), **settings))


def resolve(on_gpu=True, cpu_has_bf16=False, model=None, **settings) -> EngineConfig:
    return EngineConfig(**settings).resolve(
        model or model_config(), on_gpu=on_gpu, cpu_has_bf16=cpu_has_bf16
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 0),
        ("max_model_len", 1.5),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", True),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", "0.5"),
        ("block_size", 7),
        ("block_size", None),
        ("num_gpu_blocks_override", 1),
        ("kv_cache_memory_bytes", 0),
        ("dtype", "int8"),
        ("load_format", "pt"),
        ("attention_backend", "flash"),
        ("seed", 1.5),
        ("model", ""),
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: value})


def test_unknown_names_are_refused():
    with pytest.raises(TypeError, match="max_num_sequences"):
        EngineConfig(max_num_sequences=4)  # type: ignore[call-arg]


def test_two_ways_to_size_the_cache_are_one_too_many():
    with pytest.raises(ValueError, match="not both"):
        EngineConfig(num_gpu_blocks_override=8, kv_cache_memory_bytes=GIB)


@pytest.mark.parametrize(
    ("on_gpu", "cpu_has_bf16", "dtype"),
    [(True, False, "bfloat16"), (False, True, "bfloat16"), (False, False, "float32")],
)
def test_auto_dtype(on_gpu, cpu_has_bf16, dtype):
    assert resolve(on_gpu, cpu_has_bf16).dtype == dtype
    assert resolve(on_gpu, cpu_has_bf16, dtype="float16").dtype == "float16"


def test_max_model_len_beyond_the_model_names_both_numbers():
    with pytest.raises(ValueError, match=r"max_model_len=300 .* 256"):
        resolve(max_model_len=300)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert resolve(model=model_config(rope_scaling=rope), max_model_len=300).max_model_len == 300


def test_budget_must_leave_room_for_prompts():
    with pytest.raises(
        ValueError, match="max_num_batched_tokens=8 must be more than max_num_seqs=8"
    ):
        resolve(max_num_batched_tokens=8, max_num_seqs=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [1.0] * 8,
                }
            },
            "longrope",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        model_config(**changes)


def test_unknown_model_type_lists_the_supported_ones():
    with pytest.raises(ValueError, match=r"gpt2.*llama, mistral, qwen2, qwen3"):
        ModelConfig.from_hf(AutoConfig.for_model("gpt2"))


def shapes(config: EngineConfig) -> StepShapes:
    assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
    return StepShapes.plan(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        on_gpu=True,
        dtype="bfloat16",
    )


def gpu_bytes(config: EngineConfig, **changes) -> int:
    numbers = {
        "total": 80 * GIB,
        "limit": 77 * GIB,
        "used_before": 0,
        "weights": 10 * GIB,
        "workspace": GIB,
    }
    return gpu_cache_bytes(config, **{**numbers, **changes})


def test_gpu_cache_takes_its_share():
    assert gpu_bytes(resolve(gpu_memory_utilization=0.5)) == 29 * GIB
    assert (
        gpu_bytes(resolve(gpu_memory_utilization=1.0)) == 66 * GIB
    )  # no more than the allocator has


def test_two_engines_share_a_gpu_by_their_utilization():
    assert gpu_bytes(resolve(gpu_memory_utilization=0.4), used_before=32 * GIB) == 21 * GIB
    with pytest.raises(ValueError, match=r"70\.00 GiB used before.*raise gpu_memory_utilization"):
        gpu_bytes(resolve(gpu_memory_utilization=0.9), used_before=70 * GIB)


def test_a_cache_too_small_for_one_sequence_names_what_fits():
    model, config = model_config(), resolve(block_size=16)
    size = block_bytes(model, 16, 2)
    with pytest.raises(ValueError, match=r"holds 144 tokens.*max_model_len is 256.*at most 144"):
        num_blocks(config, model, shapes(config), 2, 10 * size)
    assert num_blocks(config, model, shapes(config), 2, 17 * size) == 17


def test_runner_asks_the_gpu_how_much_it_has(monkeypatch):
    """With a GPU that reports 97 GiB, 97 % of its memory, the share is taken of 100."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")
    runner = ModelRunner.__new__(ModelRunner)
    runner.config, runner.block_size = resolve(gpu_memory_utilization=0.5), 64
    runner.dtype, runner.leaves = np.dtype(np.float16), []
    runner.shapes = shapes(runner.config)
    stats = {"bytes_limit": 97 * GIB}
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    workspace = workspace_bytes(model_config(), runner.shapes, 2)
    got = runner._cache_bytes(gpu, 0, model_config())
    assert abs(got - (50 * GIB - workspace)) <= 2
    stats.clear()
    with pytest.raises(ValueError, match="set kv_cache_memory_bytes"):
        runner._cache_bytes(gpu, 0, model_config())


def test_cpu_cache_never_exhausts_memory():
    model, config = model_config(), resolve(on_gpu=False)
    block = block_bytes(model, config.block_size, 4)
    assert cpu_cache_bytes(config, block, 100 * GIB) == GIB
    assert cpu_cache_bytes(config, block, 4 * GIB) == 4 * GIB // 10
    assert (
        cpu_cache_bytes(config, block, 20 * block) == 5 * block
    )  # one sequence: 4 blocks and the dummy
    assert cpu_cache_bytes(config, block, 6 * block) == 3 * block  # half, which num_blocks refuses
    with pytest.raises(ValueError, match="lower max_model_len to at most 128"):
        num_blocks(config, model, shapes(config), 4, 3 * block)


def test_the_cache_is_no_larger_than_all_sequences_need():
    model, config = model_config(), resolve(block_size=64, max_num_seqs=3)
    assert num_blocks(config, model, shapes(config), 2, 80 * GIB) == 3 * 4 + 1


def test_every_schedulable_step_has_a_shape():
    for seqs, tokens in [(1, 2), (5, 100), (256, 8192), (300, 5000)]:
        planned = shapes(resolve(max_num_seqs=seqs, max_num_batched_tokens=max(tokens, seqs + 1)))
        assert planned.decode_for(seqs).num_seqs >= seqs
        most = planned.max_num_prefill_seqs
        for n in (1, tokens // 2 or 1, min(tokens, 256 * seqs)):
            shape = planned.prefill_for(n, min(n, most))
            assert shape.num_tokens >= n and shape.num_seqs >= min(n, most)
