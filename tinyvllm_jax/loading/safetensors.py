"""safetensors checkpoints as read-only views of the mapped files: opening one copies nothing.

Layout of a file (https://huggingface.co/docs/safetensors): 8 bytes, little endian: the length N of
the header; N bytes of JSON `{name: {"dtype", "shape", "data_offsets": [begin, end]}}` with an optional
"__metadata__"; then the tensors, row-major, without gaps. Offsets count from the end of the header.
The `safetensors` library cannot give float8 as numpy, and copies what it reads; hence this reader.
"""

import json
import math
import mmap
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}
INDEX_NAME = "model.safetensors.index.json"
_MAX_NDIM = 64  # numpy's limit


class SafetensorsCheckpoint(Mapping[str, np.ndarray]):
    """The tensors of one .safetensors file, or of a folder that holds one or a sharded set.

    In a folder: `model.safetensors`, else the shards that `model.safetensors.index.json` lists, else
    the only `*.safetensors`. The arrays are views of the mapped files: read-only, and valid as long
    as nobody writes to the files.

    Raises:
      FileNotFoundError: no such path, no safetensors file in the folder, or a shard is missing.
      ValueError: a file is truncated or corrupt; several files and no index.
      NotImplementedError: the folder has only pickled PyTorch weights.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._tensors: dict[str, np.ndarray] = {}
        file_of: dict[str, Path] = {}
        files, weight_map = _find_files(self.path)
        for file in files:
            for name, tensor in _read_file(file).items():
                if name in file_of:
                    raise ValueError(
                        f"tensor {name!r} is in both {file_of[name]} and {file.name}; "
                        "one of the shards is stale: download the checkpoint again"
                    )
                file_of[name] = file
                self._tensors[name] = tensor
        for name, shard in weight_map.items():
            if name not in file_of or file_of[name].name != shard:
                raise ValueError(
                    f"{self.path / INDEX_NAME} says that tensor {name!r} is in {shard}, and it is "
                    "not: index and shards do not belong together; download the checkpoint again"
                )

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _find_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """(safetensors files in the order to read them, {tensor name: file name} of the index)."""
    if path.is_file():
        return [path], {}
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a file nor a folder")
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"], {}
    if (path / INDEX_NAME).is_file():
        weight_map = _read_index(path / INDEX_NAME)
        files = [path / shard for shard in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"shard {file} of {len(files)} is missing; download the checkpoint again"
                )
        return files, weight_map
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found, {}
    if found:
        raise ValueError(
            f"{path} has {len(found)} *.safetensors files ({', '.join(f.name for f in found[:5])}) "
            f"and no {INDEX_NAME}; download the index too, or pass one of the files"
        )
    if pickled := sorted(path.glob("*.bin")) + sorted(path.glob("*.pt")):
        raise NotImplementedError(
            f"{path} has only pickled PyTorch weights ({pickled[0].name}), which are not read; "
            "convert them where PyTorch is installed: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder) writes safetensors"
        )
    raise FileNotFoundError(f"{path} has no *.safetensors file")


def _read_index(file: Path) -> dict[str, str]:
    weight_map = _parse_json(file.read_bytes(), file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{file} has no 'weight_map'; download it again")
    for name, shard in weight_map.items():
        # A shard is a file beside the index: a path could point anywhere on the machine.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{file} names {shard!r} for tensor {name!r}, which is no file name")
    return weight_map


def _read_file(file: Path) -> dict[str, np.ndarray]:
    """The tensors of one file as views of its mapping."""
    size = file.stat().st_size
    if size < 8:
        raise _corrupt(file, f"it has {size} bytes, fewer than the 8 that give the header's length")
    with file.open("rb") as f:
        data = np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    header_length = int.from_bytes(data[:8].tobytes(), "little")
    if header_length > size - 8:
        raise _corrupt(
            file, f"its header should have {header_length} bytes and {size - 8} are left"
        )
    header = _parse_json(data[8 : 8 + header_length].tobytes(), file)
    header.pop("__metadata__", None)
    data = data[8 + header_length :]

    entries = {name: _parse_entry(entry, name, file) for name, entry in header.items()}
    expected_begin = 0
    for name, (dtype, shape, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != expected_begin:
            raise _corrupt(
                file, f"tensor {name!r} begins at byte {begin}, the one before it ends at "
                f"{expected_begin}"
            )  # fmt: skip
        num_bytes = math.prod(shape) * dtype.itemsize
        if end - begin != num_bytes:
            raise _corrupt(
                file, f"tensor {name!r} of shape {list(shape)} and {dtype} needs {num_bytes} bytes "
                f"and has {end - begin}"
            )  # fmt: skip
        expected_begin = end
    if expected_begin != len(data):
        raise _corrupt(
            file, f"its tensors need {expected_begin} bytes of data and it has {len(data)}"
        )
    return {
        name: data[begin:end].view(dtype).reshape(shape)
        for name, (dtype, shape, begin, end) in entries.items()
    }


def _parse_entry(entry: Any, name: str, file: Path) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of a header's entry."""
    if not isinstance(entry, dict):
        raise _corrupt(file, f"the entry of tensor {name!r} is {entry!r}")
    dtype_name, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise ValueError(
            f"{file}: tensor {name!r} has dtype {dtype_name!r}; known are {', '.join(DTYPES)}"
        )
    dtype = DTYPES[dtype_name]
    if not _are_naturals(shape) or len(shape) > _MAX_NDIM:
        raise _corrupt(file, f"tensor {name!r} has shape {shape!r}")
    if math.prod(max(dim, 1) for dim in shape) * dtype.itemsize > sys.maxsize:
        raise _corrupt(file, f"tensor {name!r} has the impossible shape {shape!r}")
    if not _are_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _corrupt(file, f"tensor {name!r} has data_offsets {offsets!r}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _parse_json(raw: bytes, file: Path) -> dict[str, Any]:
    try:
        # A name that comes twice would silently be the last one's.
        value = json.loads(raw, object_pairs_hook=_unique_dict)
    except (ValueError, RecursionError) as e:
        raise _corrupt(file, f"its JSON does not parse ({e})") from e
    if not isinstance(value, dict):
        raise _corrupt(file, f"its JSON is a {type(value).__name__}, not an object")
    return value


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} comes twice")
    return value


def _corrupt(file: Path, what: str) -> ValueError:
    return ValueError(f"{file} is truncated or corrupt: {what}; download it again")
