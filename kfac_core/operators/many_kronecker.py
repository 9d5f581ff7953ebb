"""Kronecker products of any number of factors, on a parameter in its own shape.

Conventions.  A parameter of shape ``(n_1, ..., n_k)`` has the block
``S (F_1 + s_1 I) (x) ... (x) (F_k + s_k I)`` (factored), or ``S F_1 (x) ... (x) F_k + lam
I`` (exact); factor i acts along axis i.  The block's vector is one column of shape
``(n_1 ... n_k, 1)``, flattened row-major, as for every layer without a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import truth_of
from kfac_core.array.namespaces import device_of, moved_axis, status_unless
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import replaced, structure
from kfac_core.errors import FactorizationError, UnsupportedError
from kfac_core.linalg.kronecker import kronecker_dense
from kfac_core.linalg.shifted import Factorization, ShiftedMatrix, require_readable
from kfac_core.operators.operator import entering, leaving

__all__ = ["ManyKronecker"]


@structure(static=("exact", "definite"))
class ManyKronecker:
    """A snapshot of a damped product of k factors; see `CurvatureOperator`.

    Attributes
    ----------
    factors : dict of str to ShiftedMatrix
        ``F_i + s_i I`` by the names ``"axis0"``, ``"axis1"``, ...; the s_i are zero
        where the damping is exact.
    scale, damping : array, 0-d
        S and lam.
    flags : array of int32, 0-d
        Of `Status`, of the damped block itself.
    exact : bool
        Whether damping is exact.
    definite : bool
        Whether an exactly damped block was found positive when it was prepared, or is
        reported on in the flags.
    """

    factors: dict[str, ShiftedMatrix]
    scale: Array
    damping: Array
    flags: Array
    exact: bool
    definite: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return tuple(factor.size for factor in self.factors.values())

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(n_1 ... n_k, 1)`` of the vectors."""
        return math.prod(self.sizes), 1

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """What has been prepared."""
        parts = (part.factorizations for part in self.factors.values())
        common = frozenset.intersection(*parts)
        if not self.exact:
            return common
        found: dict[Factorization, bool] = {
            "eigenbasis": "eigenbasis" in common,
            "inverse": self.definite,
        }
        return frozenset(name for name, made in found.items() if made)

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> ManyKronecker:
        """Return the same operator with factorizations made that were missing."""
        wanted = factorizations
        if self.exact:
            wanted = ("eigenbasis",) if factorizations else ()
        factors = {
            axis: part.prepared(*wanted, check=check, name=f"{name}/{axis}")
            for axis, part in self.factors.items()
        }
        made = replaced(self, factors=factors)
        if not self.exact or self.definite or "inverse" not in factorizations:
            return made
        xp = self._xp()
        good = xp.all(made._spectrum(damped=True, xp=xp) > 0)
        if check == "raise" and not bool(good):
            raise _singular(name)
        flag = status_unless(xp, good, Status.NOT_POSITIVE)
        return replaced(made, flags=made.flags | flag, definite=True)

    def multiply(self, vector: Array, /, *, damped: bool = True) -> Array:
        """Return the damped block times v, or the undamped one."""
        v, xp = self._enter(vector, "vector")
        shifted = damped and not self.exact
        product = self.scale * self._along(
            v, lambda part, x: part.multiply(x, shifted=shifted), xp
        )
        if damped and self.exact:
            product = product + self.damping * v
        return self._leave(product, vector, xp)

    def multiply_inverse(self, vector: Array, /) -> Array:
        """Return the inverse of the damped block times v."""
        if self.exact:
            return self.multiply_matpower(vector, -1.0)
        v, xp = self._enter(vector, "vector")
        solved = self._along(v, lambda part, x: part.solve(x), xp)
        return self._leave(solved / self.scale, vector, xp)

    def multiply_matpower(self, vector: Array, exponent: float, /) -> Array:
        """Return a real power of the damped block times v."""
        if exponent == 1:
            return self.multiply(vector)
        if exponent == -1 and not self.exact:
            return self.multiply_inverse(vector)
        v, xp = self._enter(vector, "vector")
        if not self.exact:
            power = self._along(v, lambda part, x: part.power(x, exponent), xp)
            return self._leave(self.scale**exponent * power, vector, xp)
        made = self._with_bases()
        spectrum = made._spectrum(damped=True, xp=xp)
        if exponent < 0:
            made._require_definite(spectrum, xp)
        inner = made._along(v, lambda part, x: part.to_basis(x), xp)
        inner = inner * spectrum**exponent
        outer = made._along(inner, lambda part, x: part.from_basis(x), xp)
        return self._leave(outer, vector, xp)

    def multiply_cholesky(self, vector: Array, /, *, transpose: bool = False) -> Array:
        """Return ``S^1/2 L_1 (x) ... (x) L_k v``, or with the transposes."""
        self._require_factored()
        v, xp = self._enter(vector, "vector")
        product = self._along(
            v, lambda part, x: part.lower_multiply(x, transpose=transpose), xp
        )
        return self._leave(xp.sqrt(self.scale) * product, vector, xp)

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> Array:
        """Return the inverse of that factor, or of its transpose, times v."""
        self._require_factored()
        v, xp = self._enter(vector, "vector")
        solved = self._along(
            v, lambda part, x: part.lower_solve(x, transpose=transpose), xp
        )
        return self._leave(solved / xp.sqrt(self.scale), vector, xp)

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise into noise of the covariance ``F_damped^-1``."""
        if self.exact:
            return self.multiply_matpower(noise, -0.5)
        return self.multiply_cholesky_inverse(noise, transpose=True)

    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace, 0-d."""
        shifted = damped and not self.exact
        trace = self.scale
        for part in self.factors.values():
            trace = trace * part.trace(shifted=shifted)
        return trace + self.shape[0] * self.damping if damped and self.exact else trace

    def logdet(self) -> Array:
        """Return the log-determinant of the damped block, 0-d."""
        xp = self._xp()
        if self.exact:
            made = self._with_bases()
            spectrum = made._spectrum(damped=True, xp=xp)
            made._require_definite(spectrum, xp)
            return xp.sum(xp.log(spectrum))
        total = self.shape[0] * xp.log(self.scale)
        for part in self.factors.values():
            total = total + (self.shape[0] // part.size) * part.logdet()
        return total

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return the eigenvalues, ascending."""
        xp = self._xp()
        made = self._with_bases()
        return xp.sort(xp.reshape(made._spectrum(damped=damped, xp=xp), (-1,)))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return the block as one matrix."""
        xp = self._xp()
        shifted = damped and not self.exact
        parts = [part.dense(shifted=shifted) for part in self.factors.values()]
        dense = self.scale * kronecker_dense(parts)
        if damped and self.exact:
            eye = xp.eye(self.shape[0], dtype=dense.dtype, device=device_of(dense))
            dense = dense + self.damping * eye
        return dense

    def status(self) -> Array:
        """Return the flags of all factors and of the block."""
        status = self.flags
        for part in self.factors.values():
            status = status | part.status()
        return status

    def _along(
        self, v: Array, function: Callable[[ShiftedMatrix, Array], Array], xp: Namespace
    ) -> Array:
        """Apply a function of each factor along its own axis."""
        for axis, part in enumerate(self.factors.values()):
            moved = moved_axis(v, axis, 0, xp=xp)
            flat = function(part, xp.reshape(moved, (part.size, -1)))
            v = moved_axis(xp.reshape(flat, moved.shape), 0, axis, xp=xp)
        return v

    def _spectrum(self, *, damped: bool, xp: Namespace) -> Array:
        """Return the eigenvalues in the order of the bases, shape (n_1, ..., n_k)."""
        shifted = damped and not self.exact
        spectrum = self.scale
        for part in self.factors.values():
            spectrum = spectrum[..., None] * part.eigenvalues(shifted=shifted)
        return spectrum + self.damping if damped and self.exact else spectrum

    def _require_definite(self, spectrum: Array, xp: Namespace) -> None:
        """Raise where the spectrum is seen not to be positive."""
        if not self.definite and truth_of(xp.all(spectrum > 0), xp=xp) is False:
            raise _singular("block")

    def _with_bases(self) -> ManyKronecker:
        """Return itself with the eigenbases, made now where that could raise."""
        if any(part.basis is None for part in self.factors.values()):
            require_readable(self.scale, "eigenbasis")
            return self.prepared("eigenbasis")
        return self

    def _require_factored(self) -> None:
        if self.exact:
            raise UnsupportedError(
                "Under exact damping the Cholesky factor of a product of many factors has "
                "no structure. Take a factored rule, or `sample` for draws."
            )

    def _enter(self, vector: Array, name: str) -> tuple[Array, Namespace]:
        v, xp = entering(
            vector, self.shape, self.scale.dtype, operator=self.scale, name=name
        )
        return xp.reshape(v, self.sizes), xp

    def _leave(self, v: Array, vector: Array, xp: Namespace) -> Array:
        return leaving(xp.reshape(v, self.shape), vector)

    def _xp(self) -> Any:
        return array_api_compat.array_namespace(self.scale)


def _singular(name: str) -> FactorizationError:
    return FactorizationError(
        "the damped block has an eigenvalue that is not positive. Increase `damping`.",
        factor=name,
    )
