"""Memory is reused once no array refers to it; at most half of what is used is kept."""

import gc
import threading

import numpy as np
import pytest

import kfac_core as kc

from ..builders.layers import dense_layer

reused_memory = pytest.importorskip(
    "kfac_core_backends.reused_memory",
    reason="a test of an adapter, where all are hidden",
)
empty = reused_memory.empty

SHAPE, DTYPE = (300, 200), np.dtype(np.float32)


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """An own store for each test, of small arrays too."""
    gc.collect()
    monkeypatch.setattr(reused_memory, "_SMALLEST", 1 << 17)
    found = reused_memory._Store()
    monkeypatch.setattr(reused_memory, "_store", found)
    return found


def address(x):
    return x.__array_interface__["data"][0]


def test_memory_comes_back_when_the_last_view_is_gone(store):
    """Not before: a view of a view holds it, and so does what shares the buffer."""
    others = empty(SHAPE, DTYPE), empty(SHAPE, DTYPE)
    x = empty(SHAPE, DTYPE)
    before, view = address(x), x[3:].T[::2]
    shared = np.asarray(memoryview(x.T))
    del x
    for held in (view, shared):
        held[...] = 7.0
        assert address(empty(SHAPE, DTYPE)) != before
        assert np.all(held == 7.0)
    store.spare.clear()
    store.idle = 0

    del view, held
    assert store.idle == 0
    del shared
    assert 2 * store.idle == sum(other.nbytes for other in others)

    assert address(empty(SHAPE, DTYPE)) == before


def test_no_more_is_kept_than_half_of_what_is_used(store):
    """And nothing is left when everything is gone, whatever the order and the sizes."""
    rng = np.random.default_rng(0)
    held = []
    for _ in range(300):
        if held and rng.random() < 0.5:
            held.pop(int(rng.integers(len(held))))
        else:
            held.append(empty((200, 200 + 10 * int(rng.integers(4))), DTYPE))
        assert store.used == sum(x.nbytes for x in held)
        assert 0 <= 2 * store.idle <= store.used
        assert store.idle == sum(n * len(same) for n, same in store.spare.items())
    held.clear()

    assert (store.used, store.idle) == (0, 0)
    assert not any(store.spare.values())


def test_garbage_may_be_collected_at_any_moment(store, monkeypatch):
    """What comes back while memory is taken is put in order by the next call."""
    first, second = empty(SHAPE, DTYPE), empty(SHAPE, DTYPE)
    held = [first, second]
    del first, second
    fresh = np.empty

    def collecting(*arguments, **options):
        held.clear()
        return fresh(*arguments, **options)

    monkeypatch.setattr(reused_memory.np, "empty", collecting)
    x = empty((800, 200), DTYPE)

    assert not held
    y = empty((400, 200), DTYPE)
    assert store.used == x.nbytes + y.nbytes
    assert 0 < 2 * store.idle <= store.used


def test_threads_do_not_share_memory():
    """What one writes no other sees."""
    wrong = []

    def run(number):
        for turn in range(200):
            x = empty(SHAPE, DTYPE)
            x[...] = number
            y = empty(SHAPE, DTYPE)
            y[...] = -number
            if not (np.all(x == number) and np.all(y == -number)):
                wrong.append((number, turn))

    threads = [threading.Thread(target=run, args=(i + 1.0,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_returned_arrays_are_never_overwritten(rng):
    """Statistics, operators and directions, while later ones are computed."""
    n = 200
    layer = dense_layer(n, n)
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())}, decay=0.9, damping=0.1, reduction="sum"
    )
    V = rng.normal(size=(n + 1, n))
    gradient = {"weight": rng.normal(size=(n, n)), "bias": rng.normal(size=n)}
    given = []
    for _ in range(4):
        x, g = rng.normal(size=(50, n)), rng.normal(size=(50, n))
        estimator.update({"fc": kc.Batch(x, g)})
        estimator.refresh()
        direction = estimator.precondition({"fc": gradient})["fc"]["weight"]
        state = estimator.state["fc"]
        A = state.statistics.averages["input"].value(debias=True).full()
        again = state.operator.multiply_inverse(V)
        given.append((state, direction, direction.copy(), A.copy(), again.copy()))

    for state, direction, copy, A, again in given:
        np.testing.assert_array_equal(direction, copy)
        average = state.statistics.averages["input"].value(debias=True).full()
        np.testing.assert_array_equal(average, A)
        product = state.operator.multiply_inverse(V)
        np.testing.assert_array_equal(product, again)
