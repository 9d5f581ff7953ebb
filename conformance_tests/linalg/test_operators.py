"""Curvature operators: every product against the dense damped block (A1 to A9)."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.one_block import learn
from ..builders.tolerances import assert_close

RULES = ["factored", "factored_unit_pi", "exact"]
ALL = ("inverse", "cholesky", "eigenbasis")
DAMPING = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """Statistics on a backend, and the factors that they must hold."""

    backend: Any
    dtype: str
    block: Any
    statistics: Any
    A: np.ndarray
    G: np.ndarray
    S: float

    def operator(self, rule, damping=DAMPING, factorizations=(), **options):
        return kc.operator_of(
            self.block,
            self.statistics,
            kc.RefreshOptions(
                damping=damping, rule=rule, factorizations=factorizations, **options
            ),
        )

    def dense(self, rule, damping=DAMPING):
        return reference.damped_block(
            self.A, self.G, self.S, damping=damping, rule=rule
        )

    def vector(self, V):
        return self.backend.asarray(V, self.dtype)

    def close(self, got, dense, V, operation="inverse", **options):
        """Compare a product with that of a dense matrix, flattened row-major."""
        expected = (dense @ V.ravel()).reshape(V.shape)
        got = self.backend.to_numpy(got)
        assert_close(got, expected, operation, self.dtype, **options)


def make_case(backend, dtype, *, S=1, kinds=("full", "full"), n=3, m=3, bias=True):
    """Return statistics of a fixed batch."""
    rng = np.random.default_rng(7)
    shared = {1: (), 6: (2, 3)}[S]
    x, g = rng.normal(size=(10, *shared, n)), rng.normal(size=(1, 10, *shared, m))
    layer = kc.Dense(in_features=n, out_features=m, bias=bias, weight_layout="io")
    block = kc.Block(layer, kc.Kronecker(input=kinds[0], output=kinds[1]))
    fed = kc.Batch(backend.asarray(x, dtype), backend.asarray(g[0], dtype))
    statistics = learn(block, fed)
    A, G, count = reference.kronecker_factors(x, g, bias=bias)
    A = np.diag(np.diag(A)) if kinds[0] == "diagonal" else A
    G = np.diag(np.diag(G)) if kinds[1] == "diagonal" else G
    return Case(backend, dtype, block, statistics, A, G, count)


@pytest.fixture
def plain(backend, dtype):
    """Full factors and six shared positions."""
    return make_case(backend, dtype, S=6)


@pytest.mark.parametrize("rule", RULES)
def test_no_damping_is_the_dense_solve(plain, rng, rule):
    """A2: without damping every rule solves with ``S A (x) G`` itself."""
    V = rng.normal(size=(4, 3))

    got = plain.operator(rule, damping=0.0).multiply_inverse(plain.vector(V))

    inverse = np.linalg.inv(plain.S * np.kron(plain.A, plain.G))
    plain.close(got, inverse, V)


def test_predictive_covariance_from_rotated_jacobians(plain, rng):
    """A8: ``J (K + lam I)^-1 J^T`` from Jacobians in the eigenbasis, and from samples."""
    J = rng.normal(size=(2, 4, 3))
    operator = plain.operator("exact", factorizations=("eigenbasis",))
    a, g = operator.input, operator.output
    host = plain.backend.to_numpy

    spectrum = plain.S * np.outer(host(a.eigenvalues), host(g.eigenvalues))
    in_basis = host(operator.to_basis(plain.vector(J)))
    roots = [host(operator.sample(plain.vector(row))) for row in J]

    expected = J.reshape(2, -1) @ np.linalg.inv(plain.dense("exact"))
    expected = expected @ J.reshape(2, -1).T
    rotated = np.einsum("iab,jab,ab->ij", in_basis, in_basis, 1 / (spectrum + DAMPING))
    sampled = np.einsum("iab,jab->ij", roots, roots)
    assert_close(rotated, expected, "inverse", plain.dtype)
    assert_close(sampled, expected, "inverse", plain.dtype)


def assert_products(case, operator, F, V):
    """Compare the inverse, a root and the Cholesky factor, relative to their size."""
    case.close(operator.multiply_inverse(case.vector(V)), np.linalg.inv(F), V)
    root = operator.multiply_matpower(case.vector(V), -0.5)
    case.close(root, reference.matrix_power(F, -0.5), V, "power")
    L = np.linalg.cholesky(F)
    case.close(operator.multiply_cholesky(case.vector(V)), L, V)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 3), (3, 1)])
def test_factors_of_size_one(backend, dtype, rng, rule, n, m):
    """A 1 x 1 factor is inverted, rooted and damped like any other."""
    case = make_case(backend, dtype, n=n, m=m, bias=False)

    assert_products(
        case, case.operator(rule), case.dense(rule), rng.normal(size=(n, m))
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("damping", [1e-30, 1e-12, 1e8, 1e20])
def test_tiny_and_huge_dampings(plain, rng, rule, damping):
    """Products are right relative to their size at any damping."""
    operator = plain.operator(rule, damping=damping)

    assert_products(
        plain, operator, plain.dense(rule, damping), rng.normal(size=(4, 3))
    )
