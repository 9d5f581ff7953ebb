"""An estimator on a schedule of steps, and what the calls of layers are fed as."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.losses import (
    SquaredError,
    draw_noise,
    drawn_vectors,
    noise_spec,
    vectors,
)

from ..builders.states import differences, frozen
from ..builders.tolerances import assert_close

DAMPING = 0.1
LAYER = kc.Dense(in_features=3, out_features=2, bias=False, weight_layout="io")


def natural(mode="exact", loss="mean", **every):
    estimator = kc.Estimator(
        {"one": kc.Block(LAYER, kc.Kronecker())},
        decay=0.9,
        damping=DAMPING,
        damping_rule="exact",
        reduction="sum",
        mode=mode,
    )
    return kc.integration.NaturalGradient(estimator, reduction=loss, **every)


def call_of(x, *sources, **options):
    call = kc.integration.LayerCall("one", x, **options)
    for g in sources:
        call.add_source(g)
    return call


def dense_direction(x, g, V, *, rows):
    """``(F + damping I)^-1 V``, F the Kronecker-factored block of the mean over rows."""
    F = np.kron(x.T @ x / len(x), np.einsum("mni,mnj->ij", g, g) / rows)
    moved = np.linalg.solve(F + DAMPING * np.eye(6), V.reshape(-1))
    return moved.reshape(V.shape)


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["exact", "empirical"])
def test_calls_are_further_examples_of_one_block(backend, rng, mode, loss):
    """Two calls of 4 and 2 examples, of outputs with 12 rows, for either loss."""
    x, g, V = (rng.normal(size=shape) for shape in ((6, 3), (2, 6, 2), (3, 2)))
    g = g if mode == "exact" else g[:1]
    # The empirical gradients that come back are of the loss as it is.
    back = g / 12 if (mode, loss) == ("empirical", "mean") else g
    parts = [
        call_of(backend.asarray(x[s]), *(backend.asarray(one[s]) for one in back))
        for s in (slice(0, 4), slice(4, 6))
    ]

    driver = natural(mode, loss)
    given = V * (12 if loss == "sum" else 1)
    found = driver.directions(
        {"one": {"weight": backend.asarray(given)}}, parts, rows=12
    )

    expected = dense_direction(x, g, V, rows=12)
    assert_close(
        backend.to_numpy(found["one"]["weight"]), expected, "inverse", "float64"
    )


def test_rows_are_let_go_of_once_they_are_in_the_statistics(backend, rng, monkeypatch):
    """Before the refresh, which needs the memory; a step that fails there restores all."""
    x, g, V = (rng.normal(size=shape) for shape in ((6, 3), (6, 2), (3, 2)))
    call = call_of(backend.asarray(x), backend.asarray(g))
    driver, held = natural(), []
    monkeypatch.setattr(
        driver.estimator, "refresh", lambda: held.append(call.has_rows) or 1 / 0
    )
    before = driver.estimator.state

    with pytest.raises(ZeroDivisionError):
        driver.directions({"one": {"weight": backend.asarray(V)}}, [call], rows=6)

    assert held == [False]
    assert call.inputs is None
    assert driver.estimator.state is before


def test_parts_of_one_source_add_up(backend, rng):
    """As where a loss is differentiated in two parts; nothing came back in a third."""
    x, g = rng.normal(size=(5, 3)), rng.normal(size=(2, 5, 2))
    call = call_of(backend.asarray(x))
    for part in (g[0], None, g[1]):
        call.add_to_source(None if part is None else backend.asarray(part))

    batch = kc.integration.batches_of_calls([call], rows=5)["one"]

    assert batch.sources == 1
    assert_close(
        backend.to_numpy(batch.output_grads), g.sum(0)[None], "gram", "float64"
    )
    assert kc.integration.batches_of_calls([call_of(backend.asarray(x))], rows=5) == {}


def test_calls_keep_masks_and_shapes(backend, rng):
    """Masks of several calls one after the other; g brought into a call's own shape."""
    x, g = rng.normal(size=(4, 2, 3)), rng.normal(size=(4, 4))
    mask = np.asarray([[True, False], [True, True], [False, False], [True, True]])
    calls = [
        call_of(
            backend.asarray(x[s]),
            backend.asarray(g[s]),
            mask=backend.asarray(mask[s]),
            grad_shape=(2, 2, 2),
        )
        for s in (slice(0, 2), slice(2, 4))
    ]

    batch = kc.integration.batches_of_calls(calls, rows=4)["one"]

    assert np.array_equal(backend.to_numpy(batch.mask), mask)
    assert np.array_equal(backend.to_numpy(batch.inputs), x)
    assert np.array_equal(backend.to_numpy(batch.output_grads), g.reshape(1, 4, 2, 2))


def test_bad_steps_raise_and_change_nothing(backend, rng):
    """No row, no output gradient when due, or a gradient with NaN: named errors."""
    x, g, V = (
        backend.asarray(rng.normal(size=shape)) for shape in ((6, 3), (6, 2), (3, 2))
    )
    driver = natural(update_every=2)
    good, bad = {"one": {"weight": V}}, {"one": {"weight": V * float("nan")}}
    before = frozen(driver.state_dict())

    with pytest.raises(kc.NotReadyError, match="observe"):
        driver.directions(good, [], rows=None)
    with pytest.raises(kc.NotReadyError, match="observe"):
        driver.directions(good, [call_of(x)], rows=6)
    with pytest.raises(kc.NotFiniteError, match=r"'one' \(weight\)"):
        driver.directions(bad, [call_of(x, g)], rows=6)

    assert differences(frozen(driver.state_dict()), before) == []
    driver.directions(good, [call_of(x, g)], rows=6)
    assert (driver.steps, driver.wants_statistics, driver.wants_refresh) == (
        1,
        False,
        True,
    )
    driver.directions(good, [], rows=6)
    assert driver.estimator.state["one"].updates == 1


def test_vectors_are_drawn_from_a_seed(backend, rng):
    """Those of the same noise by hand; signs only where rows share an example."""
    z, loss = backend.asarray(rng.normal(size=(4, 5, 3))), SquaredError(scale=0.5)
    spec = noise_spec(loss, z, mode="gradients")
    by_hand = vectors(loss, z, mode="gradients", noise=draw_noise(spec, like=z, rng=7))
    sampled = drawn_vectors(loss, z, mode="gradients", seed=7, shared=True)
    plain = drawn_vectors(loss, z, mode="exact", seed=7, shared=False)
    signed = drawn_vectors(loss, z, mode="exact", seed=7, shared=True)

    exact, signs = (backend.to_numpy(made.vectors) for made in (plain, signed))

    assert np.array_equal(
        backend.to_numpy(sampled.vectors), backend.to_numpy(by_hand.vectors)
    )
    assert np.array_equal(abs(signs), abs(exact))
    flips = (signs != exact).any(-1)
    assert 0 < flips.mean() < 1
