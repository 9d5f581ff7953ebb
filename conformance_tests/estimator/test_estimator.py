"""The estimator: schedules, dampings, shared factors and failures."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.adapters import looks_at_values
from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close, assert_differs

DAMPING = 0.3


def make(blocks, **options):
    """Return an estimator with plain settings."""
    settings = {"decay": 0.8, "damping": DAMPING, "reduction": "sum"}
    return make_estimator(blocks, **(settings | options))


def dense(n=4, m=3, **options):
    """Return a dense block without bias."""
    layer = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
    return kc.Block(layer, kc.Kronecker(**options))


def draw(rng, N=10, n=4, m=3):
    """Return inputs and output gradients."""
    return rng.normal(size=(N, n)), rng.normal(size=(N, m))


def batch_of(backend, x, g, **options):
    """Return a batch on the backend."""
    return kc.Batch(backend.asarray(x), backend.asarray(g), **options)


def solved(x, g, V, *, damping=DAMPING, A=None):
    """Return the dense solution for a batch, with A from elsewhere if it is given."""
    own, G, S = reference.kronecker_factors(x, g[None], bias=False)
    F = reference.damped_block(
        own if A is None else A, G, S, damping=damping, rule="factored"
    )
    return np.linalg.solve(F, V.ravel()).reshape(V.shape)


def precondition(backend, estimator, name, V):
    """Return one preconditioned weight on the host."""
    gradients = {name: {"weight": backend.asarray(V)}}
    return backend.to_numpy(estimator.precondition(gradients)[name]["weight"])


def test_blocks_can_be_updated_and_refreshed_alone(backend, rng):
    """Blocks that are left out keep statistics, operator and age."""
    estimator = make({"a": dense(), "b": dense()})
    x, g = draw(rng)
    V = rng.normal(size=(4, 3))
    estimator.update({"a": batch_of(backend, x, g), "b": batch_of(backend, x, g)})
    estimator.refresh()
    before = estimator.state["b"]

    estimator.update({"a": batch_of(backend, 2 * x, g)})
    estimator.refresh(["a"])

    assert estimator.state["b"] is before
    assert estimator.state["a"].updates == 2
    assert estimator.state["a"].age == 0
    assert_close(
        precondition(backend, estimator, "b", V), solved(x, g, V), "inverse", "float64"
    )


@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi", "exact"])
def test_a_shared_input_factor_is_the_givers(backend, rng, rule):
    """The taker's block is made of the giver's A and of its own G."""
    estimator = make(
        {"q": dense(), "k": dense(m=2)},
        damping_rule=rule,
        factors={"k/input": "q/input"},
        factorizations=("inverse", "eigenbasis"),
    )
    x, g = draw(rng)
    _, h = draw(rng, m=2)
    elsewhere = rng.normal(size=x.shape)
    fed = {"q": batch_of(backend, x, g), "k": batch_of(backend, elsewhere, h)}
    estimator.update(fed)
    estimator.refresh()

    got = backend.to_numpy(estimator.operator("k").to_dense())

    A, _, _ = reference.kronecker_factors(x, g[None], bias=False)
    own, G, S = reference.kronecker_factors(elsewhere, h[None], bias=False)
    F = reference.damped_block(A, G, S, damping=DAMPING, rule=rule)
    assert_close(got, F, "product", "float64")
    assert_differs(got, reference.damped_block(own, G, S, damping=DAMPING, rule=rule))
    held = estimator.state["k"].statistics.averages["input"]
    assert float(held.weight) == 0.0
    bases = [estimator.operator(name).parts()["input"].basis for name in "qk"]
    first, second = (backend.to_numpy(basis.eigenvectors) for basis in bases)
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ({"k/input": "z/input"}, "Unknown block 'z'"),
        ({"k/middle": "q/input"}, "'block/input' or 'block/output'"),
        ({"k/output": "q/output"}, "different kinds or sizes"),
        ({"k/input": "q/input", "q/input": "p/input"}, "both take and give"),
        ({"d/input": "q/input"}, "has no input factor"),
        ({"r/input": "q/input"}, "'full, reduced'"),
    ],
)
def test_factors_that_cannot_be_shared_are_refused(shared, message):
    """What is wrong with a coupling is said when the estimator is made."""
    full = kc.Block(dense().layer, kc.Full())
    reduced = kc.Block(dense().layer, kc.Kronecker(sharing="reduce"))
    blocks = {"q": dense(), "p": dense(), "k": dense(m=2), "d": full, "r": reduced}

    with pytest.raises((kc.ConventionError, kc.UnknownBlockError), match=message):
        make(blocks, factors=shared)


def test_a_failed_refresh_keeps_the_operator(backend, rng):
    """Within the budget the previous operator stays, counted; past it nothing changes."""
    estimator = make({"a": dense(), "b": dense()}, failure_budget=1)
    x, g = draw(rng)
    V = rng.normal(size=(4, 3))
    estimator.update({name: batch_of(backend, x, g) for name in "ab"})
    estimator.refresh()
    expected = precondition(backend, estimator, "a", V)
    estimator.decay = 0.0
    estimator.update({name: batch_of(backend, 0 * x, 0 * g) for name in "ab"})
    estimator.damping = {"a": 0.0, "b": 1.0}

    estimator.refresh()

    assert estimator.state["a"].failures == 1
    assert estimator.state["b"].failures == 0
    assert np.array_equal(precondition(backend, estimator, "a", V), expected)
    before = estimator.state
    with pytest.raises(kc.FactorizationError, match=r"a/.*damping"):
        estimator.refresh()
    assert estimator.state is before
    assert estimator.state["a"].failures == 1
    assert np.array_equal(precondition(backend, estimator, "a", V), expected)


def test_a_flagged_refresh_is_counted_as_failed(backend, rng):
    """With check="status" the kept operator keeps its damping and age, too."""
    estimator = make({"a": dense()}, decay=0.0)
    x, g = draw(rng)
    V = rng.normal(size=(4, 3))
    estimator.update({"a": batch_of(backend, x, g)})
    estimator.refresh(check="status")
    expected = precondition(backend, estimator, "a", V)
    estimator.update({"a": batch_of(backend, 0 * x, 0 * g)})
    estimator.damping = 0.0

    estimator.refresh(check="status")

    held = estimator.state["a"]
    assert int(held.status) != 0
    assert np.array_equal(precondition(backend, estimator, "a", V), expected)
    if looks_at_values(backend):
        counts = held.age, held.refreshes, held.failures
        assert (*counts, held.damping) == (1, 1, 1, DAMPING)
        assert estimator.report()["a"].damping == DAMPING


def test_a_first_refresh_that_fails_raises(backend, rng):
    """Without an earlier operator there is nothing to keep."""
    estimator = make({"a": dense()}, damping=0.0, failure_budget=9)
    x, g = draw(rng)
    estimator.update({"a": batch_of(backend, 0 * x, g)})

    with pytest.raises(kc.FactorizationError, match="a/input"):
        estimator.refresh()


@pytest.mark.parametrize("loss", ["sum", "mean"])
def test_the_mean_gradient_is_that_of_the_summed_loss(backend, rng, loss):
    """It is the mean over examples of the gradients of the summed loss."""
    block, (x, g) = dense(), draw(rng)
    conventions = kc.Conventions(reduction=loss, sources="sum")
    scaled = g / len(g) if loss == "mean" else g

    got = block.mean_gradient(batch_of(backend, x, scaled), conventions=conventions)

    assert_close(backend.to_numpy(got), x.T @ g / len(g), "gram", "float64")


def test_the_mean_gradient_needs_no_rows_of_the_approximation(backend, rng):
    """It is that of the layers where a block keeps pixels, or pairs layers in a chain."""
    conventions = kc.Conventions(reduction="sum", sources="sum")
    layer = kc.Conv(
        in_channels=2,
        out_channels=3,
        kernel_size=(2,),
        padding=((0, 0),),
        bias=True,
        weight_layout="spatial_io",
        data_layout="channels_last",
    )
    x, g = rng.standard_normal((4, 5, 2)), rng.standard_normal((4, 4, 3))
    block = kc.Block(layer, kc.Kronecker(input="uncorrelated"))
    got = block.mean_gradient(batch_of(backend, x, g), conventions=conventions)
    patches = np.stack([x[:, :-1], x[:, 1:]], axis=2).reshape(4, 4, 4)
    rows = np.concatenate([patches, np.ones((4, 4, 1))], axis=-1)
    expected = np.einsum("nsi,nso->io", rows, g) / 4
    assert_close(backend.to_numpy(got), expected, "gram", "float64")

    (x1, g1), (x2, g2) = draw(rng), draw(rng)
    layers = (dense().layer, dense().layer)
    chain = kc.Block(kc.Chain(names=("a", "b"), layers=layers), kc.BlockTridiagonal())
    batches = {"a": batch_of(backend, x1, g1), "b": batch_of(backend, x2, g2)}
    got = chain.mean_gradient(batches, conventions=conventions)
    column = np.concatenate([(x1.T @ g1).ravel(), (x2.T @ g2).ravel()])
    assert_close(backend.to_numpy(got)[:, 0], column / len(g1), "gram", "float64")


def test_the_mode_is_written_into_the_state(backend, rng):
    """Statistics of one estimation mode are not loaded as those of another."""
    x, g = draw(rng)
    estimator = make({"a": dense()}, mode="gradients")
    estimator.update({"a": batch_of(backend, x, g)})
    state = estimator.state_dict()

    with pytest.raises(kc.StateError, match="gradients"):
        make({"a": dense()}, mode="exact").load_state_dict(state)
    make({"a": dense()}, mode="gradients").load_state_dict(state)
    with pytest.raises(kc.ConventionError, match="mode"):
        make({"a": dense()}, mode="guess")


def test_every_product_is_reached_by_name(backend, rng):
    """`apply` gives each product of the operator, in the parameters' layout."""
    estimator = make({"a": dense()})
    x, g = draw(rng)
    V = rng.normal(size=(4, 3))
    estimator.update({"a": batch_of(backend, x, g)})
    estimator.refresh()
    gradients = {"a": {"weight": backend.asarray(V)}}
    F = backend.to_numpy(estimator.operator("a").to_dense())
    L = np.linalg.cholesky(F)

    results = {
        "multiply": (F, {}),
        "multiply_cholesky": (L.T, {"transpose": True}),
        "multiply_cholesky_inverse": (np.linalg.inv(L), {}),
        "sample": (np.linalg.inv(L).T, {}),
    }
    for product, (matrix, options) in results.items():
        got = estimator.apply(product, gradients, **options)["a"]["weight"]
        expected = (matrix @ V.ravel()).reshape(V.shape)
        assert_close(backend.to_numpy(got), expected, "inverse", "float64")
    got = estimator.apply("multiply_matpower", gradients, -0.25)["a"]["weight"]
    expected = (reference.matrix_power(F, -0.25) @ V.ravel()).reshape(V.shape)
    assert_close(backend.to_numpy(got), expected, "power", "float64")
    with pytest.raises(kc.ConventionError, match="multiply_it"):
        estimator.apply("multiply_it", gradients)
