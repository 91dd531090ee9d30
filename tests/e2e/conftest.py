"""Fixtures of the end-to-end tests."""

from collections.abc import Callable

import jax.monitoring
import pytest

COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering and compiling


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
