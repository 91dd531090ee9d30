"""Converts a model for fast loading: python scripts/convert_checkpoint.py --model M --output DIR."""

import dataclasses
import time
from pathlib import Path
from typing import Literal

import command_line
import tyro


@dataclasses.dataclass(frozen=True)
class Options:
    """Write a checkpoint whose weights are stored as the engine holds them: fused, cast, dequantised.

    Pass the output folder to the other scripts as --model.
    """

    model: str
    """Folder with safetensors, .gguf file, hub id (org/name), or smollm2-135m."""
    output: Path
    """Folder to write: a new or an empty one."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the weights."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    skip_tokenizer: bool = False
    """Write no tokenizer, for a model that has none."""


def main() -> None:
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    # Imported here: the command line must be right before jax starts.
    import jax.numpy as jnp

    from tinyvllm_jax.config import ModelConfig
    from tinyvllm_jax.loading.load_weights import declared_leaves, load_weights
    from tinyvllm_jax.loading.orbax import check_is_empty, save_checkpoint
    from tinyvllm_jax.loading.source import open_model
    from tinyvllm_jax.models import build_model

    check_is_empty(options.output)
    start = time.perf_counter()
    source = open_model(options.model, revision=options.revision)
    assert source.weights is not None
    config = ModelConfig.from_hf(source.hf_config)
    model = build_model(
        config, max_model_len=config.max_position_embeddings, dtype=jnp.dtype(options.dtype)
    )
    load_weights(model, source.weights, show_progress=True)
    leaves = {name: leaf.get_value() for name, leaf in declared_leaves(model).items()}
    save_checkpoint(options.output, leaves, source, skip_tokenizer=options.skip_tokenizer)
    megabytes = sum(leaf.nbytes for leaf in leaves.values()) / 1e6
    seconds = time.perf_counter() - start
    print(f"{options.output}: {megabytes:.1f} MB of {options.dtype} weights in {seconds:.1f} s")


if __name__ == "__main__":
    command_line.run(main)
