"""The answers of a verification record, as checks of an adapter.

A dense block of a record becomes a network of one layer with zero weights: the gradient of
half the squared error at the targets ``-g`` is then g, whichever library differentiates.
A record sums the outer products of M backpropagated vectors, and the kit averages those of
M labels, so the vectors are multiplied by ``sqrt(M)``.

What a problem of the kit cannot express (other layers, masks, diagonal factors, powers, an
average without bias correction) is reported as not offered, with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from kfac_core_conformance.check import Check, Operation
from kfac_core_conformance.layer import HostArray, LinearLayer
from kfac_core_conformance.network import Network
from kfac_core_conformance.problem import Approximation, Data, Problem

if TYPE_CHECKING:
    from kfac_core_conformance.records import checks
    from kfac_core_conformance.records.record import Record, RecordedBlock

_OPERATIONS: dict[str, Operation] = {
    "to_dense": "block",
    "multiply": "multiply",
    "multiply_inverse": "multiply_inverse",
}

_TOLERANCES = {"float64": 1e-10, "float32": 1e-4}
"""Tolerances by the dtype of the answer, for a check without its own."""


def record_checks(path: str | os.PathLike[str], /) -> tuple[Check, ...]:
    """Return the checks of a record, in its order.

    Parameters
    ----------
    path : str or path
        The record.

    Returns
    -------
    tuple of Check
        Those that cannot be put to an adapter have an `obstacle`.

    Raises
    ------
    RecordError
        If the record cannot be read.
    ImportError
        If the packages of the extra ``records`` are not installed.
    """
    # Adapters can be checked against the identities without the packages of records.
    from kfac_core_conformance.records import read_record

    record = read_record(path)
    problems: dict[str, Problem | str] = {
        name: _problem(record, block) for name, block in record.blocks.items()
    }
    stem = Path(path).stem
    return tuple(
        _check(f"R {stem} {index}", record, index, problems[asked.block])
        for index, asked in enumerate(record.document.checks)
    )


def _check(name: str, record: Record, index: int, problem: Problem | str) -> Check:
    asked = record.document.checks[index]
    layer = record.blocks[asked.block].description.layer
    says = f"{asked.tag()} as {record.document.producer or 'the record'} has it"
    obstacle = problem if isinstance(problem, str) else _obstacle(asked)
    expected = record.answers[index]
    oi = getattr(layer, "weight_layout", None) == "oi"
    vector = record.vectors[index]
    return Check(
        name=name,
        says=" ".join(says.split()),
        problem=None if isinstance(problem, str) or obstacle else problem,
        operation=_OPERATIONS.get(asked.tag(), "block"),
        expected=lambda: [
            _matrix(expected, oi) if vector else expected[""].astype(np.float64)
        ],
        vectors=(_matrix(vector, oi),) if vector and obstacle is None else (),
        damping=asked.damping or 0.0,
        rule=asked.damping_rule if asked.tag() == "multiply_inverse" else None,
        tolerance=_tolerance(expected) if asked.rtol is None else asked.rtol,
        obstacle=obstacle,
    )


def _tolerance(expected: Mapping[str, HostArray]) -> float:
    return max(_TOLERANCES.get(x.dtype.name, 1e-4) for x in expected.values())


def _obstacle(asked: checks.Check) -> str | None:
    """Return why a check cannot be put to an adapter; None if it can."""
    operation = asked.tag()
    if operation not in _OPERATIONS:
        return f"the kit does not ask for {operation}"
    if operation != "multiply_inverse" and asked.needs_damping:
        return f"the kit does not ask for a damped {operation}"
    if asked.atol:
        return "the kit knows relative tolerances only"
    return None


def _problem(record: Record, recorded: RecordedBlock) -> Problem | str:
    """Return a block as a problem, or why it cannot be expressed as one."""
    description = recorded.description
    dense: Any = description.layer
    approximation: Any = description.approximation.tag()
    average = record.document.ema
    if dense.tag() != "dense":
        return f"the kit makes no {dense.tag()} layer from rows"
    if approximation not in get_args(Approximation):
        return f"the kit does not ask for {approximation}"
    if description.is_diagonal("input") or description.is_diagonal("output"):
        return "the kit has full factors only"
    if not average.debias and (len(recorded.updates) > 1 or average.weight != 1.0):
        return "the kit's averages are debiased"
    if any(seen.mask is not None for seen in recorded.updates):
        return "the kit has no masks"
    rows = dense.in_features + dense.bias
    layer = LinearLayer(matrix=np.zeros((rows, dense.out_features)), bias=dense.bias)
    single = all(len(_grads(seen)) == 1 for seen in recorded.updates)
    problem = Problem(
        network=Network(layers=(layer,)),
        loss="mse",
        updates=tuple(_data(seen, single) for seen in recorded.updates),
        estimation="empirical" if single else "labels",
        approximation=approximation,
        decay=average.decay,
    )
    sharing: Any = getattr(description.approximation, "sharing", "expand")
    return dataclasses.replace(problem, sharing=sharing)


def _data(seen: Any, single: bool) -> Data:
    """Return the recorded rows of a block as inputs and targets."""
    g = _grads(seen)
    targets = -g[0] if single else -g * math.sqrt(len(g))
    return Data(seen.inputs.astype(np.float64), targets)


def _grads(seen: Any) -> HostArray:
    g: HostArray = seen.output_grads.astype(np.float64)
    return g


def _matrix(parameters: Mapping[str, HostArray], oi: bool) -> HostArray:
    """Return parameters as (in(+1), out), the bias last."""
    weight = parameters["weight"].astype(np.float64)
    parts = [weight.T if oi else weight]
    if "bias" in parameters:
        parts.append(parameters["bias"].astype(np.float64)[None, :])
    return np.concatenate(parts)
