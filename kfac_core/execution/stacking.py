"""Blocks of equal shape as one stack: small matrices are factorized together.

For matrices of few rows nearly all of the time goes into calls, not into numbers.  A
stack of them is factorized and certified in as many calls as one of them.
What comes out for a block is what it would have been alone, up to rounding: a block
that fails in its stack is done again by itself, where it climbs the ladder or raises.

Conventions.  A stack is made of blocks with `Kronecker`, full factors and no groups, of
one shape, library, device, dtype and damping; whatever else there is, is done one by
one.  The order of the results is that of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from kfac_core.approximations.kronecker import Kronecker
from kfac_core.array.backend import Array, Namespace, backend_of
from kfac_core.array.namespaces import Scalar, device_of, own_namespace
from kfac_core.array.structure import replaced
from kfac_core.block import Block
from kfac_core.errors import FactorizationError, NotFiniteError
from kfac_core.execution.host import returned, seen
from kfac_core.execution.threads import in_bundles
from kfac_core.factors.average import Average
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.damped import DampedMatrix
from kfac_core.linalg.factorizations import (
    CholeskyFactor,
    Eigendecomposition,
    Inverse,
)
from kfac_core.linalg.fallback import Fallback, fallback_of
from kfac_core.linalg.shifted import ShiftedMatrix
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.operators.kronecker import FactoredKronecker
from kfac_core.operators.operator import CurvatureOperator

__all__ = [
    "STACKED_UP_TO",
    "operators_of_blocks",
    "stacked_statistics",
]

STACKED_UP_TO = 128
"""The number of rows up to which factors are stacked; from 256 on NumPy loses by it."""

Made: TypeAlias = CurvatureOperator | FactorizationError | NotFiniteError
"""An operator, or why there is none."""


def operators_of_blocks(
    blocks: Mapping[str, Block],
    statistics: Mapping[str, Statistics],
    dampings: Mapping[str, Scalar],
    /,
    *,
    workers: int = 1,
    **options: Any,
) -> dict[str, Made]:
    """Make the curvature operators of some blocks.

    Parameters
    ----------
    blocks : mapping of str to Block
        The blocks by name.
    statistics : mapping of str to Statistics
        Of each.
    dampings : mapping of str to float or 0-d array
        Of each.
    workers : int
        The number of threads; see `kfac_core.execution.threads`.
    **options
        The other keyword arguments of `kfac_core.Block.operator`, but for ``name``.

    Returns
    -------
    dict of str to CurvatureOperator or error
        By name; for a block that cannot be factorized, the error that
        `kfac_core.Block.operator` raises for it.

    Raises
    ------
    ConventionError, DampingError
        As `kfac_core.Block.operator`.
    """

    def one(name: str) -> Made:
        try:
            return _of_one(
                name, blocks[name], statistics[name], dampings[name], options
            )
        except (FactorizationError, NotFiniteError) as error:
            return error

    def several(names: list[str]) -> dict[str, Made]:
        if len(names) == 1:
            return {names[0]: one(names[0])}
        block, damping = blocks[names[0]], dampings[names[0]]
        made = _of_stack(block, [statistics[n] for n in names], damping, options)
        parts = _taken_apart(made, names)
        return {n: part or one(n) for n, part in zip(names, parts, strict=True)}

    stacks: dict[Any, list[str]] = {}
    for name, block in blocks.items():
        alike = _alike(block, statistics[name], dampings[name], options)
        stacks.setdefault(name if alike is None else alike, []).append(name)

    def all_of(stacks: list[list[str]]) -> dict[str, Made]:
        return {name: x for names in stacks for name, x in several(names).items()}

    def flops(names: list[str]) -> int:
        n, m = blocks[names[0]].layer.matrix_shape
        return len(names) * (n**3 + m**3)

    library = None
    if workers > 1 and blocks:
        library = backend_of(statistics[next(iter(blocks))].namespace)
    found = in_bundles(
        all_of, list(stacks.values()), work=flops, workers=workers, library=library
    )
    return {name: found[name] for name in blocks}


def _of_one(
    name: str,
    block: Block,
    statistics: Statistics,
    damping: Scalar,
    options: Mapping[str, Any],
) -> CurvatureOperator:
    """Make one block's operator: by NumPy, where its library leaves that to NumPy."""
    xp, memo, views = statistics.namespace, options.get("memo"), None
    if type(block.approximation) is Kronecker and isinstance(damping, int | float):
        views = _seen(statistics, memo, xp)
    operator = block.operator(
        views or statistics, damping=damping, name=name, **options
    )
    if views is None:
        return operator
    return _returned(operator, statistics, views, memo, xp)


def _seen(
    statistics: Statistics, memo: dict[Any, Any] | None, xp: Namespace
) -> Statistics | None:
    """Return statistics as NumPy sees them, or None; see `kfac_core.execution.host`.

    An average that several blocks share has one view: what is remembered of it is
    remembered by its identity.
    """
    views = seen(statistics, xp=xp)
    if views is None or memo is None:
        return views
    averages = {
        side: memo.setdefault(("seen", id(average)), views.averages[side])
        for side, average in statistics.averages.items()
    }
    return replaced(views, averages=averages)


def _returned(
    operator: Any,
    statistics: Statistics,
    views: Statistics,
    memo: dict[Any, Any] | None,
    xp: Namespace,
) -> CurvatureOperator:
    """Return the operator that NumPy made of views of statistics, of their library.

    Factors that are multiples of the running sums are so of the sums themselves, and a
    basis that several blocks share is one again.
    """
    sides: dict[str, Any] = {}
    for side in ("input", "output"):
        part = getattr(operator, side)
        if not isinstance(part, ShiftedMatrix):
            continue
        given: dict[str, Any] = {}
        B = part.damped.matrix
        if B is views.averages[side].sum and part.applied is B:
            own = statistics.averages[side].sum
            scalars = replaced(part.damped, matrix=None)
            scalars = returned(scalars, xp=xp)
            given = {"damped": replaced(scalars, matrix=own), "applied": own}
        if part.basis is not None and memo is not None:
            key = ("returned", id(part.basis))
            given["basis"] = memo.setdefault(key, returned(part.basis, xp=xp))
        without: Any = replaced(part, **dict.fromkeys(given))
        sides[side] = replaced(returned(without, xp=xp), **given)
    made: Any = returned(replaced(operator, **dict.fromkeys(sides)), xp=xp)
    return replaced(made, **sides)  # type: ignore[no-any-return]


def _alike(
    block: Block, statistics: Statistics, damping: Scalar, options: Mapping[str, Any]
) -> Any:
    """Return what blocks of one stack have in common; None for a block by itself."""
    approximation, layer = block.approximation, block.layer
    if (
        options.get("rule") == "exact"
        or options.get("check", "raise") != "raise"
        or type(approximation) is not Kronecker
        or (approximation.input, approximation.output) != ("full", "full")
        or layer.groups > 1
        or max(layer.matrix_shape) > STACKED_UP_TO
    ):
        return None
    array = statistics.any_weight
    place = statistics.namespace.__name__, str(device_of(array)), array.dtype
    known = damping if isinstance(damping, int | float) else id(damping)
    whole = tuple(statistics.averages[s].sum.full_storage for s in ("input", "output"))
    return layer.matrix_shape, place, known, whole


def _of_stack(
    block: Block,
    statistics: list[Statistics],
    damping: Scalar,
    options: Mapping[str, Any],
) -> FactoredKronecker:
    """Make the operators of blocks of equal shape as one, of independent groups.

    Where all of them hold on the first rung, nothing has to be looked at again.
    """
    xp = statistics[0].namespace
    stack = stacked_statistics(statistics, xp, mirrored=True)
    # What is remembered for blocks that share factors is remembered by the identity of
    # an average, and the stack's are gone after this.
    options = {**options, "memo": None}
    made: Any
    try:
        made = _of_one("stack", block, stack, damping, options)
        if all(fallback_of(x) == Fallback.WORKING for x in _factorizations(made)):
            return made  # type: ignore[no-any-return]
    except (FactorizationError, NotFiniteError):
        pass
    reported = {**options, "check": "status"}
    made = _of_one("stack", block, stack, damping, reported)
    return made  # type: ignore[no-any-return]


def _factorizations(made: Any) -> Iterator[Any]:
    """Yield what was prepared of the two factors."""
    for side in (made.input, made.output):
        for field in ("cholesky", "inverse", "basis"):
            part = getattr(side, field)
            if part is not None:
                yield part


def stacked_statistics(
    statistics: list[Statistics], xp: Namespace, /, *, mirrored: bool
) -> Statistics:
    """Return the statistics of blocks of equal shape as those of independent groups.

    Parameters
    ----------
    statistics : list of Statistics
        Of `Kronecker` blocks, one or more; never modified.
    xp : namespace
        Of their arrays.
    mirrored : bool
        Whether every matrix gets both triangles, as a stack of factorizations needs
        them; else those that it has, which are to be the same in all.

    Returns
    -------
    Statistics
        With a leading axis of blocks in every array but the status, which is the first
        block's.
    """
    averages = {
        side: _stacked_average(
            [held.averages[side] for held in statistics], xp, mirrored
        )
        for side in statistics[0].averages
    }
    return Statistics(averages, statistics[0].status)


def _stacked_average(averages: list[Average], xp: Namespace, mirrored: bool) -> Average:
    weight = xp.stack([average.weight for average in averages])
    if not isinstance(averages[0].sum, SymmetricMatrix):
        return Average(xp.stack([average.sum for average in averages]), weight)
    array = xp.stack([average.sum.array for average in averages])
    matrices = SymmetricMatrix(array, averages[0].sum.full_storage)
    if mirrored:
        matrices = SymmetricMatrix(matrices.full(), full_storage=True)
    # The weights are broadcast against matrices.
    return Average(matrices, weight[:, None, None])


def _taken_apart(
    made: FactoredKronecker, names: list[str]
) -> Iterator[FactoredKronecker | None]:
    """Yield the operator of each block of a stack; None where it failed."""
    xp = own_namespace(made.scale)
    flags = xp.zeros_like(made.scale, dtype=xp.int32)
    for part in _factorizations(made):
        flags = flags | part.status
    failed = backend_of(xp).to_numpy(flags)
    scales = xp.unstack(made.scale)
    known = None if failed.any() else xp.reshape(flags[:1], ())
    inputs, outputs = (
        _each(stack, len(names), known, xp) for stack in (made.input, made.output)
    )
    for bad, A, G, S in zip(failed, inputs, outputs, scales, strict=True):
        yield None if bad else FactoredKronecker(A, G, S)


def _each(
    stack: Any, number: int, status: Array | None, xp: Namespace
) -> list[ShiftedMatrix]:
    """Return each matrix of a stack; `status` is that of all, where they have one."""
    none: list[Any] = [None] * number
    cholesky, inverse, basis = none, none, none
    if stack.cholesky is not None:
        lower = xp.unstack(stack.cholesky.lower)
        cholesky = _certified(CholeskyFactor, stack.cholesky, status, xp, lower)
    if stack.inverse is not None:
        inverses = _matrices(stack.inverse.matrix, xp)
        inverse = _certified(Inverse, stack.inverse, status, xp, inverses)
    if stack.basis is not None:
        w, Q = xp.unstack(stack.basis.eigenvalues), xp.unstack(stack.basis.eigenvectors)
        basis = _certified(Eigendecomposition, stack.basis, status, xp, w, Q)
    matrices = applied = _matrices(stack.damped.matrix, xp)
    if stack.applied is not stack.damped.matrix:
        applied = _matrices(stack.applied, xp)
    scalars = xp.unstack(stack.damped.factor), xp.unstack(stack.damped.shift)
    damped = [DampedMatrix(*each) for each in zip(matrices, *scalars, strict=True)]
    fields = zip(damped, applied, cholesky, inverse, basis, strict=True)
    return [ShiftedMatrix(*each) for each in fields]


def _certified(
    cls: Callable[..., Any],
    stack: Any,
    status: Array | None,
    xp: Namespace,
    *parts: Sequence[Any],
) -> list[Any]:
    """Return each factorization of a stack, from its parts and its certificates.

    What is the same for all is one array: a thousand are not made in no time.
    """
    Q = stack.status.shape[0]
    statuses = xp.unstack(stack.status) if status is None else [status] * Q
    residuals = xp.unstack(stack.residual)
    if cls is Eigendecomposition:
        clipped = xp.unstack(stack.clipped)
    else:
        # A stack is taken apart only where nothing was clipped.
        clipped = [xp.reshape(stack.clipped[:1], ())] * Q
    fallbacks = [xp.reshape(stack.fallback[:1], ())] * Q
    each = zip(*parts, statuses, residuals, clipped, fallbacks, strict=True)
    return [cls(*own) for own in each]


def _matrices(stack: SymmetricMatrix, xp: Namespace) -> list[SymmetricMatrix]:
    return [SymmetricMatrix(x, stack.full_storage) for x in xp.unstack(stack.array)]
