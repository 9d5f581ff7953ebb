"""Weight and bias as separate blocks, as curvlinops and laplace-torch have them."""

import math

import numpy as np
import pytest

import kfac_core as kc

from ..builders.one_block import operator_for
from ..builders.tolerances import assert_close

N, T, IN, OUT, LAMBDA = 7, 3, 4, 2, 0.3
LAYER = kc.Dense(in_features=IN, out_features=OUT, bias=True, weight_layout="io")


def rows(rng, *, positions=T):
    return rng.normal(size=(N, positions, IN)), rng.normal(size=(N, positions, OUT))


def factors(x, g, sharing):
    """Return A of the weight, G and S."""
    if sharing == "reduce":
        x, g = x.mean(axis=1), g.sum(axis=1)
        return x.T @ x / N, g.T @ g / N, 1.0
    positions = x.shape[1]
    A, G = (np.einsum("nsi,nsj->ij", v, v) / (N * positions) for v in (x, g))
    return A, G, float(positions)


def damped(A, G, S, rule):
    """Return the two damped blocks on the diagonal of one dense matrix."""
    n, m = len(A), len(G)
    F = np.zeros(((n + 1) * m,) * 2)
    bias = S * G + LAMBDA * np.eye(m)
    if rule == "exact":
        weight = S * np.kron(A, G) + LAMBDA * np.eye(n * m)
    else:
        pi = 1.0
        if rule == "factored":
            pi = math.sqrt(np.trace(A) / n / (np.trace(G) / m))
        a, g = math.sqrt(LAMBDA / S) * pi, math.sqrt(LAMBDA / S) / pi
        weight = S * np.kron(A + a * np.eye(n), G + g * np.eye(m))
    F[: n * m, : n * m], F[n * m :, n * m :] = weight, bias
    return F


def block_operator(backend, dtype, approximation, x, g, rule, *, layer=LAYER):
    block = kc.Block(layer, approximation)
    batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
    statistics = kc.update_block(
        block,
        block.initial(batch.inputs),
        batch,
        kc.UpdateOptions(
            conventions=kc.Conventions(reduction="sum", sources="sum"), decay=0.0
        ),
    )
    if approximation.has_bases:
        statistics = kc.rebase_block(block, statistics, "kronecker")
    return operator_for(block, statistics, damping=LAMBDA, rule=rule)


@pytest.mark.usefixtures("compiles_long")
def test_ekfac_with_a_separate_bias_has_the_bias_among_its_coordinates(backend, rng):
    """In the bases of ``blockdiag(A, 1)`` and G nothing is between weight and bias."""
    x, g = rows(rng, positions=1)
    approximation = kc.Eigen(bias="separate")
    operator = block_operator(backend, "float64", approximation, x, g, "exact")
    A, G, S = factors(x, g, "expand")
    got = backend.to_numpy(operator.to_dense())
    assert_close(got, damped(A, G, S, "exact"), "power", "float64")


@pytest.mark.usefixtures("compiles_long")
def test_a_diagonal_input_and_groups_have_separate_biases_too(backend, rng):
    """Each group of a convolution by itself; a diagonal has no products to leave out."""
    x, g = rows(rng)
    approximation = kc.Kronecker(bias="separate", input="diagonal")
    operator = block_operator(backend, "float64", approximation, x, g, "factored")
    A, G, S = factors(x, g, "expand")
    F = damped(np.diag(np.diag(A)), G, S, "factored")
    assert_close(backend.to_numpy(operator.to_dense()), F, "product", "float64")

    layer = kc.Conv(
        in_channels=2 * IN,
        out_channels=2 * OUT,
        kernel_size=(1,),
        padding="valid",
        groups=2,
        bias=True,
        weight_layout="spatial_io",
        data_layout="channels_last",
    )
    both = [rows(rng), rows(rng)]
    x, g = (np.concatenate(parts, axis=-1) for parts in zip(*both, strict=True))
    operator = block_operator(
        backend, "float64", kc.Kronecker(bias="separate"), x, g, "factored", layer=layer
    )
    V = rng.normal(size=(IN + 1, 2 * OUT))
    got = backend.to_numpy(operator.multiply_inverse(backend.asarray(V)))
    for q, (own_x, own_g) in enumerate(both):
        F = damped(*factors(own_x, own_g, "expand"), "factored")
        columns = slice(q * OUT, (q + 1) * OUT)
        expected = np.linalg.solve(F, V[:, columns].ravel()).reshape(IN + 1, OUT)
        assert_close(got[:, columns], expected, "inverse", "float64")


def test_a_layer_without_a_bias_has_the_joint_block(backend, rng):
    """There is nothing to take apart; a report names the bias's factor where there is."""
    bare = kc.Dense(in_features=IN, out_features=OUT, bias=False, weight_layout="io")
    x, g = rows(rng)
    apart, joint = (
        block_operator(backend, "float64", kind, x, g, "factored", layer=bare)
        for kind in (kc.Kronecker(bias="separate"), kc.Kronecker())
    )
    expected = damped(*factors(x, g, "expand"), "factored")[: IN * OUT, : IN * OUT]
    for operator in (apart, joint):
        got = backend.to_numpy(operator.to_dense())
        assert_close(got, expected, "product", "float64")
    estimator = kc.Estimator(
        {"one": kc.Block(LAYER, kc.Kronecker(bias="separate"))}, reduction="sum"
    )
    estimator.update({"one": kc.Batch(backend.asarray(x), backend.asarray(g))})
    estimator.refresh()
    assert "bias/output" in estimator.report()["one"].factors


def test_uncorrelated_inputs_have_no_separate_bias():
    """The message says what to write instead."""
    with pytest.raises(kc.ConventionError, match="bias='joint'"):
        kc.Kronecker(input="uncorrelated", bias="separate")
