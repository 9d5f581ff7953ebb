"""K-FAC on whole networks: where it is exact, and where it must not be.

Each test names the identity of the literature that it holds.  The library sees what a
framework would hand it; the reference is a dense matrix from complex-step derivatives.
"Type 2" vectors are columns of a square root of the loss's Hessian, whose outer products
are summed; sampled labels give vectors whose outer products are averaged.
"""

import numpy as np
import pytest

import kfac_core as kc

from ..builders import network
from ..builders.tolerances import assert_close, assert_differs

SHALLOW = (3, 4, 3)
DEEP = (3, 4, 2, 3)
EXAMPLES = 3

kinds = pytest.mark.parametrize("kind", ["mse", "ce"])
losses = pytest.mark.parametrize("loss", ["sum", "mean"])
activations = pytest.mark.parametrize("activation", ["tanh", "identity"])


def type2(net, x, kind):
    """Return the vectors of the exact Gauss-Newton matrix."""
    return network.type2_vectors(kind, net.outputs(x))


def identical_data(rng, count, n):
    """Return one example several times."""
    return np.repeat(rng.normal(size=(1, n)), count, axis=0)


def random_targets(rng, kind, outputs):
    """Return targets as somebody might have observed them."""
    if kind == "mse":
        return rng.normal(size=outputs.shape)
    C = outputs.shape[-1]
    return network.one_hot(rng.integers(C, size=outputs.shape[:-1]), C)


@kinds
@losses
@activations
@pytest.mark.parametrize("widths", [SHALLOW, DEEP])
def test_one_datum_gives_the_ggn(backend, rng, kind, loss, activation, widths):
    """B1: for one datum, K-FAC with type-2 vectors is the Gauss-Newton matrix."""
    net = network.random_network(rng, widths, activation)
    x = rng.normal(size=(1, widths[0]))

    learned = network.feed(backend, net, x, type2(net, x, kind), loss=loss)

    network.assert_all_close(learned, network.ggn_blocks(net, x, kind))


@kinds
@losses
def test_identical_data_give_the_ggn(backend, rng, kind, loss):
    """B2: for N identical data, no power of N is lost, whatever the loss's reduction."""
    net = network.random_network(rng, DEEP, "tanh")
    x = identical_data(rng, EXAMPLES, DEEP[0])

    learned = network.feed(backend, net, x, type2(net, x, kind), loss=loss)

    network.assert_all_close(learned, network.ggn_blocks(net, x, kind))


@losses
def test_a_block_is_the_curvature_of_the_mean_loss(backend, rng, loss):
    """B2: a block is curvature for each example; N times it is that of the summed loss."""
    net = network.random_network(rng, DEEP, "tanh")
    x = identical_data(rng, EXAMPLES, DEEP[0])

    learned = network.feed(backend, net, x, type2(net, x, "ce"), loss=loss)

    summed = network.ggn_blocks(net, x, "ce", loss="sum")
    for block, dense in zip(learned, summed, strict=True):
        assert_close(EXAMPLES * block.dense, dense, "identity", "float64")


@losses
def test_a_wrong_reduction_gives_another_block(backend, rng, loss):
    """B2: vectors of one reduction, declared to be of the other, give another block."""
    net = network.random_network(rng, DEEP, "tanh")
    x = identical_data(rng, EXAMPLES, DEEP[0])
    # `feed` scales vectors as `loss` asks for; these it makes those of the other loss.
    wrong = {"sum": 1 / EXAMPLES, "mean": EXAMPLES}[loss]
    vectors = wrong * type2(net, x, "mse")

    learned = network.feed(backend, net, x, vectors, loss=loss)

    for block, dense in zip(learned, network.ggn_blocks(net, x, "mse"), strict=True):
        assert_differs(block.dense, dense)


@kinds
@losses
@pytest.mark.parametrize("count", [1, EXAMPLES])
def test_one_datum_gives_the_empirical_fisher(backend, rng, kind, loss, count):
    """B3: for one datum, or copies of it, K-FAC with observed labels is the EF matrix."""
    net = network.random_network(rng, DEEP, "tanh")
    x = identical_data(rng, count, DEEP[0])
    outputs = net.outputs(x)
    y = np.repeat(random_targets(rng, kind, outputs[:1]), count, axis=0)
    vectors = network.gradient(kind, outputs, y)

    learned = network.feed(backend, net, x, vectors, loss=loss)

    network.assert_all_close(learned, network.empirical_fisher_blocks(net, x, kind, y))


@losses
@pytest.mark.parametrize("widths", [SHALLOW, DEEP])
def test_deep_linear_networks_give_the_ggn(backend, rng, loss, widths):
    """B4: in a deep linear network with squared error, every layer's block is the GGN."""
    net = network.random_network(rng, widths, "identity")
    x = rng.normal(size=(EXAMPLES, widths[0]))

    learned = network.feed(backend, net, x, type2(net, x, "mse"), loss=loss)

    network.assert_all_close(learned, network.ggn_blocks(net, x, "mse"))


def test_deep_linear_networks_do_not_give_the_empirical_fisher(backend, rng):
    """B4: with observed labels the same network's blocks are not the EF matrix's."""
    net = network.random_network(rng, DEEP, "identity")
    x = rng.normal(size=(EXAMPLES, DEEP[0]))
    y = random_targets(rng, "mse", net.outputs(x))
    vectors = network.gradient("mse", net.outputs(x), y)

    learned = network.feed(backend, net, x, vectors, loss="sum")

    dense = network.empirical_fisher_blocks(net, x, "mse", y)
    for block, expected in zip(learned, dense, strict=True):
        assert_differs(block.dense, expected)


@losses
def test_the_last_layer_with_squared_error_is_exact(backend, rng, loss):
    """B9: the last layer's block is the GGN with G = I; hidden layers must differ."""
    net = network.random_network(rng, DEEP, "tanh")
    x = rng.normal(size=(EXAMPLES, DEEP[0]))

    *hidden, last = network.feed(backend, net, x, type2(net, x, "mse"), loss=loss)

    *hidden_dense, dense = network.ggn_blocks(net, x, "mse")
    assert_close(last.dense, dense, "identity", "float64")
    assert_close(last.output_factor, np.eye(DEEP[-1]), "identity", "float64")
    for block, expected in zip(hidden, hidden_dense, strict=True):
        assert_differs(block.dense, expected)


def exact_proportions(rng, N, C, total):
    """Return label counts that add up to `total` for each example, and the labels."""
    labels = np.concatenate(
        [np.tile(np.arange(C), (N, 1)), rng.integers(C, size=(N, total - C))], axis=1
    )
    counts = network.one_hot(labels, C).sum(axis=1)
    return counts, network.one_hot(labels.T, C)


def test_enumerated_labels_give_the_softmax_hessian(backend, rng):
    """B18: sum_y p_y (p-e_y)(p-e_y)^T, diag p - p p^T and sum_c S_c S_c^T are one."""
    N, C, total = EXAMPLES, 3, 8
    counts, targets = exact_proportions(rng, N, C, total)
    p = counts / total
    logits = np.log(p)
    x = rng.normal(size=(N, 3))
    layer = network.random_network(rng, (3, C), "identity")
    type1 = np.stack([network.gradient("ce", logits, y) for y in targets])
    columns = network.type2_vectors("ce", logits)

    (sampled,) = network.feed(backend, layer, x, type1, loss="sum", sources="mean")
    (exact,) = network.feed(backend, layer, x, columns, loss="sum", sources="sum")

    closed = np.mean([np.diag(row) - np.outer(row, row) for row in p], axis=0)
    hessian = np.mean(network.softmax_hessians(logits), axis=0)
    assert_close(sampled.output_factor, closed, "identity", "float64")
    assert_close(exact.output_factor, closed, "identity", "float64")
    assert_close(exact.output_factor, hessian, "identity", "float64")


@losses
def test_labels_in_exact_proportion_give_the_fisher(backend, rng, loss):
    """B18: labels drawn in proportion to p_y give the Fisher matrix, which is the GGN."""
    C, total = DEEP[-1], 8
    counts, targets = exact_proportions(rng, 1, C, total)
    net = network.random_network(rng, DEEP, "tanh")
    x = identical_data(rng, EXAMPLES, DEEP[0])
    net.weights[-1][-1] += np.log(counts[0] / total) - net.outputs(x)[0]
    targets = np.repeat(targets, EXAMPLES, axis=1)
    vectors = np.stack([network.gradient("ce", net.outputs(x), y) for y in targets])

    learned = network.feed(backend, net, x, vectors, loss=loss, sources="mean")

    every = [np.tile(row, (EXAMPLES, 1)) for row in np.eye(C)]
    p = [np.full(EXAMPLES, share) for share in counts[0] / total]
    network.assert_all_close(learned, network.fisher_blocks(net, x, "ce", every, p))
    network.assert_all_close(learned, network.ggn_blocks(net, x, "ce"))


@losses
def test_sigma_point_labels_give_the_ggn_of_linear_networks(backend, rng, loss):
    """B19: 2C labels at +-sqrt(C) e_c give the GGN through the path of sampled labels."""
    net = network.random_network(rng, DEEP, "identity")
    x = rng.normal(size=(EXAMPLES, DEEP[0]))
    vectors = network.sigma_point_vectors(net.outputs(x))

    learned = network.feed(backend, net, x, vectors, loss=loss, sources="mean")

    network.assert_all_close(learned, network.ggn_blocks(net, x, "mse"))


@losses
def test_sigma_point_labels_give_the_fisher_of_identical_data(backend, rng, loss):
    """B19: so they do for any network at one point, where it is the Fisher matrix too."""
    net = network.random_network(rng, DEEP, "tanh")
    x = identical_data(rng, EXAMPLES, DEEP[0])
    outputs = net.outputs(x)
    vectors = network.sigma_point_vectors(outputs)

    learned = network.feed(backend, net, x, vectors, loss=loss, sources="mean")

    labels = list(outputs - vectors)
    weights = [np.full(EXAMPLES, 1.0 / len(labels))] * len(labels)
    network.assert_all_close(
        learned, network.fisher_blocks(net, x, "mse", labels, weights)
    )
    network.assert_all_close(learned, network.ggn_blocks(net, x, "mse"))


def test_random_or_summed_labels_do_not_give_the_ggn(backend, rng):
    """B19: as many labels drawn at random differ, and so do sigma points if summed."""
    net = network.random_network(rng, DEEP, "identity")
    x = rng.normal(size=(EXAMPLES, DEEP[0]))
    points = network.sigma_point_vectors(net.outputs(x))
    drawn = rng.normal(size=points.shape)

    random = network.feed(backend, net, x, drawn, loss="sum", sources="mean")
    summed = network.feed(backend, net, x, points, loss="sum", sources="sum")

    for learned in (random, summed):
        for block, dense in zip(
            learned, network.ggn_blocks(net, x, "mse"), strict=True
        ):
            assert_differs(block.dense, dense)


@losses
@pytest.mark.parametrize("rule", ["factored", "exact"])
def test_one_undamped_step_solves_linear_regression(backend, rng, loss, rule):
    """B16: from any start, one undamped step on the mean loss is the least squares fit."""
    N, n, m = 12, 3, 2
    x, y = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    W = rng.normal(size=(n + 1, m))
    net = network.Network((W,), "identity")
    x1 = np.concatenate([x, np.ones((N, 1))], axis=1)
    gradient = x1.T @ (x1 @ W - y) / N
    vectors = network.reduced(type2(net, x, "mse"), loss, net.outputs(x))
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="oi")
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())},
        decay=0.0,
        damping=0.0,
        damping_rule=rule,
        reduction=loss,
    )
    (batch,) = network.batches(backend, net, x, vectors)
    estimator.update({"fc": batch})
    estimator.refresh()
    parameters = {
        "weight": backend.asarray(gradient[:-1].T),
        "bias": backend.asarray(gradient[-1]),
    }

    step = estimator.precondition({"fc": parameters})["fc"]

    expected = np.linalg.lstsq(x1, y, rcond=None)[0]
    weight, bias = backend.to_numpy(step["weight"]), backend.to_numpy(step["bias"])
    assert_close(W[:-1] - weight.T, expected[:-1], "inverse", "float64")
    assert_close(W[-1] - bias, expected[-1], "inverse", "float64")


@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi", "exact"])
def test_the_estimator_holds_the_ggn_of_every_layer(backend, rng, rule):
    """B4, B19: a whole network's estimator has the GGN below its damping, in any rule."""
    net = network.random_network(rng, DEEP, "identity")
    x = rng.normal(size=(EXAMPLES, DEEP[0]))
    outputs = net.outputs(x)
    vectors = network.reduced(network.sigma_point_vectors(outputs), "mean", outputs)
    names = ["first", "second", "third"]
    estimator = kc.Estimator(
        dict(zip(names, network.blocks_of(net), strict=True)),
        decay=0.9,
        damping=0.1,
        damping_rule=rule,
        reduction="mean",
        sources="mean",
        refreshing=kc.Refreshing(factorizations=()),
    )
    fed = network.batches(backend, net, x, vectors)

    estimator.update(dict(zip(names, fed, strict=True)))
    estimator.refresh()

    for name, dense in zip(names, network.ggn_blocks(net, x, "mse"), strict=True):
        got = estimator.operator(name).to_dense(damped=False)
        assert_close(backend.to_numpy(got), dense, "identity", "float64")
