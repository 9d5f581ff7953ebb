r"""Solving with ``K + N lam I`` by conjugate gradients, where R is beyond some thousands.

Conventions.  As `kfac_core.samples.jacobian`.  K is never formed: ``K v = J (J^T v)`` takes
two products with the rows.  With a Nystrom approximation ``K ~ U diag(l) U^T`` of rank k,
the preconditioner of ``K + mu I`` is

    P^-1 = (l_k + mu) U diag(1 / (l + mu)) U^T + (I - U U^T).

References
----------
Frangella, Tropp and Udell (2023), arXiv:2110.02820, algorithms 2.1 and 5.1.
"""

from __future__ import annotations

from typing import Any, NoReturn

from kfac_core import errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.triangular import solve_triangular
from kfac_core.samples.jacobian import Jacobian

TOLERANCE = 1e-10
"""Residual at which conjugate gradients stop, relative to the right-hand side."""

ITERATIONS = 200


@structure()
class NystromKernel:
    """``K ~ U diag(l) U^T``, which stands for K where that is not formed.

    Attributes
    ----------
    vectors : array, shape (R, k)
        Orthonormal columns U.
    eigenvalues : array, shape (k,)
        The l, nonnegative and descending.
    """

    vectors: Array
    eigenvalues: Array

    @property
    def array(self) -> Array:
        """An array of the library, device and dtype of solutions."""
        return self.vectors

    def trace(self) -> Array:
        """Return the trace, 0-d."""
        xp = ns.own_namespace(self.eigenvalues)
        return xp.sum(self.eigenvalues)


@structure()
class IterativeKernel:
    """``K + shift I``, with solves by preconditioned conjugate gradients.

    Attributes
    ----------
    jacobian : Jacobian
        The rows that K is made of.
    approximation : NystromKernel
        What preconditions.
    shift : array, 0-d
        The shift ``N lam``.
    """

    jacobian: Jacobian
    approximation: NystromKernel
    shift: Array

    def multiply(self, v: Array, /) -> Array:
        """Return ``(K + shift I) v`` for v of shape (R, 1)."""
        J = self.jacobian
        xp = ns.own_namespace(v)
        c = xp.reshape(v, J.sample_shape)
        product = J.multiply_matrices(J.combine(c))
        product = xp.reshape(ns.cast(xp, product, v.dtype), v.shape)
        return product + self.shift * v

    def solve(self, right: Array, /) -> Array:
        """Return ``(K + shift I)^-1 r`` for r of shape (R, 1).

        Notes
        -----
        Two products with J for each of at most 200 iterations.  `SampleCurvature.residual`
        says how good the solution is.
        """
        xp = ns.own_namespace(right)
        x, r = xp.zeros_like(right), right
        z = self._preconditioned(r, xp)
        p, rz = z, xp.sum(r * z)
        enough = TOLERANCE * xp.linalg.vector_norm(right)
        best, best_norm = x, xp.linalg.vector_norm(r)
        for _ in range(ITERATIONS):
            # Not `<=`, so that NaN ends the loop, too.
            if not bool(best_norm > enough):
                break
            image = self.multiply(p)
            step = rz / xp.sum(p * image)
            x, r = x + step * p, r - step * image
            z = self._preconditioned(r, xp)
            previous, rz = rz, xp.sum(r * z)
            p = z + (rz / previous) * p
            norm = xp.linalg.vector_norm(r)
            # Conjugate gradients minimize the energy norm of the error; residuals may rise.
            if bool(norm < best_norm):
                best, best_norm = x, norm
        return best

    def status(self) -> Array:
        """Return zero: nothing is factorized that could fail."""
        xp = ns.own_namespace(self.shift)
        return xp.zeros((), dtype=xp.int32, device=ns.device_of(self.shift))

    def _preconditioned(self, r: Array, xp: Namespace) -> Array:
        U, eigenvalues = self.approximation.vectors, self.approximation.eigenvalues
        along = xp.matmul(xp.matrix_transpose(U), r)
        shrunk = (eigenvalues[-1] + self.shift) / (eigenvalues + self.shift)
        return r + xp.matmul(U, (shrunk[:, None] - 1.0) * along)

    def _unknown(self, *_: object, **__: object) -> NoReturn:
        raise errors.UnsupportedError(
            "A trace or a log-determinant needs K itself: take sample_gram."
        )

    trace = logdet = _unknown


def nystrom_kernel(J: Jacobian, probes: Array, /) -> NystromKernel:
    """Return a Nystrom approximation of ``K = J J^T``, for `damped_kernel`.

    Parameters
    ----------
    J : Jacobian
        Rows of the network's layers.
    probes : array, shape (R, k)
        Standard normal numbers, in the dtype that solutions are to have: float64 where
        the device has it.

    Returns
    -------
    NystromKernel
        Of rank k.

    Raises
    ------
    ShapeError
        For probes of other than R rows.

    Notes
    -----
    ``2 k`` products with J, and ``4 R k^2`` flops.  Memory: some ``R k`` numbers; K is not
    formed.
    """
    xp = ns.namespace_of(rows=J.like, probes=probes)
    if probes.ndim != 2 or probes.shape[0] != J.samples:
        raise errors.ShapeError(
            f"Expected `probes` of shape ({J.samples}, k), got {tuple(probes.shape)}."
        )
    Q = xp.linalg.qr(probes).Q
    columns: list[Any] = []
    for i in range(Q.shape[1]):
        c = xp.reshape(Q[:, i], J.sample_shape)
        product = J.multiply_matrices(J.combine(c))
        columns.append(ns.cast(xp, xp.reshape(product, (-1,)), probes.dtype))
    Y = xp.stack(columns, axis=1)
    # A shift of the size of roundoff, which is taken off again, makes it definite.
    roundoff = ns.roundoff_of(J.like.dtype, xp=xp)
    shift = roundoff * xp.linalg.matrix_norm(Y)
    Y = Y + shift * Q
    core = xp.matmul(xp.matrix_transpose(Q), Y)
    core = 0.5 * (core + xp.matrix_transpose(core))
    L = xp.linalg.cholesky(core)
    # Y core^-1 Y^T = half^T half, whose eigenvectors are the singular vectors of half:
    # the product is not formed, which would square its condition (Algorithm 2.1).
    half = solve_triangular(L, xp.matrix_transpose(Y), transpose=False, xp=xp)
    U, singular, _ = xp.linalg.svd(xp.matrix_transpose(half), full_matrices=False)
    eigenvalues = singular * singular - shift
    return NystromKernel(U, xp.where(eigenvalues > 0, eigenvalues, 0.0 * eigenvalues))
