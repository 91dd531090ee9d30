"""Fills a declared model's leaves: from a checkpoint's tensors, a converted checkpoint, or at random.

A declaration (layers/weight.py) says which tensors, joined along axis 0, make a leaf; everything here
follows from that. Leaves are made one at a time: host memory holds one leaf, the device one model.
"""

import functools
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from tqdm import tqdm

from tinyvllm_jax.loading.orbax import OrbaxCheckpoint

_FLOATS = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
# Buffers that old checkpoints carry and models compute, and the copy of the embedding that some tied
# checkpoints store. A model that isn't tied declares lm_head.weight, so that it is never left over.
_UNUSED = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias|lm_head\.weight)"
)


def is_unused(name: str) -> bool:
    """Whether a checkpoint may hold a tensor of this name that no leaf is made of."""
    return _UNUSED.fullmatch(name) is not None


def declared_leaves(model: nnx.Module) -> dict[str, nnx.Variable]:
    """The model's leaves by path, "/" between the parts: {"layers/0/mlp/down_proj/weight": Param}."""
    return {
        "/".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable)
    }


def load_weights(
    model: nnx.Module,
    weights: Mapping[str, np.ndarray] | OrbaxCheckpoint,
    *,
    sharding: jax.sharding.Sharding | None = None,
    show_progress: bool = False,
    ignore: Callable[[str], bool] = is_unused,
) -> None:
    """Sets every leaf of a declared model to an array of the declared dtype on the device.

    Args:
      model: a module whose leaves are ShapeDtypeStructs.
      weights: tensors by Hugging Face name, or a converted checkpoint.
      sharding: where the leaves go; None is jax's default device.
      show_progress: a progress bar on stderr.
      ignore: whether a tensor that no leaf is made of may be left over.

    Raises:
      ValueError: tensors are missing, left over, of a wrong shape or dtype, or used twice; a leaf is
        set already. The message names them.
    """
    leaves = declared_leaves(model)
    _check_unset(leaves)
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(weights, OrbaxCheckpoint):
        abstract = {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
            for name, value in ((n, leaf.get_value()) for n, leaf in leaves.items())
        }
        for name, array in weights.restore(abstract).items():
            leaves[name].set_value(array)
    else:
        _check_names(leaves, weights, ignore)
        # On a CPU, jax may adopt a numpy array instead of copying it. A mapped file must be copied, or
        # whoever writes to the file changes the model.
        on_cpu = any(d.platform == "cpu" for d in sharding.device_set)
        num_bytes = sum(_num_bytes(leaf.get_value()) for leaf in leaves.values())
        with tqdm(
            total=num_bytes, unit="B", unit_scale=True, desc="loading", disable=not show_progress
        ) as bar:
            for name, leaf in leaves.items():
                host = _host_array(name, leaf, weights, copy=on_cpu)
                # Waiting bounds host memory: a transfer keeps its host array alive.
                leaf.set_value(jax.device_put(host, sharding).block_until_ready())
                bar.update(host.nbytes)
    _check_set(leaves)


def load_dummy_weights(
    model: nnx.Module,
    seed: int,
    *,
    sharding: jax.sharding.Sharding | None = None,
) -> None:
    """Sets every leaf to random numbers made on the device: norms 1, biases 0, the rest 0.02 * normal.

    A leaf depends on `seed` and its path alone.

    Raises:
      ValueError: a leaf is set already.
    """
    leaves = declared_leaves(model)
    _check_unset(leaves)
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for name, leaf in leaves.items():
        value, sources = leaf.get_value(), leaf.get_metadata()["sources"]
        if all(source.endswith("norm.weight") for source in sources):
            make = functools.partial(jnp.ones, value.shape, value.dtype)
            array = jax.jit(make, out_shardings=sharding)()
        elif all(source.endswith(".bias") for source in sources):
            make = functools.partial(jnp.zeros, value.shape, value.dtype)
            array = jax.jit(make, out_shardings=sharding)()
        else:
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
            array = _normal(sharding)(key, shape=value.shape, dtype=value.dtype)
        leaf.set_value(array)
    _check_set(leaves)


@functools.cache
def _normal(sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    """A jitted 0.02 * normal, cached: the layers of a model share their few shapes."""

    def normal(key: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return jax.jit(normal, static_argnames=("shape", "dtype"), out_shardings=sharding)


def _num_bytes(value: Any) -> int:
    return value.size * value.dtype.itemsize


def _check_unset(leaves: Mapping[str, nnx.Variable]) -> None:
    """Every leaf is a declaration, and names the tensors that it is made of."""
    for name, leaf in leaves.items():
        if not isinstance(leaf.get_value(), jax.ShapeDtypeStruct):
            raise ValueError(f"leaf {name} of the model is set already; declare the model anew")
        if not leaf.get_metadata().get("sources"):
            raise ValueError(f"leaf {name} of the model is declared without sources")


def _check_set(leaves: Mapping[str, nnx.Variable]) -> None:
    """Every leaf is an array on the device: a numpy array would be copied on every step."""
    for name, leaf in leaves.items():
        assert isinstance(leaf.get_value(), jax.Array), (
            f"leaf {name} is a {type(leaf.get_value()).__name__}"
        )


def _check_names(
    leaves: Mapping[str, nnx.Variable],
    weights: Mapping[str, np.ndarray],
    ignore: Callable[[str], bool],
) -> None:
    """Every source is there and used once, and nothing is left over."""
    leaf_of: dict[str, str] = {}
    for name, leaf in leaves.items():
        for source in leaf.get_metadata()["sources"]:
            if source in leaf_of:
                raise ValueError(f"tensor {source} makes both {leaf_of[source]} and {name}")
            leaf_of[source] = name
    if missing := [source for source in leaf_of if source not in weights]:
        tied = "lm_head.weight" in missing
        raise ValueError(
            f"the checkpoint lacks {_some(missing)}"
            + ("; if its head is the embedding, config.json must say tie_word_embeddings" * tied)
        )
    if left_over := [name for name in weights if name not in leaf_of and not ignore(name)]:
        raise ValueError(
            f"the checkpoint has {_some(left_over)}, which the model does not have: its config.json "
            "describes another model, or the architecture is not fully supported"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more tensors"


def _host_array(
    name: str, leaf: nnx.Variable, weights: Mapping[str, np.ndarray], *, copy: bool
) -> np.ndarray:
    """The leaf's value on the host: its sources joined along axis 0, in the declared dtype.

    Without `copy` it may be the mapped file itself.
    """
    shape, dtype = leaf.get_value().shape, np.dtype(leaf.get_value().dtype)
    tensors = {source: weights[source] for source in leaf.get_metadata()["sources"]}
    alike = all(t.ndim == len(shape) and t.shape[1:] == shape[1:] for t in tensors.values())
    if not alike or sum(len(tensor) for tensor in tensors.values()) != shape[0]:
        found = " + ".join(f"{source} {list(t.shape)}" for source, t in tensors.items())
        raise ValueError(
            f"leaf {name} needs {list(shape)} and the checkpoint has {found}: "
            "config.json describes another model"
        )
    for source, tensor in tensors.items():
        if tensor.dtype != dtype and not (tensor.dtype in _FLOATS and dtype in _FLOATS):
            raise ValueError(f"tensor {source} is {tensor.dtype} and leaf {name} needs {dtype}")
    if len(tensors) == 1 and not copy:
        (tensor,) = tensors.values()
        if tensor.dtype == dtype:
            return tensor
    out = np.empty(shape, dtype)
    begin = 0
    for source, tensor in tensors.items():
        rows = out[begin : begin + len(tensor)]
        with np.errstate(over="ignore"):  # checked below, by name
            rows[...] = tensor
        _check_range(source, tensor, rows)
        begin += len(tensor)
    return out


def _check_range(source: str, tensor: np.ndarray, cast: np.ndarray) -> None:
    """float16 ends at 65504: a larger weight would silently become infinite."""
    if cast.dtype == np.float16 and np.isinf(cast).any() and np.isfinite(tensor).all():
        raise ValueError(
            f"tensor {source} has values beyond float16's 65504; use dtype=bfloat16 or float32"
        )
