"""Settings: EngineConfig (what a user chooses) and ModelConfig (what a checkpoint is).

ModelConfig.from_hf is the only reader of Hugging Face attributes; EngineConfig.resolve turns every
"auto" and None into a value, once. Both are pure.
"""

import dataclasses
import math
from typing import Any, Literal

DEFAULT_MODEL = "smollm2-135m"


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Engine settings (vLLM's names). None and "auto" are resolved when the engine starts.

    Raises:
      ValueError: a value is out of range; the message names the field.
      TypeError: a keyword that is not a field.
    """

    model: str = DEFAULT_MODEL
    """Folder with safetensors or a converted checkpoint, a .gguf file, a hub id (org/name), or
    smollm2-135m.
    """
    tokenizer: str | None = None
    """Folder, .gguf file, hub id or demo model to take the tokenizer from; None is the model's
    own.
    """
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    load_format: Literal["auto", "dummy"] = "auto"
    """"dummy" makes random weights of the model's shape: for benchmarks without a checkpoint."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts must be token ids and outputs have no text."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of weights, activations and KV cache. "auto" is bfloat16 on a GPU and on
    a CPU with bfloat16 instructions, float32 on other CPUs."""
    max_model_len: int | None = None
    """Most tokens of a sequence, prompt and output together; None is the model's own limit."""
    max_num_seqs: int | None = None
    """Most sequences that run at once; None is 256 on a GPU, 32 on a CPU."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step; longer prompts are prefilled in chunks. None is 8192 on a GPU,
    1024 on a CPU.
    """
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, activations and KV cache together. A CPU's cache is
    sized by kv_cache_memory_bytes."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of KV cache, instead of a size derived from the device's memory."""
    num_gpu_blocks_override: int | None = None
    """Number of KV cache blocks, instead of a size derived from memory."""
    block_size: int = 64
    """Tokens in a block of the KV cache: 4, 8, 16, 32, 64 or 128 (Mosaic GPU kernels from 16)."""
    attention_backend: Literal["auto", "mosaic_gpu", "xla", "reference"] = "auto"
    """Implementation of attention and cache update. "auto": Mosaic GPU kernels on Hopper, else
    XLA.
    """
    seed: int = 0
    """Seed of requests that bring none, and of dummy weights."""

    def __post_init__(self) -> None:
        for field in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
        ):
            value = getattr(self, field)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ValueError(f"{field} must be a positive integer or None, got {value!r}")
        blocks = self.num_gpu_blocks_override
        if blocks is not None and (
            not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 2
        ):
            raise ValueError(
                "num_gpu_blocks_override must be an integer >= 2 (block 0 is a dummy), got "
                f"{blocks!r}"
            )
        if blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("give num_gpu_blocks_override or kv_cache_memory_bytes, not both")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")
        if self.block_size not in (4, 8, 16, 32, 64, 128):
            raise ValueError(f"block_size must be 4, 8, 16, 32, 64 or 128, got {self.block_size!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(
                f"model must be a path, a hub id or a demo model's name, got {self.model!r}"
            )
        for field, values in (
            ("load_format", ("auto", "dummy")),
            ("dtype", ("auto", "bfloat16", "float16", "float32")),
            ("attention_backend", ("auto", "mosaic_gpu", "xla", "reference")),
        ):
            if getattr(self, field) not in values:
                raise ValueError(
                    f"{field} must be one of {', '.join(values)}; got {getattr(self, field)!r}"
                )

    def resolve(self, model: "ModelConfig", *, on_gpu: bool, cpu_has_bf16: bool) -> "EngineConfig":
        """Returns a copy in which no field is None or "auto", except the cache sizes and the
        backend.

        Args:
          model: the checkpoint's config.
          on_gpu: whether the default device is a GPU.
          cpu_has_bf16: whether this CPU multiplies bfloat16 in hardware.
        """
        max_model_len = self.max_model_len or model.max_position_embeddings
        if max_model_len > model.longest_model_len:
            raise ValueError(
                f"max_model_len={max_model_len} is more than the model's "
                f"{model.longest_model_len} positions; "
                f"set max_model_len to at most {model.longest_model_len}"
            )
        max_num_seqs = self.max_num_seqs or (256 if on_gpu else 32)
        max_num_batched_tokens = self.max_num_batched_tokens
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(8192 if on_gpu else 1024, 2 * max_num_seqs)
        if max_num_batched_tokens <= max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens} must be more than "
                f"max_num_seqs={max_num_seqs}, "
                "or running sequences would leave no room for new prompts"
            )
        dtype = self.dtype
        if dtype == "auto":
            # The faster of the two on each, measured: docs/performance.md.
            dtype = "bfloat16" if on_gpu or cpu_has_bf16 else "float32"
        return dataclasses.replace(
            self,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            dtype=dtype,
        )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `rope_type` is default, linear, dynamic, llama3, yarn or factors; the rest
    is its numbers.

    "factors" divides each frequency by an entry of `freq_factors` (how GGUF stores llama3 scaling).
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    freq_factors: tuple[float, ...] | None = None


ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of one dense decoder-only model. Families differ only in these numbers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many latest tokens it sees, or None for all of them."""

    @property
    def longest_model_len(self) -> int:
        """Most positions that `max_model_len` may ask for: scaled rotary types reach past the
        default.
        """
        rope = self.rope
        scaled = {
            "linear": self.max_position_embeddings * rope.factor,
            "dynamic": self.max_position_embeddings * rope.factor,
            "yarn": rope.original_max_position * rope.factor,
        }
        return max(self.max_position_embeddings, int(scaled.get(rope.rope_type, 0)))

    @classmethod
    def from_hf(cls, hf: Any) -> "ModelConfig":
        """Reads a transformers config of a supported family.

        Raises:
          ValueError: an unknown architecture, activation or rope type, or sizes that don't fit
            together.
        """
        model_type = getattr(hf, "model_type", None)
        if model_type not in _FAMILIES:
            raise ValueError(
                f"model_type {model_type!r} is not supported; supported are "
                f"{', '.join(sorted(_FAMILIES))}"
            )
        if hf.hidden_act != "silu":
            raise ValueError(
                f"hidden_act {hf.hidden_act!r} is not supported; the decoder computes silu"
            )
        heads = hf.num_attention_heads
        kv_heads = getattr(hf, "num_key_value_heads", None) or heads
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        return cls(
            model_type=model_type,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
            rms_norm_eps=hf.rms_norm_eps,
            max_position_embeddings=hf.max_position_embeddings,
            rope=_rope_from_hf(hf),
            tie_word_embeddings=bool(hf.tie_word_embeddings),
            sliding_windows=_sliding_windows_from_hf(hf),
            **_FAMILIES[model_type](hf),
        )

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of the weights that one decode step reads (all but an untied embedding table)."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (
            heads + self.num_heads * self.head_dim + 3 * self.intermediate_size
        )
        return itemsize * (self.num_layers * layer + self.vocab_size * self.hidden_size)


def _dense(
    *, qkv_bias: bool = False, o_bias: bool = False, mlp_bias: bool = False, qk_norm: bool = False
):
    return {"qkv_bias": qkv_bias, "o_bias": o_bias, "mlp_bias": mlp_bias, "qk_norm": qk_norm}


# What sets each family apart, by model_type.
_FAMILIES = {
    "llama": lambda hf: _dense(
        qkv_bias=bool(hf.attention_bias), o_bias=bool(hf.attention_bias), mlp_bias=bool(hf.mlp_bias)
    ),
    "mistral": lambda hf: _dense(),
    "qwen2": lambda hf: _dense(qkv_bias=True),
    "qwen3": lambda hf: _dense(
        qkv_bias=bool(hf.attention_bias), o_bias=bool(hf.attention_bias), qk_norm=True
    ),
}


def _sliding_windows_from_hf(hf: Any) -> tuple[int | None, ...]:
    """Per-layer windows. Mistral's window holds for every layer, Qwen's only where layer_types
    says so.
    """
    window = getattr(hf, "sliding_window", None)
    if hf.model_type.startswith("qwen") and not getattr(hf, "use_sliding_window", False):
        window = None
    layer_types = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    unknown = set(layer_types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ValueError(f"layer_types holds {sorted(unknown)}, which the decoder does not have")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rope_from_hf(hf: Any) -> RopeConfig:
    """Reads rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    raw = dict(getattr(hf, "rope_scaling", None) or {})
    raw.update(getattr(hf, "rope_parameters", None) or {})
    theta = raw.get("rope_theta") or getattr(hf, "rope_theta", None) or 10000.0
    rope_type = raw.get("rope_type") or raw.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    partial = raw.get("partial_rotary_factor", getattr(hf, "partial_rotary_factor", None))
    if partial not in (None, 1, 1.0):
        raise ValueError(
            f"partial_rotary_factor={partial} is not supported; the decoder rotates whole heads"
        )
    freq_factors = getattr(hf, "gguf_rope_freq_factors", None)
    if freq_factors is not None:
        return RopeConfig(
            "factors", float(theta), freq_factors=tuple(float(f) for f in freq_factors)
        )
    factor = raw.get("factor", 1.0)
    original = raw.get("original_max_position_embeddings") or hf.max_position_embeddings
    if rope_type == "yarn" and "factor" not in raw:
        factor = hf.max_position_embeddings / original
    if not (isinstance(factor, int | float) and math.isfinite(factor) and factor >= 1):
        raise ValueError(f"rope factor must be a number >= 1, got {factor!r}")
    optional = lambda name: None if raw.get(name) is None else float(raw[name])
    return RopeConfig(
        rope_type,
        float(theta),
        factor=float(factor),
        original_max_position=int(original),
        low_freq_factor=float(raw.get("low_freq_factor", 1.0)),
        high_freq_factor=float(raw.get("high_freq_factor", 4.0)),
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
        truncate=bool(raw.get("truncate", True)),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )
