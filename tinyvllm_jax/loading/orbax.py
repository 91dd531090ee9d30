"""Converted checkpoints: a model's leaves as they are on the device, saved by orbax.

Nothing is fused, cast or dequantised when one is opened: the demo model loads 2.4 times as fast as from its
GGUF (docs/performance.md). Self-contained: a folder holds
    weights/              the leaves, {"/".join(path): array}
    config.json, generation_config.json, tokenizer files     as Hugging Face writes them
    tinyvllm_jax.json     the marker, written last: a folder without it is an interrupted conversion
"""

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from tinyvllm_jax.loading.source import ModelSource

MARKER = "tinyvllm_jax.json"
WEIGHTS = "weights"
FORMAT_VERSION = 1


def save_checkpoint(
    directory: str | Path,
    leaves: dict[str, jax.Array],
    source: "ModelSource",
    *,
    skip_tokenizer: bool = False,
) -> None:
    """Writes a converted checkpoint.

    Args:
      directory: a folder that does not exist yet, or is empty.
      leaves: the model's leaves by path, "/" between the parts (load_weights.declared_leaves).
      source: where config, generation config and tokenizer come from.
      skip_tokenizer: save no tokenizer, for a source that has none.

    Raises:
      FileExistsError: the folder has something in it.
    """
    from orbax.checkpoint import v1 as ocp

    directory = Path(directory).expanduser().resolve()
    check_is_empty(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if not skip_tokenizer:
        source.load_tokenizer().save_pretrained(directory)
    dtypes = sorted({leaf.dtype.name for leaf in leaves.values()})
    config = copy.deepcopy(source.hf_config)
    if len(dtypes) == 1:
        config.dtype = dtypes[0]  # the weights' own now, no longer the source's
    config.save_pretrained(directory)
    _write_json(directory / "generation_config.json", source.generation_config)
    ocp.save(str(directory / WEIGHTS), leaves)
    _write_json(directory / MARKER, {"format_version": FORMAT_VERSION, "dtypes": dtypes})


def check_is_empty(directory: Path) -> None:
    """Raises FileExistsError unless the folder can be made or has nothing in it."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not an empty folder; name a new one")


def is_converted(directory: Path) -> bool:
    """Whether a folder holds a converted checkpoint. Raises ValueError for half of one."""
    if (directory / MARKER).is_file():
        return True
    if (directory / WEIGHTS / "_CHECKPOINT_METADATA").is_file():
        raise ValueError(
            f"{directory} holds an interrupted conversion (it has no {MARKER}); delete the folder and "
            "run scripts/convert_checkpoint.py again"
        )
    return False


class OrbaxCheckpoint:
    """The leaves of a converted checkpoint.

    Raises:
      ValueError: the folder is damaged, or of another format version.
    """

    def __init__(self, directory: str | Path):
        from orbax.checkpoint import v1 as ocp

        self.path = Path(directory).resolve()
        try:
            marker = json.loads((self.path / MARKER).read_text())
            version = marker["format_version"]
        except (ValueError, KeyError, TypeError) as e:
            raise self._damaged(f"{MARKER} is unreadable ({e!r})") from e
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{self.path} has format version {version} and this release reads {FORMAT_VERSION}; "
                "convert the original checkpoint again"
            )
        try:
            stored: Any = ocp.metadata(str(self.path / WEIGHTS)).metadata
            self.leaves = {
                name: jax.ShapeDtypeStruct(tuple(leaf.shape), np.dtype(leaf.dtype))
                for name, leaf in stored.items()
            }
            """Shape and dtype of each leaf as stored."""
        except Exception as e:  # whatever orbax and tensorstore raise
            raise self._damaged(str(e)) from e

    def restore(self, leaves: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Reads all leaves straight to the device, cast to the given dtypes.

        Args:
          leaves: shape, dtype and sharding of every leaf of the model.

        Raises:
          ValueError: names or shapes differ from what is stored, or a file is damaged.
        """
        from orbax.checkpoint import v1 as ocp

        missing = sorted(leaves.keys() - self.leaves.keys())
        left_over = sorted(self.leaves.keys() - leaves.keys())
        if missing or left_over:
            raise ValueError(
                f"{self.path} was converted for another model: it lacks {missing[:5]} and has "
                f"{left_over[:5]} besides; convert the original checkpoint again"
            )
        for name, leaf in leaves.items():
            if leaf.shape != self.leaves[name].shape:
                raise ValueError(
                    f"{self.path}: leaf {name} is {list(self.leaves[name].shape)} and the model needs "
                    f"{list(leaf.shape)}; convert the original checkpoint again"
                )
        try:
            return ocp.load(str(self.path / WEIGHTS), leaves)  # pyright: ignore[reportReturnType]
        except Exception as e:  # whatever orbax and tensorstore raise
            raise self._damaged(str(e)) from e

    def _damaged(self, why: str) -> ValueError:
        why = " ".join(why.split())[:300]
        return ValueError(f"{self.path} is damaged: {why}; run scripts/convert_checkpoint.py again")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
