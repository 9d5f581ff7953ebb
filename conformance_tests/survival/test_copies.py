"""What was pickled, copied or saved goes on as the original does, for every block."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.execution import Executor, plain

from ..builders.states import differences, frozen
from .blocks import CASES, batch_of, gradient_of, made

WAYS = {
    "pickled": lambda e, folder: pickle.loads(pickle.dumps(e)),
    "copied": lambda e, folder: copy.copy(e),
    "copied deeply": lambda e, folder: copy.deepcopy(e),
    "saved": None,
}


def saved(estimator, case, folder):
    """Return another estimator with the same state, by way of a file."""
    other = made(case)
    kc.save_checkpoint(folder / "state", estimator)
    kc.load_checkpoint(folder / "state", other, backend="numpy")
    return other


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_copy_goes_on_as_the_original(tmp_path, case, way):
    """After each stage, to the bit; and the two are apart."""
    rng = np.random.default_rng(7)
    estimator = made(case)
    stages = [
        lambda e: None,
        lambda e: e.update(batch_of(case, first)),
        lambda e: e.rebase(moments="kronecker"),
        lambda e: e.refresh(),
        lambda e: e.update(batch_of(case, second)),
    ]
    first, second, third = (rng.integers(2**31) for _ in range(3))
    for stage in stages:
        stage(estimator)
        if way == "saved":
            other = saved(estimator, case, tmp_path)
        else:
            other = WAYS[way](estimator, tmp_path)
        before = frozen(estimator.state_dict())
        assert differences(frozen(other.state_dict()), before) == []
    alone = saved(estimator, case, tmp_path)
    for one in (other, alone):
        one.update(batch_of(case, third))
        one.rebase(moments="kronecker")
        one.refresh()
    assert differences(frozen(other.state_dict()), frozen(alone.state_dict())) == []
    products = [frozen(e.precondition(gradient_of(case))) for e in (other, alone)]
    assert differences(*products) == []
    assert differences(frozen(estimator.state_dict()), before) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update({"a": batch_of("kronecker", 1)["a"]}),
        lambda e: e.refresh(),
        lambda e: e.load_state_dict(e.state_dict()),
        lambda e: e.absorb({}),
        lambda e: e.rebase([], moments="zero"),
    ],
    ids=["update", "refresh", "load", "absorb", "rebase"],
)
def test_a_change_within_a_change_is_refused(change):
    """Whichever of the calls another thread makes while one updates."""
    estimator = made("kronecker")
    estimator.update(batch_of("kronecker", 0))
    estimator.refresh()
    network = estimator.network
    found = []

    class Meanwhile(Executor):
        """Runs a change in another thread before its stage."""

        def __call__(self, stage, tasks, /):
            meanwhile()
            return plain(stage, tasks)

    def meanwhile():
        def second():
            try:
                change(estimator)
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    estimator._executor = Meanwhile()
    estimator.update(batch_of("kronecker", 2))

    assert [type(error) for error in found] == [kc.ConcurrentChangeError]
    assert estimator.state["a"].updates == 2
    assert estimator.network is network


def test_a_refresh_of_statistics_that_are_gone_is_refused():
    """A state that was loaded meanwhile does not get the old one's operators."""
    estimator = made("kronecker")
    estimator.update(batch_of("kronecker", 0))
    estimator.update(batch_of("kronecker", 1))
    early = made("kronecker").state_dict()
    running = estimator.start_refresh()
    estimator.load_state_dict(early)
    with pytest.raises(kc.NotReadyError, match="state was loaded"):
        running.install()

    estimator.load_state_dict(estimator.state_dict())
