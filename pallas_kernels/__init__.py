"""Paged attention and KV cache kernels for JAX programs; needs jax and numpy only."""

from pallas_kernels.kv_cache_update.api import store_kv_cache
from pallas_kernels.paged_attention.api import paged_attention_decode, paged_attention_prefill

__all__ = ["paged_attention_decode", "paged_attention_prefill", "store_kv_cache"]
