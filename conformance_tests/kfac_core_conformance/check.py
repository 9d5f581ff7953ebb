"""One check of an adapter, and its outcome.

A check holds if ``|got - expected|_F <= tolerance * |expected|_F``.  A check that must
*differ* detects a library that answers with something else than asked for (the exact
matrix instead of K-FAC's): it holds if the relative error is above `APART`.
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

Operation = Literal["block", "multiply", "multiply_inverse"]
Status = Literal["holds", "differs", "not offered", "raised"]

APART = 1e-3
"""The relative error above which two answers count as different."""

SINGLE_TOLERANCE = 1e-4
"""The float32 tolerance, for blocks and well-conditioned inverses."""

_SMALLEST = 1e-300
"""Replaces a norm of zero, so that an error of zero stays zero."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Check:
    """One question to an adapter, with the expected answer.

    Parameters
    ----------
    name : str
        Unique in a run: the identity's letter and number, then the case.
    says : str
        What must hold, in words.
    problem : Problem or None
        The adapter's input; None if `obstacle` says why there is none.
    operation : {"block", "multiply", "multiply_inverse"}
        The requested quantity.
    expected : callable
        Computes the answer: for each layer a matrix, (P, P) or (in(+1), out).
    vectors : tuple of numpy.ndarray
        For a product: one of shape (in(+1), out) for each layer.
    damping, rule : float, str or None
        The damping and its rule, for an inverse.
    layers : tuple of int, optional
        The layers that are compared; by default all.
    tolerance : float
        The largest relative error allowed.
    must_differ : bool
        Whether the answer must be another one than `expected`.
    obstacle : str, optional
        Why the check cannot be put to any adapter.
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
    """The outcome of a check.

    Attributes
    ----------
    check : Check
        The check.
    status : {"holds", "differs", "not offered", "raised"}
        Its result.
    error : float or None
        The largest relative error of a layer; infinite if the answer is not finite.
    message : str or None
        Why it was not offered, or the exception that was raised.
    """

    check: Check
    status: Status
    error: float | None = None
    message: str | None = None


def run_check(adapter: Adapter, check: Check, /) -> Outcome:
    """Put a check to an adapter and compare the answer.

    Parameters
    ----------
    adapter : Adapter
        Its exceptions are reported as outcomes.
    check : Check
        The check.

    Returns
    -------
    Outcome
        The result.
    """
    problem = check.problem
    if problem is None:
        return Outcome(check, "not offered", message=check.obstacle)
    method = "blocks" if check.operation == "block" else check.operation
    if not callable(getattr(adapter, method, None)):
        return Outcome(check, "not offered", message=f"it has no method {method}")
    unsupported = adapter.capabilities.unsupported(problem, rule=check.rule)
    if unsupported is not None:
        return Outcome(check, "not offered", message=unsupported)
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
        # An infinite error must not pass: garbage also differs from the matrix.
        apart = math.isfinite(worst) and min(errors) > APART
        return Outcome(check, "holds" if apart else "differs", worst)
    return Outcome(check, "holds" if worst <= check.tolerance else "differs", worst)


def _answers(adapter: Adapter, check: Check, problem: Problem) -> list[HostArray]:
    """Return a matrix for each layer, in the kit's order and in float64."""
    layers, declared = problem.network.layers, adapter.capabilities
    if check.operation == "block":
        blocks = list(adapter.blocks(problem))
        _require_count(blocks, len(layers))
        matrices = []
        for layer, block in zip(layers, blocks, strict=True):
            values, P = np.asarray(block, np.float64), layer.matrix.size
            if values.shape != (P, P):
                raise ValueError(
                    f"expected a block of shape {(P, P)}, got {values.shape}"
                )
            order = layer.order(declared.weight_layout, declared.bias_position)
            ordered = np.empty_like(values)
            ordered[np.ix_(order, order)] = values
            matrices.append(ordered)
        return matrices
    vectors = [
        layer.parameters(V.astype(problem.dtype), declared.weight_layout)
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
        layer.matrix_of(parameters, declared.weight_layout)
        for layer, parameters in zip(layers, products, strict=True)
    ]


def _require_count(answers: list[Any], layers: int) -> None:
    if len(answers) != layers:
        raise ValueError(
            f"expected {layers} answers, one for each layer; got {len(answers)}"
        )


def _relative_error(got: HostArray, expected: HostArray) -> float:
    if not np.all(np.isfinite(got)):
        return math.inf
    norm = max(float(np.linalg.norm(expected)), _SMALLEST)
    return float(np.linalg.norm(got - expected)) / norm


def _in_words(error: BaseException) -> str:
    """Return a message on one line, truncated to 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
