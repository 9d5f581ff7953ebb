"""How the operator of a chain of layers is made from its statistics.

Conventions as in `kfac_core.chain.operator`.  The chain of `kfac_core.linalg.fallback`
makes the Cholesky factors of the layers' damped moments.  What is made from these and the
moments between layers has a chain of two steps, working precision and float64, each
accepted only where no certificate is above its limit, no correlation is above 1 by more
than that limit, and everything to be divided by is positive.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NoReturn

from kfac_core.array.backend import Namespace
from kfac_core.array.namespaces import cast, device_of
from kfac_core.array.precision import Precision
from kfac_core.array.status import Status
from kfac_core.array.structure import map_structure, replaced
from kfac_core.block import Block
from kfac_core.chain.conditional import conditional, marginal
from kfac_core.chain.operator import TridiagonalOperator
from kfac_core.chain.statistics import ChainStatistics
from kfac_core.errors import FactorizationError, NotFiniteError
from kfac_core.factors.average import Average
from kfac_core.linalg.fallback import Fallback
from kfac_core.linalg.series_chain import Root
from kfac_core.linalg.shifted import ShiftedMatrix
from kfac_core.linalg.triangular import solve_triangular

__all__ = ["tridiagonal_operator"]


def tridiagonal_operator(
    blocks: Mapping[str, Block],
    statistics: ChainStatistics,
    /,
    *,
    precision: Precision,
    **options: Any,
) -> TridiagonalOperator:
    """Make the operator of a chain.

    Parameters
    ----------
    blocks : mapping of str to Block
        The layers, Kronecker-factored, from the first to the last.
    statistics : ChainStatistics
        Never modified.
    precision : Precision
        Of computing and applying.
    **options
        Damping, rule, debias and check, as for `Block.operator`.

    Returns
    -------
    TridiagonalOperator
        An immutable snapshot.

    Raises
    ------
    NotFiniteError, DampingError, FactorizationError
        With ``check="raise"``; see `BlockTridiagonal.operator`.
    """
    xp, storage = statistics.namespace, statistics.any_weight.dtype
    compute = precision.dtype(precision.compute, storage, xp=xp)
    apply = precision.dtype(precision.apply, storage, xp=xp)
    make = _made if options["check"] == "status" else _climbed
    made = make(blocks, statistics, options, dtype=compute, xp=xp)
    return map_structure(
        lambda x: cast(xp, x, apply) if xp.isdtype(x.dtype, "real floating") else x,
        made,
    )


def _climbed(
    blocks: Mapping[str, Block],
    statistics: ChainStatistics,
    options: dict[str, Any],
    /,
    *,
    dtype: Any,
    xp: Namespace,
) -> TridiagonalOperator:
    """Return the operator made in working precision, or in float64, or raise."""
    dtypes = [dtype]
    device = device_of(statistics.any_weight)
    known = xp.__array_namespace_info__().dtypes(device=device, kind="real floating")
    if dtype != xp.float64 and "float64" in known:
        dtypes.append(xp.float64)
    for attempted in dtypes:
        try:
            made = _made(blocks, statistics, options, dtype=attempted, xp=xp)
        except FactorizationError:
            if attempted == dtypes[-1]:
                raise
            continue
        flags = Status(int(made.status()))
        if not flags:
            if attempted == dtype:
                return made
            fallback = xp.full_like(made.fallback, int(Fallback.FLOAT64))
            return replaced(made, fallback=fallback)
    _raise_for(flags, made)


def _made(
    blocks: Mapping[str, Block],
    statistics: ChainStatistics,
    options: dict[str, Any],
    /,
    *,
    dtype: Any,
    xp: Namespace,
) -> TridiagonalOperator:
    """Return the operator, computed in one dtype."""
    name_of: Any = "float64" if dtype == xp.float64 else "float32"
    layers: dict[str, Any] = {
        name: block.operator(
            statistics.layers[name],
            factorizations=("cholesky",),
            precision=Precision(compute=name_of, apply=name_of),
            name=name,
            **options,
        )
        for name, block in blocks.items()
    }
    roots = {
        name: (_root(part.input, xp), _root(part.output, xp))
        for name, part in layers.items()
    }

    def between(root: Root, average: Average) -> Root:
        moment = average.value(debias=options["debias"])
        return replaced(root, lagged=cast(xp, moment, dtype))

    names = tuple(blocks)
    links, conditionals = {}, {}
    for name, following in itertools.pairwise(names):
        inputs, output_grads = roots[name]
        next_inputs, next_output_grads = roots[following]
        links[name], conditionals[name] = conditional(
            between(inputs, statistics.crossed_inputs[name]),
            next_inputs,
            between(output_grads, statistics.crossed_output_grads[name]),
            next_output_grads,
            xp=xp,
        )
    conditionals[names[-1]] = marginal(*roots[names[-1]], xp=xp)
    scale = layers[names[0]].scale
    fallback = xp.full(
        (), int(Fallback.WORKING), dtype=xp.int32, device=device_of(scale)
    )
    return TridiagonalOperator(layers, links, conditionals, scale, fallback, names)


def _root(factor: ShiftedMatrix, xp: Namespace) -> Root:
    """Return L and ``L^-T``; the moment between layers has still to be put in."""
    assert factor.cholesky is not None
    L = factor.cholesky.lower
    eye = xp.eye(factor.size, dtype=L.dtype, device=device_of(L))
    finite = xp.all(xp.isfinite(L))
    # Some libraries raise where a factor is NaN.
    dual = solve_triangular(xp.where(finite, L, eye), eye, transpose=True, xp=xp)
    return Root(L, xp.where(finite, dual, xp.full_like(dual, xp.nan)), eye)


def _raise_for(flags: Status, made: TridiagonalOperator) -> NoReturn:
    bad = next(n for n in made.names if int(made.conditionals[n].flags))
    if Status.MATRIX_NOT_FINITE in flags:
        raise NotFiniteError(
            f"{bad}: the moments between this layer and the next hold NaN or infinity. "
            "Reset the statistics, or keep them in float64."
        )
    raise FactorizationError(
        "the moments of this layer and the next make no covariance (flags "
        f"{flags!s}; the largest correlation is "
        f"{float(made.conditionals[bad].clipped):.1e} above 1). Increase `damping`; if "
        "that is no remedy, the moments are not of the same rows.",
        factor=bad,
    )
