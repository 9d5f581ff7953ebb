"""A block pairs a layer with an approximation; its functions are pure.

Conventions.  A block holds no arrays.  Its functions take statistics and return new
ones, or an operator, and modify no argument.  With ``check="status"`` they run inside
function compilers and vectorizing transforms: they read no value, an update with
non-finite rows leaves the statistics unchanged, and flags are returned as an array.

The stages of a network are loops over blocks of the four functions at the end of this
file.  Each is called with a name, a block and arguments, and describes itself to
executors: whether tasks can be stacked, and how much work they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, get_args

import array_api_compat
import numpy as np

from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array.backend import Array, Namespace, load_adapters
from kfac_core.array.finite import (
    all_finite,
    is_plain,
    known_finite,
    known_true,
    quiet,
    truth_of,
)
from kfac_core.array.namespaces import (
    NUMBER,
    Scalar,
    as_number,
    as_scalar,
    common_namespace,
    device_of,
    namespace_of,
    own_namespace,
    same_place,
    smallest_normal_of,
    status_unless,
    wide_dtype,
)
from kfac_core.array.place import Place
from kfac_core.array.precision import Precision
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import (
    is_structure,
    leaves,
    map_structure,
    replaced,
    without_scalars,
)
from kfac_core.constraints import (
    COUNT,
    NOT_NEGATIVE,
    implementation_of,
    require_check,
    require_flag,
    require_kind,
    require_one_of,
    require_options,
    require_range,
)
from kfac_core.conventions import Conventions
from kfac_core.damping import DampingRule, require_damping
from kfac_core.errors import (
    ConventionError,
    DampingError,
    DtypeError,
    FactorizationError,
    IdRangeError,
    KFACError,
    MixedArraysError,
    NotFiniteError,
    UnsupportedError,
)
from kfac_core.factors.average import Average, require_decay, require_weight
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.example_gradients import GradientBatch, require_known_rows
from kfac_core.layers.feeding import detached_array, raise_for_flags
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Batch, Rows, join_uses
from kfac_core.linalg.factorizations import Factorization, Solving
from kfac_core.linalg.symmetric import SymmetricMatrix, matrix_trace
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.operators.sparse_rows import SparseRows
from kfac_core.options import DampingScaling

__all__ = [
    "AbsorbBlock",
    "BatchLike",
    "Block",
    "Prepare",
    "Product",
    "Rebase",
    "RefreshBlock",
    "Stage",
    "UpdateBlock",
    "emptied",
]

BatchLike: TypeAlias = Batch | GradientBatch | Sequence[Batch] | Mapping[str, Any]
"""What a block takes: a batch, several uses of one layer, or a batch of each part."""

_FULL_PRECISION = Precision()


@dataclass(frozen=True)
class Block:
    """A layer paired with an approximation of its curvature.

    Parameters
    ----------
    layer : Layer
        Geometry of the layer, such as `Dense`: makes rows from batches, and a matrix from
        parameters.
    approximation : Approximation
        Approximation, such as `Kronecker`: which statistics are kept, and which operator
        is made from them.

    Raises
    ------
    UnsupportedError
        If the approximation does not support the layer; the message gives the reason.

    Examples
    --------
    >>> import kfac_core as kc
    >>> layer = kc.Dense(in_features=64, out_features=10, bias=True, weight_layout="io")
    >>> kfac, ekfac = kc.Block(layer, kc.Kronecker()), kc.Block(layer, kc.Eigen())
    """

    layer: Layer
    approximation: Approximation

    def __post_init__(self) -> None:
        require_options(
            self,
            layer=implementation_of(Layer),
            approximation=implementation_of(Approximation),
        )
        load_adapters()
        problem = self.approximation.problem_with(self.layer)
        if problem is not None:
            raise UnsupportedError(
                f"{type(self.approximation).__name__} for layers of kind "
                f"{self.layer.kind}: {problem}."
            )

    def initial(
        self, like: Array, /, *, precision: Precision = _FULL_PRECISION
    ) -> Statistics:
        """Return zero statistics in an array's library and on its device.

        Parameters
        ----------
        like : array
            Array of the library, such as a layer's inputs; its dtype, widened to
            float32 where it is narrower, is that of the statistics unless `precision`
            says another.
        precision : Precision
            Precision whose storage dtype is used.

        Returns
        -------
        Statistics
            Statistics that are zero throughout.
        """
        xp = namespace_of(like=like)
        dtype = precision.dtype(precision.storage, wide_dtype(xp, like.dtype), xp=xp)
        place = Place(xp, dtype, device_of(like))
        return self.approximation.initial(self.layer, place)

    def update(
        self,
        statistics: Statistics,
        batch: BatchLike,
        /,
        *,
        conventions: Conventions,
        decay: Scalar,
        weight: Scalar = 1.0,
        check: Check = "raise",
        name: str = "block",
        skip: frozenset[str] = frozenset(),
        max_patch_elements: int | None = None,
    ) -> Statistics:
        """Return the statistics after ``v <- decay v + weight C``, C of this batch.

        Parameters
        ----------
        statistics : Statistics
            Old statistics; not modified.
        batch : Batch, GradientBatch or sequence of Batch
            Inputs and output gradients; a sequence holds several uses in each example.
        conventions : Conventions
            Scaling of the output gradients.
        decay : float or 0-d array
            Factor on the old statistics, in [0, 1].
        weight : float or 0-d array
            Weight of this batch, positive.
        check : {"raise", "status"}
            ``"raise"`` raises on failure, and synchronizes with the device; ``"status"``
            sets the result's ``status``.
        name : str
            Name of the block in error messages.
        skip : frozenset of str
            Factors, ``"input"`` or ``"output"``, to leave unchanged because another block
            computes them.
        max_patch_elements : int, optional
            Bound on the number of elements of a convolution's patches.  The batch is
            processed in chunks of examples, with the same result.

        Returns
        -------
        Statistics
            New statistics; equal to the old ones where ``status`` is not zero.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError, DecayError
            For incompatible arguments, in either mode.
        NotFiniteError
            For rows that are not finite (``check="raise"``).
        """
        require_decay(decay)
        require_weight(weight)
        require_check(check)
        require_kind("conventions", conventions, Conventions, "Conventions")
        if max_patch_elements is not None:
            require_range("max_patch_elements", max_patch_elements, COUNT)
        update = UpdateBlock(conventions, max_patch_elements, check)
        new = update(name, self, statistics, batch, decay, weight, skip)
        if check == "status":
            return _accepted(new, statistics)
        raise_for_flags(int(new.status), name=name)
        return new

    def moments(
        self,
        batch: BatchLike,
        /,
        *,
        conventions: Conventions,
        precision: Precision = _FULL_PRECISION,
        check: Check = "raise",
        name: str = "block",
        statistics: Statistics | None = None,
    ) -> Statistics:
        """Return the statistics of one batch alone, weighted by its number of rows.

        Merged with `merge` over micro-batches, or over the shards of a batch, they equal
        the statistics of the whole batch, in any order and for any sizes.

        Parameters
        ----------
        batch : Batch or GradientBatch
            Inputs and output gradients of one part of a batch.
        conventions : Conventions
            Scaling of the output gradients.  With ``reduction="mean"``, N is the number of
            examples of this part.
        precision : Precision
            Precision whose storage dtype is used.
        check : {"raise", "status"}
            See `update`.
        name : str
            Name of the block in error messages.
        statistics : Statistics, optional
            Statistics that are to absorb these.  The second moments of `kfac_core.Eigen`
            are taken in their bases, and in the coordinates without.

        Returns
        -------
        Statistics
            Statistics for `merge` and `absorb`.

        Raises
        ------
        KFACError
            See `update`.
        """
        require_kind("conventions", conventions, Conventions, "Conventions")
        require_kind("precision", precision, Precision, "Precision")
        require_check(check)
        given = self.rows(batch)
        if statistics is None or not statistics.bases:
            empty = self.initial(given.like, precision=precision)
        else:
            _require_place(statistics.like, given.like)
            empty = emptied(statistics)
        xp = empty.namespace
        rows, outside = _with_ids_inside(given, xp)
        status = outside | rows.status(xp=xp)
        if check == "raise":
            raise_for_flags(int(status), name=name)
        options = UpdateOptions(conventions=conventions, decay=0.0, weight=None, xp=xp)
        with quiet(check, xp=xp):
            new = self.approximation.updated(empty, rows, self.layer, options)
            status = _with_overflow(status, self, new, options, ())
        if check == "raise":
            raise_for_flags(int(status), name=name)
        new = without_scalars(replaced(new, status=status))
        return new if check == "raise" else _accepted(new, empty)

    def merge(self, first: Statistics, second: Statistics, /) -> Statistics:
        """Return the statistics of both data sets together, taken in the same bases."""
        _require_bases(first, second)
        return without_scalars(first.merged(second))

    def absorb(
        self,
        statistics: Statistics,
        moments: Statistics,
        /,
        *,
        decay: Scalar,
        weight: Scalar = 1.0,
    ) -> Statistics:
        """Return running statistics after one update with merged moments.

        Parameters
        ----------
        statistics : Statistics
            Statistics of the block; not modified.
        moments : Statistics
            Statistics from `moments` and `merge`.
        decay, weight : float or 0-d array
            See `update`.

        Returns
        -------
        Statistics
            Statistics equal to those of one update with the whole batch.
        """
        require_decay(decay)
        require_weight(weight)
        require_kind("moments", moments, Statistics, "statistics from `moments`")
        xp, dtype = statistics.namespace, statistics.dtype
        decay = as_scalar(xp, decay, dtype, "decay")
        weight = as_scalar(xp, weight, dtype, "weight")
        _require_bases(statistics, moments)
        absorbed = statistics.absorbed(
            moments, decay=decay, weight=weight, decays=self.approximation.decays
        )
        return without_scalars(absorbed)

    def operator(
        self,
        statistics: Statistics,
        /,
        *,
        damping: Scalar,
        rule: DampingRule,
        least_shift: float = 0.0,
        debias: bool = True,
        keep_matrices: bool = True,
        factorizations: tuple[Factorization, ...] = ("inverse",),
        check: Check = "raise",
        solving: Solving = "inverse",
        precision: Precision = _FULL_PRECISION,
        name: str = "block",
        memo: dict[Any, Any] | None = None,
    ) -> CurvatureOperator:
        """Return the curvature operator of the current statistics.

        Parameters
        ----------
        statistics : Statistics
            Statistics of the block; not modified, and not referenced by the operator.
        damping : float or 0-d array
            Damping, finite and >= 0.
        rule : {"factored", "factored_unit_pi", "exact"}
            How the damping is applied: split between the factors, split evenly, or added to
            the block; see `kfac_core.damping`.
        least_shift : float
            The least number that a factored rule adds to a factor.
        debias : bool
            Whether sums are divided by their weights.
        keep_matrices : bool
            See `kfac_core.Refreshing`.
        factorizations : tuple of {"inverse", "cholesky", "eigenbasis"}
            Factorizations to prepare now; the rest are prepared when needed
            (``check="raise"`` only).
        check : {"raise", "status"}
            ``"raise"`` raises on failure, and synchronizes with the device; ``"status"``
            sets the operator's ``status()``.
        solving : {"inverse", "triangular"}
            Whether a factored block is solved with inverses of its factors, or with their
            Cholesky factors.
        precision : Precision
            Dtypes of computing and applying.
        name : str
            Name of the block in error messages.
        memo : dict, optional
            Cache for the operators of several blocks that share factors.

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
        require_one_of("rule", rule, get_args(DampingRule))
        require_range("least_shift", least_shift, NOT_NEGATIVE)
        require_kind("factorizations", factorizations, tuple, "a tuple of names")
        for factorization in factorizations:
            require_one_of("factorizations", factorization, get_args(Factorization))
        require_one_of("solving", solving, get_args(Solving))
        require_check(check)
        require_flag("debias", debias)
        require_flag("keep_matrices", keep_matrices)
        refresh = RefreshBlock(
            rule=rule,
            debias=debias,
            factorizations=factorizations,
            damping_scaling="none",
            precision=precision,
            check=check,
            memo=memo,
            least_shift=least_shift,
            keep_matrices=keep_matrices,
        )
        made = refresh(name, self, statistics, damping, solving)
        if isinstance(made, KFACError):
            raise made
        return made[0]

    def rebased(
        self, statistics: Statistics, /, *, moments: Any, check: Check = "raise"
    ) -> Statistics:
        """Return the statistics in the eigenbases of their current factors.

        For an approximation that ``has_bases``; see `kfac_core.Eigen.rebased`.
        """
        require_one_of("moments", moments, ("kronecker", "carried", "zero"))
        require_check(check)
        approximation: Any = self.approximation
        made: Statistics = approximation.rebased(
            statistics, moments=moments, check=check, layer=self.layer
        )
        return without_scalars(made)

    def rows(self, batch: BatchLike, /, *, stack: tuple[int, ...] = ()) -> Any:
        """Return the rows of a batch, from which statistics are computed.

        Parameters
        ----------
        batch : Batch, GradientBatch or sequence of Batch
            Batch of the layer; not modified.
        stack : tuple of int
            The shape of leading axes of a stack of batches, for a layer that ``stacks``.

        Returns
        -------
        Rows, IdRows, PixelRows or ExampleGradients
            Rows in the form that the layer and the approximation use; several uses become
            shared positions.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError, UnsupportedError
            For arrays of incompatible shape, dtype, library or device.
        """
        if stack:
            layer: Any = self.layer
            return layer.rows(batch, stack=stack)
        if is_structure(batch):
            return self.approximation.rows(self.layer, batch)
        if not isinstance(batch, list | tuple):
            # Only a layer of several parts has a batch for each of them.
            if not (isinstance(batch, dict) and hasattr(self.layer, "matrix_shapes")):
                what = "a `Batch`, a `GradientBatch` or a sequence of `Batch`"
                require_kind("batch", batch, Batch, what)
            return self.approximation.rows(self.layer, batch)
        uses = [self.approximation.rows(self.layer, use) for use in batch]
        if not uses or not all(isinstance(use, Rows) for use in uses):
            raise UnsupportedError(
                "Several uses of one layer need at least one `Batch` each, of a dense or "
                "conv layer."
            )
        return join_uses(uses)

    def mean_gradient(self, batch: BatchLike, /, *, conventions: Conventions) -> Array:
        """Return the mean gradient over the examples, summed over sources.

        Parameters
        ----------
        batch : Batch, GradientBatch or sequence of Batch
            Inputs and output gradients of the layer.
        conventions : Conventions
            Scaling of the output gradients.

        Returns
        -------
        array, shape (in(+1), out)
            ``1/N sum_mns x g^T`` for gradients of the summed loss.
        """
        rows = self.rows(batch)
        xp = array_api_compat.array_namespace(rows.like)
        rows, _ = _with_ids_inside(rows, xp)
        require_known_rows(rows, conventions.reduction)
        dtype = wide_dtype(xp, rows.like.dtype)
        scale = conventions.gradient_scale(
            examples=rows.examples, rows=rows.kept(dtype, xp=xp)
        )
        return rows.gradient_sum(dtype, xp=xp) * (scale / rows.examples)

    def parameters_to_matrix(self, parameters: Mapping[str, Array], /) -> Array:
        """Turn parameter-shaped arrays into the block's matrix ``(in(+1), out)``."""
        return self.layer.parameters_to_matrix(parameters)

    def matrix_to_parameters(self, matrix: Array, /) -> dict[str, Array]:
        """Turn a block's matrix back into parameter-shaped arrays."""
        return self.layer.matrix_to_parameters(matrix)

    @property
    def stacks(self) -> bool:
        """Whether equal blocks can be computed as one, with a leading axis."""
        layer: Any = self.layer
        return self.approximation.stacks and layer.groups == 1

    def row_parts(
        self, batch: BatchLike, /, *, max_patch_elements: int | None
    ) -> Iterator[Any]:
        """Yield `rows` of a batch, in chunks of examples where a budget is given.

        Parameters
        ----------
        batch : Batch, GradientBatch or sequence of Batch
            Batch of the layer; not modified.
        max_patch_elements : int or None
            See `update`; ignored without patches.

        Yields
        ------
        Rows, IdRows, PixelRows or ExampleGradients
            Rows of each chunk.

        Raises
        ------
        UnsupportedError
            For several uses of a convolution together with a budget.
        """
        layer: Any = self.layer
        patches = layer.kind == "conv" and self.approximation.reads_patches
        if max_patch_elements is None or not patches:
            yield self.rows(batch)
            return
        if isinstance(batch, list | tuple):
            raise UnsupportedError(
                "Several uses of a convolution are rows of one example, and are not read "
                "in chunks. Give a smaller batch, or no `max_patch_elements`."
            )
        yield from layer.row_chunks(batch, max_patch_elements=max_patch_elements)


class Stage:
    """What executors ask of a function of one block; by default it runs in a loop.

    Attributes
    ----------
    stage : str
        Name of the stage of a network.
    on_host : bool
        Whether NumPy may compute for a library that shares its memory.
    is_product : bool
        Whether its work is products of matrices, counted in flops.
    worth_threads : int
        How much work is worth handing out to threads.
    kept : tuple of int
        The arguments whose stacks are kept for the next call.
    """

    stage: ClassVar[str]
    on_host: ClassVar[bool] = False
    is_product: ClassVar[bool] = False
    worth_threads: ClassVar[int] = 0
    kept: ClassVar[tuple[int, ...]] = ()

    @property
    def shares(self) -> bool:
        """Whether parts that several tasks have in common are told by their identity."""
        return False

    def stacks(self, *_: Any) -> bool:
        """Whether equal tasks can be run as one, of a block that ``stacks``."""
        return False

    def accepts(self, result: Any, /) -> bool:
        """Whether the result of a stack is good; if not, its tasks run one by one."""
        return True

    def work(self, block: Block, /, *_: Any) -> int:
        """Return about how many flops a block takes, in any unit: a factorization's."""
        n, m = block.layer.matrix_shape
        return n**3 + m**3


@dataclass(frozen=True)
class UpdateBlock(Stage):
    """The function of one block that `Network.update` runs for each.

    Parameters
    ----------
    conventions : Conventions
        How output gradients are scaled.
    max_patch_elements : int or None
        See `Block.update`.
    check : {"raise", "status"}
        Whether the caller reads the flags immediately.
    """

    conventions: Conventions
    max_patch_elements: int | None
    check: Check

    stage = "update"
    on_host = True
    kept = (1,)

    def __call__(
        self,
        name: str,
        block: Block,
        statistics: Statistics,
        batch: BatchLike,
        decay: Scalar,
        weight: Scalar | None,
        skip: frozenset[str],
        /,
        *,
        stack: tuple[int, ...] = (),
    ) -> Statistics:
        """Return the statistics after an update, before their status is read.

        Parameters
        ----------
        name, block : str, Block
            What is updated.
        statistics, batch, decay, weight, skip
            See `Block.update`.  A weight of None is the batch's number of rows, or of
            examples; see `UpdateOptions`.
        stack : tuple of int
            The shape of leading axes that all arrays have in common: as many equal
            blocks, updated together.

        Returns
        -------
        Statistics
            With a status; where that is not zero, the old statistics are to be kept.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError, DecayError
            For incompatible arguments.
        """
        like = statistics.like
        xp = own_namespace(like)
        flags = as_number(statistics.status) * 0
        if type(decay) is not float or type(weight) is not float:
            decay = as_scalar(xp, decay, like.dtype, "decay")
            given = as_scalar(
                xp, 1.0 if weight is None else weight, like.dtype, "weight"
            )
            weight = None if weight is None else given
            if not (isinstance(decay, float) and isinstance(given, float)):
                flags = flags | _coefficient_flags(decay, given, like, xp)
        options = UpdateOptions(
            conventions=self.conventions, decay=decay, weight=weight, skip=skip, xp=xp
        )
        if self.max_patch_elements is not None:
            new, status = self._by_parts(block, statistics, batch, options)
            return _with_status(new, flags | status)
        rows = block.rows(batch, stack=stack) if stack else block.rows(batch)
        _require_place(like, rows.like)
        if isinstance(rows, IdRows):
            rows, outside = rows.with_ids_inside(xp=xp)
            flags = flags | outside
        with quiet(self.check, xp=options.xp):
            new = block.approximation.updated(statistics, rows, block.layer, options)
            flags = _finite_status(flags, block, rows, new, options, stack)
        return _with_status(new, flags)

    def _by_parts(
        self,
        block: Block,
        statistics: Statistics,
        batch: BatchLike,
        options: UpdateOptions,
    ) -> tuple[Statistics, Any]:
        """Return the statistics after a batch that is read in parts, and its flags."""
        parts = block.row_parts(batch, max_patch_elements=self.max_patch_elements)
        alone = options._replace(decay=0.0, weight=None)
        empty = emptied(statistics)
        total: Statistics | None = None
        status: Any = 0
        for given in parts:
            _require_place(statistics.like, given.like)
            rows, outside = _with_ids_inside(given, options.xp)
            status = status | outside | rows.status(xp=options.xp)
            with quiet(self.check, xp=options.xp):
                part = block.approximation.updated(empty, rows, block.layer, alone)
                total = part if total is None else total.merged(part)
            # Otherwise the variables keep this chunk alive while the next one is made.
            del given, rows
        assert total is not None
        if options.weight is None:
            return statistics.merged(total), status
        new = statistics.absorbed(
            total,
            decay=options.decay,
            weight=options.weight,
            decays=block.approximation.decays,
        )
        return new, _with_overflow(status, block, new, options, ())

    def stacks(
        self,
        block: Block,
        statistics: Statistics,
        batch: Any,
        decay: Scalar,
        weight: Scalar | None,
        skip: frozenset[str],
        /,
    ) -> bool:
        """Whether equal tasks can be run as one; see `Stage.stacks`."""
        layer: Any = block.layer
        return (
            layer.stacks
            and self.max_patch_elements is None
            and not skip
            and isinstance(batch, Batch)
            and batch.mask is None
            and batch.row_indices is None
            and batch.bias is None
        )

    def work(self, block: Block, /, *_: Any) -> int:
        """Return how many numbers the block's factors hold."""
        n, m = block.layer.matrix_shape
        return n * n + m * m


@dataclass(frozen=True)
class AbsorbBlock(Stage):
    """The function of one block that `Network.absorb` runs for each."""

    stage = "absorb"
    kept = (1,)

    def __call__(
        self,
        name: str,
        block: Block,
        statistics: Statistics,
        moments: Statistics,
        decay: Scalar,
        weight: Scalar,
        /,
    ) -> Statistics:
        """Return the statistics after an update with merged moments."""
        return block.absorb(statistics, moments, decay=decay, weight=weight)

    def work(self, block: Block, /, *_: Any) -> int:
        """Return how many numbers the block's factors hold."""
        n, m = block.layer.matrix_shape
        return n * n + m * m


@dataclass(frozen=True)
class Prepare(Stage):
    """The function of one block that prepares a factorization of its operator.

    Parameters
    ----------
    factorization : {"inverse", "cholesky", "eigenbasis"}
        What is prepared.
    """

    factorization: Factorization

    stage = "prepare"

    def __call__(
        self, name: str, block: Block, operator: CurvatureOperator, /
    ) -> CurvatureOperator:
        """Return the operator with the factorization."""
        return without_scalars(operator.prepared(self.factorization, name=name))


@dataclass(frozen=True)
class Rebase(Stage):
    """The function of one block that `Network.rebase` runs for each.

    Parameters
    ----------
    moments : {"kronecker", "carried", "zero"}
        See `kfac_core.Eigen.rebased`.
    check : {"raise", "status"}
        Whether a failed eigendecomposition raises.
    """

    moments: Any
    check: Check

    stage = "rebase"

    def __call__(
        self, name: str, block: Block, statistics: Statistics, /
    ) -> Statistics:
        """Return the statistics in new bases."""
        return block.rebased(statistics, moments=self.moments, check=self.check)

    def accepts(self, result: Statistics, /) -> bool:
        """Whether no basis is flagged; synchronizes with the device."""
        return not bool(result.status)


@dataclass(frozen=True)
class RefreshBlock(Stage):
    """The function of one block that `Network.refresh` runs for each.

    Parameters
    ----------
    rule, debias, factorizations, precision, check
        See `Block.operator`.
    damping_scaling : {"none", "mean_eigenvalue"}
        See `kfac_core.Refreshing`.
    memo : dict or None
        Cache for blocks that share a factor; None where none do.
    least_shift, keep_matrices
        See `kfac_core.Refreshing`.
    """

    rule: DampingRule
    debias: bool
    factorizations: tuple[Factorization, ...]
    damping_scaling: DampingScaling
    precision: Precision
    check: Check
    memo: dict[Any, Any] | None = field(default=None, compare=False)
    least_shift: float = 0.0
    keep_matrices: bool = True

    stage = "refresh"
    on_host = True
    kept = (1,)

    @property
    def shares(self) -> bool:
        """Whether parts that several tasks have in common are told by their identity."""
        return self.memo is not None

    def __call__(
        self,
        name: str,
        block: Block,
        statistics: Statistics,
        damping: Scalar,
        solving: Solving,
        /,
        *,
        stack: tuple[int, ...] = (),
    ) -> tuple[CurvatureOperator, Scalar] | KFACError:
        """Return the operator and its damping, or the error of a failed factorization.

        The error is returned and not raised, so that the other blocks are refreshed.
        """
        like, layer = statistics.like, block.layer
        xp = own_namespace(like)
        compute, apply = self.precision.dtypes(like.dtype, xp=xp)
        # The flags of a stack are read once, by `accepts`.
        check: Check = "status" if stack else self.check
        factorizations = self.factorizations
        if solving == "triangular":
            swapped = ["cholesky" if f == "inverse" else f for f in factorizations]
            factorizations = tuple(dict.fromkeys(swapped))
        options = OperatorOptions(
            damping=_checked_damping(damping, like, (compute, apply), check, name, xp),
            rule=self.rule,
            debias=self.debias,
            factorizations=factorizations,
            check=check,
            compute=compute,
            apply=apply,
            name=name,
            memo=None if stack else self.memo,
            xp=xp,
            least_shift=self.least_shift,
            keep_matrices=self.keep_matrices,
        )
        make = block.approximation.operator
        try:
            with quiet(check, xp=xp):
                if self.damping_scaling == "mean_eigenvalue":
                    bare = options._replace(
                        damping=0.0, factorizations=(), keep_matrices=True
                    )
                    undamped = make(statistics, layer, bare)
                    mean = undamped.trace(damped=False) / undamped.shape[0]
                    damping = damping * mean
                    dtypes = compute, apply
                    own = _checked_damping(damping, like, dtypes, check, name, xp)
                    options = options._replace(damping=own)
                operator = make(statistics, layer, options)
        except (FactorizationError, NotFiniteError) as error:
            return error
        if solving != "inverse":
            operator = operator.solved_by(solving)
        return without_scalars(operator), damping

    def stacks(
        self, block: Block, statistics: Statistics, damping: Scalar, solving: Solving, /
    ) -> bool:
        """Whether equal tasks can be run as one; see `Stage.stacks`."""
        return (
            self.check == "raise"
            and self.rule != "exact"
            and self.damping_scaling == "none"
        )

    def accepts(self, result: Any, /) -> bool:
        """Whether no operator of a stack is flagged; synchronizes with its device."""
        return not bool(result[0].status())


@dataclass(frozen=True)
class Product(Stage):
    """The function of one block that `Network.apply` runs for each.

    Parameters
    ----------
    product : str
        A method of `CurvatureOperator` that takes and returns a vector.
    arguments : tuple
        What the product takes besides the vector.
    options : mapping of str to object
        Keyword arguments of the product.
    """

    product: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    stage = "product"
    on_host = True
    is_product = True
    worth_threads = 10**9
    kept = (1,)

    def __call__(
        self,
        name: str,
        block: Block,
        operator: CurvatureOperator,
        parameters: Mapping[str, Any],
        /,
        *,
        stack: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        """Return the product with parameter-shaped arrays, in the same form."""
        if type(parameters) is not dict:
            require_kind(
                f"vectors[{name!r}]", parameters, Mapping, "a mapping of arrays"
            )
        weight = parameters.get("weight")
        if isinstance(weight, SparseRows):
            _require_ids(weight.indices, operator)
            restricted: Any = operator
            small = restricted.at_rows(weight.indices)
            rows = detached_array(weight.rows)
            product = getattr(small, self.product)(
                rows, *self.arguments, **self.options
            )
            return {"weight": SparseRows(weight.indices, product)}
        given: dict[str, Any] = {}
        for key, x in parameters.items():
            given[key] = detached_array(x)
        layer: Any = block.layer
        options: Any = {"stack": stack} if stack else {}
        vector = layer.parameters_to_matrix(given, **options)
        result = getattr(operator, self.product)(
            vector, *self.arguments, **self.options
        )
        made: dict[str, Any] = layer.matrix_to_parameters(result, **options)
        return made

    def stacks(
        self, block: Block, operator: CurvatureOperator, parameters: Any, /
    ) -> bool:
        """Whether equal tasks can be run as one; see `Stage.stacks`."""
        layer: Any = block.layer
        return self.product == "multiply_inverse" and bool(layer.stacks)

    def work(self, block: Block, /, *_: Any) -> int:
        """Return how many flops a product with two full factors takes."""
        n, m = block.layer.matrix_shape
        return 2 * n * m * (n + m)


def _require_ids(indices: Array, operator: CurvatureOperator, /) -> None:
    """Raise for `SparseRows.indices` that are no ids, as far as the host can read them."""
    xp, count = namespace_of(indices=indices), operator.vector_shape[0]
    if not xp.isdtype(indices.dtype, "integral") or indices.ndim != 1:
        raise DtypeError(
            "Expected `indices` of `SparseRows` to be integer ids of shape (k,), got "
            f"{indices.dtype} of shape {tuple(indices.shape)}."
        )
    inside = (indices >= 0) & (indices < count)
    if is_plain(indices, xp=xp) and not known_true(inside, xp=xp):
        raise IdRangeError(
            f"Expected `indices` of `SparseRows` from 0 to {count - 1}, got ids that are "
            "negative, or not below the number of embeddings."
        )


def _with_status(statistics: Statistics, status: Any) -> Statistics:
    """Return statistics with other flags, and 0-d arrays in place of NumPy scalars."""
    averages = statistics.averages
    if isinstance(status, (np.generic, np.ndarray)):
        # NumPy operations return scalars for 0-d arrays; a state holds arrays only.
        status = np.asarray(status)
        for held in averages.values():
            plain = type(held) is Average and not isinstance(held.sum, np.generic)
            if not plain or isinstance(held.weight, np.generic):
                averages = map_structure(np.asarray, averages)
                break
    return replaced(statistics, averages=averages, status=status)


def _with_ids_inside(rows: Any, xp: Namespace) -> tuple[Any, Any]:
    """Return rows whose ids, if they have any, are in range, and a flag of what was not."""
    return rows.with_ids_inside(xp=xp) if isinstance(rows, IdRows) else (rows, 0)


def _require_place(held: Array, given: Array) -> None:
    """Raise if a batch and the statistics differ in library or device."""
    if common_namespace(held, given) is not None:
        return
    try:
        namespace_of(statistics=held, batch=given)
    except MixedArraysError as error:
        raise MixedArraysError(
            f"{error} (The statistics stay where their first batch was.)"
        ) from None


def _finite_status(
    earlier: Any,
    block: Block,
    rows: Any,
    new: Statistics,
    options: UpdateOptions,
    stack: tuple[int, ...],
) -> Any:
    """Return earlier flags, and those of rows or sums of squares that are not finite.

    Infer that a batch is finite from the traces of the updated Gram matrices, which are
    sums of squares.  Arrays are read only without such a sum, or where that is not finite.
    """
    xp = options.xp
    summed: set[str] = set()
    names: set[str] = set()
    traces: Any = 0.0
    for name, argument in block.approximation.sums_of_squares:
        total = new.averages[name].sum
        if name in options.skip:
            continue
        if isinstance(total, SymmetricMatrix):
            trace = matrix_trace(total.array, xp=xp)
        elif getattr(total, "ndim", 0) > len(stack):
            trace = xp.sum(total, axis=-1)
        else:
            continue
        summed.add(argument)
        names.add(name)
        traces = traces + trace
    if not (summed and known_finite(traces, xp=xp)):
        summed, names = set(), set()
    if stack:
        flags = rows.status_of_stack(xp=xp, known=frozenset(summed))
    elif summed:
        flags = rows.status(xp=xp, known=frozenset(summed))
    else:
        flags = rows.status(xp=xp)
    return _with_overflow(earlier | flags, block, new, options, stack, known=names)


def _with_overflow(
    flags: Any,
    block: Block,
    new: Statistics,
    options: UpdateOptions,
    stack: tuple[int, ...],
    *,
    known: Collection[str] = (),
) -> Any:
    """Return flags of an update, with one for sums of squares that are not finite.

    Rows may be finite and their squares not.  Of a Gram matrix the diagonal is looked at;
    averages in `known` are finite.
    """
    xp, good = options.xp, None
    squares = [*block.approximation.squares(new, xp=xp)]
    for name, average in new.averages.items():
        if name in options.skip or name in known:
            continue
        total = getattr(average, "sum", average)
        if getattr(total, "ndim", None) == 0:
            continue
        if isinstance(total, SymmetricMatrix):
            total = total.diagonal()
        for _, leaf in leaves(total):
            if leaf.ndim > len(stack) and xp.isdtype(leaf.dtype, "real floating"):
                squares.append(leaf)
    for square in squares:
        if stack:
            flat = xp.reshape(square, (*stack, -1))
            finite = xp.all(xp.isfinite(flat), axis=-1)
        else:
            finite = all_finite(square, xp=xp)
        if not known_true(finite, xp=xp):
            good = finite if good is None else good & finite
    if good is None:
        return flags
    overflow = status_unless(xp, good, Status.OVERFLOWED)
    return flags | xp.where(
        overflow * 0 + flags == 0, overflow, xp.zeros_like(overflow)
    )


def _require_bases(held: Statistics, given: Statistics) -> None:
    """Raise for second moments in other bases, as far as the host can read them."""
    for side, basis in held.bases.items():
        own, other = basis.eigenvectors, given.bases[side].eigenvectors
        if own is other:
            continue
        xp = own_namespace(own)
        if truth_of(xp.all(own == other), xp=xp) is False:
            raise ConventionError(
                f"The second moments were taken in other bases of {side!r} than those "
                "that they are added to. Take them by `Block.moments(..., statistics=...)`,"
                " with the block's statistics after its last rebase."
            )


def emptied(statistics: Statistics) -> Statistics:
    """Return zero statistics in the same bases."""
    nothing = map_structure(lambda x: x * 0, statistics)
    return replaced(nothing, bases=statistics.bases)


def _checked_damping(
    damping: Scalar,
    like: Array,
    dtypes: tuple[Any, ...],
    check: Check,
    name: str,
    xp: Namespace,
) -> Scalar:
    """Return a damping in a dtype; reads the value of a 0-d array if it is to raise.

    The dtypes are those of computing and of applying.
    """
    require_damping(damping)
    if isinstance(damping, NUMBER):
        _require_normal(float(damping), dtypes, xp)
        return float(damping)
    own = as_scalar(xp, damping, dtypes[0], "damping")
    same_place(statistics=like, damping=damping)
    if check == "raise":
        value = float(detached_array(damping))
        require_damping(value, name=f"damping` of block `{name}")
        _require_normal(value, dtypes, xp)
        return own
    smallest = max(smallest_normal_of(dtype, xp=xp) for dtype in dtypes)
    good = (damping <= 0) | (damping >= smallest)
    # NaN is flagged as an invalid damping, where a number would have raised.
    return xp.where(good, own, xp.full_like(own, xp.nan))


def _require_normal(damping: float, dtypes: tuple[Any, ...], xp: Namespace) -> None:
    """Raise for a damping that a dtype of the operator cannot hold."""
    for dtype in dict.fromkeys(dtypes):
        smallest = smallest_normal_of(dtype, xp=xp)
        if 0.0 < damping < smallest:
            raise DampingError(
                f"Expected `damping` to be zero or at least {smallest:.1e}, the smallest "
                f"number of {dtype} with all its digits, got {damping}. Take "
                'Precision(compute="float64", apply="float64").'
            )


def _coefficient_flags(decay: Any, weight: Any, like: Array, xp: Namespace) -> Array:
    """Return the flags of traced coefficients; Python numbers were checked before."""
    flags: Any = 0
    for coefficient, value in (("decay", decay), ("weight", weight)):
        if not isinstance(value, float):
            same_place(**{"statistics": like, coefficient: value})
    if not isinstance(decay, float):
        good = (decay >= 0) & (decay <= 1)
        flags = flags | status_unless(xp, good, Status.BAD_DECAY)
    if not isinstance(weight, float):
        good = (weight > 0) & xp.isfinite(weight)
        flags = flags | status_unless(xp, good, Status.BAD_DECAY)
    return flags


def _accepted(new: Statistics, old: Statistics) -> Statistics:
    """Return the new statistics if no flag is set, else the old ones."""
    xp, good = new.namespace, new.status == 0
    kept = map_structure(lambda a, b: xp.where(good, a, b), new, old)
    return replaced(kept, status=new.status)
