"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scaled variants.

`rope_frequencies` runs once, on the host; `rotary_tables` and `apply_rotary` run in the step. The
halves of a head are rotated against each other (Hugging Face's layout), not neighbouring pairs.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tinyvllm_jax.config import RopeConfig


def rope_frequencies(
    rope: RopeConfig, head_dim: int, max_model_len: int
) -> tuple[np.ndarray, float]:
    """Returns (inv_freq [h/2] float32, the factor on cos and sin).

    Every frequency is fixed when the engine starts, so a token's K never depends on the length of
    its own or another request. For "dynamic" that means: up to the original length this is the
    unscaled embedding; an engine started with a longer max_model_len scales for that length.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base, scale = rope.theta, 1.0
    if rope.rope_type == "dynamic":
        # NTK-aware scaling of the base for the longest sequence (transformers' dynamic NTK
        # formula).
        length = max(max_model_len, rope.original_max_position)
        grown = rope.factor * length / rope.original_max_position - (rope.factor - 1)
        base = base * grown ** (head_dim / (head_dim - 2))
    inv_freq = (1.0 / np.float32(base) ** exponent).astype(np.float32)
    if rope.rope_type == "linear":
        inv_freq = inv_freq / np.float32(rope.factor)
    elif rope.rope_type == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.rope_type == "yarn":
        inv_freq, scale = _yarn(inv_freq, rope, head_dim)
    elif rope.rope_type == "factors":
        factors = np.asarray(rope.freq_factors, np.float32)
        if factors.shape != inv_freq.shape:
            raise ValueError(
                f"{factors.size} rotary frequency factors for {inv_freq.size} frequencies"
            )
        inv_freq = inv_freq / factors
    return inv_freq.astype(np.float32), scale


def _llama3(inv_freq: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between
    interpolated.
    """
    wavelength = 2 * math.pi / inv_freq
    turns = rope.original_max_position / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn(inv_freq: np.ndarray, rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), equations 17-23, with transformers' defaults."""

    def dimension(turns: float) -> float:
        """The dimension whose frequency makes this many turns over the original context."""
        return (
            head_dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    inv_freq = inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return inv_freq, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return inv_freq, mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return inv_freq, mscale()


def rotary_tables(
    positions: jax.Array, inv_freq: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """positions [T] int32 -> cos, sin [T, 1, h/2] float32, computed once a step for all layers."""
    angles = positions.astype(jnp.float32)[:, None, None] * inv_freq
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [T, heads, h] by the tables of `rotary_tables`, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
