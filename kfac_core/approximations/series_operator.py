"""The operator of a chain of time steps, from its statistics.

Conventions as in `kfac_core.operators.series`.  The chain of `kfac_core.linalg.fallback`
computes the Cholesky factors of the damped moments of lag 0.  Their combination with lag 1
has its own fallback chain: working precision, then float64, each
accepted only where no residual is above its limit, no correlation is above 1 by more
than that limit, and everything to be divided by is positive.
"""

from __future__ import annotations

from typing import NoReturn

from kfac_core import errors
from kfac_core.approximations.options import OperatorOptions
from kfac_core.array import Array, Namespace, Status
from kfac_core.array import namespaces as ns
from kfac_core.array.status import raise_flagged
from kfac_core.factors.full import FullFactor
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg import series_chain
from kfac_core.linalg.damped import DampedMatrix, damped_matrix
from kfac_core.linalg.fallback import Fallback, in_wider_dtype
from kfac_core.linalg.series_infinite import InfiniteChain, infinite_chain
from kfac_core.operators.parts import applied_in
from kfac_core.operators.series import SeriesOperator

_FULL = FullFactor()


def series_operator(
    statistics: Statistics, options: OperatorOptions, /
) -> SeriesOperator:
    """Make the operator of the symmetric or infinite variant.

    Parameters
    ----------
    statistics : Statistics
        With ``lengths`` (symmetric) or without (infinite); see `Series.initial`.
    options : OperatorOptions
        The rule is a factored one.

    Returns
    -------
    SeriesOperator
        An immutable snapshot.

    Raises
    ------
    NotFiniteError, DampingError, FactorizationError
        With ``check="raise"``; see `Series.operator`.
    """
    xp, check = options.xp, options.check
    operator, flags = in_wider_dtype(
        lambda dtype: _chain_operator(statistics, options, dtype=dtype, xp=xp),
        options.compute,
        like=statistics.like,
        check=check,
        xp=xp,
    )
    if flags:
        _raise_for(flags, operator, options.name)
    operator = applied_in(
        operator, options.apply, check=check, name=options.name, xp=xp
    )
    return operator.prepared(*options.factorizations, check=check, name=options.name)


def _chain_operator(
    statistics: Statistics, options: OperatorOptions, /, *, dtype: object, xp: Namespace
) -> SeriesOperator:
    """Return the operator, computed in one dtype."""
    averages, debias = statistics.averages, options.debias
    sides = ("input", "output")
    A, G = (
        _FULL.value(averages[side], debias=debias, dtype=dtype, xp=xp) for side in sides
    )
    lagged = [
        ns.cast(xp, averages[f"lagged_{side}"].value(debias=debias), dtype)
        for side in sides
    ]
    # Always debiased, like the lengths, since both count rows.
    S = ns.cast(xp, averages["repeats"].value(debias=True), dtype)
    nothing = xp.logical_not(S > 0)
    S = xp.where(nothing, xp.ones_like(S), S)
    wide = options._replace(damping=ns.full_of(xp, options.damping, S))
    shifts = wide.shifts([_FULL.mean_eigenvalue(A), _FULL.mean_eigenvalue(G)], S)
    parts = [
        damped_matrix(value, shift).prepared(
            "cholesky", check=options.check, name=f"{options.name}/{side}"
        )
        for value, shift, side in zip((A, G), shifts, sides, strict=True)
    ]
    lengths: Array | None = None
    if "lengths" in averages:
        lengths = ns.cast(xp, averages["lengths"].value(debias=True), dtype)
        first = xp.arange(lengths.shape[0], device=ns.device_of(lengths)) == 0
        lengths = xp.where(nothing, xp.astype(first, dtype), lengths)
    (A_0, G_0), (A_1, G_1) = parts, lagged
    root_A, root_G = _root(A_0, A_1, xp), _root(G_0, G_1, xp)
    stored = ns.roundoff_of(statistics.dtype, xp=xp)
    chain: series_chain.WeightedRoots | InfiniteChain
    if lengths is None:
        chain = infinite_chain(
            root_A, root_G, S, check=options.check, stored=stored, xp=xp
        )
    else:
        chain = series_chain.symmetric_chain(
            root_A, root_G, lengths, stored=stored, xp=xp
        )
    fallback = xp.full(
        (), int(Fallback.WORKING), dtype=xp.int32, device=ns.device_of(S)
    )
    return SeriesOperator(A_0, G_0, A_1, G_1, S, lengths, chain, None, fallback)


def _root(factor: DampedMatrix, lagged: Array, xp: Namespace) -> series_chain.Root:
    assert factor.cholesky is not None
    return series_chain.triangular_root(factor.cholesky.lower, lagged, xp=xp)


def _raise_for(flags: Status, operator: SeriesOperator, name: str) -> NoReturn:
    reason = "the moments of lag 1 hold NaN or infinity. Reset the statistics, or keep "
    reason += "them in float64."
    raise_flagged(flags, name, {Status.MATRIX_NOT_FINITE: reason})
    raise errors.FactorizationError(
        "the moments of lag 0 and lag 1 are not the covariances of a chain (flags "
        f"{flags!s}; the largest correlation is {float(operator.chain.clipped):.1e} "
        "above 1). Increase `damping`; if that does not help, the two lags come from "
        "different rows.",
        factor=name,
    )
