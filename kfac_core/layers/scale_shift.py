"""Elementwise scale and shift, ``y = scale * x + shift``: normalization layers.

Conventions.  ``scale`` and ``shift`` broadcast against one example's event, aligned at
the right, as in NumPy.  An example's gradient is ``sum x g`` and ``sum g``, summed down
to the parameter's shape over the axes that it lacks or has as 1.  The block's matrix is
one column: scale, then shift, flattened row-major.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.layers.checks import entering, require_output_grads
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.flat import Flat
from kfac_core.layers.rows import Batch


@dataclass(frozen=True, kw_only=True)
class ScaleShift(Flat):
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

    def __post_init__(self) -> None:
        shape = constraints.optional(constraints.tuple_of(constraints.SIZE))
        constraints.require_options(self, scale_shape=shape, shift_shape=shape)
        for name in ("scale_shape", "shift_shape"):
            shape = getattr(self, name)
            if shape is not None:
                object.__setattr__(self, name, tuple(shape))
        constraints.require_any("scale_shape` or `shift_shape", self.parameter_shapes)

    @cached_property
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
        x, g, _, xp = entering(batch)
        hint = "It has the shape of the layer's outputs, as `inputs` has."
        require_output_grads(batch, tuple(x.shape), hint=hint)
        # Widen half precision before multiplying.
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


def _down_to(
    x: Array, event: tuple[int, ...], shape: tuple[int, ...], name: str, xp: Namespace
) -> Array:
    """Sum (M, N, *event) down to (M, N, prod(shape))."""
    # As NumPy broadcasts, from the last axis; gradients sum over broadcast axes.
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
