"""Independent problems on threads."""

import dataclasses
import threading

import numpy as np
import pytest

import kfac_core as kc
from kfac_core import stages
from kfac_core.execution.threaded import in_threads

from ..builders.estimators import make_estimator


def test_two_workers_run_at_the_same_time():
    """Each call waits for the other, so that one thread alone would never end."""
    meeting = threading.Barrier(2, timeout=10.0)

    in_threads(lambda _: meeting.wait(), range(2), workers=2)

    assert not meeting.broken


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_raised(workers):
    """The first in the problems' order."""

    def fail(k):
        if k >= 3:
            raise KeyError(k)

    with pytest.raises(KeyError, match="3"):
        in_threads(fail, range(6), workers=workers)


class Library:
    """A library that keeps one number of threads, and what was asked of it."""

    def __init__(self, name, threads):
        self.name = name
        self.number = threads
        self.held = []

    def threads(self):
        return self.number

    def hold_threads(self, number):
        before, self.number = self.number, number
        self.held.append(number)

        def undo():
            self.number = before

        return undo


@pytest.mark.parametrize(("threads", "share"), [(8, 4), (2, 1), (1, 1)])
def test_workers_share_the_threads_of_the_library(threads, share):
    """Each says so too, and afterwards there are as many as before."""
    library = Library("it", threads)
    meeting = threading.Barrier(2, timeout=10.0)

    def look(_):
        meeting.wait()
        return library.threads()

    found = in_threads(look, range(2), workers=2, library=library)

    assert found == [share, share]
    assert set(library.held) == {share}
    assert library.number == threads
    in_threads(lambda _: None, range(2), workers=1, library=library)
    assert len(library.held) == 3


def test_threads_are_given_back_after_an_error_and_by_the_last_holder():
    """Two refreshes at a time share once; whichever ends first takes nothing away."""
    library = Library("it", 4)
    inside, outside = threading.Event(), threading.Event()

    def first(k):
        inside.set()
        assert outside.wait(10.0)
        raise KeyError(k)

    def second(_):
        return library.threads()

    def fail():
        with pytest.raises(KeyError):
            in_threads(first, range(2), workers=2, library=library)

    other = threading.Thread(target=fail)
    other.start()
    assert inside.wait(10.0)
    found = in_threads(second, range(2), workers=2, library=library)
    during = library.number
    outside.set()
    other.join()

    assert found == [2, 2]
    assert during == 2
    assert library.number == 4


def test_blas_threads_are_limited_per_worker(requires_backend, requires_adapters):
    """OpenBLAS and MKL are asked themselves; PyTorch in each worker."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    numpy = kc.array.get_backend("numpy")

    def pools(_=None):
        found = threadpoolctl.threadpool_info()
        return [pool["num_threads"] for pool in found if pool["user_api"] == "blas"]

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = pools()
        found = in_threads(pools, range(4), workers=2, library=numpy)
        after = pools()

    assert before == after
    assert all(set(of) <= {1} for of in found)


def test_any_thread_holds_blas_and_gives_it_back(requires_backend, requires_adapters):
    """A background refresh too, though another thread said a number before it."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    numpy = kc.array.get_backend("numpy")
    seen = []

    def hold_and_give_back():
        release = numpy.hold_threads(1)
        seen.append(numpy.threads())
        release()
        seen.append(numpy.threads())

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        undo = numpy.hold_threads(2)
        other = threading.Thread(target=hold_and_give_back)
        other.start()
        other.join()
        undo()
        seen.append(numpy.threads())

    assert seen == [1, 2, 2]


def test_pytorch_threads_are_limited_in_each_worker(
    requires_backend, requires_adapters
):
    """Where its number of threads is the worker's own."""
    requires_backend("torch")
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = in_threads(
            lambda _: torch.get_num_threads(),
            range(4),
            workers=2,
            library=kc.array.get_backend("torch"),
        )
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)

    assert set(found) == {1}
    assert after == 2


@pytest.mark.usefixtures("one_blas_thread")
def test_a_refresh_with_workers_holds_its_library(requires_adapters, rng, monkeypatch):
    """And makes the operators that it makes alone."""
    layer = kc.Dense(in_features=130, out_features=3, bias=False, weight_layout="io")
    blocks = {name: kc.Block(layer, kc.Kronecker()) for name in "ab"}
    settings = {"decay": 0.9, "damping": 0.1, "reduction": "sum"}
    batches = {
        name: kc.Batch(rng.normal(size=(9, 130)), rng.normal(size=(9, 3)))
        for name in blocks
    }
    held = []
    numpy = kc.array.get_backend("numpy")
    monkeypatch.setattr(numpy, "threads", lambda: 6)
    monkeypatch.setattr(numpy, "hold_threads", lambda n: held.append(n) or list)
    made = []
    for workers in (1, 2):
        estimator = make_estimator(
            blocks, execution=kc.Execution(workers=workers), **settings
        )
        estimator.update(batches)
        estimator.refresh()
        made.append(estimator.operator("b").to_dense())

    assert set(held) == {3}
    assert np.array_equal(*made)


def estimator_of(sizes, outputs, *, workers, bias=True):
    """Return an estimator of dense layers of some widths."""
    blocks = {
        name: kc.Block(
            kc.Dense(
                in_features=n, out_features=outputs, bias=bias, weight_layout="oi"
            ),
            kc.Kronecker(),
        )
        for name, n in sizes.items()
    }
    settings = {"decay": 0.9, "damping": 0.1, "reduction": "sum"}
    return make_estimator(blocks, execution=kc.Execution(workers=workers), **settings)


def batch_of(rng, sizes, outputs):
    return {
        name: kc.Batch(rng.normal(size=(9, n)), rng.normal(size=(9, outputs)))
        for name, n in sizes.items()
    }


def test_threads_start_and_end_with_small_problems(requires_adapters, rng, monkeypatch):
    """One has them while the others have large ones; each block is made once."""
    sizes = {"a": 130, "b": 200, "c": 131, "d": 180, "e": 132, "f": 133}
    kept = estimator_of(sizes, 3, workers=2, bias=False)
    kept.update(batch_of(rng, sizes, 3))
    started = []

    def spied(function, problems, *, workers, library):
        started.extend(problems)
        return in_threads(function, problems, workers=workers, library=library)

    monkeypatch.setattr("kfac_core.execution.threaded.in_threads", spied)
    kept.refresh()

    assert sorted(name for task in started for name in task) == sorted(sizes)
    # Half of one worker's share of the flops is the two smallest.
    assert started == [["a"], ["b"], ["d"], ["f"], ["e"], ["c"]]


@pytest.mark.usefixtures("one_blas_thread")
def test_an_update_with_workers_is_that_of_one(requires_adapters, rng):
    """Bit by bit; a batch that is refused changes nothing, and its block is named."""
    sizes = {"a": 130, "b": 200, "c": 140}
    batches = [batch_of(rng, sizes, 3) for _ in range(3)]
    kept = [estimator_of(sizes, 3, workers=workers) for workers in (1, 2)]
    for estimator in kept:
        for batch in batches[:2]:
            estimator.update(batch)
    bad = dict(batches[2])
    bad["b"] = kc.Batch(bad["b"].inputs * np.inf, bad["b"].output_grads)
    with pytest.raises(kc.NotFiniteError, match=r"'b'.*`inputs`"):
        kept[1].update(bad)
    bad["b"] = kc.Batch(batches[2]["b"].inputs[:, 1:], bad["b"].output_grads)
    with pytest.raises(kc.ShapeError, match="Block 'b'"):
        kept[1].update(bad)

    for name in sizes:
        for side in ("input", "output"):
            sums = [e.state[name].statistics.averages[side].sum.array for e in kept]
            np.testing.assert_array_equal(*sums)


@pytest.mark.usefixtures("one_blas_thread")
def test_products_with_workers_are_those_of_one(requires_adapters, rng, monkeypatch):
    """Bit by bit; those of little work are the calling thread's."""
    sizes = {"a": 150, "b": 200, "c": 140}
    batch = batch_of(rng, sizes, 170)
    gradients = {
        name: {"weight": rng.normal(size=(170, n)), "bias": rng.normal(size=170)}
        for name, n in sizes.items()
    }
    callers = []

    def spied(function, problems, *, workers, library):
        callers.append(workers)
        return in_threads(function, problems, workers=workers, library=library)

    monkeypatch.setattr("kfac_core.execution.threaded.in_threads", spied)
    found = []
    for workers, worth in ((1, 0), (2, 0), (2, 10**12)):
        stage = dataclasses.replace(stages.APPLY, worth_threads=worth)
        monkeypatch.setattr("kfac_core.stages.APPLY", stage)
        kept = estimator_of(sizes, 170, workers=workers)
        kept.update(batch)
        kept.refresh()
        callers.clear()
        found.append(kept.precondition(gradients))
        assert callers == ([2] if (workers, worth) == (2, 0) else [])

    for other in found[1:]:
        for name, parameters in found[0].items():
            for key, value in parameters.items():
                np.testing.assert_array_equal(other[name][key], value)
