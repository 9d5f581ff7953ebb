"""The gradients of many examples for one layer, as rows or as arrays.

Conventions.  An example's gradient is ``D_n = c sum_s x g^T``, where c scales g to the
example's own loss.  It is given by a layer's inputs and output gradients (`Batch`), or by
parameter-shaped arrays with a first axis of examples.  Parts of it are computed when they
are needed, and the gradient of a single-position example is never formed: its inner
product with a matrix P is ``x^T P g``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace, Scalar, replaced
from kfac_core.array import namespaces as ns
from kfac_core.conventions import Conventions, LossReduction
from kfac_core.layers.example_gradients import require_known_rows
from kfac_core.layers.layer import Layer
from kfac_core.layers.parameter_stacks import stack_to_matrices
from kfac_core.layers.rows import Batch, Rows
from kfac_core.layers.whole_rows import whole_rows
from kfac_core.operators.spectral import SpectralOperator
from kfac_core.operators.spectral_rows import row_coordinates, row_squares

_ARRAYS = ("inputs", "output_grads", "mask", "bias")
"""The arrays of a batch, all with a first axis of examples."""


class LayerGradients:
    """The gradients of N examples for one layer.

    Parameters
    ----------
    layer : Layer
        Layer of any kind.
    batches : Batch, sequence of Batch, or mapping of str to array
        Inputs and output gradients of the layer, without sources; or gradients with an axis
        of examples.
    reduction : {"sum", "mean", "mean_rows"}
        Reduction of the differentiated loss in this batch.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For arrays of incompatible shape, dtype, library or device.
    UnsupportedError
        For several sources: an example has one gradient.
    ConventionError
        For ``"mean_rows"`` of gradients that have no rows.
    """

    def __init__(
        self,
        layer: Layer,
        batches: Batch | Sequence[Batch] | Mapping[str, Array],
        /,
        *,
        reduction: LossReduction,
    ) -> None:
        self.layer = layer
        self.batches: list[Batch] | Mapping[str, Array]
        if isinstance(batches, Mapping):
            self.batches = arrays = batches
        else:
            uses: list[Any] = (
                list(batches) if isinstance(batches, list | tuple) else [batches]
            )
            alone = (isinstance(use, Batch) and use.sources is None for use in uses)
            if not all(alone):
                raise errors.UnsupportedError(
                    "Expected a `Batch` without `sources` for each use of a layer, or a "
                    "mapping of gradients: an example has one gradient."
                )
            self.batches = uses
            arrays = {
                f"{name}[{i}]": x
                for i, use in enumerate(uses)
                for name in _ARRAYS
                if (x := getattr(use, name)) is not None
            }
        lengths = {
            name: int(x.shape[0]) if x.ndim else -1 for name, x in arrays.items()
        }
        for name, x in arrays.items():
            constraints.require_shape(name, x, (max(lengths.values()), ...))
        self.examples = next(iter(lengths.values()))
        self.rows_each, self.is_rows = self._form()
        self.scale = self._scale(reduction)

    def part(self, start: int, stop: int, /) -> ExamplePart:
        """Return the gradients of some of the examples."""
        if isinstance(self.batches, Mapping):
            stack = {name: x[start:stop, ...] for name, x in self.batches.items()}
            return ExamplePart(stack_to_matrices(self.layer, stack), None, self.scale)
        rows = whole_rows(
            self.layer, [_taken(use, start, stop) for use in self.batches]
        )
        return ExamplePart(None, rows, self.scale)

    def _form(self) -> tuple[int, bool]:
        """Return the number of rows of an example, and whether there are x and g."""
        if isinstance(self.batches, Mapping) or not self.examples:
            return 1, False
        # One example shows the form of all, without extracting every patch.
        rows = whole_rows(self.layer, [_taken(use, 0, 1) for use in self.batches])
        return rows.positions, isinstance(rows, Rows)

    def _scale(self, reduction: LossReduction) -> Scalar:
        conventions = Conventions(reduction=reduction, sources="sum")
        if reduction != "mean_rows":
            return conventions.gradient_scale(examples=self.examples, rows=0)
        if isinstance(self.batches, Mapping):
            raise errors.ConventionError(
                "reduction='mean_rows' counts rows, which gradients do not have. Give a "
                "`Batch`, or gradients of a summed or mean loss."
            )
        total: Scalar = 0
        for use in self.batches:
            one = _taken(use, 0, 1)
            require_known_rows(self.layer.rows(one), reduction)
            xp, dtype = ns.own_namespace(use.output_grads), use.output_grads.dtype
            if use.mask is None:
                rows, _, _ = self.layer.rows(one).counts(dtype, xp=xp)
                total = total + self.examples * rows
            else:
                total = total + xp.sum(xp.astype(use.mask, xp.float32))
        return conventions.gradient_scale(examples=self.examples, rows=total)


@dataclass(frozen=True)
class ExamplePart:
    """Gradients of some examples, as matrices or as rows x and g.

    Attributes
    ----------
    matrices : array, shape (N, in(+1), out), or None
        The D, without their scale.
    rows : Rows, IdRows, ExampleGradients or None
        Rows or matrices.
    scale : float or 0-d array
        Factor ``c``.
    """

    matrices: Array | None
    rows: Any
    scale: Scalar

    def coordinates(self, block: SpectralOperator, /) -> Array:
        """Return the D in the block's eigenbasis, shape (N, *spectrum's shape)."""
        if self.matrices is not None:
            return block.to_basis(self.matrices) * self.scale
        return row_coordinates(block, self.rows)[0, ...] * self.scale

    def squares(self, block: SpectralOperator, weights: Array, /) -> Array:
        """Return ``sum_ij w_ij R_ij^2`` of the coordinates R, shape (N,)."""
        if self.matrices is None:
            return row_squares(block, weights, self.rows)[0, ...] * self.scale**2
        R, xp = self.coordinates(block), block.namespace
        return xp.sum(R * R * weights, axis=tuple(range(1, R.ndim)))

    def inner_products(self, P: Array, /, *, by_rows: bool) -> Array:
        """Return ``<P_q, D_n>``.

        Parameters
        ----------
        P : array, shape (q, in(+1), out)
            Matrices in the dtype of the sums.
        by_rows : bool
            Whether to compute ``x^T P g``, for rows x and g, without forming D.

        Returns
        -------
        array, shape (q, N)
            In the dtype of P.
        """
        like = self.matrices if self.rows is None else self.rows.like
        xp = ns.namespace_of(gradients=like, queries=P)
        if by_rows and isinstance(self.rows, Rows):
            return _bilinear(P, self.rows, xp) * self.scale
        flat = xp.reshape(P, (P.shape[0], -1))
        if self.matrices is None:
            D = self.rows.vectors(P.dtype, xp=xp)
        else:
            D = xp.reshape(ns.cast(xp, self.matrices, P.dtype), (-1, flat.shape[-1]))
        return xp.matmul(flat, xp.matrix_transpose(D)) * self.scale


def _bilinear(P: Array, rows: Rows, xp: Namespace) -> Array:
    """Return ``sum_s x^T P g`` for each P and example, shape (q, N)."""
    x = rows.full_inputs(P.dtype, xp=xp)
    g = ns.cast(xp, rows.output_grads, P.dtype)[..., 0, :, :, :]
    n, m = int(x.shape[-1]), int(g.shape[-1])
    q, groups = int(P.shape[0]), int(x.shape[0]) if x.ndim == 4 else 1
    # Axes (group, query, row or column), so that one matmul serves all queries.
    P = xp.permute_dims(xp.reshape(P, (q, n, groups, m)), (2, 0, 1, 3))
    x, g = xp.reshape(x, (groups, -1, n)), xp.reshape(g, (groups, -1, m))
    if n > m:
        # Contract the longer side in the product, so that the temporary is small.
        x, g, n, m, P = g, x, m, n, xp.matrix_transpose(P)
    half = xp.matmul(xp.reshape(P, (groups, q * n, m)), xp.matrix_transpose(g))
    half = xp.reshape(half, (groups, q, n, -1)) * xp.matrix_transpose(x)[:, None, ...]
    by_row = xp.sum(half, axis=(0, 2))
    return xp.sum(xp.reshape(by_row, (q, rows.examples, rows.positions)), axis=-1)


def _taken(use: Batch, start: int, stop: int) -> Batch:
    """Return a batch of some of the examples."""
    arrays = {name: getattr(use, name) for name in _ARRAYS}
    parts = {k: x[start:stop, ...] for k, x in arrays.items() if x is not None}
    return replaced(use, **parts)
