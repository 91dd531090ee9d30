"""What every benchmark card holds: where and when it ran, and the ceilings measured in the same
run.
"""

import datetime
import os
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


def environment() -> dict[str, Any]:
    """Date, device, versions and commit."""
    import jax

    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax")},
        "commit": commit(),
    }


def commit() -> str:
    """The checkout's commit, or the one named by TINYVLLM_COMMIT where there is no checkout."""
    named = os.environ.get("TINYVLLM_COMMIT")
    if named:
        return named
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def seconds_a_call(run: Callable[[], Any], *, calls: int = 10, repeats: int = 5) -> float:
    """Seconds of one call: the best of several rounds of calls, after one that compiles.

    The calls of a round are dispatched back to back and waited for once, since waiting for a GPU
    costs the host more than a short call takes.
    """
    import jax

    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)])
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def read_bandwidth() -> float:
    """Bytes per second of a jitted sum over an array far larger than any cache."""
    import jax
    import jax.numpy as jnp

    num_bytes = 2**31 if jax.default_backend() == "gpu" else 2**28
    array = jnp.ones((num_bytes // 4 // 4096, 4096), jnp.float32)
    total = jax.jit(lambda a: a.sum(axis=1))
    return array.nbytes / seconds_a_call(lambda: total(array))


def matmul_rate(dtype: Any) -> float:
    """Operations per second of a large matrix product of random numbers."""
    import jax
    import jax.numpy as jnp

    size = 8192 if jax.default_backend() == "gpu" else 1024
    a = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    product = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32).astype(dtype))
    return 2 * size**3 / seconds_a_call(lambda: product(a))
