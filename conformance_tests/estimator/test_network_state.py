"""The network's state as arrays alone, its pure functions, and the wiring that feeds it."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import leaves

from ..builders.estimators import make_estimator
from ..builders.reference import damped_block, kronecker_factors
from ..builders.states import wholes
from ..builders.tolerances import assert_close

n, m, DECAY = 3, 2, 0.7
NAMES = ("a", "b")


def estimator_of(n=n, **options):
    """Return an estimator of two layers."""
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    settings = {"decay": DECAY, "damping": 0.2, "damping_rule": "factored"}
    blocks = {name: kc.Block(layer, kc.Kronecker()) for name in NAMES}
    return make_estimator(blocks, reduction="sum", **(settings | options))


def network_of(n=n, **options):
    """Return the network of two layers."""
    return estimator_of(n, **options).network


def rows_of(rng, N=6, n=n):
    return {name: (rng.normal(size=(N, n)), rng.normal(size=(N, m))) for name in NAMES}


def batches(backend, dtype, rows):
    return {
        name: kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
        for name, (x, g) in rows.items()
    }


def like(backend, dtype):
    return backend.asarray(np.zeros(1), dtype)


def updated(network, state, fed):
    return network.update(state, fed, decay=DECAY, check="status")


def refreshed(network, state, damping=0.2):
    return network.refresh(state, damping=damping, check="status")


def gradients(backend, dtype, rng):
    return {
        name: {
            "weight": backend.asarray(rng.normal(size=(n, m)), dtype),
            "bias": backend.asarray(rng.normal(size=(m,)), dtype),
        }
        for name in NAMES
    }


def dense_direction(backend, history, gradient, damping):
    """Return ``F^-1 V`` of a debiased average over batches, by a dense solve."""
    weights = DECAY ** np.arange(len(history))[::-1]
    parts = [kronecker_factors(x, g[None], bias=True) for x, g in history]
    A, G, S = (
        sum(w * part[i] for w, part in zip(weights, parts, strict=True)) / weights.sum()
        for i in range(3)
    )
    V = np.concatenate(
        [backend.to_numpy(gradient["weight"]), backend.to_numpy(gradient["bias"])[None]]
    )
    F = damped_block(A, G, S, damping=damping, rule="factored")
    return np.linalg.solve(F, V.ravel()).reshape(V.shape)


def assert_directions(backend, dtype, got, history, vectors, damping):
    for name in NAMES:
        seen = [rows[name] for rows in history]
        expected = dense_direction(backend, seen, vectors[name], damping)
        found = np.concatenate(
            [
                backend.to_numpy(got[name]["weight"]),
                backend.to_numpy(got[name]["bias"])[None],
            ]
        )
        assert_close(found, expected, "inverse", dtype)


def same(backend, first, second):
    """Whether two structures hold the same numbers."""
    one, other = wholes(first), wholes(second)
    return one.keys() == other.keys() and all(
        np.array_equal(one[path], other[path]) for path in one
    )


def test_updates_and_refreshes_are_those_of_dense_averages(backend, dtype, rng):
    """Two updates, a refresh with another damping, and one more update after it."""
    network = network_of()
    state, history = network.initial(like(backend, dtype), damping=0.2), []
    for _ in range(2):
        history.append(rows_of(rng))
        state = updated(network, state, batches(backend, dtype, history[-1]))
    assert int(state["a"].age) == 2
    state = refreshed(network, state, damping=0.7)
    later = updated(network, state, batches(backend, dtype, rows_of(rng)))

    vectors = gradients(backend, dtype, rng)
    got = network.precondition(later, vectors)

    assert (int(later["a"].updates), int(later["a"].age)) == (3, 1)
    assert bool(later.is_good())
    assert_directions(backend, dtype, got, history, vectors, 0.7)


@pytest.mark.parametrize("n", [n, 150])
def test_a_refresh_that_fails_at_first_keeps_the_first_operator(backend, rng, n):
    """Also where statistics have one triangle by now, and the operator has two."""
    network = network_of(n)
    state = network.initial(like(backend, "float64"), damping=0.2)
    state = updated(network, state, batches(backend, "float64", rows_of(rng, n=n)))

    failed = refreshed(network, state, damping=backend.asarray(np.nan))

    assert {int(failed[name].status) for name in NAMES} != {0}
    V = backend.asarray(rng.normal(size=(n + 1, m)), "float64")
    for name in NAMES:
        before, after = (s[name].operator.multiply(V) for s in (state, failed))
        before, after = (backend.to_numpy(x) for x in (before, after))
        assert np.isfinite(before).all()
        assert_close(after, before, "product", "float64")


@pytest.mark.parametrize("n", [n, 150])
def test_it_goes_to_an_estimator_and_back(backend, rng, n):
    """What an estimator saves and reports is the state, to the bit of what it means."""
    network = network_of(n)
    start = network.initial(like(backend, "float64"), damping=0.2)
    rows = rows_of(rng, n=n)
    state = updated(network, start, batches(backend, "float64", rows))
    state = refreshed(network, state)

    held, fresh = estimator_of(n), estimator_of(n)
    held.state = state
    fresh.load_state_dict(held.state_dict())
    back = fresh.state.in_form_of(start)

    assert "1" in str(held.report())
    assert fresh.state["a"].updates == 1
    assert same(backend, back, state)


def test_products_are_zero_before_the_first_refresh(backend, rng):
    """Traced code cannot say that there is no operator yet; it moves nothing."""
    network, vectors = network_of(), gradients(backend, "float64", rng)
    start = network.initial(like(backend, "float64"), damping=0.2)
    state = updated(network, start, batches(backend, "float64", rows_of(rng)))
    for early in (start, state):
        found = network.precondition(early, vectors)
        assert not np.any(backend.to_numpy(found["a"]["weight"]))
    found = network.precondition(refreshed(network, state), vectors)
    assert np.any(backend.to_numpy(found["a"]["weight"]))


def test_no_array_is_twice_in_a_first_state(backend):
    """A program that is given all of it to write over needs as many arrays as fields."""
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    kinds = {"kronecker": kc.Kronecker(), "eigen": kc.EKFAC(), "tnt": kc.TNT()}
    blocks = {name: kc.Block(layer, kind) for name, kind in kinds.items()}
    network = make_estimator(blocks, reduction="sum", damping_rule="exact").network

    state = network.initial(like(backend, "float64"), damping=0.2)

    arrays = [x for _, x in leaves(state)]
    assert len({id(x) for x in arrays}) == len(arrays)


# ---------------------------------------------------------------------- the wiring

DENSE = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
LEAVES = {"w": (n, m), "b": (m,), "v": (n, m), "c": (m,)}
USES = [
    ("one", DENSE, {"weight": 0, "bias": 1}),
    ("two", DENSE, {"weight": 2, "bias": 3}),
    ("one again", DENSE, {"weight": 0, "bias": 1}),
]


def test_uses_with_the_same_parameters_are_one_block(rng):
    """The third use is a further one of the first, and both are captured together."""
    wiring = kc.integration.Wiring(USES, LEAVES)
    seen = [(rng.normal(size=(4, n)), None) for _ in USES]
    grads = [rng.normal(size=(4, m)) for _ in USES]

    found = wiring.captured(USES, seen, grads, reduction="mean")

    assert list(wiring.blocks) == ["one", "two"]
    assert wiring.names(USES) == ["one", "two", "one"]
    assert (found.reduction, found.sources) == ("mean", None)
    first, again = found.batches["one"]
    assert first.inputs is seen[0][0]
    assert again.output_grads is grads[2]
    assert found.batches["two"].inputs is seen[1][0]


def test_invalid_networks_raise():
    """Parameters in two blocks, names twice, sizes, and a block not used."""
    other = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="oi")
    with pytest.raises(
        kc.UnsupportedError, match="parameter w to be in one block, not in 2"
    ):
        kc.integration.Wiring([*USES, ("three", other, {"weight": 0})], LEAVES)
    with pytest.raises(kc.ConventionError, match="'one'"):
        kc.integration.Wiring(
            [USES[0], ("one", DENSE, {"weight": 2, "bias": 3})], LEAVES
        )
    with pytest.raises(kc.ShapeError, match="sizes"):
        kc.integration.Wiring(USES[:1], LEAVES | {"w": (n, m + 1)})
    wiring = kc.integration.Wiring(USES, LEAVES)
    with pytest.raises(kc.ConventionError, match=r"\['two'\] were not used"):
        wiring.names([USES[0], USES[2]])


@pytest.mark.parametrize(
    ("layer", "kind", "input"),
    [
        (DENSE, kc.Kronecker, "full"),
        (
            kc.Embedding(num_embeddings=5, features=2, weight_layout="io"),
            kc.Kronecker,
            "diagonal",
        ),
    ],
)
def test_the_usual_approximation_goes_with_the_layer(layer, kind, input):
    """What nobody chose is what the layer can have."""
    chosen = kc.integration.usual_approximation("name", layer)

    assert type(chosen) is kind
    assert chosen.input == input
    assert chosen.problem_with(layer) is None


@pytest.mark.parametrize("bad", [1.5, -0.5, float("nan")])
def test_a_decay_in_an_array_is_refused_or_flagged(backend, rng, bad):
    """A bad number in an array is found where its value is read, never installed."""
    network = network_of()
    start = network.initial(like(backend, "float64"), damping=0.2)
    fed = batches(backend, "float64", rows_of(rng))
    decay = backend.asarray(bad, "float64")

    with pytest.raises(kc.DecayError, match=r"'a'.*`decay`"):
        network.update(start, fed, decay=decay)
    flagged = network.update(start, fed, decay=decay, check="status")

    assert int(flagged["a"].status) == int(kc.Status.BAD_DECAY)
    assert int(flagged["a"].updates) == 0
    good = network.update(start, fed, decay=backend.asarray(0.5, "float64"))
    assert int(good["a"].status) == 0


def test_a_state_of_another_network_is_refused(backend, rng):
    """By every function, with both networks' blocks."""
    network = network_of()
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    other = make_estimator({"c": kc.Block(layer, kc.Kronecker())}, reduction="sum")
    rows = batches(backend, "float64", rows_of(rng))
    other.update({"c": rows["a"]})
    other.refresh()
    vectors = gradients(backend, "float64", rng)

    for call in (
        lambda: network.update(other.state, rows, decay=DECAY),
        lambda: network.refresh(other.state, damping=0.2),
        lambda: network.rebase(other.state, moments="zero"),
        lambda: network.precondition(other.state, vectors),
    ):
        with pytest.raises(kc.StateError, match=r"'a'.*'b'.*'c'"):
            call()


def test_a_state_of_another_form_is_refused(backend, rng):
    """A state without operators, or with those of a fallback, is refused."""
    network, held = network_of(), estimator_of()
    start = network.initial(like(backend, "float64"), damping=0.2)
    assert same(backend, held.state.in_form_of(start), start)

    held.update(batches(backend, "float64", rows_of(rng)))
    with pytest.raises(kc.StateError, match=r"'a'.*no operator"):
        held.state.in_form_of(start)
    other = estimator_of(damping_rule="exact")
    other.update(batches(backend, "float64", rows_of(rng)))
    other.refresh(check="status")
    with pytest.raises(kc.StateError, match=r"'a'.*form"):
        other.state.in_form_of(start)
    held.refresh(check="status")
    assert int(held.state.in_form_of(start)["b"].refreshes) == 1
