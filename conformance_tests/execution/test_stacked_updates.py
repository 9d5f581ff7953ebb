"""Updates of small equal layers as one stack, against dense sums and one by one."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.execution.stacked_updates import update_stacks

from ..builders.reference import kronecker_factors
from ..builders.tolerances import assert_close

DECAY = 0.75
NAMES = ("a", "b", "c")


def layer_of(bias=True, n=3, m=2):
    return kc.Dense(in_features=n, out_features=m, bias=bias, weight_layout="io")


def estimator_of(blocks, **options):
    """Return an estimator of some blocks."""
    settings = {"decay": DECAY, "damping": 0.1, "damping_rule": "factored"}
    return kc.Estimator(blocks, loss="sum", **(settings | options))


def data(rng, shape=(5, 2), n=3, m=2):
    """Return inputs and output gradients of two updates for each name."""
    return {
        name: [
            (rng.normal(size=(*shape, n)), rng.normal(size=(*shape, m)))
            for _ in range(2)
        ]
        for name in NAMES
    }


def batch_of(backend, dtype, x, g, **options):
    return kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype), **options)


def dense(average):
    return average.sum.full() if hasattr(average.sum, "full") else average.sum


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("check", ["raise", "status"])
def test_a_stack_gives_each_block_its_own_average(
    backend, dtype, rng, bias, sharing, check
):
    """Sums and weights after two updates are those of dense sums over the rows."""
    blocks = {
        name: kc.Block(layer_of(bias), kc.Kronecker(sharing=sharing)) for name in NAMES
    }
    seen = data(rng)
    estimator = estimator_of(blocks)

    for i in range(2):
        fed = {n: batch_of(backend, dtype, *seen[n][i]) for n in NAMES}
        estimator.update(fed, check=check)

    weight = DECAY + 1.0
    for name in NAMES:
        A, G, S = 0.0, 0.0, 0.0
        for decay, (x, g) in zip((DECAY, 1.0), seen[name], strict=True):
            parts = kronecker_factors(x, g[None], bias=bias, sharing=sharing)
            A, G, S = (
                total + decay * part
                for total, part in zip((A, G, S), parts, strict=True)
            )
        held = estimator.state(name).statistics
        assert int(held.status) == 0
        for side, value in (("input", A), ("output", G), ("repeats", S)):
            average = held.averages[side]
            assert_close(backend.to_numpy(dense(average)), value, "gram", dtype)
            assert_close(backend.to_numpy(average.weight), weight, "roundoff", dtype)


def test_what_a_stack_leaves_has_the_form_of_one(backend, rng):
    """Weights and statuses are 0-d arrays of the library, and files take them."""
    blocks = {name: kc.Block(layer_of(), kc.Kronecker()) for name in NAMES}
    seen, estimator = data(rng), estimator_of(blocks)
    fed = {n: batch_of(backend, "float64", *seen[n][0]) for n in NAMES}

    estimator.update(fed)

    kind = type(fed["a"].inputs)
    for name in NAMES:
        held = estimator.state(name).statistics
        assert type(held.status) is kind
        assert held.status.shape == ()
        for average in held.averages.values():
            assert type(average.weight) is kind
            assert average.weight.shape == ()
        assert type(held.averages["repeats"].sum) is kind


def test_the_bad_block_of_a_stack_is_named(backend, rng):
    """A batch that is not finite is refused by name, and changes no block."""
    blocks = {name: kc.Block(layer_of(), kc.Kronecker()) for name in NAMES}
    seen, estimator = data(rng), estimator_of(blocks)
    estimator.update({n: batch_of(backend, "float64", *seen[n][0]) for n in NAMES})
    before = {
        n: backend.to_numpy(dense(estimator.state(n).statistics.averages["input"]))
        for n in NAMES
    }
    g = seen["b"][1][1].copy()
    g[0, 1, 0] = np.inf
    spoilt = seen | {"b": [None, (seen["b"][1][0], g)]}
    fed = {n: batch_of(backend, "float64", *spoilt[n][1]) for n in NAMES}

    with pytest.raises(kc.NotFiniteError, match="Block 'b': `output_grads`"):
        estimator.update(fed)

    for name in NAMES:
        assert estimator.state(name).updates == 1
        average = estimator.state(name).statistics.averages["input"]
        assert_close(backend.to_numpy(dense(average)), before[name], "exact", "float64")


def test_a_status_keeps_the_bad_block_alone(backend, rng):
    """With ``check="status"`` the others of the stack move, and the bad one does not."""
    blocks = {name: kc.Block(layer_of(), kc.Kronecker()) for name in NAMES}
    seen, estimator = data(rng), estimator_of(blocks)
    estimator.update({n: batch_of(backend, "float64", *seen[n][0]) for n in NAMES})
    x = seen["c"][1][0].copy()
    x[4, 0, 2] = np.nan
    spoilt = seen | {"c": [None, (x, seen["c"][1][1])]}

    estimator.update(
        {n: batch_of(backend, "float64", *spoilt[n][1]) for n in NAMES}, check="status"
    )

    flags = [int(estimator.state(n).statistics.status) for n in NAMES]
    assert flags == [kc.Status.OK, kc.Status.OK, kc.Status.INPUTS_NOT_FINITE]
    for name, updates in (("a", 2), ("b", 2), ("c", 1)):
        pairs = [(DECAY ** (updates - 1 - i), seen[name][i]) for i in range(updates)]
        expected = sum(d * np.einsum("nsi,nsj->ij", g, g) / 10 for d, (_, g) in pairs)
        G = estimator.state(name).statistics.averages["output"]
        assert_close(backend.to_numpy(dense(G)), expected, "gram", "float64")


def test_a_wrong_shape_in_every_block_of_a_stack_is_named(backend, rng):
    """Blocks that are wrong in the same way are refused as one would be."""
    blocks = {name: kc.Block(layer_of(), kc.Kronecker()) for name in NAMES}
    seen, estimator = data(rng, n=4), estimator_of(blocks)

    with pytest.raises(kc.ShapeError, match=r"Block 'a'.*`inputs`"):
        estimator.update({n: batch_of(backend, "float64", *seen[n][0]) for n in NAMES})


def stacks_of(backend, rng, blocks, batches, decays=None, weights=None):
    """Return what would be stacked of some batches."""
    like = backend.asarray(rng.normal(size=(2, 3)), "float64")
    statistics = {name: block.initial(like) for name, block in blocks.items()}
    ones = dict.fromkeys(blocks, 1.0)
    return update_stacks(blocks, statistics, batches, decays or ones, weights or ones)


def test_only_equals_are_stacked(backend, rng):
    """Another shape, kind, dtype, mask, number of sources, decay or weight stays alone."""
    x, g = rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    plain = batch_of(backend, "float64", x, g)
    base = kc.Block(layer_of(), kc.Kronecker())
    odd = {
        "batch": (base, batch_of(backend, "float64", x[:3], g[:3])),
        "dtype": (base, batch_of(backend, "float32", x, g)),
        "mask": (
            base,
            batch_of(
                backend, "float64", x, g, mask=backend.asarray([True] * 4, "bool")
            ),
        ),
        "sources": (base, batch_of(backend, "float64", x, g[None], sources=1)),
        "uses": (base, [plain, plain]),
        "layer": (kc.Block(layer_of(bias=False), kc.Kronecker()), plain),
        "sharing": (kc.Block(layer_of(), kc.Kronecker(sharing="reduce")), plain),
        "approximation": (kc.Block(layer_of(), kc.Diagonal()), plain),
        "factor": (kc.Block(layer_of(), kc.Kronecker(output="diagonal")), plain),
        "decay": (base, plain),
        "weight": (base, plain),
        "array": (base, plain),
    }
    blocks = {"p": base, "q": base} | {name: b for name, (b, _) in odd.items()}
    batches = {"p": plain, "q": plain} | {name: f for name, (_, f) in odd.items()}
    decays = dict.fromkeys(blocks, 0.5) | {"decay": 0.25}
    weights = dict.fromkeys(blocks, 1.0) | {"weight": 2.0}
    decays["array"] = backend.asarray(0.5, "float64")

    assert stacks_of(backend, rng, blocks, batches, decays, weights) == [["p", "q"]]


def test_large_layers_are_not_stacked(backend, rng):
    """Above 128 features a copy of the rows costs more than calls."""
    for n, expected in ((127, [["a", "b"]]), (128, [])):
        block = kc.Block(layer_of(n=n), kc.Kronecker())
        batch = batch_of(
            backend, "float64", rng.normal(size=(2, n)), rng.normal(size=(2, 2))
        )
        two = {"a": batch, "b": batch}
        assert stacks_of(backend, rng, {"a": block, "b": block}, two) == expected


def test_a_shared_factor_keeps_its_block_alone(backend, rng):
    """A block that takes a factor of another's is fed by itself, with the same sums."""
    blocks = {name: kc.Block(layer_of(), kc.Kronecker()) for name in NAMES}
    seen = data(rng)
    estimator = estimator_of(blocks, shared_factors={"b/input": "a/input"})
    x = seen["a"][0][0]
    fed = {n: batch_of(backend, "float64", x, seen[n][0][1]) for n in NAMES}

    estimator.update(fed)

    factors = kronecker_factors(x, seen["b"][0][1][None], bias=True)
    held = estimator.state("b").statistics.averages
    assert_close(backend.to_numpy(dense(held["output"])), factors[1], "gram", "float64")
    assert float(backend.to_numpy(held["input"].weight)) == 0.0
