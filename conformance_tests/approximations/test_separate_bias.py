"""Weight and bias as separate blocks, as curvlinops and laplace-torch have them."""

import math

import numpy as np
import pytest

import kfac_core as kc

from ..builders.tolerances import assert_close

N, T, IN, OUT, LAMBDA = 7, 3, 4, 2, 0.3
LAYER = kc.Dense(in_features=IN, out_features=OUT, bias=True, weight_layout="io")
RULES = ("factored", "factored_unit_pi", "exact")


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
    return kc.operator_of(
        block, statistics, kc.RefreshOptions(damping=LAMBDA, rule=rule)
    )


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("rule", RULES)
def test_a_separate_bias_is_a_block_of_its_own(backend, dtype, rng, rule, sharing):
    """The dense matrix has zeros between the two, and each is damped by itself."""
    x, g = rows(rng)
    approximation = kc.Kronecker(bias="separate", sharing=sharing)
    operator = block_operator(backend, dtype, approximation, x, g, rule)
    F = damped(*factors(x, g, sharing), rule)
    V = rng.normal(size=((IN + 1) * OUT, 3))
    v = backend.asarray(V, dtype)

    assert operator.vector_shape == (IN + 1, OUT)
    assert_close(backend.to_numpy(operator.to_dense()), F, "product", dtype)
    assert_close(backend.to_numpy(operator @ v), F @ V, "product", dtype)
    got = backend.to_numpy(operator**-1 @ v)
    assert_close(got, np.linalg.solve(F, V), "inverse", dtype)
    w, Q = np.linalg.eigh(F)
    got = backend.to_numpy(operator**-0.5 @ v)
    assert_close(got, (Q / np.sqrt(w)) @ Q.T @ V, "power", dtype)
    assert_close(float(operator.logdet()), np.sum(np.log(w)), "inverse", dtype)
    assert_close(float(operator.trace()), np.trace(F), "product", dtype)
    norm = float(operator.frobenius_norm())
    assert_close(norm, np.linalg.norm(F), "product", dtype)
    eye = backend.asarray(np.eye(len(F)).reshape(-1, IN + 1, OUT), dtype)
    L = backend.to_numpy(operator.multiply_cholesky(eye)).reshape(len(F), -1).T
    assert_close(L, np.linalg.cholesky(F), "cholesky", dtype)
    joint = block_operator(backend, dtype, kc.Kronecker(sharing=sharing), x, g, "exact")
    assert not np.allclose(backend.to_numpy(joint.to_dense()), F)


@pytest.mark.usefixtures("compiles_long")
@pytest.mark.parametrize("rule", RULES)
def test_the_eigenbasis_of_a_separate_bias_is_without_damping(backend, rng, rule):
    """`spectral`, which posteriors are made of, is F of the two blocks."""
    x, g = rows(rng)
    operator = block_operator(
        backend, "float64", kc.Kronecker(bias="separate"), x, g, rule
    )
    A, G, S = factors(x, g, "expand")
    F = np.zeros(((IN + 1) * OUT,) * 2)
    F[: IN * OUT, : IN * OUT], F[IN * OUT :, IN * OUT :] = S * np.kron(A, G), S * G
    got = backend.to_numpy(operator.spectral().to_dense(damped=False))
    assert_close(got, F, "power", "float64")
    got = backend.to_numpy(operator.to_dense(damped=False))
    assert_close(got, F, "product", "float64")


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


@pytest.mark.usefixtures("compiles_long")
@pytest.mark.parametrize("execution", [kc.Execution(), kc.Execution(workers=2)])
def test_equal_blocks_with_separate_biases_are_stacked_right(backend, rng, execution):
    """Several at once, as an estimator computes them, and one without a bias."""
    bare = kc.Dense(in_features=IN, out_features=OUT, bias=False, weight_layout="io")
    kept = kc.Kronecker(bias="separate")
    layers = {"one": LAYER, "two": LAYER, "three": LAYER, "bare": bare}
    estimator = kc.Estimator(
        {name: kc.Block(layer, kept) for name, layer in layers.items()},
        reduction="sum",
        damping=LAMBDA,
        execution=execution,
    )
    fed = {name: rows(rng, positions=1) for name in layers}
    estimator.update(
        {
            name: kc.Batch(backend.asarray(x[:, 0]), backend.asarray(g[:, 0]))
            for name, (x, g) in fed.items()
        }
    )
    estimator.refresh()
    V = {name: rng.normal(size=(IN, OUT)) for name in layers}
    b = {name: rng.normal(size=(OUT,)) for name in layers if name != "bare"}
    given = {name: {"weight": backend.asarray(V[name])} for name in layers}
    for name, bias in b.items():
        given[name]["bias"] = backend.asarray(bias)
    found = estimator.precondition(given)
    for name, (x, g) in fed.items():
        F = damped(*factors(x, g, "expand"), "factored")
        vector = np.concatenate([V[name].ravel(), b.get(name, np.zeros(OUT))])
        expected = np.linalg.solve(F, vector)
        weight = backend.to_numpy(found[name]["weight"]).ravel()
        assert_close(weight, expected[: IN * OUT], "inverse", "float64")
        if name in b:
            bias = backend.to_numpy(found[name]["bias"])
            assert_close(bias, expected[IN * OUT :], "inverse", "float64")
    assert "bias/output" in estimator.report()["one"].factors
    state = estimator.state_dict()
    estimator.load_state_dict(state)


def test_uncorrelated_inputs_have_no_separate_bias():
    """The message says what to write instead."""
    with pytest.raises(kc.ConventionError, match="bias='joint'"):
        kc.Kronecker(input="uncorrelated", bias="separate")
