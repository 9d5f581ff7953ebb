"""The stages of a network: plain functions of one block, and how they are run for many.

Conventions.  A stage takes a block, its statistics or its operator, and further arguments,
and returns new statistics, an operator or a product; it modifies no argument.
`update_block` and `refresh_block` are K-FAC's two lines (Martens and Grosse, 2015,
Algorithm 2): running averages of the factors, and their damped inverses.

A network is a loop over blocks.  An `Executor` runs that loop: in turn (`plain`), as stacks
of equal blocks, on threads, or on several processes.  A `Stage` is the function together
with the properties that an executor needs.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar, get_args

from kfac_core import constraints, errors
from kfac_core.approximations import admission
from kfac_core.approximations.approximation import MomentStart
from kfac_core.approximations.options import (
    OperatorOptions,
    RefreshOptions,
    UpdateOptions,
)
from kfac_core.array import Array, Check, Namespace, Scalar, finite, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.precision import Precision
from kfac_core.array.structure import static_fields, without_scalars
from kfac_core.block import BatchLike, Block, Vector
from kfac_core.conventions import Conventions
from kfac_core.damping import require_damping
from kfac_core.factors.average import require_decay, require_weight
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.feeding import detached_array, detached_arrays, raise_for_flags
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.rows import Batch
from kfac_core.linalg.factorizations import Factorization
from kfac_core.operators.operator import VECTOR_PRODUCTS, CurvatureOperator
from kfac_core.options import RANGES

LazyMoments: TypeAlias = Callable[[Statistics | None], Statistics]
"""A function of a block's statistics that returns the moments of a batch."""

Refreshed: TypeAlias = tuple[CurvatureOperator, Scalar] | errors.KFACError
"""An operator and its damping, or the error of a failed factorization."""


# Stages.


def update_block(
    block: Block,
    statistics: Statistics,
    batch: BatchLike,
    options: UpdateOptions,
    /,
    *,
    name: str = "block",
) -> Statistics:
    """Return a block's statistics after ``sum <- decay sum + weight C``, C of the batch.

    Parameters
    ----------
    block : Block
        Layer and approximation.
    statistics : Statistics
        Old statistics; not modified.
    batch : Batch, GradientBatch or sequence of Batch
        Inputs and output gradients; a sequence holds several uses in each example.
    options : UpdateOptions
        Conventions, decay and weight, and how failures are reported.
    name : str
        Name of the block in error messages.

    Returns
    -------
    Statistics
        New statistics; equal to the old ones where ``status`` is not zero.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, DecayError
        For incompatible arguments, in either mode.
    NotFiniteError, IdRangeError
        For rows that are not finite, or ids out of range (``check="raise"``).
    """
    if not options.deferred:
        admission.require_options(options)
    entered, flags = admission.entering_options(options, statistics)
    xp = entered.xp
    if options.max_patch_elements is not None:
        new, status = _updated_in_chunks(block, statistics, batch, entered)
        flags = flags | status
    else:
        rows = block.rows(batch)
        admission.require_place(statistics, rows)
        if isinstance(rows, IdRows):
            # An id out of range can crash a library, so replace it before it is used.
            rows, outside = rows.with_ids_inside(xp=xp)
            flags = flags | outside
        with finite.quiet(options.check, xp=xp):
            new = block.approximation.updated(statistics, rows, block.layer, entered)
            flags = admission.flags_of_update(
                flags, block.approximation, rows, new, entered
            )
    new = admission.with_status(new, flags)
    return new if options.deferred else _settled(new, statistics, options, name)


def _updated_in_chunks(
    block: Block, statistics: Statistics, batch: BatchLike, options: UpdateOptions
) -> tuple[Statistics, Array | int]:
    """Return the statistics after a batch that is read in chunks, and its flags."""
    chunks = block.row_parts(batch, max_patch_elements=options.max_patch_elements)
    total, flags = _sum_of_chunks(block, statistics.emptied(), chunks, options)
    approximation = block.approximation
    new = statistics.absorbed(
        total, decay=options.decay, weight=options.weight, decays=approximation.decays
    )
    return new, admission.overflow_flags(flags, approximation, new, options)


def _sum_of_chunks(
    block: Block, empty: Statistics, chunks: Iterator[Any], options: UpdateOptions
) -> tuple[Statistics, Array | int]:
    """Return the statistics of chunks of rows together, and the flags of the rows."""
    xp = options.xp
    # Weighted by its number of rows, so that merged chunks equal the whole batch.
    alone = replaced(options, decay=0.0, weight=None)
    total: Statistics | None = None
    flags: Array | int = 0
    for chunk in chunks:
        admission.require_place(empty, chunk)
        rows = chunk
        if isinstance(rows, IdRows):
            rows, outside = rows.with_ids_inside(xp=xp)
            flags = flags | outside
        flags = flags | rows.status(xp=xp)
        with finite.quiet(options.check, xp=xp):
            part = block.approximation.updated(empty, rows, block.layer, alone)
            total = part if total is None else total.merged(part)
        # Otherwise the variables keep this chunk alive while the next one is computed.
        del chunk, rows
    assert total is not None
    return total, flags


def _settled(
    new: Statistics, old: Statistics, options: UpdateOptions, name: str
) -> Statistics:
    """Return the new statistics; where they are flagged, raise or return the old ones."""
    if options.check == "status":
        return admission.accepted(new, old)
    raise_for_flags(int(new.status), name=name)
    return new


def batch_moments(
    block: Block,
    batch: BatchLike,
    /,
    *,
    conventions: Conventions,
    precision: Precision | None = None,
    statistics: Statistics | None = None,
    check: Check = "raise",
    max_patch_elements: int | None = None,
    name: str = "block",
) -> Statistics:
    """Return the statistics of one batch alone, weighted by its number of rows.

    Merged by `Statistics.merged` over micro-batches, or over the shards of a batch, they
    equal the statistics of the whole batch, in any order and for any sizes.  `absorb_block`
    adds them to running statistics.

    Parameters
    ----------
    block : Block
        Layer and approximation.
    batch : Batch or GradientBatch
        Inputs and output gradients of one part of a batch.
    conventions : Conventions
        Scaling of the output gradients.  With ``reduction="mean"``, N is the number of
        examples of this part.
    precision : Precision, optional
        Precision whose storage dtype is used.
    statistics : Statistics, optional
        Statistics that are to absorb these.  The second moments of `kfac_core.EKFAC`
        are taken in their bases, and in the coordinates without.
    check : {"raise", "status"}
        See `UpdateOptions`.
    max_patch_elements : int, optional
        See `UpdateOptions`.
    name : str
        Name of the block in error messages.

    Returns
    -------
    Statistics
        Statistics of the batch.

    Raises
    ------
    KFACError
        See `update_block`.
    """
    options = UpdateOptions(
        conventions, 0.0, None, check=check, max_patch_elements=max_patch_elements
    )
    admission.require_options(options)
    if precision is not None:
        constraints.require_kind("precision", precision, Precision, "Precision")
    chunks = block.row_parts(batch, max_patch_elements=max_patch_elements)
    first = next(chunks)
    empty = block.initial(first.like, precision=precision or Precision())
    if statistics is not None:
        if statistics.lacks_bases:
            raise errors.ConventionError(
                f"The rank that owns block {name!r} keeps its bases, in which second "
                "moments are taken. Pass `Estimator.absorb` a function of the "
                "block's statistics that returns `batch_moments(..., statistics=...)`."
            )
        # Moments of EKFAC exist in a basis only, and may be added up only in the same
        # one.
        empty = replaced(empty, bases=statistics.bases)
    xp = empty.namespace
    entered = replaced(options, xp=xp)
    chunks = itertools.chain([first], chunks)
    del first
    new, flags = _sum_of_chunks(block, empty, chunks, entered)
    with finite.quiet(check, xp=xp):
        flags = admission.overflow_flags(flags, block.approximation, new, entered)
    new = admission.with_status(new, flags)
    return without_scalars(_settled(new, empty, options, name))


def absorb_block(
    block: Block,
    statistics: Statistics,
    moments: Statistics,
    decay: Scalar,
    weight: Scalar = 1.0,
    /,
    *,
    name: str = "block",
) -> Statistics:
    """Return running statistics after one update with merged moments.

    Parameters
    ----------
    block : Block
        Layer and approximation.
    statistics : Statistics
        Statistics of the block; not modified.
    moments : Statistics
        Statistics from `batch_moments`.
    decay : float or 0-d array
        Factor on the old statistics, in [0, 1].
    weight : float or 0-d array
        Weight of the batch, positive.
    name : str
        Name of the block in error messages.

    Returns
    -------
    Statistics
        Statistics equal to those of one update with the whole batch.

    Raises
    ------
    DecayError
        For coefficients out of range.
    ConventionError
        For second moments in other bases.
    """
    require_decay(decay)
    require_weight(weight)
    constraints.require_kind("moments", moments, Statistics, "moments of a batch")
    xp, dtype = statistics.namespace, statistics.dtype
    return statistics.absorbed(
        moments,
        decay=ns.as_scalar(xp, decay, dtype, "decay"),
        weight=ns.as_scalar(xp, weight, dtype, "weight"),
        decays=block.approximation.decays,
    )


def rebase_block(
    block: Block,
    statistics: Statistics,
    moments: MomentStart,
    check: Check = "raise",
    /,
    *,
    overwrite: bool = False,
    name: str = "block",
) -> Statistics:
    """Return the statistics in the eigenbases of their current factors.

    Parameters
    ----------
    block : Block
        Block whose approximation ``has_bases``.
    statistics : Statistics
        Statistics of the block; not modified.
    moments : {"kronecker", "carried", "zero"}
        How the second moments start; see `kfac_core.EKFAC.rebased`.
    check : {"raise", "status"}
        Whether a failed eigendecomposition raises, or keeps the old bases and sets a flag.
    overwrite : bool
        Whether to work in the memory of the factors, which holds them again afterwards.
    name : str
        Name of the block in error messages.

    Returns
    -------
    Statistics
        Statistics in new bases.

    Raises
    ------
    NotFiniteError, FactorizationError
        If a factor has no certified basis (``check="raise"``).
    """
    constraints.require_one_of("moments", moments, get_args(MomentStart))
    constraints.require_check(check)
    new = block.approximation.rebased(
        statistics, block.layer, moments=moments, check=check, overwrite=overwrite
    )
    return without_scalars(new)


def operator_of(
    block: Block,
    statistics: Statistics,
    options: RefreshOptions,
    /,
    *,
    name: str = "block",
) -> CurvatureOperator:
    """Return the curvature operator of a block's current statistics.

    Parameters
    ----------
    block : Block
        Layer and approximation.
    statistics : Statistics
        Statistics of the block; not modified, and not referenced by the operator.
    options : RefreshOptions
        Damping and its rule, factorizations to prepare, and dtypes.
    name : str
        Name of the block in error messages.

    Returns
    -------
    CurvatureOperator
        An immutable snapshot.

    Raises
    ------
    ConventionError
        For an unknown rule or factorization.
    DampingError
        For a damping that is negative or not finite.
    NotFiniteError, FactorizationError
        If a factor cannot be factorized (``check="raise"``).
    """
    _require_refresh_options(options)
    refreshed = refresh_block(block, statistics, options, name=name)
    if isinstance(refreshed, errors.KFACError):
        raise refreshed
    return refreshed[0]


def refresh_block(
    block: Block,
    statistics: Statistics,
    options: RefreshOptions,
    /,
    *,
    name: str = "block",
) -> Refreshed:
    """Return a block's operator and its damping, or the error of a failed factorization.

    The error is returned and not raised, so that the other blocks are refreshed.  See
    `operator_of` for the parameters.
    """
    like, damping = statistics.like, options.damping
    xp = ns.own_namespace(like)
    compute = apply = like.dtype
    if options.precision is not None:
        compute, apply = options.precision.dtypes(like.dtype, xp=xp)
    # A stack must not raise for one of its blocks: the executor reads its flags, once.
    check: Check = "status" if statistics.status.ndim else options.check
    factorizations = options.factorizations
    if options.solving == "triangular":
        # Triangular solves replace the inverse; the same factorization twice is one.
        swapped = ["cholesky" if f == "inverse" else f for f in factorizations]
        factorizations = tuple(dict.fromkeys(swapped))
    made_with = OperatorOptions(
        damping=_entering_damping(damping, like, (compute, apply), check, name, xp),
        rule=options.rule,
        debias=options.debias,
        factorizations=factorizations,
        check=check,
        compute=compute,
        apply=apply,
        name=name,
        xp=xp,
        least_shift=options.least_shift,
        keep_matrices=options.keep_matrices,
    )
    approximation, layer = block.approximation, block.layer
    try:
        with finite.quiet(check, xp=xp):
            if options.damping_scaling == "mean_eigenvalue":
                # The trace without damping is the same for any, and the moments of a
                # series may be singular without.
                bare = made_with._replace(factorizations=(), keep_matrices=True)
                undamped = approximation.operator(statistics, layer, bare)
                # Relative damping: trace / dimension is the mean eigenvalue, which
                # scales as the loss does.
                damping = damping * undamped.trace(damped=False) / undamped.shape[0]
                dtypes = compute, apply
                scaled = _entering_damping(damping, like, dtypes, check, name, xp)
                made_with = made_with._replace(damping=scaled)
            operator = approximation.operator(statistics, layer, made_with)
    except (errors.FactorizationError, errors.NotFiniteError) as error:
        # Returned and not raised, so that the other blocks are refreshed.
        return error
    if options.solving != "inverse":
        operator = operator.solved_by(options.solving)
    return without_scalars(operator), damping


@dataclass(frozen=True)
class ProductCall:
    """A product of operators with its arguments.

    Parameters
    ----------
    product : str
        A method of `CurvatureOperator` that takes and returns a vector.
    arguments : tuple
        Further positional arguments of the product.
    options : mapping of str to object
        Keyword arguments of the product.
    """

    product: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @staticmethod
    def of(
        product: str, arguments: tuple[Any, ...], options: Mapping[str, Any], /
    ) -> ProductCall:
        """Return a call of a product, or raise `ConventionError`."""
        # Products without arguments are made once, below.
        if type(product) is not str or product not in _CALLS:
            constraints.require_one_of("product", product, VECTOR_PRODUCTS)
        if arguments or options or product == "multiply_matpower":
            signature = inspect.signature(getattr(CurvatureOperator, product))
            try:
                signature.bind(None, None, *arguments, **options)
            except TypeError as error:
                further = ", ".join([*signature.parameters][2:]) or "nothing"
                raise errors.ConventionError(
                    f"apply({product!r}, vectors, ...): {error}; besides vectors it takes "
                    f"{further}."
                ) from None
        if arguments or options:
            return ProductCall(product, arguments, options)
        return _CALLS[product]


_CALLS = {name: ProductCall(name) for name in VECTOR_PRODUCTS}


def apply_block(
    block: Block,
    operator: CurvatureOperator,
    parameters: Mapping[str, Any],
    call: ProductCall,
    /,
    *,
    name: str = "block",
) -> dict[str, Any]:
    """Return a product of a block's operator with parameter-shaped arrays.

    Parameters
    ----------
    block : Block
        Layer and approximation.
    operator : CurvatureOperator
        Operator of the block.
    parameters : mapping of str to array
        Vector by parameter.
    call : ProductCall
        The product and its arguments.
    name : str
        Name of the block in error messages.

    Returns
    -------
    dict of str to array
        The product, in the same form.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For arrays of incompatible shape, dtype, library or device.
    """
    # The exact type first: `isinstance` of an abstract class takes microseconds.
    if type(parameters) is not dict:
        constraints.require_kind(
            f"vectors[{name!r}]", parameters, Mapping, "a mapping of arrays"
        )
    vector = block.layer.parameters_to_matrix(detached_arrays(parameters))
    product = getattr(operator, call.product)(vector, *call.arguments, **call.options)
    return block.layer.matrix_to_parameters(product)


Bound: TypeAlias = Callable[[Mapping[str, Any]], tuple[dict[str, Any], Array]]
"""``V -> (P V, V . P V)`` of a block's parameters, with the inverse P."""


def bound_inverse(block: Block, operator: CurvatureOperator, /) -> Bound:
    """Return a block's product with an inverse, of arrays without graphs.

    As `apply_block`, but what the operator decides for all vectors is asked once.
    """
    layer, multiply = block.layer, operator.bound_inverse()

    def product(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], Array]:
        U, size = multiply(layer.parameters_to_matrix(parameters))
        return layer.matrix_to_parameters(U), size

    return product


def apply_bound(
    block: Block,
    bound: Bound,
    parameters: Mapping[str, Any],
    call: ProductCall,
    /,
    *,
    name: str = "block",
) -> tuple[dict[str, Any], Array]:
    """Return a block's product by `bound_inverse`."""
    return bound(parameters)


def prepare_block(
    block: Block,
    operator: CurvatureOperator,
    factorization: Factorization,
    /,
    *,
    name: str = "block",
) -> CurvatureOperator:
    """Return a block's operator with one more factorization prepared."""
    return without_scalars(operator.prepared(factorization, name=name))


# Checks.


def _require_refresh_options(options: RefreshOptions) -> None:
    """Raise for options of a refresh that a caller wrote and no network has checked."""
    constraints.require_kind("options", options, RefreshOptions, "RefreshOptions")
    fields = static_fields(options)
    constraints.require_options(fields, **{name: RANGES[name] for name in fields})


def _entering_damping(
    damping: Scalar,
    like: Array,
    dtypes: tuple[object, object],
    check: Check,
    name: str,
    xp: Namespace,
) -> Scalar:
    """Return a damping in a dtype; reads the value of a 0-d array if it is to raise.

    `dtypes` are those of computing and of applying.
    """
    require_damping(damping)
    compute, apply = dtypes
    # Denormal dampings lose digits, and some devices flush them to zero; zero itself is
    # legal.
    smallest = ns.smallest_normal_of(compute, xp=xp)
    if apply != compute:
        smallest = max(smallest, ns.smallest_normal_of(apply, xp=xp))
    if isinstance(damping, ns.NUMBER):
        entered = value = float(damping)
    else:
        entered = ns.as_scalar(xp, damping, compute, "damping")
        ns.same_place(statistics=like, damping=damping)
        if check == "status":
            good = (damping <= 0) | (damping >= smallest)
            # A traced damping cannot raise: NaN is flagged at the refresh, as invalid.
            return xp.where(good, entered, xp.full_like(entered, xp.nan))
        value = float(detached_array(damping))
        require_damping(value, name=f"damping` of block `{name}")
    if 0.0 < value < smallest:
        raise errors.DampingError(
            f"Expected `damping` to be zero or at least {smallest:.1e}, the smallest "
            f"number of the operator's dtypes with all its digits, got {value}. Take "
            'Precision(compute="float64", apply="float64").'
        )
    return entered


# Properties of stages that executors use.


def _factor_sizes(block: Block, /) -> int:
    """Return how many numbers a block's factors hold: the work of an update."""
    n, m = block.layer.matrix_shape
    return n * n + m * m


def _factorization_flops(block: Block, /) -> int:
    """Return about how many flops it takes to factorize a block's factors."""
    n, m = block.layer.matrix_shape
    return n**3 + m**3


def _product_flops(block: Block, /) -> int:
    """Return how many flops a product with two full factors takes."""
    n, m = block.layer.matrix_shape
    return 2 * n * m * (n + m)


def _updates_stack(
    block: Block, statistics: Statistics, batch: BatchLike, options: UpdateOptions, /
) -> bool:
    return (
        options.max_patch_elements is None
        and not options.skip
        and isinstance(batch, Batch)
        and batch.mask is None
        and batch.bias is None
    )


def _refreshes_stack(
    block: Block, statistics: Statistics, options: RefreshOptions, /
) -> bool:
    return (
        options.check == "raise"
        and options.rule != "exact"
        and options.damping_scaling == "none"
    )


def _products_stack(
    block: Block, operator: CurvatureOperator, parameters: object, call: ProductCall, /
) -> bool:
    return call.product == "multiply_inverse"


def _never(*_: object) -> bool:
    return False


def _always(_: object, /) -> bool:
    return True


def _operator_is_good(refreshed: Any, /) -> bool:
    return not bool(refreshed[0].status())


def _statistics_are_good(statistics: Statistics, /) -> bool:
    return not bool(statistics.status)


Result = TypeVar("Result")
"""Result of a stage for one block."""


@dataclass(frozen=True)
class Stage(Generic[Result]):
    """A function of one block, its results, and the properties that executors use.

    Attributes
    ----------
    name : str
        Name of the stage.
    run : callable
        ``run(block, *arguments, name=...)`` of one task.
    arrays : int
        Number of arguments after the block that hold arrays of the block, which are
        stacked for equal blocks; the others must be equal for all blocks of a stack.
    work : callable of Block
        Approximate flops of one task, or the numbers that it reads.
    on_host : bool
        Whether NumPy may compute for a library that shares its memory.
    is_product : bool
        Whether its work is products of matrices, counted in flops.
    bind : callable, optional
        ``bind(block, operator)``, for vectors that are `HostViews`: returns what `run`
        takes in the place of the operator.
    worth_threads : int
        Least work for which threads pay.
    keeps_stacks : bool
        Whether the stack of the first argument is kept for the next call.
    stacks : callable
        Whether a task may be run in a stack, of a block that ``stacks``.
    accepts : callable
        Whether the result of a stack is free of flags; if not, its tasks run one by one.
        Synchronizes with the device.
    """

    name: str
    run: Callable[..., Result]
    arrays: int
    work: Callable[[Block], int]
    on_host: bool = False
    is_product: bool = False
    bind: Callable[[Block, CurvatureOperator], Bound] | None = None
    worth_threads: int = 0
    keeps_stacks: bool = False
    stacks: Callable[..., bool] = _never
    accepts: Callable[[Result], bool] = _always


UPDATE = Stage(
    "update",
    update_block,
    2,
    _factor_sizes,
    on_host=True,
    keeps_stacks=True,
    stacks=_updates_stack,
)
ABSORB = Stage("absorb", absorb_block, 2, _factor_sizes)
REBASE = Stage(
    "rebase", rebase_block, 1, _factorization_flops, accepts=_statistics_are_good
)
REFRESH = Stage(
    "refresh",
    refresh_block,
    1,
    _factorization_flops,
    on_host=True,
    keeps_stacks=True,
    stacks=_refreshes_stack,
    accepts=_operator_is_good,
)
APPLY = Stage(
    "product",
    apply_block,
    2,
    _product_flops,
    on_host=True,
    is_product=True,
    # Products shorter than this many flops take less time than handing them to threads.
    worth_threads=10**9,
    keeps_stacks=True,
    stacks=_products_stack,
)
INVERSE_OF_VIEWS: Stage[tuple[dict[str, Any], Array]] = Stage(
    **{**vars(APPLY), "run": apply_bound, "bind": bound_inverse}
)
PREPARE = Stage("prepare", prepare_block, 1, _factorization_flops)


# Executors.

Task: TypeAlias = tuple[Any, ...]
"""A block and the further arguments of a stage."""

Tasks: TypeAlias = Mapping[str, Task]
"""Tasks of a stage by block."""


class HostViews(dict[str, dict[str, Array]]):
    """A vector by block and parameter in NumPy, on the memory of another library.

    Attributes
    ----------
    size : float
        Of products, the inner product with the vector.
    """

    size: float = math.nan


class Executor:
    """Runs a stage for several blocks; the base class of all executors.

    ``executor(stage, tasks)`` returns, by name, what ``stage.run(*task, name=name)``
    returns for each task, up to rounding.  Executors differ in how: as stacks, on threads,
    in another library, or on several processes.

    Attributes
    ----------
    share : tuple of int or None
        Rank and number of processes, for an executor of one of several; see `NetworkState`.
    updates_all : bool
        Whether an update has a task for every block, with None for statistics and batch
        where there are none.  The executor may then return only some of them.
    """

    share: tuple[int, int] | None = None
    updates_all: bool = False

    def __call__(self, stage: Stage[Result], tasks: Tasks, /) -> dict[str, Result]:
        """Return the result of a stage for each task, by name."""
        raise NotImplementedError

    def to_update(
        self, by_block: dict[str, Any], blocks: Mapping[str, Block], /
    ) -> dict[str, Any]:
        """Return values by block, with None for missing blocks if all are updated."""
        # Another process may have rows of a block without rows here.
        if self.updates_all:
            return {name: by_block.get(name) for name in blocks}
        return by_block

    def viewed(self, vectors: Vector, /) -> Vector:
        """Return `HostViews` of vectors where NumPy is to compute their products."""
        return vectors

    def tell(self, error: Exception, /, *, product: bool = False) -> NoReturn:
        """Raise an error that this process cannot begin a stage for, on all processes.

        Parameters
        ----------
        error : Exception
            Exception that was raised on this process.
        product : bool
            Whether the stage is a product, and not an update.
        """
        raise error


EXECUTOR = constraints.implementation_of(Executor)
"""The constraint of options that are executors."""


class _Plain(Executor):
    """Runs a stage for each block in turn."""

    def __call__(self, stage: Stage[Result], tasks: Tasks, /) -> dict[str, Result]:
        results: dict[str, Result] = {}
        for name, task in tasks.items():
            try:
                results[name] = stage.run(*task, name=name)
            except errors.KFACError as error:
                # Keep the exception, its attributes and its traceback; only name the block.
                error.args = (f"Block {name!r}: {error}", *error.args[1:])
                raise
        return results

    def __repr__(self) -> str:
        return "plain"

    def __reduce__(self) -> str:
        return "plain"


plain = _Plain()
"""The executor that defines the result: blocks in turn, with their names in errors."""
