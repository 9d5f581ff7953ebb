"""Elementwise scale and shift, ``y = scale * x + shift``: normalization layers.

Conventions.  ``scale`` and ``shift`` broadcast against one example's event, aligned at
the right, as in NumPy.  An example's gradient is ``sum x g`` and ``sum g``, summed down
to the parameter's shape over the axes that it lacks or has as 1.  The block's matrix is
one column: scale, then shift, flattened row-major.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.layers.checks import misfit
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.flat import flatten_parameters, unflatten_parameters
from kfac_core.layers.rows import Batch, require_every_bias, require_no_choice

__all__ = ["ScaleShift"]


@dataclass(frozen=True, kw_only=True)
class ScaleShift:
    """The geometry of an elementwise affine layer.

    Parameters
    ----------
    scale_shape, shift_shape : tuple of int or None
        The shapes of the parameters; None where the layer lacks one.

    Raises
    ------
    ShapeError
        If both are missing, or a length is below 1.

    Examples
    --------
    >>> import kfac_core as kc
    >>> layer_norm = kc.ScaleShift(scale_shape=(16,), shift_shape=(16,))
    >>> block = kc.Block(layer_norm, kc.Full())
    """

    scale_shape: tuple[int, ...] | None
    shift_shape: tuple[int, ...] | None

    kind = "scale_shift"
    groups = 1

    def __post_init__(self) -> None:
        constraints.require_options(
            self,
            scale_shape=constraints.optional(constraints.tuple_of(constraints.SIZE)),
            shift_shape=constraints.optional(constraints.tuple_of(constraints.SIZE)),
        )
        for name in ("scale_shape", "shift_shape"):
            shape = getattr(self, name)
            if shape is not None:
                object.__setattr__(self, name, tuple(shape))
        if not self.parameter_shapes:
            raise errors.ShapeError(
                "Expected `scale_shape` or `shift_shape`, got neither."
            )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape ``(p, 1)`` of the block's matrix."""
        return sum(math.prod(shape) for shape in self.parameter_shapes.values()), 1

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name."""
        shapes = {"scale": self.scale_shape, "shift": self.shift_shape}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def rows(self, batch: Batch, /) -> ExampleGradients:
        """Turn inputs and output gradients into each example's gradient.

        Parameters
        ----------
        batch : Batch
            ``inputs`` of shape ``(N, *event)`` and ``output_grads`` of shape
            ``((M,) N, *event)``; no mask.

        Returns
        -------
        ExampleGradients
            ``M N`` vectors of scale and shift.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For arrays of incompatible shape, dtype, library or device.
        """
        require_no_choice(batch)
        require_every_bias(batch)
        x, g = batch.inputs, batch.output_grads
        xp = ns.namespace_of(inputs=x, output_grads=g)
        ns.require_floating(xp, x, "inputs")
        ns.require_floating(xp, g, "output_grads")
        if batch.mask is not None:
            raise errors.ShapeError(
                "Expected no `mask` for a `ScaleShift` layer; set the output gradients of "
                "rows that do not count to zero."
            )
        sources = () if batch.sources is None else (batch.sources,)
        expected, grads = (*sources, *x.shape), tuple(g.shape)
        if grads != expected or 0 in expected:
            hint = "It has the shape of the layer's outputs, that of `inputs`."
            raise misfit(grads, expected, tuple(x.shape), otherwise=hint)
        # Half precision is widened before anything is multiplied.
        x, g = (ns.cast(xp, array, ns.wide_dtype(xp, array.dtype)) for array in (x, g))
        examples, event = x.shape[0], tuple(x.shape[1:])
        g = xp.reshape(g, (batch.sources or 1, *x.shape))
        parts = []
        if self.scale_shape is not None:
            parts.append(
                _down_to(x[None, ...] * g, event, self.scale_shape, "scale", xp)
            )
        if self.shift_shape is not None:
            parts.append(_down_to(g, event, self.shift_shape, "shift", xp))
        vectors = xp.concat(parts, axis=-1)
        count = (batch.sources or 1) * examples
        return ExampleGradients(
            xp.reshape(vectors, (count, -1)), examples, batch.sources or 1
        )

    def stacked(self, count: int, /) -> None:
        """Return None: equal layers of this kind are not computed as one."""

    def parameters_to_matrix(self, parameters: Mapping[str, Array], /) -> Array:
        """Flatten scale and shift into one column."""
        return flatten_parameters(parameters, self.parameter_shapes)

    def matrix_to_parameters(self, matrix: Array, /) -> dict[str, Array]:
        """Turn a column back into scale and shift."""
        return unflatten_parameters(matrix, self.parameter_shapes)


def _down_to(
    x: Array, event: tuple[int, ...], shape: tuple[int, ...], name: str, xp: Namespace
) -> Array:
    """Sum (M, N, *event) down to (M, N, prod(shape))."""
    aligned = (1,) * (len(event) - len(shape)) + shape
    fits = len(shape) <= len(event) and all(
        length in (1, full) for length, full in zip(aligned, event, strict=True)
    )
    if not fits:
        raise errors.ShapeError(
            f"Expected `inputs` whose event broadcasts with a {name} of shape {shape}, got "
            f"an event of shape {event}."
        )
    axes = tuple(
        i + 2
        for i, (a, e) in enumerate(zip(aligned, event, strict=True))
        if a == 1 != e
    )
    if axes:
        x = xp.sum(x, axis=axes, keepdims=True)
    return xp.reshape(x, (x.shape[0], x.shape[1], -1))
