"""Every leaf is set exactly once, from the right tensors, in the declared dtype; or it is named."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.tiny_models import TINY_MODELS, random_weights, write_checkpoint
from tinyvllm_jax.config import ModelConfig
from tinyvllm_jax.layers.weight import declare
from tinyvllm_jax.loading.load_weights import declared_leaves, load_dummy_weights, load_weights
from tinyvllm_jax.loading.orbax import OrbaxCheckpoint, save_checkpoint
from tinyvllm_jax.loading.source import open_model
from tinyvllm_jax.models import build_model


def declared(name: str, dtype=jnp.float32, **changes):
    source = TINY_MODELS[name] | changes
    from transformers import AutoConfig

    config = AutoConfig.for_model(**source)
    return build_model(ModelConfig.from_hf(config), max_model_len=64, dtype=dtype)


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen2", "qwen3"])
def test_every_leaf_is_its_sources_joined(name):
    weights = random_weights(name)
    model = declared(name)
    load_weights(model, weights)
    used = []
    for leaf in declared_leaves(model).values():
        sources = leaf.get_metadata()["sources"]
        want = np.concatenate([weights[source] for source in sources])
        assert isinstance(leaf.get_value(), jax.Array)
        assert np.array_equal(np.asarray(leaf.get_value()), want)
        used += sources
    assert sorted(used) == sorted(weights)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cast_to_the_declared_dtype(dtype):
    model = declared("qwen3", dtype)
    load_weights(model, random_weights("qwen3"))
    assert {leaf.get_value().dtype for leaf in declared_leaves(model).values()} == {
        jnp.dtype(dtype)
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_is_there", [True, False])
def test_tied_and_untied_heads(tied, head_is_there):
    weights = random_weights("llama")
    if not head_is_there:
        del weights["lm_head.weight"]
    model = declared("llama", tie_word_embeddings=tied)
    if not tied and not head_is_there:
        with pytest.raises(ValueError, match=r"lacks lm_head.weight.*tie_word_embeddings"):
            load_weights(model, weights)
        return
    load_weights(model, weights)
    assert (model.lm_head is None) == tied


def test_missing_left_over_and_misshapen_tensors_are_named():
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = random_weights("llama")
    tensor = weights.pop(name)
    with pytest.raises(ValueError, match=f"lacks {name}"):
        load_weights(declared("llama"), weights)
    weights[name] = tensor[:-1]
    with pytest.raises(ValueError, match=r"layers/1/self_attn/qkv_proj/weight needs .*k_proj"):
        load_weights(declared("llama"), weights)
    weights[name] = tensor.T
    with pytest.raises(ValueError, match=r"needs .*k_proj"):
        load_weights(declared("llama"), weights)
    weights[name] = tensor.astype(np.int32)
    with pytest.raises(ValueError, match="is int32"):
        load_weights(declared("llama"), weights)
    weights[name] = tensor
    weights["model.layers.2.mlp.up_proj.weight"] = tensor
    with pytest.raises(ValueError, match=r"has model.layers.2.mlp.up_proj.weight, which the model"):
        load_weights(declared("llama"), weights)
    del weights["model.layers.2.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    load_weights(declared("llama"), weights)


def test_a_model_is_filled_once():
    model = declared("llama")
    load_weights(model, random_weights("llama"))
    with pytest.raises(ValueError, match="set already"):
        load_weights(model, random_weights("llama"))


def test_a_tensor_in_two_leaves():
    class Twice(nnx.Module):
        def __init__(self):
            self.a = declare((2,), jnp.float32, ("x",), "w")
            self.b = declare((2,), jnp.float32, ("x",), "w")

    with pytest.raises(ValueError, match="w makes both a and b"):
        load_weights(Twice(), {"w": np.ones(2, np.float32)})


def test_float16_overflow_is_named():
    weights = random_weights("llama")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1e6
    with pytest.raises(ValueError, match=r"model.norm.weight has values beyond float16"):
        load_weights(declared("llama", jnp.float16), weights)


def test_dummy_weights_are_reproducible():
    first, second, other = (declared("qwen3"), declared("qwen3"), declared("qwen3"))
    load_dummy_weights(first, 1)
    load_dummy_weights(second, 1)
    load_dummy_weights(other, 2)
    a, b, c = (declared_leaves(model) for model in (first, second, other))
    for name, leaf in a.items():
        value = np.asarray(leaf.get_value())
        assert np.array_equal(value, np.asarray(b[name].get_value()))
        if "norm" in name:
            assert (value == 1).all()
        else:
            assert not np.array_equal(value, np.asarray(c[name].get_value()))
            assert 0.015 < value.std() < 0.025


def converted(tmp_path, name: str = "qwen3"):
    source = open_model(str(write_checkpoint(tmp_path / "source", name)))
    model = declared(name, jnp.bfloat16)
    assert source.weights is not None
    load_weights(model, source.weights)
    leaves = {path: leaf.get_value() for path, leaf in declared_leaves(model).items()}
    save_checkpoint(tmp_path / "out", leaves, source, skip_tokenizer=True)
    return leaves


def test_converted_checkpoint_round_trip(tmp_path):
    leaves = converted(tmp_path)
    source = open_model(str(tmp_path / "out"))
    assert isinstance(source.weights, OrbaxCheckpoint)
    for dtype in (jnp.bfloat16, jnp.float32):
        model = declared("qwen3", dtype)
        load_weights(model, source.weights)
        for name, leaf in declared_leaves(model).items():
            value = leaf.get_value()
            assert value.dtype == dtype and (value == leaves[name].astype(dtype)).all()


def test_faults_of_converted_checkpoints(tmp_path):
    leaves = converted(tmp_path)
    source = open_model(str(tmp_path / "source"))
    with pytest.raises(FileExistsError, match="not an empty folder"):
        save_checkpoint(tmp_path / "out", leaves, source, skip_tokenizer=True)
    with pytest.raises(ValueError, match="converted for another model"):
        load_weights(declared("llama"), OrbaxCheckpoint(tmp_path / "out"))
    shutil.copytree(tmp_path / "out", tmp_path / "half")
    (tmp_path / "half" / "tinyvllm_jax.json").unlink()
    with pytest.raises(ValueError, match="interrupted conversion"):
        open_model(str(tmp_path / "half"))
    (tmp_path / "out" / "tinyvllm_jax.json").write_text('{"format_version": 99, "dtypes": []}')
    with pytest.raises(ValueError, match="format version 99"):
        open_model(str(tmp_path / "out"))
