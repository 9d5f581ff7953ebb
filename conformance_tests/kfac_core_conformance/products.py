"""The checks of products: A1 to A5, and B16.

The references solve linear systems with dense blocks, damped by definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kfac_core_conformance.check import SINGLE_TOLERANCE, Check
from kfac_core_conformance.dense import approximate_blocks, damped_blocks
from kfac_core_conformance.examples import (
    in_dtype,
    normal,
    random_network,
    with_problem,
)
from kfac_core_conformance.layer import HostArray
from kfac_core_conformance.network import Network, loss_gradient
from kfac_core_conformance.problem import Data, Problem


def product_checks() -> Iterator[Check]:
    """Yield the checks of products with a block and with its damped inverse."""
    net = random_network(24, (4, 3, 2), activation="tanh")
    data = normal(25, 30, 4)
    problem = with_problem(net, data, "mse", reduction="mean")
    vectors = tuple(normal(26, *layer.matrix.shape) for layer in net.layers)
    yield Check(
        name="A1",
        says="the block times a vector",
        problem=problem,
        operation="multiply",
        expected=lambda: _applied(approximate_blocks(problem), vectors),
        vectors=vectors,
    )
    for rule in ("factored", "exact"):
        says = "without damping: the solution with the dense block"
        yield _inverse(f"A2 {rule}", says, problem, vectors, 0.0, rule)
    for name, rule, says in (
        ("A3", "exact", "exact damping: (A x G + damping I)^-1"),
        ("A4", "factored", "factored damping, with the pi of the traces"),
        ("A4 unit", "factored_unit_pi", "factored damping with pi = 1"),
    ):
        yield _inverse(name, says, problem, vectors, 0.3, rule)
    yield from _inverses_with_more(net, vectors)
    yield _rescaled()
    for reduction in ("sum", "mean"):
        yield _least_squares(reduction)


def _inverses_with_more(
    net: Network, vectors: tuple[HostArray, ...]
) -> Iterator[Check]:
    """Yield inverses with shared weights, of EKFAC, and in float32."""
    shared = with_problem(net, normal(27, 6, 3, 4), "mse")
    eigen = with_problem(net, normal(28, 9, 4), "mse", approximation="eigen")
    narrow = in_dtype(with_problem(net, normal(29, 30, 4), "mse"), "float32")
    for rule in ("factored", "exact"):
        says = f"{rule} damping of a block with the scale of shared positions"
        yield _inverse(f"A4 shared {rule}", says, shared, vectors, 0.3, rule)
    says = "exact damping of a block in the eigenbasis"
    yield _inverse("A3 eigen", says, eigen, vectors, 0.3, "exact")
    for rule in ("factored", "exact"):
        yield _inverse(
            f"A4 float32 {rule}",
            f"{rule} damping, in single precision",
            narrow,
            vectors,
            0.3,
            rule,
            tolerance=SINGLE_TOLERANCE,
        )


def _inverse(
    name: str,
    says: str,
    problem: Problem,
    vectors: tuple[HostArray, ...],
    damping: float,
    rule: str,
    **options: Any,
) -> Check:
    def expected() -> list[HostArray]:
        damped = damped_blocks(problem, damping=damping, rule=rule)
        return _solved(damped, vectors)

    return Check(
        name=name,
        says=says,
        problem=problem,
        operation="multiply_inverse",
        expected=expected,
        vectors=vectors,
        damping=damping,
        rule=rule,
        **options,
    )


def _rescaled() -> Check:
    """Return A5: A is multiplied and G divided by 100, and the answer is the same."""
    net = random_network(30, (4, 3), bias=False)
    data = normal(31, 9, 4)
    g = normal(32, 9, 3)
    plain, scaled = (
        Problem(
            network=net,
            loss="mse",
            updates=(Data(c * data, net.forward(c * data).result - g / c),),
            estimation="empirical",
        )
        for c in (1.0, 10.0)
    )
    vectors = (normal(33, 4, 3),)

    def expected() -> list[HostArray]:
        damped = damped_blocks(plain, damping=0.3, rule="factored")
        return _solved(damped, vectors)

    return Check(
        name="A5",
        says="factored damping is invariant to rescaling A against G",
        problem=scaled,
        operation="multiply_inverse",
        expected=expected,
        vectors=vectors,
        damping=0.3,
        rule="factored",
    )


def _least_squares(reduction: str) -> Check:
    """Return B16: from any weights, one undamped step reaches the least-squares fit."""
    net = random_network(34, (4, 3))
    data = normal(35, 12, 4)
    problem = with_problem(net, data, "mse", reduction=reduction)
    targets = problem.updates[0].targets
    X = np.concatenate([data, np.ones((len(data), 1))], axis=1)
    W = net.layers[0].matrix
    mean_gradient = X.T @ loss_gradient("mse", X @ W, targets) / len(X)
    return Check(
        name=f"B16 {reduction}",
        says="linear regression: one undamped step is least squares",
        problem=problem,
        operation="multiply_inverse",
        expected=lambda: [W - np.linalg.lstsq(X, targets)[0]],
        vectors=(mean_gradient,),
        damping=0.0,
        rule="factored",
    )


def _applied(
    blocks: Sequence[HostArray], vectors: Sequence[HostArray]
) -> list[HostArray]:
    return [
        (block @ V.ravel()).reshape(V.shape)
        for block, V in zip(blocks, vectors, strict=True)
    ]


def _solved(
    blocks: Sequence[HostArray], vectors: Sequence[HostArray]
) -> list[HostArray]:
    return [
        np.linalg.solve(block, V.ravel()).reshape(V.shape)
        for block, V in zip(blocks, vectors, strict=True)
    ]
