"""One weight that a network uses in several places, by name."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.estimators import make_estimator
from ..builders.states import differences, frozen
from ..builders.tolerances import assert_close, assert_differs

SETTINGS = {
    "decay": 0.8,
    "damping": 0.3,
    "damping_rule": "factored",
    "reduction": "sum",
}
LAYER = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
USES = {"again": "first", "once more": "first"}


def make(approximation, **options):
    block = kc.Block(LAYER, approximation)
    return make_estimator({"first": block}, **(SETTINGS | options))


def draw(backend, rng, positions=1):
    x, g = rng.normal(size=(5, positions, 3)), rng.normal(size=(5, positions, 2))
    return x, g, kc.Batch(backend.asarray(x), backend.asarray(g))


@pytest.mark.parametrize("approximation", [kc.Kronecker(), kc.TNT(), kc.Full()])
def test_the_uses_of_a_weight_are_positions_of_one_block(backend, rng, approximation):
    """Three uses, one of them at two positions, are one layer with four positions."""
    drawn = [draw(backend, rng, positions) for positions in (1, 2, 1)]
    places = ("first", "again", "once more")
    tied = make(approximation, weights=USES)
    tied.update(dict(zip(places, (batch for *_, batch in drawn), strict=True)))
    tied.refresh()
    x, g = (
        np.concatenate(parts, axis=1) for parts in list(zip(*drawn, strict=True))[:2]
    )
    shared = make(approximation)
    shared.update({"first": kc.Batch(backend.asarray(x), backend.asarray(g))})
    shared.refresh()

    got, expected = (
        backend.to_numpy(e.operator("first").to_dense()) for e in (tied, shared)
    )

    assert_close(got, expected, "gram", "float64")
    alone = make(approximation)
    alone.update({"first": drawn[0][2]})
    alone.refresh()
    assert_differs(backend.to_numpy(alone.operator("first").to_dense()), got)


def test_all_uses_are_fed_together_or_none(backend, rng):
    """An example's gradient is the sum over the uses; a part of it is refused."""
    estimator = make(kc.Kronecker(), weights=USES)
    *_, batch = draw(backend, rng)
    before = frozen(estimator.state_dict())
    with pytest.raises(kc.ConventionError, match="once more"):
        estimator.update({"first": batch, "again": batch})
    with pytest.raises(kc.ConventionError, match="'first'"):
        estimator.update({"again": batch, "once more": batch})
    assert differences(before, frozen(estimator.state_dict())) == []


def test_the_gradient_of_a_tied_weight_is_its_blocks(backend, rng):
    """A further use has no gradient of its own, and the message says whose it is."""
    estimator = make(kc.Kronecker(), weights={"again": "first"})
    *_, batch = draw(backend, rng)
    estimator.update({"first": batch, "again": batch})
    estimator.refresh()
    with pytest.raises(
        kc.UnknownBlockError, match="use of the weight of block 'first'"
    ):
        estimator.precondition({"again": {}})


@pytest.mark.parametrize(
    ("uses", "error"),
    [
        ({"again": "nowhere"}, kc.UnknownBlockError),
        ({"first": "first"}, kc.ConventionError),
        ({"again": "table"}, kc.UnsupportedError),
    ],
)
def test_bad_uses_are_refused_where_they_are_written(uses, error):
    table = kc.Embedding(num_embeddings=3, features=2, weight_layout="io")
    blocks = {
        "first": kc.Block(LAYER, kc.Kronecker()),
        "table": kc.Block(table, kc.Kronecker(input="diagonal")),
    }
    with pytest.raises(error, match="tied_weights"):
        make_estimator(blocks, sharing=kc.Sharing(weights=uses), **SETTINGS)
