"""The one declaration of a weight: shape, dtype, logical axes and the checkpoint tensors it is
made of.

Loading, random weights, memory estimates and sharding are all derived from it. A model is built
from declarations alone, so building one allocates nothing.
"""

from typing import Any

import jax
from flax import nnx


def declare(shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...], *sources: str) -> nnx.Param:
    """Declares one leaf of a model.

    Args:
      shape: shape of the leaf; matrices are [out, in], as Hugging Face stores them.
      dtype: dtype of the leaf on the device.
      axes: logical name of each axis.
      sources: Hugging Face tensor names that, concatenated along axis 0, make the leaf.
    """
    assert len(shape) == len(axes) and sources
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, sources=sources)
