"""Consecutive dense layers as one, for the curvature between them.

Conventions.  Layers go from the first to the last, and each example is one row in each of
them: the moments between two layers are of an example's rows in both.  So there are no
shared positions here; those of one layer need not be those of the next.  An example that
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
from kfac_core.array import Array, Namespace, replaced
from kfac_core.array import namespaces as ns
from kfac_core.layers.checks import require_parameters
from kfac_core.layers.dense import Dense
from kfac_core.layers.flat import flatten_parameters, unflatten_parameters
from kfac_core.layers.rows import Batch, Rows, require_no_weights

__all__ = ["Chain", "ChainRows"]


class ChainRows(NamedTuple):
    """The rows of all layers of a chain, of one and the same examples.

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

    def status(
        self, *, xp: Namespace, known: frozenset[str] = frozenset()
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
        Of the layers, from the first to the last.
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
        constraints.require_range(
            "names", self.names, constraints.tuple_of(constraints.TEXT)
        )
        constraints.require_kind("layers", self.layers, tuple, "a tuple of layers")
        if len(self.layers) < 2:
            raise errors.ConventionError(
                f"Expected a chain of at least two layers, got {list(self.names)}."
            )
        if len(set(self.names)) != len(self.layers):
            raise errors.ConventionError(
                f"Expected one name for each of {len(self.layers)} layers, got "
                f"{list(self.names)}."
            )
        for name, layer in zip(self.names, self.layers, strict=True):
            kind = getattr(layer, "kind", type(layer).__name__)
            if kind != "dense":
                raise errors.UnsupportedError(
                    f"Layer {name!r} is {kind}: only a dense layer has one row for "
                    "each example, which moments between layers are made of."
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
        """Turn what the layers saw of the same examples, in the same order, into rows.

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
            For other names than those of the layers.
        UnsupportedError
            For several uses of a layer.
        ShapeError
            For shared positions, or examples and sources that differ between layers.
        KFACError
            See `Dense.rows`.
        """
        if set(batches) != set(self.names):
            raise errors.UnknownBlockError(
                f"Expected `batches` of the layers {list(self.names)}, got "
                f"{sorted(batches)}."
            )
        rows: dict[str, Rows] = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            if not isinstance(batches[name], Batch):
                raise errors.UnsupportedError(
                    f"Layer {name!r}: expected one `Batch`, got "
                    f"{type(batches[name]).__name__}. A layer of a chain is used once in "
                    "each example."
                )
            rows[name] = layer.rows(batches[name])
        self._require_same_examples(rows)
        xp = ns.namespace_of(
            **{f"batches[{n!r}]": own.inputs for n, own in rows.items()}
        )
        masks = [own.mask for own in rows.values() if own.mask is not None]
        if not masks:
            return ChainRows(tuple(rows.values()))
        for own in masks:
            require_no_weights(own, "a chain of layers", xp=xp)
        mask = functools.reduce(xp.logical_and, masks)
        joined: list[Rows] = []
        for name, layer in zip(self.names, self.layers, strict=True):
            shape = tuple(batches[name].inputs.shape[:-1])
            batch = replaced(batches[name], mask=xp.reshape(mask, shape))
            joined.append(layer.rows(batch))
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
        if len(set(dtypes.values())) > 1:
            raise errors.DtypeError(
                f"Expected the parameters of a chain to have one dtype, got {dtypes}."
            )
        matrices: dict[str, Array] = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            own = {key: parameters[f"{name}/{key}"] for key in layer.parameter_shapes}
            matrices[name] = layer.parameters_to_matrix(own)
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

    def _require_same_examples(self, rows: Mapping[str, Rows]) -> None:
        first = self.names[0]
        expected = rows[first].examples, rows[first].sources
        for name, own in rows.items():
            if own.positions != 1:
                raise errors.ShapeError(
                    f"Layer {name!r}: expected one row for each example, got "
                    f"{own.positions} shared positions, which need not be those of the "
                    "next layer. Where they are, fold them into the examples."
                )
            if (own.examples, own.sources) != expected:
                raise errors.ShapeError(
                    f"Layer {name!r}: expected the examples and sources of {first!r}, "
                    f"{expected}, got {(own.examples, own.sources)}."
                )
