"""The checks that every K-FAC implementation must pass as far as it supports them.

Checks B use networks on which an approximation is known to be exact; the reference is
exact curvature by complex steps.  Checks D compare with the definition, in loops, on
problems where K-FAC is *not* exact: every scale, order and convention affects the result.
Checks A are products and inverses.  ``docs/identities.md`` lists all of them by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from kfac_core_conformance.check import SINGLE_TOLERANCE, Check
from kfac_core_conformance.dense import (
    approximate_blocks,
    fisher_blocks,
    ggn_blocks,
)
from kfac_core_conformance.examples import (
    in_dtype,
    normal,
    random_network,
    random_targets,
    with_problem,
)
from kfac_core_conformance.layer import HostArray
from kfac_core_conformance.problem import Data, Problem
from kfac_core_conformance.products import product_checks


@cache
def identity_checks() -> tuple[Check, ...]:
    """Return every check, in the order of a report; answers are computed when compared."""
    return (
        *_exact_for_one_datum(),
        *_exact_for_linear_networks(),
        *_exact_with_sharing(),
        *_exact_for_factorial_rows(),
        *_definitions(),
        *product_checks(),
    )


def _block(
    name: str,
    says: str,
    problem: Problem,
    reference: Callable[[Problem], Sequence[HostArray]],
    **options: Any,
) -> Check:
    return Check(
        name=name,
        says=says,
        problem=problem,
        operation="block",
        expected=lambda: reference(problem),
        **options,
    )


def _exact_for_one_datum() -> Iterator[Check]:
    net = random_network(1, (4, 3, 2), activation="tanh")
    one = normal(2, 1, 4)
    for loss in ("mse", "ce"):
        for reduction in ("sum", "mean"):
            problem = with_problem(net, one, loss, reduction=reduction)
            says = "one datum: the Gauss-Newton matrix"
            yield _block(f"B1 {loss} {reduction}", says, problem, ggn_blocks)
        for reduction in ("sum", "mean"):
            same = np.repeat(one, 5, axis=0)
            problem = with_problem(net, same, loss, reduction=reduction)
            says = "equal data: the Gauss-Newton matrix, whatever the reduction"
            yield _block(f"B2 {loss} {reduction}", says, problem, ggn_blocks)
        options = {"reduction": "mean", "estimation": "empirical"}
        problem = with_problem(net, one, loss, **options)
        says = "one datum: the empirical Fisher matrix"
        yield _block(f"B3 {loss}", says, problem, fisher_blocks)


def _exact_for_linear_networks() -> Iterator[Check]:
    linear, data = random_network(3, (4, 3, 5, 2)), normal(4, 6, 4)
    for reduction in ("sum", "mean"):
        problem = with_problem(linear, data, "mse", reduction=reduction)
        says = "deep linear network, squared error: the Gauss-Newton matrix"
        yield _block(f"B4 {reduction}", says, problem, ggn_blocks)
    problem = with_problem(linear, data, "mse", estimation="empirical")
    yield _block(
        "B4 other",
        "the same with gradients at the targets: not the empirical Fisher matrix",
        problem,
        fisher_blocks,
        must_differ=True,
    )
    net = random_network(5, (4, 3, 2), activation="tanh")
    problem = with_problem(net, data, "mse", reduction="mean")
    says = "the last layer of any network, squared error: the Gauss-Newton matrix"
    yield _block("B9", says, problem, ggn_blocks, layers=(1,))
    says = "its hidden layer: not the Gauss-Newton matrix"
    yield _block("B9 other", says, problem, ggn_blocks, layers=(0,), must_differ=True)
    outputs = linear.forward(data).result
    C = outputs.shape[-1]
    offsets = np.sqrt(C) * np.eye(C)[:, None, :]
    labels = np.concatenate([outputs + offsets, outputs - offsets])
    for reduction in ("sum", "mean"):
        problem = Problem(
            network=linear,
            loss="mse",
            updates=(Data(data, labels),),
            estimation="labels",
            reduction=reduction,  # type: ignore[arg-type]
        )
        says = "2C labels with the model's covariance: the Gauss-Newton matrix"
        yield _block(f"B19 {reduction}", says, problem, ggn_blocks)


def _exact_with_sharing() -> Iterator[Check]:
    data = normal(6, 5, 3, 4)
    plain = random_network(7, (4, 3, 2))
    for reduction in ("sum", "mean", "mean_rows"):
        problem = with_problem(plain, data, "mse", reduction=reduction)
        says = "shared weights, a loss at every position: expand is exact"
        yield _block(f"B5 {reduction}", says, problem, ggn_blocks)
    for how in ("sum", "mean"):
        net = random_network(8, (4, 3, 2), reduce_after=1, reduction=how)
        problem = with_problem(net, data, "mse", sharing="reduce", reduction="mean")
        says = f"shared weights, a {how} over positions at the end: reduce is exact"
        yield _block(f"B6 {how}", says, problem, ggn_blocks)
        problem = with_problem(net, data, "mse", reduction="mean")
        says = "the same: expand is not"
        yield _block(f"B6 {how} other", says, problem, ggn_blocks, must_differ=True)
    net = random_network(9, (4, 3, 2), reduce_after=0)
    problem = with_problem(net, data, "mse", sharing="reduce", reduction="mean")
    says = "shared weights, a sum over positions in between: reduce is exact"
    yield _block("B7", says, problem, ggn_blocks)
    images = normal(10, 3, 4, 5, 2)
    for sharing, reduce_after, says in (
        ("expand", None, "convolution, a loss at every position: expand is exact"),
        ("reduce", 0, "convolution, a sum over positions: reduce is exact"),
    ):
        net = random_network(11, (2, 3), kernel_size=(2, 3), reduce_after=reduce_after)
        problem = with_problem(net, images, "mse", sharing=sharing)
        yield _block(f"B20 {sharing}", says, problem, ggn_blocks)


def _exact_for_factorial_rows() -> Iterator[Check]:
    net = random_network(12, (3, 2))
    inputs, grads = normal(13, 4, 3), normal(14, 5, 2)
    x = np.repeat(inputs, len(grads), axis=0)
    g = np.tile(grads, (len(inputs), 1))
    targets = net.forward(x).result - g
    for approximation in ("kronecker", "tnt", "eigen"):
        problem = Problem(
            network=net,
            loss="mse",
            updates=(Data(x, targets),),
            estimation="empirical",
            approximation=approximation,
            reduction="mean",
        )
        says = "every input meets every gradient: the empirical Fisher matrix"
        yield _block(f"B11 {approximation}", says, problem, fisher_blocks)


def _definitions() -> Iterator[Check]:
    net = random_network(15, (4, 3, 2), activation="tanh")
    bare = random_network(16, (4, 3, 2), activation="tanh", bias=False)
    data, positions = normal(17, 7, 4), normal(18, 5, 3, 4)
    images = normal(19, 3, 4, 5, 2)
    conv = random_network(20, (2, 3, 2), kernel_size=(2, 3), activation="tanh")
    for loss in ("mse", "ce"):
        for reduction in ("sum", "mean"):
            problem = with_problem(net, data, loss, reduction=reduction)
            yield _defined(f"D {loss} {reduction}", problem)
    for name, network, inputs, options in (
        ("no bias", bare, data, {"reduction": "mean"}),
        ("empirical sum", net, data, {"estimation": "empirical"}),
        ("empirical mean", net, data, {"estimation": "empirical", "reduction": "mean"}),
        ("expand sum", net, positions, {}),
        ("expand mean", net, positions, {"reduction": "mean"}),
        ("expand mean_rows", net, positions, {"reduction": "mean_rows"}),
        ("reduce", net, positions, {"sharing": "reduce"}),
        ("conv expand", conv, images, {}),
        ("conv reduce", conv, images, {"sharing": "reduce"}),
        ("parts", net, data, {"parts": (1, 4, 2)}),
    ):
        yield _defined(f"D {name}", with_problem(network, inputs, "mse", **options))
    for approximation in ("eigen", "tnt", "full", "diagonal"):
        problem = with_problem(
            net, data, "mse", approximation=approximation, estimation="empirical"
        )
        yield _defined(f"D {approximation}", problem)
    updates = tuple(
        Data(normal(seed, n, 4), random_targets(seed, "mse", (n, 2)))
        for seed, n in ((21, 7), (22, 5), (23, 6))
    )
    problem = with_problem(net, data, "mse", decay=0.8, updates=updates)
    yield _defined("D average", problem)
    problem = in_dtype(with_problem(net, data, "mse"), "float32")
    yield _defined("D float32", problem, tolerance=SINGLE_TOLERANCE)


def _defined(name: str, problem: Problem, **options: Any) -> Check:
    """Return a check of a block against the loops that define it."""
    says = f"the definition of {problem.approximation}, where it is not exact"
    return _block(name, says, problem, approximate_blocks, **options)
