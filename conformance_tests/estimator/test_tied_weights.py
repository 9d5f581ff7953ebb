"""One weight that a network uses in several places, by name."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.estimators import make_estimator
from ..builders.states import differences, frozen
from ..builders.tolerances import assert_close, assert_differs

SETTINGS = {"decay": 0.8, "damping": 0.3, "reduction": "sum"}
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
        kc.UnknownBlockError, match="uses the weight of block 'first' again"
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
    with pytest.raises(error, match=r"Coupling\.weights"):
        make_estimator(blocks, coupling=kc.Coupling(weights=uses), **SETTINGS)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_use_without_the_bias_has_the_coordinate_zero(backend, rng, sharing, masked):
    """Tied layers of which some have a bias: A by hand, of ``(x, 1)`` and ``(x, 0)``."""
    if backend.name == "jax" and masked:
        pytest.skip("shapes that JAX compiles for seconds; see --thorough")
    (x1, g1, with_bias), (x2, g2, _) = draw(backend, rng), draw(backend, rng, 2)
    keep = np.ones((5, 2), dtype=bool)
    keep[0, 1] = not masked
    without = kc.Batch(
        backend.asarray(x2),
        backend.asarray(g2),
        mask=backend.asarray(keep) if masked else None,
        bias=backend.asarray(np.zeros(5, dtype=bool)),
    )
    estimator = make(
        kc.Kronecker(sharing=sharing), weights={"again": "first"}, damping_rule="exact"
    )
    estimator.update({"first": with_bias, "again": without})
    estimator.refresh()

    kept = np.concatenate([np.ones((5, 1), dtype=bool), keep], axis=1)
    ones = np.concatenate([np.ones((5, 1, 1)), np.zeros((5, 2, 1))], axis=1)
    x = np.concatenate([np.concatenate([x1, x2], axis=1), ones], axis=2)
    g = np.concatenate([g1, g2], axis=1) * kept[..., None]
    x = x * kept[..., None]
    S = kept.sum() / 5
    if sharing == "reduce":
        x, g = x.sum(axis=1) / kept.sum(axis=1)[:, None], g.sum(axis=1)
        F = np.kron(x.T @ x / 5, g.T @ g / 5)
    else:
        A, G = (np.einsum("nsi,nsj->ij", v, v) / kept.sum() for v in (x, g))
        F = S * np.kron(A, G)
    F += SETTINGS["damping"] * np.eye(len(F))
    got = backend.to_numpy(estimator.operator("first").to_dense())
    assert_close(got, F, "gram", "float64")

    joint = make(
        kc.Kronecker(sharing=sharing), weights={"again": "first"}, damping_rule="exact"
    )
    joint.update(
        {"first": with_bias, "again": kc.Batch(without.inputs, without.output_grads)}
    )
    joint.refresh()
    assert_differs(backend.to_numpy(joint.operator("first").to_dense()), got)


def test_rows_without_a_bias_belong_to_a_layer_that_has_one(backend, rng):
    """Refused by name: other layers, shapes and dtypes, and chunks of a convolution."""
    x, g, _ = draw(backend, rng)
    x, g = backend.asarray(x), backend.asarray(g)
    none = backend.asarray(np.zeros(5, dtype=bool))
    bare = kc.Dense(in_features=3, out_features=2, bias=False, weight_layout="io")
    with pytest.raises(kc.ConventionError, match=r"`Batch.bias`"):
        bare.rows(kc.Batch(x, g, bias=none))
    with pytest.raises(kc.ShapeError, match=r"`bias`.*\(5,\).*\(4,\)"):
        LAYER.rows(kc.Batch(x, g, bias=none[:4]))
    with pytest.raises(kc.DtypeError, match="`bias`"):
        LAYER.rows(kc.Batch(x, g, bias=x[:, 0, 0]))
    norm = kc.ScaleShift(scale_shape=(3,), shift_shape=(3,))
    with pytest.raises(kc.UnsupportedError, match="`bias`"):
        norm.rows(kc.Batch(x, x, bias=none))
