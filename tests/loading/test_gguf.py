"""GGUF: weights, config and tokenizer of files made here, the demo model's tokenizer, and corruption."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiny_models import TINY_MODELS, random_weights
from tinyvllm_jax.config import ModelConfig
from tinyvllm_jax.loading.gguf import GGUFCheckpoint

DATA = Path(__file__).parents[1] / "data"
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name in ("model.norm.weight", "lm_head.weight"):
        return {"model.norm.weight": "output_norm.weight"}.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{BLOCK_NAMES[module]}.{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's converter: the two halves of each head become neighbouring rows."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, name: str, quantization="F32", extra=None, factors=None) -> Path:
    """The tiny model `name` as llama.cpp's converter would write it."""
    config = TINY_MODELS[name]
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_float32(key, value)
    for tensor_name, tensor in random_weights(name).items():
        if architecture == "llama" and ".q_proj." in tensor_name:
            tensor = interleave(tensor, heads)
        if architecture == "llama" and ".k_proj." in tensor_name:
            tensor = interleave(tensor, kv_heads)
        kind = gguf.GGMLQuantizationType[quantization if tensor.ndim == 2 else "F32"]
        stored = gguf.quants.quantize(tensor, kind)
        writer.add_tensor(gguf_name(tensor_name), stored, raw_dtype=kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_weights_and_config_are_the_models_own(tmp_path, name):
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "x.gguf", name))
    weights = random_weights(name)
    assert set(checkpoint) == set(weights)
    for tensor_name, tensor in weights.items():
        assert np.array_equal(checkpoint[tensor_name], tensor), tensor_name
    from transformers import AutoConfig

    got = ModelConfig.from_hf(checkpoint.hf_config())
    assert got == ModelConfig.from_hf(AutoConfig.for_model(**TINY_MODELS[name]))


@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [("F16", 1e-3), ("BF16", 4e-3), ("Q8_0", 0.01), ("Q5_0", 0.06), ("Q4_1", 0.1), ("Q4_0", 0.12)],
)
def test_quantised_weights(tmp_path, quantization, tolerance):
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "x.gguf", "llama", quantization))
    for name, tensor in random_weights("llama").items():
        error = np.linalg.norm(checkpoint[name] - tensor) / np.linalg.norm(tensor)
        assert checkpoint[name].dtype == np.float32 and error < tolerance, name


def test_rotary_settings(tmp_path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = GGUFCheckpoint(write_gguf(tmp_path / "a.gguf", "llama", extra=scaling)).hf_config()
    rope = ModelConfig.from_hf(config).rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    config = GGUFCheckpoint(write_gguf(tmp_path / "b.gguf", "llama", factors=factors)).hf_config()
    rope = ModelConfig.from_hf(config).rope
    assert (rope.rope_type, rope.freq_factors) == ("factors", tuple(factors))
    scaling = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}
    with pytest.raises(NotImplementedError, match="longrope"):
        GGUFCheckpoint(write_gguf(tmp_path / "c.gguf", "llama", extra=scaling)).hf_config()


def test_files_that_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a file"):
        GGUFCheckpoint(tmp_path / "none.gguf")
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ValueError, match="letters GGUF"):
        GGUFCheckpoint(tmp_path / "x.gguf")
    (tmp_path / "x-00001-of-00002.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(NotImplementedError, match="one part of a split GGUF"):
        GGUFCheckpoint(tmp_path / "x-00001-of-00002.gguf")
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(NotImplementedError, match=r"'mamba'; supported are llama, qwen2, qwen3"):
        GGUFCheckpoint(tmp_path / "y.gguf")


def test_truncation_is_noticed(tmp_path):
    file = write_gguf(tmp_path / "x.gguf", "llama")
    whole = file.read_bytes()
    for length in [5, 11, 23, 24, 100, 500, 1000, 3000, len(whole) // 2, len(whole) - 100]:
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"truncated or corrupt|letters GGUF"):
            GGUFCheckpoint(file)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 2500), byte=st.integers(0, 255))
def test_any_changed_byte_of_the_header_is_read_or_refused(tmp_path, position, byte):
    file = tmp_path / "x.gguf"
    if not (tmp_path / "good").is_file():
        write_gguf(tmp_path / "good", "llama-tied")
    raw = bytearray((tmp_path / "good").read_bytes())
    raw[position] = byte
    file.write_bytes(raw)
    try:
        checkpoint = GGUFCheckpoint(file)
        checkpoint.hf_config()
    except (ValueError, NotImplementedError) as error:
        assert str(file) in str(error)


def test_demo_tokenizer(demo_model):
    """Ids and chat prompts that transformers gave for the same vocabulary."""
    reference = json.loads((DATA / "smollm2_tokenizer.json").read_text())
    tokenizer = GGUFCheckpoint(demo_model).tokenizer()
    for case in [*reference["texts"], *reference["missing_bytes"]]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
    for case in reference["chats"]:
        ids = tokenizer.apply_chat_template(
            case["messages"], add_generation_prompt=case["add_generation_prompt"], return_dict=False
        )
        assert ids == case["ids"]
    assert tokenizer.eos_token_id == reference["eos_token_id"]


def byte_level_metadata(pre: str) -> dict:
    """A vocabulary of the 256 bytes, one merge and two special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "he", "<|end|>", "[user]"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.token_type": [1] * 257 + [3, 4],
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.add_bos_token": pre == "llama-bpe",
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_byte_level_tokenizers(pre):
    from tinyvllm_jax.loading.gguf_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(byte_level_metadata(pre), Path("x.gguf"))
    text = "he said: 12345 naïve 日本 😀\n  ok[user]"
    ids = tokenizer.encode(text + "<|end|>", add_special_tokens=False)
    assert ids[0] == 256 and ids[-1] == 257 and ids[-2] == 258
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    with_special = tokenizer.encode("a")
    assert with_special == ([257] if pre == "llama-bpe" else []) + tokenizer.encode(
        "a", add_special_tokens=False
    )


def test_unknown_tokenizers_name_the_cure():
    from tinyvllm_jax.loading.gguf_tokenizer import build_tokenizer

    with pytest.raises(NotImplementedError, match=r"'exotic'.*pass tokenizer="):
        build_tokenizer(byte_level_metadata("exotic"), Path("x.gguf"))
    wrong = byte_level_metadata("gpt-2") | {"tokenizer.ggml.model": "bert"}
    with pytest.raises(NotImplementedError, match=r"'bert'.*pass tokenizer="):
        build_tokenizer(wrong, Path("x.gguf"))
    for key, value in [
        ("tokens", None),
        ("merges", None),
        ("merges", ["h"]),
        ("eos_token_id", 999),
    ]:
        broken = byte_level_metadata("gpt-2") | {f"tokenizer.ggml.{key}": value}
        with pytest.raises(ValueError, match=r"x\.gguf"):
            build_tokenizer(broken, Path("x.gguf"))


def test_sentencepiece_merges_follow_the_scores():
    """ "abc" is a + bc where bc has the better score, though ab is the leftmost pair."""
    from tinyvllm_jax.loading.gguf_tokenizer import build_tokenizer

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    pieces = {"▁": -9.0, "a": -5.0, "b": -6.0, "c": -7.0, "ab": -3.0, "bc": -2.0, "▁a": -4.0}
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *pieces],
        "tokenizer.ggml.token_type": types + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * len(tokens) + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = build_tokenizer(metadata, Path("x.gguf"))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abc")) == ["<s>", "▁a", "bc"]
    ids = tokenizer.encode("ab é", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "ab é"
