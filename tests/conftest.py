"""Settings of all tests: no network, no shared compilation cache, `gpu` tests only on a GPU."""

import functools
import os

# Read once by huggingface_hub, jax and transformers, so set before anything imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
# Programs that an earlier run compiled would hide faults.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# transformers remarks at import that PyTorch is missing; here it always is.
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"

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
