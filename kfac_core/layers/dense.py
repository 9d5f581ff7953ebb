"""The dense layer, ``y = x W + b``, with any number of shared axes.

Conventions.  The block's matrix has shape ``(in(+1), out)``: the weight as it multiplies
rows from the right, and the bias as its last row.  ``weight_layout`` says how a
framework keeps the weight: ``"io"`` as ``(in, out)`` (JAX, Keras), ``"oi"`` as
``(out, in)`` (PyTorch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Literal

from kfac_core import constraints
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.layers import checks
from kfac_core.layers.homogeneous import join_bias, split_bias
from kfac_core.layers.rows import Batch, Rows, with_some_biases, zeroed

WeightLayout = Literal["io", "oi"]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A dense layer, ``y = x W + b``, with any number of shared axes.

    The block's matrix has shape ``(in(+1), out)``, with the bias as its last row.

    Parameters
    ----------
    in_features, out_features : int
        The widths, at least 1.
    bias : bool
        Whether the layer has a bias.
    weight_layout : {"io", "oi"}
        ``"io"`` for weights ``(in, out)`` (JAX, Keras), ``"oi"`` for ``(out, in)``
        (PyTorch).

    Raises
    ------
    ShapeError
        For a width below 1.
    ConventionError
        For an unknown layout.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.Kronecker())
    >>> parameters = {"weight": np.ones((3, 2)), "bias": np.zeros(2)}
    >>> block.parameters_to_matrix(parameters).shape
    (4, 2)
    """

    in_features: int
    out_features: int
    bias: bool
    weight_layout: WeightLayout

    kind = "dense"
    groups = 1
    leading: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        constraints.require_options(
            self,
            in_features=constraints.SIZE,
            out_features=constraints.SIZE,
            bias=constraints.FLAG,
            weight_layout=constraints.literal(WeightLayout),
        )
        # PyTorch's compiler cannot enter the lock of a property that is not cached yet.
        _ = self.parameter_shapes

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the block's matrix."""
        return self.in_features + int(self.bias), self.out_features

    @cached_property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name, in a framework's layout."""
        weight = (self.in_features, self.out_features)
        shapes: dict[str, tuple[int, ...]] = {
            "weight": weight if self.weight_layout == "io" else weight[::-1]
        }
        if self.bias:
            shapes["bias"] = (self.out_features,)
        return shapes

    def rows(self, batch: Batch, /) -> Rows:
        """Turn a batch into rows.

        Parameters
        ----------
        batch : Batch
            Arrays of one library on one device, in any layout; not modified.

        Returns
        -------
        Rows
            Views where the library allows it, copies where rows are masked.

        Raises
        ------
        ShapeError
            For a wrong number of features, shared axes or examples, or no examples.
        DtypeError
            For integers, in a mask too.
        MixedArraysError
            For arrays of several libraries or devices.
        """
        x, g, mask, xp = checks.entering(batch, "mask", "bias")
        # A stack of equal layers has one axis in front of all arrays, and no other code
        # of its own.
        stack = len(self.leading)
        lead = tuple(x.shape)[stack:-1]
        if not lead or x.shape[-1] != self.in_features:
            shape = (*x.shape[:stack], "N", ..., self.in_features)
            constraints.require_shape("inputs", x, shape)
        hint = "The examples and shared axes must match `inputs`."
        event = (*lead, self.out_features)
        checks.require_output_grads(batch, event, hint=hint, lead=stack)
        shape = lead[0], math.prod(lead[1:])
        # Axes between the first and the last are shared positions, in one axis of S.
        x = ns.reshaped(x, (*self.leading, *shape, self.in_features), xp=xp)
        sources = batch.sources or 1
        g = ns.reshaped(g, (*self.leading, sources, *shape, self.out_features), xp=xp)
        if mask is not None:
            mask = checks.require_mask(mask, lead, xp=xp)
            x, g = zeroed(x, g, mask, xp=xp)
        rows = Rows(x, g, mask, self.bias)
        return rows if batch.bias is None else with_some_biases(rows, batch.bias)

    def stacked(self, count: int, /) -> Dense:
        """Return a layer for many equal ones, whose arrays have a leading axis of them."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return _DenseStack(**options, count=count)

    def parameters_to_matrix(self, parameters: Mapping[str, Array], /) -> Array:
        """Turn parameter-shaped arrays into the block's matrix.

        Parameters
        ----------
        parameters : mapping of str to array
            ``"weight"`` and, where the layer has one, ``"bias"``, as
            `parameter_shapes` says.

        Returns
        -------
        array, shape (in(+1), out)
            The weight, and the bias as the last row.

        Raises
        ------
        ShapeError
            For missing, unknown or misshapen parameters.
        DtypeError
            For integer arrays.
        MixedArraysError
            For arrays of several libraries or devices.
        """
        xp = checks.require_parameters(parameters, self.parameter_shapes)
        return join_bias(
            parameters["weight"],
            parameters.get("bias"),
            transposed=self.weight_layout == "oi",
            xp=xp,
        )

    def matrix_to_parameters(self, matrix: Array, /) -> dict[str, Array]:
        """Turn a block's matrix back into parameter-shaped arrays.

        Parameters
        ----------
        matrix : array, shape (in(+1), out)
            Matrix from `parameters_to_matrix`.

        Returns
        -------
        dict of str to array
            The parameters by name; possibly views.

        Raises
        ------
        ShapeError
            For another shape.
        """
        ns.require_matrix(matrix, (*self.leading, *self.matrix_shape), "matrix")
        weight, bias = split_bias(matrix, self.in_features)
        if self.weight_layout == "oi":
            weight = ns.transposed(weight, xp=ns.own_namespace(weight))
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


@dataclass(frozen=True, kw_only=True)
class _DenseStack(Dense):
    """As many equal dense layers, whose arrays have a leading axis of them."""

    count: int

    def __post_init__(self) -> None:
        """Skip the checks of `Dense`, which the stacked layers have passed."""

    @property
    def leading(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.count,)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().parameter_shapes
        return {name: (self.count, *shape) for name, shape in shapes.items()}
