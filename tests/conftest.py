"""Settings of all tests: no network, a compilation cache of their own, `gpu` tests only on a GPU."""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

# Read once by huggingface_hub and jax, so set before anything imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
# Programs that an earlier run compiled would hide faults; within a run, engines share theirs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="tinyvllm-jax-tests-")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import hypothesis
import pytest

# A slow machine is no fault: pytest's own timeout is the limit.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@functools.cache
def _has_nvidia_gpu() -> bool:
    import jax

    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:  # jax has no such backend here
        return False


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips `gpu` tests where there is no NVIDIA GPU; other tests never start jax for this."""
    if item.get_closest_marker("gpu") and not _has_nvidia_gpu():
        pytest.skip("needs an NVIDIA GPU and jax[cuda13]")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF; skips where it is neither cached nor to be had."""
    from tinyvllm_jax.loading.demo_model import fetch_demo_model

    try:
        return fetch_demo_model()
    except OSError as error:
        pytest.skip(f"no demo model: {error}")
