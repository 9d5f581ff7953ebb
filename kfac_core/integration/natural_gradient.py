"""Natural gradients from an estimator, on a schedule of steps.

What a shim of any framework does between its backward pass and its optimizer, without the
framework.

Conventions.  As in `kfac_core.integration.layer_calls`; the estimator says
``reduction="sum"``, and the
gradients that are given are those of a loss that is the mean, or the sum, over the R rows
of the network's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from kfac_core.array.backend import Array, backend_of
from kfac_core.array.finite import all_finite
from kfac_core.array.namespaces import namespace_of, own_namespace
from kfac_core.constraints import require_one_of
from kfac_core.errors import NotFiniteError, NotReadyError, StateError
from kfac_core.estimator import Estimator
from kfac_core.integration.layer_calls import LayerCall, batches_of_calls

__all__ = ["NaturalGradient"]


class NaturalGradient:
    """Natural gradients, step by step.

    Parameters
    ----------
    estimator : Estimator
        With ``reduction="sum"``, and a ``mode``.
    reduction : {"mean", "sum"}
        Over the rows of outputs, in the loss that is differentiated.
    update_every, refresh_every : int
        Steps between statistics, and between factorizations.

    Attributes
    ----------
    steps : int
        How many were taken.
    """

    def __init__(
        self,
        estimator: Estimator,
        /,
        *,
        reduction: Literal["mean", "sum"],
        update_every: int = 1,
        refresh_every: int = 1,
    ) -> None:
        require_one_of("reduction", reduction, ("mean", "sum"))
        self.estimator, self.reduction, self.steps = estimator, reduction, 0
        self.update_every, self.refresh_every = update_every, refresh_every

    @property
    def wants_statistics(self) -> bool:
        """Whether the next step needs calls with output gradients."""
        return self.steps % self.update_every == 0

    @property
    def wants_refresh(self) -> bool:
        """Whether the next step makes new operators."""
        return self.steps % self.refresh_every == 0

    def directions(
        self,
        gradients: Mapping[str, Mapping[str, Any]],
        calls: Iterable[LayerCall],
        /,
        *,
        rows: int,
    ) -> dict[str, dict[str, Any]]:
        """Take a step: update and refresh if due, and precondition.

        Parameters
        ----------
        gradients : mapping of str to mapping of str to array
            Gradients by block and parameter, in the layers' layout; blocks may be left out.
        calls : iterable of LayerCall
            Inputs of the layers, and the output gradients.
        rows : int
            R; 0 where nothing was observed.

        Returns
        -------
        dict of str to dict of str to array
            Natural gradient of the loss's mean over rows, for those blocks that have an
            operator.

        Raises
        ------
        NotReadyError
            If nothing was observed, or no output gradient came back when due.
        NotFiniteError
            For a gradient or a row that is not finite; nothing has changed then.
        KFACError
            As `kfac_core.Estimator.update` and its ``refresh``.

        Notes
        -----
        The gradients are checked in one transfer from the device.
        """
        batches = self._batches(calls, rows)
        if not rows or (self.wants_statistics and not batches):
            raise NotReadyError(
                "No row of outputs, or no output gradient, was seen for this step: "
                "observe the outputs before each backward pass."
            )
        _require_finite(gradients)
        self.estimator.update(batches)
        if self.wants_refresh:
            self.estimator.refresh()
        state, block_of = self.estimator.state, self.estimator.network.block_of
        ready = {
            n: g
            for n, g in gradients.items()
            if state[block_of(n)].operator is not None
        }
        found = self.estimator.precondition(ready)
        if self.reduction == "sum":
            for name, given in found.items():
                found[name] = {key: x / rows for key, x in given.items()}
        self.steps += 1
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume: the steps, and the estimator's state."""
        return {"steps": self.steps, "estimator": self.estimator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a state that `state_dict` returned.

        Raises
        ------
        StateError
            If anything does not fit; nothing was changed then.
        """
        if type(state.get("steps")) is not int:
            raise StateError(f"Expected a number of `steps` in {[*state]}.")
        self.estimator.load_state_dict(state.get("estimator", {}))
        self.steps = state["steps"]

    def _batches(self, calls: Iterable[LayerCall], rows: int) -> dict[str, Any]:
        # Empirical gradients are those of the caller's own loss, which may be a mean.
        mean = self.estimator.mode == "empirical" and self.reduction == "mean"
        return batches_of_calls(calls, rows=rows or 1, scale=rows if mean else 1.0)


def _require_finite(gradients: Mapping[str, Mapping[str, Any]], /) -> None:
    """Raise `NotFiniteError` for gradients that are not finite, with their name.

    One transfer to the host, whatever their number.
    """
    names: list[str] = []
    finite: list[Array] = []
    for name, given in gradients.items():
        for key, x in given.items():
            what = f"The gradient of {name!r} ({key})"
            names.append(what)
            finite.append(all_finite(x, xp=namespace_of(**{what: x})))
    if not finite:
        return
    xp = own_namespace(finite[0])
    good = backend_of(xp).to_numpy(xp.stack(finite)).tolist()
    bad = [what for what, fine in zip(names, good, strict=True) if not fine]
    if bad:
        more = f", and {len(bad) - 1} more are not" if bad[1:] else ""
        raise NotFiniteError(f"{bad[0]} is not finite{more}. Nothing was changed.")
