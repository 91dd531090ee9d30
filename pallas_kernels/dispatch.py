"""Choice of an implementation.

Owns the meaning of `implementation=`. "auto" tries an op's implementations in the order the op
gives and takes the first that does not raise `NotImplementedError`; a named implementation is
called as it is, so what it cannot do is reported and never replaced by another one. `ValueError`
(a wrong call) always reaches the caller.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

Implementation = Literal["auto", "mosaic_gpu", "xla", "reference"]


def default_compute_capability() -> str | None:
    """CUDA compute capability of JAX's default device, such as "9.0"; None if it is no GPU."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        device = jax.devices()[0]
    elif isinstance(device, str):
        device = jax.devices(device)[0]
    return getattr(device, "compute_capability", None)


def dispatch[Result](
    implementation: str,
    implementations: Mapping[str, Callable[..., Result]],
    auto_order: Sequence[str],
    *args: Any,
    **kwargs: Any,
) -> Result:
    """Calls the implementation that `implementation` names, or the first of `auto_order` that can.

    "mosaic_gpu" kernels are written for compute capability 9.0 (Hopper). "auto" passes over them
    on any other device. Named explicitly they are refused on another GPU, but allowed where the
    default device is no GPU, because a program may be lowered there for one; running it there
    fails with JAX's own message.

    Raises:
      ValueError: unknown implementation.
      NotImplementedError: the implementation, or each of `auto_order`, cannot do this case.
    """
    if implementation != "auto":
        if implementation not in implementations:
            known = ", ".join(repr(name) for name in ("auto", *implementations))
            raise ValueError(f"unknown implementation {implementation!r}: use one of {known}")
        if implementation == "mosaic_gpu":
            capability = default_compute_capability()
            if capability not in (None, "9.0"):
                raise NotImplementedError(
                    f"implementation 'mosaic_gpu' needs compute capability 9.0 and the default "
                    f"device has {capability}: use implementation='auto' or 'xla'"
                )
        return implementations[implementation](*args, **kwargs)

    refusals = []
    for name in auto_order:
        if name == "mosaic_gpu" and default_compute_capability() != "9.0":
            refusals.append("mosaic_gpu: the default device is not of compute capability 9.0")
            continue
        try:
            return implementations[name](*args, **kwargs)
        except NotImplementedError as error:
            refusals.append(f"{name}: {error}")
    raise NotImplementedError("no implementation can do this case; " + "; ".join(refusals))
