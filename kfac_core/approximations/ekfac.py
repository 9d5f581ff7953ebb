"""EKFAC: second moments in the eigenbasis of the Kronecker factors.

Conventions.  With ``A = Q_A diag(a) Q_A^T`` and ``G = Q_G diag(g) Q_G^T`` the factors of
`kfac_core.approximations.kronecker`, and ``D = sum_s x g^T`` an example's gradient,

    F = (Q_A (x) Q_G) diag(E) (Q_A (x) Q_G)^T,    E = 1/N sum_mn (Q_A^T D Q_G)^2,

the best diagonal in that basis, in the Frobenius norm.  Shared positions are summed
before they are squared.  Damping is exact.

The bases are part of the statistics, with eigenvalues that descend and a residual check;
at first they are the coordinate bases.  An update adds to the factors, and to E in the
current bases; `EKFAC.rebased` changes to the bases of the current factors.  The basis of
a diagonal factor is always the coordinate basis, so that an embedding has a block too.

A basis is determined only where eigenvalues are distinct, and E differs between bases of
an eigenspace.  The operator therefore reads its mean over each pair of eigenspaces of A
and G, the best F of this form in any basis; the statistics keep E, which is additive.

References
----------
George et al. (2018), "Fast Approximate Natural Gradient Descent in a Kronecker-factored
Eigenbasis", arXiv:1806.03884, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import array_api_compat

from kfac_core import constraints
from kfac_core.approximations.approximation import Approximation, MomentStart
from kfac_core.approximations.kronecker import Kronecker
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array import (
    Array,
    Check,
    Namespace,
    Place,
    Scalar,
    finite,
    map_structure,
    replaced,
)
from kfac_core.array import namespaces as ns
from kfac_core.conventions import Conventions
from kfac_core.factors.average import Average
from kfac_core.factors.full import FullFactor
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Rows, WeightSharing
from kfac_core.linalg import certificate
from kfac_core.linalg.factorizations import Eigendecomposition
from kfac_core.linalg.factorize import eigendecomposition
from kfac_core.linalg.groups import split_groups
from kfac_core.linalg.products import multiply_matrices
from kfac_core.operators.spectral import SpectralOperator, spectral_operator

BasisFactor = Literal["full", "diagonal"]
"""Structures of a factor that has an eigenbasis."""

_SIDES = ("input", "output")

_SHARES = 16
"""Shares of E that are updated one after the other where it is updated in place."""


@dataclass(frozen=True, kw_only=True)
class EKFAC(Approximation[Rows]):
    r"""EKFAC: second moments in the eigenbasis of the Kronecker factors.

    With the factors :math:`A = Q_A \mathrm{diag}(a) Q_A^T` and
    :math:`G = Q_G \mathrm{diag}(g) Q_G^T` of `Kronecker`, and the gradient
    :math:`D = \sum_s x g^T` of one example,

    .. math:: F = (Q_A \otimes Q_G) \, \mathrm{diag}(E) \, (Q_A \otimes Q_G)^T, \qquad
        E = \frac{1}{N} \sum_{m,n} (Q_A^T D Q_G)^2

    with the square taken entry by entry.  E is the best diagonal in this basis in the
    Frobenius norm.  Damping is always exact: ``F + lam I``.

    Parameters
    ----------
    input, output : {"full", "diagonal"}
        Structure of the factors that determine the basis.  The basis of a diagonal factor
        is the identity.
    sharing : {"expand", "reduce"}
        How the factors treat shared positions; see `Kronecker`.
    moment_decay : float, optional
        Factor on the running sum of E at each update, in [0, 1]; by default the decay of
        the factors.

    Raises
    ------
    ConventionError
        For an unknown structure or sharing.
    DecayError
        For a decay outside [0, 1].

    Notes
    -----
    Updates accumulate the factors, and E in the current bases.
    `kfac_core.Estimator.rebase` recomputes the bases and has to be called before the first
    `kfac_core.Estimator.refresh`.  Where roundoff cannot tell eigenvalues of a factor
    apart, as in its null space, F has the mean of E over the eigenspace, so that it does
    not depend on which basis of it the array library returns.

    Shapes: A is n x n, G is m x m and E is n x m, with ``n = in`` (``in + 1`` with a bias)
    and ``m = out``.

    Dtype: that of the first batch, or float32 if that is narrower; see
    `kfac_core.Precision`.

    Units: F is the curvature of the loss of one example, as for `Kronecker`.

    Cost: for an update with R rows the ``R (n^2 + M m^2)`` flops of `Kronecker` and about
    ``2 R (n^2 + M m^2 + M n m)`` for E; about ``9 (n^3 + m^3)`` to recompute the bases,
    ``n m`` for a refresh, with ``2 n m (n + m)`` more where eigenvalues coincide or in a
    compiled program or on a device, ``4 n m (n + m)`` for preconditioning.

    References
    ----------
    George et al. (2018), arXiv:1806.03884, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> x, g = rng.normal(size=(32, 3)), rng.normal(size=(32, 2))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=False, weight_layout="io")
    >>> estimator = kc.Estimator(
    ...     {"fc": kc.Block(layer, kc.EKFAC())},
    ...     reduction="sum",
    ...     damping=1e-2,
    ...     damping_rule="exact",
    ... )
    >>> estimator.update({"fc": kc.Batch(x, g)})
    >>> estimator.rebase(moments="kronecker")
    >>> estimator.update({"fc": kc.Batch(x, g)})  # Second moments in these bases
    >>> estimator.refresh()
    >>> estimator.operator("fc").to_dense().shape
    (6, 6)
    """

    input: BasisFactor = "full"
    output: BasisFactor = "full"
    sharing: WeightSharing = "expand"
    moment_decay: float | None = None

    name = "ekfac"
    reduction = "sum"
    has_bases = True

    def __post_init__(self) -> None:
        constraints.require_options(
            self,
            input=constraints.literal(BasisFactor),
            output=constraints.literal(BasisFactor),
            sharing=constraints.literal(WeightSharing),
            moment_decay=constraints.optional(constraints.DECAY),
        )

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics, in the coordinate basis."""
        factors = self.factors.initial(layer, place)
        n, m = layer.matrix_shape
        lead = (layer.groups,) if layer.groups > 1 else ()
        sizes = {"input": n, "output": m // layer.groups}
        moments = Average(place.zeros(*lead, *sizes.values()), place.zeros())
        bases = {
            side: _coordinates(lead, size, place)
            for side, size in sizes.items()
            if getattr(self, side) == "full"
        }
        averages = {**factors.averages, "block": moments}
        return Statistics(averages, factors.status, bases)

    def updated(
        self,
        statistics: Statistics,
        rows: Rows,
        layer: Layer,
        options: UpdateOptions,
        /,
    ) -> Statistics:
        """Return factors and moments after one update; see `Kronecker.updated`.

        Notes
        -----
        Beside the factors, ``2 R (n^2 + M m^2)`` flops to transform R rows to the bases,
        and ``2 M R n m`` to square the examples' gradients.  They are formed in chunks of
        at most the memory of the rows, or not at all where an example is one row.
        """
        factors = self.factors.updated(statistics, rows, layer, options)
        decay = self.decays.get("block", options.decay)
        # E may average over another time than the factors.
        moment_options = replaced(options, decay=decay)
        averages = {
            **factors.averages,
            "block": self._moments(statistics, rows, moment_options),
        }
        return Statistics(averages, statistics.status, statistics.bases)

    def rebased(
        self,
        statistics: Statistics,
        layer: Layer,
        /,
        *,
        moments: MomentStart,
        check: Check,
        overwrite: bool = False,
    ) -> Statistics:
        """Return the statistics in the eigenbases of the factors as they are now.

        Parameters
        ----------
        statistics : Statistics
            Statistics whose factors are kept.
        layer : Layer
            Layer of the block.
        moments : {"kronecker", "carried", "zero"}
            How E starts in the new bases: ``S a g^T`` from the
            factors' eigenvalues, with the weight of the input factor, so that the
            block is K-FAC's at first; the diagonal that the old F has in the new bases,
            ``(R_A^2)^T E R_G^2`` with ``R = Q_old^T Q_new`` squared entry by entry, with
            the weight it had; or nothing, so that updates must come before an operator.
        check : {"raise", "status"}
            As for `kfac_core.linalg.factorize.eigendecomposition`; with ``"status"`` the
            statistics stay as they are, but for their status, where no certified bases
            exist.
        overwrite : bool
            Whether to work in the memory of the factors, which holds them again afterwards.

        Returns
        -------
        Statistics
            With bases whose eigenvalues descend.

        Raises
        ------
        ConventionError
            For an unknown `moments`.
        NotFiniteError, FactorizationError
            If a factor has no certified basis (``check="raise"``).

        Notes
        -----
        About ``9 (n^3 + m^3)`` flops.
        """
        xp = statistics.namespace
        bases: dict[str, Eigendecomposition] = {}
        status = xp.zeros_like(statistics.status)
        for side in _SIDES:
            if getattr(self, side) != "full":
                continue
            average = statistics.averages[side]
            value = FullFactor().value(
                average, debias=True, dtype=average.weight.dtype, xp=xp
            )
            zero = xp.zeros_like(value.factor)
            stored = ns.roundoff_of(average.weight.dtype, xp=xp)
            damped = replaced(value, shift=zero, roundoff=stored)
            basis = eigendecomposition(
                damped, check=check, name=side, in_place=overwrite
            )
            bases[side] = basis if overwrite else _descending(basis, xp)
            status = status | ns.any_status(basis.status, xp=xp)
        start = {
            "kronecker": self._kronecker_moments,
            "carried": _carried_moments,
            "zero": _no_moments,
        }[moments]
        averages = {**statistics.averages, "block": start(statistics, bases, xp)}
        new = Statistics(averages, statistics.status, bases)
        if check == "raise":
            return new
        good = status == 0
        accepted = map_structure(lambda a, b: xp.where(good, a, b), new, statistics)
        return replaced(accepted, status=statistics.status | status)

    def corrected(
        self,
        statistics: Statistics,
        rows: Rows,
        /,
        *,
        conventions: Conventions,
        decay: Scalar,
        weight: Scalar | None,
    ) -> Statistics:
        """Return statistics with the moments updated and the factors left alone."""
        options = UpdateOptions(
            conventions=conventions, decay=decay, weight=weight, xp=statistics.namespace
        )
        moments = self._moments(statistics, rows, options)
        averages = {**statistics.averages, "block": moments}
        return Statistics(averages, statistics.status, statistics.bases)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> SpectralOperator:
        """Return ``(Q_A (x) Q_G) diag(E + lam) (Q_A (x) Q_G)^T`` in its current state."""
        xp, apply = options.xp, options.apply
        moments = statistics.averages["block"].value(debias=options.debias)
        E = ns.cast(xp, _of_eigenspaces(moments, statistics, xp), apply)
        operator = spectral_operator(
            E,
            input=statistics.bases.get("input"),
            output=statistics.bases.get("output"),
            damping=ns.full_of(xp, options.damping, E),
            vector_shape=layer.matrix_shape,
            dtype=apply,
            **options.preparing,
        )
        if "inverse" not in options.factorizations:
            return operator
        # E may have started as S a g^T, with the errors of the factors' eigenvalues.
        averages = statistics.averages
        spectrum = certificate.DampedSpectrum(
            [_spectrum(statistics, side) for side in _SIDES],
            averages["repeats"].value(debias=True),
            ns.full_of(xp, options.damping, averages["repeats"].weight),
        )
        if options.check == "raise":
            spectrum.require_determined(options.name)
            return operator
        return replaced(operator, flags=operator.flags | spectrum.flag())

    @property
    def decays(self) -> Mapping[str, float]:
        """Decays of averages that differ from the decay of updates."""
        return {} if self.moment_decay is None else {"block": self.moment_decay}

    def problem_with(self, layer: Layer, /) -> str | None:
        """Return why a layer is not supported, or None if it is."""
        problem = self.factors.problem_with(layer)
        if problem is not None and layer.kind == "embedding":
            return problem.replace("Kronecker", "EKFAC")
        return problem

    @property
    def factors(self) -> Kronecker:
        """The approximation of the same factors without moments."""
        return Kronecker(input=self.input, output=self.output, sharing=self.sharing)

    def _moments(
        self, statistics: Statistics, rows: Rows, options: UpdateOptions
    ) -> Average:
        """Return E's average after the update."""
        shares = options.shares(rows, statistics.dtype, per="example")
        xp, scale = options.xp, shares.scale * shares.outer_product_scale
        old = statistics.averages["block"]
        Q_A, Q_G = (
            statistics.bases[side].eigenvectors if side in statistics.bases else None
            for side in _SIDES
        )
        in_basis = rows.in_basis(Q_A, Q_G, statistics.dtype, xp=xp)
        # E <- decay E + weight c / N sum_mn (Q_A^T D Q_G)^2
        total, decay, weight = old.sum, options.decay, shares.example_weight
        if not (options.overwrite and array_api_compat.is_writeable_array(total)):
            squares = in_basis.squares(statistics.dtype, xp=xp)
            squares = split_groups(squares, total.shape[:-2], xp=xp)
            return old.plus(squares, decay, scale, weight)
        total *= decay
        dtype, n = statistics.dtype, total.shape[-2]
        if Q_A is None:
            shares_of_inputs = iter([(slice(n), in_basis.squares(dtype, xp=xp))])
        else:
            # A share of the inputs at a time, or the squares were a second array like E.
            step = max(1, n // _SHARES)
            shares_of_inputs = in_basis.squares_by_inputs(step, dtype, xp=xp)
        for inputs, squares in shares_of_inputs:
            squares *= scale
            sums = total[..., inputs, :]
            sums += split_groups(squares, total.shape[:-2], xp=xp)
        return old.following(total, None, decay, weight)

    def _kronecker_moments(
        self,
        statistics: Statistics,
        bases: Mapping[str, Eigendecomposition],
        _: Namespace,
    ) -> Average:
        """Return ``S a g^T``, with the weight of the input factor."""
        averages = statistics.averages
        a, g = (
            bases[side].eigenvalues
            if side in bases
            else averages[side].value(debias=True)
            for side in _SIDES
        )
        S = averages["repeats"].value(debias=True)
        weight = averages["input"].weight
        # A sum and not a mean, hence the weight twice: in the sum, and as its weight.
        return Average(S * weight * a[..., :, None] * g[..., None, :], weight)


def _spectrum(statistics: Statistics, side: str) -> certificate.Spectrum:
    """Return the eigenvalues of a side at the last change of basis."""
    if side in statistics.bases:
        basis = statistics.bases[side]
        return certificate.Spectrum(basis.eigenvalues, basis.error)
    entries = statistics.averages[side].value(debias=True)
    return certificate.Spectrum(entries, statistics.namespace.zeros_like(entries))


def _of_eigenspaces(E: Array, statistics: Statistics, xp: Namespace) -> Array:
    """Return E with its mean over each pair of eigenspaces, which no basis changes."""
    for side, basis in statistics.bases.items():
        w = basis.eigenvalues
        apart = certificate.eigenvalues_apart(
            certificate.Spectrum(w, basis.error), xp=xp
        )
        if finite.known_true(apart, xp=xp):
            continue
        # Without statistics the basis is the coordinates, each an eigenspace by itself.
        # Eigenvalues descend; each gap ends an eigenspace, and sums of gaps number them.
        ends = xp.astype(apart | xp.all(w == 0, axis=-1, keepdims=True), xp.int32)
        number = xp.cumulative_sum(ends, axis=-1, include_initial=True)
        same = number[..., :, None] == number[..., None, :]
        same = xp.astype(same, E.dtype)
        mean = same / xp.sum(same, axis=-1, keepdims=True)  # symmetric
        if side == "input":
            E = multiply_matrices(mean, E, xp=xp)
        else:
            E = multiply_matrices(E, mean, xp=xp)
    return E


def _carried_moments(
    statistics: Statistics, bases: Mapping[str, Eigendecomposition], xp: Namespace
) -> Average:
    """Return the diagonal that the old F has in the new bases."""
    old = statistics.averages["block"]
    E = _of_eigenspaces(old.sum, statistics, xp)
    for side, basis in bases.items():
        before = xp.matrix_transpose(statistics.bases[side].eigenvectors)
        # Squares of a rotation are doubly stochastic, so the trace of F is kept.
        squared = xp.matmul(before, basis.eigenvectors) ** 2
        if side == "input":
            E = xp.matmul(xp.matrix_transpose(squared), E)
        else:
            E = xp.matmul(E, squared)
    return Average(E, old.weight)


def _no_moments(
    statistics: Statistics, bases: Mapping[str, Eigendecomposition], xp: Namespace
) -> Average:
    n, m = (
        bases[side].eigenvalues.shape
        if side in bases
        else statistics.averages[side].sum.shape
        for side in _SIDES
    )
    like = statistics.like
    zeros = xp.zeros((*n, m[-1]), dtype=like.dtype, device=ns.device_of(like))
    return Average(zeros, xp.zeros_like(like))


def _coordinates(lead: tuple[int, ...], size: int, place: Place) -> Eigendecomposition:
    """Return the coordinate basis, with zero eigenvalues."""
    xp, nothing = place.xp, place.zeros(*lead)
    eye = xp.broadcast_to(place.eye(size), (*lead, size, size))
    return Eigendecomposition(
        place.zeros(*lead, size),
        xp.asarray(eye, copy=True),
        place.zeros(*lead, size),
        place.flags(*lead),
        nothing,
        nothing,
        place.flags(*lead),
    )


def _descending(basis: Eigendecomposition, xp: Namespace) -> Eigendecomposition:
    """Return a basis with its largest eigenvalue first."""
    return replaced(
        basis,
        eigenvalues=xp.flip(basis.eigenvalues, axis=-1),
        error=xp.flip(basis.error, axis=-1),
        # Copy, since a loaded checkpoint could not reproduce a view's negative strides.
        eigenvectors=xp.asarray(xp.flip(basis.eigenvectors, axis=-1), copy=True),
    )
