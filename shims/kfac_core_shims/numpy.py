"""K-FAC for networks written by hand, on NumPy arrays or memory that looks like them.

The loop does its own forward and backward pass, and hands over each layer's inputs x and
output gradients g (`KFAC.observe`) and the parameters' gradients (`KFAC.step`), in its own
names, shapes and layouts.  Parameters are written to in place, so that views of memory
that Fortran or C owns will do.  ``reduction`` says of what the given g are derivatives
(`kfac_core.conventions`); the gradients of `step` are of the mean over examples.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import kfac_core as kc

__all__ = ["KFAC"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Vector: TypeAlias = Mapping[str, Mapping[str, Array]]
Schedule: TypeAlias = float | Callable[[int], float]

_DEFAULTS: dict[str, kc.Approximation] = {
    "embedding": kc.Kronecker(input="diagonal"),
    "scale_shift": kc.Diagonal(),
}


class KFAC:
    """K-FAC with momentum, a bound on the step and decoupled weight decay.

    With P the inverse of the damped curvature, of step t::

        d = P grad;  nu = min(1, sqrt(kl_clip / (lr^2 grad . d)))  (1 without `kl_clip`)
        v = momentum v + nu d;  theta -= lr (v + weight_decay theta)

    Parameters
    ----------
    parameters : mapping of str to mapping of str to array
        By layer, to be written to.  ``{"fc": {"weight": W, "bias": b}}`` with W of shape
        ``(in, out)`` is dense, ``{"norm": {"scale": s, "shift": t}}`` a normalization.
    learning_rate, damping : float, or callable of the number of steps made
        Evaluated at every step; the damping takes effect at the next refresh.
    **options : object
        Options of `kfac_core.Estimator`: `reduction`, `decay` and any other.
    layers : mapping of str to Layer or Block, optional
        Layers that cannot be inferred from their parameters; a block sets another
        approximation than Kronecker factors (or the diagonal for a scale and shift).
    momentum, weight_decay, kl_clip : float
        Momentum, weight decay and bound of the step.
    decayed : callable, optional
        Whether a parameter, by the names of layer and parameter, decays; all do.
    update_every, refresh_every : int
        Numbers of steps between statistics, and between refreshes.

    Raises `KFACError` for layers that do not match their parameters, and invalid options.
    """

    def __init__(
        self,
        parameters: Vector,
        *,
        learning_rate: Schedule,
        damping: Schedule,
        layers: Mapping[str, kc.Layer | kc.Block] | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        kl_clip: float | None = None,
        decayed: Callable[[str, str], bool] | None = None,
        update_every: int = 1,
        refresh_every: int = 1,
        **options: Any,
    ) -> None:
        self.parameters = {name: dict(arrays) for name, arrays in parameters.items()}
        if unknown := set(layers or {}) - set(self.parameters):
            raise kc.UnknownBlockError(f"There are no parameters of {unknown}.")
        blocks = {}
        for name, arrays in self.parameters.items():
            layer = (layers or {}).get(name) or _layer_of(name, arrays)
            if not isinstance(layer, kc.Block):
                layer = kc.Block(layer, _DEFAULTS.get(layer.kind, kc.Kronecker()))
            try:
                layer.parameters_to_matrix(arrays)
            except kc.KFACError as error:
                raise type(error)(f"Layer {name!r}: {error}") from None
            if not all(array.flags.writeable for array in arrays.values()):
                raise kc.UnsupportedError(f"Layer {name!r}: an array is read-only.")
            blocks[name] = layer
        if min(update_every, refresh_every) < 1:
            raise kc.ConventionError("Expected both intervals to be at least 1.")
        self.learning_rate, self.damping, self.kl_clip = learning_rate, damping, kl_clip
        self.momentum, self.weight_decay, self.decayed = momentum, weight_decay, decayed
        self.update_every, self.refresh_every = update_every, refresh_every
        self.steps = 0
        options = {"damping": _at(damping, 0), **options}
        self.estimator = kc.Estimator(blocks, **options)
        self._velocity: dict[str, dict[str, Array]] | None = None
        self._seen: dict[str, kc.Statistics] = {}

    @property
    def wants_statistics(self) -> bool:
        """Whether layers have to be observed for the next step."""
        return self.steps % self.update_every == 0

    def observe(self, name: str, batch: kc.Batch | list[kc.Batch], /) -> None:
        """Record inputs and output gradients of a layer for the next step.

        A list is one batch for each use of the layer in the network.  Several calls before
        a step are parts of one batch, of any sizes, each with a loss of its own.  Raises
        `KFACError` for arrays that cannot be used; nothing was changed then.
        """
        if name not in self.parameters:
            raise kc.UnknownBlockError(f"There are no parameters of {name!r}.")
        known = self.estimator.network
        block = known.blocks[known.known(name)]
        options: Any = {"conventions": known.conventions, "precision": known.precision}
        moments = block.moments(batch, **options, name=name)
        seen = self._seen.get(name)
        self._seen[name] = block.merge(seen, moments) if seen else moments

    def step(self, gradients: Vector, /) -> dict[str, dict[str, Array]]:
        """Accumulate the observed batches, refresh if due, and update the parameters.

        Returns the change of the parameters.  Raises `KFACError` for invalid gradients or
        schedules, and for a layer that was never observed; parameters and state are then
        unchanged.  If a refresh fails (`FactorizationError`), the statistics are updated.
        """
        self._require(gradients, "gradients")
        estimator, rate = self.estimator, _at(self.learning_rate, self.steps)
        if not math.isfinite(rate):
            raise kc.ConventionError(f"Expected a finite `learning_rate`, got {rate}.")
        fresh = {n for n in self.parameters if estimator.state[n].operator is None}
        for name in fresh - set(self._seen):
            if not estimator.state[name].updates:
                raise kc.NotReadyError(f"Layer {name!r} was never observed.")
        estimator.damping = _at(self.damping, self.steps)
        estimator.absorb(self._seen)
        self._seen = {}
        if fresh or self.steps % self.refresh_every == 0:
            estimator.refresh()
        direction, nu = estimator.precondition(gradients), 1.0
        if self.kl_clip is not None:
            clip: Any = {"learning_rate": rate, "bound": self.kl_clip}
            nu = kc.steps.kl_clip(gradients, direction, **clip).scale
        terms = [direction, *([self._velocity] if self._velocity else [])]
        velocity = kc.steps.linear_combination([nu, self.momentum][: len(terms)], terms)
        change = kc.steps.decay_decoupled(
            kc.steps.linear_combination([-rate], [velocity]),
            self.parameters,
            weight_decay=self.weight_decay,
            learning_rate=rate,
            only=self.decayed,
        )
        self._require(change, "the step")
        self._velocity, self.steps = velocity, self.steps + 1
        for name, arrays in self.parameters.items():
            for parameter, array in arrays.items():
                array += change[name][parameter]
        return dict(change)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the parameters and the pending observations."""
        own = {"velocity": self._velocity, "steps": self.steps}
        return {"estimator": self.estimator.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a state; raises `StateError`, changing nothing, if it does not match."""
        try:
            steps, velocity = int(state["steps"]), state["velocity"]
            if velocity is not None:
                self._require(velocity, "velocity")
            self.estimator.load_state_dict(state["estimator"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise kc.StateError(f"The state does not fit: {error}") from None
        self._velocity, self.steps, self._seen = velocity, steps, {}

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write the state atomically to an ``.npz`` file."""
        arrays: dict[str, Array] = {}
        tree = json.dumps(_folded(self.state_dict(), arrays), allow_nan=False)
        part = Path(f"{os.fspath(path)}.part")
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, tree=np.array(tree), **arrays)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def load(self, path: str | os.PathLike[str], /) -> None:
        """Restore a state from `save`; raises `StateError` as `load_state_dict`."""
        try:
            with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
                state = _unfolded(json.loads(str(file["tree"])), file)
        except Exception as error:  # NumPy raises eight kinds for damaged files
            raise kc.StateError(f"{path}: damaged or no saved state: {error}") from None
        self.load_state_dict(state)

    def _require(self, vector: Any, what: str) -> None:
        """Raise unless a vector has the parameters' names and shapes, and is finite."""
        if set(vector) != (names := set(self.parameters)):
            raise kc.ShapeError(f"Expected {what} of {names}, got {set(vector)}.")
        for name, arrays in vector.items():
            matrix = self.estimator.blocks[name].parameters_to_matrix(arrays)
            if not np.all(np.isfinite(matrix)):
                raise kc.NotFiniteError(f"{what} of {name!r}: found NaN or infinity.")


def _layer_of(name: str, arrays: Mapping[str, Array], /) -> kc.Layer:
    """Return the layer of parameters whose names and shapes say what it is."""
    shapes = {parameter: np.shape(array) for parameter, array in arrays.items()}
    if shapes and set(shapes) <= {"scale", "shift"}:
        return kc.ScaleShift(
            **{f"{p}_shape": shapes.get(p) for p in ("scale", "shift")}
        )
    if set(shapes) - {"bias"} == {"weight"} and len(shapes["weight"]) == 2:
        sizes = dict(
            zip(("in_features", "out_features"), shapes["weight"], strict=True)
        )
        return kc.Dense(**sizes, bias="bias" in shapes, weight_layout="io")
    raise kc.ShapeError(f"Say in `layers` what {name!r} is; its shapes are {shapes}.")


def _at(schedule: Schedule, step: int) -> float:
    return float(schedule(step) if callable(schedule) else schedule)


def _folded(state: Any, arrays: dict[str, Array]) -> Any:
    """Return a state as JSON, with the names of arrays in their places."""
    if isinstance(state, Mapping):
        return {str(key): _folded(value, arrays) for key, value in state.items()}
    if isinstance(state, np.ndarray | np.generic):
        name = f"array{len(arrays)}"
        arrays[name] = np.asarray(state)
        return {"array": name}
    return list(state) if isinstance(state, tuple) else state


def _unfolded(tree: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(tree, dict):
        if isinstance(tree.get("array"), str):
            return arrays[tree["array"]]
        return {key: _unfolded(value, arrays) for key, value in tree.items()}
    return tuple(tree) if isinstance(tree, list) else tree
