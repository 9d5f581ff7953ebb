"""Random sequences: every state can be saved and goes on, and what raises changes nothing.

A sequence runs an estimator beside a twin, which is replaced by a loaded, a pickled or a
copied one after each good call.  Each call is made on both, and states and products are
compared to the bit.  In between come bad calls, and calls of which the k-th inner one
fails; after these the state has to be what it was before, to the bit.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kfac_core as kc
from kfac_core.array.structure import leaves

from ..builders.states import differences, frozen
from ..survival.blocks import CASES, batch_of, gradient_of
from .faults import KINDS, injected

Place = Callable[[np.ndarray[Any, Any]], Any]

RULES = ("factored", "factored_unit_pi", "exact")
_SERIES = ("symmetric", "infinite", "infinite alone")


class FindingError(AssertionError):
    """Something that must not be, with the sequence that led to it."""


@dataclasses.dataclass
class Sequence:
    """One sequence of calls.

    Parameters
    ----------
    seed : int
        What everything is drawn from.
    spec : str
        Backend and device, as ``"torch:cpu"``.
    place : callable
        Makes an array of that backend.
    folder : Path
        For files.
    counts : Counter
        What was done, over all sequences.
    faults : bool
        Whether the first good call fails inside: at the k-th call of one kind, for k = 1,
        2, ... until it succeeds.
    length : int
        How many calls.
    """

    seed: int
    spec: str
    place: Place
    folder: Path
    counts: Counter[str]
    faults: bool = False
    length: int = 12

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.log: list[str] = []
        rule = self.rng.choice(RULES)
        names = [c for c in CASES if rule != "exact" or c not in _SERIES]
        names = [c for c in names if c != "chain"]
        # A call of several blocks fails in the same places for each.
        most = 2 if self.faults else 3
        self.cases = dict(
            zip("abc", self.rng.sample(names, self.rng.randint(1, most)), strict=False)
        )
        if self.rng.random() < 0.3:
            # An equal block, so that they are stacked.
            self.cases["d"] = self.cases["a"]
        self.settings: dict[str, Any] = {
            "damping_rule": rule,
            "reduction": self.rng.choice(("sum", "mean")),
            "decay": self.rng.choice((0.0, 0.5, 0.9, 1.0)),
            "damping": self.rng.choice((0.05, 0.3, 2.0)),
            "averaging": kc.Averaging(
                burn_in=self.rng.choice((0, 0, 2)), debias=self.rng.random() < 0.8
            ),
            "refreshing": kc.Refreshing(
                failure_budget=self.rng.choice((0, 0, 1)),
                factorizations=self.rng.choice((("inverse",), (), ("cholesky",))),
                solving=self.rng.choice(("inverse", "triangular")),
            ),
        }
        self.estimator = self.made()
        self.twin = self.made()
        self.held = frozen(self.estimator.state_dict())
        """The state after the last good call; nothing else may change it."""
        self.path = self.folder / "state.npz"
        self.other = self.folder / "other.npz"
        self.path.unlink(missing_ok=True)
        # Calls that find statistics and operators do more than those that come too early.
        self.before: list[str] = []
        if self.rng.random() < 0.8:
            self.before = ["update all", "refresh all"][: self.rng.randint(1, 2)]
        self.kind = KINDS[self.seed % len(KINDS)] if self.faults else None

    def made(self) -> kc.Estimator:
        """Return an estimator of these blocks that has seen nothing."""
        blocks = {
            name: kc.Block(CASES[case][0], CASES[case][1])
            for name, case in self.cases.items()
        }
        return kc.Estimator(blocks, **self.settings)

    def run(self) -> None:
        """Make the calls.

        Raises
        ------
        FindingError
            For a difference, or an error that is not the library's.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(self.length):
                    self._step()
        except FindingError:
            raise
        except Exception as error:
            raise FindingError(
                f"{self.story()}\n{type(error).__name__}: {error}"
            ) from error
        self.counts["sequences"] += 1

    def story(self) -> str:
        """Return the seed, the blocks and the calls so far."""
        calls = "; ".join(self.log)
        return f"seed {self.seed}: {self.cases}, {self.settings}: {calls}"

    def _step(self) -> None:
        first = self.before.pop(0) if self.before else None
        if first is None and self.rng.random() < 0.25:
            self._bad_call()
            return
        kind = self.kind if first is None else None
        name, call = self._good_call(first, of=FAULTY.get(kind or ""))
        self.log.append(name)
        if kind is not None:
            self._with_faults(kind, name, call)
            self.kind = None
        results = [self._attempt(call, e) for e in (self.estimator, self.twin)]
        self._require(results[0] == results[1], f"{name}: {results}")
        self.counts["good calls"] += 1
        self.held = frozen(self.estimator.state_dict())
        self._require_same("after the call")
        self._replace_twin()

    def _attempt(self, call: Callable[[kc.Estimator], Any], e: kc.Estimator) -> Any:
        """Return what a call gave, frozen; or which of the library's errors it raised."""
        before = e.state
        try:
            return frozen(call(e))
        except (kc.KFACError, OSError) as error:
            self._require(
                e.state is before, f"{type(error).__name__} changed the state"
            )
            self.counts["good calls that came too early"] += 1
            return type(error).__name__

    def _good_call(
        self, first: str | None, *, of: tuple[str, ...] | None
    ) -> tuple[str, Callable[[kc.Estimator], Any]]:
        """Draw a call that the library promises to do, if it does not come too early."""
        draw = self.rng
        seed = draw.randrange(2**31)
        names = sorted(draw.sample(list(self.cases), draw.randint(1, len(self.cases))))
        check = draw.choice(("raise", "raise", "status"))
        batches = {n: batch_of(self.cases[n], seed, self.place)["a"] for n in names}
        gradients = {n: gradient_of(self.cases[n], self.place)["a"] for n in names}
        damping = draw.choice((0.05, 0.3, 2.0, self.place(np.asarray(0.4))))
        decay = draw.choice((0.0, 0.5, 1.0))
        moments = draw.choice(("kronecker", "carried", "zero"))
        bases = [n for n in names if CASES[self.cases[n]][1].name == "ekfac"]
        if first is not None:
            all_of_them = {
                n: batch_of(c, seed, self.place)["a"] for n, c in self.cases.items()
            }
            if first == "update all":
                return first, lambda e: e.update(all_of_them)
            return first, lambda e: e.refresh(check=check)
        calls: dict[str, Callable[[kc.Estimator], Any]] = {
            f"update {names} {check}": lambda e: e.update(batches, check=check),
            f"refresh {names} {check}": lambda e: e.refresh(names, check=check),
            f"refresh all {check}": lambda e: e.refresh(check=check),
            f"rebase {bases} {moments}": lambda e: e.rebase(
                bases, moments=moments, check=check
            ),
            f"precondition {names}": lambda e: e.precondition(gradients),
            f"power {names}": lambda e: e.apply("multiply_matpower", gradients, -0.5),
            f"multiply {names}": lambda e: e.apply("multiply", gradients),
            f"damping {damping}": lambda e: setattr(e, "damping", damping),
            f"decay {decay}": lambda e: setattr(e, "decay", decay),
            f"absorb {names}": lambda e: e.absorb(self._moments(e, names, batches)),
            "background": lambda e: e.start_refresh(names).install(),
            "report": lambda e: repr(e.report()),
            "save": lambda e: kc.save_checkpoint(self.path, e),
            "load": lambda e: kc.load_checkpoint(self.path, e, backend=self.spec),
            "reload": lambda e: e.load_state_dict(e.state_dict()),
        }
        weights = [5, 4, 3, 2, 4, 1, 1, 1, 1, 1, 1, 1, 2, 2, 1]
        drawn = [
            (name, weight)
            for name, weight in zip(calls, weights, strict=True)
            if of is None or name.split()[0] in of
        ]
        [name] = draw.choices(*zip(*drawn, strict=True))
        return name, calls[name]

    def _moments(self, e: kc.Estimator, names: Any, batches: Any) -> dict[str, Any]:
        return {
            n: kc.batch_moments(e.blocks[n], batches[n], conventions=e.conventions)
            for n in names
        }

    def _replace_twin(self) -> None:
        """Let the twin be what comes of a file, of a pickle or of a copy."""
        way = self.rng.choice(("file", "pickle", "copy", "deep copy", "state"))
        if way == "file":
            kc.save_checkpoint(self.other, self.estimator)
            self.twin = self.made()
            kc.load_checkpoint(self.other, self.twin, backend=self.spec)
        elif way == "state":
            self.twin = self.made()
            self.twin.load_state_dict(self.estimator.state_dict())
        elif way == "pickle":
            self.twin = pickle.loads(pickle.dumps(self.estimator))
        elif way == "copy":
            self.twin = copy.copy(self.estimator)
        else:
            self.twin = copy.deepcopy(self.estimator)
        self.counts[f"twins by {way}"] += 1
        self._require_same(f"by {way}")
        held = self.estimator.state.blocks.values()
        if any(b.operator is not None and bool(b.operator.status()) for b in held):
            # A first refresh by status that failed, on a device; it is not saved.
            self.estimator = copy.deepcopy(self.twin)
            self.counts["flagged operators, not saved"] += 1

    def _with_faults(
        self, kind: str, name: str, call: Callable[[kc.Estimator], Any]
    ) -> None:
        """Make a call of which the k-th inner one fails, for each k until it succeeds.

        All are made on one estimator, which must not know of those that failed.
        """
        done = copy.deepcopy(self.estimator)
        with contextlib.suppress(kc.KFACError, OSError):
            call(done)
        tried = copy.deepcopy(self.estimator)
        state, before = tried.state, _snapshot(tried)
        k = 0
        met = True
        while met:
            k += 1
            file = self.path.read_bytes() if self.path.exists() else None
            failed: BaseException | None = None
            with injected(kind, k) as fault:
                try:
                    call(tried)
                except (KeyboardInterrupt, Exception) as error:
                    failed = error
            met = fault.met
            self.counts[f"faults: {kind}"] += met
            what = f"{name}, {kind} at {k}"
            if file is not None and not self._is_whole(file):
                raise FindingError(f"{self.story()}\n{what}: a broken file")
            if (
                failed is not None
                and _settings(tried) == before[1:]
                and (tried.state is state)
            ):
                self._require_known(what, failed)
            elif met:
                # An interrupt may come when everything is done.
                whole = _snapshot(tried) == _snapshot(done)
                late = failed is None or kind == "interrupt"
                self._require(whole and late, f"{what}: {failed!r} changed the state")
                self.counts["calls that were done before the fault"] += 1
                tried = copy.deepcopy(self.estimator)
                state = tried.state
            # Arrays are compared once for many faults: what one changed stays changed.
            if k % 64 == 0 or not met:
                self._require(_held(state) == before[0], f"{what}: an array changed")
        found = differences(frozen(done.state_dict()), frozen(tried.state_dict()))
        self._require(found == [], f"{name}, after {k} times {kind}: {found}")
        self.counts["calls that failed at each k"] += 1

    def _require_known(self, what: str, failed: BaseException) -> None:
        text = str(failed)
        known = isinstance(failed, (kc.KFACError, OSError)) or "injected" in text
        self._require(known, f"{what}: {type(failed).__name__}: {failed}")
        left = [p for p in self.folder.iterdir() if p.name.endswith(".part")]
        self._require(left == [], f"{what}: {left} were left behind")

    def _is_whole(self, file: bytes) -> bool:
        """Whether the file on the disk is the one from before, or can be loaded."""
        if self.path.read_bytes() == file:
            return True
        with contextlib.suppress(kc.StateError):
            kc.load_checkpoint(self.path, self.made(), backend=self.spec)
            return True
        return False

    def _bad_call(self) -> None:
        """Make a call that has to be refused, and that has to change nothing."""
        name = self.rng.choice([*BAD])
        self.log.append(f"bad: {name}")
        state = self.estimator.state
        try:
            BAD[name](self)
        except (kc.KFACError, OSError):
            pass
        except Exception as error:
            raise FindingError(
                f"{self.story()}\nunnamed: {type(error).__name__}: {error}"
            ) from error
        else:
            raise FindingError(f"{self.story()}\nwas not refused")
        self._require(self.estimator.state is state, "another state")
        found = differences(self.held, frozen(self.estimator.state_dict()))
        self._require(found == [], f"changed {found}")
        self.counts["bad calls"] += 1

    def _require_same(self, when: str) -> None:
        found = differences(self.held, frozen(self.twin.state_dict()))
        self._require(found == [], f"{when}: the twin differs in {found}")

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise FindingError(f"{self.story()}\n{what}")

    # What bad calls are made of.

    def batch(self) -> Any:
        """Return a good batch of the first block."""
        return batch_of(self.cases["a"], self.rng.randrange(9), self.place)["a"]

    def broken(self, value: float) -> Any:
        """Return a batch of the first block with one number replaced."""

        def place(x: np.ndarray[Any, Any]) -> Any:
            if x.dtype.kind == "f":
                x[(-1,) * x.ndim] = value
            return self.place(x)

        return batch_of(self.cases["a"], self.rng.randrange(9), place)["a"]

    def cut(self) -> Any:
        """Return a batch of the first block whose last axis is too short."""

        def place(x: np.ndarray[Any, Any]) -> Any:
            return self.place(np.ascontiguousarray(x[..., :-1]))

        return batch_of(self.cases["a"], self.rng.randrange(9), place)["a"]

    def damaged(self) -> None:
        """Load a file of which one byte is another, or a part is missing."""
        kc.save_checkpoint(self.other, self.estimator)
        raw = bytearray(self.other.read_bytes())
        if self.rng.random() < 0.3:
            del raw[self.rng.randrange(len(raw)) :]
        else:
            at = self.rng.randrange(len(raw))
            # A space after the header may be any other white space.
            raw[at] ^= 1 << self.rng.randrange(8)
            if raw[at] in b" \t\n\r" or raw[at] ^ 0x20 in b" \t\n\r":
                del raw[at:]
        self.other.write_bytes(raw)
        state, saved = self.estimator.state, frozen(self.estimator.state_dict())
        kc.load_checkpoint(self.other, self.estimator, backend=self.spec)
        # Zip archives say some things twice, such as a member's method of compression.
        if frozen(self.estimator.state_dict()) == saved:
            self.estimator.state = state
            raise kc.StateError("what was damaged is not read")

    def spoiled(self) -> None:
        """Load a state of which one number is not what it may be."""
        state = self.estimator.state_dict()
        state["settings"]["decay"] = 0.123
        values = state["blocks"]["a"]["values"]
        values[self.rng.choice(("updates", "age", "refreshes"))] = self.rng.choice(
            (-1, True, 0.5, None, "x", 2**31, [])
        )
        self.estimator.load_state_dict(state)


FAULTY: dict[str, tuple[str, ...]] = {
    "linear algebra": ("update", "refresh", "rebase", "precondition", "power"),
    "files": ("save", "load"),
}
"""The calls that have inner ones of a kind; any call has some of the other kinds."""

BAD: dict[str, Callable[[Sequence], Any]] = {
    "NaN": lambda s: s.estimator.update({"a": s.broken(np.nan)}),
    "infinity": lambda s: s.estimator.update({"a": s.broken(-np.inf)}),
    "a short batch": lambda s: s.estimator.update({"a": s.cut()}),
    "a short batch by status": lambda s: s.estimator.update(
        {"a": s.cut()}, check="status"
    ),
    "no batch": lambda s: s.estimator.update({"a": None}),
    "no batches": lambda s: s.estimator.update(None),
    "a list of nothing": lambda s: s.estimator.update({"a": []}),
    "an unknown block": lambda s: s.estimator.update({"a": s.batch(), "z": s.batch()}),
    "an unknown check": lambda s: s.estimator.update({"a": s.batch()}, check="Raise"),
    "junk to absorb": lambda s: s.estimator.absorb({"a": 3}),
    "an unknown block's refresh": lambda s: s.estimator.refresh(["a", "z"]),
    "a string of names": lambda s: s.estimator.refresh("a"),
    "an unknown background": lambda s: s.estimator.start_refresh(["z"]),
    "an unknown gradient": lambda s: s.estimator.precondition({"z": {}}),
    "an empty gradient": lambda s: s.estimator.precondition({"a": {}}),
    "no gradient": lambda s: s.estimator.precondition({"a": None}),
    "an unknown product": lambda s: s.estimator.apply("divide", {}),
    "a negative damping": lambda s: setattr(s.estimator, "damping", -1.0),
    "a damping of text": lambda s: setattr(s.estimator, "damping", "x"),
    "half the dampings": lambda s: setattr(s.estimator, "damping", {"z": 1.0}),
    "a large decay": lambda s: setattr(s.estimator, "decay", 1.5),
    "no decay": lambda s: setattr(s.estimator, "decay", None),
    "unknown moments": lambda s: s.estimator.rebase(moments="x"),
    "an empty state": lambda s: s.estimator.load_state_dict({}),
    "a spoiled state": Sequence.spoiled,
    "a damaged file": Sequence.damaged,
    "no file": lambda s: kc.load_checkpoint(s.folder / "no", s.estimator),
    "no folder": lambda s: kc.save_checkpoint(s.folder / "no" / "no", s.estimator),
    "a folder": lambda s: kc.save_checkpoint(s.folder, s.estimator),
}


def _snapshot(estimator: kc.Estimator) -> Any:
    """Return everything that changes, arrays as bytes."""
    return _held(estimator.state), *_settings(estimator)


def _held(state: Any) -> dict[str, Any]:
    return {path: frozen(x) for path, x in leaves(state)}


def _settings(estimator: kc.Estimator) -> tuple[Any, ...]:
    return hash(estimator.network), repr(estimator.damping), estimator.decay


def placing(spec: str) -> Place:
    """Return what makes arrays of a backend, in float64 if it has that."""
    kc.enable_float64(backend=spec)
    return lambda x: kc.asarray(x, backend=spec)
