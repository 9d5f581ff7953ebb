"""Consecutive dense layers as one, for the curvature between them.

Conventions.  Layers are ordered from the first to the last, and each example is one row in
each of them: moments between two layers pair an example's rows in both.  Shared positions
are not supported, since those of one layer need not be those of the next.  An example that
the mask of any layer leaves out is left out of all.

The block's matrix is one column: the layers' own matrices, each flattened row-major, one
after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.layers.checks import require_parameters
from kfac_core.layers.dense import Dense
from kfac_core.layers.flat import flatten_parameters, unflatten_parameters
from kfac_core.layers.rows import Batch, Rows, require_no_weights, zeroed


class ChainRows(NamedTuple):
    """The rows of all layers of a chain, for the same examples.

    Attributes
    ----------
    layers : tuple of Rows
        From the first layer to the last.
    """

    layers: tuple[Rows, ...]

    @property
    def like(self) -> Array:
        """An array of the rows' library and device."""
        return self.layers[0].like

    def counts(self, dtype: object, /, *, xp: Namespace) -> tuple[Scalar, int, int]:
        """Return the numbers of rows, of examples and of sources."""
        return self.layers[0].counts(dtype, xp=xp)

    def gradient_sum(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return ``sum_mn x g^T`` of all layers as a column, shape (p, 1)."""
        sums = [rows.gradient_sum(dtype, xp=xp) for rows in self.layers]
        return xp.concat([xp.reshape(total, (-1, 1)) for total in sums])

    def status(
        self, *, xp: Namespace, known: frozenset[str] = frozenset(), stacked: int = 0
    ) -> Array | int:
        """Return the flags of all layers' rows; see `Rows.status`."""
        flags: Array | int = 0
        for rows in self.layers:
            flags = flags | rows.status(xp=xp, known=known)
        return flags


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The geometry of consecutive dense layers.

    Parameters
    ----------
    names : tuple of str
        Names of the layers, from the first to the last.
    layers : tuple of Dense
        The layers.

    Raises
    ------
    ConventionError
        For fewer than two layers, or names that are not as many different ones.
    UnsupportedError
        For a layer that is not dense.

    Examples
    --------
    >>> import kfac_core as kc
    >>> layers = {
    ...     name: kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    ...     for name, n, m in (("encoder", 6, 3), ("decoder", 3, 6))
    ... }
    >>> chain = kc.Chain(names=tuple(layers), layers=tuple(layers.values()))
    >>> chain.names
    ('encoder', 'decoder')
    """

    names: tuple[str, ...]
    layers: tuple[Dense, ...]

    kind = "chain"
    groups = 1

    def __post_init__(self) -> None:
        names = constraints.tuple_of(constraints.TEXT)
        constraints.require_range("names", self.names, names)
        constraints.require_kind("layers", self.layers, tuple, "a tuple of layers")
        if len(self.layers) < 2 or len(set(self.names)) != len(self.layers):
            raise errors.ConventionError(
                "Expected a chain of at least two layers, with a name for each, got "
                f"{len(self.layers)} layers and the names {list(self.names)}."
            )
        for name, layer in zip(self.names, self.layers, strict=True):
            kind = getattr(layer, "kind", type(layer).__name__)
            if kind != "dense":
                raise errors.UnsupportedError(
                    f"Layer {name!r} is {kind}: moments between layers need one row "
                    "for each example, which only a dense layer has."
                )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape ``(p, 1)`` of the column of all layers."""
        return sum(n * m for n, m in self.matrix_shapes.values()), 1

    @property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes ``(in(+1), out)`` of the layers' own matrices."""
        pairs = zip(self.names, self.layers, strict=True)
        return {name: layer.matrix_shape for name, layer in pairs}

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters by names such as ``"fc1/weight"``."""
        return {
            f"{name}/{parameter}": shape
            for name, layer in zip(self.names, self.layers, strict=True)
            for parameter, shape in layer.parameter_shapes.items()
        }

    def rows(self, batches: Mapping[str, Batch], /) -> ChainRows:
        """Turn batches of the same examples, in the same order, into rows.

        Parameters
        ----------
        batches : mapping of str to Batch
            Batches by layer; not modified.

        Returns
        -------
        ChainRows
            With the mask of all layers together.

        Raises
        ------
        UnknownBlockError
            For names that are not those of the layers.
        UnsupportedError
            For several uses of a layer.
        ShapeError
            For shared positions, or examples and sources that differ between layers.
        KFACError
            See `Dense.rows`.
        """
        constraints.require_names("batches", batches, self.names)
        rows: list[Rows] = []
        for name, layer in zip(self.names, self.layers, strict=True):
            used_once = (
                "one `Batch`, since a layer of a chain is used once in each example"
            )
            constraints.require_kind(
                f"batches[{name!r}]", batches[name], Batch, used_once
            )
            rows.append(layer.rows(batches[name]))
        counts = [(part.examples, part.positions, part.sources) for part in rows]
        if any(count != (counts[0][0], 1, counts[0][2]) for count in counts):
            named = dict(zip(self.names, counts, strict=True))
            raise errors.ShapeError(
                "Expected one row for each example in all layers of a chain, with the same "
                f"sources; got (examples, positions, sources) {named}. Where the shared "
                "positions of all layers are the same, fold them into the examples."
            )
        xp = ns.namespace_of(
            **{
                f"batches[{n!r}]": part.like
                for n, part in zip(self.names, rows, strict=True)
            }
        )
        masks = [part.mask for part in rows if part.mask is not None]
        if not masks:
            return ChainRows(tuple(rows))
        for mask in masks:
            require_no_weights(mask, "a chain of layers", xp=xp)
        # An example that one layer masks has no moments between layers either.
        mask = functools.reduce(xp.logical_and, masks)
        joined = []
        for part in rows:
            x, g = zeroed(part.inputs, part.output_grads, mask, xp=xp)
            joined.append(Rows(x, g, mask, part.homogeneous))
        return ChainRows(tuple(joined))

    def stacked(self, count: int, /) -> None:
        """Return None: equal layers of this kind are not computed as one."""

    def parameters_to_matrix(self, parameters: Mapping[str, Array], /) -> Array:
        """Turn the parameters of all layers into the column.

        Parameters
        ----------
        parameters : mapping of str to array
            As `parameter_shapes` says; of one dtype.

        Returns
        -------
        array, shape (p, 1)
            Column.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For parameters of incompatible shape, dtype, library or device.
        """
        require_parameters(parameters, self.parameter_shapes)
        dtypes = {name: str(x.dtype) for name, x in parameters.items()}
        constraints.require_same(
            "dtype of the parameters", dtypes, error=errors.DtypeError
        )
        matrices: dict[str, Array] = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            of_layer = {
                key: parameters[f"{name}/{key}"] for key in layer.parameter_shapes
            }
            matrices[name] = layer.parameters_to_matrix(of_layer)
        return flatten_parameters(matrices, self.matrix_shapes)

    def matrix_to_parameters(self, matrix: Array, /) -> dict[str, Array]:
        """Turn the column back into the parameters of all layers.

        Raises
        ------
        ShapeError
            For another shape.
        """
        matrices = unflatten_parameters(matrix, self.matrix_shapes)
        return {
            f"{name}/{parameter}": x
            for name, layer in zip(self.names, self.layers, strict=True)
            for parameter, x in layer.matrix_to_parameters(matrices[name]).items()
        }
