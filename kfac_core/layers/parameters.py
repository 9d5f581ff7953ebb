"""Any arrays, known by their gradients alone.

Conventions.  The block's matrix is one column: the parameters flattened row-major, in
the order of ``shapes``, of shape ``(p, 1)``.  Only the gradient of a whole batch is at
hand, so that the second moment is ``v v^T / N`` with v the gradient summed over the N
examples: unbiased for the sampled modes, where examples are independent, but not for
one-hot vectors shared by all examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kfac_core import constraints, errors
from kfac_core.layers.checks import require_parameters
from kfac_core.layers.example_gradients import ExampleGradients, GradientBatch
from kfac_core.layers.flat import Flat


@dataclass(frozen=True, kw_only=True)
class Parameters(Flat):
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

    def __post_init__(self) -> None:
        expected = constraints.mapping_to(constraints.tuple_of(constraints.SIZE))
        constraints.require_options(self, shapes=expected)
        constraints.require_any("shapes", self.shapes)
        shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        object.__setattr__(self, "shapes", shapes)

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

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
        constraints.require_range("batch_size", batch.batch_size, constraints.SIZE)
        lead = () if batch.sources is None else (batch.sources,)
        shapes = {name: (*lead, *shape) for name, shape in self.shapes.items()}
        xp = require_parameters(batch.gradients, shapes)
        sources = batch.sources or 1
        v = [xp.reshape(batch.gradients[name], (sources, -1)) for name in shapes]
        return ExampleGradients(xp.concat(v, axis=1), batch.batch_size, sources)
