"""Fixtures of the end-to-end tests."""

from collections.abc import Callable
from pathlib import Path

import jax.monitoring
import pytest

from tinyvllm_jax.loading.demo_model import fetch_demo_model

COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering and compiling


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF; skips where it is neither cached nor to be had."""
    try:
        return fetch_demo_model()
    except OSError as error:
        pytest.skip(f"no demo model: {error}")


@pytest.fixture
def compilations() -> Callable[[], int]:
    """Returns a function that counts traces, lowerings and compilations since the test began."""
    count = 0

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        nonlocal count
        count += event.startswith(COMPILE_EVENTS)

    jax.monitoring.register_event_duration_secs_listener(listener)
    jax.jit(lambda x: x + 1)(1)  # proves that the event still has this name
    assert count, f"jax no longer reports {COMPILE_EVENTS}..."
    count = 0
    return lambda: count
