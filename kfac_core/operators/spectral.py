"""A block in its eigenbasis, without damping: ``F = Q diag(s) Q^T``.

Conventions.  A vector V of shape ``(in(+1), out)`` has the coordinates
``R = Q_A^T V Q_G`` and comes back as ``V = Q_A R Q_G^T``.  The eigenvalues s have the
shape of R, so that a function f of ``c F + lam I`` is f of ``c s + lam``, entry by
entry: one decomposition serves every lam and every c.

====================  =======================  ===========================  ===========
the operator's block  R                        s                            Q_A, Q_G
====================  =======================  ===========================  ===========
``S A (x) G``         ``(n, m)``               ``S a g^T``                  both
EKFAC                 ``(n, m)``               the corrected E              both
a diagonal            ``(n, m)``               its entries                  neither
a whole matrix        ``(n m, 1)``             its eigenvalues              the first
Q groups of columns   ``(Q, n, m)``            a stack                      stacks
====================  =======================  ===========================  ===========

Leading axes of V (examples, outputs, samples) are allowed everywhere and stay in front.
"""

from __future__ import annotations

import functools
from typing import Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import (
    cast,
    moved_axis,
    namespace_of,
    own_namespace,
    require_floating,
)
from kfac_core.array.structure import structure
from kfac_core.errors import ShapeError, UnsupportedError
from kfac_core.factors.factor import Shifted
from kfac_core.linalg.shifted_diagonal import ShiftedDiagonal
from kfac_core.operators.eigen import EigenOperator
from kfac_core.operators.exact_kronecker import ExactKronecker
from kfac_core.operators.flat import FlatOperator
from kfac_core.operators.kronecker import FactoredKronecker

__all__ = ["SpectralBlock", "spectral_block"]


@structure(static=("shape",))
class SpectralBlock:
    """The undamped block of one layer in its eigenbasis; see the module's conventions.

    Attributes
    ----------
    input_basis, output_basis : array or None
        Q_A and Q_G, orthogonal; None for the coordinates.
    eigenvalues : array, shape ((Q,) n, m) or (n m, 1)
        s, none of them negative.
    flags : array of int32, 0-d
        Of `Status`, of the operator that it was made from.
    shape : tuple of int
        The shape ``(in(+1), out)`` of the vectors.
    """

    input_basis: Array | None
    output_basis: Array | None
    eigenvalues: Array
    flags: Array
    shape: tuple[int, int]

    @property
    def dimension(self) -> int:
        """The number of the block's parameters."""
        return self.shape[0] * self.shape[1]

    @property
    def dtype(self) -> Any:
        """The dtype of the arrays, in which everything is computed."""
        return self.eigenvalues.dtype

    @property
    def namespace(self) -> Namespace:
        """The namespace of the arrays."""
        return own_namespace(self.eigenvalues)

    @property
    def is_kronecker(self) -> bool:
        """Whether the basis is ``Q_A (x) Q_G``, so that rows x and g can be turned."""
        return self.lead != () or tuple(self.eigenvalues.shape) == self.shape

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the stack of groups; empty for a single block."""
        return tuple(self.eigenvalues.shape[:-2])

    def to_basis(self, vectors: Array, /) -> Array:
        """Return ``R = Q_A^T V Q_G`` of each vector.

        Parameters
        ----------
        vectors : array, shape (..., in(+1), out)
            Cast to the block's dtype.

        Returns
        -------
        array, shape (..., (Q,) n, m) or (..., n m, 1)
            The coordinates.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For vectors that do not fit.

        Notes
        -----
        ``2 n m (n + m)`` flops for each.
        """
        xp = namespace_of(vectors=vectors, block=self.eigenvalues)
        require_floating(xp, vectors, "vectors")
        if tuple(vectors.shape[-2:]) != self.shape:
            n, m = self.shape
            raise ShapeError(
                f"Expected vectors of shape (..., {n}, {m}), got {tuple(vectors.shape)}."
            )
        R = self._split(cast(xp, vectors, self.dtype), xp)
        if self.input_basis is not None:
            R = xp.matmul(xp.matrix_transpose(self.input_basis), R)
        return R if self.output_basis is None else xp.matmul(R, self.output_basis)

    def from_basis(self, coordinates: Array, /) -> Array:
        """Return ``V = Q_A R Q_G^T`` of what `to_basis` gave, in the block's dtype."""
        xp, V = self.namespace, coordinates
        if self.input_basis is not None:
            V = xp.matmul(self.input_basis, V)
        if self.output_basis is not None:
            V = xp.matmul(V, xp.matrix_transpose(self.output_basis))
        return self._joined(V, xp)

    def mean_eigenvalue(self) -> Array:
        """Return ``tr F / dim F``, 0-d: the mean of s."""
        return self.namespace.mean(self.eigenvalues)

    def _split(self, V: Array, xp: Namespace) -> Array:
        """Return vectors in the shape of the eigenvalues, leading axes in front."""
        if not self.lead:
            return xp.reshape(V, (*V.shape[:-2], *self.eigenvalues.shape))
        groups, n, m = self.eigenvalues.shape
        return moved_axis(xp.reshape(V, (*V.shape[:-2], n, groups, m)), -2, -3, xp=xp)

    def _joined(self, V: Array, xp: Namespace) -> Array:
        """Return vectors in the shape of the block; undoes `_split`."""
        if not self.lead:
            return xp.reshape(V, (*V.shape[:-2], *self.shape))
        moved = moved_axis(V, -3, -2, xp=xp)
        return xp.reshape(moved, (*V.shape[:-3], *self.shape))


@functools.singledispatch
def spectral_block(operator: Any, /) -> SpectralBlock:
    """Return an operator's block in its eigenbasis, its damping left out.

    Parameters
    ----------
    operator : FactoredKronecker, ExactKronecker, EigenOperator or FlatOperator
        A snapshot, of any damping and rule.  Other classes can be added by
        ``spectral_block.register``.

    Returns
    -------
    SpectralBlock
        In the dtype of applying.

    Raises
    ------
    UnsupportedError
        For an operator without an eigenbasis of this form.
    NotFiniteError, FactorizationError
        Where an eigenbasis that was not prepared cannot be made.

    Notes
    -----
    About ``9 (n^3 + m^3)`` flops where the eigenbases were not prepared, ``9 (n m)^3``
    for a whole matrix; none for a diagonal and for EKFAC, which has them.
    """
    raise UnsupportedError(
        f"{type(operator).__name__} has no eigenbasis of the form Q_A (x) Q_G. Make the "
        "block with Kronecker, Eigen, Diagonal or Full."
    )


@spectral_block.register
def _(operator: FactoredKronecker, /) -> SpectralBlock:
    return _of_factors(operator.input, operator.output, operator.scale, operator.shape)


@spectral_block.register
def _(operator: ExactKronecker, /) -> SpectralBlock:
    made = _of_factors(operator.input, operator.output, operator.scale, operator.shape)
    return SpectralBlock(
        made.input_basis,
        made.output_basis,
        made.eigenvalues,
        made.flags | operator.flags,
        made.shape,
    )


@spectral_block.register
def _(operator: EigenOperator, /) -> SpectralBlock:
    return SpectralBlock(
        operator.input_basis,
        operator.output_basis,
        operator.moments,
        operator.flags,
        operator.shape,
    )


@spectral_block.register
def _(operator: FlatOperator, /) -> SpectralBlock:
    block = operator.block.prepared("eigenbasis")
    values, xp = block.eigenvalues(shifted=False), own_namespace(operator.block.shift)
    if isinstance(block, ShiftedDiagonal):
        values = xp.reshape(values, operator.shape)
        return SpectralBlock(None, None, values, block.status(), operator.shape)
    basis = block.eigenvectors()
    return SpectralBlock(basis, None, values[:, None], block.status(), operator.shape)


def _of_factors(
    input_factor: Shifted, output_factor: Shifted, scale: Array, shape: tuple[int, int]
) -> SpectralBlock:
    """Return ``S A (x) G`` from its damped factors."""
    factors = [part.prepared("eigenbasis") for part in (input_factor, output_factor)]
    a, g = (part.eigenvalues(shifted=False) for part in factors)
    bases = [
        None if isinstance(part, ShiftedDiagonal) else part.eigenvectors()
        for part in factors
    ]
    values = scale[..., None, None] * a[..., :, None] * g[..., None, :]
    flags = factors[0].status() | factors[1].status()
    return SpectralBlock(bases[0], bases[1], values, flags, shape)
