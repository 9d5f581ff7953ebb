"""One check of an adapter, and what came of it.

Conventions.  An answer holds where ``|got - expected|_F <= tolerance * |expected|_F``.
A check that must *differ* guards against an answer that is right by another way than the
one asked for (the dense matrix where K-FAC was asked): it holds where the error is above
`APART`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kfac_core_conformance.adapter import Adapter, NotOfferedError
from kfac_core_conformance.layer import HostArray
from kfac_core_conformance.problem import Problem

__all__ = [
    "APART",
    "SINGLE_TOLERANCE",
    "Check",
    "Operation",
    "Outcome",
    "Status",
    "run_check",
]

Operation = Literal["block", "multiply", "multiply_inverse"]
Status = Literal["holds", "differs", "not offered", "raised"]

APART = 1e-3
"""Above which relative error two answers are different ones."""

SINGLE_TOLERANCE = 1e-4
"""In float32, for blocks and well-conditioned inverses; in float64 it is 1e-10."""

_SMALLEST = 1e-300
"""What a norm of zero is taken for, so that an error of zero stays one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Check:
    """One question with its answer.

    Parameters
    ----------
    name : str
        A short name, unique in a run; the identity's letter and number, then the case.
    says : str
        What has to hold, in words.
    problem : Problem or None
        What the adapter is handed; None where `obstacle` says why nothing is.
    operation : {"block", "multiply", "multiply_inverse"}
        What it is asked for.
    expected : callable
        Makes the answer: a matrix a layer, (P, P) or (in(+1), out).
    vectors : tuple of numpy.ndarray
        For a product: one (in(+1), out) a layer.
    damping, rule : float, str or None
        For an inverse.
    layers : tuple of int, optional
        Which layers are looked at; all where left out.
    tolerance : float
        The relative error that is allowed.
    must_differ : bool
        Whether the answer has to be another one.
    obstacle : str, optional
        Why no library can be asked through an adapter.
    """

    name: str
    says: str
    problem: Problem | None
    operation: Operation
    expected: Callable[[], Sequence[HostArray]]
    vectors: tuple[HostArray, ...] = ()
    damping: float = 0.0
    rule: str | None = None
    layers: tuple[int, ...] | None = None
    tolerance: float = 1e-10
    must_differ: bool = False
    obstacle: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    Attributes
    ----------
    check : Check
        Which one.
    status : {"holds", "differs", "not offered", "raised"}
        What came of it.
    error : float or None
        The greatest relative error of a layer; infinite for an answer that is not finite.
    message : str or None
        Why it was not offered, or what was raised.
    """

    check: Check
    status: Status
    error: float | None = None
    message: str | None = None


def run_check(adapter: Adapter, check: Check, /) -> Outcome:
    """Ask an adapter and judge the answer.

    Parameters
    ----------
    adapter : Adapter
        Whatever it raises is an outcome.
    check : Check
        The question.

    Returns
    -------
    Outcome
        What came of it.
    """
    problem = check.problem
    if problem is None:
        return Outcome(check, "not offered", message=check.obstacle)
    method = "blocks" if check.operation == "block" else check.operation
    if not callable(getattr(adapter, method, None)):
        return Outcome(check, "not offered", message=f"it has no method {method}")
    lacking = adapter.capabilities.lacks(problem, rule=check.rule)
    if lacking is not None:
        return Outcome(check, "not offered", message=lacking)
    try:
        answers = _answers(adapter, check, problem)
    except NotOfferedError as error:
        return Outcome(check, "not offered", message=_in_words(error))
    except Exception as error:
        reason = f"{type(error).__name__}: {_in_words(error)}"
        return Outcome(check, "raised", message=reason)
    chosen = range(len(answers)) if check.layers is None else check.layers
    expected = check.expected()
    errors = [_relative_error(answers[k], expected[k]) for k in chosen]
    worst = max(errors, default=math.inf)
    if check.must_differ:
        # A guard that is passed by rubbish guards nothing.
        apart = math.isfinite(worst) and min(errors) > APART
        return Outcome(check, "holds" if apart else "differs", worst)
    return Outcome(check, "holds" if worst <= check.tolerance else "differs", worst)


def _answers(adapter: Adapter, check: Check, problem: Problem) -> list[HostArray]:
    """Return a matrix a layer, in the kit's order and in float64."""
    layers, own = problem.network.layers, adapter.capabilities
    if check.operation == "block":
        blocks = list(adapter.blocks(problem))
        _require_count(blocks, len(layers))
        found = []
        for layer, block in zip(layers, blocks, strict=True):
            theirs, P = np.asarray(block, np.float64), layer.matrix.size
            if theirs.shape != (P, P):
                raise ValueError(
                    f"expected a block of shape {(P, P)}, got {theirs.shape}"
                )
            order = layer.order(own.weight_layout, own.bias_position)
            ours = np.empty_like(theirs)
            ours[np.ix_(order, order)] = theirs
            found.append(ours)
        return found
    vectors = [
        layer.parameters(V.astype(problem.dtype), own.weight_layout)
        for layer, V in zip(layers, check.vectors, strict=True)
    ]
    products: list[Any]
    if check.operation == "multiply":
        products = list(adapter.multiply(problem, vectors))
    else:
        assert check.rule is not None
        products = list(
            adapter.multiply_inverse(
                problem, vectors, damping=check.damping, rule=check.rule
            )
        )
    _require_count(products, len(layers))
    return [
        layer.matrix_of(parameters, own.weight_layout)
        for layer, parameters in zip(layers, products, strict=True)
    ]


def _require_count(answers: list[Any], layers: int) -> None:
    if len(answers) != layers:
        raise ValueError(f"expected {layers} answers, one a layer; got {len(answers)}")


def _relative_error(got: HostArray, expected: HostArray) -> float:
    if not np.all(np.isfinite(got)):
        return math.inf
    norm = max(float(np.linalg.norm(expected)), _SMALLEST)
    return float(np.linalg.norm(got - expected)) / norm


def _in_words(error: BaseException) -> str:
    """Return a message on one line, cut where it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
