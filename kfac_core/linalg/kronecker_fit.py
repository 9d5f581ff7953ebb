"""The nearest Kronecker product to a curvature matrix, without forming it.

Conventions.  F is a sum of terms with nonnegative scales, each of which is one of

    c sum_r vec(x_r g_r^T) vec(x_r g_r^T)^T,    c sum_k vec(D_k) vec(D_k)^T,    c A (x) G,

vec row-major, so that ``A (x) G`` acts as ``A V G^T``.  The rearranged matrix R(F), for
which ``R(A (x) G) = vec(A) vec(G)^T``, has ``|F - A (x) G| = |R(F) - vec(A) vec(G)^T|``
in the Frobenius norm: its top singular pair is the nearest product, and the residual is
``|F|^2 - s_1^2``.  A term multiplies by R and by its transpose without forming it,

    R^T vec(A) = vec( c sum_k D_k^T A D_k ),    R vec(G) = vec( c sum_k D_k G D_k^T ),

both of which map positive semidefinite matrices to positive semidefinite ones.  A power
iteration that starts with one stays among them, and by Perron's theorem for cones the top
pair lies there.  Each half of an iteration is a least squares fit of one factor.

References
----------
Van Loan and Pitsianis (1993), "Approximation with Kronecker products".  Koroko et al.
(2022), arXiv:2201.10285: its use for the Fisher matrix of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kfac_core.array import Array, Namespace, Scalar
from kfac_core.linalg.gram import updated_gram


class FitTerm(Protocol):
    """A term of F: its rearranged matrix as two products."""

    def onto_output(self, A: Array, /, *, xp: Namespace) -> Array:
        """Return ``c sum D^T A D``, shape (..., m, m)."""

    def onto_input(self, G: Array, /, *, xp: Namespace) -> Array:
        """Return ``c sum D G D^T``, shape (..., n, n)."""


class RowTerm(NamedTuple):
    """``c sum vec(x g^T) vec(x g^T)^T`` over rows and sources.

    Attributes
    ----------
    inputs : array, shape (..., R, n)
        The x.
    output_grads : array, shape (..., M, R, m)
        The g of each source.
    scale : float or 0-d array
        Factor ``c``.
    """

    inputs: Array
    output_grads: Array
    scale: Scalar

    def onto_output(self, A: Array, /, *, xp: Namespace) -> Array:
        """Return ``c sum (x^T A x) g g^T``; ``2 R n^2 + M R m^2`` flops."""
        forms = _quadratic_forms(self.inputs, A, xp)
        g = self.output_grads * xp.sqrt(forms)[..., None, :, None]
        return _gram(xp.reshape(g, (*g.shape[:-3], -1, g.shape[-1])), self.scale, xp)

    def onto_input(self, G: Array, /, *, xp: Namespace) -> Array:
        """Return ``c sum (g^T G g) x x^T``; ``2 M R m^2 + R n^2`` flops."""
        forms = _quadratic_forms(self.output_grads, G[..., None, :, :], xp)
        weights = xp.sqrt(xp.sum(forms, axis=-2))
        return _gram(self.inputs * weights[..., None], self.scale, xp)


class GradientTerm(NamedTuple):
    """``c sum vec(D) vec(D)^T`` over gradients.

    Attributes
    ----------
    gradients : array, shape (..., K, n, m)
        The D.
    scale : float or 0-d array
        Factor ``c``.
    """

    gradients: Array
    scale: Scalar

    def onto_output(self, A: Array, /, *, xp: Namespace) -> Array:
        """Return ``c sum D^T A D``; ``2 K n m (n + m)`` flops."""
        D = self.gradients
        AD = xp.matmul(A[..., None, :, :], D)
        return self._summed(D, AD, xp)

    def onto_input(self, G: Array, /, *, xp: Namespace) -> Array:
        """Return ``c sum D G D^T``; likewise."""
        D = xp.matrix_transpose(self.gradients)
        GD = xp.matmul(G[..., None, :, :], D)
        return self._summed(D, GD, xp)

    def _summed(self, D: Array, product: Array, xp: Namespace) -> Array:
        """Return ``c sum D^T product``, symmetric to the last bit."""
        shape = (*D.shape[:-3], -1, D.shape[-1])
        flat = xp.matrix_transpose(xp.reshape(D, shape))
        total = xp.matmul(flat, xp.reshape(product, shape)) * self.scale
        return 0.5 * (total + xp.matrix_transpose(total))


class ProductTerm(NamedTuple):
    """``c A_0 (x) G_0``.

    Attributes
    ----------
    input, output : array, shapes (..., n, n) and (..., m, m)
        A_0 and G_0, positive semidefinite.
    scale : float or 0-d array
        Factor ``c``.
    """

    input: Array
    output: Array
    scale: Scalar

    def onto_output(self, A: Array, /, *, xp: Namespace) -> Array:
        """Return ``c <A_0, A> G_0``."""
        return _overlap(self.input, A, xp) * self.scale * self.output

    def onto_input(self, G: Array, /, *, xp: Namespace) -> Array:
        """Return ``c <G_0, G> A_0``."""
        return _overlap(self.output, G, xp) * self.scale * self.input


class KroneckerFit(NamedTuple):
    """``A (x) G``, and whether the iteration had come to rest.

    Attributes
    ----------
    input : array, shape (..., n, n)
        A, of Frobenius norm 1 (or zero, where F is).
    output : array, shape (..., m, m)
        G, of which the Frobenius norm is the singular value.
    change : array, shape (...)
        Change of A in the last iteration, in the Frobenius norm, which shows convergence.
    """

    input: Array
    output: Array
    change: Array


def kronecker_fit(
    terms: Sequence[FitTerm], start: Array, /, *, iterations: int, xp: Namespace
) -> KroneckerFit:
    """Fit one Kronecker product to a sum of terms, by power iteration.

    Parameters
    ----------
    terms : sequence of FitTerm
        At least one, all of one form.
    start : array, shape (..., n, n)
        A first A, positive semidefinite, of any norm.  It must not be orthogonal to the
        A of the result; an A that is definite on the inputs of the terms is not.
    iterations : int
        Number of iterations, at least 1.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    KroneckerFit
        Positive semidefinite to rounding.

    Notes
    -----
    The error never grows, and is at most that of `start` with any G.  ``1 - cos`` of the
    angle to the best A shrinks by ``(s_2 / s_1)^4`` an iteration.  Each costs two
    products with every term; no value is read.
    """
    A = unit_norm(start, xp=xp)
    before = A
    for _ in range(iterations):
        before = A
        G = _total([term.onto_output(A, xp=xp) for term in terms])
        # A unit norm keeps A in the range of its dtype; the last fit restores the scale.
        G = unit_norm(G, xp=xp)
        A = unit_norm(_total([term.onto_input(G, xp=xp) for term in terms]), xp=xp)
    change = xp.linalg.vector_norm(A - before, axis=(-2, -1))
    return KroneckerFit(
        A, _total([term.onto_output(A, xp=xp) for term in terms]), change
    )


def unit_norm(matrix: Array, /, *, xp: Namespace) -> Array:
    """Return a matrix over its Frobenius norm; zero stays zero."""
    largest = xp.max(xp.abs(matrix), axis=(-2, -1), keepdims=True)
    # Divide by the largest entry first, so that squares do not overflow or underflow.
    scaled = matrix / xp.where(largest > 0, largest, xp.ones_like(largest))
    norm = xp.linalg.vector_norm(scaled, axis=(-2, -1), keepdims=True)
    return scaled / xp.where(norm > 0, norm, xp.ones_like(norm))


def _total(parts: list[Array]) -> Array:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _gram(rows: Array, scale: Scalar, xp: Namespace) -> Array:
    return updated_gram(None, rows, 0.0, scale, xp=xp).full()


def _quadratic_forms(rows: Array, A: Array, xp: Namespace) -> Array:
    """Return ``x^T A x`` of each row, clipped at zero against rounding."""
    forms = xp.sum(xp.matmul(rows, A) * rows, axis=-1)
    return xp.where(forms < 0, xp.zeros_like(forms), forms)


def _overlap(first: Array, second: Array, xp: Namespace) -> Array:
    """Return ``<A, B>``, shape (..., 1, 1), clipped at zero against rounding."""
    overlap = xp.sum(first * second, axis=(-2, -1), keepdims=True)
    return xp.where(overlap < 0, xp.zeros_like(overlap), overlap)
