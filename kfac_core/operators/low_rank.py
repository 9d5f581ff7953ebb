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

from typing import NamedTuple, NoReturn

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import truth_of
from kfac_core.array.namespaces import device_of, status_unless
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import replaced, structure
from kfac_core.errors import (
    DampingError,
    FactorizationError,
    NotFiniteError,
    UnsupportedError,
)
from kfac_core.linalg.kronecker import kronecker_dense
from kfac_core.linalg.low_rank_basis import LowRankBasis
from kfac_core.linalg.shifted import Factorization
from kfac_core.operators.operator import entering, leaving

__all__ = ["NO_CHOLESKY", "LowRankOperator"]

NO_CHOLESKY = (
    "a Cholesky factor of low rank plus identity is dense; multiply_matpower with 0.5 and "
    "-0.5 is a root of the block, and sample draws from its inverse"
)
"""Why an operator of low rank has no triangular products."""


class _Spectrum(NamedTuple):
    """The four kinds of eigenvalue, shapes (r, q), (r,), (q,) and ()."""

    both: Array
    left: Array
    right: Array
    rest: Array


@structure(static=("exact", "definite"))
class LowRankOperator:
    """A snapshot of the block of the module's text; see `CurvatureOperator`.

    Attributes
    ----------
    input, output : LowRankBasis
        Of A and of G.
    scale, damping : array, 0-d
        S and lam; lam is zero where damping is factored.
    input_shift, output_shift : array, 0-d
        s and t; zero under exact damping.
    flags : array of int32, 0-d
        Of `Status`.
    exact : bool
        Whether damping is exact.
    definite : bool
        Whether all eigenvalues were found positive when it was prepared, or, with
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
    def shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        return self.input.size, self.output.size

    @property
    def lost(self) -> tuple[Array, Array]:
        """The traces of what the two factors were cut off from, 0-d each."""
        return self.input.truncated_trace, self.output.truncated_trace

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> LowRankOperator:
        """Return the same operator, known to be definite where anything is asked for."""
        if self.definite:
            return self
        made = replaced(self, flags=self.flags | self._invalid_flags())
        if factorizations:
            flags = made.flags | self._indefinite_flag()
            made = replaced(made, flags=flags, definite=True)
        if check == "raise":
            _raise_for(Status(int(made.status())), name)
        return made

    def multiply(self, vector: Array, /, *, damped: bool = True) -> Array:
        """Return the damped block times v, or ``S A V G``."""
        V, xp = self._enter(vector, "vector")
        return leaving(self._turned(V, self._spectrum(damped), xp), vector)

    def multiply_inverse(self, vector: Array, /) -> Array:
        """Return the inverse of the damped block times v."""
        return self.multiply_matpower(vector, -1.0)

    def multiply_matpower(self, vector: Array, exponent: float, /) -> Array:
        """Return ``F_damped^p v``; for a negative power the block must be definite."""
        V, xp = self._enter(vector, "vector")
        spectrum = self._definite_spectrum() if exponent < 0 else self._spectrum(True)
        parts = zip(spectrum, self._multiplicities(), strict=True)
        # A complement that is empty has no eigenvalue, which may be zero here.
        powers = [values**exponent if number else values for values, number in parts]
        return leaving(self._turned(V, _Spectrum(*powers), xp), vector)

    def multiply_cholesky(
        self, vector: Array, /, *, transpose: bool = False
    ) -> NoReturn:
        """Raise `UnsupportedError`."""
        raise UnsupportedError(f"{type(self).__name__}: {NO_CHOLESKY}.")

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> NoReturn:
        """Raise `UnsupportedError`."""
        raise UnsupportedError(f"{type(self).__name__}: {NO_CHOLESKY}.")

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise Z into ``F_damped^-1/2 Z``."""
        return self.multiply_matpower(noise, -0.5)

    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace, 0-d."""
        xp, spectrum = self._xp(), self._spectrum(damped)
        parts = zip(spectrum, self._multiplicities(), strict=True)
        sums = [number * xp.sum(values) for values, number in parts if number]
        return sum(sums[1:], start=sums[0])

    def logdet(self) -> Array:
        """Return the log-determinant of the damped block, 0-d."""
        xp, spectrum = self._xp(), self._definite_spectrum()
        parts = zip(spectrum, self._multiplicities(), strict=True)
        sums = [number * xp.sum(xp.log(values)) for values, number in parts if number]
        return sum(sums[1:], start=sums[0])

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return all eigenvalues, ascending, shape (in(+1) * out,)."""
        xp, spectrum = self._xp(), self._spectrum(damped)
        every = []
        for values, number in zip(spectrum, self._multiplicities(), strict=True):
            flat = xp.reshape(values, (-1, 1))
            repeated = xp.broadcast_to(flat, (flat.shape[0], number))
            every.append(xp.reshape(repeated, (-1,)))
        return xp.sort(xp.concat(every))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return the block as one matrix."""
        xp = self._xp()
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

    def _spectrum(self, damped: bool) -> _Spectrum:
        a, g, S = self.input.eigenvalues, self.output.eigenvalues, self.scale
        nothing = self._xp().zeros_like(S)
        s, t, lam = nothing, nothing, nothing
        if damped:
            s, t, lam = self.input_shift, self.output_shift, self.damping
        both = S * (a + s)[:, None] * (g + t)[None, :] + lam
        return _Spectrum(
            both, S * (a + s) * t + lam, S * s * (g + t) + lam, S * s * t + lam
        )

    def _multiplicities(self) -> tuple[int, int, int, int]:
        """Return how often each of the numbers in a spectrum is an eigenvalue."""
        left = self.input.size - self.input.rank
        right = self.output.size - self.output.rank
        return 1, right, left, left * right

    def _turned(self, V: Array, values: _Spectrum, xp: Namespace) -> Array:
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

    def _invalid_flags(self) -> Array:
        """Return the flags of what cannot be computed with, 0-d."""
        xp = self._xp()
        shifts = xp.stack([self.damping, self.input_shift, self.output_shift])
        good = xp.all(xp.isfinite(shifts) & (shifts >= 0))
        return status_unless(xp, good, Status.BAD_DAMPING)

    def _indefinite_flag(self) -> Array:
        """Return the flag of an eigenvalue that is not positive, 0-d."""
        xp, spectrum = self._xp(), self._spectrum(True)
        parts = zip(spectrum, self._multiplicities(), strict=True)
        smallest = xp.stack([xp.min(values) for values, number in parts if number])
        return status_unless(xp, xp.all(smallest > 0), Status.NOT_POSITIVE)

    def _definite_spectrum(self) -> _Spectrum:
        """Return the damped spectrum, after making sure that it is positive, if it can."""
        if not self.definite:
            flags = self.status() | self._invalid_flags() | self._indefinite_flag()
            if truth_of(flags == 0, xp=self._xp()) is False:
                _raise_for(Status(int(flags)), "block")
        return self._spectrum(True)

    def _enter(self, vector: Array, name: str) -> tuple[Array, Namespace]:
        return entering(
            vector, self.shape, self.scale.dtype, operator=self.scale, name=name
        )

    def _xp(self) -> Namespace:
        return array_api_compat.array_namespace(self.scale)


def _raise_for(flags: Status, name: str) -> None:
    if Status.MATRIX_NOT_FINITE in flags:
        raise NotFiniteError(f"{name}: a factor holds NaN or infinity.")
    if Status.BAD_DAMPING in flags:
        raise DampingError(
            f"{name}: `damping` is negative or not finite. Expected a finite number >= 0."
        )
    if Status.NOT_POSITIVE in flags:
        raise FactorizationError(
            "the damped block has an eigenvalue that is not positive: factors of low rank "
            "are singular without damping. Increase `damping`.",
            factor=name,
        )
