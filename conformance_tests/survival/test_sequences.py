"""Random sequences of calls, with bad ones in between that must leave no trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import kfac_core as kc

from ..builders.estimators import make_estimator
from ..builders.states import differences, frozen
from .size import report, sized

N, n, m = 5, 3, 2
SEQUENCES = sized(100, 10_000)
RNG = np.random.default_rng(11)
DATA = [(RNG.normal(size=(N, n)), RNG.normal(size=(N, m))) for _ in range(4)]


def block(approximation: Any) -> kc.Block:
    """Return a dense block."""
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    return kc.Block(layer, approximation)


SETTINGS: list[dict[str, Any]] = [
    {"damping_rule": "factored"},
    {"damping_rule": "factored", "burn_in": 2, "solving": "triangular"},
    {"damping_rule": "factored_unit_pi", "failure_budget": 1, "workers": 2},
    {"damping_rule": "exact"},
    {"damping_rule": "exact", "damping_scaling": "mean_eigenvalue"},
]


def made(settings: dict[str, Any]) -> kc.Estimator:
    """Return an estimator of three blocks, of which two are alike."""
    blocks = {"a": block(kc.Kronecker()), "b": block(kc.Kronecker())}
    blocks["c"] = block(kc.Full() if settings["damping_rule"] == "exact" else kc.TNT())
    return make_estimator(blocks, decay=0.9, damping=0.5, reduction="mean", **settings)


def batch(k: int) -> kc.Batch:
    """Return one of the good batches."""
    return kc.Batch(*DATA[k])


def with_value(k: int, which: int, value: float) -> kc.Batch:
    """Return a batch with one number replaced."""
    arrays = [x.copy() for x in DATA[k]]
    arrays[which][-1, -1] = value
    return kc.Batch(*arrays)


def vectors(**changes: Any) -> dict[str, Any]:
    """Return a gradient of a block."""
    return {"weight": np.ones((n, m)), "bias": np.ones(m)} | changes


class Run:
    """An estimator, the folder of its files, and what its calls gave."""

    def __init__(self, settings: dict[str, Any], folder: Any, name: str) -> None:
        self.settings = settings
        self.estimator = made(settings)
        self.good = folder / f"{name}.npz"
        self.bad = folder / f"{name}.bad"
        self.results: list[Any] = []
        self.background: kc.execution.BackgroundRefresh | None = None
        self.good.unlink(missing_ok=True)


# What is done: name -> function of (run, k), k in 0..3.
GOOD: dict[str, Callable[[Run, int], Any]] = {
    "feed": lambda r, k: r.estimator.update({b: batch(k) for b in "abc"}),
    "feed one": lambda r, k: r.estimator.update({"abca"[k]: batch(k)}),
    "refresh": lambda r, k: r.estimator.refresh(),
    "refresh one": lambda r, k: r.estimator.refresh(["abca"[k]]),
    "damping": lambda r, k: setattr(r.estimator, "damping", (0.1, 0.5, 2.0, 7)[k]),
    "dampings": lambda r, k: setattr(
        r.estimator, "damping", {"a": 0.1 + k, "b": 1.0, "c": np.asarray(0.2)}
    ),
    "decay": lambda r, k: setattr(r.estimator, "decay", (0.0, 0.5, 0.99, 1.0)[k]),
    "save": lambda r, k: kc.save_checkpoint(r.good, r.estimator),
    "load": lambda r, k: kc.load_checkpoint(r.good, r.estimator, backend="numpy"),
    "reload": lambda r, k: r.estimator.load_state_dict(r.estimator.state_dict()),
    "precondition": lambda r, k: r.results.append(
        frozen(r.estimator.precondition({b: vectors() for b in "abc"[: k + 1]}))
    ),
    "apply": lambda r, k: r.results.append(
        frozen(r.estimator.apply("multiply_matpower", {"a": vectors()}, 0.5))
    ),
    "start": lambda r, k: setattr(r, "background", r.estimator.start_refresh()),
    "install": lambda r, k: r.background and r.background.install(),
    "status": lambda r, k: r.estimator.update({"b": batch(k)}, check="status"),
    "report": lambda r, k: r.estimator.report() and None,
}


def _damaged(run: Run, k: int) -> None:
    """Load a file of which one byte is another, or a part is missing."""
    kc.save_checkpoint(run.bad, run.estimator)
    raw = bytearray(run.bad.read_bytes())
    if k == 0:
        del raw[len(raw) // 2 :]
    else:
        raw[len(raw) * k // 4 + 3] ^= 4
    run.bad.write_bytes(raw)
    kc.load_checkpoint(run.bad, run.estimator, backend="numpy")


def _spoiled_state(run: Run, k: int) -> None:
    """Load a state of which the last block is not good."""
    state = run.estimator.state_dict()
    state["settings"]["decay"] = 0.123
    state["blocks"]["a"]["values"]["updates"] += 1
    if k == 0:
        state["blocks"]["c"]["values"]["updates"] = -1
    elif k == 1:
        del state["blocks"]["c"]
    elif k == 2:
        state["settings"]["damping"] = float("nan")
    else:
        state["conventions"]["reduction"] = "sum"
    run.estimator.load_state_dict(state)


def _strict(shape: tuple[int, ...]) -> Any:
    """Return an array of another library than the statistics'."""
    import array_api_strict

    return array_api_strict.ones(shape)


BAD_VALUES = (np.nan, np.inf, -np.inf, np.nan)
BAD_BATCHES: dict[str, Callable[[int], Any]] = {
    "shape": lambda k: kc.Batch(DATA[k][0][:, 1:], DATA[k][1]),
    "examples": lambda k: kc.Batch(DATA[k][0], DATA[k][1][1:]),
    "empty": lambda k: kc.Batch(DATA[k][0][:0], DATA[k][1][:0]),
    "integers": lambda k: kc.Batch(np.ones((N, n), np.int64), DATA[k][1]),
    "complex": lambda k: kc.Batch(DATA[k][0], np.ones((N, m), np.complex128)),
    "list": lambda k: kc.Batch([[1.0] * n] * N, DATA[k][1]),
    "inputs": lambda k: with_value(k, 0, BAD_VALUES[k]),
    "grads": lambda k: with_value(k, 1, BAD_VALUES[k]),
    "library": lambda k: kc.Batch(_strict((N, n)), _strict((N, m))),
    "mixed": lambda k: kc.Batch(DATA[k][0], _strict((N, m))),
    "mask": lambda k: kc.Batch(*DATA[k], np.ones(N + 1, bool)),
    "sources": lambda k: kc.Batch(*DATA[k], sources=2),
}


def _bad_feeds() -> dict[str, Callable[[Run, int], Any]]:
    """Return each bad batch for a block behind two good ones, and alone by status."""
    found: dict[str, Callable[[Run, int], Any]] = {}
    for name, bad in BAD_BATCHES.items():
        found[f"feed {name}"] = lambda r, k, bad=bad: r.estimator.update(
            {"a": batch(k), "b": batch(k), "c": bad(k)}
        )
        if name not in ("inputs", "grads"):
            found[f"status {name}"] = lambda r, k, bad=bad: r.estimator.update(
                {"a": batch(k), "b": bad(k)}, check="status"
            )
    # Statistics that have a library refuse another; the first batch may be of any.
    for name in ("feed library", "status library"):
        del found[name]
    found["feed library"] = _other_library
    return found


def _other_library(run: Run, k: int) -> None:
    if run.estimator.state["a"].statistics is None:
        raise kc.NotReadyError("nothing to mix with")
    other = kc.Batch(_strict((N, n)), _strict((N, m)))
    run.estimator.update({"c": batch(k), "a": other})


def _set(name: str, values: tuple[Any, ...]) -> Callable[[Run, int], Any]:
    return lambda r, k: setattr(r.estimator, name, values[k])


BAD: dict[str, Callable[[Run, int], Any]] = _bad_feeds() | {
    "unknown feed": lambda r, k: r.estimator.update({"a": batch(k), "z": batch(k)}),
    "unknown refresh": lambda r, k: r.estimator.refresh(["a", "z"]),
    "unknown start": lambda r, k: r.estimator.start_refresh(["z"]),
    "unknown precondition": lambda r, k: r.estimator.precondition({"z": vectors()}),
    "unknown state": lambda r, k: r.estimator.state["z"],
    "unknown product": lambda r, k: r.estimator.apply("divide", {"a": vectors()}),
    "no basis": lambda r, k: r.estimator.rebase(["a"], moments="zero"),
    "bad damping": _set("damping", (-1.0, np.nan, np.inf, 10**400)),
    "bad dampings": _set(
        "damping",
        ({"a": 1.0}, {"a": 1, "b": 1, "z": 1}, {}, {"a": 1, "b": 1, "c": -1.0}),
    ),
    "bad decay": _set("decay", (-0.1, 1.1, np.nan, 10**400)),
    "vector shape": lambda r, k: r.estimator.precondition(
        {"a": vectors(), "b": vectors(bias=np.ones(m + 1))}
    ),
    "vector dtype": lambda r, k: r.estimator.precondition(
        {"a": vectors(), "b": vectors(bias=np.ones(m, np.int64))}
    ),
    "vector of nothing": lambda r, k: r.estimator.precondition({"a": {}}),
    "damaged file": _damaged,
    "file of another": lambda r, k: _file_of_another(r),
    "no file": lambda r, k: kc.load_checkpoint(r.bad / "no", r.estimator),
    "no folder": lambda r, k: kc.save_checkpoint(r.bad / "no" / "no", r.estimator),
    "empty state": lambda r, k: r.estimator.load_state_dict({}),
    "spoiled state": _spoiled_state,
    "bad array damping": lambda r, k: _bad_array_damping(r, BAD_VALUES[k]),
}


def _file_of_another(run: Run) -> None:
    layer = kc.Dense(in_features=2, out_features=2, bias=True, weight_layout="io")
    other = make_estimator(
        {name: kc.Block(layer, kc.Kronecker()) for name in "abc"},
        **{
            "decay": 0.9,
            "damping": 0.5,
            "reduction": "mean",
            "damping_rule": "factored",
        },
    )
    kc.save_checkpoint(run.bad, other)
    kc.load_checkpoint(run.bad, run.estimator, backend="numpy")


def _bad_array_damping(run: Run, value: float) -> None:
    """Refresh with an array that is no damping; the caller takes it back afterwards."""
    before = run.estimator.damping
    run.estimator.damping = np.asarray(value)
    try:
        run.estimator.refresh()
    finally:
        run.estimator.damping = before


EXPECTED = (kc.KFACError, OSError)


def attempt(run: Run, operation: Callable[[Run, int], Any], k: int) -> str | None:
    """Return the name of the error that an operation raised, if any."""
    try:
        operation(run, k)
    except EXPECTED as error:
        return type(error).__name__
    return None


COUNTS = {"good": 0, "bad": 0, "sequences": 0}


@st.composite
def sequences(draw: Any) -> list[tuple[str, int]]:
    """Draw a sequence of 1 to 30 calls."""
    names = st.sampled_from([*GOOD, *GOOD, "feed", "feed", "refresh", *BAD])
    return draw(st.lists(st.tuples(names, st.integers(0, 3)), min_size=1, max_size=30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sequences")


@hypothesis.settings(
    max_examples=SEQUENCES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(sequences(), st.integers(0, len(SETTINGS) - 1))
def check(folder: Any, calls: list[tuple[str, int]], which: int) -> None:
    """Run a sequence, and the same one without its bad calls."""
    settings = SETTINGS[which]
    tried, plain = Run(settings, folder, "tried"), Run(settings, folder, "plain")
    for name, k in calls:
        if name in BAD:
            before = frozen(tried.estimator.state_dict())
            assert attempt(tried, BAD[name], k) is not None, f"{name} was not refused"
            assert differences(before, frozen(tried.estimator.state_dict())) == []
            COUNTS["bad"] += 1
        else:
            # A good call may come too early; then it is refused in both.
            outcomes = [attempt(run, GOOD[name], k) for run in (tried, plain)]
            assert outcomes[0] == outcomes[1], (name, outcomes)
            COUNTS["good"] += 1

    states = [frozen(run.estimator.state_dict()) for run in (tried, plain)]
    assert differences(*states) == []
    assert tried.results == plain.results
    for run in (tried, plain):
        attempt(run, GOOD["feed"], 0)
        attempt(run, GOOD["refresh"], 0)
        attempt(run, GOOD["precondition"], 2)
    assert tried.results == plain.results
    COUNTS["sequences"] += 1


def test_bad_calls_leave_no_trace(folder):
    """After any sequence the state is that without the bad calls, to the bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        check(folder)

    assert COUNTS["sequences"] >= SEQUENCES * 0.9
    assert COUNTS["bad"] > SEQUENCES
    report(f"\n{COUNTS}")


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("k", range(4))
def test_every_bad_call_is_refused(folder, name, k):
    """Each alone, once there are operators; so no case above is empty."""
    run = Run(SETTINGS[0], folder, "alone")
    run.estimator.update({b: batch(0) for b in "abc"})
    run.estimator.refresh()
    before = frozen(run.estimator.state_dict())

    assert attempt(run, BAD[name], k) is not None
    assert differences(before, frozen(run.estimator.state_dict())) == []
