"""Marks: what a user says about a layer, as operations that a trace of a network shows.

Conventions.  A mark is the identity of a layer's outputs.  Being an operation of JAX, it
is seen wherever the layer lies: inside ``jit``, ``remat``, ``scan`` or ``vmap`` too.
"""

from __future__ import annotations

from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

import kfac_core as kc


class Label:
    """Contents of a mark: the block's name, its layer, and the roles of the operands.

    Parameters
    ----------
    name, layer : str, Layer
        Name of the block, and its geometry.
    roles : tuple of str
        Names of the layer's parameters, in the order of the operands.
    masked : bool
        Whether there is a mask among the operands.
    """

    def __init__(
        self, name: str, layer: kc.Layer, roles: tuple[str, ...], masked: bool
    ) -> None:
        self.name, self.layer, self.roles, self.masked = name, layer, roles, masked

    def __repr__(self) -> str:
        return f"{self.name!r}: {self.layer!r}"


def tap(
    name: str, layer: Any, x: Any, y: Any, /, mask: Any = None, **parameters: Any
) -> Any:
    """Mark ``y`` as the outputs of ``layer`` for the batch ``x``, and return it.

    Parameters
    ----------
    name, layer : str, Layer
        Name of the block, and its geometry, such as `kfac_core.Conv`.
    x, y, mask : array, shape (N, ...)
        See `kfac_core.Batch`.
    **parameters : array
        Parameters of the layer by name: leaves of ``params``, in the layout of the layer;
        axes may be merged or split.

    Returns
    -------
    array
        `y`.  Outside of `Network` the mark does nothing else.

    Raises
    ------
    ShapeError
        For a parameter whose axes stand in another order.
    """
    for role, parameter in parameters.items():
        _require_order(name, role, parameter, layer.parameter_shapes.get(role, ()))
    operands = [x] if mask is None else [x, mask]
    label = Label(name, layer, tuple(parameters), mask is not None)
    return mark.bind(y, *operands, *parameters.values(), label=label)


def dense(name: str, x: Any, weight: Any, bias: Any = None, /, mask: Any = None) -> Any:
    """Return ``x @ weight + bias``, marked by `tap` as a dense layer.

    Parameters
    ----------
    name : str
        Name of the block.
    x : array, shape (N, ..., in)
        Inputs, with the examples on the first axis.
    weight : array, shape (in, out)
        Leaf of the parameters.
    bias : array, shape (out,), optional
        Leaf of the parameters.
    mask : array of bool, shape (N, ...), optional
        Rows that count.

    Returns
    -------
    array, shape (N, ..., out)
        Outputs.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from kfac_core_shims.jax import Network, dense
    >>> params = {"W": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    >>> network = Network(
    ...     lambda params, x: dense("fc", x, params["W"], params["b"]),
    ...     params,
    ...     jnp.ones((4, 3)),
    ... )
    >>> sorted(network.blocks)
    ['fc']
    """
    y, parameters = x @ weight, {"weight": weight}
    if bias is not None:
        y, parameters["bias"] = y + bias, bias
    n, m = weight.shape
    layer = kc.Dense(
        in_features=n, out_features=m, bias=bias is not None, weight_layout="io"
    )
    return tap(name, layer, x, y, mask, **parameters)


def _require_order(
    name: str, role: str, parameter: Any, expected: tuple[int, ...]
) -> None:
    """Raise for a parameter that has the layer's axes, and has them transposed."""
    shape = tuple(jnp.shape(parameter))
    axes, lengths = ([n for n in shape if n > 1] for shape in (expected, shape))
    if lengths != axes and sorted(lengths) == sorted(axes):
        raise kc.ShapeError(
            f"Layer {name!r}: expected `{role}` to have shape {expected}, got {shape}. "
            "Say the order of its axes in the layer's `weight_layout`."
        )


mark = jex.Primitive("kfac_core_mark")
"""The operation; its first operand is ``y``, which it returns."""


def _first(y: Any, *operands: Any, label: Label) -> Any:
    del operands, label
    return y


def _jvp(primals: Any, tangents: Any, *, label: Label) -> tuple[Any, Any]:
    # Linear in `y` alone: the other operands only say what it was computed from.
    return mark.bind(*primals, label=label), tangents[0]


def _batched(operands: Any, axes: Any, *, label: Label) -> tuple[Any, int]:
    """Take the mapped axis as that of the examples, for a network of one example."""
    rows = 2 + label.masked
    if any(axis is not None for axis in axes[rows:]):
        raise kc.ConventionError(
            f"Layer {label.name!r}: expected parameters that are the same for all that "
            "`vmap` runs over, got a mapped one. Map over the examples only."
        )
    size = next(
        x.shape[axis]
        for x, axis in zip(operands, axes, strict=True)
        if axis is not None
    )
    # Parameters stay as they are, without an axis of examples.
    moved = [
        batching.bdim_at_front(x, axis, size)
        for x, axis in zip(operands[:rows], axes[:rows], strict=True)
    ]
    return mark.bind(*moved, *operands[rows:], label=label), 0


mark.def_impl(_first)
mark.def_abstract_eval(_first)
ad.primitive_jvps[mark] = _jvp
batching.primitive_batchers[mark] = _batched
# It lowers to its first operand, and so costs nothing in a compiled program.
mlir.register_lowering(mark, mlir.lower_fun(_first, multiple_results=False))
