"""The sampler: logits to tokens, in one of three programs that the host chooses by the batch.

Drawing is argmax(logits / temperature + Gumbel noise), which is exact sampling from the softmax
(Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). A row's noise depends only on its request's
seed and on how many tokens it has, never on its place in the batch or on its neighbours.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

SamplingMode = Literal["greedy", "random", "filtered"]
"""All rows greedy; no row with top_k, top_p or min_p; anything."""

SAMPLING_MODES: tuple[SamplingMode, ...] = ("greedy", "random", "filtered")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingMetadata:
    """Settings of each row, all [B]: int32, and float32 from `temperature` (0: greedy) on."""

    num_tokens: jax.Array
    seed_high: jax.Array
    seed_low: jax.Array
    top_k: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array


def sample(logits: jax.Array, meta: SamplingMetadata, mode: SamplingMode) -> jax.Array:
    """Samples a token for each row: logits [B, V] float32 -> [B] int32.

    `mode` is the cheapest program that does what every row asks for; it never changes a row's
    token.
    """
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if mode == "greedy":
        return likeliest
    is_greedy = meta.temperature == 0
    scaled = logits / jnp.where(is_greedy, 1.0, meta.temperature)[:, None]
    if mode == "filtered":
        scaled = filter_logits(scaled, meta.top_k, meta.top_p, meta.min_p)
    noise = gumbel_noise(meta.seed_high, meta.seed_low, meta.num_tokens, logits.shape[-1])
    drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
    return jnp.where(is_greedy, likeliest, drawn)


def gumbel_noise(
    seed_high: jax.Array, seed_low: jax.Array, num_tokens: jax.Array, vocab_size: int
) -> jax.Array:
    """Standard Gumbel noise [B, V] float32 from a 64-bit seed and a token count for each row."""

    def row(high: jax.Array, low: jax.Array, count: jax.Array) -> jax.Array:
        words = lax.bitcast_convert_type(jnp.stack([high, low]), jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), count)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(seed_high, seed_low, num_tokens)


def filter_logits(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Sets logits [B, V] outside min_p, then top_k, then top_p to -inf (vLLM's order).

    top_p counts probabilities among the tokens that the other two left, and keeps the token that
    crosses p. Tokens tied with the last one kept are kept too. top_k = 0, top_p = 1 and min_p = 0
    keep all.
    """
    ranked = -jnp.sort(-logits, axis=-1)  # [B, V], likeliest first
    rank = jnp.arange(logits.shape[-1])
    best = ranked[:, :1]
    keep = ranked - best >= jnp.log(min_p)[:, None]
    keep &= (rank < top_k[:, None]) | (top_k == 0)[:, None]
    shares = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares  # probability of all likelier tokens
    keep &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    keep |= rank == 0  # rounding may never drop the likeliest
    threshold = jnp.min(jnp.where(keep, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)
