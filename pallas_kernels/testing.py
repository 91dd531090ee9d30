"""Random paged inputs for tests: permuted blocks, ragged contexts, poisoned leftovers.

What a kernel must not read is NaN: every block outside the contexts and, if `poison_slots`, the
slots of a context's last block beyond the context. What it must not write can be compared.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class PagedInputs:
    """Arrays of one call; `cu_seqlens_q` and q's rows fit prefill, or q is [B, H, h] for decode."""

    q: jax.Array
    k_cache: jax.Array
    v_cache: jax.Array
    block_tables: jax.Array
    context_lens: jax.Array
    cu_seqlens_q: jax.Array


def edge_contexts(block_size: int, capacity: int) -> list[int]:
    """Contexts at which off-by-one errors show."""
    edges = [0, 1, block_size - 1, block_size, block_size + 1, capacity // 2 + 3, capacity - 1]
    return [*edges, capacity]


def random_inputs(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    context_lens: list[int],
    query_lens: list[int] | None = None,
    dtype: Any = jnp.bfloat16,
    num_layers: int = 2,
    capacity: int | None = None,
    poison_slots: bool = True,
    padding_rows: int = 0,
    seed: int = 0,
) -> PagedInputs:
    """Random inputs; decode (one query a sequence) if query_lens is None.

    Args:
      context_lens: tokens of each sequence.
      query_lens: new tokens of each sequence, at most its context.
      capacity: tokens that a block table holds; None is the longest context.
      poison_slots: NaN in unused slots of used blocks too.
      padding_rows: rows of q behind the last sequence's.
    """
    rng = np.random.default_rng(seed)
    batch = len(context_lens)
    width = -(-(capacity or max(*context_lens, 1)) // block_size)
    used = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(used) + 3
    free = rng.permutation(num_blocks)
    tables = rng.integers(0, num_blocks, (batch, width), dtype=np.int32)  # garbage past the context
    shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
    k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    readable = np.zeros((num_blocks, block_size), bool)
    for b, count in enumerate(used):
        mine, free = free[:count], free[count:]
        tables[b, :count] = mine
        readable[mine] = True
        if poison_slots and context_lens[b] % block_size:
            readable[mine[-1], context_lens[b] % block_size :] = False
    poisoned = np.where(readable[None, :, None, :, None], 0.0, np.nan).astype(np.float32)
    cu_seqlens_q = np.concatenate([[0], np.cumsum(query_lens or [1] * batch)]).astype(np.int32)
    q = rng.standard_normal((int(cu_seqlens_q[-1]) + padding_rows, num_heads, head_dim))
    return PagedInputs(
        jnp.asarray(q, dtype),
        jnp.asarray(k + poisoned, dtype),
        jnp.asarray(v + poisoned, dtype),
        jnp.asarray(tables),
        jnp.asarray(context_lens, jnp.int32),
        jnp.asarray(cu_seqlens_q),
    )


def relative_error(got: jax.Array | np.ndarray, want: jax.Array | np.ndarray) -> float:
    """||got - want|| / ||want|| in float32; a NaN in `got` gives NaN, which passes no test."""
    a, b = (np.asarray(x, np.float32) for x in (got, want))
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))
