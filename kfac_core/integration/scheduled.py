"""Steps of an estimator on a schedule: what is due at each, and what takes one back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np

from kfac_core import constraints, errors
from kfac_core.array import Array, Scalar, map_structure
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.array.finite import all_finite
from kfac_core.estimator import Estimator
from kfac_core.execution.hosted import from_views
from kfac_core.factors.statistics import Statistics
from kfac_core.integration.schedules import (
    Interval,
    Schedule,
    bound_at,
    interval_at,
    lengthens,
    require_positive,
    value_at,
)
from kfac_core.losses import Loss
from kfac_core.stages import HostViews, batch_moments
from kfac_core.state import copied
from kfac_core.steps.trust_region import TrustRegion, clip_of_product
from kfac_core.steps.vectors import Vector, dot, widest


class ScheduleOptions(TypedDict, total=False):
    """Options of `ScheduledSteps` beside the reduction."""

    update_every: Interval
    refresh_every: Interval
    bases_every: Interval
    damping: Schedule | None
    decay: Schedule | None
    kl_clip: Schedule | None
    learning_rate: Schedule


class ScheduledSteps:
    """An estimator, the schedules of its options, and the number of steps taken.

    The base of `NaturalGradient`, and of optimizers that record no calls of layers.

    Parameters
    ----------
    estimator : Estimator
        With ``reduction="sum"``.
    reduction : {"mean", "sum"}
        Over the rows of outputs, in the loss that is differentiated.
    update_every, refresh_every, bases_every, damping, decay, kl_clip, learning_rate
        See `NaturalGradient`.

    Attributes
    ----------
    steps : int
        How many were taken.
    loss_factor : float or 0-d array
        What the loss is of the likelihood's negative log.
    outputs : float
        Outputs P of a row, read by a KL clip that is a `PerOutput`.
    likelihoods : tuple of kfac_core.losses.Loss
        Likelihood of each output, as far as known; see `lengthens`.
    clip : TrustRegion or None
        Factor and size of the last step's KL clip; None where there was none.
    """

    likelihoods: tuple[Loss, ...] = ()

    def __init__(
        self,
        estimator: Estimator,
        /,
        *,
        reduction: Literal["mean", "sum"],
        update_every: Interval = 1,
        refresh_every: Interval = 1,
        bases_every: Interval = 100,
        damping: Schedule | None = None,
        decay: Schedule | None = None,
        kl_clip: Schedule | None = None,
        learning_rate: Schedule = 1.0,
    ) -> None:
        constraints.require_options(
            locals(),
            estimator=constraints.instance_of(Estimator),
            reduction=constraints.one_of("mean", "sum"),
            damping=constraints.optional(
                constraints.either(constraints.DAMPING, constraints.FUNCTION)
            ),
            decay=constraints.optional(
                constraints.either(constraints.DECAY_SCALAR, constraints.FUNCTION)
            ),
        )
        self.estimator, self.reduction, self.steps = estimator, reduction, 0
        self.update_every, self.refresh_every = update_every, refresh_every
        self.bases_every = bases_every
        self.kl_clip, self.learning_rate = kl_clip, learning_rate
        self.loss_factor: Scalar = 1.0
        self.outputs: float = 1
        self.clip: TrustRegion | None = None
        # For `_due`: of each interval the last step that was asked for.
        self._dues: dict[str, tuple[int, Any, bool]] = {}
        for name in ("update_every", "refresh_every", "bases_every"):
            interval_at(name, getattr(self, name), 0)
        require_positive("kl_clip", kl_clip, optional=True)
        require_positive("learning_rate", learning_rate)
        self.damping_schedule = damping if callable(damping) else None
        self.decay_schedule = decay if callable(decay) else None
        if damping is not None:
            estimator.damping = value_at(damping, 0)
        if decay is not None:
            estimator.decay = value_at(decay, 0)

    @property
    def damping(self) -> Scalar:
        """Damping of the next refresh; assigning a number or a schedule changes it."""
        return self.estimator.damping

    @damping.setter
    def damping(self, damping: Schedule) -> None:
        self.damping_schedule = damping if callable(damping) else None
        self.estimator.damping = value_at(damping, self.steps)

    @property
    def wants_statistics(self) -> bool:
        """Whether the next step needs calls with output gradients."""
        return self._due("update_every", self.update_every)

    @property
    def wants_refresh(self) -> bool:
        """Whether the next step makes new operators."""
        return self._due("refresh_every", self.refresh_every)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Take steps within the context back, if anything raises there.

        Statistics, operators, damping, decay, and the number of steps are as before then.
        """
        before, steps = self._snapshot(), self.steps
        try:
            yield
        except BaseException:
            self._restore(before)
            self.steps = steps
            raise

    def state_dict(self, *, owned: bool = False) -> dict[str, Any]:
        """Return the state needed to resume: the steps, and the estimator's state.

        With `owned`, of the blocks that this process owns; see `Estimator.state_dict`.
        """
        position = self._position()
        return {**position, "estimator": self.estimator.state_dict(owned=owned)}

    def _position(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the estimator's state."""
        return {
            "steps": self.steps,
            "loss_factor": float(self.loss_factor),
            "outputs": float(self.outputs),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], /, *, owned: bool = False
    ) -> None:
        """Restore a state that `state_dict` returned, with the same `owned`.

        Raises
        ------
        StateError
            If anything does not fit; the object is then unchanged.
        """
        if not isinstance(state, Mapping):
            raise errors.StateError(
                "Expected `state` to be what `state_dict` returned, got a "
                f"{type(state).__name__}."
            )
        steps = state.get("steps")
        if type(steps) is not int or steps < 0:
            raise errors.StateError(
                f"Expected a number of `steps` >= 0 in the state, got {steps!r}."
            )
        loss_factor = state.get("loss_factor")
        if type(loss_factor) is not float or not 0.0 < loss_factor < np.inf:
            raise errors.StateError(
                f"Expected a `loss_factor` > 0 in the state, got {loss_factor!r}."
            )
        outputs = state.get("outputs")
        # A mean over the rows of all processes, so that roundoff may take it below 1.
        if type(outputs) is not float or not 0.0 < outputs < np.inf:
            raise errors.StateError(
                f"Expected a number of `outputs` > 0 in the state, got {outputs!r}."
            )
        estimator = state.get("estimator", {})
        blocks = estimator.get("blocks", {})
        paths = {path for block in blocks.values() for path in block.get("values", ())}
        # torch.distributed.checkpoint fills a state in place and reads only keys that
        # the new object already has; a fresh one has no statistics.
        is_read = owned or any(path.startswith("statistics") for path in paths)
        # No row may have counted so far.
        is_known = steps and state.get("refreshed_at", 0) >= 0
        if is_known and not is_read:
            raise errors.StateError(
                f"The state has {steps} steps and no statistics: it was read "
                "into the entries of a new object only. With "
                "torch.distributed.checkpoint, save and load DistributedState(kfac)."
            )
        self.estimator.load_state_dict(estimator, owned=owned)
        self.steps, self.loss_factor, self.outputs = steps, loss_factor, outputs

    def _follow_schedules(self) -> None:
        """Give the estimator the damping and the decay of this step."""
        if self.damping_schedule is not None:
            self.estimator.damping = value_at(self.damping_schedule, self.steps)
        if self.decay_schedule is not None:
            self.estimator.decay = value_at(self.decay_schedule, self.steps)

    def _add_moments(
        self, part: Mapping[str, Any], totals: dict[str, Statistics]
    ) -> None:
        """Add the statistics of a part of a batch."""
        known = self.estimator.network
        batches = known.layers.batches(part)
        options: Any = {"conventions": known.conventions, "precision": known.precision}
        for name, batch in batches.items():
            block = known.blocks[name]
            before = self.estimator.state[name].statistics
            take = functools.partial(batch_moments, block, name=name, **options)
            new: Any
            if before is None or not before.lacks_bases:
                new = take(batch, statistics=before)
            else:
                # A copy, since the caller may overwrite its arrays meanwhile.
                new = _DeferredMoments(((take, map_structure(copied, batch)),))
            totals[name] = totals[name].merged(new) if name in totals else new

    def _refresh_new(self, names: Iterable[str]) -> None:
        """Make the first operators of blocks that no batch before this one had."""
        network, state = self.estimator.network, self.estimator.state
        with_rows = {network.layers.block_of(name) for name in names}
        # The order of the network's blocks is the same on all processes.
        new = [
            n for n in network.blocks if n in with_rows and state[n].operator is None
        ]
        if new:
            # An EKFAC block needs bases before its first operator.
            based = [n for n in new if network.blocks[n].approximation.has_bases]
            if based:
                self.estimator.rebase(based, moments="kronecker")
            self.estimator.refresh(new)

    def _clip_options(self) -> tuple[Scalar | None, Scalar]:
        """Return the bound of the KL clip at this step, and the rate that it reads."""
        bound = bound_at(self.kl_clip, self.steps, self.outputs)
        return bound, 1.0 if bound is None else value_at(self.learning_rate, self.steps)

    def _clipped(
        self, gradients: Vector, rate: Scalar, bound: Scalar | None
    ) -> tuple[dict[str, dict[str, Array]], TrustRegion | None]:
        """Return directions, and the clip that they are to be multiplied by.

        They are `HostViews` where NumPy computes for the gradients' library.
        """
        if bound is None:
            require_finite(gradients)
        views, clip = self.estimator.viewed(gradients), None
        try:
            vectors = self.estimator.precondition(views)
        except errors.NotFiniteError:
            require_finite(gradients)
            raise
        if bound is not None and vectors:
            if isinstance(vectors, HostViews):
                size = vectors.size
            else:
                size = _product(gradients, vectors)
            if not np.isfinite(size):
                require_finite(gradients)
            clip = self._clip_of(size, rate, bound)
        return vectors, clip

    @property
    def _nu(self) -> float:
        """The factor of the last step's KL clip."""
        return 1.0 if self.clip is None else float(self.clip.scale)

    def _scaled(
        self, vectors: dict[str, dict[str, Array]], /, *, like: Vector
    ) -> dict[str, dict[str, Array]]:
        """Return directions times the factor of the clip, in the gradients' library."""
        vectors, nu = from_views(vectors, like=like), self._nu
        # Do not copy directions that are not clipped.
        if nu == 1.0:
            return vectors
        return {n: {k: x * nu for k, x in g.items()} for n, g in vectors.items()}

    def _clip_of(self, product: float, rate: Scalar, bound: Scalar) -> TrustRegion:
        """Return the clip for an inner product of gradients and directions."""
        lengthen = lengthens(self.kl_clip, self.likelihoods)
        return clip_of_product(
            product, learning_rate=float(rate), bound=float(bound), lengthen=lengthen
        )

    def _rebase(self) -> None:
        """Recompute the bases of EKFAC blocks where they are due or missing."""
        network, state = self.estimator.network, self.estimator.state
        with_bases = {
            name: state[name]
            for name, block in network.blocks.items()
            if block.approximation.has_bases and state[name].statistics is not None
        }
        due = self._due("bases_every", self.bases_every)
        new = [name for name, block in with_bases.items() if int(block.basis_age) < 0]
        old = [name for name in with_bases if due and name not in new]
        if new:
            self.estimator.rebase(new, moments="kronecker")
        if old:
            self.estimator.rebase(old, moments="carried")

    def _due(self, name: str, interval: Interval) -> bool:
        # Hooks of each layer ask, and a step some times.
        steps, known, due = self._dues.get(name, (-1, None, False))
        if steps != self.steps or known is not interval:
            due = self.steps % interval_at(name, interval, self.steps) == 0
            self._dues[name] = self.steps, interval, due
        return due

    def _snapshot(self) -> tuple[Any, ...]:
        estimator = self.estimator
        options = estimator.damping, estimator.decay
        others = self.clip, self.loss_factor, self.damping_schedule
        return estimator.state, *options, *others

    def _restore(self, before: tuple[Any, ...]) -> None:
        estimator = self.estimator
        estimator.state, estimator.damping, estimator.decay, *others = before
        self.clip, self.loss_factor, self.damping_schedule = others


@dataclass(frozen=True)
class _DeferredMoments:
    """Moments of a batch in parts, which are taken when their bases are on this process.

    Attributes
    ----------
    parts : tuple of (callable, batch)
        What takes the moments of each part.
    """

    parts: tuple[tuple[Callable[..., Statistics], Any], ...]

    def merged(self, other: _DeferredMoments) -> _DeferredMoments:
        return _DeferredMoments(self.parts + other.parts)

    def __call__(self, statistics: Statistics | None) -> Statistics:
        of_parts = (take(batch, statistics=statistics) for take, batch in self.parts)
        return functools.reduce(Statistics.merged, of_parts)


def _product(gradients: Vector, directions: Vector) -> float:
    """Return the inner product of gradients and directions."""
    like = next(x for parts in directions.values() for x in parts.values())
    xp = ns.own_namespace(like)
    dtype = widest(gradients, directions, xp=xp)
    product = dot(gradients, directions, dtype=dtype, xp=xp)
    return float(backend_of(xp).to_numpy(product))


def require_finite(gradients: Vector, /) -> None:
    """Raise `NotFiniteError` for gradients that are not finite, with their name.

    One transfer to the host, whatever their number.
    """
    arrays = {
        f"The gradient of {name!r} ({key})": x
        for name, arrays_of in gradients.items()
        for key, x in arrays_of.items()
    }
    if not arrays:
        return
    xp = ns.namespace_of(**arrays)
    # A finite sum shows that all numbers are finite; any other array is read in full.
    with np.errstate(all="ignore"):
        sums = [xp.sum(x) for x in arrays.values()]
        finite = xp.isfinite(xp.stack([ns.cast(xp, s, sums[0].dtype) for s in sums]))
    good = backend_of(xp).to_numpy(finite).tolist()
    bad = [
        what
        for (what, x), fine in zip(arrays.items(), good, strict=True)
        if not (fine or bool(all_finite(x, xp=xp)))
    ]
    if bad:
        more = f", and {len(bad) - 1} more are not" if bad[1:] else ""
        raise errors.NotFiniteError(
            f"{bad[0]} is not finite{more}. Nothing was changed."
        )
