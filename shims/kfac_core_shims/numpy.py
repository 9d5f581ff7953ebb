"""K-FAC for networks written by hand, on NumPy arrays or memory that looks like them.

The loop does its own forward and backward pass.  It takes vectors to backpropagate from
`KFAC.vectors`, hands over each layer's inputs x and what came back to its outputs g
(`KFAC.observe`), and the parameters' gradients (`KFAC.step`), in its own names, shapes and
layouts.  Parameters are written to in place, so that views of memory that Fortran or C
owns will do.

Conventions.  The loss is a mean or a sum over the R rows of the network's outputs.  A layer
that saw N examples has its g multiplied by ``sqrt(N / R)``, so that its block is that of
the mean over rows, as in the other integrations.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import numpy as np

import kfac_core as kc

__all__ = ["KFAC", "GaussNewton"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Vector: TypeAlias = Mapping[str, Mapping[str, Array]]
Update: TypeAlias = dict[str, dict[str, Array]]

ATTEMPTS = 10
"""Trials of a step that would increase the loss, each a quarter as long."""

SHORTER = 0.25

_DEFAULTS = kc.integration.defaults

_APPROXIMATIONS: dict[str, kc.Approximation[Any]] = {
    "embedding": kc.Kronecker(input="diagonal"),
    "scale_shift": kc.Diagonal(),
}


class KFAC(kc.integration.ScheduledSteps):
    """K-FAC with Nesterov's momentum, a bound on the step and decoupled weight decay.

    With P the inverse of the damped curvature, of step t::

        d = P grad;  nu = min(1, sqrt(kl_clip / (lr^2 grad . d)))  (1 without `kl_clip`)
        v = momentum v + nu d
        theta -= lr (nu d + momentum v + weight_decay theta)

    A step that is given the exact curvature of the loss takes its rate and its momentum
    from the quadratic model instead, and one that is given the loss as well its damping;
    see `step`.

    Parameters
    ----------
    parameters : mapping of str to mapping of str to array
        By layer, to be written to.  ``{"fc": {"weight": W, "bias": b}}`` with W of shape
        ``(in, out)`` is dense, ``{"norm": {"scale": s, "shift": t}}`` a normalization.
        A step moves the arrays that are in the mapping then.
    likelihood : {"categorical", "bernoulli", "gaussian"}, Loss or RowLoss, optional
        Likelihood of one row of outputs; see `kfac_core.integration.row_loss`.  Needed by
        `vectors`.  Curvature, damping and `kl_clip` are in its units; a `RowLoss` says
        what multiple of its negative log the loss is, and gradients are divided by that.
    learning_rate : float, or callable of the number of steps made
        Learning rate.
    damping : float, or callable of the number of steps made
        Damping of the next refresh.
    update_every, refresh_every : int, or callable of the number of steps made
        Numbers of steps between statistics, and between refreshes.
    layers : mapping of str to Layer or Block, optional
        Layers that cannot be inferred from their parameters; a block sets another
        approximation than Kronecker factors (or the diagonal for a scale and shift).

    Other Parameters
    ----------------
    fisher : {"gradients", "exact", "empirical", ...}
        ``"gradients"`` draws labels from the model, ``"exact"`` sums over all of them,
        ``"empirical"`` takes the gradients of the loop's own loss; see
        `kfac_core.losses.EstimationMode`.
    samples : int
        Labels drawn for each row, with as many vectors; of the sampled `fisher`.
    positions : {"signs", "separate", "together"}
        What ``fisher="exact"`` does with the rows of one example, such as tokens; see
        `kfac_core.losses.drawn_vectors`.
    reduction : {"mean", "sum"}
        Reduction over the rows of outputs, in the loss whose gradients `step` takes, and of
        which the output gradients are with ``fisher="empirical"``.
    momentum, weight_decay : float
        Momentum and weight decay.
    kl_clip : float, or callable of the number of steps made, optional
        Bound of the step, ``lr^2 grad . P grad``; None for none.  A `PerOutput` also
        lengthens short steps of classifiers.
    decay : float, or callable of the number of steps made
        Factor on the old statistics at each update.
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        See `kfac_core.Estimator`.
    adapt_factor, min_damping, max_damping : float
        Levenberg-Marquardt rule of steps that are given the loss: the damping is
        multiplied or divided by the factor, in (0, 1], between these bounds.  Where a
        batch has fewer examples than the network has parameters, its quadratic model says
        little of other batches: 1e-3 is a good `min_damping`.
    execution : Execution, Distributed or Executor, optional
        How blocks are computed; with `Distributed`, also by whom.
    **options
        Further options of `kfac_core.Estimator`: ``averaging``, ``precision``,
        ``coupling``, and ``refreshing``, by default ``Refreshing(keep_matrices=False)``.

    Attributes
    ----------
    reduction_ratio : float
        Change of the loss in the last step over the one that the model predicted; NaN for
        a step that was not given the loss, or not taken.

    Raises
    ------
    KFACError
        For layers that do not match their parameters, and invalid options.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> from kfac_core_shims.numpy import KFAC
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=(32, 3)), rng.normal(size=(32, 2))
    >>> parameters = {"fc": {"weight": np.zeros((3, 2)), "bias": np.zeros(2)}}
    >>> optimizer = KFAC(parameters, likelihood="gaussian")
    >>> z = x @ parameters["fc"]["weight"] + parameters["fc"]["bias"]
    >>> drawn = optimizer.vectors(z)
    >>> optimizer.observe("fc", kc.Batch(x, drawn, sources=len(drawn)))
    >>> g = (z - y) / len(x)
    >>> change = optimizer.step({"fc": {"weight": x.T @ g, "bias": g.sum(axis=0)}})
    >>> bool(np.any(parameters["fc"]["weight"]))
    True
    """

    def __init__(
        self,
        parameters: Vector,
        *,
        likelihood: str | kc.losses.Loss | kc.integration.RowLoss | None = None,
        learning_rate: kc.integration.Schedule = _DEFAULTS.LEARNING_RATE,
        damping: kc.integration.Schedule = _DEFAULTS.DAMPING,
        update_every: kc.integration.Interval = _DEFAULTS.UPDATE_EVERY,
        refresh_every: kc.integration.Interval = _DEFAULTS.REFRESH_EVERY,
        layers: Mapping[str, kc.Layer | kc.Block] | None = None,
        fisher: kc.losses.EstimationMode = "gradients",
        samples: int = 1,
        positions: kc.losses.Positions = "signs",
        reduction: Literal["mean", "sum"] = "mean",
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        kl_clip: kc.integration.Schedule | None = _DEFAULTS.KL_CLIP,
        decay: kc.integration.Schedule = _DEFAULTS.DECAY,
        damping_rule: kc.damping.DampingRule = _DEFAULTS.DAMPING_RULE,
        adapt_factor: float = 0.95,
        min_damping: float = 1e-8,
        max_damping: float = 1e8,
        execution: kc.Execution
        | kc.distributed.Distributed
        | kc.execution.Executor
        | None = None,
        **options: Unpack[kc.integration.EstimatorOptions],
    ) -> None:
        kc.integration.require_estimation(
            fisher=fisher, samples=samples, positions=positions, likelihood=likelihood
        )
        constraints = kc.constraints
        constraints.require_options(
            locals(),
            momentum=constraints.DECAY,
            weight_decay=constraints.NOT_NEGATIVE,
            layers=constraints.optional(constraints.instance_of(Mapping)),
        )
        # The caller's mapping itself: an array that replaces one in it is moved.
        self.parameters = parameters
        _refuse_shared(self.parameters)
        blocks = _blocks(self.parameters, layers or {})
        self.row_loss: kc.integration.RowLoss | None = None
        if likelihood is not None:
            self.row_loss = kc.integration.row_loss(likelihood)
            self.likelihoods = (self.row_loss.likelihood,)
        self._rank = 0
        if isinstance(execution, kc.distributed.Distributed):
            self._rank = execution.communicator.rank
            if fisher == "empirical" and reduction == "mean":
                raise kc.UnsupportedError(
                    "With fisher='empirical' the output gradients of a mean have to be "
                    "multiplied by the rows of all processes, which `execution` does not "
                    "exchange. Take reduction='sum', or fisher='gradients' or 'exact'."
                )
        estimator = kc.Estimator(
            blocks,
            # `observe` brings all rows into the unit of a sum.
            reduction="sum",
            damping_rule=damping_rule,
            mode=fisher,
            sources=kc.losses.source_reduction_of(fisher),
            execution=execution,
            **({"refreshing": kc.Refreshing(keep_matrices=False)} | options),
        )
        super().__init__(
            estimator,
            reduction=reduction,
            update_every=update_every,
            refresh_every=refresh_every,
            damping=damping,
            decay=decay,
            kl_clip=kl_clip,
            learning_rate=learning_rate,
        )
        self.fisher, self.samples, self.positions = fisher, samples, positions
        self.momentum, self.weight_decay = momentum, weight_decay
        self.rule = kc.integration.DampingRule(
            1, adapt_factor, min_damping, max_damping
        )
        self.reduction_ratio = math.nan
        self._velocity: Update | None = None
        self._observed: dict[str, kc.Statistics] = {}
        self._rows = self._drawn = 0
        if fisher == "empirical" and self.row_loss is not None:
            if self.row_loss.mean_over_outputs:
                raise kc.ConventionError(
                    "With fisher='empirical' nothing says how many outputs P the loss is "
                    "a mean over. Say RowLoss(likelihood=..., factor=1 / P)."
                )
            self.loss_factor = self.row_loss.factor

    def vectors(self, outputs: Array, /) -> Array:
        """Return the vectors to backpropagate from the outputs to each layer.

        Parameters
        ----------
        outputs : array, shape (N, ..., P)
            The network's outputs: logits, means.

        Returns
        -------
        array, shape (M, N, ..., P)
            M vectors, `samples` with ``fisher="gradients"``; what comes back to a layer has
            the leading axis too, and goes to `observe` with ``Batch(x, g, sources=M)``.

        Raises
        ------
        ConventionError
            Without a `likelihood`, and with ``fisher="empirical"``, where the g are those
            of the loop's own backward pass.
        ShapeError, DtypeError
            For outputs that the likelihood does not fit.

        Notes
        -----
        The same step draws the same labels, so that a resumed run is reproducible.
        """
        if self.row_loss is None or self.fisher == "empirical":
            raise kc.ConventionError(
                "Vectors need a `likelihood`, and fisher='gradients' or 'exact'; got "
                f"{self.row_loss} and {self.fisher!r}. With 'empirical', observe the "
                "output gradients of the loop's own backward pass."
            )
        rows = math.prod(outputs.shape[:-1])
        drawn = kc.losses.drawn_vectors(
            self.row_loss.likelihood,
            outputs,
            mode=self.fisher,
            # A seed of its own for each part of each step on each process, the same in a
            # resumed run.
            seed=(self._rank << 96) + (self.steps << 40) + self._drawn,
            # Signs keep apart what a batch norm mixes too, and do nothing elsewhere.
            shared=self.positions == "signs" or rows != len(outputs),
            samples=self.samples,
            positions=self.positions,
        )
        self._rows, self._drawn = rows, self._drawn + rows
        self.outputs = outputs.shape[-1]
        self.loss_factor = self.row_loss.multiple(outputs.shape[-1])
        vectors: Array = drawn.vectors
        return vectors

    def observe(
        self,
        name: str,
        batch: kc.Batch | Sequence[kc.Batch],
        /,
        *,
        rows: int | None = None,
    ) -> None:
        """Record inputs and output gradients of a layer for the next step.

        Several calls before a step are parts of one batch, of any sizes, each with a loss
        of its own.

        Parameters
        ----------
        name : str
            The layer.
        batch : Batch, or sequence of Batch
            A sequence is one batch for each use of the layer in the network.
        rows : int, optional
            R, the rows of the network's outputs; by default those of the last `vectors`,
            or else the examples of the batch.

        Raises
        ------
        KFACError
            For arrays that cannot be used; nothing was changed then.
        """
        if name not in self.parameters:
            raise kc.UnknownBlockError(f"There are no parameters of {name!r}.")
        uses = [batch] if isinstance(batch, kc.Batch) else [*batch]
        rows = rows or self._rows or len(uses[0].inputs)
        # A layer with N examples contributes to a mean over R rows; see the module.
        factor = math.sqrt(len(uses[0].inputs) / max(rows, 1))
        if self.fisher == "empirical":
            # Output gradients of the loop's own loss, which if a mean carry 1 / R.
            factor *= (rows if self.reduction == "mean" else 1) / self.loss_factor
        if factor != 1:
            uses = [
                dataclasses.replace(use, output_grads=use.output_grads * factor)
                for use in uses
            ]
        self._add_moments({name: uses if uses[1:] else uses[0]}, self._observed)

    def update(self) -> None:
        """Accumulate the observed batches, and take no step: no parameter changes.

        With ``decay=1`` updates add up; ``estimator.refresh()`` after them makes operators
        of the statistics.

        Raises
        ------
        NotReadyError
            If nothing was observed.
        """
        if not self._observed:
            raise kc.NotReadyError(
                "No layer was observed: call `observe` before `update`."
            )
        self._follow_schedules()
        self.estimator.absorb(self._observed)
        self._observed, self._rows = {}, 0

    def step(
        self,
        gradients: Vector,
        /,
        *,
        rows: int | None = None,
        curvature: Callable[[list[Update]], Array] | None = None,
        loss: Callable[[], float] | None = None,
    ) -> Update:
        """Accumulate the observed batches, refresh if due, and update the parameters.

        Parameters
        ----------
        gradients : mapping of str to mapping of str to array
            Gradients of the loss, by layer and parameter.
        rows : int, optional
            R, the rows over which the loss is a sum; needed with ``reduction="sum"``.
        curvature : callable, optional
            Takes directions d_i, vectors like `gradients`, and returns the matrix
            ``d_i . F d_j`` of the mean loss's exact curvature F, for example by
            `kfac_core.steps.curvature_of_outputs`; it is divided as gradients are.  Then
            the change is
            ``-alpha P grad + mu delta``, delta the last change, with alpha and mu those
            that minimize the quadratic model ``grad . c + 1/2 c . (F + damping) c``;
            `learning_rate`, `momentum` and `kl_clip` are not read.
        loss : callable, optional
            With `curvature`: returns the mean loss of the batch for the parameters as they
            are when it is called.  Then the damping follows the Levenberg-Marquardt rule,
            and a change that would make the loss worse is tried a quarter as long, ten
            times at most; the damping rises fourfold at each.  If none lowers the loss, the
            parameters stay.

        Returns
        -------
        dict of str to dict of str to array
            The change of the parameters.

        Raises
        ------
        KFACError
            For invalid gradients or schedules, for a layer that was never observed, and for
            arrays that were replaced or a refresh that fails; parameters, state and what
            was observed are then unchanged, also by an error in `curvature` or `loss`.
        """
        self._require(self.parameters, "parameters")
        self._require(gradients, "gradients")
        for name, arrays in self.parameters.items():
            _refuse_read_only(name, arrays)
        if loss is not None and curvature is None:
            raise kc.ConventionError(
                "Expected `curvature` beside `loss`, which is compared with the quadratic "
                "model."
            )
        rate = float(kc.integration.value_at(self.learning_rate, self.steps))
        if not math.isfinite(rate):
            raise kc.ConventionError(f"Expected a finite `learning_rate`, got {rate}.")
        gradients = self._of_likelihood(gradients, rows)
        # Also after what `curvature` and `loss` raise, which the caller wrote.
        with self.undone_on_error():
            if loss is not None:
                # From here on the damping adapts, and no longer follows a schedule.
                self.damping_schedule = None
            self._accumulate()
            ratio = math.nan
            if curvature is None:
                direction, velocity = self._momentum_step(gradients, rate)
                change = kc.steps.linear_combination(
                    [-rate, -rate * self.momentum], [direction, velocity]
                )
            else:
                rate = 1.0
                velocity, ratio = self._model_step(gradients, curvature, loss)
                change = velocity
            change = kc.steps.decay_decoupled(
                change,
                self.parameters,
                weight_decay=self.weight_decay,
                learning_rate=rate,
            )
            self._require(change, "the step")
        self._observed, self._rows, self._drawn = {}, 0, 0
        self._velocity, self.reduction_ratio = velocity, ratio
        self.steps += 1
        _move(self.parameters, self.parameters, change)
        return dict(change)

    def _of_likelihood(self, gradients: Vector, rows: int | None) -> Vector:
        """Return the gradients of the likelihood's mean negative log."""
        factor = self.loss_factor
        if self.reduction == "sum":
            if not rows:
                raise kc.ConventionError(
                    "With reduction='sum', say `rows`: over how many the loss is a sum."
                )
            factor = factor * rows
        if factor == 1.0:
            return gradients
        return kc.steps.linear_combination([1.0 / factor], [gradients])

    def _accumulate(self) -> None:
        """Accumulate what was observed, and refresh where that is due."""
        self._follow_schedules()
        for name in self.parameters:
            if name not in self._observed and not self.estimator.state[name].updates:
                raise kc.NotReadyError(f"Layer {name!r} was never observed.")
        self.estimator.absorb(self._observed)
        if self.wants_refresh:
            self._rebase()
            self.estimator.refresh()
        else:
            # A layer that is observed for the first time must not wait for the next
            # refresh.
            self._refresh_new(self._observed)

    def _momentum_step(self, gradients: Vector, rate: float) -> tuple[Update, Update]:
        """Return the direction of a step of a given rate, and the velocity after it."""
        bound, _ = self._clip_options()
        unclipped, self.clip = self._clipped(gradients, rate, bound)
        direction = self._scaled(unclipped, like=gradients)
        if self._velocity is None:
            return direction, direction
        velocity = kc.steps.linear_combination(
            [1.0, self.momentum], [direction, self._velocity]
        )
        return direction, velocity

    def _model_step(
        self,
        gradients: Vector,
        curvature: Callable[[list[Update]], Array],
        loss: Callable[[], float] | None,
    ) -> tuple[Update, float]:
        """Return the change by the quadratic model, and the reduction ratio."""
        direction = self.estimator.precondition(gradients)
        directions = [kc.steps.linear_combination([-1.0], [direction])]
        if self._velocity is not None:
            directions.append(self._velocity)
        step = kc.integration.quadratic_step(
            gradients,
            directions,
            # The caller's curvature is of the loss, and the model of the likelihood.
            curvature=curvature(directions) / self.loss_factor,
            damping=self.damping,
        )
        if loss is None:
            return step.change(), math.nan
        before = float(loss()) / self.loss_factor
        damping = self.damping
        for _ in range(ATTEMPTS):
            change = step.change()
            # The parameters go back after each trial, also if `loss` raises.
            after = self._loss_after(change, loss) / self.loss_factor
            if kc.steps.is_accepted(before, after):
                adapted, ratio = self.rule.adapted(
                    damping, before, after, predicted=float(step.predicted)
                )
                self.damping = float(adapted)
                return change, float(ratio)
            damping = self.rule.raised(damping)
            step = step.shortened(SHORTER)
        self.damping = damping
        return kc.steps.linear_combination([0.0], [change]), math.nan

    def _loss_after(self, change: Update, loss: Callable[[], float]) -> float:
        """Return the loss that a change would lead to; the parameters stay."""
        before = _copied(self.parameters)
        try:
            _move(self.parameters, before, change)
            return float(loss())
        finally:
            _move(self.parameters, before)

    def state_dict(self, *, owned: bool = False) -> dict[str, Any]:
        """Return the state without the parameters and the pending observations."""
        return {**super().state_dict(owned=owned), "velocity": self._velocity}

    def load_state_dict(
        self, state: Mapping[str, Any], /, *, owned: bool = False
    ) -> None:
        """Restore a state; raises `StateError`, changing nothing, if it does not match."""
        try:
            velocity = state["velocity"]
            if velocity is not None:
                self._require(velocity, "velocity")
            super().load_state_dict(state, owned=owned)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise kc.StateError(f"The state does not fit: {error}") from None
        self._velocity = velocity
        self._observed, self._rows, self._drawn = {}, 0, 0

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write the state atomically to an ``.npz`` file."""
        arrays: dict[str, Array] = {}
        tree = json.dumps(_folded(self.state_dict(), arrays), allow_nan=False)
        # Written beside and then renamed, so that a crash leaves the former file whole.
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
            raise kc.StateError(
                f"{path}: damaged, or not a saved state: {error}"
            ) from None
        self.load_state_dict(state)

    def _require(self, vector: Any, what: str) -> None:
        """Raise unless a vector has the parameters' names and shapes, and is finite."""
        if set(vector) != (names := set(self.estimator.blocks)):
            raise kc.ShapeError(f"Expected {what} of {names}, got {set(vector)}.")
        for name, arrays in vector.items():
            matrix = self.estimator.blocks[name].parameters_to_matrix(arrays)
            if not np.all(np.isfinite(matrix)):
                raise kc.NotFiniteError(f"{what} of {name!r}: found NaN or infinity.")


class GaussNewton:
    r"""Gauss-Newton with the exact curvature of the whole network, for least squares.

    .. math:: \theta \leftarrow \theta - d + \tfrac12 a, \qquad
        d = J^T (J J^T + N \lambda I)^{-1} r

    with J the Jacobian of the residuals r by all parameters, which is taken as the rows of
    the layers and never formed, and a the geodesic acceleration.  The loss is
    ``1/(2N) |r|^2``.  The damping adapts to whether a step lowers it.

    Parameters
    ----------
    parameters, layers
        See `KFAC`.
    minibatch : bool, optional
        Whether residuals are of other data at each step; by default whether
        `learning_rate` is given.
    learning_rate : float, or callable of the number of steps made, optional
        Length of the steps on other data.  By default 0.3, divided by ``1 + k/2`` after k
        times that losses of batches did not fall any more.
    damping : float, optional
        In units of ``J^T J / N``.  The first damping, by default 1; or that of all steps
        on other data, by default ``0.003 rms(r) sqrt(tr(J J^T) / R)``.
    momentum : float, optional
        SPRING's momentum in [0, 1), of steps on other data; by default 0.95.

    Attributes
    ----------
    damping : float or None
        The damping that the next step begins with; None where it follows the residuals.
    accepted : bool
        Whether the last step was taken: false where no damping lowered the loss.

    Raises
    ------
    KFACError
        For layers that do not match their parameters, and invalid options.

    Notes
    -----
    ``R^2 (n + m)`` flops a layer and ``R^3 / 3`` for R residuals; for each damping that is
    tried two evaluations and another ``R^3 / 3``.  Memory: the rows, and ``2 R^2`` numbers.

    References
    ----------
    Transtrum and Sethna (2012), arXiv:1201.5885, for damping and acceleration; Goldshlager,
    Abrahamsen and Lin (2024), arXiv:2401.10190, for the momentum.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> from kfac_core_shims.numpy import GaussNewton
    >>> rng = np.random.default_rng(0)
    >>> x = np.linspace(-1, 1, 30)[:, None]
    >>> W, b, v = rng.normal(size=(1, 8)), np.zeros(8), rng.normal(size=(8, 1)) / 3
    >>> parameters = {"hidden": {"weight": W, "bias": b}, "out": {"weight": v}}
    >>> def residuals():
    ...     return (np.tanh(x @ W + b) @ v - np.sin(3 * x))[:, 0]
    >>> optimizer = GaussNewton(parameters)
    >>> losses = []
    >>> for _ in range(10):
    ...     h = np.tanh(x @ W + b)
    ...     batches = {
    ...         "hidden": kc.Batch(x, (1 - h**2) * v[:, 0]),
    ...         "out": kc.Batch(h, np.ones((30, 1))),
    ...     }
    ...     losses.append(optimizer.step(batches, residuals))
    >>> losses[-1] < 0.01 * losses[0]
    True
    """

    def __init__(
        self,
        parameters: Vector,
        *,
        minibatch: bool | None = None,
        learning_rate: kc.integration.Schedule | None = None,
        damping: float | None = None,
        momentum: float | None = None,
        layers: Mapping[str, kc.Layer] | None = None,
    ) -> None:
        self.options = kc.samples.GaussNewtonOptions.of(
            minibatch=minibatch,
            rate=learning_rate,
            damping=damping,
            momentum=momentum,
        )
        self.parameters = parameters
        _refuse_shared(self.parameters)
        blocks = _blocks(self.parameters, layers or {})
        self.layers = {name: block.layer for name, block in blocks.items()}
        self.damping = self.options.damping
        self.steps, self.accepted = 0, False
        self._last: Any = None
        self._progress: Any = None

    def step(
        self,
        batches: Mapping[str, kc.Batch | Sequence[kc.Batch]],
        residuals: Callable[[], Array],
        /,
    ) -> float:
        """Take one step, and return the loss before it.

        Parameters
        ----------
        batches : mapping of str to Batch, or sequence of Batch
            What each layer saw: its inputs, and the derivatives of the *sum* of the
            residuals with respect to its outputs; ``sources=C`` for C residuals an
            example.  A sequence is one batch for each use of the layer.
        residuals : callable
            Returns the residuals, shape (N,) or (N, C), for the parameters as they are
            when it is called.

        Returns
        -------
        float
            The loss ``1/(2N) |r|^2``.

        Raises
        ------
        KFACError
            For arrays that do not fit, and residuals that are not finite.  Parameters are
            then as they were, also after an error in `residuals`.
        """
        J = kc.samples.Jacobian.of(self.layers, batches)
        r = np.asarray(residuals(), np.float64)
        if r.size != J.samples or r.shape[:1] != (J.examples,):
            raise kc.ShapeError(
                f"Expected residuals of shape {J.sample_shape}, as of the batches, got "
                f"{r.shape}."
            )
        start = self._evaluation(r, J)
        if not np.isfinite(start.loss):
            problem = kc.samples.ResidualProblem([r], [r], None)
            raise kc.samples.not_finite(self.options, problem, float(start.loss))
        before = _copied(self.parameters)

        def evaluate(step: Any) -> kc.samples.Evaluation:
            _move(self.parameters, before, step, -1.0)
            return self._evaluation(np.asarray(residuals(), np.float64), J)

        # No step, in case `residuals` raises: the parameters go back.
        step, rate = None, 1.0
        try:
            result = kc.samples.gauss_newton_step(
                J,
                kc.samples.sample_gram(J),
                start.values,
                evaluate,
                options=self.options,
                start=start,
                damping=self.damping,
                rate=kc.integration.value_at(self.options.rate, self.steps),
                last=self._last,
                progress=self._progress,
                overwrite=True,
            )
            step, rate = result.direction, float(result.rate)
        finally:
            _move(self.parameters, before, step, -rate)
        self.accepted = bool(result.accepted)
        self._last, self._progress = result.matrices, result.progress
        if not self.options.minibatch:
            self.damping = float(result.damping)
        self.steps += 1
        return float(start.loss)

    def _evaluation(self, r: Array, J: Any) -> kc.samples.Evaluation:
        loss: Any = np.sum(r * r) / (2 * J.examples)
        return kc.samples.Evaluation(r.reshape(J.sample_shape), loss)


def _copied(parameters: Vector) -> Update:
    return {
        name: {key: array.copy() for key, array in arrays.items()}
        for name, arrays in parameters.items()
    }


def _move(
    parameters: Vector, start: Vector, step: Any = None, rate: float = 1.0
) -> None:
    """Write ``start + rate step`` into the parameters, or `start` without a step."""
    for name, arrays in parameters.items():
        for key, array in arrays.items():
            array[...] = start[name][key]
            if step is not None:
                array += rate * step[name][key]


def _blocks(
    parameters: Vector, layers: Mapping[str, kc.Layer | kc.Block]
) -> dict[str, kc.Block]:
    """Return a block for each layer, whose parameters fit it and can be written to."""
    if unknown := set(layers) - set(parameters):
        raise kc.UnknownBlockError(f"There are no parameters of {unknown}.")
    blocks: dict[str, kc.Block] = {}
    for name, arrays in parameters.items():
        layer = layers.get(name) or _layer_of(name, arrays)
        if not isinstance(layer, kc.Block):
            layer = kc.Block(layer, _APPROXIMATIONS.get(layer.kind, kc.Kronecker()))
        try:
            layer.parameters_to_matrix(arrays)
        except kc.KFACError as error:
            raise type(error)(f"Layer {name!r}: {error}") from None
        _refuse_read_only(name, arrays)
        blocks[name] = layer
    return blocks


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


def _refuse_shared(parameters: Any) -> None:
    """Raise `UnsupportedError` if two arrays share memory."""
    if not isinstance(parameters, Mapping) or not all(
        isinstance(arrays, Mapping) for arrays in parameters.values()
    ):
        raise kc.ArgumentError(
            "Expected `parameters` to be a mapping of layers' names to mappings of arrays, "
            '{"fc": {"weight": W, "bias": b}}.'
        )
    before: list[tuple[str, Any]] = []
    for name, arrays in parameters.items():
        for key, array in arrays.items():
            for other, earlier in before:
                if _overlap(earlier, array):
                    raise kc.UnsupportedError(
                        f"{other} and {name!r} ({key}) have memory in common, which would "
                        "move twice. Give each weight once; a layer that is used twice is "
                        "observed with a list of two batches."
                    )
            before.append((f"{name!r} ({key})", array))


def _overlap(first: Any, second: Any) -> bool:
    """Whether two arrays are known to have an element in common."""
    if not (isinstance(first, np.ndarray) and isinstance(second, np.ndarray)):
        return False  # Their layers refuse them, with the name.
    # Whether strided arrays overlap is as hard as an integer program in the worst case.
    effort: Any = 10_000
    try:
        return np.shares_memory(first, second, max_work=effort)
    except np.exceptions.TooHardError:
        return False


def _refuse_read_only(name: str, arrays: Mapping[str, Array], /) -> None:
    """Raise for arrays that no step could write to, such as a file mapped into memory."""
    for key, array in arrays.items():
        if not array.flags.writeable:
            raise kc.UnsupportedError(
                f"Layer {name!r}: the array of {key!r} is read-only, and a step writes to "
                "it. Give a copy."
            )


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
