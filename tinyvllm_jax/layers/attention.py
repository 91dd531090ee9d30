"""Self-attention over the paged KV cache: project, normalise, rotate, store K and V, attend.

This file is the seam to pallas_kernels: the same module serves prefill and decode, and the
metadata says which of the two it is.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import paged_attention_decode, paged_attention_prefill, store_kv_cache
from tinyvllm_jax.config import ModelConfig
from tinyvllm_jax.layers.linear import Linear
from tinyvllm_jax.layers.norm import RMSNorm
from tinyvllm_jax.layers.rotary import apply_rotary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The block pool of all layers: k and v [L, N, K, S, h]. Block 0 belongs to padding rows."""

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of a step stand. One array set for all layers.

    Attributes:
      positions: [T] int32, position of each token in its sequence.
      slot_mapping: [T] int32, cache slot (block * S + offset) of each token; -1 for padding.
      block_tables: [B, M] int32, the blocks of each sequence.
      context_lens: [B] int32, tokens of each sequence up to and with this step; 0 for padding.
      cu_seqlens_q: [B+1] int32, where each sequence's tokens start; None in a decode step, where T
        = B.
    """

    positions: jax.Array
    slot_mapping: jax.Array
    block_tables: jax.Array
    context_lens: jax.Array
    cu_seqlens_q: jax.Array | None


class Attention(nnx.Module):
    """Grouped-query attention of one layer."""

    def __init__(self, config: ModelConfig, layer: int, name: str, *, dtype: Any, backend: str):
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.layer = layer
        self.sliding_window = config.sliding_windows[layer]
        self.backend = backend
        self.qkv_proj = Linear(
            config.hidden_size,
            (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            *(f"{name}.{p}_proj" for p in "qkv"),
            axes=("heads", "embed"),
            dtype=dtype,
            bias=config.qkv_bias,
        )
        self.o_proj = Linear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            f"{name}.o_proj",
            axes=("embed", "heads"),
            dtype=dtype,
            bias=config.o_bias,
        )
        norm = lambda n: RMSNorm(
            config.head_dim, f"{name}.{n}", eps=config.rms_norm_eps, dtype=dtype
        )
        self.q_norm = norm("q_norm") if config.qk_norm else None
        self.k_norm = norm("k_norm") if config.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        cache: KVCache,
        meta: AttentionMetadata,
    ) -> tuple[jax.Array, KVCache]:  # x [T, D]
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).reshape(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        q, k, v = jnp.split(
            qkv, (heads, heads + kv_heads), axis=1
        )  # [T, H, h], [T, K, h], [T, K, h]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        # The layer index is an array, so that one lowering of a kernel serves all layers.
        where: dict[str, Any] = {"layer": jnp.int32(self.layer), "implementation": self.backend}
        cache = KVCache(*store_kv_cache(cache.k, cache.v, k, v, meta.slot_mapping, **where))
        where["sliding_window"] = self.sliding_window
        if meta.cu_seqlens_q is None:
            out = paged_attention_decode(
                q, cache.k, cache.v, meta.block_tables, meta.context_lens, **where
            )
        else:
            out = paged_attention_prefill(
                q,
                cache.k,
                cache.v,
                meta.block_tables,
                meta.context_lens,
                meta.cu_seqlens_q,
                **where,
            )
        return self.o_proj(out.reshape(x.shape[0], heads * self.head_dim)), cache
