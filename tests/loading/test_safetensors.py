"""The safetensors reader: the same arrays as the library, and every corruption a clear error."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tinyvllm_jax.loading.safetensors import DTYPES, SafetensorsCheckpoint


def random_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": rng.standard_normal((2, 2, 2)).astype(ml_dtypes.bfloat16),
        "d": rng.integers(-9, 9, (4,)).astype(np.int8),
        "e": np.zeros((0, 3), np.int64),
        "f": np.array(True),
    }


def write_raw(path: Path, header: object, data: bytes) -> Path:
    """A file with any header, right or wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_same_as_the_library(tmp_path):
    tensors = random_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    library = load_file(tmp_path / "model.safetensors")
    assert set(checkpoint) == set(tensors) and len(checkpoint) == len(tensors)
    for name, tensor in checkpoint.items():
        assert tensor.dtype == tensors[name].dtype and not tensor.flags.writeable
        assert np.array_equal(tensor, tensors[name]) and np.array_equal(tensor, library[name])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(tmp_path, dtype):
    size = DTYPES[dtype].itemsize
    data = bytes(range(1, 4 * size + 1))
    if dtype == "BOOL":
        data = b"\0\1\1\0"
    write_raw(tmp_path / "x.safetensors", {"x": entry(dtype, (2, 2), (0, 4 * size))}, data)
    tensor = SafetensorsCheckpoint(tmp_path)["x"]
    assert tensor.dtype == DTYPES[dtype] and tensor.shape == (2, 2) and tensor.tobytes() == data


def write_shards(folder: Path) -> dict[str, np.ndarray]:
    tensors = random_tensors()
    names = list(tensors)
    weight_map = {}
    for number, part in ((1, names[:3]), (2, names[3:])):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_shards(tmp_path):
    tensors = write_shards(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert all(np.array_equal(checkpoint[name], tensor) for name, tensor in tensors.items())


def test_faults_of_sharded_checkpoints(tmp_path):
    def broken(name: str) -> Path:
        shutil.copytree(tmp_path / "good", tmp_path / name)
        return tmp_path / name

    (tmp_path / "good").mkdir()
    write_shards(tmp_path / "good")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    folder = broken("missing")
    (folder / second).unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002.*is missing; download"):
        SafetensorsCheckpoint(folder)
    folder = broken("stale")
    save_file({"a": np.ones(3, np.float32)}, folder / second)
    with pytest.raises(ValueError, match=r"'a' is in both"):
        SafetensorsCheckpoint(folder)
    folder = broken("short")
    save_file({"a": np.ones(3, np.float32)}, folder / first)
    with pytest.raises(ValueError, match=r"tensor 'b' is in model-00001.*it is not"):
        SafetensorsCheckpoint(folder)
    folder = broken("escape")
    index = {"weight_map": {"a": "../good/" + first}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no file name"):
        SafetensorsCheckpoint(folder)
    folder = broken("index")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="no 'weight_map'"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": entry("F33")}, b"\0" * 8, "dtype 'F33'"),
        ({"x": entry(shape=(3,))}, b"\0" * 8, "needs 12 bytes and has 8"),
        ({"x": entry(shape=(-2,))}, b"\0" * 8, "has shape"),
        ({"x": entry(shape=(2**62, 2**62))}, b"\0" * 8, "impossible shape"),
        ({"x": entry(offsets=(8, 0))}, b"\0" * 8, "data_offsets"),
        ({"x": entry()}, b"\0" * 7, "need 8 bytes of data and it has 7"),
        ({"x": entry()}, b"\0" * 9, "need 8 bytes of data and it has 9"),
        ({"x": entry(), "y": entry(offsets=(4, 12))}, b"\0" * 12, "begins at byte 4"),
        ({"x": entry(offsets=(4, 12))}, b"\0" * 12, "begins at byte 4"),
        ({"x": 5}, b"", "the entry of tensor 'x' is 5"),
        ([1], b"", "not an object"),
        (b"{", b"", "JSON does not parse"),
        (b"\xff\xfe", b"", "JSON does not parse"),
    ],
)
def test_corrupt_files_say_what_is_wrong_and_what_to_do(tmp_path, header, data, message):
    file = write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ValueError, match=message) as error:
        SafetensorsCheckpoint(file)
    assert str(file) in str(error.value)


def test_a_name_that_comes_twice(tmp_path):
    raw = json.dumps({"x": entry()}).encode()
    twice = raw[:-1] + b", " + raw[1:]
    with pytest.raises(ValueError, match="'x' comes twice"):
        SafetensorsCheckpoint(write_raw(tmp_path / "x.safetensors", twice, b"\0" * 8))


def test_truncation_anywhere_is_noticed(tmp_path):
    save_file({"a": np.arange(10, dtype=np.float32)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "x.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated or corrupt"):
            SafetensorsCheckpoint(tmp_path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 200), byte=st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused(tmp_path, position, byte):
    file = tmp_path / "x.safetensors"
    save_file({"a": np.ones(4, np.float32), "bb": np.ones((2, 3), np.int8)}, file)
    raw = bytearray(file.read_bytes())
    raw[position % len(raw)] = byte
    file.write_bytes(raw)
    try:
        checkpoint = SafetensorsCheckpoint(file)
    except ValueError as error:
        assert str(file) in str(error)
    else:
        assert all(isinstance(checkpoint[name], np.ndarray) for name in checkpoint)


def test_folders_without_what_is_needed(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        SafetensorsCheckpoint(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(NotImplementedError, match=r"pickled PyTorch weights.*save_pretrained"):
        SafetensorsCheckpoint(tmp_path)
    for name in ("a", "b"):
        save_file({"x": np.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"2 \*\.safetensors files"):
        SafetensorsCheckpoint(tmp_path)
