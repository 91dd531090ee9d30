"""The one dense decoder: llama, mistral, qwen2 and qwen3 are settings of it
(config.ModelConfig).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tinyvllm_jax.config import ModelConfig
from tinyvllm_jax.layers.attention import Attention, AttentionMetadata, KVCache
from tinyvllm_jax.layers.embedding import Embedding
from tinyvllm_jax.layers.linear import Linear, matmul
from tinyvllm_jax.layers.mlp import MLP
from tinyvllm_jax.layers.norm import RMSNorm
from tinyvllm_jax.layers.rotary import rope_frequencies, rotary_tables


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: Any, backend: str):
        name = f"model.layers.{layer}"
        norm = lambda n: RMSNorm(
            config.hidden_size, f"{name}.{n}", eps=config.rms_norm_eps, dtype=dtype
        )
        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Attention(config, layer, f"{name}.self_attn", dtype=dtype, backend=backend)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            f"{name}.mlp",
            bias=config.mlp_bias,
            dtype=dtype,
        )

    def __call__(
        self,
        x: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        cache: KVCache,
        meta: AttentionMetadata,
    ) -> tuple[jax.Array, KVCache]:
        with jax.named_scope("attention"):
            attended, cache = self.self_attn(self.input_layernorm(x), rotary, cache, meta)
            x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    """Token ids to hidden states over a paged cache; `logits` turns the rows that need it into
    scores.

    Built from declarations: its leaves are ShapeDtypeStructs until loading fills them.
    """

    def __init__(
        self, config: ModelConfig, *, max_model_len: int, dtype: Any, backend: str = "auto"
    ):
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, "model.embed_tokens", dtype=dtype
        )
        # A plain Python loop over layers, not a scan: a scan copies each layer's weights every
        # step.
        self.layers = nnx.List(
            [
                DecoderLayer(config, layer, dtype=dtype, backend=backend)
                for layer in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, "model.norm", eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(
                config.hidden_size,
                config.vocab_size,
                "lm_head",
                axes=("vocab", "embed"),
                dtype=dtype,
            )
        )
        inv_freq, self.rope_scale = rope_frequencies(config.rope, config.head_dim, max_model_len)
        self.inv_freq = tuple(inv_freq.tolist())  # static: no leaf of the model

    def __call__(
        self, token_ids: jax.Array, cache: KVCache, meta: AttentionMetadata
    ) -> tuple[jax.Array, KVCache]:
        """token_ids [T] int32 -> hidden states [T, D] before the final norm, and the updated
        cache.
        """
        rotary = rotary_tables(
            meta.positions, jnp.asarray(self.inv_freq, jnp.float32), self.rope_scale
        )
        x = self.embed_tokens(token_ids)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x, cache = layer(x, rotary, cache, meta)
        return x, cache

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states [B, D] -> scores [B, V] in float32."""
        with jax.named_scope("head"):
            x = self.norm(x)
            if self.lm_head is None:
                return self.embed_tokens.attend(x)
            return matmul(x, self.lm_head.weight[...])


def build_model(
    config: ModelConfig, *, max_model_len: int, dtype: Any, backend: str = "auto"
) -> Decoder:
    """Declares the model of a config. Nothing is allocated."""
    return Decoder(config, max_model_len=max_model_len, dtype=dtype, backend=backend)
