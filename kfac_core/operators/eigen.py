"""The operator of EKFAC, ``(Q_A (x) Q_G) diag(E + lam) (Q_A (x) Q_G)^T``.

Conventions.  E has the shape ``(in(+1), out)`` of the vectors; on a vector V a function f
of the block is ``Q_A [ (Q_A^T V Q_G) * f(E + lam) ] Q_G^T``.  The lower Cholesky factor
alone has no such form: it is made from the dense block, for small layers.  Where the
arrays are stacks, the block is made of independent groups, each with columns of V of its
own.
"""

from __future__ import annotations

import math

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import truth_of
from kfac_core.array.namespaces import any_status, device_of, full_of, status_unless
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import replaced, structure
from kfac_core.errors import (
    DampingError,
    FactorizationError,
    NotFiniteError,
    UnsupportedError,
)
from kfac_core.linalg.groups import dense_of_blocks
from kfac_core.linalg.shifted import (
    Factorization,
    ShiftedMatrix,
    require_readable,
    shifted_matrix,
)
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.operators.operator import entering, leaving

__all__ = ["EigenOperator"]


@structure(static=("definite",))
class EigenOperator:
    """A snapshot of the block of the module's text; see `CurvatureOperator`.

    Attributes
    ----------
    input_basis, output_basis : array, shapes ((Q,) n, n) and ((Q,) m, m), or None
        Q_A and Q_G, orthogonal; None for the coordinates.
    moments : array, shape ((Q,) n, m)
        E.
    damping : array, 0-d
        lam.
    whole : ShiftedMatrix or None
        The dense damped block, where its Cholesky factor was asked for.
    flags : array of int32, 0-d
        Of `Status`.
    definite : bool
        Whether ``E + lam`` was found positive when it was prepared, or is reported on in
        the flags.
    """

    input_basis: Array | None
    output_basis: Array | None
    moments: Array
    damping: Array
    whole: ShiftedMatrix | None
    flags: Array
    definite: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        n, m = self.moments.shape[-2:]
        return int(n), math.prod(self._lead) * int(m)

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> EigenOperator:
        """Return the same operator, checked, with a Cholesky factor if asked for.

        With ``check="raise"`` values are looked at, which synchronizes with the device;
        what ``"inverse"`` needs is looked at here, and not again in a product.
        """
        missing = "cholesky" in factorizations and self.whole is None
        if self.definite and not missing:
            return self
        made = replaced(self, flags=self.flags | self._invalid_flags())
        if "inverse" in factorizations and not made.definite:
            flags = made.flags | self._indefinite_flag()
            made = replaced(made, flags=flags, definite=True)
        if check == "raise":
            _raise_for(Status(int(made.flags)), name)
        if missing:
            dense = SymmetricMatrix(self._blocks(damped=False), full_storage=True)
            dense_factor = shifted_matrix(
                dense,
                full_of(self._xp(), self.damping, dense.array[..., 0, 0]),
                factorizations=("cholesky",),
                check=check,
                name=name,
            )
            made = replaced(made, whole=dense_factor)
        return made

    def at_rows(self, indices: Array, /) -> EigenOperator:
        """Return the operator on the rows of some ids; see `FactoredKronecker.at_rows`."""
        if self.input_basis is not None:
            raise UnsupportedError(
                "A sparse gradient needs a block that does not mix rows: an embedding with "
                "a diagonal input factor. Give the whole gradient."
            )
        taken = self._xp().take(self.moments, indices, axis=-2)
        return replaced(self, moments=taken, whole=None)

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
        spectrum = self._definite_spectrum() if exponent < 0 else self._spectrum(True)
        return leaving(self._turned(V, spectrum**exponent, xp), vector)

    def multiply_cholesky(self, vector: Array, /, *, transpose: bool = False) -> Array:
        """Return ``L v`` or ``L^T v``, with L of the dense block."""
        V, xp = self._enter(vector, "vector")
        flat = xp.reshape(V, (*self._lead, -1, 1))
        product = self._whole().lower_multiply(flat, transpose=transpose)
        return leaving(xp.reshape(product, V.shape), vector)

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> Array:
        """Return ``L^-1 v`` or ``L^-T v``, with L of the dense block."""
        V, xp = self._enter(vector, "vector")
        flat = xp.reshape(V, (*self._lead, -1, 1))
        product = self._whole().lower_solve(flat, transpose=transpose)
        return leaving(xp.reshape(product, V.shape), vector)

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise Z into ``F_damped^-1/2 Z``."""
        Z, xp = self._enter(noise, "noise")
        spectrum = self._definite_spectrum()
        return leaving(self._turned(Z, spectrum**-0.5, xp), noise)

    def trace(self, *, damped: bool = True) -> Array:
        """Return the sum of ``E + lam``, or of E, 0-d."""
        return self._xp().sum(self._spectrum(damped))

    def logdet(self) -> Array:
        """Return ``sum log(E + lam)``, 0-d."""
        xp = self._xp()
        return xp.sum(xp.log(self._definite_spectrum()))

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return ``E + lam``, or E, ascending."""
        xp = self._xp()
        return xp.sort(xp.reshape(self._spectrum(damped), (-1,)))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return the block as one matrix."""
        n = int(self.moments.shape[-2])
        return dense_of_blocks(self._blocks(damped=damped), n=n, xp=self._xp())

    def status(self) -> Array:
        """Return the flags, 0-d int32."""
        if self.whole is None:
            return self.flags
        return self.flags | any_status(self.whole.status(), xp=self._xp())

    def _spectrum(self, damped: bool) -> Array:
        return self.moments + self.damping if damped else self.moments

    def _turned(self, V: Array, spectrum: Array, xp: Namespace) -> Array:
        Q_A, Q_G = self.input_basis, self.output_basis
        if Q_A is not None:
            V = xp.matmul(xp.matrix_transpose(Q_A), V)
        if Q_G is not None:
            V = xp.matmul(V, Q_G)
        V = V * spectrum
        if Q_A is not None:
            V = xp.matmul(Q_A, V)
        return V if Q_G is None else xp.matmul(V, xp.matrix_transpose(Q_G))

    def _blocks(self, *, damped: bool) -> Array:
        """Return the dense matrix of each group, flattened row-major."""
        xp = self._xp()
        n, m = self.moments.shape[-2:]
        place = {"dtype": self.moments.dtype, "device": device_of(self.moments)}
        Q_A = xp.eye(n, **place) if self.input_basis is None else self.input_basis
        Q_G = xp.eye(m, **place) if self.output_basis is None else self.output_basis
        Q = Q_A[..., :, None, :, None] * Q_G[..., None, :, None, :]
        Q = xp.reshape(Q, (*self._lead, n * m, n * m))
        spectrum = xp.reshape(self._spectrum(damped), (*self._lead, 1, n * m))
        dense = xp.matmul(Q * spectrum, xp.matrix_transpose(Q))
        return 0.5 * (dense + xp.matrix_transpose(dense))

    def _invalid_flags(self) -> Array:
        """Return the flags of what cannot be computed with, 0-d."""
        xp = self._xp()
        all_parts = (self.moments, self.input_basis, self.output_basis)
        parts = [part for part in all_parts if part is not None]
        finite = xp.all(xp.stack([xp.all(xp.isfinite(part)) for part in parts]))
        good = xp.isfinite(self.damping) & (self.damping >= 0)
        flags = status_unless(xp, finite, Status.MATRIX_NOT_FINITE)
        return flags | status_unless(xp, good, Status.BAD_DAMPING)

    def _indefinite_flag(self) -> Array:
        """Return the flag of an eigenvalue that is not positive, 0-d."""
        xp = self._xp()
        positive = xp.all(self._spectrum(True) > 0)
        return status_unless(xp, positive, Status.NOT_POSITIVE)

    def _definite_spectrum(self) -> Array:
        """Return ``E + lam``, after making sure that it is positive, if that can be."""
        if not self.definite:
            flags = self._invalid_flags() | self._indefinite_flag()
            if truth_of(flags == 0, xp=self._xp()) is False:
                _raise_for(Status(int(flags)), "block")
        return self._spectrum(True)

    def _whole(self) -> ShiftedMatrix:
        if self.whole is not None:
            return self.whole
        require_readable(self.damping, "cholesky")
        made = self.prepared("cholesky").whole
        assert made is not None
        return made

    def _enter(self, vector: Array, name: str) -> tuple[Array, Namespace]:
        return entering(
            *(vector, self.shape, self.moments.dtype),
            operator=self.damping,
            name=name,
            lead=self._lead,
        )

    @property
    def _lead(self) -> tuple[int, ...]:
        """The shape of the stack of groups."""
        return tuple(self.moments.shape[:-2])

    def _xp(self) -> Namespace:
        return array_api_compat.array_namespace(self.moments)


def _raise_for(flags: Status, name: str) -> None:
    if Status.MATRIX_NOT_FINITE in flags:
        raise NotFiniteError(f"{name}: the block holds NaN or infinity.")
    if Status.BAD_DAMPING in flags:
        raise DampingError(
            f"{name}: `damping` is negative or not finite. Expected a finite number >= 0."
        )
    if Status.NOT_POSITIVE in flags:
        raise FactorizationError(
            "the damped block has an eigenvalue that is not positive. Increase `damping`.",
            factor=name,
        )
