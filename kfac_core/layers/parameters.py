"""Any arrays, known by their gradients alone.

Conventions.  The block's matrix is one column: the parameters flattened row-major, in
the order of ``shapes``, of shape ``(p, 1)``.  Only the gradient of a whole batch is at
hand, so that the second moment is ``v v^T / N`` with v the gradient summed over the N
examples: unbiased for the sampled modes, where examples are independent, but not for
one-hot vectors shared by all examples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kfac_core import constraints, errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.layers.example_gradients import ExampleGradients, GradientBatch
from kfac_core.layers.flat import flatten_parameters, unflatten_parameters

__all__ = ["Parameters"]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Geometry of arrays that belong to no known layer.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        The parameters by name, in the order in which they are flattened.

    Raises
    ------
    ShapeError
        For no parameters, or a length below 1.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> layer = kc.Parameters(shapes={"scale": (3,), "mix": (2, 2)})
    >>> block = kc.Block(layer, kc.Diagonal())
    >>> block.parameters_to_matrix({"scale": np.ones(3), "mix": np.eye(2)}).shape
    (7, 1)
    """

    shapes: Mapping[str, tuple[int, ...]]

    kind = "parameters"
    groups = 1

    def __post_init__(self) -> None:
        constraints.require_options(
            self, shapes=constraints.mapping_to(constraints.tuple_of(constraints.SIZE))
        )
        if not self.shapes:
            raise errors.ShapeError(
                "Expected `shapes` of at least one parameter, got none."
            )
        shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        object.__setattr__(self, "shapes", shapes)

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape ``(p, 1)`` of the block's matrix."""
        return sum(math.prod(shape) for shape in self.shapes.values()), 1

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name."""
        return dict(self.shapes)

    def rows(self, batch: GradientBatch, /) -> ExampleGradients:
        """Turn the gradients of a batch into one vector for each source.

        Parameters
        ----------
        batch : GradientBatch
            Batch of the layer; not modified.

        Returns
        -------
        ExampleGradients
            M vectors.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For gradients of incompatible shape, dtype, library or device.
        UnsupportedError
            For a `Batch` of inputs and output gradients.
        """
        if not isinstance(batch, GradientBatch):
            raise errors.UnsupportedError(
                f"Expected a `GradientBatch` for a `Parameters` layer, got "
                f"{type(batch).__name__}; it has no inputs."
            )
        if batch.batch_size < 1:
            raise errors.ShapeError(
                f"Expected `batch_size` to be at least 1, got {batch.batch_size}."
            )
        if set(batch.gradients) != set(self.shapes):
            raise errors.ShapeError(
                f"Expected gradients of {sorted(self.shapes)}, got "
                f"{sorted(batch.gradients)}."
            )
        xp = ns.namespace_of(**batch.gradients)
        sources = () if batch.sources is None else (batch.sources,)
        parts = []
        for name, shape in self.shapes.items():
            gradient = batch.gradients[name]
            ns.require_floating(xp, gradient, name)
            ns.require_matrix(gradient, (*sources, *shape), name)
            parts.append(xp.reshape(gradient, (batch.sources or 1, -1)))
        return ExampleGradients(
            xp.concat(parts, axis=1), batch.batch_size, batch.sources or 1
        )

    def stacked(self, count: int, /) -> None:
        """Return None: equal layers of this kind are not computed as one."""

    def parameters_to_matrix(self, parameters: Mapping[str, Array], /) -> Array:
        """Flatten parameter-shaped arrays into one column."""
        return flatten_parameters(parameters, self.parameter_shapes)

    def matrix_to_parameters(self, matrix: Array, /) -> dict[str, Array]:
        """Turn a column back into parameter-shaped arrays."""
        return unflatten_parameters(matrix, self.parameter_shapes)
