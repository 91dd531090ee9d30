"""Settings of all tests: no network, a compilation cache of their own, `gpu` tests only on a GPU."""

import atexit
import functools
import os
import shutil
import tempfile

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
