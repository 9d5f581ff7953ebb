"""Kronecker products of any number of factors, on a parameter in its own shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kfac_core.array import Array, Check, Namespace, Status, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import positive_eigenvalues
from kfac_core.linalg.damped import DampedMatrix
from kfac_core.linalg.factorizations import Factorization
from kfac_core.linalg.kronecker import kronecker_dense
from kfac_core.operators.operator import (
    EVERY_PRODUCT,
    CurvatureOperator,
    log_sum,
    raise_for,
)
from kfac_core.operators.parts import accurate_bases

_REASON = (
    "under exact damping the Cholesky factor of a product of many factors has no "
    "structure. Take a factored rule, or `sample` for draws"
)
_NO_CHOLESKY: Mapping[str, str] = MappingProxyType(
    {"multiply_cholesky": _REASON, "multiply_cholesky_inverse": _REASON}
)


@structure(static=("exact", "definite"))
class ManyKronecker(CurvatureOperator):
    """The snapshot of a damped product of k factors; see `CurvatureOperator`.

    A parameter of shape ``(n_1, ..., n_k)`` has the block
    ``S (F_1 + s_1 I) (x) ... (x) (F_k + s_k I)`` (factored), or
    ``S F_1 (x) ... (x) F_k + lam I`` (exact); factor i acts along axis i.  The block's
    vector is one column of shape ``(n_1 ... n_k, 1)``, flattened row-major, as for every
    layer without a matrix.  A product takes ``2 (n_1 ... n_k) (n_1 + ... + n_k)`` flops,
    twice that by the eigenbases.

    Attributes
    ----------
    factors : dict of str to DampedMatrix
        ``F_i + s_i I`` by the names ``"axis0"``, ``"axis1"``, ...; the s_i are zero
        where the damping is exact.
    scale, damping : array, 0-d
        Scale ``S`` and damping ``lam``.
    flags : array of int32, 0-d
        `Status` flags of the damped block itself.
    exact : bool
        Whether damping is exact.
    definite : bool
        Whether the exactly damped block was checked to be positive, or, with
        ``check="status"``, reported on in the flags.
    """

    factors: dict[str, DampedMatrix]
    scale: Array
    damping: Array
    flags: Array
    exact: bool
    definite: bool = False

    @property
    def unsupported_products(self) -> Mapping[str, str]:
        """Unsupported products, each with the reason."""
        return _NO_CHOLESKY if self.exact else EVERY_PRODUCT

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(n_1 ... n_k, 1)`` of the vectors."""
        return math.prod(self.inner_shape), 1

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return tuple(factor.size for factor in self.factors.values())

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.scale

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        parts = (part.factorizations for part in self.factors.values())
        common = frozenset.intersection(*parts)
        if not self.exact:
            return common
        available: dict[Factorization, bool] = {
            "eigenbasis": "eigenbasis" in common,
            "inverse": self.definite,
        }
        return frozenset(name for name, prepared in available.items() if prepared)

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> ManyKronecker:
        """Return the operator with missing factorizations computed."""
        # Exactly damped, the block is not a product: only the bases of factors serve it.
        for_factors = factorizations
        if self.exact:
            for_factors = ("eigenbasis",) if factorizations else ()
        factors = {
            side: part.prepared(*for_factors, check=check, name=f"{name}/{side}")
            for side, part in self.factors.items()
        }
        operator = replaced(self, factors=factors)
        if not self.exact or self.definite or "inverse" not in factorizations:
            return operator
        xp = ns.own_namespace(self.scale)
        positive = xp.all(operator._spectrum(True) > 0)
        flags = self.flags | ns.status_unless(xp, positive, Status.NOT_POSITIVE)
        if check == "raise":
            raise_for(flags, name)
        bases, inaccurate = accurate_bases(
            factors,
            {side: part.basis for side, part in factors.items()},
            scale=self.scale,
            damping=self.damping,
            check=check,
            name=name,
        )
        factors = {
            side: replaced(part, basis=bases[side]) for side, part in factors.items()
        }
        return replaced(
            operator, factors=factors, flags=flags | inaccurate, definite=True
        )

    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace, 0-d."""
        shifted = damped and not self.exact
        trace = self.scale
        for part in self.factors.values():
            trace = trace * part.trace(shifted=shifted)
        return (
            trace + self.vector_shape[0] * self.damping
            if damped and self.exact
            else trace
        )

    def _logdet(self) -> Array:
        """Return the log-determinant of the damped block, 0-d."""
        xp = ns.own_namespace(self.scale)
        if self.exact:
            return xp.sum(xp.log(self._ready("inverse")._spectrum(True)))
        total = self.vector_shape[0] * xp.log(self.scale)
        for part in self.factors.values():
            # det of a Kronecker product: each factor to the power of the others' sizes.
            total = total + (self.vector_shape[0] // part.size) * part.logdet()
        return total

    def _undamped_logdet(self) -> Array:
        """Return the sum of the factors' log-determinants, each as often as it counts."""
        p, xp = self.vector_shape[0], ns.own_namespace(self.scale)
        total = p * xp.log(self.scale)
        for part in self.factors.values():
            w = part.eigenvalues(shifted=False)
            roundoff = part.size * ns.roundoff_of(w.dtype, xp=xp)
            total = total + (p // part.size) * log_sum(w, roundoff=roundoff)
        return total

    def frobenius_norm(self, *, damped: bool = True) -> Array:
        """Return the Frobenius norm, 0-d: the product of the factors' norms."""
        xp = ns.own_namespace(self.scale)
        shifted = damped and not self.exact
        norm = self.scale
        for part in self.factors.values():
            norm = norm * xp.linalg.vector_norm(part.dense(shifted=shifted))
        if not (damped and self.exact):
            return norm
        # |F + lam I|^2 = |F|^2 + 2 lam tr F + p lam^2.
        mixed = 2.0 * self.damping * self.trace(damped=False)
        p = self.vector_shape[0]
        return xp.sqrt(norm * norm + mixed + p * self.damping * self.damping)

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return the eigenvalues, ascending."""
        xp = ns.own_namespace(self.scale)
        spectrum = self._ready("eigenbasis")._spectrum(damped)
        return xp.sort(xp.reshape(spectrum, (-1,)))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return the block as one matrix."""
        shifted = damped and not self.exact
        parts = [part.dense(shifted=shifted) for part in self.factors.values()]
        dense = self.scale * kronecker_dense(parts)
        if damped and self.exact:
            xp = ns.own_namespace(dense)
            eye = xp.eye(
                self.vector_shape[0], dtype=dense.dtype, device=ns.device_of(dense)
            )
            dense = dense + self.damping * eye
        return dense

    def status(self) -> Array:
        """Return the flags of all factors and of the block."""
        status = self.flags
        for part in self.factors.values():
            status = status | part.status()
        return status

    def parts(self) -> dict[str, Any]:
        """Return the damped factors."""
        return dict(self.factors)

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        shifted = damped and not self.exact
        share = self._share()
        product = self._along(
            V, lambda part, x: part.multiply(share * x, shifted=shifted), xp
        )
        return product + self.damping * V if damped and self.exact else product

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        if self.exact:
            return self._power(V, xp, -1.0)
        share = self._share()
        return self._along(V, lambda part, x: part.solve(x / share), xp)

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        if not self.exact:
            share = self._share() ** exponent
            return self._along(V, lambda part, x: part.power(share * x, exponent), xp)
        F = self._ready("inverse" if exponent < 0 else "eigenbasis")
        inner = F._along(V, lambda part, x: part.to_basis(x), xp)
        inner = inner * F._spectrum(True) ** exponent
        return F._along(inner, lambda part, x: part.from_basis(x), xp)

    def _lower_multiply(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        """Return ``S^1/2 L_1 (x) ... (x) L_k V``, or with the transposes."""
        share = xp.sqrt(self._share())
        return self._along(
            V, lambda part, x: part.lower_multiply(share * x, transpose=transpose), xp
        )

    def _lower_solve(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        share = xp.sqrt(self._share())
        return self._along(
            V, lambda part, x: part.lower_solve(x / share, transpose=transpose), xp
        )

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        # Both are roots of the inverse: the symmetric one, and L^-T.
        if self.exact:
            return self._power(Z, xp, -0.5)
        return self._lower_solve(Z, xp, True)

    def _ready(self, factorization: Factorization) -> ManyKronecker:
        """Return itself prepared for a product by the eigenbases, where that can raise."""
        bases = all(part.basis is not None for part in self.factors.values())
        if bases and (self.definite or factorization == "eigenbasis"):
            return self
        operator: ManyKronecker = self._prepared_if_readable(factorization, self.scale)
        return operator

    def _along(
        self, v: Array, function: Callable[[DampedMatrix, Array], Array], xp: Namespace
    ) -> Array:
        """Apply a function of each factor along its own axis, of one vector or many."""
        first = v.ndim - len(self.factors)
        for axis, part in enumerate(self.factors.values(), start=first):
            moved = ns.moved_axis(v, axis, 0, xp=xp)
            # All other axes are columns of one matrix for this factor.
            flat = function(part, xp.reshape(moved, (part.size, -1)))
            v = ns.moved_axis(xp.reshape(flat, moved.shape), 0, axis, xp=xp)
        return v

    def _share(self) -> Array:
        """Return ``S^(1/k)``: one factor with all of S could overflow or underflow."""
        return self.scale ** (1.0 / len(self.factors))

    def _spectrum(self, damped: bool) -> Array:
        """Return the eigenvalues in the order of the bases, shape (n_1, ..., n_k)."""
        shifted = damped and not self.exact
        share = self._share()
        spectrum = ns.own_namespace(share).ones_like(share)
        for part in self.factors.values():
            w = share * part.eigenvalues(shifted=shifted)
            spectrum = spectrum[..., None] * w
        if not (damped and self.exact):
            return spectrum
        axes = tuple(range(spectrum.ndim))
        xp = ns.own_namespace(spectrum)
        return positive_eigenvalues(spectrum, self.damping, axes=axes, xp=xp)

    def _dampings(self) -> dict[str, Array]:
        if self.exact:
            return {"damping": self.damping}
        return {f"{side}_damping": part.shift for side, part in self.factors.items()}
