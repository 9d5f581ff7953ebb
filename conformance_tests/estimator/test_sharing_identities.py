"""K-FAC for shared weights: where expanding is exact, and where reducing is.

Each test names the identity of the literature that it holds.  All networks are linear and
the loss is the squared error, so that a block can be exact for any data; ``expand``
treats every position as an example, ``reduce`` takes an example's positions together.

With the library's normalization ``reduce`` averages inputs and sums output gradients over
the S positions.  Where one and the same vector g arrives at every position, its G is
therefore ``(S g)(S g)^T``, S^2 times that of ``expand``; the literature, which averages
the gradients there, calls the two equal.
"""

import math

import numpy as np
import pytest

import kfac_core as kc

from ..builders import network
from ..builders.tolerances import assert_close, assert_differs

WIDTHS = (3, 4, 2, 3)
EXAMPLES = 3

every_loss = pytest.mark.parametrize("loss", ["sum", "mean", "mean_rows"])
reductions = pytest.mark.parametrize("reduction", ["sum", "mean"])
shared_axes = pytest.mark.parametrize("shared", [(3,), (2, 2)])


def linear_network(rng, **options):
    """Return a deep linear network."""
    return network.random_network(rng, WIDTHS, "identity", **options)


def shared_inputs(rng, shared):
    """Return inputs with shared axes."""
    return rng.normal(size=(EXAMPLES, *shared, WIDTHS[0]))


def type2(net, x):
    """Return the vectors e_c at every output position."""
    return network.type2_vectors("mse", net.outputs(x))


def assert_all_differ(learned, expected):
    """Assert that no layer's block is the expected one."""
    assert len(learned) == len(expected)
    for block, dense in zip(learned, expected, strict=True):
        assert_differs(block.dense, dense)


@every_loss
@shared_axes
def test_expand_is_exact_without_a_reduction(backend, rng, loss, shared):
    """B5: if the loss is a sum over positions, expand is the GGN of every layer."""
    net, x = linear_network(rng), shared_inputs(rng, shared)

    learned = network.feed(backend, net, x, type2(net, x), loss=loss)

    network.assert_all_close(learned, network.ggn_blocks(net, x, "mse"))


@pytest.mark.parametrize("loss", ["sum", "mean_rows"])
def test_expand_is_exact_for_sigma_point_labels(backend, rng, loss):
    """B5: so it is when the vectors come from sampled labels, and are averaged."""
    net, x = linear_network(rng), shared_inputs(rng, (3,))
    vectors = network.sigma_point_vectors(net.outputs(x))

    learned = network.feed(backend, net, x, vectors, loss=loss, sources="mean")

    network.assert_all_close(learned, network.ggn_blocks(net, x, "mse"))


def test_reduce_is_not_exact_without_a_reduction(backend, rng):
    """B5: with the same vectors, reduce is not the GGN of any layer."""
    net, x = linear_network(rng), shared_inputs(rng, (3,))

    learned = network.feed(backend, net, x, type2(net, x), loss="sum", sharing="reduce")

    assert_all_differ(learned, network.ggn_blocks(net, x, "mse"))


@reductions
@shared_axes
@pytest.mark.parametrize("loss", ["sum", "mean"])
def test_reduce_is_exact_for_a_reduction_at_the_end(
    backend, rng, reduction, shared, loss
):
    """B6: with a sum or mean over positions at the end, reduce is the GGN everywhere."""
    net = linear_network(rng, reduce_after=2, reduction=reduction)
    x = shared_inputs(rng, shared)

    learned = network.feed(backend, net, x, type2(net, x), loss=loss, sharing="reduce")

    network.assert_all_close(learned, network.ggn_blocks(net, x, "mse"))


@reductions
def test_expand_is_not_exact_for_a_reduction_at_the_end(backend, rng, reduction):
    """B6: there expand is not the GGN of any layer."""
    net = linear_network(rng, reduce_after=2, reduction=reduction)
    x = shared_inputs(rng, (3,))

    learned = network.feed(backend, net, x, type2(net, x), loss="sum")

    assert_all_differ(learned, network.ggn_blocks(net, x, "mse"))


def test_sharing_is_of_no_matter_where_nothing_varies(backend, rng):
    """B6: for equal inputs at all S positions and a mean, expand is S^-1 times the GGN.

    Each position then has 1/S of the output gradient; expand adds S squares of them.
    """
    net = linear_network(rng, reduce_after=2, reduction="mean")
    S = 3
    x = np.repeat(shared_inputs(rng, (1,)), S, axis=1)
    vectors = type2(net, x)

    expanded = network.feed(backend, net, x, vectors, loss="sum")
    together = network.feed(backend, net, x, vectors, loss="sum", sharing="reduce")

    dense = network.ggn_blocks(net, x, "mse")
    network.assert_all_close(together, dense)
    network.assert_all_close(expanded, [F / S for F in dense])


@reductions
@shared_axes
@pytest.mark.parametrize("behind", [0, 1])
def test_reduce_is_exact_for_a_reduction_anywhere(
    backend, rng, reduction, shared, behind
):
    """B7: with the reduction after layer k, reduce is the GGN before it and after it."""
    net = linear_network(rng, reduce_after=behind, reduction=reduction)
    x = shared_inputs(rng, shared)

    learned = network.feed(
        backend, net, x, type2(net, x), loss="mean", sharing="reduce"
    )

    network.assert_all_close(learned, network.ggn_blocks(net, x, "mse"))


@reductions
@pytest.mark.parametrize("behind", [0, 1])
def test_expand_and_reduce_agree_after_the_reduction(backend, rng, reduction, behind):
    """B7: after layer k nothing is shared: expand and reduce agree, factor by factor."""
    net = linear_network(rng, reduce_after=behind, reduction=reduction)
    x = shared_inputs(rng, (3,))
    vectors = type2(net, x)

    expanded = network.feed(backend, net, x, vectors, loss="sum")
    together = network.feed(backend, net, x, vectors, loss="sum", sharing="reduce")

    after = slice(behind + 1, None)
    network.assert_all_close(expanded[after], network.ggn_blocks(net, x, "mse")[after])
    for block, other in zip(expanded[after], together[after], strict=True):
        for got, expected in zip(block, other, strict=True):
            assert_close(got, expected, "roundoff", "float64")


@reductions
@shared_axes
@pytest.mark.parametrize("behind", [0, 1, 2])
def test_before_the_reduction_only_the_input_factors_differ(
    backend, rng, reduction, shared, behind
):
    """B7: up to layer k, G of reduce is S^2 that of expand; A and the block differ."""
    net = linear_network(rng, reduce_after=behind, reduction=reduction)
    x = shared_inputs(rng, shared)
    vectors = type2(net, x)
    S = math.prod(shared)

    expanded = network.feed(backend, net, x, vectors, loss="sum")
    together = network.feed(backend, net, x, vectors, loss="sum", sharing="reduce")

    before = slice(0, behind + 1)
    dense = network.ggn_blocks(net, x, "mse")[before]
    network.assert_all_close(together[before], dense)
    assert_all_differ(expanded[before], dense)
    for block, other in zip(expanded[before], together[before], strict=True):
        G = S**2 * block.output_factor
        assert_close(other.output_factor, G, "identity", "float64")
        # Both have the corner 1 of the bias, so no scale can make them equal.
        assert_differs(other.input_factor, block.input_factor)


@pytest.mark.parametrize(("sharing", "behind"), [("expand", None), ("reduce", 1)])
def test_the_estimator_holds_the_ggn_of_shared_layers(backend, rng, sharing, behind):
    """B5, B7: the estimator's blocks are exact too, below an exact damping."""
    net = linear_network(rng, reduce_after=behind)
    x = shared_inputs(rng, (3,))
    vectors = network.reduced(type2(net, x), "mean", net.outputs(x))
    names = ["first", "second", "third"]
    estimator = kc.Estimator(
        dict(zip(names, network.blocks_of(net, sharing=sharing), strict=True)),
        decay=0.95,
        damping=0.1,
        damping_rule="exact",
        reduction="mean",
        refreshing=kc.Refreshing(factorizations=()),
    )
    fed = dict(zip(names, network.batches(backend, net, x, vectors), strict=True))

    # Twice the same batch: an average of equals is what each of them is.
    estimator.update(fed)
    estimator.update(fed)
    estimator.refresh()

    for name, dense in zip(names, network.ggn_blocks(net, x, "mse"), strict=True):
        operator = estimator.operator(name)
        damped = dense + 0.1 * np.eye(len(dense))
        undamped = backend.to_numpy(operator.to_dense(damped=False))
        assert_close(undamped, dense, "identity", "float64")
        assert_close(
            backend.to_numpy(operator.to_dense()), damped, "identity", "float64"
        )
