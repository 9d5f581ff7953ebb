"""The curvature of a layer conditional on the next layer.

Conventions.  ``A_i (x) G_i`` is the covariance of layer i, damped, ``A_x (x) G_x`` that
between i and i + 1.  With Cholesky factors ``A_i = L_i L_i^T`` the correlation of the
inputs is ``C = L_i^-1 A_x L_(i+1)^-T``, whose singular values are the canonical
correlations of the inputs of the two layers, at most 1; likewise for the output
gradients.  Then

    Psi = Psi_A (x) Psi_G,    Psi_A = A_x A_(i+1)^-1 = L_i C L_(i+1)^-1,
    Sigma = A_i (x) G_i - Psi (A_(i+1) (x) G_(i+1)) Psi^T
          = (K_A (x) K_G) diag(1 - s_A s_G^T) (K_A (x) K_G)^T,

with ``C C^T = E diag(s) E^T`` and ``K = L_i E``: a difference of two Kronecker products.

A correlation above 1 by rounding counts as 1, and C is divided by it, so that Psi and s
belong to one contraction.  A larger one is flagged: the moments are then not of the same
weighted set of rows.

References
----------
Martens and Grosse (2015), arXiv:1503.05671, section 4.3 and appendix B.
"""

from __future__ import annotations

from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import smallest_known
from kfac_core.linalg.kronecker import kronecker_dense
from kfac_core.linalg.series_chain import (
    Root,
    WeightedRoots,
    excess_correlation,
    flagged_eigenbasis,
    kron_multiply,
    kron_multiply_t,
    positive_flags,
)


@structure()
class Link:
    """``Psi = Psi_A (x) Psi_G``: the best linear guess of layer i from layer i + 1.

    Attributes
    ----------
    input, output : array, shapes (n_i, n_(i+1)) and (m_i, m_(i+1))
        Regression matrices Psi_A and Psi_G.
    """

    input: Array
    output: Array

    def multiply(self, v: Array, /, *, transpose: bool, xp: Namespace) -> Array:
        """Return ``Psi_A V Psi_G^T``, or ``Psi_A^T V Psi_G``."""
        product = kron_multiply_t if transpose else kron_multiply
        return product(self.input, v, self.output, xp=xp)

    def dense(self) -> Array:
        """Return Psi as one matrix, row-major."""
        return kronecker_dense((self.input, self.output))


def conditional(
    input_root: Root,
    next_input_root: Root,
    output_root: Root,
    next_output_root: Root,
    /,
    *,
    stored: float,
    xp: Namespace,
) -> tuple[Link, WeightedRoots]:
    """Return Psi and Sigma of layer i, given layer i + 1.

    Parameters
    ----------
    input_root, output_root : Root
        Roots of the damped moments of layer i, with the moments between the two layers,
        shapes (n_i, n_(i+1)) and (m_i, m_(i+1)), as ``cross``.
    next_input_root, next_output_root : Root
        Roots of the damped moments of layer i + 1.
    stored : float
        See `kfac_core.linalg.certificate.smallest_known`.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    link : Link
        Transition Psi.
    conditional : WeightedRoots
        Sigma; failures are in its flags.

    Notes
    -----
    About ``23 n^3`` flops a side; no value is read.
    """
    Psi_A, K_A, D_A, s_A, clipped_A, flags_A = _side(input_root, next_input_root, xp)
    Psi_G, K_G, D_G, s_G, clipped_G, flags_G = _side(output_root, next_output_root, xp)
    # Covariance of a layer given the next one, in the left singular vectors of the
    # correlations C: I - C_A C_A^T (x) C_G C_G^T.  `s` holds squares of singular values.
    W = 1.0 - s_A[:, None] * s_G[None, :]
    roots = (input_root, next_input_root, output_root, next_output_root)
    known = smallest_known([root.root for root in roots], stored, xp=xp)
    flags = flags_A | flags_G
    flags = flags | positive_flags(W, xp.ones_like(s_A[0]), xp, known=known)
    clipped = xp.where(clipped_A > clipped_G, clipped_A, clipped_G)
    return Link(Psi_A, Psi_G), WeightedRoots(K_A, D_A, K_G, D_G, W, clipped, flags)


def marginal(input_root: Root, output_root: Root, /, *, xp: Namespace) -> WeightedRoots:
    """Return ``A (x) G`` itself in the form of a conditional, for the last layer."""
    K, L = input_root.root, output_root.root
    W = xp.ones((K.shape[0], L.shape[0]), dtype=K.dtype, device=ns.device_of(K))
    nothing = xp.zeros_like(W[0, 0])
    flags = xp.astype(nothing, xp.int32)
    return WeightedRoots(K, input_root.dual, L, output_root.dual, W, nothing, flags)


def _side(side: Root, following: Root, xp: Namespace) -> tuple[Array, ...]:
    """Return Psi, ``L E``, ``L^-T E``, squared correlations, clipped, and the flags."""
    C = kron_multiply_t(side.dual, side.cross, following.dual, xp=xp)
    squares, E, flags = flagged_eigenbasis(
        xp.matmul(C, xp.matrix_transpose(C)), side, xp
    )
    zeros = xp.zeros_like(squares)
    squares = xp.where(squares < 0.0, zeros, squares)
    largest = xp.sqrt(xp.max(squares))
    clipped, too_large = excess_correlation(largest, xp)
    unit = xp.where(largest > 1.0, largest, xp.ones_like(largest))
    squares = squares / (unit * unit)
    regression = kron_multiply(side.root, C / unit, following.dual, xp=xp)
    K, D = xp.matmul(side.root, E), xp.matmul(side.dual, E)
    return regression, K, D, squares, clipped, flags | too_large
