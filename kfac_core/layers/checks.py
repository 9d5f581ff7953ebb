"""Checks of batches, parameters and masks that all layers share."""

from __future__ import annotations

from collections.abc import Mapping

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.layers.rows import Batch

_UNSUPPORTED = {
    "bias": (
        "only dense layers, and convolutions read as one batch, can mark the rows of a "
        "use that has no bias."
    ),
    "mask": (
        "set the output gradients of positions that do not count to zero instead."
    ),
}
"""Fields of a batch that not every layer can use, with the reason."""


def entering(
    batch: Batch, /, *supported: str, ids: bool = False
) -> tuple[Array, Array, Array | None, Namespace]:
    """Return inputs, output gradients, mask and namespace of a batch, checked.

    Parameters
    ----------
    batch : Batch
        Batch of a layer.
    *supported : {"mask", "bias"}
        Fields that the layer can use.
    ids : bool
        Whether the inputs are integers.

    Returns
    -------
    tuple
        The three arrays, and their namespace.

    Raises
    ------
    UnsupportedError
        For a field that the layer cannot use.
    DtypeError, MixedArraysError
        For arrays of another kind, or of several libraries or devices.
    """
    # Read the inputs first: a `GradientBatch` raises here.
    x = batch.inputs
    for field, reason in _UNSUPPORTED.items():
        if field not in supported and getattr(batch, field) is not None:
            raise errors.UnsupportedError(f"Expected no `{field}` in a batch: {reason}")
    g, mask = batch.output_grads, batch.mask
    xp = ns.namespace_of(inputs=x, output_grads=g, optional={"mask": mask})
    if not ids:
        ns.require_floating(xp, x, "inputs")
    elif not xp.isdtype(x.dtype, "integral"):
        raise errors.DtypeError(
            f"Expected `inputs` of an embedding to be integer ids, got {x.dtype}."
        )
    ns.require_floating(xp, g, "output_grads")
    return x, g, mask, xp


def require_output_grads(
    batch: Batch, event: tuple[int, ...], /, *, hint: str, lead: int = 0
) -> None:
    """Raise unless output gradients have the shape that fits, and hold a row.

    Parameters
    ----------
    batch : Batch
        Batch of a layer.
    event : tuple of int
        Their shape, without the axis of sources.
    hint : str
        What to look at, where the cause is not an axis of several sources.
    lead : int
        Number of leading axes, which are not compared.

    Raises
    ------
    ShapeError
        For another shape, or an empty batch.
    """
    inputs = tuple(batch.inputs.shape)[lead:]
    grads = tuple(batch.output_grads.shape)[lead:]
    expected = event if batch.sources is None else (batch.sources, *event)
    if grads == expected:
        if 0 not in (*expected, *inputs):
            return
        raise errors.ShapeError(
            "Expected `inputs` and `output_grads` to hold at least one row, got shapes "
            f"{inputs} and {grads}. Leave an empty batch out."
        )
    if grads[1:] == expected:
        hint = "If its first axis holds several sources, say so with `sources`."
    raise errors.ShapeError(
        f"Expected `output_grads` to have shape {expected} for `inputs` of shape "
        f"{inputs}, got {grads}. {hint}"
    )


def require_parameters(
    parameters: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], /
) -> Namespace:
    """Raise unless parameters have exactly these names and shapes.

    Parameters
    ----------
    parameters : mapping of str to array
        Given parameters.
    shapes : mapping of str to tuple of int
        What is expected.

    Returns
    -------
    namespace
        Array API namespace of the arrays.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For parameters of incompatible shape, dtype, library or device.
    """
    if parameters.keys() != shapes.keys():
        kind = errors.ShapeError
        constraints.require_names("parameters", parameters, shapes, error=kind)
    xp = ns.namespace_of(**parameters)
    for name, x in parameters.items():
        ns.require_floating(xp, x, name)
        if x.shape != shapes[name]:
            ns.require_matrix(x, tuple(shapes[name]), name)
    return xp


def require_mask(mask: Array, lead: tuple[int, ...], /, *, xp: Namespace) -> Array:
    """Raise unless a mask has a bool or a weight for each row; return it by example.

    Parameters
    ----------
    mask : array of bool or float, shape (N, ...)
        True for rows that count, or their weights.
    lead : tuple of int
        The shape that is expected, ``(N, *shared)``.
    xp : namespace
        Array API namespace of the mask.

    Returns
    -------
    array of bool or float, shape (N, S)
        The mask.

    Raises
    ------
    DtypeError, ShapeError
        For another dtype or shape.
    """
    if not xp.isdtype(mask.dtype, ("bool", "real floating")):
        raise errors.DtypeError(
            "Expected `mask` to be boolean, True for rows that count, or to be weights of "
            f"floating point, got {mask.dtype}. Write `mask != 0`."
        )
    ns.require_matrix(mask, lead, "mask")
    return xp.reshape(mask, (lead[0], -1))
