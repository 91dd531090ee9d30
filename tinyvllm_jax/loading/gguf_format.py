"""The header of a GGUF file: metadata and the table of tensors.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little endian: "GGUF", u32 version,
u64 number of tensors, u64 number of metadata entries; the entries (key, u32 type, value); for each
tensor its name, u32 rank, u64 dimensions (fastest first), u32 type, u64 offset; then, aligned, the data.

gguf.GGUFReader makes several numpy arrays for each token of the vocabulary, which takes 2 s at 49k
tokens and 6 s at 150k, and follows a corrupt length for ever. This reader takes 0.04 s and checks
every length. The dequantisers do come from the gguf package.
"""

import dataclasses
import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_NDIM = 4
# Type of a metadata value -> struct's letter.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor as stored: `shape` is row-major (slowest axis first), `data` its bytes."""

    name: str
    shape: tuple[int, ...]
    quantization: str
    """Name of the gguf.GGMLQuantizationType: F32, BF16, Q4_K, ..."""
    data: np.ndarray
    """[num_bytes] uint8, a read-only view of the mapped file."""


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Reads (metadata, tensors by name) of a file; no tensor's data is touched.

    Raises:
      FileNotFoundError: no such file.
      ImportError: the gguf package, which knows the sizes of the quantised types, is missing.
      NotImplementedError: one part of a split file, or a version that is not 2 or 3.
      ValueError: not a GGUF file, or truncated or corrupt.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
        raise NotImplementedError(
            f"{path} is one part of a split GGUF, which is not read; join the parts with "
            "llama.cpp: llama-gguf-split --merge FIRST_PART OUTPUT"
        )
    with path.open("rb") as f:
        if f.read(4) != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Reader(buffer).read(path)
    except (ValueError, struct.error, OverflowError, RecursionError, MemoryError) as e:
        raise ValueError(f"{path} is truncated or corrupt: {e}; download it again") from e


def import_gguf() -> Any:
    """The gguf package, imported late. Raises ImportError with the cure when it is missing."""
    try:
        import gguf
    except ImportError as e:
        raise ImportError("GGUF files need the gguf package: pip install gguf") from e
    return gguf


class _Reader:
    """A cursor over the header. Every read is bounded by the file."""

    def __init__(self, buffer: mmap.mmap):
        self.buffer = buffer
        self.offset = len(_MAGIC)

    def read(self, path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise NotImplementedError(
                f"{path} has GGUF version {version}; versions {_VERSIONS} in little endian are read"
            )
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise ValueError(f"metadata {key!r} comes twice")
            metadata[key] = self._value(self._scalar("I"))
        if metadata.get("split.count", 1) not in (0, 1):
            raise NotImplementedError(
                f"{path} is one of {metadata['split.count']} parts; join them with llama.cpp: "
                "llama-gguf-split --merge FIRST_PART OUTPUT"
            )
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        data_start = -(-self.offset // alignment) * alignment

        raw = np.frombuffer(self.buffer, np.uint8)
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_number, offset in infos:
            quantization, num_bytes = _stored_size(name, shape, type_number)
            begin = data_start + offset
            if begin + num_bytes > len(raw):
                raise ValueError(
                    f"tensor {name!r} ends at byte {begin + num_bytes} and the file at {len(raw)}"
                )
            if name in tensors:
                raise ValueError(f"tensor {name!r} comes twice")
            data = raw[begin : begin + num_bytes]
            tensors[name] = GGUFTensor(name, shape, quantization, data)
        return metadata, tensors

    def _unpack(self, fmt: str) -> tuple[Any, ...]:
        values = struct.unpack_from(fmt, self.buffer, self.offset)  # struct.error past the end
        self.offset += struct.calcsize(fmt)
        return values

    def _scalar(self, letter: str) -> Any:
        return self._unpack("<" + letter)[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        if length > len(self.buffer) - self.offset:
            raise ValueError(f"a string at byte {self.offset} should have {length} bytes")
        begin, self.offset = self.offset, self.offset + length
        return self.buffer[begin : self.offset].decode("utf-8")

    def _value(self, value_type: int) -> Any:
        if value_type in _SCALARS:
            return self._scalar(_SCALARS[value_type])
        if value_type == _STRING:
            return self._string()
        if value_type != _ARRAY:
            raise ValueError(f"metadata at byte {self.offset} has the unknown type {value_type}")
        item_type, length = self._unpack("<IQ")
        if length > len(self.buffer) - self.offset:  # an item has a byte at least
            raise ValueError(f"an array at byte {self.offset} should have {length} items")
        if item_type in _SCALARS:
            return list(self._unpack(f"<{length}{_SCALARS[item_type]}"))
        return [self._value(item_type) for _ in range(length)]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, row-major shape, number of the type, offset from the start of the data)."""
        name, ndim = self._string(), self._scalar("I")
        if not 1 <= ndim <= _MAX_NDIM:
            raise ValueError(f"tensor {name!r} has {ndim} dimensions")
        shape = self._unpack(f"<{ndim}Q")[::-1]
        type_number, offset = self._unpack("<IQ")
        return name, shape, type_number, offset


def _stored_size(name: str, shape: tuple[int, ...], type_number: int) -> tuple[str, int]:
    """(name of the quantised type, bytes of a tensor of this shape)."""
    gguf = import_gguf()
    try:
        quantization = gguf.GGMLQuantizationType(type_number)
    except ValueError:
        raise ValueError(f"tensor {name!r} has the unknown type {type_number}") from None
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    if shape[-1] % block_size:
        raise ValueError(
            f"tensor {name!r} has rows of {shape[-1]} values, and {quantization.name} stores blocks "
            f"of {block_size}"
        )
    return quantization.name, math.prod(shape) // block_size * block_bytes
