"""Random arguments for every public class, function and method of the top.

``python -m conformance_tests.fuzzing.arguments --seconds=600 --seed=7`` calls each with
good arguments of which some are junk.  Whatever is raised has to be the library's own
error; a call that is accepted is no finding.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from ..builders.states import differences, frozen
from ..survival.blocks import CASES, batch_of, gradient_of, made


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


def _good(name: str, rng: random.Random) -> Any:
    """Return an argument that some parameter of that name may be."""
    batches = batch_of("kronecker", rng.randrange(5))
    known: dict[str, Any] = {
        "blocks": {"a": kc.Block(*CASES["kronecker"][:2])},
        "reduction": "sum",
        "sources": rng.choice(("sum", "mean")),
        "batches": batches,
        "gradients": gradient_of("kronecker"),
        "vectors": gradient_of("kronecker"),
        "product": "multiply",
        "names": ["a"],
        "moments": "kronecker",
        "layer": CASES["kronecker"][0],
        "approximation": kc.Kronecker(),
        "in_features": 3,
        "out_features": 2,
        "bias": True,
        "weight_layout": "io",
        "damping": 0.5,
        "decay": 0.9,
        "inputs": np.ones((4, 3)),
        "output_grads": np.ones((4, 2)),
        "in_channels": 2,
        "out_channels": 4,
        "kernel_size": (2,),
        "padding": rng.choice(("same", ((0, 1),))),
        "data_layout": "channels_last",
        "num_embeddings": 4,
        "features": 2,
        "scale_shape": (2,),
        "shift_shape": None,
        "shapes": {"w": (2, 3)},
        "layers": (CASES["kronecker"][0],) * 2,
        "iterations": 2,
        "variant": "infinite",
        "scale": 1.0,
        "input_rank": 1,
        "output_rank": 1,
        "check": "raise",
        "damping_rule": "factored",
        "factorizations": ("inverse",),
        "workers": 1,
    }
    return known.get(name)


def _calls() -> dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]]:
    """Return what is called: a function of an estimator, and the names of arguments."""
    found: dict[str, Any] = {}
    constructors: tuple[Any, ...] = (
        *(kc.Dense, kc.Conv, kc.Embedding, kc.ScaleShift, kc.Parameters, kc.Chain),
        *(kc.Kronecker, kc.Eigen, kc.TNT, kc.KFOC, kc.Series, kc.ScaledIdentity),
        kc.Averaging,
        kc.Refreshing,
        *(kc.Sharing, kc.Execution, kc.Precision, kc.Conventions),
    )
    for cls in constructors:
        names = tuple(field.name for field in dataclasses.fields(cls) if field.init)
        found[cls.__name__] = (_constructor(cls), (), names)
    found["Block"] = (lambda e, *a: kc.Block(*a), ("layer", "approximation"), ())
    options = ("damping", "decay", "damping_rule", "sources", "mode", "averaging")
    options += ("refreshing", "sharing", "precision", "execution", "reduction")
    found["Estimator"] = (_constructor(kc.Estimator), ("blocks",), options)
    methods: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "update": (("batches",), ("check",)),
        "absorb": (("batches",), ()),
        "rebase": (("names",), ("moments", "check")),
        "refresh": (("names",), ("check",)),
        "start_refresh": (("names",), ("check",)),
        "operator": (("names",), ()),
        "precondition": (("gradients",), ()),
        "apply": (("product", "vectors"), ()),
        "load_state_dict": (("state",), ()),
    }
    for name, (positional, keywords) in methods.items():
        found[name] = (_method(name), positional, keywords)
    for name in ("damping", "decay"):
        found[f"set {name}"] = (_setter(name), (name,), ())
    return found


def _constructor(cls: Any) -> Callable[..., Any]:
    return lambda e, *a, **k: cls(*a, **k)


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
        function, positional, keywords = self.calls[name]
        arguments = [self._drawn(parameter) for parameter in positional]
        options = {k: self._drawn(k) for k in keywords if self.rng.random() < 0.95}
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

    def _drawn(self, name: str) -> Any:
        if self.rng.random() < 0.8:
            good = _good(name, self.rng)
            if good is not None:
                return good
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
