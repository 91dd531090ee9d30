"""Times the kernels on the device: correctness first, then microseconds and the share of the bound.

Each program calls a kernel several times on different blocks, so that one call's KV is not in the
L2 cache of the next and the host's dispatch does not count. Decode is bound by reading K and V once,
prefill by its arithmetic; both ceilings are measured in the same run.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import card
import command_line
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from pallas_kernels import paged_attention_decode, paged_attention_prefill
from pallas_kernels.paged_attention.cases import (
    DECODE_BENCHMARKS,
    PREFILL_BENCHMARKS,
    DecodeBenchmark,
    Heads,
    PrefillBenchmark,
)
from pallas_kernels.testing import random_inputs, relative_error

BLOCK_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare the kernels with the reference, then time them."""

    out: Path | None = None
    """JSON file to write the results to."""
    implementations: tuple[str, ...] = ("mosaic_gpu", "xla")
    """What to measure."""
    smoke: bool = False
    """Tiny shapes and XLA only: checks this script on a machine without a GPU."""


@functools.cache
def pool(heads: Heads, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """K and V [1, N, K, S, h] bfloat16, random, of this many tokens."""
    shape = (1, num_tokens // BLOCK_SIZE, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
    make = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16))
    return make(0), make(1)


def block_tables(num_blocks: int, batch: int, context: int, implementation: str) -> list[jax.Array]:
    """Several [B, M] tables over different blocks, as far as the pool has them. XLA's loops are slow
    to compile, and two calls of them are long enough."""
    width, rng = -(-context // BLOCK_SIZE), np.random.default_rng(0)
    calls = 2 if implementation == "xla" else int(np.clip(num_blocks // (batch * width), 2, 16))
    tables = []
    for _ in range(calls):
        blocks = np.resize(rng.permutation(num_blocks), (batch, width))
        tables.append(jnp.asarray(blocks, jnp.int32))
    return tables


def time_calls(
    call: Callable[..., jax.Array], tables: list[jax.Array], *arrays: jax.Array
) -> float:
    """Seconds of one call, all tables' calls being in one program."""
    program = jax.jit(lambda tables, *arrays: [call(table, *arrays) for table in tables])
    return card.seconds_a_call(lambda: program(tables, *arrays)) / len(tables)


def decode(case: DecodeBenchmark, implementation: str, pool_tokens: int) -> tuple[float, int]:
    """(seconds, bytes of K and V that must be read)."""
    heads = case.heads
    k_cache, v_cache = pool(heads, pool_tokens)
    q = jnp.ones((case.batch, heads.num_heads, heads.head_dim), jnp.bfloat16)
    lens = jnp.full((case.batch,), case.context, jnp.int32)
    layer = jnp.int32(0)
    call = lambda table, q, k, v, lens: paged_attention_decode(
        q, k, v, table, lens, layer=layer, implementation=implementation
    )
    tables = block_tables(k_cache.shape[1], case.batch, case.context, implementation)
    seconds = time_calls(call, tables, q, k_cache, v_cache, lens)
    row_bytes = heads.num_kv_heads * heads.head_dim * k_cache.dtype.itemsize
    return seconds, 2 * case.batch * case.context * row_bytes


def prefill(case: PrefillBenchmark, implementation: str, pool_tokens: int) -> tuple[float, int]:
    """(seconds, operations of the visible query and key pairs)."""
    heads, new = case.heads, case.new
    k_cache, v_cache = pool(heads, pool_tokens)
    q = jnp.ones((case.batch * new, heads.num_heads, heads.head_dim), jnp.bfloat16)
    lens = jnp.full((case.batch,), new + case.prefix, jnp.int32)
    starts = jnp.arange(case.batch + 1, dtype=jnp.int32) * new
    layer = jnp.int32(0)
    call = lambda table, q, k, v, lens, starts: paged_attention_prefill(
        q, k, v, table, lens, starts, layer=layer, implementation=implementation
    )
    tables = block_tables(k_cache.shape[1], case.batch, new + case.prefix, implementation)[:4]
    seconds = time_calls(call, tables, q, k_cache, v_cache, lens, starts)
    pairs = case.batch * (new * (new + 1) // 2 + new * case.prefix)
    return seconds, 4 * pairs * heads.num_heads * heads.head_dim


def check(implementation: str) -> None:
    """Compares with the reference on random ragged inputs; raises ValueError if it is wrong."""
    x = random_inputs(
        num_heads=16, num_kv_heads=8, head_dim=128, block_size=BLOCK_SIZE,
        context_lens=[0, 1, 63, 64, 65, 500], poison_slots=False,
    )  # fmt: skip
    arguments = (x.q, x.k_cache, x.v_cache, x.block_tables, x.context_lens)
    got, want = (
        paged_attention_decode(*arguments, layer=1, implementation=name)
        for name in (implementation, "reference")
    )
    error = relative_error(got, want)
    print(f"{implementation}: relative error {error:.1e}")
    if not error < 8e-3:
        raise ValueError(f"{implementation} is wrong: relative error {error}")


def main(argv: Sequence[str] | None = None) -> None:
    options = command_line.parse_plain(Options, argv)
    implementations, pool_tokens = options.implementations, 2**21
    cases: list[Any] = [*DECODE_BENCHMARKS, *PREFILL_BENCHMARKS]
    if options.smoke:
        implementations, pool_tokens, heads = ("xla",), 2**12, Heads(4, 2, 64)
        cases = [DecodeBenchmark(heads, 2, 256), PrefillBenchmark(heads, 1, 128, 64)]
    for implementation in implementations:
        check(implementation)
    bandwidth, rate = card.read_bandwidth(), card.matmul_rate(jnp.bfloat16)
    results = []
    for case in tqdm(cases, desc="Cases"):
        is_decode = isinstance(case, DecodeBenchmark)
        for implementation in implementations:
            if is_decode:
                seconds, amount = decode(case, implementation, pool_tokens)
            else:
                seconds, amount = prefill(case, implementation, pool_tokens)
            results.append(
                {
                    "kernel": "paged_attention_" + ("decode" if is_decode else "prefill"),
                    "implementation": implementation,
                    "case": {**dataclasses.asdict(case), "heads": str(case.heads)},
                    "dtype": "bfloat16",
                    "us": round(seconds * 1e6, 2),
                    "bytes" if is_decode else "flops": amount,
                    "share_of_bound": round(
                        amount / seconds / (bandwidth if is_decode else rate), 3
                    ),
                }
            )
    for result in results:
        print(*(f"{value!s:>12}" for key, value in result.items() if key != "dtype"))
    document = card.environment() | {
        "read_gb_per_s": round(bandwidth / 1e9),
        "matmul_tflop_per_s": round(rate / 1e12),
        "results": results,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    command_line.run(main)
