"""Finds a model by what the user called it: a folder, a .gguf file, a hub id or a demo model's name."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyvllm_jax.loading.demo_model import fetch_demo_model
from tinyvllm_jax.loading.gguf import GGUFCheckpoint
from tinyvllm_jax.loading.lazy_imports import import_transformers
from tinyvllm_jax.loading.orbax import OrbaxCheckpoint, is_converted
from tinyvllm_jax.loading.safetensors import SafetensorsCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DEMO_MODELS: dict[str, Callable[[], Path]] = {"smollm2-135m": fetch_demo_model}

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.*",
)
_CONFIG_FILES = ("config.json", "generation_config.json")
_WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")
# Weights a second time, in another layout or in subfolders.
_DUPLICATES = ("*/*", "consolidated*")
_TOKENIZER_CURE = (
    "pass tokenizer= with a folder or hub id that has one, or skip_tokenizer_init=True"
)


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model that was found: its configs, and its weights and tokenizer, neither of which is read yet."""

    name: str
    """What the user called it."""
    path: Path
    """The folder or the .gguf file."""
    hf_config: "PreTrainedConfig"
    generation_config: dict[str, Any]
    """The content of generation_config.json; empty when there is none."""
    weights: Mapping[str, np.ndarray] | OrbaxCheckpoint | None
    """Tensors by Hugging Face name, or a converted checkpoint; None with load_format="dummy"."""
    load_tokenizer: "Callable[[], PreTrainedTokenizerBase]"
    """Reads the tokenizer. Raises FileNotFoundError when there is none, ValueError when it is slow or
    broken."""


def open_model(
    model: str, *, revision: str | None = None, load_format: str = "auto"
) -> ModelSource:
    """Opens a model; nothing is loaded onto a device.

    Args:
      model: an existing folder (Hugging Face safetensors, or converted by convert_checkpoint.py), an
        existing .gguf file, a name in DEMO_MODELS, or a hub id "org/name". An existing path wins.
      revision: branch, tag or commit of a hub id.
      load_format: "auto", or "dummy" to find no weights (they need not exist).

    Raises:
      ValueError: none of these; a file is corrupt; an unknown model_type; a revision without a hub id.
      FileNotFoundError: config.json or weights are missing, or the hub can't be reached and nothing is
        cached.
      ConnectionError: a download fails.
      NotImplementedError: quantised weights, or a GGUF architecture that is not supported.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format must be auto or dummy, got {load_format!r}")
    dummy = load_format == "dummy"
    files = (*_CONFIG_FILES, *_TOKENIZER_FILES, *(() if dummy else _WEIGHT_FILES))
    path = _locate(model, revision, files)
    if path.is_file():
        checkpoint = GGUFCheckpoint(path)
        return ModelSource(
            name=model,
            path=path,
            hf_config=checkpoint.hf_config(),
            generation_config=checkpoint.generation_config(),
            weights=None if dummy else checkpoint,
            load_tokenizer=checkpoint.tokenizer,
        )
    hf_config = _read_config(path)
    generation_file = path / "generation_config.json"
    return ModelSource(
        name=model,
        path=path,
        hf_config=hf_config,
        generation_config=_read_json(generation_file) if generation_file.is_file() else {},
        weights=None if dummy else _open_weights(path),
        load_tokenizer=lambda: _load_tokenizer(path),
    )


def load_tokenizer(model: str, *, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """Loads a tokenizer alone; `model` is as for `open_model`, and needs neither config nor weights.

    Raises as `open_model` and `ModelSource.load_tokenizer` do.
    """
    path = _locate(model, revision, ("config.json", *_TOKENIZER_FILES))
    return GGUFCheckpoint(path).tokenizer() if path.is_file() else _load_tokenizer(path)


def _locate(model: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """The folder or .gguf file of a model, downloaded if need be (`files` of a hub id)."""
    path = Path(model).expanduser()
    is_hub_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and path.suffix != ".gguf"
    if not path.exists() and is_hub_id and model not in DEMO_MODELS:
        return _download(model, revision, files)
    if revision is not None:
        raise ValueError(f"revision={revision!r} is for hub ids (org/name); {model!r} is none")
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    if path.is_file():
        raise ValueError(f"{path} is no .gguf file; for other formats pass the folder")
    if model in DEMO_MODELS:
        return DEMO_MODELS[model]()
    raise ValueError(
        f"no model {model!r}; accepted are an existing folder with config.json and safetensors, an "
        f"existing .gguf file, a Hugging Face hub id (org/name), or {', '.join(DEMO_MODELS)}"
    )


def _download(model: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """The folder of a hub id: the newest files, or those in the local cache where there is no network."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        path = Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(files),
                ignore_patterns=list(_DUPLICATES),
            )
        )
    except errors.GatedRepoError as e:
        raise ValueError(
            f"{model} is gated: accept its licence on its hub page, then log in with `hf auth login`"
        ) from e
    except errors.RevisionNotFoundError as e:
        raise ValueError(f"{model} has no revision {revision!r}") from e
    except errors.RepositoryNotFoundError as e:
        raise ValueError(
            f"{model} is neither a folder here nor a repository that you may read on the hub; for a "
            "private one log in with `hf auth login`"
        ) from e
    except errors.LocalEntryNotFoundError as e:
        raise FileNotFoundError(
            f"{model} is no folder here, it is not (fully) in the local cache, and the hub can't be "
            "reached; connect once (without HF_HUB_OFFLINE), or pass a folder or a .gguf file"
        ) from e
    except errors.HFValidationError as e:
        raise ValueError(f"{model!r} is neither a folder here nor a valid hub id: {e}") from e
    except Exception as e:  # errors of the HTTP library, which is another one in each release
        raise ConnectionError(f"downloading {model} failed: {e}") from e
    if _WEIGHT_FILES[0] in files and not any(path.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{model} has no *.safetensors on the hub; take a repository that has, or download a "
            ".gguf file of it and pass its path"
        )
    return path


def _read_config(folder: Path) -> "PreTrainedConfig":
    """config.json as transformers' class for its model_type. Never runs code from the folder."""
    file = folder / "config.json"
    if not file.is_file():
        hint = "a folder in Hugging Face's layout is needed"
        if gguf := sorted(folder.glob("*.gguf")):
            hint = f"to load a GGUF file pass its own path, e.g. {gguf[0]}"
        raise FileNotFoundError(f"{folder} has no config.json; {hint}")
    raw = _read_json(file)
    if "model_type" not in raw:
        raise ValueError(f"{file} has no model_type, so that its architecture is unknown")
    transformers = import_transformers()
    if raw["model_type"] not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{file} has model_type {raw['model_type']!r}, which transformers "
            f"{transformers.__version__} does not know"
        )
    if quantization := raw.get("quantization_config"):
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise NotImplementedError(
            f"{file} describes weights quantised by {method!r}, which are not read; take the "
            "unquantised checkpoint"
        )
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as e:  # each config class validates in its own way
        raise ValueError(f"{file} is not a valid {raw['model_type']} config: {e}") from e


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not valid JSON ({e}); download it again") from e
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__} where an object is needed")
    return value


def _open_weights(folder: Path) -> Mapping[str, np.ndarray] | OrbaxCheckpoint:
    return OrbaxCheckpoint(folder) if is_converted(folder) else SafetensorsCheckpoint(folder)


def _load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The fast tokenizer of a Hugging Face folder."""
    vocabularies = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in vocabularies):
        raise FileNotFoundError(
            f"{folder} has no tokenizer ({', '.join(vocabularies)}); {_TOKENIZER_CURE}"
        )
    transformers = import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as e:  # tokenizers raises bare Exception
        raise ValueError(
            f"the tokenizer in {folder} can't be loaded: {e}; {_TOKENIZER_CURE}"
        ) from e
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer in {folder} is {type(tokenizer).__name__}, written in Python; a fast one "
            f"(tokenizer.json) is needed; {_TOKENIZER_CURE}"
        )
    return tokenizer
