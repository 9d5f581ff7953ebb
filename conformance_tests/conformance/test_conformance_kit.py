"""The conformance kit: this library passes it, and what is wrong is caught where it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kfac_core_conformance import (
    Check,
    LinearLayer,
    NotOfferedError,
    identity_checks,
    record_checks,
    run_check,
)
from kfac_core_conformance.dense import (
    approximate_blocks,
    fisher_blocks,
    ggn_blocks,
    kronecker_factors,
)
from kfac_core_conformance.own import Own

from ..builders.network import empirical_fisher_blocks, random_network
from ..builders.network import ggn_blocks as independent_ggn
from .test_records import path_of

CHECKS = {check.name: check for check in identity_checks()}


def outcomes(adapter, checks=None):
    """Return the outcome of each check by its name."""
    chosen = CHECKS.values() if checks is None else checks
    return {check.name: run_check(adapter, check) for check in chosen}


def failing(adapter):
    """Return the names of the checks that do not hold."""
    return {
        n for n, o in outcomes(adapter).items() if o.status in ("differs", "raised")
    }


def test_this_library_passes_everything(backend):
    """Nothing is left out: every check is offered, and holds."""
    checks = list(CHECKS.values())
    if backend.name != "numpy":  # The kit does not depend on it, and is not small.
        few = ("B1 ce mean", "B20 expand", "B20 reduce", "D average", "A3 eigen", "A4")
        checks = [CHECKS[name] for name in few[:: 2 if backend.name == "jax" else 1]]
    own = Own(backend.selection)

    found = outcomes(own, checks)

    assert {o.status for o in found.values()} == {"holds"}, [
        (n, o.error, o.message) for n, o in found.items() if o.status != "holds"
    ]


# Wrong in one way each.  What must catch it, and what cannot.


class Wrapped(Own):
    """This library with one thing changed."""

    def changed(self, problem):
        return problem

    def blocks(self, problem):
        return super().blocks(self.changed(problem))

    def multiply_inverse(self, problem, vectors, *, damping, rule):
        changed = self.changed(problem)
        return super().multiply_inverse(changed, vectors, damping=damping, rule=rule)


class SumForMean(Wrapped):
    """Takes gradients of a mean loss for those of a sum: a factor of N^2."""

    def _updated(self, problem):
        return super()._updated(Lying(problem, problem.reduction))


class Lying:
    """A problem whose rows are those of a mean, and which says it is of a sum."""

    def __init__(self, problem, reduction):
        self._problem = problem
        self.reduction = "sum"
        assert reduction in ("sum", "mean", "mean_rows")

    def __getattr__(self, name):
        return getattr(self._problem, name)


class ExpandForReduce(Wrapped):
    def changed(self, problem):
        return dataclasses.replace(problem, sharing="expand")


class BiasFirst(Own):
    """Has the bias in the first row, and says in the last."""

    def blocks(self, problem):
        found = []
        for layer, block in zip(
            problem.network.layers, super().blocks(problem), strict=True
        ):
            order = layer.order("io", "first")
            found.append(block[np.ix_(order, order)])
        return found


class Transposed(Own):
    """Has G on the left of A."""

    def blocks(self, problem):
        found = []
        for layer, block in zip(
            problem.network.layers, super().blocks(problem), strict=True
        ):
            n, m = layer.matrix.shape
            four = block.reshape(n, m, n, m).transpose(1, 0, 3, 2)
            found.append(four.reshape(n * m, n * m))
        return found


class InvertedPi(Own):
    """Damps A by 1/pi and G by pi; everything else is asked of NumPy."""

    def multiply_inverse(self, problem, vectors, *, damping, rule):
        if rule != "factored" or problem.approximation != "kronecker":
            return super().multiply_inverse(
                problem, vectors, damping=damping, rule=rule
            )
        found = []
        for layer, parameters, (A, G, S) in zip(
            problem.network.layers, vectors, kronecker_factors(problem), strict=True
        ):
            pi = np.sqrt(np.trace(G) / len(G) / (np.trace(A) / len(A)))
            root = np.sqrt(damping / S)
            V = layer.matrix_of(parameters, "io")
            U = np.linalg.solve(A + pi * root * np.eye(len(A)), V) / S
            U = np.linalg.solve(G + root / pi * np.eye(len(G)), U.T).T
            found.append(layer.parameters(U, "io"))
        return found


class Dense(Own):
    """Answers with the exact curvature, of which K-FAC is an approximation."""

    def blocks(self, problem):
        exact = fisher_blocks if problem.estimation == "empirical" else ggn_blocks
        return exact(problem)


class NoScale(Own):
    """Forgets the number of shared positions."""

    def blocks(self, problem):
        factors = kronecker_factors(problem)
        return [
            block / f.scale
            for block, f in zip(super().blocks(problem), factors, strict=True)
        ]


class Rubbish(Own):
    """No number in the last layer, behind which a comparison may overlook it."""

    def blocks(self, problem):
        *rest, last = super().blocks(problem)
        return [*rest, np.full_like(last, np.nan)]


WRONG = {
    SumForMean: ({"B2 mse mean", "B4 mean", "D ce mean", "B16 mean"}, {"D mse sum"}),
    ExpandForReduce: ({"B6 sum", "B6 mean", "B20 reduce"}, {"B5 sum", "D mse sum"}),
    BiasFirst: ({"B1 mse sum", "B9", "D mse sum", "D conv expand"}, {"D no bias"}),
    Transposed: ({"B1 mse sum", "B4 sum", "D no bias", "B11 kronecker"}, {"A4"}),
    InvertedPi: ({"A4", "A5", "A4 shared factored"}, {"A2 factored", "A3", "A4 unit"}),
    Dense: (
        {"B4 other", "B9 other", "D mse sum", "D ce mean"},
        {"B1 ce sum", "B4 sum"},
    ),
    NoScale: ({"B5 sum", "B20 expand", "D expand mean"}, {"D mse sum", "B6 sum"}),
    Rubbish: ({"B1 mse sum", "B4 other", "B9", "D tnt"}, {"A4", "B9 other"}),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda x: x.__name__)
def test_a_wrong_library_is_caught_by_the_right_checks(wrong):
    """The checks that see the defect differ, and those that cannot see it hold."""
    caught, held = WRONG[wrong]

    found = failing(wrong("numpy"))

    assert caught <= found
    assert not held & found


# The references, against those of the tests, which are other code.


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_the_references_are_those_of_the_tests(loss, rng):
    """Exact curvature by two programs that share nothing but the complex step."""
    check = CHECKS[f"D {loss} mean"]
    [data] = check.problem.updates
    network = random_network(rng, (4, 3, 2), "tanh")
    network = dataclasses.replace(
        network, weights=tuple(x.matrix for x in check.problem.network.layers)
    )
    empirical = dataclasses.replace(check.problem, estimation="empirical")

    pairs = [
        (ggn_blocks(check.problem), independent_ggn(network, data.inputs, loss)),
        (
            fisher_blocks(empirical),
            empirical_fisher_blocks(network, data.inputs, loss, data.targets),
        ),
    ]

    for ours, reference in pairs:
        for a, b in zip(ours, reference, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


def test_the_full_block_is_the_exact_one():
    """Outer products of per-example gradients are the matrix that complex steps give."""
    problem = dataclasses.replace(CHECKS["D ce sum"].problem, approximation="full")

    for a, b in zip(approximate_blocks(problem), ggn_blocks(problem), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel_size", [None, (2, 3)], ids=["dense", "conv"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["io", "oi"])
def test_parameters_come_back_and_orders_are_permutations(
    layout, bias, kernel_size, rng
):
    """Every position of the bias, in both layouts, for both kinds of layers."""
    rows = 4 * (6 if kernel_size else 1) + bias
    layer = LinearLayer(
        matrix=rng.normal(size=(rows, 3)), bias=bias, kernel_size=kernel_size
    )

    parameters = layer.parameters(layer.matrix, layout)

    assert np.array_equal(layer.matrix_of(parameters, layout), layer.matrix)
    flat = np.concatenate([x.ravel() for x in parameters.values()])
    assert np.array_equal(layer.matrix.ravel()[layer.order(layout, "after")], flat)
    for position in ("last", "first", "after"):
        order = layer.order(layout, position)
        assert sorted(order) == list(range(layer.matrix.size))
    if bias:
        last = layer.order("oi", "last").reshape(3, -1)
        assert np.array_equal(last[:, -1], np.arange(3) + 3 * (rows - 1))
        assert np.array_equal(
            layer.order("oi", "first").reshape(3, -1)[:, 0], last[:, -1]
        )


# What becomes of an adapter that cannot.


def test_undeclared_capabilities_are_skipped():
    """A capability, a method, and an exception are three ways to leave something out."""

    class Little(Own):
        capabilities = dataclasses.replace(Own.capabilities, losses=("mse",))
        multiply = None

        def blocks(self, problem):
            if problem.sharing == "reduce":
                raise NotOfferedError("no such thing")
            return super().blocks(problem)

    names = ("B1 ce sum", "A1", "D reduce", "B1 mse sum")
    found = outcomes(Little("numpy"), [CHECKS[name] for name in names])

    assert [found[name].status for name in names] == ["not offered"] * 3 + ["holds"]
    assert found["B1 ce sum"].message == "'ce' is not among its losses"
    assert "multiply" in found["A1"].message
    assert found["D reduce"].message == "no such thing"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda blocks: blocks[:1], "expected 2 answers"),
        (lambda blocks: [x[:-1] for x in blocks], "expected a block of shape"),
        (lambda blocks: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda blocks: [None, None], "TypeError"),
    ],
    ids=["count", "shape", "raises", "nothing"],
)
def test_adapter_errors_are_outcomes(answer, words):
    class Broken(Own):
        def blocks(self, problem):
            return answer(super().blocks(problem))

    outcome = run_check(Broken("numpy"), CHECKS["B1 mse sum"])

    assert outcome.status in ("raised", "differs")
    if words == "TypeError":  # `None` is a 0-d array of NaN to some versions of NumPy.
        assert outcome.status == "raised"
    else:
        assert words in outcome.message


def test_an_adapter_cannot_change_a_problem():
    """A library that works in place on what it is handed changes no other answer."""

    class Careless(Own):
        def blocks(self, problem):
            problem.updates[0].inputs[...] = 0.0
            return super().blocks(problem)

        def multiply(self, problem, vectors):
            found = super().multiply(problem, vectors)
            for parameters in vectors:
                for x in parameters.values():
                    x *= 0.0
            return found

    outcome = run_check(Careless("numpy"), CHECKS["B1 mse sum"])
    assert outcome.status == "raised"
    assert "read-only" in outcome.message
    for _ in range(2):
        assert run_check(Careless("numpy"), CHECKS["A1"]).status == "holds"


def test_everything_is_handed_over_in_the_dtype_of_the_problem(dtype):
    """A vector in another would make a library compute in that."""
    seen = set()

    class Looking(Own):
        def multiply_inverse(self, problem, vectors, *, damping, rule):
            assert problem.dtype == dtype
            [data] = problem.updates
            seen.update(x.dtype.name for x in data)
            seen.update(x.matrix.dtype.name for x in problem.network.layers)
            seen.update(x.dtype.name for rows in problem.rows(data) for x in rows[:2])
            seen.update(x.dtype.name for ps in vectors for x in ps.values())
            return super().multiply_inverse(
                problem, vectors, damping=damping, rule=rule
            )

    name = "A4" if dtype == "float64" else "A4 float32 factored"
    assert run_check(Looking("numpy"), CHECKS[name]).status == "holds"
    assert seen == {dtype}


# Records.


def test_records_are_put_to_an_adapter():
    """The answers of other libraries, as problems of a network without weights."""
    pytest.importorskip("safetensors")
    counts = {}
    for name in (
        "kfacjax_dense_kf_bias",
        "tfkfac_fc_kron_bias_2src",
        "numpy_dense_reduce",
    ):
        checks = record_checks(path_of(name))
        found = outcomes(Own("numpy"), checks)
        assert len(found) == len(checks)
        for outcome in found.values():
            counts[outcome.status] = counts.get(outcome.status, 0) + 1
            assert outcome.status != "not offered" or outcome.message

    assert counts["holds"] >= 10
    assert set(counts) == {"holds", "not offered"}


def test_a_record_catches_a_wrong_library():
    """Pi the wrong way round, against the answers of kfac-jax."""
    pytest.importorskip("safetensors")
    checks = record_checks(path_of("kfacjax_dense_kf_bias"))

    found = outcomes(InvertedPi("numpy"), checks)

    wrong = [o.check for o in found.values() if o.status == "differs"]
    assert wrong
    assert {check.rule for check in wrong} == {"factored"}
    assert all(isinstance(check, Check) for check in wrong)
