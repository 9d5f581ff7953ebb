"""K-FAC on whole networks: where it is exact, and where it must not be.

Each case names the identity of the literature that it holds.  The library sees what a
framework would hand it; the reference is a dense matrix from complex-step derivatives.
"Type 2" vectors are columns of a square root of the loss's Hessian, whose outer products
are summed; sampled labels give vectors whose outer products are averaged.

Where weights are shared, ``expand`` treats every position as an example, and ``reduce``
takes an example's positions together.  With the library's normalization ``reduce`` averages
inputs and sums output gradients over the S positions.  Where one and the same vector g
arrives at every position, its G is therefore ``(S g)(S g)^T``, S^2 times that of
``expand``; the literature, which averages the gradients there, calls the two equal.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest

import kfac_core as kc

from ..builders import network
from ..builders.tolerances import assert_close, assert_differs

SHALLOW = (3, 4, 3)
DEEP = (3, 4, 2, 3)
EXAMPLES = 3

losses = pytest.mark.parametrize("loss", ["sum", "mean"])
reductions = pytest.mark.parametrize("reduction", ["sum", "mean"])
shared_axes = pytest.mark.parametrize("shared", [(3,), (2, 2)])


class Case(NamedTuple):
    """A network, its data, the vectors that are fed, and how they are declared."""

    vectors: str = "type 2"
    kind: str = "mse"
    activation: str = "identity"
    widths: tuple[int, ...] = DEEP
    examples: int = EXAMPLES
    equal: bool = False
    shared: tuple[int, ...] = ()
    behind: int | None = None
    reduction: str = "sum"
    loss: str = "sum"
    sources: str = "sum"
    sharing: str = "expand"
    scale: float = 1.0

    def blocks(self, backend, rng):
        """Return the library's block of each layer, and the dense ones."""
        pooled = {"reduce_after": self.behind, "reduction": self.reduction}
        net = network.random_network(rng, self.widths, self.activation, **pooled)
        x = rng.normal(size=(self.examples, *self.shared, self.widths[0]))
        if self.equal:
            x = np.repeat(x[:1], self.examples, axis=0)
        outputs = net.outputs(x)
        dense = network.ggn_blocks(net, x, self.kind)
        if self.vectors == "observed":
            y = observed(rng, self.kind, outputs)
            y = np.repeat(y[:1], len(y), axis=0) if self.equal else y
            vectors = network.gradient(self.kind, outputs, y)
            dense = network.empirical_fisher_blocks(net, x, self.kind, y)
        elif self.vectors == "type 2":
            vectors = type2(net, x, self.kind)
        else:
            vectors = network.sigma_point_vectors(outputs)
            if self.vectors == "random":
                vectors = rng.normal(size=vectors.shape)
        declared = {f: getattr(self, f) for f in ("loss", "sources", "sharing")}
        return network.feed(backend, net, x, self.scale * vectors, **declared), dense


def named(identity, options, **every):
    """Return a case for each combination of options, by a name."""
    cases = {}
    for values in itertools.product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        cases[" ".join([identity, *map(str, values)])] = Case(**every, **chosen)
    return cases


LOSSES = {"loss": ["sum", "mean"]}
KINDS = {"kind": ["mse", "ce"], **LOSSES}
AXES = {"shared": [(3,), (2, 2)]}
POOLED = {"reduction": ["sum", "mean"]}
CURVED = {"activation": "tanh", "equal": True}
SIGMA_POINTS = {"vectors": "sigma points", "sources": "mean"}
TOGETHER = {"sharing": "reduce"}

EXACT = {
    # One datum, or N equal ones: no power of N is lost, whatever the loss's reduction.
    **named(
        "B1",
        {**KINDS, "activation": ["tanh", "identity"], "widths": [SHALLOW, DEEP]},
        examples=1,
    ),
    **named("B2", KINDS, **CURVED),
    **named("B3", {**KINDS, "examples": [1, EXAMPLES]}, vectors="observed", **CURVED),
    # Deep linear networks with squared error, and 2C labels at +-sqrt(C) e_c.
    **named("B4", {**LOSSES, "widths": [SHALLOW, DEEP]}),
    **named("B19", LOSSES, **SIGMA_POINTS),
    # A loss that is a sum over positions.
    **named("B5", {"loss": ["sum", "mean", "mean_rows"], **AXES}),
    **named("B5 sampled", {"loss": ["sum", "mean_rows"]}, shared=(3,), **SIGMA_POINTS),
    # A sum or mean over positions at the end, or in between.
    **named("B6", {**POOLED, **AXES, **LOSSES}, behind=2, **TOGETHER),
    **named("B7", {**POOLED, **AXES, "behind": [0, 1]}, loss="mean", **TOGETHER),
}
OTHER = {
    # Vectors of one reduction, declared to be of the other.
    "B2 mean for sum": Case(scale=1 / EXAMPLES, **CURVED),
    "B2 sum for mean": Case(scale=EXAMPLES, loss="mean", **CURVED),
    "B4 observed labels": Case(vectors="observed"),
    "B5 reduce": Case(shared=(3,), **TOGETHER),
    **named("B6 expand", POOLED, behind=2, shared=(3,)),
    "B19 random labels": Case(vectors="random", sources="mean"),
    "B19 summed": Case(vectors="sigma points"),
}


def observed(rng, kind, outputs):
    """Return targets as somebody might have observed them."""
    if kind == "mse":
        return rng.normal(size=outputs.shape)
    C = outputs.shape[-1]
    return network.one_hot(rng.integers(C, size=outputs.shape[:-1]), C)


def type2(net, x, kind):
    """Return the vectors of the exact Gauss-Newton matrix."""
    return network.type2_vectors(kind, net.outputs(x))


def identical_data(rng, count, n):
    """Return one example several times."""
    return np.repeat(rng.normal(size=(1, n)), count, axis=0)


def assert_all_differ(learned, expected):
    """Assert that no layer's block is the expected one."""
    assert len(learned) == len(expected)
    for block, dense in zip(learned, expected, strict=True):
        assert_differs(block.dense, dense)


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_every_block_is_exact(backend, rng, case):
    """Each layer's block is the curvature, to the rounding of float64."""
    network.assert_all_close(*case.blocks(backend, rng))


@pytest.mark.parametrize("case", OTHER.values(), ids=OTHER)
def test_no_block_is_exact(backend, rng, case):
    """No layer's block is the curvature, where the identity does not hold."""
    assert_all_differ(*case.blocks(backend, rng))


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


def linear_network(rng, **options):
    """Return a deep linear network."""
    return network.random_network(rng, DEEP, "identity", **options)


def shared_inputs(rng, shared):
    """Return inputs with shared axes."""
    return rng.normal(size=(EXAMPLES, *shared, DEEP[0]))


def test_sharing_is_of_no_matter_where_nothing_varies(backend, rng):
    """B6: for equal inputs at all S positions and a mean, expand is S^-1 times the GGN.

    Each position then has 1/S of the output gradient; expand adds S squares of them.
    """
    net = linear_network(rng, reduce_after=2, reduction="mean")
    S = 3
    x = np.repeat(shared_inputs(rng, (1,)), S, axis=1)
    vectors = type2(net, x, "mse")

    expanded = network.feed(backend, net, x, vectors, loss="sum")
    together = network.feed(backend, net, x, vectors, loss="sum", sharing="reduce")

    dense = network.ggn_blocks(net, x, "mse")
    network.assert_all_close(together, dense)
    network.assert_all_close(expanded, [F / S for F in dense])


@reductions
@pytest.mark.parametrize("behind", [0, 1])
def test_expand_and_reduce_agree_after_the_reduction(backend, rng, reduction, behind):
    """B7: after layer k nothing is shared: expand and reduce agree, factor by factor."""
    net = linear_network(rng, reduce_after=behind, reduction=reduction)
    x = shared_inputs(rng, (3,))
    vectors = type2(net, x, "mse")

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
    vectors = type2(net, x, "mse")
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


LINEAR = {
    "expand": ({}, ()),
    "shared": ({}, (3,)),
    "reduce": ({"reduce_after": 1}, (3,)),
}


@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi", "exact"])
@pytest.mark.parametrize("kind", LINEAR)
def test_the_estimator_holds_the_ggn_of_every_layer(backend, rng, rule, kind):
    """B4, B5, B7, B19: an estimator has the GGN below its damping, in any rule."""
    pooled, shared = LINEAR[kind]
    net, x = linear_network(rng, **pooled), shared_inputs(rng, shared)
    outputs = net.outputs(x)
    vectors = network.reduced(network.sigma_point_vectors(outputs), "mean", outputs)
    names = ["first", "second", "third"]
    sharing = "reduce" if pooled else "expand"
    estimator = kc.Estimator(
        dict(zip(names, network.blocks_of(net, sharing=sharing), strict=True)),
        decay=0.9,
        damping=0.1,
        damping_rule=rule,
        reduction="mean",
        sources="mean",
        refreshing=kc.Refreshing(factorizations=()),
    )
    fed = dict(zip(names, network.batches(backend, net, x, vectors), strict=True))

    # Twice the same batch: an average of equals is what each of them is.
    estimator.update(fed)
    estimator.update(fed)
    estimator.refresh()

    for name, dense in zip(names, network.ggn_blocks(net, x, "mse"), strict=True):
        operator = estimator.operator(name)
        undamped = backend.to_numpy(operator.to_dense(damped=False))
        assert_close(undamped, dense, "identity", "float64")
        if rule == "exact":
            damped = backend.to_numpy(operator.to_dense())
            expected = dense + 0.1 * np.eye(len(dense))
            assert_close(damped, expected, "identity", "float64")
