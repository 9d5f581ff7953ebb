"""Random arguments for every public class, function and method of the top.

``python -m conformance_tests.fuzzing.arguments --seconds=600 --seed=7`` calls each with
good arguments of which some are junk.  Whatever is raised has to be the library's own
error; a call that is accepted is no finding.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kfac_core as kc

from ..builders.options import FUNCTIONS
from ..builders.states import differences, frozen
from ..survival.blocks import batch_of, gradient_of, made


class Odd:
    """An object that answers strangely."""

    def __repr__(self) -> str:
        return "Odd()"

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def junk(rng: random.Random) -> Any:
    """Return something that hardly any argument may be."""
    return rng.choice(JUNK)()


JUNK: tuple[Callable[[], Any], ...] = (
    *(lambda: None, lambda: True, lambda: 0, lambda: -1, lambda: 3, lambda: 2.5),
    *(lambda: 10**400, lambda: math.nan, lambda: math.inf, lambda: -math.inf),
    *(lambda: 1j, lambda: "", lambda: "x", lambda: "\udcff", lambda: "a" * 10_000),
    *(lambda: b"\x00", lambda: "a\0b", lambda: [], lambda: (), lambda: {}),
    *(lambda: [None], lambda: ("inverse", 3), lambda: {"a": None}, lambda: {3: 4}),
    *(lambda: {"a": {"a": {}}}, lambda: object(), lambda: int, lambda: Odd()),
    *(lambda: print, lambda: iter([1]), lambda: {1, 2}, lambda: range(3)),
    *(lambda: np.zeros(()), lambda: np.zeros((2, 3)), lambda: np.zeros((0, 3))),
    *(lambda: np.full((3, 2), np.nan), lambda: np.asarray("x"), lambda: np.int64(2)),
    *(lambda: np.asarray([None]), lambda: np.zeros((2, 2, 2), np.float16)),
    *(lambda: np.ma.masked_array(np.ones((3, 2)), True), lambda: np.zeros(2, bool)),
    *(lambda: np.ones((3, 2), ">f8"), lambda: np.ones((3, 2), np.longdouble)),
    *(lambda: kc.Kronecker(), lambda: kc.Batch(None, None), lambda: kc.Precision()),
    *(lambda: kc.Batch(np.ones((4, 3)), None), lambda: kc.Averaging(burn_in=1)),
)


Call = tuple[Callable[..., Any], dict[str, Callable[[random.Random], Any]], int]
"""A function of an estimator, what its arguments may be, and how many are positional."""


def _calls() -> dict[str, Call]:
    """Return what is called, by name."""
    found: dict[str, Call] = {}
    for name, (function, good) in FUNCTIONS.items():
        if name not in ("run_ranks", "Threaded"):  # whose threads end with the process
            options = {option: _always(value) for option, value in good.items()}
            found[name] = (_without_estimator(function), options, 0)
    batches = lambda rng: batch_of("kronecker", rng.randrange(5))  # noqa: E731
    gradients, names = _always(gradient_of("kronecker")), _always(["a"])
    check = {"check": _always("raise")}
    methods: dict[str, tuple[dict[str, Callable[[random.Random], Any]], int]] = {
        "update": ({"batches": batches, **check}, 1),
        "absorb": ({"statistics": batches}, 1),
        "rebase": ({"names": names, "moments": _always("kronecker"), **check}, 1),
        "refresh": ({"names": names, **check}, 1),
        "start_refresh": ({"names": names, **check}, 1),
        "operator": ({"name": _always("a")}, 1),
        "precondition": ({"gradients": gradients}, 1),
        "apply": ({"product": _always("multiply"), "vectors": gradients}, 2),
        "load_state_dict": ({"state": _always(None)}, 1),
    }
    for name, (good, positional) in methods.items():
        found[name] = (_method(name), good, positional)
    for name, value in {"damping": 0.5, "decay": 0.9}.items():
        found[f"set {name}"] = (_setter(name), {name: _always(value)}, 1)
    return found


def _always(value: Any) -> Callable[[random.Random], Any]:
    return lambda rng: value


def _without_estimator(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda e, **k: function(**k)


def _method(name: str) -> Callable[..., Any]:
    return lambda e, *a, **k: getattr(e, name)(*a, **k)


def _setter(name: str) -> Callable[..., Any]:
    return lambda e, value: setattr(e, name, value)


class ArgumentFuzzer:
    """Calls with random arguments, and what came of them.

    Parameters
    ----------
    seed : int
        What everything is drawn from.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.calls = _calls()
        self.estimator = self._trained()

    def _trained(self) -> kc.Estimator:
        estimator = made("kronecker")
        estimator.update(batch_of("kronecker", 1))
        estimator.refresh()
        return estimator

    def run(self) -> str | None:
        """Make one call; return what is wrong, if anything is."""
        name = self.rng.choice([*self.calls])
        function, good, positional = self.calls[name]
        drawn = {k: self._drawn(k, value) for k, value in good.items()}
        arguments = [drawn.pop(k) for k in [*good][:positional]]
        options = {k: v for k, v in drawn.items() if self.rng.random() < 0.95}
        state = self.estimator.state
        before = frozen(self.estimator.state_dict())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function(self.estimator, *arguments, **options)
        except kc.KFACError as error:
            self.counts["refused"] += 1
            if len(str(error)) > 3000:
                return f"{name}{arguments}{options}: a message of {len(str(error))}"
            if self.estimator.state is not state:
                return f"{name}{arguments}{options}: changed the state"
            found = differences(before, frozen(self.estimator.state_dict()))
            return f"{name}{arguments}{options}: changed {found}" if found else None
        except TypeError as error:
            # Python itself says that an argument is missing.
            if "missing" in str(error) and "required" in str(error):
                self.counts["incomplete"] += 1
                return None
            return f"{name}{arguments}{options}: TypeError: {error}"
        except Exception as error:
            return f"{name}{arguments}{options}: {type(error).__name__}: {error}"
        self.counts["accepted"] += 1
        if self.estimator.state is not state:
            self.estimator = self._trained()
        return None

    def _drawn(self, name: str, good: Callable[[random.Random], Any]) -> Any:
        if self.rng.random() < 0.8:
            return good(self.rng)
        drawn = junk(self.rng)
        if name in ("batches", "gradients", "vectors", "state") and (
            self.rng.random() < 0.5
        ):
            return {"a": drawn}
        return drawn


def main(arguments: list[str] | None = None) -> int:
    """Make calls for a time; return 1 if there was a finding."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance_tests.fuzzing.arguments"
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    fuzzer = ArgumentFuzzer(options.seed)
    started, findings = time.monotonic(), 0
    while time.monotonic() - started < options.seconds:
        found = fuzzer.run()
        if found is not None:
            findings += 1
            print(f"FINDING {found[:300]} ... {found[-300:]}", flush=True)
    told = ", ".join(
        f"{number:,} {name}" for name, number in sorted(fuzzer.counts.items())
    )
    print(
        f"{time.monotonic() - started:.0f} s: {findings} findings; {told}", flush=True
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
