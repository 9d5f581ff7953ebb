"""The Kronecker operator with exact damping, ``S A (x) G + lam I``.

Conventions as in `kfac_core.operators.kronecker`.  With ``A = Q_A diag(a) Q_A^T`` and
``G = Q_G diag(g) Q_G^T`` every function f of the block is

    Q_A [ (Q_A^T V Q_G) * f(S a g^T + lam) ] Q_G^T,

but for the Cholesky factor, which no eigenbasis gives: see
`kfac_core.linalg.kronecker_cholesky`.
"""

from __future__ import annotations

from typing import Any

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import truth_of
from kfac_core.array.namespaces import any_status, cast, device_of, status_unless
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import replaced, structure
from kfac_core.errors import FactorizationError
from kfac_core.factors.factor import Shifted
from kfac_core.linalg.groups import dense_of_groups
from kfac_core.linalg.kronecker_cholesky import KroneckerCholesky, kronecker_cholesky
from kfac_core.linalg.shifted import Factorization, ShiftedMatrix, require_readable
from kfac_core.operators.operator import entering, leaving
from kfac_core.operators.sparse_rows import diagonal_at

__all__ = ["ExactKronecker"]


@structure(static=("definite",))
class ExactKronecker:
    """A snapshot of ``S A (x) G + lam I``; see `CurvatureOperator`.

    Attributes
    ----------
    input, output : ShiftedMatrix or ShiftedDiagonal
        A and G, with shifts of zero.
    scale, damping : array, 0-d or one a group
        S and lam.
    triangular : KroneckerCholesky or None
        The Cholesky factor, where it was asked for.
    flags : array of int32, 0-d
        Of `Status`, of the damped block itself.
    definite : bool
        Whether the damped block was found positive when its inverse was prepared, or is
        reported on in the flags.
    """

    input: Shifted
    output: Shifted
    scale: Array
    damping: Array
    triangular: KroneckerCholesky | None
    flags: Array
    definite: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        groups = self.input.lead[0] if self.input.lead else 1
        return self.input.size, groups * self.output.size

    @property
    def dtype(self) -> Any:
        """The dtype of the arrays."""
        return self.scale.dtype

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """What has been prepared."""
        bases = self.input.factorizations & self.output.factorizations
        found: dict[Factorization, bool] = {
            "eigenbasis": "eigenbasis" in bases,
            "inverse": self.definite,
            "cholesky": self.triangular is not None,
        }
        return frozenset(name for name, made in found.items() if made)

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> ExactKronecker:
        """Return the same operator with factorizations made that were missing.

        The inverse and all powers need both eigenbases; the Cholesky factor is apart.
        """
        if not factorizations:
            return self
        made, xp = self, self._xp()
        bases = {
            side: part.prepared("eigenbasis", check=check, name=f"{name}/{side}")
            for side, part in (("input", self.input), ("output", self.output))
        }
        if bases["input"] is not self.input or bases["output"] is not self.output:
            made = replaced(made, **bases)
        if "inverse" in factorizations and not made.definite:
            smallest = made._smallest()
            if check == "raise" and not bool(smallest > 0):
                raise _singular(smallest, name)
            flag = status_unless(xp, smallest > 0, Status.NOT_POSITIVE)
            made = replaced(made, flags=made.flags | flag, definite=True)
        if "cholesky" in factorizations and made.triangular is None:
            triangular = made._cholesky(check=check, name=name)
            made = replaced(made, triangular=triangular)
        return made

    def at_rows(self, indices: Array, /) -> ExactKronecker:
        """Return the operator on the rows of some ids; see `FactoredKronecker.at_rows`."""
        return replaced(self, input=diagonal_at(self.input, indices), triangular=None)

    def multiply(self, vector: Array, /, *, damped: bool = True) -> Array:
        """Return ``S A V G + lam V``, or ``S A V G``."""
        V, xp = self._enter(vector, "vector")
        left = self.input.multiply(V, shifted=False)
        both = self.output.multiply(xp.matrix_transpose(left), shifted=False)
        product = self._scale() * xp.matrix_transpose(both)
        lam = self.damping[..., None, None]
        return leaving(product + lam * V if damped else product, vector)

    def multiply_inverse(self, vector: Array, /) -> Array:
        """Return ``(S A (x) G + lam I)^-1 v``; ``4 n m (n + m)`` flops."""
        V, xp = self._enter(vector, "vector")
        return leaving(self._power(V, -1.0, xp), vector)

    def multiply_matpower(self, vector: Array, exponent: float, /) -> Array:
        """Return ``(S A (x) G + lam I)^p v``; 1 is `multiply`."""
        if exponent == 1:
            return self.multiply(vector)
        V, xp = self._enter(vector, "vector")
        return leaving(self._power(V, exponent, xp), vector)

    def multiply_cholesky(self, vector: Array, /, *, transpose: bool = False) -> Array:
        """Return ``L v`` or ``L^T v``, with L the Cholesky factor of the dense block."""
        V, _ = self._enter(vector, "vector")
        return leaving(self._triangular().multiply(V, transpose=transpose), vector)

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> Array:
        """Return ``L^-1 v`` or ``L^-T v``."""
        V, _ = self._enter(vector, "vector")
        return leaving(self._triangular().solve(V, transpose=transpose), vector)

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise Z into ``(S A (x) G + lam I)^-1/2 Z``."""
        Z, xp = self._enter(noise, "noise")
        return leaving(self._power(Z, -0.5, xp), noise)

    def trace(self, *, damped: bool = True) -> Array:
        """Return ``S tr(A) tr(G) + n m lam``, or ``S tr(A) tr(G)``."""
        product = self.input.trace(shifted=False) * self.output.trace(shifted=False)
        n, m = self.shape
        undamped = self._xp().sum(self.scale * product)
        return undamped + n * m * self._one_damping() if damped else undamped

    def logdet(self) -> Array:
        """Return ``sum_ij log(S a_i g_j + lam)``."""
        xp = self._xp()
        return xp.sum(xp.log(self._definite()._spectrum(damped=True)))

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return ``S a_i g_j + lam``, or ``S a_i g_j``, ascending."""
        xp = self._xp()
        return xp.sort(xp.reshape(self._spectrum(damped=damped), (-1,)))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return ``S kron(A, G) + lam I``, or ``S kron(A, G)``."""
        xp = self._xp()
        A, G = self.input.dense(shifted=False), self.output.dense(shifted=False)
        dense = dense_of_groups(self._scale() * A, G, xp=xp)
        eye = xp.eye(dense.shape[0], dtype=dense.dtype, device=device_of(dense))
        return dense + self._one_damping() * eye if damped else dense

    def status(self) -> Array:
        """Return the flags of both factors, of the damped block and of L."""
        status = self.input.status() | self.output.status() | self.flags
        status = any_status(status, xp=self._xp())
        return status if self.triangular is None else status | self.triangular.status

    def _power(self, V: Array, exponent: float, xp: Namespace) -> Array:
        checked = self._definite() if exponent < 0 else self._with_bases()
        half = checked.input.to_basis(V)
        turned = checked.output.to_basis(xp.matrix_transpose(half))
        # As it lies in memory: arrays in two orders take four times as long.
        spectrum = checked._spectrum(damped=True, turned=True)
        scaled = turned / spectrum if exponent == -1 else turned * spectrum**exponent
        half = checked.input.from_basis(xp.matrix_transpose(scaled))
        return xp.matrix_transpose(checked.output.from_basis(xp.matrix_transpose(half)))

    def _spectrum(self, *, damped: bool, turned: bool = False) -> Array:
        """Return the eigenvalues in the order of the bases, shape (..., n, m).

        Where `turned` is true, of shape (..., m, n).
        """
        a = self.input.eigenvalues(shifted=False)[..., :, None]
        g = self.output.eigenvalues(shifted=False)[..., None, :]
        if turned:
            xp = self._xp()
            a, g = xp.matrix_transpose(a), xp.matrix_transpose(g)
        undamped = self._scale() * a * g
        return undamped + self.damping[..., None, None] if damped else undamped

    def _with_bases(self) -> ExactKronecker:
        """Return itself with the eigenbases, made now where that could raise."""
        sides = (self.input, self.output)
        if any(isinstance(s, ShiftedMatrix) and s.basis is None for s in sides):
            require_readable(self.damping, "eigenbasis")
        return self.prepared("eigenbasis")

    def _definite(self) -> ExactKronecker:
        """Return itself with bases, after making sure that no eigenvalue is zero."""
        made, xp = self._with_bases(), self._xp()
        if not made.definite:
            smallest = made._smallest()
            if truth_of(smallest > 0, xp=xp) is False:
                raise _singular(smallest, "block")
        return made

    def _smallest(self) -> Array:
        """Return the smallest eigenvalue of the damped block, 0-d."""
        xp = self._xp()
        # None is negative, so that the product of the smallest ones is the smallest.
        a, g = (
            xp.min(side.eigenvalues(shifted=False), axis=-1)
            for side in (self.input, self.output)
        )
        return xp.min(self.scale * a * g + self.damping)

    def _cholesky(self, *, check: Check, name: str) -> KroneckerCholesky:
        """Return the Cholesky factor, made in the dtype of computing."""
        xp = self._xp()
        A, G = self.input.wide(), self.output
        if A.dtype != self.dtype:
            wide = G.wide()
            G = wide.prepared("eigenbasis", check=check, name=f"{name}/output")
        made = kronecker_cholesky(
            A.dense(shifted=False),
            G.eigenvalues(shifted=False),
            G.eigenvectors(),
            scale=cast(xp, self.scale, A.dtype),
            damping=cast(xp, self.damping, A.dtype),
            check=check,
            name=name,
        )
        arrays = (made.columns, made.corners, made.basis)
        narrow = [cast(xp, x, self.dtype) for x in arrays]
        return KroneckerCholesky(narrow[0], narrow[1], narrow[2], made.status)

    def _triangular(self) -> KroneckerCholesky:
        if self.triangular is None:
            require_readable(self.damping, "cholesky")
            made = self.prepared("cholesky").triangular
            assert made is not None
            return made
        return self.triangular

    def _enter(self, vector: Array, name: str) -> tuple[Array, Namespace]:
        return entering(
            vector,
            self.shape,
            self.input.dtype,
            operator=self.scale,
            name=name,
            lead=self.input.lead,
        )

    def _scale(self) -> Array:
        """Return S with axes for the vectors' rows and columns."""
        return self.scale[..., None, None]

    def _one_damping(self) -> Array:
        """Return lam, 0-d; it is the same for every group."""
        return self.damping if self.damping.ndim == 0 else self.damping[0]

    def _xp(self) -> Namespace:
        return array_api_compat.array_namespace(self.scale)


def _singular(smallest: Array, name: str) -> FactorizationError:
    return FactorizationError(
        f"the damped block has the eigenvalue {float(smallest):.1e}. Increase `damping`.",
        factor=name,
    )
