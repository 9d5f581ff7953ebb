"""Statistics with negative eigenvalues: one rule for every power, path and operator.

They stay as long as the damped matrix is positive definite; where it is not, all of them
are set to zero.  The reference is an eigendecomposition in NumPy.
"""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import replaced
from kfac_core.linalg.symmetric import SymmetricMatrix

from ..builders.one_block import learn, operator_for

n, m = 4, 3
DENSE = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
TENSOR = kc.Parameters(shapes={"w": (n, m)})
# Of the input factor (and of the whole block of `Full`): small beside the damping or not.
NEGATIVE = {"slightly": -0.03, "not definite": -0.5}
POWERS = (-1.0, -1.0 + 1e-9, -0.5, -0.25, 0.5, 1.0 - 1e-9)
DAMPING = 0.1
KINDS = {
    "factored": (DENSE, kc.Kronecker(), "factored_unit_pi"),
    "exact": (DENSE, kc.Kronecker(), "exact"),
    "full": (DENSE, kc.Full(), "exact"),
    "tnt, factored": (TENSOR, kc.TNT(), "factored_unit_pi"),
    "tnt, exact": (TENSOR, kc.TNT(), "exact"),
}


def symmetric(size, smallest, seed):
    """Return a matrix with one negative eigenvalue, or none."""
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.normal(size=(size, size)))[0]
    return (Q * np.linspace(1.0, 2.0, size).copy()) @ Q.T + (
        (smallest - 1.0) * np.outer(Q[:, 0], Q[:, 0])
    )


def positive(w, shift):
    """Return the eigenvalues of the shifted matrix, by the rule."""
    return w + shift if np.all(w + shift > 0) else np.maximum(w, 0.0) + shift


def power_of(M, shift, exponent):
    """Return ``(M + shift I)^p`` by the rule."""
    w, Q = np.linalg.eigh(M)
    return (Q * positive(w, shift) ** exponent) @ Q.T


def expected(kind, matrices, exponent):
    """Return a power of the damped block as one matrix."""
    if kind == "full":
        return power_of(matrices["block"], DAMPING, exponent)
    names = ("input", "output") if "input" in matrices else ("axis0", "axis1")
    A, G = (matrices[name] for name in names)
    scale = 1.0 / np.trace(A) if "tnt" in kind else 1.0
    if "exact" not in kind:
        share = np.sqrt(DAMPING / scale)
        parts = (power_of(M, share, exponent) for M in (A, G))
        return scale**exponent * np.kron(*parts)
    (a, P), (g, Q) = (np.linalg.eigh(M) for M in (A, G))
    s = positive(scale * np.outer(a, g).ravel(), DAMPING)
    basis = np.kron(P, Q)
    return (basis * s**exponent) @ basis.T


def operator_of(backend, kind, smallest):
    """Return the operator of statistics with given matrices, and the matrices."""
    layer, approximation, rule = KINDS[kind]
    block = kc.Block(layer, approximation)
    rng = np.random.default_rng(2)
    x, g = (backend.asarray(rng.normal(size=(9, size))) for size in (n, m))
    batch = kc.Batch(x, g)
    if layer is TENSOR:
        D = np.einsum("ki,ko->kio", backend.to_numpy(x), backend.to_numpy(g))
        batch = kc.GradientBatch({"w": backend.asarray(D)}, batch_size=9, sources=9)
    like = x if layer is DENSE else batch.gradients["w"]
    statistics = learn(block, batch, block.initial(like))
    matrices, averages = {}, dict(statistics.averages)
    for seed, (name, average) in enumerate(averages.items()):
        if not isinstance(average.sum, SymmetricMatrix):
            continue
        size = int(average.sum.array.shape[-1])
        own = smallest if name in ("input", "block", "axis0") else 0.5
        matrices[name] = symmetric(size, own, seed)
        weight = float(backend.to_numpy(average.weight))
        array = backend.asarray(weight * matrices[name])
        averages[name] = replaced(average, sum=SymmetricMatrix(array, True))
    made = replaced(statistics, averages=averages)
    operator = operator_for(
        block,
        made,
        damping=DAMPING,
        rule=rule,
        factorizations=("inverse", "eigenbasis"),
    )
    return operator, matrices


@pytest.mark.parametrize("negative", NEGATIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_negative_eigenvalues_have_one_rule_for_all_powers(backend, kind, negative):
    """Power -1 is that of -1 + 1e-9, whichever factorization makes it."""
    if backend.name == "jax" and (kind, negative) != ("exact", "slightly"):
        pytest.skip("one kind is enough where each is compiled")
    operator, matrices = operator_of(backend, kind, NEGATIVE[negative])
    v = np.random.default_rng(3).normal(size=operator.vector_shape)

    for exponent in POWERS:
        got = backend.to_numpy(
            operator.multiply_matpower(backend.asarray(v), exponent)
        ).ravel()
        reference = expected(kind, matrices, exponent) @ v.ravel()
        error = np.linalg.norm(got - reference)
        assert error <= 1e-7 * np.linalg.norm(reference), exponent


def test_roundoff_below_zero_counts_as_zero(backend):
    """An eigenvalue of -1e-15 of a matrix of size 1 divides by the damping alone."""
    if backend.name == "jax":
        pytest.skip("the same formula, compiled again")
    operator, matrices = operator_of(backend, "full", -1e-15)

    got = backend.to_numpy(operator.eigenvalues())

    assert got[0] == DAMPING
    assert np.linalg.eigvalsh(matrices["block"])[0] < 1e-14
