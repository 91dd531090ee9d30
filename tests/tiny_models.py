"""Tiny random checkpoints of every supported family, in Hugging Face format.

`TINY_MODELS` holds config.json contents, `random_weights` the tensors that belong to one of them,
`write_checkpoint` puts both on disk. The stored outputs in data/tiny_references.json were made
from exactly these weights. Two properties make that safe:

- every weight is a small integer times a power of two, so that float32, bfloat16 and float16
  checkpoints hold the same numbers (the references, computed in float32, are valid for all three);
- only integer random numbers are drawn, so that no platform's libm can change a bit.

Only numpy is needed here (and `safetensors` to write; `ml_dtypes` to write bfloat16).
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 160,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 512,
}
_LLAMA: dict[str, Any] = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "mlp_bias": False,
    "model_type": "llama",
    "rope_scaling": None,
    "transformers_version": "4.45.0",
}
# Rotary variants get head_dim 32: 16 frequencies, so that the interpolated band has some in it.
_LLAMA_ROPE = _LLAMA | {"hidden_size": 128, "head_dim": 32}
_MISTRAL: dict[str, Any] = _COMMON | {
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 144,
    "model_type": "mistral",
    "sliding_window": None,  # absent would mean transformers' default, 4096
    "transformers_version": "4.42.0",
}
_QWEN2: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 176,
    "max_window_layers": 1,
    "model_type": "qwen2",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 16,  # without effect unless use_sliding_window, as in the published models
    "tie_word_embeddings": True,
    "transformers_version": "4.43.1",
    "use_sliding_window": False,
}
_QWEN3: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 32,  # not hidden_size / num_attention_heads, as in the published small models
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}


def _without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-tied": _LLAMA
    | {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
    },
    "llama-bias": _LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "llama3-rope": _LLAMA_ROPE
    | {"eos_token_id": [2, 3, 4], "rope_scaling": _LLAMA3_ROPE, "rope_theta": 50000.0},
    "llama-linear": _LLAMA_ROPE | {"rope_scaling": {"factor": 4.0, "rope_type": "linear"}},
    # Below max_position_embeddings the dynamic variant is the plain one; see data/README.md.
    "llama-dynamic": _LLAMA_ROPE
    | {
        "max_position_embeddings": 128,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic"},
    },
    "llama-yarn": _LLAMA_ROPE
    | {
        "max_position_embeddings": 128,
        "rope_scaling": {
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_type": "yarn",
        },
    },
    "llama-yarn-options": _LLAMA_ROPE
    | {
        "max_position_embeddings": 128,
        "rope_scaling": {
            "attention_factor": 1.25,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_type": "yarn",
            "truncate": False,
        },
    },
    # The oldest style: "type", no num_key_value_heads, no head_dim, no biases named.
    "llama-old-config": _without(_LLAMA, "num_key_value_heads", "attention_bias", "mlp_bias")
    | {
        "rope_scaling": {"factor": 2.0, "type": "linear"},
        "rope_theta": 500000.0,
        "transformers_version": "4.31.0",
    },
    # The style of transformers 5: one rope_parameters, dtype instead of torch_dtype.
    "llama-rope-parameters": _without(_LLAMA_ROPE, "rope_scaling", "rope_theta", "torch_dtype")
    | {
        "dtype": "float32",
        "num_key_value_heads": 4,
        "pad_token_id": None,
        "rope_parameters": _LLAMA3_ROPE | {"rope_theta": 10000.0},
        "transformers_version": "5.0.0",
    },
    "mistral": _MISTRAL,
    # head_dim apart from hidden_size / num_attention_heads, as in Mistral-Nemo
    "mistral-head-dim": _MISTRAL | {"head_dim": 32, "rope_theta": 1000000.0},
    "mistral-sliding": _MISTRAL | {"num_key_value_heads": 1, "sliding_window": 16},
    "qwen2": _QWEN2,
    # layer 0 sees everything, layers 1 and 2 the last 16 tokens
    "qwen2-sliding": _QWEN2 | {"tie_word_embeddings": False, "use_sliding_window": True},
    "qwen2-yarn": _QWEN2
    | {
        "max_position_embeddings": 128,
        "rope_scaling": {
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "type": "yarn",
        },
    },
    "qwen3": _QWEN3,
    "qwen3-bias": _QWEN3
    | {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": False},
    # layer types written out, in the style of transformers 5
    "qwen3-sliding": _without(_QWEN3, "rope_scaling", "rope_theta", "torch_dtype")
    | {
        "dtype": "float32",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_key_value_heads": 4,
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_window": 16,
        "transformers_version": "5.0.0",
        "use_sliding_window": True,
    },
}

# Of the seeds 0, 1, 2, ... the first whose three stored generations have every top-1 logit at
# least 0.02 above the second, and no repetitive text (make_tiny_references.py --find-seeds).
_SEEDS: dict[str, int] = {
    "llama": 7,
    "llama-tied": 3,
    "llama-bias": 7,
    "llama3-rope": 9,
    "llama-linear": 2,
    "llama-dynamic": 0,
    "llama-yarn": 0,
    "llama-yarn-options": 3,
    "llama-old-config": 2,
    "llama-rope-parameters": 5,
    "mistral": 12,
    "mistral-head-dim": 31,
    "mistral-sliding": 1,
    "qwen2": 15,
    "qwen2-sliding": 1,
    "qwen2-yarn": 2,
    "qwen3": 11,
    "qwen3-bias": 13,
    "qwen3-sliding": 34,
}

# What a published model of the family adds to the token ids in generation_config.json.
_SAMPLING_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama3-rope": {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    "qwen3": {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


def _config(name: str) -> dict[str, Any]:
    if name not in TINY_MODELS:
        raise ValueError(f"unknown tiny model {name!r}; known are {', '.join(TINY_MODELS)}")
    return TINY_MODELS[name]


def tensor_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes ([out, in] for a projection) of every tensor in the checkpoint of `name`.

    In the order of the layers; a tied head has no tensor. Raises ValueError for an unknown name.
    """
    c = _config(name)
    family = c["model_type"]
    hidden, ffn, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim", hidden // heads)
    q_size, kv_size = heads * head_dim, c.get("num_key_value_heads", heads) * head_dim
    attention_bias = c.get("attention_bias", False)
    qkv_bias = attention_bias or family == "qwen2"
    mlp_bias = c.get("mlp_bias", False)
    projections = [  # name, out, in, has bias
        ("self_attn.q_proj", q_size, hidden, qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, q_size, attention_bias),
        ("mlp.gate_proj", ffn, hidden, mlp_bias),
        ("mlp.up_proj", ffn, hidden, mlp_bias),
        ("mlp.down_proj", hidden, ffn, mlp_bias),
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
    }
    for i in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for projection, size_out, size_in, has_bias in projections:
            shapes[f"{prefix}{projection}.weight"] = (size_out, size_in)
            if has_bias:
                shapes[f"{prefix}{projection}.bias"] = (size_out,)
        if family == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    return shapes


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Uniform values of about this deviation: integers of at most 256 times a power of two."""
    fraction, exponent = math.frexp(std * math.sqrt(3.0))
    bound = round(fraction * 256)  # 128 ... 256: the 8 significant bits of bfloat16
    integers = rng.integers(-bound, bound + 1, size=shape)
    return integers.astype(np.float32) * np.float32(2.0 ** (exponent - 8))


def random_weights(name: str, *, seed: int | None = None) -> dict[str, np.ndarray]:
    """Float32 weights for every tensor of `tensor_shapes(name)`, the same on every platform.

    Scaled such that the logits have a deviation of 2 to 3, attention is far from uniform, norm
    weights lie in [0.5, 1.5] and biases matter. `seed` replaces the model's own seed.
    Raises ValueError for an unknown name.
    """
    c = _config(name)
    seed = _SEEDS[name] if seed is None else seed
    head_std = 2.5 / math.sqrt(c["hidden_size"])
    weights = {}
    for tensor, shape in tensor_shapes(name).items():
        rng = np.random.default_rng([seed, zlib.crc32(tensor.encode())])
        if "norm" in tensor:
            weights[tensor] = 1 + rng.integers(-64, 65, size=shape).astype(np.float32) / 128
        elif tensor.endswith(".bias"):
            weights[tensor] = _uniform(rng, shape, 0.3)
        elif tensor == "lm_head.weight":
            weights[tensor] = _uniform(rng, shape, head_std)
        elif tensor == "model.embed_tokens.weight":
            weights[tensor] = _uniform(rng, shape, head_std if c["tie_word_embeddings"] else 1.0)
        else:
            gain = 1.0
            if "q_proj" in tensor or "k_proj" in tensor:
                gain = 1.5  # attention that picks
            elif c["tie_word_embeddings"] and ("o_proj" in tensor or "down_proj" in tensor):
                gain = 3.0  # drowns the token's own embedding, or a tied model repeats itself
            weights[tensor] = _uniform(rng, shape, gain / math.sqrt(shape[1]))
    return weights


def _storage_dtype(dtype: str) -> np.dtype:
    if dtype in ("float32", "float16"):
        return np.dtype(dtype)
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    raise ValueError(f"dtype {dtype!r} is not one of float32, float16, bfloat16")


def write_checkpoint(
    directory: str | Path, name: str, *, dtype: str = "float32", shards: int = 1
) -> Path:
    """Writes config.json, generation_config.json and the safetensors of `name`; no tokenizer.

    The values are the same in float32, float16 and bfloat16. With shards > 1 the tensors are
    split in order over model-0000i-of-0000n.safetensors with a model.safetensors.index.json.
    Returns the directory, which is made if need be. Raises ValueError for an unknown name or
    dtype, and for a number of shards that is not between 1 and the number of tensors.
    """
    from safetensors.numpy import save_file

    config = dict(_config(name))
    storage_dtype = _storage_dtype(dtype)
    tensors = {k: w.astype(storage_dtype) for k, w in random_weights(name).items()}
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"shards is {shards}, but {name!r} has 1 to {len(tensors)} shards")

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    generation_config = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "transformers_version": config["transformers_version"],
    } | _SAMPLING_DEFAULTS.get(name, {})
    for file, content in (("config", config), ("generation_config", generation_config)):
        (directory / f"{file}.json").write_text(json.dumps(content, indent=2) + "\n")

    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata=metadata)
        return directory
    weight_map: dict[str, str] = {}
    for i, names in enumerate(np.array_split(np.array(list(tensors)), shards), start=1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        save_file({str(k): tensors[str(k)] for k in names}, directory / file, metadata=metadata)
        weight_map |= {str(k): file for k in names}
    index = {
        "metadata": {"total_size": sum(w.nbytes for w in tensors.values())},
        "weight_map": weight_map,
    }
    index_file = directory / "model.safetensors.index.json"
    index_file.write_text(json.dumps(index, indent=2) + "\n")
    return directory
