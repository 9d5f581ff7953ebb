"""Checks of batches, parameters and masks that all layers share."""

from __future__ import annotations

from collections.abc import Mapping

from kfac_core import errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns

__all__ = ["misfit", "require_mask", "require_parameters"]


def misfit(
    grads: tuple[int, ...],
    expected: tuple[int, ...],
    inputs: tuple[int, ...],
    /,
    *,
    otherwise: str,
) -> errors.ShapeError:
    """Return the error for output gradients of a wrong shape, or of an empty batch.

    Parameters
    ----------
    grads, expected : tuple of int
        The shape of `output_grads`, and that which fits the layer and its inputs.
    inputs : tuple of int
        The shape of `inputs`.
    otherwise : str
        What to look at, where the cause is not an axis of several sources.

    Returns
    -------
    ShapeError
        To be raised.
    """
    if grads == expected:
        return errors.ShapeError(
            "Expected `inputs` and `output_grads` to hold at least one row, got shapes "
            f"{inputs} and {grads}. Leave an empty batch out."
        )
    if grads[1:] == expected:
        otherwise = "If its first axis holds several sources, say so with `sources`."
    return errors.ShapeError(
        f"Expected `output_grads` to have shape {expected} for `inputs` of shape "
        f"{inputs}, got {grads}. {otherwise}"
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
        raise errors.ShapeError(
            f"Expected the parameters {sorted(shapes)}, got {sorted(parameters)}."
        )
    xp = ns.namespace_of(**parameters)
    for name, x in parameters.items():
        ns.require_floating(xp, x, name)
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
