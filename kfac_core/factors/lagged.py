"""Second moments of consecutive rows, ``E[x_(s+1) x_s^T]``, and how long sequences are.

Conventions.  Rows come grouped by sequence, shape ``(..., S, n)``, in the order of time,
and those that a mask leaves out are zero.  A pair counts where both of its rows do.  The
sum over pairs is divided by the number of *rows*, as for lag 0: this pads each
sequence with zeros, keeps the joint covariance of consecutive rows positive
semidefinite, and so keeps every correlation in ``[-1, 1]``.

References
----------
Martens, Ba and Johnson (2018), "Kronecker-factored Curvature Approximations for
Recurrent Neural Networks", ICLR.
"""

from __future__ import annotations

from dataclasses import dataclass

from kfac_core import errors
from kfac_core.array import Array, Namespace, Place, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.factors.average import Average
from kfac_core.layers.rows import Rows, require_no_weights


@dataclass(frozen=True)
class LaggedFactor:
    """The moment of lag 1, a matrix of n x n numbers without symmetry.

    It has the functions `initial` and `updated` of `kfac_core.factors.factor.Factor`; it is
    neither damped nor factorized, and its weight is the weight of the moment of lag 0.
    """

    def initial(self, shape: tuple[int, ...], place: Place, /) -> Average:
        """Return a zero average, for rows of n numbers: ``shape=(n,)``."""
        return Average(place.zeros(*shape, shape[-1]), place.zeros())

    def updated(
        self,
        average: Average,
        rows: Array,
        decay: Scalar,
        scale: Scalar,
        weight: Array,
        /,
        *,
        xp: Namespace,
    ) -> Average:
        """Return the average after ``sum <- decay sum + scale sum x_(s+1) x_s^T``.

        Parameters
        ----------
        average : Average
            Never modified.
        rows : array, shape (..., S, n)
            Zero where masked; of the dtype of the average.
        decay, scale : float or 0-d array
            The two coefficients.
        weight : 0-d array
            The new sum of weights of the moment of lag 0, so that both moments are of the
            same data.
        xp : namespace
            Array API namespace of the arrays.

        Returns
        -------
        Average
            New average; ``2 R n^2`` flops for R rows.
        """
        axes = tuple(range(rows.ndim - 1))
        # E[x_{t+1} x_t^T], which is not symmetric; the order decides the direction of
        # time.
        product = xp.tensordot(rows[..., 1:, :], rows[..., :-1, :], axes=(axes, axes))
        return Average(average.sum * decay + product * scale, weight)


def length_shares(rows: Rows, /, *, steps: int, dtype: object, xp: Namespace) -> Array:
    """Return which share of the sequences has 1, 2, ..., T steps, shape (T,).

    Parameters
    ----------
    rows : Rows
        N sequences of S <= T positions.
    steps : int
        Number of time steps ``T``.
    dtype : dtype
        Dtype of the result.
    xp : namespace
        Array API namespace of the rows.

    Returns
    -------
    array, shape (T,)
        The shares ``p_k``, for which ``sum_k p_k max(k - d, 0)`` is the mean number of
        pairs of every lag d.  If a mask keeps the first part of each sequence, they are a
        histogram; if it leaves gaps, pairs are still counted right, but some shares are
        negative.

    Raises
    ------
    ShapeError
        For more positions than T.

    Notes
    -----
    ``N S^2`` flops with a mask, none without.
    """
    S, device = rows.positions, ns.device_of(rows.inputs)
    if steps < S:
        raise errors.ShapeError(
            f"Expected sequences of at most {steps} steps (`steps` of this approximation),"
            f" got {S}. Make `steps` the length of the longest."
        )
    if rows.mask is None:
        k = xp.arange(1, steps + 1, device=device)
        return xp.astype(k == S, dtype)
    require_no_weights(rows.mask, "lags", xp=xp)
    counted = ns.cast(xp, xp.astype(rows.mask, dtype), dtype)
    together = xp.matmul(xp.matrix_transpose(counted), counted) / rows.examples
    pairs = _sums_of_diagonals(together, xp)
    # The second difference undoes the double sum over max(k - d, 0).
    zeros = xp.zeros((steps + 2 - S,), dtype=dtype, device=device)
    padded = xp.concat([pairs, zeros])
    return padded[:-2] - 2.0 * padded[1:-1] + padded[2:]


def _sums_of_diagonals(square: Array, xp: Namespace) -> Array:
    """Return the sums of the main diagonal and of all those below it, shape (S,)."""
    S = square.shape[0]
    # Rows of S entries followed by S zeros, read as rows of 2S - 1: each is shifted by
    # one more to the right, and diagonals become columns.
    flipped = xp.flip(square, axis=1)
    flat = xp.reshape(xp.concat([flipped, xp.zeros_like(square)], axis=1), (-1,))
    skewed = xp.reshape(flat[: S * (2 * S - 1)], (S, 2 * S - 1))
    return xp.sum(skewed, axis=0)[S - 1 :]
