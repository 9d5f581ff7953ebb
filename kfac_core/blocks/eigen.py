"""The operator of EKFAC, ``(Q_A (x) Q_G) diag(E + lam) (Q_A (x) Q_G)^T``.

Conventions.  E has the shape ``(in(+1), out)`` of the vectors; on a vector V a function f
of the block is ``Q_A [ (Q_A^T V Q_G) * f(E + lam) ] Q_G^T``.  The lower Cholesky factor
alone has no such form: it is made from the dense block, for small layers.
"""

from __future__ import annotations

import array_api_compat

from kfac_core.arrays import any_status, status_unless
from kfac_core.backend import Array, Namespace
from kfac_core.blocks.operator import entering, leaving
from kfac_core.errors import DampingError, FactorizationError, NotFiniteError
from kfac_core.linalg.kronecker import kronecker_dense
from kfac_core.linalg.shifted import Factorization, ShiftedMatrix, shifted_matrix
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.status import Check, Status
from kfac_core.structure import replaced, structure

__all__ = ["EigenOperator"]


@structure(static=("name", "check"))
class EigenOperator:
    """A snapshot of the block of the module's text; see `CurvatureOperator`.

    Attributes
    ----------
    input_basis, output_basis : array, shapes (n, n) and (m, m)
        Q_A and Q_G, orthogonal.
    moments : array, shape (n, m)
        E.
    damping : array, 0-d
        lam.
    whole : ShiftedMatrix or None
        The dense damped block, where its Cholesky factor was asked for.
    flags : array of int32, 0-d
        Of `Status`.
    name, check
        What a message should call it, and whether trouble raises.
    """

    input_basis: Array
    output_basis: Array
    moments: Array
    damping: Array
    whole: ShiftedMatrix | None
    flags: Array
    name: str
    check: Check

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        return int(self.moments.shape[0]), int(self.moments.shape[1])

    def prepared(self, *factorizations: Factorization) -> EigenOperator:
        """Return the same operator, checked, with a Cholesky factor if asked for."""
        made = self._definite() if "inverse" in factorizations else self._checked()
        if "cholesky" in factorizations and made.whole is None:
            dense = SymmetricMatrix(self.to_dense(damped=False), whole=True)
            whole = shifted_matrix(
                dense,
                self.damping,
                factorizations=("cholesky",),
                check=self.check,
                name=self.name,
            )
            made = replaced(made, whole=whole)
        return made

    def multiply(self, vector: Array, /, *, damped: bool = True) -> Array:
        """Return ``F_damped v``, or ``F v``; ``4 n m (n + m)`` flops."""
        V, xp = self._enter(vector, "vector")
        return leaving(self._turned(V, self._spectrum(damped), xp), vector)

    def multiply_inverse(self, vector: Array, /) -> Array:
        """Return ``F_damped^-1 v``."""
        return self.multiply_matpower(vector, -1.0)

    def multiply_matpower(self, vector: Array, exponent: float, /) -> Array:
        """Return ``F_damped^p v``."""
        V, xp = self._enter(vector, "vector")
        made = self._definite() if exponent < 0 else self
        return leaving(self._turned(V, made._spectrum(True) ** exponent, xp), vector)

    def multiply_cholesky(self, vector: Array, /, *, transpose: bool = False) -> Array:
        """Return ``L v`` or ``L^T v``, with L of the dense block."""
        V, xp = self._enter(vector, "vector")
        flat = xp.reshape(V, (-1, 1))
        product = self._whole().lower_multiply(flat, transpose=transpose)
        return leaving(xp.reshape(product, self.shape), vector)

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> Array:
        """Return ``L^-1 v`` or ``L^-T v``, with L of the dense block."""
        V, xp = self._enter(vector, "vector")
        flat = xp.reshape(V, (-1, 1))
        product = self._whole().lower_solve(flat, transpose=transpose)
        return leaving(xp.reshape(product, self.shape), vector)

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise Z into ``F_damped^-1/2 Z``."""
        Z, xp = self._enter(noise, "noise")
        spectrum = self._definite()._spectrum(True)
        return leaving(self._turned(Z, spectrum**-0.5, xp), noise)

    def trace(self, *, damped: bool = True) -> Array:
        """Return the sum of ``E + lam``, or of E, 0-d."""
        return self._xp().sum(self._spectrum(damped))

    def logdet(self) -> Array:
        """Return ``sum log(E + lam)``, 0-d."""
        xp = self._xp()
        return xp.sum(xp.log(self._definite()._spectrum(True)))

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return ``E + lam``, or E, ascending."""
        xp = self._xp()
        return xp.sort(xp.reshape(self._spectrum(damped), (-1,)))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return the block as one matrix."""
        xp = self._xp()
        Q = kronecker_dense((self.input_basis, self.output_basis))
        scaled = Q * xp.reshape(self._spectrum(damped), (1, -1))
        dense = xp.matmul(scaled, xp.matrix_transpose(Q))
        return 0.5 * (dense + xp.matrix_transpose(dense))

    def status(self) -> Array:
        """Return the flags, 0-d int32."""
        if self.whole is None:
            return self.flags
        return self.flags | any_status(self.whole.status(), xp=self._xp())

    def _spectrum(self, damped: bool) -> Array:
        return self.moments + self.damping if damped else self.moments

    def _turned(self, V: Array, spectrum: Array, xp: Namespace) -> Array:
        inner = xp.matmul(xp.matrix_transpose(self.input_basis), V)
        inner = xp.matmul(inner, self.output_basis) * spectrum
        outer = xp.matmul(self.input_basis, inner)
        return xp.matmul(outer, xp.matrix_transpose(self.output_basis))

    def _checked(self) -> EigenOperator:
        """Return itself, after looking for what cannot be computed with."""
        xp = self._xp()
        parts = (self.moments, self.input_basis, self.output_basis)
        finite = xp.all(xp.stack([xp.all(xp.isfinite(part)) for part in parts]))
        good = xp.isfinite(self.damping) & (self.damping >= 0)
        flags = status_unless(xp, finite, Status.MATRIX_NOT_FINITE)
        return self._with(flags | status_unless(xp, good, Status.BAD_DAMPING))

    def _definite(self) -> EigenOperator:
        xp = self._xp()
        positive = xp.all(self._spectrum(True) > 0)
        flag = status_unless(xp, positive, Status.NOT_POSITIVE)
        return self._checked()._with(flag)

    def _with(self, flags: Array) -> EigenOperator:
        if self.check == "status":
            return replaced(self, flags=self.flags | flags)
        found = Status(int(flags))
        if Status.MATRIX_NOT_FINITE in found:
            raise NotFiniteError(f"{self.name}: the block holds NaN or infinity.")
        if Status.BAD_DAMPING in found:
            raise DampingError(
                f"{self.name}: `damping` is negative or not finite. Expected a finite "
                "number >= 0."
            )
        if Status.NOT_POSITIVE in found:
            raise FactorizationError(
                "the damped block has an eigenvalue that is not positive. Increase "
                "`damping`.",
                factor=self.name,
            )
        return self

    def _whole(self) -> ShiftedMatrix:
        made = self.prepared("cholesky").whole
        assert made is not None
        return made

    def _enter(self, vector: Array, name: str) -> tuple[Array, Namespace]:
        return entering(
            vector, self.shape, self.moments.dtype, operator=self.damping, name=name
        )

    def _xp(self) -> Namespace:
        return array_api_compat.array_namespace(self.moments)
