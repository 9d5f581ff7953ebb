"""A block: one layer and one approximation, and the pure functions of the pair.

Conventions.  A block holds no arrays.  Its functions take statistics and return new
ones, or an operator; nothing they are given is modified.  They run inside function
compilers and vectorizing transforms when told ``check="status"``: then they look at no
value, an update with rows that are not finite leaves the statistics as they were, and
the flags come back as an array.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import array_api_compat
import numpy as np

from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.finite_sums import finite_arguments
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array.backend import Array, load_adapters
from kfac_core.array.namespaces import (
    Scalar,
    as_scalar,
    device_of,
    namespace_of,
    same_place,
    status_unless,
    wide_dtype,
)
from kfac_core.array.precision import Precision
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import map_structure, replaced
from kfac_core.conventions import Conventions, require_one_of
from kfac_core.damping import DampingRule, require_damping
from kfac_core.errors import (
    DecayError,
    MixedArraysError,
    UnsupportedError,
)
from kfac_core.factors.average import Average, require_decay, require_weight
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.example_gradients import GradientBatch
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Batch, Rows, join_uses, require_finite
from kfac_core.linalg.shifted import Factorization
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.operators.operator import CurvatureOperator

__all__ = ["Block", "Fed"]

Fed: TypeAlias = Batch | GradientBatch | Sequence[Batch]
"""What one block can be fed: a batch, or several uses of one layer."""

_FULL_PRECISION = Precision()


@dataclass(frozen=True)
class Block:
    """A layer's geometry and the approximation of its curvature.

    Parameters
    ----------
    layer : Layer
        Turns what a framework has into rows, and parameters into a matrix.
    approximation : Approximation
        Which statistics are kept, and which operator they make.

    Raises
    ------
    UnsupportedError
        Where the two do not go together, with the reason.
    """

    layer: Layer
    approximation: Approximation

    def __post_init__(self) -> None:
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
        """Return the statistics of nothing, of an array's library and device.

        Parameters
        ----------
        like : array
            Any array of the library, such as a layer's inputs; its dtype, widened to
            float32 where it is narrower, is that of the statistics unless `precision`
            says another.
        precision : Precision
            Of which the storage is read.

        Returns
        -------
        Statistics
            All zero.
        """
        xp = namespace_of(like=like)
        dtype = precision.dtype(precision.storage, wide_dtype(xp, like.dtype), xp=xp)
        return self.approximation.initial(
            self.layer, dtype=dtype, device=device_of(like), xp=xp
        )

    def update(
        self,
        statistics: Statistics,
        batch: Fed,
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
            As they were; never modified.
        batch : Batch, GradientBatch or sequence of Batch
            What the layer saw; a sequence is several uses of it in each example.
        conventions : Conventions
            How the output gradients are scaled.
        decay : float or 0-d array
            In [0, 1].
        weight : float or 0-d array
            Positive.
        check : {"raise", "status"}
            Whether trouble raises, which waits for the device, or is in the result's
            ``status``.
        name : str
            What a message should call the block.
        skip : frozenset of str
            The factors, ``"input"`` or ``"output"``, that are left as they are because
            another block computes them.
        max_patch_elements : int, optional
            For a convolution: how many numbers its patches may hold at a time.  The
            batch is then read in chunks of examples, with the same result.

        Returns
        -------
        Statistics
            New; equal to the old where ``status`` is not zero.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError, DecayError
            For arguments that do not fit, in either mode.
        NotFiniteError
            For rows that are not finite (``check="raise"``).
        """
        options: dict[str, Any] = {
            "conventions": conventions,
            "decay": decay,
            "weight": weight,
            "skip": skip,
            "max_patch_elements": max_patch_elements,
        }
        if check == "status":
            new = self.unchecked_update(statistics, batch, **options)
            return _accepted(new, statistics)
        # What is infinite is found by its status; NumPy would also warn of inf - inf.
        with np.errstate(invalid="ignore"):
            new = self.unchecked_update(statistics, batch, **options)
        _raise_for(new.status, name)
        return new

    def unchecked_update(
        self,
        statistics: Statistics,
        batch: Fed,
        /,
        *,
        conventions: Conventions,
        decay: Scalar,
        weight: Scalar = 1.0,
        skip: frozenset[str] = frozenset(),
        max_patch_elements: int | None = None,
    ) -> Statistics:
        """Return what `update` makes before its status is looked at.

        For callers that look at the statuses of several blocks at a time.  Where the
        status is not zero the result is of no use, and the old statistics are to be
        kept.

        Parameters
        ----------
        statistics, batch, conventions, decay, weight, skip, max_patch_elements
            As for `update`.

        Returns
        -------
        Statistics
            With a status.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError, DecayError
            For arguments that do not fit.
        """
        require_decay(decay)
        require_weight(weight)
        xp, dtype = statistics.namespace, statistics.dtype
        decay = as_scalar(xp, decay, dtype, "decay")
        weight = as_scalar(xp, weight, dtype, "weight")
        for coefficient, value in (("decay", decay), ("weight", weight)):
            if not isinstance(value, float):
                same_place(**{"statistics": statistics.any_weight, coefficient: value})
        status = _coefficient_flags(decay, weight, statistics)
        options = UpdateOptions(
            conventions=conventions, decay=decay, weight=weight, skip=skip, xp=xp
        )
        total: Statistics | None = None
        for rows in self.row_parts(batch, max_patch_elements=max_patch_elements):
            self._require_place(statistics, rows)
            together = max_patch_elements is None
            if not (together and type(rows) is Rows):
                status = status | rows.status(xp=xp)
            if isinstance(rows, IdRows):
                # Not every library says so when an index lies outside; some crash.
                rows = rows.with_ids_inside(xp=xp)
            if together:
                new = self.approximation.updated(statistics, rows, self.layer, options)
                if type(rows) is Rows:
                    shown = finite_arguments(self.approximation, new, skip=skip, xp=xp)
                    status = status | rows.status(xp=xp, known=shown)
                break
            alone = dataclasses.replace(options, decay=0.0, weight=None)
            part = self.approximation.updated(
                _emptied(statistics), rows, self.layer, alone
            )
            total = part if total is None else total.merged(part)
            # The loop's variable would hold this chunk while the next one is made.
            del rows
        if total is not None:
            new = statistics.absorbed(
                total, decay=decay, weight=weight, decays=self._decays
            )
        new = replaced(new, status=status)
        # NumPy makes scalars of 0-d arrays, which are no arrays in all respects.
        return _of_arrays(new) if isinstance(status, (np.generic, np.ndarray)) else new

    def moments(
        self,
        batch: Fed,
        /,
        *,
        conventions: Conventions,
        precision: Precision = _FULL_PRECISION,
        check: Check = "raise",
        name: str = "block",
    ) -> Statistics:
        """Return the statistics of one batch alone, weighted by its number of rows.

        What `merge` adds up over micro-batches, or over the shards of a batch, is then
        exactly what the whole batch would have given, in any order and for any sizes.

        Parameters
        ----------
        batch : Batch or GradientBatch
            What the layer saw in one part of a batch.
        conventions : Conventions
            How the output gradients are scaled.  With ``loss="mean"`` the N of this
            part counts.
        precision : Precision
            Of which the storage is read.
        check : {"raise", "status"}
            As for `update`.
        name : str
            What a message should call the block.

        Returns
        -------
        Statistics
            To be merged, and absorbed by running statistics.

        Raises
        ------
        KFACError
            As `update`.
        """
        rows = self.rows(batch)
        empty = self.initial(rows.like, precision=precision)
        xp = empty.namespace
        status = rows.status(xp=xp)
        if check == "raise":
            _raise_for(status, name)
        options = UpdateOptions(conventions=conventions, decay=0.0, weight=None, xp=xp)
        new = self.approximation.updated(empty, rows, self.layer, options)
        new = replaced(new, status=status)
        return new if check == "raise" else _accepted(new, empty)

    def merge(self, first: Statistics, second: Statistics, /) -> Statistics:
        """Return the statistics of both data sets together."""
        return first.merged(second)

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
            Never modified.
        moments : Statistics
            As `moments` and `merge` made them.
        decay, weight : float or 0-d array
            As for `update`.

        Returns
        -------
        Statistics
            What one update with the whole batch would have given.
        """
        require_decay(decay)
        require_weight(weight)
        xp, dtype = statistics.namespace, statistics.dtype
        decay = as_scalar(xp, decay, dtype, "decay")
        weight = as_scalar(xp, weight, dtype, "weight")
        return statistics.absorbed(
            moments, decay=decay, weight=weight, decays=self._decays
        )

    def operator(
        self,
        statistics: Statistics,
        /,
        *,
        damping: Scalar,
        rule: DampingRule,
        debias: bool = True,
        factorizations: tuple[Factorization, ...] = ("inverse",),
        check: Check = "raise",
        precision: Precision = _FULL_PRECISION,
        name: str = "block",
        memo: dict[Any, Any] | None = None,
    ) -> CurvatureOperator:
        """Make the curvature operator from the statistics as they are now.

        Parameters
        ----------
        statistics : Statistics
            Never modified, and not referred to afterwards.
        damping : float or 0-d array
            Finite and >= 0.
        rule : {"factored", "factored_unit_pi", "exact"}
            How the damping is applied; see `kfac_core.damping`.
        debias : bool
            Whether sums are divided by their weights.
        factorizations : tuple of {"inverse", "cholesky", "eigenbasis"}
            What is prepared now; the rest is prepared when asked for
            (``check="raise"`` only).
        check : {"raise", "status"}
            Whether trouble raises, which waits for the device, or is in the
            operator's ``status()``.
        precision : Precision
            Of computing and applying.
        name : str
            What a message should call the block.
        memo : dict, optional
            Given to the operators of several blocks that share factors, so that what
            they have in common is made once.

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
            Where a factor cannot be factorized (``check="raise"``).
        """
        require_one_of("rule", rule, get_args(DampingRule))
        for factorization in factorizations:
            require_one_of("factorizations", factorization, get_args(Factorization))
        require_damping(damping)
        if isinstance(damping, numbers.Real):
            damping = float(damping)
        else:
            same_place(statistics=statistics.any_weight, damping=damping)
            if check == "raise":
                _require_damping_value(damping, name)
        options = OperatorOptions(
            damping=damping,
            rule=rule,
            debias=debias,
            factorizations=factorizations,
            check=check,
            precision=precision,
            name=name,
            memo={} if memo is None else memo,
        )
        if check == "status":  # inside compilers too, which know no `errstate`
            return self.approximation.operator(statistics, self.layer, options)
        # What is infinite is found by its status; NumPy would also warn on the way.
        with np.errstate(over="ignore", invalid="ignore"):
            return self.approximation.operator(statistics, self.layer, options)

    def rows(self, batch: Fed, /) -> Any:
        """Turn what the layer saw into the rows that the statistics are made of.

        Parameters
        ----------
        batch : Batch, GradientBatch or sequence of Batch
            Never modified.

        Returns
        -------
        Rows, IdRows, PixelRows or ExampleGradients
            As the layer and the approximation have it; several uses are shared
            positions of one row set.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError, UnsupportedError
            For arrays that do not fit.
        """
        if not isinstance(batch, list | tuple):
            return self.approximation.rows(self.layer, batch)
        uses = [self.approximation.rows(self.layer, use) for use in batch]
        if not uses or not all(isinstance(use, Rows) for use in uses):
            raise UnsupportedError(
                "Several uses of one layer need at least one `Batch` each, of a dense or "
                "conv layer."
            )
        return join_uses(uses)

    def mean_gradient(self, batch: Fed, /, *, conventions: Conventions) -> Array:
        """Return the mean gradient over the examples, summed over sources.

        Parameters
        ----------
        batch : Batch, GradientBatch or sequence of Batch
            What the layer saw.
        conventions : Conventions
            How the output gradients are scaled.

        Returns
        -------
        array, shape (in(+1), out)
            ``1/N sum_mns x g^T`` for gradients of the summed loss.
        """
        rows = self.rows(batch)
        xp = array_api_compat.array_namespace(rows.like)
        if isinstance(rows, IdRows):
            rows = rows.with_ids_inside(xp=xp)
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

    def row_parts(
        self, batch: Fed, /, *, max_patch_elements: int | None
    ) -> Iterator[Any]:
        """Yield `rows` of a batch, in chunks of examples where a budget is given.

        Parameters
        ----------
        batch : Batch, GradientBatch or sequence of Batch
            Never modified.
        max_patch_elements : int or None
            As for `update`; not read where there are no patches.

        Yields
        ------
        Rows, IdRows, PixelRows or ExampleGradients
            One after the other.

        Raises
        ------
        UnsupportedError
            For several uses of a convolution together with a budget.
        """
        layer: Any = self.layer
        patches = getattr(self.approximation, "input", "full") != "uncorrelated"
        if max_patch_elements is None or layer.kind != "conv" or not patches:
            yield self.rows(batch)
            return
        if isinstance(batch, list | tuple):
            raise UnsupportedError(
                "Several uses of a convolution are rows of one example, and are not read "
                "in chunks. Give a smaller batch, or no `max_patch_elements`."
            )
        yield from layer.row_chunks(batch, max_patch_elements=max_patch_elements)

    @property
    def _decays(self) -> Mapping[str, float]:
        """The averages with a decay of their own."""
        own: Mapping[str, float] = getattr(self.approximation, "decays", {})
        return own

    def _require_place(self, statistics: Statistics, rows: Any) -> None:
        """Raise where a batch is not of one place with the statistics."""
        try:
            namespace_of(statistics=statistics.any_weight, batch=rows.like)
        except MixedArraysError as error:
            raise MixedArraysError(
                f"{error} (The statistics stay where their first batch was.)"
            ) from None


def _of_arrays(statistics: Statistics) -> Statistics:
    """Return statistics with 0-d arrays in place of NumPy's scalars."""
    averages = {
        # Of a matrix only the weight can have become one: the common case, done quickly.
        name: Average(average.sum, np.asarray(average.weight))
        if type(average) is Average and type(average.sum) is SymmetricMatrix
        else map_structure(np.asarray, average)
        for name, average in statistics.averages.items()
    }
    return Statistics(averages, np.asarray(statistics.status), statistics.bases)


def _emptied(statistics: Statistics) -> Statistics:
    """Return statistics of nothing, in the same bases."""
    nothing = map_structure(lambda x: x * 0, statistics)
    return replaced(nothing, bases=statistics.bases)


def _require_damping_value(damping: Array, name: str) -> None:
    """Look at a 0-d array, which waits for its device."""
    require_damping(float(damping), name=f"damping` of block `{name}")


def _coefficient_flags(decay: Any, weight: Any, statistics: Statistics) -> Array:
    """Return the flags of traced coefficients; Python numbers were checked before."""
    xp = statistics.namespace
    flags = xp.zeros_like(statistics.status)
    if not isinstance(decay, float):
        good = (decay >= 0) & (decay <= 1)
        flags = flags | status_unless(xp, good, Status.BAD_DECAY)
    if not isinstance(weight, float):
        good = (weight > 0) & xp.isfinite(weight)
        flags = flags | status_unless(xp, good, Status.BAD_DECAY)
    return flags


def _raise_for(status: Array, name: str) -> None:
    flags = int(status)
    require_finite(flags, name=name)
    if Status.BAD_DECAY in Status(flags):
        raise DecayError(
            f"Block {name!r}: expected `decay` in [0, 1] and `weight` > 0, both finite."
        )


def _accepted(new: Statistics, old: Statistics) -> Statistics:
    """Return the new statistics where nothing is wrong, else the old ones."""
    xp, good = new.namespace, new.status == 0
    kept = map_structure(lambda a, b: xp.where(good, a, b), new, old)
    return replaced(kept, status=new.status)
