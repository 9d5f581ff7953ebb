"""Independent problems on threads."""

import threading

import pytest

from kfac_core.linalg.parallel import in_threads


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_results_are_in_the_order_of_the_problems(workers):
    """Whichever ends first."""
    assert in_threads(lambda k: k * k, range(20), workers=workers) == [
        k * k for k in range(20)
    ]


def test_nothing_gives_nothing():
    """No problems, no results."""
    assert in_threads(lambda k: k, [], workers=2) == []


def test_one_worker_is_the_caller():
    """No thread is started for it."""
    threads = in_threads(lambda _: threading.get_ident(), range(3), workers=1)

    assert set(threads) == {threading.get_ident()}


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


def test_no_workers_are_refused():
    """At least one."""
    with pytest.raises(ValueError, match="workers"):
        in_threads(lambda k: k, [1], workers=0)
