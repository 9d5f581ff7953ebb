"""Refreshing beside the steps, and only what has moved."""

import contextlib
import threading

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close, assert_differs

SETTINGS = {"decay": 0.8, "damping": 0.3, "reduction": "sum"}


def dense():
    layer = kc.Dense(in_features=4, out_features=3, bias=False, weight_layout="io")
    return kc.Block(layer, kc.Kronecker())


def make(names="a", **options):
    return make_estimator({name: dense() for name in names}, **(SETTINGS | options))


def draw(backend, rng):
    x, g = rng.normal(size=(10, 4)), rng.normal(size=(10, 3))
    return x, g, kc.Batch(backend.asarray(x), backend.asarray(g))


def block_of(backend, estimator, name="a"):
    return backend.to_numpy(estimator.operator(name).to_dense())


def expected_of(x, g, damping=0.3):
    A, G, S = reference.kronecker_factors(x, g[None], bias=False)
    return reference.damped_block(A, G, S, damping=damping, rule="factored")


def test_a_refresh_in_the_background_is_of_the_moment_it_was_started(backend, rng):
    """Later updates and dampings are not in it; they count as its age."""
    estimator = make(decay=0.0)
    x, g, batch = draw(backend, rng)
    estimator.update({"a": batch})
    estimator.refresh()
    y, h, other = draw(backend, rng)
    estimator.update({"a": other})

    refresh = estimator.start_refresh()
    estimator.damping = 5.0
    estimator.update({"a": batch})
    estimator.update({"a": batch})
    before = block_of(backend, estimator)
    refresh.install()

    assert_close(before, expected_of(x, g), "product", "float64")
    got = block_of(backend, estimator)
    assert_close(got, expected_of(y, h), "product", "float64")
    assert estimator.state["a"].age == 2
    assert estimator.report()["a"].age == 2
    refresh.install()
    assert estimator.state["a"].age == 2
    assert refresh.done


def test_a_block_that_was_reset_stays_reset(backend, rng):
    """The refresh brought back what its statistics had been reset for."""
    estimator = make("ab")
    batches = {name: draw(backend, rng) for name in "ab"}
    estimator.update({name: batch for name, (_, _, batch) in batches.items()})
    refresh = estimator.start_refresh()
    estimator.reset("a")
    x, g, batch = draw(backend, rng)
    estimator.update({"a": batch})

    refresh.install()

    assert estimator.state["a"].operator is None
    expected = expected_of(*batches["b"][:2])
    assert_close(block_of(backend, estimator, "b"), expected, "product", "float64")
    refresh = estimator.start_refresh()
    refresh.install()
    expected = expected_of(x, g)
    assert_close(block_of(backend, estimator), expected, "product", "float64")


def test_steps_go_on_while_a_refresh_is_under_way(backend, rng, monkeypatch):
    """The old operator answers until `install`, whether the new one is done or not."""
    estimator = make()
    x, g, batch = draw(backend, rng)
    estimator.update({"a": batch})
    estimator.refresh()
    go = threading.Event()
    operator = kc.Kronecker.operator

    def slow(*args, **options):
        assert go.wait(30)
        return operator(*args, **options)

    monkeypatch.setattr(kc.Kronecker, "operator", slow)
    estimator.update({"a": draw(backend, rng)[2]})
    refresh = estimator.start_refresh(["a"])
    V = backend.asarray(rng.normal(size=(4, 3)))
    during = estimator.precondition({"a": {"weight": V}})["a"]["weight"]
    assert not refresh.done
    go.set()
    refresh.install()
    after = estimator.precondition({"a": {"weight": V}})["a"]["weight"]

    F = expected_of(x, g)
    solved = np.linalg.solve(F, backend.to_numpy(V).ravel()).reshape(4, 3)
    assert_close(backend.to_numpy(during), solved, "inverse", "float64")
    assert_differs(backend.to_numpy(after), solved)


def test_a_background_refresh_that_fails_counts_and_keeps(backend, rng):
    """As one in the foreground: the old operator stays, and the budget is kept."""
    estimator = make(failure_budget=1)
    x, g, batch = draw(backend, rng)
    estimator.update({"a": batch})
    estimator.refresh()
    estimator.damping = 0.0
    estimator.decay = 0.0
    ones = kc.Batch(backend.asarray(np.ones((1, 4))), backend.asarray(np.ones((1, 3))))
    estimator.update({"a": ones})
    estimator.start_refresh().install()
    assert estimator.state["a"].failures == 1
    assert_close(block_of(backend, estimator), expected_of(x, g), "product", "float64")
    refresh = estimator.start_refresh()
    with pytest.raises(kc.FactorizationError, match="a/"):
        refresh.install()
    with pytest.raises(kc.UnknownBlockError):
        estimator.start_refresh(["b"])


def test_a_gpu_refreshes_on_a_stream_of_its_own(requires_backend, monkeypatch):
    """It waits for what was queued before, and the thread alone for what it queues."""
    requires_backend("torch")
    import torch

    from kfac_core_backends import torch as adapter

    log = []

    class Stream:
        device = "cuda:0"

        def __init__(self, device):
            log.append(f"stream on {device}")

        def __getattr__(self, name):
            return lambda *_: log.append(name)

    stream_of = {
        "is_initialized": lambda: True,
        "current_stream": lambda: here,
        "stream": lambda s: contextlib.nullcontext(log.append("enter")),
        "Stream": Stream,
    }
    here = Stream("the loop's")
    for name, stand_in in stream_of.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    adapter._background_stream.cache_clear()
    estimator = make()
    batch = kc.Batch(torch.ones(10, 4), torch.ones(10, 3))
    estimator.update({"a": batch})

    estimator.start_refresh().install()
    estimator.start_refresh().install()
    adapter._background_stream.cache_clear()

    refresh = ["record_event", "enter", "wait_event", "synchronize"]
    assert log[:3] == ["stream on the loop's", "record_event", "stream on cuda:0"]
    assert log[3:] == [*refresh[1:], *refresh]
    assert estimator.state["a"].operator is not None
