"""Second moments of a gradient array along each of its axes: as in Shampoo.

Conventions.  V is the gradient of one parameter as an optimizer sees it, of shape
``(n_1, ..., n_k)``: of the loss that it descends, nearly always a mean over the batch.
Unlike the statistics of a `Block`, nothing is rescaled by the batch's size, so that
roots of these factors scale with V.  ``V_(i)`` is the unfolding of V with
axis i for rows, of shape ``(n_i, prod_{j != i} n_j)``; for a matrix, V and ``V^T``.  One
update has the k factors

    C_i = V_(i) V_(i)^T                                             (Shampoo, SOAP)
    C_i = V_(i) ((x)_{j != i} R_j R_j^T) V_(i)^T / prod_{j != i} n_j   (KL-Shampoo)

with given roots ``R_j``.  For a matrix with ``R_j = S_j^(-1/2)`` the second is
``V S_2^-1 V^T / n_2`` and ``V^T S_1^-1 V / n_1``.  The averages are called ``"axis0"``,
``"axis1"``, ..., as those of `kfac_core.approximations.tnt` for one array.

References
----------
Gupta, Koren and Singer (2018), "Shampoo", arXiv:1802.09568, algorithms 1 and 2;
Vyas et al. (2024), "SOAP", arXiv:2409.11321, algorithm 3; Lin et al. (2025),
"Understanding and improving Shampoo and SOAP via Kullback-Leibler minimization",
arXiv:2509.03378.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kfac_core import constraints
from kfac_core.array import (
    Array,
    Check,
    Namespace,
    Place,
    Scalar,
    Status,
    map_structure,
    replaced,
)
from kfac_core.array import namespaces as ns
from kfac_core.array.status import raise_flagged
from kfac_core.factors.average import coefficient_flags, require_decay, require_weight
from kfac_core.factors.full import FullFactor
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.symmetric import SymmetricMatrix


@dataclass(frozen=True, kw_only=True)
class GradientFactors:
    """The factors of one array by its gradients: a description, without arrays.

    Parameters
    ----------
    shape : tuple of int
        Shape of the array: at least one axis, all lengths positive.

    Raises
    ------
    ShapeError
        For another shape.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.roots import GradientFactors
    >>> factors = GradientFactors(shape=(2, 3))
    >>> V = np.asarray([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
    >>> statistics = factors.updated(factors.initial(V), V, decay=0.9)
    >>> left, right = factors.values(statistics, debias=True)
    >>> bool(np.allclose(left.full(), V @ V.T) and np.allclose(right.full(), V.T @ V))
    True
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        constraints.require_options(self, shape=constraints.tuple_of(constraints.SIZE))
        object.__setattr__(self, "shape", tuple(self.shape))
        constraints.require_any("shape", self.shape)

    def initial(self, like: Array, /) -> Statistics:
        """Return zero statistics, of an array's library, device and dtype.

        Parameters
        ----------
        like : array
            Array of a real floating dtype; narrower ones than float32 are widened.

        Returns
        -------
        Statistics
            Statistics that are zero throughout.

        Raises
        ------
        DtypeError
            For integer arrays.
        """
        xp = ns.namespace_of(like=like)
        ns.require_floating(xp, like, "like")
        place = Place(xp, ns.wide_dtype(xp, like.dtype), ns.device_of(like))
        averages = {
            f"axis{i}": FullFactor().initial((n,), place)
            for i, n in enumerate(self.shape)
        }
        return Statistics(averages, place.flags())

    def updated(
        self,
        statistics: Statistics,
        gradient: Array,
        /,
        *,
        decay: Scalar,
        weight: Scalar = 1.0,
        roots: Sequence[SymmetricMatrix | Array] | None = None,
        samples: int | None = None,
        check: Check = "raise",
        name: str = "gradient",
    ) -> Statistics:
        """Return the statistics after ``sum_i <- decay sum_i + weight C_i``.

        Parameters
        ----------
        statistics : Statistics
            Old statistics; not modified.
        gradient : array, shape (n_1, ..., n_k), or (samples, n_1, ..., n_k)
            V, or several of which the ``C_i`` are averaged.
        decay : float or 0-d array
            Factor on the old statistics, in [0, 1].
        weight : float or 0-d array
            Positive: 1 for sums and debiased averages, ``1 - decay`` for averages that
            are not debiased.
        roots : sequence of SymmetricMatrix or array of shape (n_i, n_i), optional
            The ``R_i``, for the second form of the ``C_i``; that of the factor's own
            axis is not read.
        samples : int, optional
            The length of a leading axis of the gradient; None without one.
        check : {"raise", "status"}
            Whether a gradient that is not finite raises, which synchronizes with the
            device, or leaves the statistics as they were, with a flag.
        name : str
            Name used in error messages.

        Returns
        -------
        Statistics
            New statistics.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError, DecayError
            For incompatible arguments.
        NotFiniteError
            For a gradient or a root that is not finite (``check="raise"``).

        Notes
        -----
        ``2 prod(n) sum(n)`` flops for the first form (half where the backend has a
        symmetric rank-k update), and ``k`` times that for the second.
        """
        count = constraints.optional(constraints.SIZE)
        constraints.require_range("samples", samples, count)
        constraints.require_check(check)
        require_decay(decay)
        require_weight(weight)
        xp, dtype = statistics.namespace, statistics.dtype
        ns.namespace_of(statistics=statistics.like, **{name: gradient})
        ns.require_floating(xp, gradient, name)
        lead = () if samples is None else (samples,)
        ns.require_matrix(gradient, (*lead, *self.shape), name)
        V = xp.reshape(ns.cast(xp, gradient, dtype), (samples or 1, *self.shape))
        decay = ns.as_scalar(xp, decay, dtype, "decay")
        weight = ns.as_scalar(xp, weight, dtype, "weight")
        whitening = None if roots is None else self._roots(roots, V, xp)
        flags = _flags(V, whitening or (), decay, weight, xp)
        if check == "raise":
            _raise_for(flags, name)
        averages = {}
        for axis, n in enumerate(self.shape):
            rows = V if whitening is None else self._whitened(V, whitening, axis, xp)
            # KL-Shampoo averages over the other axes, Shampoo sums over them.
            others = 1 if whitening is None else math.prod(self.shape) // n
            averages[f"axis{axis}"] = FullFactor().updated(
                statistics.averages[f"axis{axis}"],
                xp.reshape(ns.moved_axis(rows, axis + 1, -1, xp=xp), (-1, n)),
                decay,
                weight / (others * V.shape[0]),
                ns.full_of(xp, weight, statistics.like),
                xp=xp,
            )
        new = Statistics(averages, xp.zeros_like(statistics.status))
        if check == "raise":
            return new
        accepted = map_structure(
            lambda a, b: xp.where(flags == 0, a, b), new, statistics
        )
        return replaced(accepted, status=flags)

    def values(
        self, statistics: Statistics, /, *, debias: bool
    ) -> tuple[SymmetricMatrix, ...]:
        """Return the factors, one an axis.

        Parameters
        ----------
        statistics : Statistics
            Statistics of the block; not modified.
        debias : bool
            Whether sums are divided by their weights.

        Returns
        -------
        tuple of SymmetricMatrix
            Matrices of sizes ``n_1, ..., n_k``: to be damped
            (`kfac_core.operators.kronecker_operator`),
            to have a root of (`kfac_core.roots.inverse_root`), or a basis
            (`kfac_core.roots.renewed_basis`).
        """
        return tuple(
            statistics.averages[f"axis{i}"].value(debias=debias)
            for i in range(len(self.shape))
        )

    def _roots(
        self, roots: Sequence[SymmetricMatrix | Array], V: Array, xp: Namespace
    ) -> tuple[Array, ...]:
        """Return the roots as arrays of the dtype of the statistics."""
        numbers = {"roots": len(roots), "shape": len(self.shape)}
        constraints.require_same("number of matrices and axes", numbers)
        arrays = [r.full() if isinstance(r, SymmetricMatrix) else r for r in roots]
        ns.namespace_of(gradient=V, **{f"roots[{i}]": r for i, r in enumerate(arrays)})
        for i, (R, n) in enumerate(zip(arrays, self.shape, strict=True)):
            ns.require_floating(xp, R, f"roots[{i}]")
            ns.require_matrix(R, (n, n), f"roots[{i}]")
        return tuple(ns.cast(xp, R, V.dtype) for R in arrays)

    def _whitened(
        self, V: Array, roots: tuple[Array, ...], axis: int, xp: Namespace
    ) -> Array:
        """Return V with ``R_j^T`` applied along every axis but one."""
        for other, R in enumerate(roots):
            if other != axis:
                # Axis 0 of V counts samples, so axes of the gradient are one further
                # on.
                product = xp.tensordot(R, V, axes=((0,), (other + 1,)))
                V = ns.moved_axis(product, 0, other + 1, xp=xp)
        return V


def _flags(
    V: Array, roots: tuple[Array, ...], decay: Scalar, weight: Scalar, xp: Namespace
) -> Array:
    """Return the flags of the inputs of an update, 0-d."""
    flags = ns.status_unless(xp, xp.all(xp.isfinite(V)), Status.OUTPUT_GRADS_NOT_FINITE)
    for R in roots:
        finite = xp.all(xp.isfinite(R))
        flags = flags | ns.status_unless(xp, finite, Status.MATRIX_NOT_FINITE)
    return flags | coefficient_flags(decay, weight, xp=xp)


def _raise_for(flags: Array, name: str) -> None:
    reasons = {
        Status.OUTPUT_GRADS_NOT_FINITE: "holds NaN or infinity. Leave such a step out.",
        Status.MATRIX_NOT_FINITE: "`roots` hold NaN or infinity; look at their status.",
    }
    raise_flagged(int(flags), name, reasons)
