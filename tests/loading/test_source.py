"""Finding a model: every kind of name works, and every wrong one says what would."""

import json

import huggingface_hub
import pytest
from huggingface_hub import errors

from tests.tiny_models import write_checkpoint
from tinyvllm_jax.loading.source import open_model


def test_folder(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    source = open_model(str(tmp_path))
    assert source.hf_config.model_type == "qwen3" and source.path == tmp_path
    assert source.weights and source.generation_config
    assert open_model(str(tmp_path), load_format="dummy").weights is None


@pytest.mark.parametrize("name", ["", "no-such-model", "./missing/folder", "a/b/c", "x.gguf"])
def test_unknown_names_list_what_is_accepted(name):
    with pytest.raises(
        ValueError, match=r"accepted are .*folder.*\.gguf.*hub id.*smollm2-135m|no.config"
    ):
        open_model(name or "?")


def test_files_that_are_no_models(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no \.gguf file"):
        open_model(str(tmp_path / "model.pt"))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("{", ValueError, "not valid JSON"),
        ("[]", ValueError, "holds a list"),
        ("{}", ValueError, "no model_type"),
        ('{"model_type": "nonsense"}', ValueError, "nonsense"),
        (
            '{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}',
            NotImplementedError,
            "awq",
        ),
        ('{"model_type": "llama", "hidden_size": "wide"}', ValueError, "not a valid llama config"),
    ],
)
def test_bad_configs(tmp_path, config, error, message):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(error, match=message):
        open_model(str(tmp_path))


def test_hub_id(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, "llama")
    calls = []

    def download(repo, **settings):
        calls.append((repo, settings["revision"]))
        assert "*.safetensors" in settings["allow_patterns"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = open_model("org/model", revision="v1")
    assert calls == [("org/model", "v1")] and source.hf_config.model_type == "llama"


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (errors.LocalEntryNotFoundError("offline"), FileNotFoundError, "can't be reached"),
        (RuntimeError("reset by peer"), ConnectionError, "reset by peer"),
    ],
)
def test_hub_faults(monkeypatch, raised, error, message):
    def download(*_, **__):
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(error, match=message):
        open_model("org/model")


def test_offline_without_a_cache_is_a_clear_error():
    with pytest.raises((FileNotFoundError, ConnectionError), match="org/model"):
        open_model("org/model-that-nobody-cached")


def test_revision_is_for_the_hub(tmp_path):
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(ValueError, match="revision='main' is for hub ids"):
        open_model(str(tmp_path), revision="main")


def test_missing_tokenizer_names_the_cure(tmp_path):
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(FileNotFoundError, match="skip_tokenizer_init=True"):
        open_model(str(tmp_path)).load_tokenizer()
    (tmp_path / "tokenizer.json").write_text(json.dumps({"broken": True}))
    with pytest.raises(ValueError, match="can't be loaded"):
        open_model(str(tmp_path)).load_tokenizer()
