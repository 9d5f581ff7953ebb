"""Parameters as one column, for layers whose block has no Kronecker structure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.layers.checks import require_parameters


class Flat:
    """A layer whose matrix is one column: its parameters, flattened row-major."""

    groups = 1

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name."""
        raise NotImplementedError

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape ``(p, 1)`` of the block's matrix."""
        return sum(math.prod(shape) for shape in self.parameter_shapes.values()), 1

    def stacked(self, count: int, /) -> None:
        """Return None: equal layers of this kind are not computed as one."""

    def parameters_to_matrix(self, parameters: Mapping[str, Array], /) -> Array:
        """Flatten parameter-shaped arrays into one column."""
        return flatten_parameters(parameters, self.parameter_shapes)

    def matrix_to_parameters(self, matrix: Array, /) -> dict[str, Array]:
        """Turn a column back into parameter-shaped arrays."""
        return unflatten_parameters(matrix, self.parameter_shapes)


def flatten_parameters(
    parameters: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], /
) -> Array:
    """Flatten arrays row-major into one column, in the order of the shapes.

    Parameters
    ----------
    parameters : mapping of str to array
        Arrays with exactly these names and shapes.
    shapes : mapping of str to tuple of int
        What is expected.

    Returns
    -------
    array, shape (p, 1)
        Column.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For parameters of incompatible shape, dtype, library or device.
    """
    xp = require_parameters(parameters, shapes)
    return xp.concat([xp.reshape(parameters[name], (-1, 1)) for name in shapes], axis=0)


def unflatten_parameters(
    matrix: Array, shapes: Mapping[str, tuple[int, ...]], /
) -> dict[str, Array]:
    """Turn a column back into arrays; the inverse of `flatten_parameters`.

    Parameters
    ----------
    matrix : array, shape (p, 1)
        The column.
    shapes : mapping of str to tuple of int
        Parts of it.

    Returns
    -------
    dict of str to array
        Arrays by name.

    Raises
    ------
    ShapeError
        For another shape.
    """
    xp = ns.own_namespace(matrix)
    sizes = [math.prod(shape) for shape in shapes.values()]
    ns.require_matrix(matrix, (sum(sizes), 1), "matrix")
    parameters, start = {}, 0
    for (name, shape), size in zip(shapes.items(), sizes, strict=True):
        part = matrix[start : start + size, 0]
        # A view of it already where that is one axis.
        parameters[name] = part if len(shape) == 1 else xp.reshape(part, tuple(shape))
        start += size
    return parameters
