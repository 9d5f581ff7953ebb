"""``F ~ A (x) I``: a block of which only the layer's inputs are known.

Conventions.  With the rows x of a layer (a 1 appended where there is a bias), N examples
and S shared positions in each,

    A = 1/N sum_ns x x^T,

and the block is A (x) I: the input factor of K-FAC, and the identity in place of its output
factor.  Rows that a mask leaves out add nothing.  Damping is exact, ``(A + lam I) (x) I``,
so that a gradient V of shape (in(+1), out) becomes ``(A + lam I)^-1 V``.  Output gradients
enter nowhere: neither the loss's reduction nor the number of sources changes A.

References
----------
Benzing (2022), "Gradient Descent on Neurons and its Link to Approximate Second-Order
Optimization", arXiv:2201.12250, where the method is called FOOF.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import kfac_core as kc
from kfac_core.approximations import OperatorOptions, UpdateOptions
from kfac_core.array import (
    Array,
    Check,
    Namespace,
    Place,
    device_of,
    full_of,
    own_namespace,
    replaced,
)
from kfac_core.factors import FullFactor
from kfac_core.layers import Rows
from kfac_core.linalg import DampedMatrix, Factorization, Solving, dense_of_groups
from kfac_core.operators import SpectralOperator

__all__ = ["IdentityGradients", "InputOperator"]


@dataclass(frozen=True, kw_only=True)
class IdentityGradients(kc.Approximation[Rows]):
    """The block ``A (x) I`` of dense and conv layers, with ``A = 1/N sum_ns x x^T``."""

    name = "identity_gradients"
    sums_of_squares = (("input", "inputs"),)

    @property
    def stacks(self) -> bool:
        """Return True: every formula below keeps leading axes."""
        return True

    @property
    def factor_kinds(self) -> Mapping[str, str]:
        """The input factor, which is S times that of `kfac_core.Kronecker`."""
        return {"input": "full, summed over positions"}

    def factor_shapes(self, layer: kc.Layer, /) -> Mapping[str, tuple[int, int]]:
        """Return the size of A, and on how many columns of one group it acts."""
        n, m = layer.matrix_shape
        return {"input": (n, m // layer.groups)}

    def problem_with(self, layer: kc.Layer, /) -> str | None:
        """Return why a layer other than a dense or conv layer has no such block."""
        if layer.kind in ("dense", "conv"):
            return None
        return "needs inputs with a second moment, so a dense or conv layer"

    def initial(self, layer: kc.Layer, place: Place, /) -> kc.Statistics:
        """Return the statistics of nothing: A is zero, and so is its weight."""
        n, _ = layer.matrix_shape
        groups = (layer.groups,) if layer.groups > 1 else ()
        A = FullFactor().initial((*groups, n), place)
        return kc.Statistics({"input": A}, place.flags())

    def updated(
        self,
        statistics: kc.Statistics,
        rows: Rows,
        layer: kc.Layer,
        options: UpdateOptions,
        /,
    ) -> kc.Statistics:
        """Return the statistics after one update; ``R n^2`` flops for R rows."""
        if "input" in options.skip:
            return statistics
        xp, shares = options.xp, options.shares(rows, statistics.dtype, per="example")
        x, _ = rows.shared_rows("expand", statistics.dtype, xp=xp)
        A = FullFactor().updated(
            statistics.averages["input"],
            x,
            options.decay,
            shares.scale,
            shares.example_weight,
            xp=xp,
        )
        return kc.Statistics({"input": A}, statistics.status)

    def operator(
        self, statistics: kc.Statistics, layer: kc.Layer, options: OperatorOptions, /
    ) -> InputOperator:
        """Return ``(A + lam I) (x) I``; ``n^3`` flops for the inverse."""
        average, factor = statistics.averages["input"], FullFactor()
        A = factor.value(
            average, debias=options.debias, dtype=options.compute, xp=options.xp
        )
        damped = factor.damped(A, options.damping, apply_dtype=options.apply)
        damped = damped.prepared(
            *options.factorizations,
            check=options.check,
            name=f"{options.name}/input",
        )
        return InputOperator(damped, layer.matrix_shape[1] // layer.groups)


@kc.structure(static=("columns",))
class InputOperator(kc.CurvatureOperator):
    """The snapshot ``(A + lam I) (x) I``, which acts on the rows of a vector alone.

    Attributes
    ----------
    input : DampedMatrix
        ``A + lam I``; a stack of them, for a layer of groups.
    columns : int
        The number of outputs, of one group.
    """

    input: DampedMatrix
    columns: int

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        return self.input.size, math.prod(self.input.lead) * self.columns

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n, m)`` of one vector for each part of a stack."""
        return (*self.input.lead, self.input.size, self.columns)

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.input.applied.array

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """What has been prepared."""
        return self.input.factorizations

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> InputOperator:
        """Return the same operator with factorizations made that were missing."""
        prepared = self.input.prepared(
            *factorizations, check=check, name=f"{name}/input"
        )
        return self if prepared is self.input else replaced(self, input=prepared)

    def solved_by(self, solving: Solving, /) -> InputOperator:
        """Return the same operator, with A + lam I divided by in a given way."""
        return replaced(self, input=replaced(self.input, solving=solving))

    def trace(self, *, damped: bool = True) -> Array:
        """Return ``m tr(A + lam I)``, summed over groups."""
        trace = self.input.trace(shifted=damped)
        return self.columns * own_namespace(trace).sum(trace)

    def _logdet(self) -> Array:
        """Return ``m log det(A + lam I)``, summed over groups."""
        logdet = self.input.logdet()
        return self.columns * own_namespace(logdet).sum(logdet)

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return the eigenvalues of A + lam I, each m times, ascending."""
        xp = own_namespace(self.like)
        eigenvalues = xp.reshape(self.input.eigenvalues(shifted=damped), (-1, 1))
        every = xp.broadcast_to(eigenvalues, (eigenvalues.shape[0], self.columns))
        return xp.sort(xp.reshape(every, (-1,)))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return ``kron(A + lam I, I)``, or ``kron(A, I)``."""
        xp, A = own_namespace(self.like), self.input.dense(shifted=damped)
        eye = xp.eye(self.columns, dtype=A.dtype, device=device_of(A))
        eyes = xp.broadcast_to(eye, (*A.shape[:-2], *eye.shape))
        return dense_of_groups(A, eyes, xp=xp)

    def status(self) -> Array:
        """Return the flags of the factorizations."""
        return self.input.status()

    def parts(self) -> dict[str, Any]:
        """Return the damped factor, for reports."""
        return {"input": self.input}

    def spectral(
        self, *, check: Check = "raise", name: str = "block"
    ) -> SpectralOperator:
        """Return ``A (x) I`` in the eigenbasis of A, without damping."""
        factor = self.prepared("eigenbasis", check=check, name=name).input
        xp = own_namespace(self.like)
        spectrum = factor.eigenvalues(shifted=False)[..., :, None]
        return SpectralOperator(
            factor.basis,
            None,
            xp.broadcast_to(spectrum, self.stack_shape),
            full_of(xp, 0.0, self.like),
            factor.status(),
            self.vector_shape,
        )

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        return self.input.multiply(V, shifted=damped)

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        return self.input.solve(V)

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        return self.input.power(V, exponent)

    def _lower_multiply(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        return self.input.lower_multiply(V, transpose=transpose)

    def _lower_solve(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        return self.input.lower_solve(V, transpose=transpose)

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        """Return ``L^-T Z``, with ``L L^T = A + lam I``."""
        return self.input.lower_solve(Z, transpose=True)
