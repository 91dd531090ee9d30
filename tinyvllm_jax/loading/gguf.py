"""GGUF checkpoints of llama, qwen2 and qwen3 as Hugging Face tensors, config and tokenizer.

GGUF is llama.cpp's single file: metadata, tokenizer and quantised tensors. Tensors are dequantised to
float32 when they are read, one at a time, so that host memory never holds the model.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyvllm_jax.loading.gguf_format import GGUFTensor, import_gguf, read_gguf
from tinyvllm_jax.loading.lazy_imports import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# general.architecture -> class in config.json's "architectures".
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama 3's divisors of the rotary frequencies [h/2]: a setting that is stored as a tensor.
_FREQ_FACTORS = "rope_freqs.weight"
# Metadata that changes the mathematics in a way that these three architectures don't have.
_UNSUPPORTED = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.alpha": 0.0,
}


class GGUFCheckpoint(Mapping[str, np.ndarray]):
    """The tensors of a GGUF file under their Hugging Face names, float32, [out, in].

    `checkpoint[name]` dequantises on every call and keeps nothing. llama.cpp permutes the rows of
    llama's q_proj and k_proj for its interleaved rotary embedding; that is undone.

    Raises:
      FileNotFoundError, ValueError: no such file, or it is truncated or corrupt.
      NotImplementedError: an architecture, tensor or setting that is not supported, or a split file.
      ImportError: the gguf package is missing.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metadata, tensors = read_gguf(self.path)
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            raise NotImplementedError(
                f"{self.path} has the architecture {architecture!r}; supported are "
                f"{', '.join(_ARCHITECTURES)}"
            )
        self.architecture: str = architecture
        factors = tensors.pop(_FREQ_FACTORS, None)
        self.freq_factors: tuple[float, ...] | None = None
        """Divisors of the rotary frequencies [h/2] (how GGUF stores Llama 3's scaling), or None."""
        if factors is not None:
            self.freq_factors = tuple(float(v) for v in self._dequantize(factors).reshape(-1))
        self._tensors = {self._hf_name(name): tensor for name, tensor in tensors.items()}
        if "model.embed_tokens.weight" not in self._tensors:
            raise ValueError(f"{self.path} has no token_embd.weight: it holds no language model")

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._dequantize(self._tensors[name])
        if self.architecture == "llama":
            if ".q_proj." in name:
                return _unpermute(array, self._get("attention.head_count"))
            if ".k_proj." in name:
                return _unpermute(array, self._num_kv_heads)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _hf_name(self, name: str) -> str:
        if name in _NAMES:
            return _NAMES[name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match and match[2] in _BLOCK_NAMES:
            return f"model.layers.{int(match[1])}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
        raise NotImplementedError(
            f"{self.path} has a tensor {name!r}, which the {self.architecture} decoder does not have"
        )

    def _dequantize(self, tensor: GGUFTensor) -> np.ndarray:
        gguf = import_gguf()
        quantization = gguf.GGMLQuantizationType[tensor.quantization]
        data = tensor.data.reshape(*tensor.shape[:-1], -1)
        try:
            return gguf.quants.dequantize(data, quantization).reshape(tensor.shape)
        except NotImplementedError:
            raise NotImplementedError(
                f"{self.path}: tensor {tensor.name!r} is stored as {tensor.quantization}, which the "
                "gguf package cannot dequantise; take a file with another quantisation, e.g. Q8_0"
            ) from None

    def _get(self, key: str, default: Any = None) -> Any:
        """The number `<architecture>.<key>`. Raises ValueError when there is neither it nor a default."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ValueError(f"{self.path} has no metadata {self.architecture}.{key}")
        if isinstance(value, list):
            raise NotImplementedError(
                f"{self.path} has {self.architecture}.{key} per layer, which is not supported"
            )
        if not isinstance(value, int | float):
            raise ValueError(
                f"{self.path} has {self.architecture}.{key} = {value!r}, which is no number"
            )
        return value

    @property
    def _num_kv_heads(self) -> int:
        return self._get("attention.head_count_kv", self._get("attention.head_count"))

    def hf_config(self) -> "PreTrainedConfig":
        """The transformers config (LlamaConfig, Qwen2Config, Qwen3Config) that the metadata describes.

        `gguf_rope_freq_factors` is set on it where the file has `freq_factors`.
        """
        for key, neutral in _UNSUPPORTED.items():
            if (value := self._get(key, neutral)) != neutral:
                raise NotImplementedError(
                    f"{self.path} has {self.architecture}.{key} = {value}, which is not supported"
                )
        hidden_size, num_heads = self._get("embedding_length"), self._get("attention.head_count")
        head_dim = self._get("attention.key_length", hidden_size // max(num_heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if (value := self._get(key, head_dim)) != head_dim:
                raise NotImplementedError(
                    f"{self.path} has {self.architecture}.{key} = {value} and heads of {head_dim}; "
                    "they must be equal"
                )
        settings: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "vocab_size": self._tensors["model.embed_tokens.weight"].shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._get("feed_forward_length"),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": _shortest(self._get("attention.layer_norm_rms_epsilon")),
            "rope_parameters": self._rope_parameters(),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "dtype": self._dtype(),
            # The classes' own defaults for these are ids of one certain tokenizer.
            **{key: None for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
            **self.generation_config(),
        }
        if self.architecture != "qwen2":  # whose q, k and v always have a bias
            settings["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensors
        if self.architecture == "llama":
            settings["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in self._tensors
        if self.freq_factors is not None:
            settings["gguf_rope_freq_factors"] = self.freq_factors
        transformers = import_transformers()
        from huggingface_hub.errors import StrictDataclassError

        try:
            return transformers.AutoConfig.for_model(self.architecture, **settings)
        except StrictDataclassError as e:
            raise ValueError(f"{self.path} describes an impossible model: {e}") from e

    def _rope_parameters(self) -> dict[str, Any]:
        """transformers' rope_parameters; llama.cpp's defaults where the metadata has none."""
        theta = _shortest(self._get("rope.freq_base", 10000.0))
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "linear")
        factor = _shortest(self._get("rope.scaling.factor", self._get("rope.scale_linear", 0.0)))
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return {"rope_type": "default", "rope_theta": theta}
        parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor}
        if kind == "yarn":
            parameters |= {
                "original_max_position_embeddings": self._get(
                    "rope.scaling.original_context_length"
                ),
                "beta_fast": _shortest(self._get("rope.scaling.yarn_beta_fast", 32.0)),
                "beta_slow": _shortest(self._get("rope.scaling.yarn_beta_slow", 1.0)),
            }
        elif kind != "linear":
            raise NotImplementedError(
                f"{self.path} has the rotary scaling {kind!r}; supported are linear and yarn"
            )
        return parameters

    def _dtype(self) -> str:
        """Dtype of the weights before they were quantised: as stored, bfloat16 if quantised."""
        stored = self._tensors["model.embed_tokens.weight"].quantization
        return {"F32": "float32", "F16": "float16"}.get(stored, "bfloat16")

    def generation_config(self) -> dict[str, Any]:
        """bos_token_id, eos_token_id and pad_token_id, as in generation_config.json.

        eos_token_id is a list when end of turn or end of message are tokens of their own.
        """
        ids = {key: self.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in
               ("bos", "eos", "eot", "eom", "padding")}  # fmt: skip
        ends = list(dict.fromkeys(ids[k] for k in ("eos", "eot", "eom") if ids[k] is not None))
        config = {
            "bos_token_id": ids["bos"],
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "pad_token_id": ids["padding"],
        }
        return {key: value for key, value in config.items() if value is not None}

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer that the metadata describes. See gguf_tokenizer.build_tokenizer."""
        from tinyvllm_jax.loading.gguf_tokenizer import build_tokenizer

        return build_tokenizer(self.metadata, self.path)


def _unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows from llama.cpp's order (rotary pairs side by side) to Hugging Face's (two halves).

    Row (head, i, half) becomes row (head, half, i), for a matrix [heads * h, in] or a bias [heads * h].
    """
    rows = array.shape[0]
    if rows % (2 * num_heads):
        raise ValueError(f"{rows} rows are not {num_heads} heads of an even size")
    pairs = array.reshape(num_heads, rows // num_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: GGUF stores 1e-5 as 9.99999974e-06."""
    return float(str(np.float32(value)))
