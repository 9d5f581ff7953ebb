"""Recomputing the answers of a record with `kfac_core`.

Blocks are computed one at a time: the statistics after all updates, then one operator for
each damping and rule.  Inputs are cast to the requested dtype first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

import kfac_core as kc
from kfac_core.approximations.ekfac import EKFAC
from kfac_core.array import Array
from kfac_core.array.selection import Selection
from kfac_core.array.structure import is_structure
from kfac_core.conventions import Conventions
from kfac_core.damping import DampingRule
from kfac_core.errors import UnsupportedError
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.example_gradients import GradientBatch
from kfac_core.layers.rows import Batch
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.operators.operator import CurvatureOperator
from kfac_core_conformance.records.checks import Check, Factor, ToDense
from kfac_core_conformance.records.container import HostArray
from kfac_core_conformance.records.record import Record, RecordedBlock, Seen

Answer: TypeAlias = Mapping[str, HostArray]
"""Arrays by parameter, or one under ``""`` if the answer is no vector."""

DampingKey: TypeAlias = tuple[float, DampingRule]
"""A damping and its rule."""

CONVENTIONS = Conventions(reduction="sum", sources="sum")
"""The conventions of the format."""


@dataclass(frozen=True)
class Place:
    """The backend, device and dtype that checks are computed with.

    Attributes
    ----------
    selection : Selection
        The backend and its device.
    dtype : {"float64", "float32"}
        The dtype of all arrays but ids and masks.
    """

    selection: Selection
    dtype: str

    def floats(self, values: HostArray, /) -> Array:
        """Copy values to the device, cast to the dtype; overflow gives infinity."""
        with np.errstate(over="ignore"):
            return self.copy(values.astype(self.dtype))

    def copy(self, values: HostArray, /) -> Array:
        """Copy values to the device, with their dtype."""
        return self.selection.backend.asarray(values, device=self.selection.device)

    def host(self, x: Array, /) -> HostArray:
        """Copy an array to the host, in float64."""
        return self.selection.backend.to_numpy(x).astype(np.float64)


class Recomputation:
    """One block of a record, recomputed on one backend.

    The statistics are computed once.  Consecutive checks with the same damping and rule
    share an operator; only the last operator is kept.

    Parameters
    ----------
    record : Record
        The record.
    name : str
        The block's name.
    place : Place
        Backend, device and dtype.
    """

    def __init__(self, record: Record, name: str, place: Place, /) -> None:
        self.record = record
        self.name = name
        self.place = place
        self.recorded = record.blocks[name]
        self._operator: tuple[DampingKey, CurvatureOperator] | None = None

    @functools.cached_property
    def statistics(self) -> Statistics:
        """The statistics after all updates."""
        average, recorded = self.record.document.ema, self.recorded
        block = recorded.block
        coefficients: dict[str, Any] = {
            "conventions": CONVENTIONS,
            "decay": average.decay,
            "weight": average.weight,
        }
        statistics: Statistics | None = None
        for seen in recorded.updates:
            batch = _batch(seen, self.place)
            if statistics is None:
                statistics = block.initial(batch.like)
            statistics = kc.update_block(
                block,
                statistics,
                batch,
                kc.UpdateOptions(**coefficients),
                name=self.name,
            )
        assert statistics is not None
        approximation = block.approximation
        if isinstance(approximation, EKFAC):
            # The format defines all moments in the bases of the last factors.
            statistics = kc.rebase_block(block, statistics, "zero")
            for seen in recorded.updates:
                rows = approximation.rows(block.layer, _batch(seen, self.place))
                statistics = approximation.corrected(statistics, rows, **coefficients)
        return statistics

    def operator(self, check: Check, /) -> CurvatureOperator:
        """Return the operator with a check's damping; undamped if it needs none.

        Parameters
        ----------
        check : CheckDescription
            A check of this block.

        Returns
        -------
        CurvatureOperator
            Without factorizations: each check computes what it needs.
        """
        key = damping_key(check)
        if self._operator is None or self._operator[0] != key:
            self._operator = None
            damping, rule = key
            computed = kc.operator_of(
                self.recorded.block,
                self.statistics,
                kc.RefreshOptions(
                    damping=damping,
                    rule=rule,
                    debias=self.record.document.ema.debias,
                    factorizations=(),
                ),
                name=self.name,
            )
            self._operator = key, computed
        return self._operator[1]

    def answer(self, index: int, /) -> Answer:
        """Compute the answer to a check.

        Parameters
        ----------
        index : int
            The number of the check in the document.

        Returns
        -------
        mapping of str to numpy.ndarray
            In float64, with the keys of the expected answer.

        Raises
        ------
        KFACError
            If the library cannot answer.
        """
        check = self.record.document.checks[index]
        vector = self.record.vectors[index]
        if not vector:
            return {"": _MATRICES[check.tag()](self, check)}
        block, place = self.recorded.block, self.place
        parameters = {name: place.floats(values) for name, values in vector.items()}
        V = block.parameters_to_matrix(parameters)
        result = _VECTORS[check.tag()](self.operator(check), V, check)
        converted = block.matrix_to_parameters(result)
        return {name: place.host(converted[name]) for name in vector}


def sample_answers(record: Record, place: Place, /) -> dict[str, Answer]:
    """Compute ``J J^T`` and the direction of a record's blocks together.

    Parameters
    ----------
    record : Record
        One with `samples`.
    place : Place
        Backend, device and dtype.

    Returns
    -------
    dict of str to mapping of str to numpy.ndarray
        In float64, by the names of the answers.
    """
    samples = record.samples
    assert samples is not None
    layers = {name: recorded.block.layer for name, recorded in record.blocks.items()}
    batches: dict[str, Any] = {
        name: _batch(recorded.updates[-1], place)
        for name, recorded in record.blocks.items()
    }
    J = kc.samples.Jacobian.of(layers, batches)
    F = kc.samples.sample_curvature(J, damping=samples.description.damping)
    last = None
    if samples.last:
        last = {
            block: {key: place.floats(x) for key, x in vector.items()}
            for block, vector in samples.last.items()
        }
    direction = F.direction(
        place.floats(samples.residuals),
        last=last,
        momentum=samples.description.momentum,
    )
    flat = {
        f"{block}.{key}": place.host(x)
        for block, vector in direction.items()
        for key, x in vector.items()
    }
    return {
        "gram": {"": place.host(kc.samples.sample_gram(J).full())},
        "direction": flat,
    }


def damping_key(check: Check, /) -> DampingKey:
    """Return the damping and rule of a check; a constant if it needs none."""
    if not check.needs_damping or check.damping is None or check.damping_rule is None:
        return 0.0, "factored"
    return check.damping, check.damping_rule


def _batch(seen: Seen, place: Place) -> Batch | GradientBatch:
    if seen.inputs is None or seen.output_grads is None:
        gradients = {name: place.floats(g) for name, g in seen.gradients.items()}
        return GradientBatch(gradients, seen.batch_size)
    floating = seen.inputs.dtype.kind == "f"
    return Batch(
        place.floats(seen.inputs) if floating else place.copy(seen.inputs),
        place.floats(seen.output_grads),
        None if seen.mask is None else place.copy(seen.mask),
        sources=seen.output_grads.shape[0],
    )


def _factor(recomputation: Recomputation, check: Factor) -> HostArray:
    """Return an averaged statistic as a plain array."""
    which, place = check.factor, recomputation.place
    averages = recomputation.statistics.averages
    if which not in averages:
        raise UnsupportedError(f"this block keeps no statistic {which!r}")
    value = averages[which].value(debias=recomputation.record.document.ema.debias)
    if isinstance(value, SymmetricMatrix):
        return place.host(value.full())
    if is_structure(value):
        # A structured factor, such as moments; the operator has it as a matrix.
        operator: Any = recomputation.operator(check)
        return place.host(getattr(operator, which).dense(shifted=False))
    values = place.host(value)
    if values.ndim == 1 and which == "block":
        return _unflattened(values, recomputation.recorded)
    if which == "block" and recomputation.statistics.bases:
        # The format orders eigenvalues ascending, the library descending.
        return np.flip(values, axis=(-2, -1))
    return values


def _unflattened(values: HostArray, recorded: RecordedBlock) -> HostArray:
    """Return a diagonal block in the shape that the format gives it."""
    if recorded.description.layer.is_matrix:
        return values.reshape(recorded.block.layer.matrix_shape)
    return values


def _damping_split(recomputation: Recomputation, check: Check) -> HostArray:
    """Return what is added to the diagonals of both factors, groups first."""
    operator: Any = recomputation.operator(check)
    shifts = [
        recomputation.place.host(f.shift) for f in (operator.input, operator.output)
    ]
    return np.stack(np.broadcast_arrays(*shifts), axis=-1)


def _to_dense(recomputation: Recomputation, check: ToDense) -> HostArray:
    operator = recomputation.operator(check)
    return recomputation.place.host(operator.to_dense(damped=check.damped))


def _logdet(recomputation: Recomputation, check: Check) -> HostArray:
    return recomputation.place.host(recomputation.operator(check).logdet())


def _trace(recomputation: Recomputation, check: Check) -> HostArray:
    return recomputation.place.host(recomputation.operator(check).trace(damped=False))


def _eigenvalues(recomputation: Recomputation, check: Check) -> HostArray:
    return recomputation.place.host(
        recomputation.operator(check).eigenvalues(damped=False)
    )


_MATRICES: Mapping[str, Callable[[Recomputation, Any], HostArray]] = {
    "factor": _factor,
    "damping_split": _damping_split,
    "to_dense": _to_dense,
    "logdet": _logdet,
    "trace": _trace,
    "eigenvalues": _eigenvalues,
}
"""How each check without a vector is computed."""

_VECTORS: Mapping[str, Callable[[CurvatureOperator, Array, Any], Array]] = {
    "multiply": lambda op, v, c: op.multiply(v, damped=c.damped),
    "multiply_inverse": lambda op, v, c: op.multiply_inverse(v),
    "multiply_matpower": lambda op, v, c: op.multiply_matpower(v, c.exp),
    "multiply_cholesky": lambda op, v, c: op.multiply_cholesky(
        v, transpose=c.transpose
    ),
    "multiply_cholesky_inverse": lambda op, v, c: op.multiply_cholesky_inverse(
        v, transpose=c.transpose
    ),
}
"""How each check with a vector is computed."""
