"""Vectors of the space of all parameters: their inner product and combinations.

Conventions.  A vector is a mapping of blocks to mappings of parameters to arrays,

    {"fc1": {"weight": (n_in, n_out), "bias": (n_out,)}, "fc2": ...},

the form that `kfac_core.Estimator.precondition` takes and gives.  Vectors that
are combined have the same blocks, parameters and shapes, in any order.
Sums run in the widest dtype among the arrays, float32 at least.  Gradient graphs are
left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kfac_core import constraints, errors
from kfac_core.array import Array, DType, Namespace, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.array.dispatch import dispatched
from kfac_core.array.structure import is_structure
from kfac_core.block import Vector as Vector
from kfac_core.layers.feeding import detached_array
from kfac_core.linalg.products import sum_of_products


def inner_product(left: Vector, right: Vector, /) -> Array:
    """Return the sum of ``left * right`` over every entry.

    Parameters
    ----------
    left, right : mapping of str to mapping of str to array
        The two vectors.

    Returns
    -------
    array, 0-d
        Result in the widest dtype among the arrays, float32 at least.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, UnsupportedError
        For vectors that do not go together, naming the array.

    Notes
    -----
    ``2 p`` flops for p parameters; products of one array are held at a time, and are
    summed as the library sums (NumPy in pairs), not as BLAS does.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.steps import inner_product
    >>> gradient = {"fc": {"weight": np.ones((2, 3)), "bias": np.ones(3)}}
    >>> float(inner_product(gradient, gradient))
    9.0
    """
    xp, (a, b) = entered(left=left, right=right)
    return dot(a, b, dtype=widest(a, b, xp=xp), xp=xp)


def linear_combination(
    coefficients: Sequence[Scalar] | Array, vectors: Sequence[Vector], /
) -> dict[str, dict[str, Array]]:
    """Return ``sum_i c_i v_i``.

    Parameters
    ----------
    coefficients : sequence of float or 0-d array, or array of shape (k,)
        Coefficients c_i.
    vectors : sequence of mapping of str to mapping of str to array
        The v_i, at least one.

    Returns
    -------
    dict of str to dict of str to array
        New arrays in the dtypes of the first vector; half precision is combined in
        float32.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, UnsupportedError
        For vectors that do not go together, or another number of coefficients.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.steps import linear_combination
    >>> direction = {"fc": {"weight": np.ones((1, 2))}}
    >>> last = {"fc": {"weight": np.asarray([[0.0, 1.0]])}}
    >>> linear_combination([-0.1, 0.9], [direction, last])["fc"]["weight"].tolist()
    [[-0.1, 0.8]]
    """
    k = len(vectors)
    constraints.require_any("vectors", vectors)
    xp, entering = entered(**{f"vectors[{i}]": v for i, v in enumerate(vectors)})
    if isinstance(coefficients, Sequence):
        shape: tuple[int, ...] = (len(coefficients),)
    else:
        shape = tuple(coefficients.shape)
    counts = {"vectors": (k,), "coefficients": shape}
    constraints.require_same("number of vectors and coefficients", counts)
    numbers = [detached_array(coefficients[i]) for i in range(k)]

    def combined(block: str, parameter: str) -> Array:
        arrays = [vector[block][parameter] for vector in entering]
        dtype = ns.wide_dtype(xp, xp.result_type(*arrays))
        total = None
        for i, x in enumerate(arrays):
            c = ns.as_scalar(xp, numbers[i], dtype, f"coefficients[{i}]")
            term = c * ns.cast(xp, x, dtype)
            total = term if total is None else total + term
        return ns.cast(xp, total, arrays[0].dtype)

    return {
        block: {parameter: combined(block, parameter) for parameter in arrays}
        for block, arrays in entering[0].items()
    }


def entered(**vectors: Vector) -> tuple[Namespace, list[dict[str, dict[str, Array]]]]:
    """Check that vectors have the same structure, and detach them.

    Parameters
    ----------
    **vectors : mapping of str to mapping of str to array
        Vectors by their names in error messages.

    Returns
    -------
    xp : namespace
        Array API namespace of the arrays.
    vectors : list of dict of str to dict of str to array
        Without graphs.

    Raises
    ------
    ShapeError
        For other blocks, parameters or shapes than the first vector's, or none at all.
    DtypeError, MixedArraysError
        For arrays that are not real floating, or not of one library and device.
    UnsupportedError
        For sparse rows.
    """
    forms = {
        name: {
            f"[{block!r}][{parameter!r}]": x
            for block, parameters in _mapping(name, vector).items()
            for parameter, x in _mapping(f"{name}[{block!r}]", parameters).items()
        }
        for name, vector in vectors.items()
    }
    arrays = {
        f"{name}{at}": x for name, form in forms.items() for at, x in form.items()
    }
    (first, reference), *others = forms.items()
    for name, x in arrays.items():
        if is_structure(x):
            raise errors.UnsupportedError(
                f"`{name}` is {type(x).__name__}, of which the ids may differ from vector "
                "to vector. Give the whole array."
            )
    constraints.require_any(first, arrays)
    xp = ns.namespace_of(**arrays)
    for name, x in arrays.items():
        ns.require_floating(xp, x, name)
    for name, form in others:
        for at in [*reference, *form]:
            shapes = [
                tuple(x[at].shape) if at in x else None for x in (form, reference)
            ]
            if shapes[0] != shapes[1]:
                raise errors.ShapeError(
                    f"`{name}{at}` has shape {shapes[0]}, but `{first}` has {shapes[1]} "
                    "there: vectors that go together have the same blocks, parameters "
                    "and shapes."
                )
    return xp, [
        {
            block: {name: detached_array(x) for name, x in parameters.items()}
            for block, parameters in vector.items()
        }
        for vector in vectors.values()
    ]


def dot(left: Vector, right: Vector, /, *, dtype: object, xp: Namespace) -> Array:
    """Return `inner_product` of vectors that were `entered`, in a dtype."""
    total: Array | None = None
    for block, parameters in left.items():
        for name, x in parameters.items():
            y = right[block][name]
            if x.dtype != dtype or y.dtype != dtype:
                wide = ns.wide_dtype(xp, xp.result_type(x, y))
                x, y = ns.cast(xp, x, wide), ns.cast(xp, y, wide)
            # Each array sums in its own width, and only the scalars are joined in the
            # widest.
            part = ns.cast(xp, sum_of_products(x, y, xp=xp), dtype)
            total = part if total is None else total + part
    return total


def dots(
    pairs: Sequence[tuple[Vector, Vector]], /, *, dtype: object, xp: Namespace
) -> Array:
    """Return `dot` of each pair of vectors, shape (k,)."""
    first = pairs[0][0]
    example = next(x for arrays in first.values() for x in arrays.values())
    # All pairs of one parameter together, which reads its arrays once.
    total = xp.zeros(len(pairs), dtype=dtype, device=ns.device_of(example))
    for block, parameters in first.items():
        for name in parameters:
            arrays = [(x[block][name], y[block][name]) for x, y in pairs]
            total = total + ns.cast(xp, sums_of_products(arrays, xp=xp), dtype)
    return total


@dispatched
def sums_of_products(
    pairs: Sequence[tuple[Array, Array]], /, *, xp: Namespace
) -> Array:
    """Return the sum of ``x * y`` over all entries, for each pair.

    Parameters
    ----------
    pairs : sequence of tuple of array and array
        Arrays of one shape.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (k,)
        Sums in the widest dtype of the arrays, float32 at least.
    """
    sums = []
    for x, y in pairs:
        wide = ns.wide_dtype(xp, xp.result_type(x, y))
        sums.append(xp.sum(ns.cast(xp, x, wide) * ns.cast(xp, y, wide)))
    widest = xp.result_type(*sums)
    return xp.stack([ns.cast(xp, total, widest) for total in sums])


def widest(*vectors: Vector, xp: Namespace) -> DType:
    """Return the widest dtype among the arrays of vectors, float32 at least."""
    arrays = [x for v in vectors for block in v.values() for x in block.values()]
    dtype = arrays[0].dtype
    if any(x.dtype != dtype for x in arrays):
        dtype = xp.result_type(*arrays)
    return ns.wide_dtype(xp, dtype)


def scalar_of(xp: Namespace, value: Scalar, dtype: object, name: str, /) -> Scalar:
    """Return `kfac_core.array.namespaces.as_scalar` without a gradient graph."""
    return ns.as_scalar(xp, detached_array(value), dtype, name)


def _mapping(name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    expected = "a mapping, of blocks to parameters to arrays"
    constraints.require_kind(name, value, Mapping, expected)
    return value
