"""The operator of two low-rank factors and multiples of the identity.

Conventions.  ``A = U diag(a) U^T`` of r columns and ``G = W diag(g) W^T`` of q; the block
is ``S (A + s I) (x) (G + t I)``, or under exact damping ``S A (x) G + lam I``.  Either way
it is diagonal in U, W and their complements, with four kinds of eigenvalue,

=============================  ============================  ====================
of vectors in                  factored                      exact
=============================  ============================  ====================
span U, span W                 ``S (a_i + s) (g_j + t)``     ``S a_i g_j + lam``
span U, the complement of W    ``S (a_i + s) t``             ``lam``
the complement of U, span W    ``S s (g_j + t)``             ``lam``
both complements               ``S s t``                     ``lam``
=============================  ============================  ====================

so that every function of the block costs ``4 n m (r + q)`` flops and never forms an n x n
matrix.  This is Woodbury's formula, written for any function of the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import (
    cast,
    device_of,
    own_namespace,
    roundoff_of,
    status_unless,
)
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import in_dtype, replaced, structure
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, Spectrum, spectrum_error
from kfac_core.linalg.factorizations import Factorization
from kfac_core.linalg.kronecker import kronecker_dense
from kfac_core.linalg.low_rank_basis import LowRankBasis
from kfac_core.operators.operator import CurvatureOperator, raise_for

__all__ = ["NO_CHOLESKY", "LowRankOperator", "low_rank_operator"]

_REASON = (
    "a Cholesky factor of low rank plus identity is dense; multiply_matpower with 0.5 and "
    "-0.5 is a root of the block, and sample draws from its inverse"
)

NO_CHOLESKY: Mapping[str, str] = MappingProxyType(
    {"multiply_cholesky": _REASON, "multiply_cholesky_inverse": _REASON}
)
"""The `unsupported_products` of an operator whose Cholesky factor is dense."""

_SINGULAR = "Factors of low rank are singular without damping. Increase `damping`."


class _Spectrum(NamedTuple):
    """The four kinds of eigenvalue, shapes (r, q), (r,), (q,) and ()."""

    both: Array
    left: Array
    right: Array
    rest: Array


@structure(static=("exact", "definite"))
class LowRankOperator(CurvatureOperator):
    """The snapshot of a Kronecker product of two damped low-rank factors.

    With ``A = U diag(a) U^T`` of r columns and ``G = W diag(g) W^T`` of q columns,
    ``F_damped`` is ``S (A + s I) (x) (G + t I)``, or ``S A (x) G + lam I`` under exact
    damping: diagonal in U, W and their complements.  Its eigenvalues are
    ``S (a_i + s) (g_j + t)``, ``S (a_i + s) t``, ``S s (g_j + t)`` and ``S s t``, or
    ``S a_i g_j + lam`` and ``lam`` under exact damping.  Every function of it takes ``4 n m
    (r + q)`` flops, and no n x n matrix is formed.  It has no triangular products.

    Attributes
    ----------
    input, output : LowRankBasis
        Bases of A and of G.
    scale, damping : array, 0-d
        S and lam; lam is zero where damping is factored.
    input_shift, output_shift : array, 0-d
        s and t; zero under exact damping.
    flags : array of int32, 0-d
        `Status` flags.
    exact : bool
        Whether damping is exact.
    definite : bool
        Whether all eigenvalues were checked to be positive, or, with
        ``check="status"``, reported on in the flags.
    """

    input: LowRankBasis
    output: LowRankBasis
    scale: Array
    damping: Array
    input_shift: Array
    output_shift: Array
    flags: Array
    exact: bool
    definite: bool

    @property
    def unsupported_products(self) -> Mapping[str, str]:
        """Unsupported products, each with the reason."""
        return NO_CHOLESKY

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        return self.input.size, self.output.size

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.scale

    @property
    def truncated_traces(self) -> tuple[Array, Array]:
        """The traces of what the two factors were cut off from, 0-d each."""
        return self.input.truncated_trace, self.output.truncated_trace

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        made: tuple[Factorization, ...] = ("eigenbasis", "inverse")
        return frozenset(made if self.definite else made[:1])

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> LowRankOperator:
        """Return the operator, checked to be definite if a factorization is requested."""
        if self.definite or not factorizations:
            return self
        xp, spectrum = own_namespace(self.scale), self._spectrum(True)
        parts = zip(spectrum, self._multiplicities(), strict=True)
        smallest = xp.stack([xp.min(values) for values, number in parts if number])
        flag = status_unless(xp, xp.all(smallest > 0), Status.NOT_POSITIVE)
        accurate = self._spectrum_error() <= RESIDUAL_LIMIT
        flag = flag | status_unless(xp, accurate, Status.INACCURATE)
        made = replaced(self, flags=self.flags | flag, definite=True)
        if check == "raise":
            raise_for(made.status(), name, remedy=_SINGULAR)
        return made

    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace, 0-d."""
        xp, spectrum = own_namespace(self.scale), self._spectrum(damped)
        parts = zip(spectrum, self._multiplicities(), strict=True)
        sums = [number * xp.sum(values) for values, number in parts if number]
        return sum(sums[1:], start=sums[0])

    def _logdet(self) -> Array:
        """Return the log-determinant of the damped block, 0-d."""
        xp = own_namespace(self.scale)
        spectrum = self._seen()._spectrum(True)
        parts = zip(spectrum, self._multiplicities(), strict=True)
        sums = [number * xp.sum(xp.log(values)) for values, number in parts if number]
        return sum(sums[1:], start=sums[0])

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return all eigenvalues, ascending, shape (in(+1) * out,)."""
        xp, spectrum = own_namespace(self.scale), self._spectrum(damped)
        every = []
        for values, number in zip(spectrum, self._multiplicities(), strict=True):
            flat = xp.reshape(values, (-1, 1))
            repeated = xp.broadcast_to(flat, (flat.shape[0], number))
            every.append(xp.reshape(repeated, (-1,)))
        return xp.sort(xp.concat(every))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return the block as one matrix."""
        xp = own_namespace(self.scale)
        parts = []
        for side, shift in (
            (self.input, self.input_shift),
            (self.output, self.output_shift),
        ):
            eye = xp.eye(side.size, dtype=shift.dtype, device=device_of(shift))
            parts.append(side.dense() + shift * eye if damped else side.dense())
        dense = self.scale * kronecker_dense(parts)
        if not damped:
            return dense
        eye = xp.eye(dense.shape[0], dtype=dense.dtype, device=device_of(dense))
        return dense + self.damping * eye

    def status(self) -> Array:
        """Return the flags, of the factors too, 0-d int32."""
        return self.flags | self.input.status | self.output.status

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        return self._by_subspace(V, self._spectrum(damped), xp)

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        return self._power(V, xp, -1.0)

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        made = self if exponent >= 0 or self.definite else self._seen()
        parts = zip(made._spectrum(True), self._multiplicities(), strict=True)
        # A complement that is empty has no eigenvalue, which may be zero here.
        powers = [values**exponent if number else values for values, number in parts]
        return self._by_subspace(V, _Spectrum(*powers), xp)

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        """Return ``F_damped^-1/2 Z``."""
        return self._power(Z, xp, -0.5)

    def _seen(self) -> LowRankOperator:
        """Return itself, definite where that can be seen."""
        made: LowRankOperator = self._looked_at("inverse", self.scale)
        return made

    def _dampings(self) -> dict[str, Array]:
        if self.exact:
            return {"damping": self.damping}
        return {"input_damping": self.input_shift, "output_damping": self.output_shift}

    def _spectrum(self, damped: bool) -> _Spectrum:
        a, g, S = self.input.eigenvalues, self.output.eigenvalues, self.scale
        nothing = own_namespace(self.scale).zeros_like(S)
        s, t, lam = nothing, nothing, nothing
        if damped:
            s, t, lam = self.input_shift, self.output_shift, self.damping
        both = S * (a + s)[:, None] * (g + t)[None, :] + lam
        return _Spectrum(
            both, S * (a + s) * t + lam, S * s * (g + t) + lam, S * s * t + lam
        )

    def _spectrum_error(self) -> Array:
        """Return a bound of the relative error of the damped eigenvalues, 0-d."""
        xp, S = own_namespace(self.scale), self.scale
        roundoff = xp.full_like(S, roundoff_of(S.dtype, xp=xp))
        a, g = (
            Spectrum(side.eigenvalues, roundoff, None)
            for side in (self.input, self.output)
        )
        if self.exact:
            return spectrum_error([a, g], scale=S, damping=self.damping, xp=xp)
        one = xp.ones_like(S)
        errors = [
            spectrum_error([side], scale=one, damping=shift, xp=xp)
            for side, shift in ((a, self.input_shift), (g, self.output_shift))
        ]
        return errors[0] + errors[1]

    def _multiplicities(self) -> tuple[int, int, int, int]:
        """Return how often each of the numbers in a spectrum is an eigenvalue."""
        left = self.input.size - self.input.rank
        right = self.output.size - self.output.rank
        return 1, right, left, left * right

    def _by_subspace(self, V: Array, values: _Spectrum, xp: Namespace) -> Array:
        """Multiply the parts of V in the four pairs of subspaces by their values."""
        U, W = self.input, self.output
        in_u = U.to_basis(V)
        core = xp.matmul(in_u, W.eigenvectors)
        W_t = xp.matrix_transpose(W.eigenvectors)
        inner = xp.matmul(values.both * core, W_t)
        if not W.complete:
            inner = inner + values.left[:, None] * (in_u - xp.matmul(core, W_t))
        result = U.from_basis(inner)
        if U.complete:
            return result
        in_w = xp.matmul(V, W.eigenvectors) - U.from_basis(core)
        result = result + xp.matmul(in_w * values.right, W_t)
        if W.complete:
            return result
        neither = V - U.from_basis(in_u) - xp.matmul(in_w, W_t)
        return result + values.rest * neither


def low_rank_operator(
    input_basis: LowRankBasis,
    output_basis: LowRankBasis,
    /,
    *,
    scale: Array,
    damping: Array,
    shifts: tuple[Array, Array] | None,
    factorizations: tuple[Factorization, ...],
    check: Check,
    name: str,
    dtype: object,
) -> LowRankOperator:
    """Make a damped Kronecker product of two low-rank factors.

    Parameters
    ----------
    input_basis, output_basis : LowRankBasis
        Bases of A and G.
    scale : array, 0-d
        Scale ``S``, positive.
    damping : array, 0-d
        Damping ``lam``.
    shifts : tuple of two arrays, 0-d, or None
        s and t, where damping is factored; None where lam is added to the block.
    factorizations : tuple of str
        Factorizations to prepare now.
    check : {"raise", "status"}
        Whether failures raise, or are reported in the operator's status.
    name : str
        Name of the block in error messages.
    dtype : dtype
        Dtype of the arrays.

    Returns
    -------
    LowRankOperator
        An immutable snapshot.

    Raises
    ------
    NotFiniteError, DampingError, FactorizationError
        For NaN or infinity in a factor, a bad damping, and a block that is not positive
        definite where it has to be (``check="raise"``).
    """
    xp = own_namespace(scale)
    zero = xp.zeros_like(scale)
    exact = shifts is None
    lam = damping if exact else zero
    s, t = (zero, zero) if shifts is None else shifts
    stacked = xp.stack([lam, s, t])
    good = xp.all(xp.isfinite(stacked) & (stacked >= 0))
    made = LowRankOperator(
        in_dtype(input_basis, dtype, xp),
        in_dtype(output_basis, dtype, xp),
        cast(xp, scale, dtype),
        cast(xp, lam, dtype),
        cast(xp, s, dtype),
        cast(xp, t, dtype),
        status_unless(xp, good, Status.BAD_DAMPING),
        exact=exact,
        definite=False,
    )
    if check == "raise":
        raise_for(made.status(), name, remedy=_SINGULAR)
    return made.prepared(*factorizations, check=check, name=name)
