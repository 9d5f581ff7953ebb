"""Natural gradients from an estimator, on a schedule of steps.

The part of an integration between backward pass and optimizer that needs no framework.

Conventions.  As in `kfac_core.integration.layer_calls`; the estimator says
``reduction="sum"``, and gradients are of a loss that is the mean, or the sum, over the R
rows of the network's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import numpy as np

from kfac_core import constraints, errors
from kfac_core.array import Array, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.distributed.agreement import Agreement, are_equal, digest_of
from kfac_core.distributed.communicator import Communicator
from kfac_core.distributed.replicas import require_same
from kfac_core.estimator import Estimator
from kfac_core.execution.background import BackgroundRefresh
from kfac_core.factors.statistics import Statistics
from kfac_core.integration.layer_calls import LayerCall, batches_in_parts
from kfac_core.integration.scheduled import (
    ScheduledSteps,
    ScheduleOptions,
    require_finite,
)
from kfac_core.integration.schedules import bound_at
from kfac_core.state import NetworkState
from kfac_core.steps.vectors import Vector

_NOTHING_SEEN = (
    "No outputs, or no output gradients, were recorded for this step: observe the "
    "outputs before each backward pass."
)

_ALIKE = 1e-4
"""Relative spread of a gradient's norm over processes that roundoff may make."""


class NaturalGradient(ScheduledSteps):
    r"""Natural gradients, step by step.

    With g the gradient of the mean loss over its factor c (see `RowLoss`), P the inverse
    of the estimator's damped curvature, kappa the `kl_clip` and eta the `learning_rate`, a
    step returns

    .. math:: \nu P g, \qquad
        \nu = \min\left(1, \sqrt{\kappa / (\eta^2 \, g \cdot P g)}\right) .

    Parameters
    ----------
    estimator : Estimator
        With ``reduction="sum"``, and a ``mode``.
    reduction : {"mean", "sum"}
        Over the rows of outputs, in the loss that is differentiated.
    update_every, refresh_every : int or callable of int
        Steps between statistics, and between factorizations; a callable takes the number
        of steps taken so far.  A block gets its first operator with its first batch.
    bases_every : int or callable of int
        Steps between the eigenbases of EKFAC blocks.  Without such blocks it is not read.
    refresh_lag : int
        Steps that a refresh runs in the background, while directions use the operators
        before it; it is waited for where it takes longer.  With 0 a refresh is a part of
        its step, as are always the first one and the bases of EKFAC.
    damping, decay : float or callable of int, optional
        Values for the estimator at each step; where left out, its own stay.
    kl_clip : float or callable of int, optional
        Bound on ``eta^2 G . P G``, about twice the Kullback-Leibler divergence between the
        model before and after the step; None for no bound.
    learning_rate : float or callable of int
        What the direction will be multiplied by; read by the KL clip alone.
    communicator : Communicator, optional
        Processes that take each step together; the estimator's execution divides the blocks
        among them.  R counts the rows of all p processes, some of which may have none, and
        gradients are averages over processes, equal on all.

    Attributes
    ----------
    steps : int
        Number of steps taken.
    loss_factor : float or 0-d array
        c, the factor from the negative log-likelihood to the loss, at the last step that
        passed one.
    clip : TrustRegion or None
        Factor and size of the last step's KL clip; None where there was none.

    Raises
    ------
    ConventionError
        For an unknown reduction, an interval that is not an integer >= 1, or a
        `kl_clip` or a `learning_rate` that is not positive.

    Notes
    -----
    With a communicator each process differentiates p times its part of the mean over the
    R rows of all processes: a mean over its own rows if all have as many, and in general
    their sum times ``p / R``.  With ``reduction="sum"`` it differentiates the sum over its
    own rows.  Either way the average over processes is a known multiple of the gradient of
    the whole batch.

    References
    ----------
    Ba, Grosse and Martens (2017): the KL clip, in the form of `kfac_core.steps.kl_clip`.
    """

    def __init__(
        self,
        estimator: Estimator,
        /,
        *,
        reduction: Literal["mean", "sum"],
        refresh_lag: int = 0,
        communicator: Communicator | None = None,
        **schedule: Unpack[ScheduleOptions],
    ) -> None:
        constraints.require_options(
            locals(),
            refresh_lag=constraints.WHOLE,
            communicator=constraints.optional(
                constraints.implementation_of(Communicator)
            ),
        )
        super().__init__(estimator, reduction=reduction, **schedule)
        self.communicator, self.refresh_lag = communicator, refresh_lag
        self._begun: _Begun | None = None
        # A refresh in the background, and the steps whose statistics it and the
        # operators are of; -1 as long as no row has counted.
        self._running: tuple[BackgroundRefresh, int] | None = None
        self._refreshed_at = -1
        self._shares_differ = False
        if communicator is not None:
            require_same(communicator, self._compared())

    def _compared(self) -> dict[str, str]:
        """Return the options that must be equal on all processes, by their names."""
        intervals = {
            "`update_every`": self.update_every,
            "`refresh_every`": self.refresh_every,
            "`bases_every`": self.bases_every,
        }
        # The values of a callable are compared at each step.
        texts = {
            n: "" if callable(interval) else f"{interval}"
            for n, interval in intervals.items()
        }
        texts["`refresh_lag`"] = str(self.refresh_lag)
        return {"`reduction`": self.reduction, **texts}

    @property
    def operator_age(self) -> int:
        """Steps since the step whose statistics the operators are of."""
        return self.steps - max(self._refreshed_at, 0)

    @property
    def wants_statistics(self) -> bool:
        """Whether the next step needs calls with output gradients."""
        return self._refreshed_at < 0 or super().wants_statistics

    @property
    def wants_refresh(self) -> bool:
        """Whether the next step makes new operators."""
        return self._refreshed_at < 0 or super().wants_refresh

    def directions(
        self,
        gradients: Vector,
        calls: Iterable[LayerCall],
        /,
        *,
        rows: Scalar | None,
        loss_factor: Scalar | None = None,
    ) -> dict[str, dict[str, Array]]:
        """Take a step: update and refresh if due, precondition, and clip.

        Parameters
        ----------
        gradients : mapping of str to mapping of str to array
            Gradients by block and parameter, in the layers' layout; blocks may be left out.
        calls : iterable of LayerCall
            Inputs of the layers, and output gradients, which a call drops as soon as they
            are in the statistics.
        rows : float or None
            R, or the sum of the rows' weights, of this process's calls; None if there was
            no batch.  Where no row counts on any process, statistics stay as they are.
            After `begin`, calls and rows are not read.
        loss_factor : float, optional
            c of the rows, which gradients are divided by: `RowLoss.multiple`.  None for
            that of the last step.

        Returns
        -------
        dict of str to dict of str to array
            Natural gradient of the likelihood's mean over rows, for those blocks that have
            an operator.

        Raises
        ------
        NotReadyError
            If there was no batch, or no output gradient came back, when statistics are due
            or the number of rows is needed.
        NotFiniteError
            For a gradient or a row that is not finite.
        ConventionError
            If processes have different gradients.
        KFACError
            As `kfac_core.Estimator.update` and its ``refresh``.  Nothing has changed after
            any of these errors.

        Notes
        -----
        The gradients are checked in one transfer from the device.  Processes exchange one
        small message more than the estimator's.
        """
        unclipped = self._unclipped(
            gradients, calls, rows=rows, loss_factor=loss_factor
        )
        return self._scaled(unclipped, like=gradients)

    def _unclipped(
        self,
        gradients: Vector,
        calls: Iterable[LayerCall],
        /,
        *,
        rows: Scalar | None,
        loss_factor: Scalar | None,
    ) -> dict[str, dict[str, Array]]:
        """Take a step, and return `directions` before they are `_scaled`."""
        if self._begun is None:
            self._take(gradients, calls, rows, loss_factor, background=False)
        else:
            self._agreed(gradients, (), None)
        begun, self._begun = self._begun, None
        assert begun is not None
        try:
            if begun.refresh is not None and not begun.is_lagging:
                begun.refresh.install()
            try:
                with self._announced():
                    vectors = self._directions(gradients, begun.rows)
            except errors.KFACError:
                if self.communicator is None or self.estimator.state is begun.updated:
                    raise
                # Perhaps a factorization failed, which no vote has told of.  Repeat the
                # refresh with votes, so that all processes count the failure.
                self.estimator.state = begun.updated
                self._refresh(begun.examples)
                vectors = self._directions(gradients, begun.rows)
        except BaseException:
            self._restore(begun.before)
            raise
        if begun.is_lagging and begun.refresh is not None:
            self._running = begun.refresh, self.steps
        elif self._refreshes(begun.examples):
            self._refreshed_at = self.steps
        self.steps += 1
        return vectors

    def moments(
        self,
        calls: Iterable[LayerCall],
        /,
        *,
        rows: Scalar,
        before: Mapping[str, Statistics] | None = None,
    ) -> dict[str, Statistics]:
        """Return the statistics of one part of a batch, for `kfac_core.Estimator.absorb`.

        This takes statistics without a step, over the parts of a data set; the object does
        not change.

        Parameters
        ----------
        calls : iterable of LayerCall
            Inputs of the layers, and the output gradients.
        rows : float
            R of this part, or the sum of the rows' weights.
        before : mapping of str to Statistics, optional
            What the parts before this one gave.

        Returns
        -------
        dict of str to Statistics
            Of all parts together, each with the weight of its rows.

        Raises
        ------
        NotReadyError
            If no call has an output gradient.
        KFACError
            As `kfac_core.batch_moments`.
        """
        used = self._used(calls)
        if not rows or not used:
            raise errors.NotReadyError(_NOTHING_SEEN)
        scale: Scalar = 1.0
        if self.estimator.mode == "empirical" and self.reduction == "mean":
            scale = rows / self._processes
        statistics = dict(before or {})
        for part in batches_in_parts(used, rows=rows, scale=scale):
            self._add_moments(part, statistics)
        return statistics

    def begin(
        self,
        calls: Iterable[LayerCall],
        /,
        *,
        rows: Scalar | None,
        loss_factor: Scalar | None = None,
    ) -> None:
        """Update, and refresh in a thread, before the gradients of the step are known.

        `directions`, called next and without calls, then returns the same as with these
        calls.  Meanwhile the backward pass runs, and with a communicator processes exchange
        their statistics.

        Parameters
        ----------
        calls : iterable of LayerCall
            All calls of the step, as of `directions`.
        rows, loss_factor : float
            Likewise.

        Raises
        ------
        ConventionError
            If the step was begun already.
        NotReadyError, NotFiniteError, KFACError
            As `directions`.  Nothing has changed then.
        """
        if self._begun is not None:
            raise errors.ConventionError(
                "This step has already begun, with other calls. Pass all calls of a "
                "step at once, to `begin` or to `directions`."
            )
        self._take({}, calls, rows, loss_factor, background=True)

    def give_up(self) -> None:
        """Undo a step that was begun; without one do nothing."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._restore(begun.before)

    def _position(self) -> dict[str, Any]:
        # Before the estimator's state is taken.
        self._install_running()
        return {**super()._position(), "refreshed_at": self._refreshed_at}

    def load_state_dict(
        self, state: Mapping[str, Any], /, *, owned: bool = False
    ) -> None:
        """Restore a state that `state_dict` returned; see `ScheduledSteps`."""
        refreshed_at: Any = -1
        if isinstance(state, Mapping):  # Anything else is named below.
            refreshed_at = state.get("refreshed_at")
        if type(refreshed_at) is not int or refreshed_at < -1:
            raise errors.StateError(
                "Expected the step of the last refresh in the state, `refreshed_at`, got "
                f"{refreshed_at!r}."
            )
        super().load_state_dict(state, owned=owned)
        self._running, self._refreshed_at = None, refreshed_at

    def _take(
        self,
        gradients: Vector,
        calls: Iterable[LayerCall],
        rows: Scalar | None,
        loss_factor: Scalar | None,
        *,
        background: bool,
    ) -> None:
        """Update and refresh, where they are due."""
        if self._running is not None:
            lag = self.steps - self._running[1]
            if lag >= self.refresh_lag or self.wants_refresh:
                # Before anything that an error of this step takes back.
                self._install_running()
        before, refresh = self._snapshot(), None
        estimator = self.estimator
        try:
            if loss_factor is not None:
                self.loss_factor = loss_factor
            rows, examples = self._updated(gradients, calls, rows, background)
            updated = estimator.state
            with self._announced(gradients):
                due = self._refreshes(examples)
                lagging = due and self.refresh_lag > 0 and not self._lacks_operators()
                if due and (background or lagging):
                    self._rebase()
                    refresh = estimator.start_refresh()
                else:
                    self._refresh(examples)
        except BaseException:
            self._restore(before)
            raise
        self._begun = _Begun(before, updated, rows, examples, refresh, lagging)

    def _refresh(self, examples: Mapping[str, float]) -> None:
        """Make the operators that are due, or the first ones of blocks with examples."""
        if self._refreshes(examples):
            self._rebase()
            self.estimator.refresh()
        elif any(examples.values()):
            self._refresh_new(name for name, N in examples.items() if N)

    def _refreshes(self, examples: Mapping[str, float]) -> bool:
        """Return whether operators are due, and there are statistics to make them of."""
        is_known = self._refreshed_at >= 0 or any(examples.values())
        return self.wants_refresh and is_known

    def _install_running(self) -> None:
        """Wait for the refresh in the background, if there is one; use its operators."""
        if self._running is not None:
            (refresh, self._refreshed_at), self._running = self._running, None
            refresh.install()

    def _lacks_operators(self) -> bool:
        """Whether a block has statistics, and no operator yet."""
        return any(
            block.operator is None and block.statistics is not None
            for block in self.estimator.state.blocks.values()
        )

    def _updated(
        self,
        gradients: Vector,
        calls: Iterable[LayerCall],
        rows: Scalar | None,
        background: bool,
    ) -> tuple[Scalar, dict[str, float]]:
        """Update; return the rows and each block's examples, of all processes."""
        error: Exception | None = None
        used: list[LayerCall] = []
        try:
            used = self._used(calls)
            self._follow_schedules()
        except Exception as raised:
            error = raised
        agreed = None
        if self._agrees_at_once:
            agreed = self._updated_at_once(gradients, used, rows, error, background)
        if agreed is None:
            if self.communicator is not None and error is None:
                rows = self._weighted_rows(rows)
            agreed = self._agreed(
                gradients, used, rows, error=error, background=background
            )
            self._require_rows(*agreed)
            if any(agreed[1].values()):
                self._update(self._batches(used, *agreed))
        # The rows are now in the statistics; free them before a refresh needs the memory.
        if any(agreed[1].values()):
            for call in used:
                call.clear()
        return agreed

    @property
    def _agrees_at_once(self) -> bool:
        """Whether the vote of an update is the only one of the step."""
        return (
            self.communicator is not None
            and self.wants_statistics
            and not self._shares_differ
            and not (self.estimator.mode == "empirical" and self.reduction == "mean")
        )

    def _updated_at_once(
        self,
        gradients: Vector,
        used: Sequence[LayerCall],
        rows: Scalar | None,
        error: Exception | None,
        background: bool,
    ) -> tuple[Scalar, dict[str, float]] | None:
        """Update by the number of rows here, and agree in the vote of the update.

        A block's output gradients are scaled by its examples over the rows, of all
        processes.  If that is not the ratio here, or rows have weights, nothing is changed,
        and the result is None on all processes.
        """
        assert self.communicator is not None
        agreement = Agreement(self.communicator)
        examples = self._examples_of(used)
        step = self._plan(gradients, background)
        try:
            if error is not None:
                raise error
            numbers = self._numbers(gradients, rows, examples)
            further = np.asarray(self._further_numbers(), np.float64)
            # Without rows there is nothing to scale; 1 only avoids dividing by zero.
            counts_here = (rows, examples) if rows else (1.0, examples)
            # Scaled by this process's counts; the ratio of counts is compared below,
            # and where it differs the step is repeated with the counts of all.
            parts = self._batches(used, *counts_here)
        except Exception as raised:
            agreement.vote(step, error=raised)
        before = self._snapshot()
        with agreement.riding(step, np.concatenate([numbers, further])) as rider:
            self._update(parts)
        assert rider.total is not None
        total, further = np.split(rider.total, [len(numbers)])
        agreed = self._read(total, examples)
        self._require_same_gradients(total, numbers)
        self._require_rows(*agreed)
        if not agreed[0]:
            self._restore(before)
            return agreed
        has_weights = self._has_weights(further)
        # The digests of all processes add up to p equal ones, or the ratios differ.
        if has_weights or not are_equal(total[4:8], total[3]):
            self._restore(before)
            self._shares_differ = True
            return None
        return agreed

    def _further_numbers(self) -> Sequence[float]:
        """Return a subclass's numbers for the vote of an update; see `_has_weights`."""
        return ()

    def _has_weights(self, total: np.ndarray[Any, Any]) -> bool:
        """Return whether the rows of processes have to be weighted before an update."""
        return False

    def _weighted_rows(self, rows: Scalar) -> Scalar:
        """Weight rows by those of all processes; return the rows here.  Collective."""
        return rows

    def _update(self, parts: list[dict[str, Any]]) -> None:
        if not parts[1:]:
            self.estimator.update(parts[0])
            return
        moments: dict[str, Statistics] = {}
        for part in parts:
            self._add_moments(part, moments)
        self.estimator.absorb(moments)

    def _require_rows(self, rows: Scalar, examples: Mapping[str, float]) -> None:
        missing = rows is None and self.reduction == "sum"
        if self.wants_statistics:
            missing = rows is None or (bool(rows) and not any(examples.values()))
        if missing:
            raise errors.NotReadyError(_NOTHING_SEEN)

    @contextmanager
    def _announced(self, gradients: Vector | None = None) -> Iterator[None]:
        """Run stages that the vote of the step has named, without further votes.

        Gradients are those whose directions follow.
        """
        if self.communicator is None:
            yield
            return
        network = self.estimator.network
        covered = {network.layers.block_of(name) for name in gradients or ()}
        with Agreement(self.communicator).announced(
            directions_follow=covered == {*network.blocks}
        ):
            yield

    def _directions(
        self, gradients: Vector, rows: Scalar
    ) -> dict[str, dict[str, Array]]:
        estimator = self.estimator
        state, block_of = estimator.state, estimator.network.layers.block_of
        ready = {
            n: g
            for n, g in gradients.items()
            if state[block_of(n)].operator is not None
        }
        if len(ready) < len(gradients):
            require_finite({n: g for n, g in gradients.items() if n not in ready})
        divisor = self.loss_factor
        if self.reduction == "sum":
            # Curvature is of the mean over rows, so a summed gradient is divided by the
            # rows of all; averaging over processes has divided it by their number once.
            # A gradient of no row is at most that of a penalty, as beside one row.
            divisor = divisor * (rows or 1.0) / self._processes
        if not (isinstance(divisor, float) and divisor == 1.0):
            ready = {
                n: {k: x / divisor for k, x in g.items()} for n, g in ready.items()
            }
        bound, rate = self._clip_options()
        vectors, self.clip = self._clipped(ready, rate, bound)
        return vectors

    @property
    def _processes(self) -> int:
        return 1 if self.communicator is None else self.communicator.size

    def _agreed(
        self,
        gradients: Vector,
        calls: Sequence[LayerCall],
        rows: Scalar | None,
        *,
        error: Exception | None = None,
        background: bool = False,
    ) -> tuple[Scalar, dict[str, float]]:
        """Return the rows and each block's examples of all processes.

        Of several, all raise if one gives an error or has gradients that are not finite, or
        if these are not the same on all.
        """
        examples = self._examples_of(calls)
        if self.communicator is None:
            if error is not None:
                raise error
            return rows, examples if rows else dict.fromkeys(examples, 0.0)
        numbers = np.zeros(0)
        try:
            numbers = self._numbers(gradients, rows, examples)
        except errors.KFACError as raised:
            error = error or raised
        step = self._plan(gradients, background)
        total = Agreement(self.communicator).vote(step, numbers, error=error)
        self._require_same_gradients(total, numbers)
        return self._read(total, examples)

    def _examples_of(self, calls: Iterable[LayerCall]) -> dict[str, float]:
        examples = dict.fromkeys(self.estimator.network.layers.names, 0.0)
        for call in calls:
            N = float(call.examples_here)
            examples[call.block] = examples.get(call.block, 0.0) + N
        return examples

    def _plan(self, gradients: Vector, background: bool) -> str:
        """Return everything that decides the stages of a step and their messages."""
        # Of one output: how many there are, this process may not have seen.
        bound = bound_at(self.kl_clip, self.steps, 1)
        _, rate = self._clip_options()
        damping = self.estimator.damping
        dampings = damping.values() if isinstance(damping, Mapping) else [damping]
        # Reading an array would synchronize with its device.
        numbers = sorted(f"{d:.6g}" for d in dampings if type(d) is float)
        parts = [
            f"step {self.steps}",
            f"with statistics: {self.wants_statistics}",
            f"a refresh: {self.wants_refresh}",
            f"bases: {self._due('bases_every', self.bases_every)}",
            f"reduction {self.reduction}",
            f"kl_clip={bound} for a learning rate of {rate:.6g}",
            f"damping {', '.join(numbers)}",
            f"gradients of {sorted(gradients)}",
            f"begun before they were known: {background}",
        ]
        return "; ".join(parts)

    def _numbers(
        self,
        gradients: Vector,
        rows: Scalar | None,
        examples: Mapping[str, float],
    ) -> np.ndarray[Any, Any]:
        """Return the numbers that a vote sums, for `_read`."""
        norm = _norm(gradients)
        if not np.isfinite(norm):
            require_finite(gradients)
            norm = 0.0
        common = self._common(gradients)
        if norm and common is not gradients:
            norm = _norm(common)
        is_given, rows = float(rows is not None), float(rows or 0.0)
        # A part that is masked as a whole has examples and no rows.
        shares = [
            (name, N / rows if rows else np.inf) for name, N in examples.items() if N
        ]
        digest = digest_of(repr(shares)) * bool(shares)
        of_loss = rows * float(self.loss_factor), rows * self.outputs
        # One vector for one all-reduce: sums of these give the mean and variance of the
        # norm, all rows, and the loss factor and outputs weighted by rows.
        head = norm, norm * norm, rows, float(bool(shares)), *digest
        return np.asarray([*head, *of_loss, is_given, *examples.values()])

    def _read(
        self, total: np.ndarray[Any, Any], examples: Mapping[str, float]
    ) -> tuple[float | None, dict[str, float]]:
        rows = float(total[2]) if total[10] else None
        if not rows:
            return rows, dict.fromkeys(examples, 0.0)
        self.loss_factor, self.outputs = (total[8:10] / rows).tolist()
        return rows, dict(zip(examples, total[11:].tolist(), strict=True))

    def _require_same_gradients(
        self, total: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]
    ) -> None:
        """Raise `ConventionError` where processes have gradients of different norms."""
        assert self.communicator is not None
        mean = float(total[0]) / self.communicator.size
        # The variance of the norm over processes, from the sums of norms and squares.
        spread = float(total[1]) / self.communicator.size - mean * mean
        if spread > _ALIKE**2 * mean * mean:
            raise errors.ConventionError(
                "The gradients are not the same on all processes: their norm is "
                f"{numbers[0]:.6g} on rank "
                f"{self.communicator.ranks[self.communicator.rank]} and {mean:.6g} on "
                "average. "
                "Before a step they have to be averages over the processes, as "
                "DistributedDataParallel leaves them, or fully_shard of the whole model: "
                "call the model through it, take no step within no_sync, or average the "
                "gradients yourself. For a model of each process's own say "
                "communicator='alone'."
            )

    def _common(self, gradients: Vector) -> Vector:
        """Return the gradients that are equal on all processes."""
        return gradients

    def _used(self, calls: Iterable[LayerCall]) -> list[LayerCall]:
        """Return the calls with output gradients."""
        return [call for call in calls if call.has_rows]

    def _batches(
        self, calls: Iterable[LayerCall], rows: Scalar, examples: Mapping[str, float]
    ) -> list[dict[str, Any]]:
        scale: Scalar = 1.0
        if self.estimator.mode == "empirical" and self.reduction == "mean":
            # Empirical gradients are of the caller's loss, which may be a mean.
            scale = rows / self._processes
        return batches_in_parts(calls, rows=rows, scale=scale, examples=examples)


@dataclass(frozen=True)
class _Begun:
    """A step whose statistics were taken."""

    before: tuple[Any, ...]
    updated: NetworkState
    rows: Scalar
    examples: Mapping[str, float]
    refresh: BackgroundRefresh | None
    is_lagging: bool


def _norm(gradients: Vector, /) -> float:
    """Return the norm of gradients, not finite where one is not or is too large."""
    arrays = {
        f"{name} {key}": x
        for name, arrays_of in gradients.items()
        for key, x in arrays_of.items()
    }
    if not arrays:
        return 0.0
    xp = ns.namespace_of(**arrays)
    dtype = ns.wide_dtype(xp, next(iter(arrays.values())).dtype)
    with np.errstate(all="ignore"):
        norms = [ns.cast(xp, xp.linalg.vector_norm(x), dtype) for x in arrays.values()]
        # A norm of norms: squares of single entries would overflow in float32.
        norm = xp.linalg.vector_norm(xp.stack(norms))
    return float(backend_of(xp).to_numpy(norm))
