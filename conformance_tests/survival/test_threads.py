"""Eight threads on estimators of their own, and eight that read one: the same numbers."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kfac_core as kc

from ..builders.estimators import make_estimator
from ..builders.states import frozen
from .size import FULL, report

pytestmark = pytest.mark.usefixtures("one_blas_thread")

THREADS = 8
SECONDS = 60.0 if FULL else 0.0
STEPS = 12
LAYER = kc.Dense(in_features=12, out_features=9, bias=True, weight_layout="io")
APPROXIMATIONS = (kc.Kronecker(), kc.Kronecker(), kc.Full(), kc.TNT(), kc.Diagonal())


@pytest.fixture(autouse=True)
def _eager_switching():
    """Let threads take the interpreter from each other as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def made(kind: int) -> kc.Estimator:
    """Return an estimator; the kinds differ in rule, workers and solving."""
    blocks = {f"{k}": kc.Block(LAYER, a) for k, a in enumerate(APPROXIMATIONS)}
    options: dict[str, Any] = [
        {"damping_rule": "factored"},
        {"damping_rule": "factored", "workers": 3},
        {"damping_rule": "exact"},
        {"damping_rule": "factored", "solving": "triangular", "workers": 2},
    ][kind % 4]
    return make_estimator(blocks, decay=0.9, damping=0.3, reduction="sum", **options)


def vectors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"weight": rng.normal(size=(12, 9)), "bias": rng.normal(size=9)}


def batches(rng: np.random.Generator, names: Any) -> dict[str, kc.Batch]:
    return {
        name: kc.Batch(rng.normal(size=(20, 12)), rng.normal(size=(20, 9)))
        for name in names
    }


def steps(kind: int) -> str:
    """Feed, refresh (beside the steps too) and read; return a digest of all numbers."""
    rng = np.random.default_rng(kind)
    estimator = made(kind)
    digest = hashlib.sha256()
    under_way = None
    for step in range(STEPS):
        estimator.update(batches(rng, estimator.blocks))
        if step % 4 == 0:
            estimator.refresh()
        if step % 4 == 1:
            under_way = estimator.start_refresh()
        if step % 4 == 3 and under_way is not None:
            under_way.install()
        estimator.damping = 0.3 / (1 + step)
        found = estimator.precondition({n: vectors(rng) for n in estimator.blocks})
        digest.update(repr(frozen(found)).encode())
    digest.update(repr(frozen(estimator.state_dict())).encode())
    return digest.hexdigest()


def in_threads(run: Callable[[int], Any]) -> list[Any]:
    """Return what a function gave for each number of a thread, all started at once."""
    together = threading.Barrier(THREADS)
    found: list[Any] = [None] * THREADS

    def one(number: int) -> None:
        together.wait()
        try:
            found[number] = run(number)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(k,)) for k in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_estimators_of_different_threads_know_nothing_of_each_other():
    """Each thread's numbers are, to the bit, those of one thread alone."""
    alone = [steps(kind) for kind in range(THREADS)]
    assert len(set(alone)) == THREADS
    rounds, end = 0, time.monotonic() + SECONDS

    while rounds == 0 or time.monotonic() < end:
        found = in_threads(steps)
        assert found == alone
        rounds += 1

    report(f"\n{THREADS} threads with their own: {rounds} rounds of {STEPS} steps")


PRODUCTS = (
    ("multiply_inverse", ()),
    ("multiply", ()),
    ("multiply_matpower", (-0.5,)),
    ("multiply_matpower", (0.5,)),
)


def read(estimator: kc.Estimator, number: int) -> list[Any]:
    """Return what a reader sees, in an order of its own."""
    rng = np.random.default_rng(3)
    given = {name: vectors(rng) for name in "0124"}
    found: dict[int, Any] = {}
    for step in range(len(PRODUCTS) + 3):
        what = (step + number) % (len(PRODUCTS) + 3)
        if what < len(PRODUCTS):
            product, arguments = PRODUCTS[what]
            found[what] = frozen(estimator.apply(product, given, *arguments))
        elif what == len(PRODUCTS):
            found[what] = frozen(estimator.precondition(given))
        elif what == len(PRODUCTS) + 1:
            found[what] = frozen(estimator.state_dict()["blocks"]["0"]["values"])
        else:
            found[what] = [
                estimator.operator(name).trace().tobytes() for name in "0124"
            ]
    return [found[what] for what in sorted(found)]


@pytest.mark.parametrize("kind", range(3))
def test_readers_of_one_estimator_see_the_same(kind):
    """Though the first of them prepares what the others use: nothing depends on whom."""

    def fresh() -> kc.Estimator:
        estimator = made(kind)
        rng = np.random.default_rng(kind)
        for _ in range(3):
            estimator.update(batches(rng, estimator.blocks))
        estimator.refresh()
        return estimator

    alone = read(fresh(), 0)
    rounds, end = 0, time.monotonic() + SECONDS / 3
    while rounds == 0 or time.monotonic() < end:
        shared = fresh()
        for found in in_threads(lambda number, shared=shared: read(shared, number)):
            assert found == alone
        rounds += 1
    report(f"\n{THREADS} readers of one, kind {kind}: {rounds} rounds")
