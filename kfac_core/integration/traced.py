"""An estimator whose state is an argument: for steps that are one compiled program.

Conventions.  A `TracedEstimator` has no state; a `TracedState` is a structure of arrays,
which function compilers look into.  Every function looks at no value, so that nothing is
raised for values, and no program is made anew for another damping or decay.  A batch of
which any block is flagged leaves everything as it was but the state's ``status``; a block
whose factorization fails keeps its operator, and is flagged.  Before the first refresh an
operator is that of no statistics, ``lam I`` with the damping lam.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kfac_core.approximations.eigen import Eigen
from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar, device_of, namespace_of
from kfac_core.array.structure import combinable, map_structure, replaced, structure
from kfac_core.errors import ConventionError, StateError, UnsupportedError
from kfac_core.estimator import Estimator
from kfac_core.execution.block_state import BlockState
from kfac_core.execution.products import apply_product
from kfac_core.execution.refreshing import Refresh, unless_failed
from kfac_core.execution.updating import updated_blocks
from kfac_core.factors.statistics import Statistics
from kfac_core.integration.wiring import Captured
from kfac_core.layers.feeding import detached
from kfac_core.operators.operator import CurvatureOperator

__all__ = ["TracedEstimator", "TracedState"]


@structure()
class TracedState:
    """What an estimator holds, as arrays alone.

    Attributes
    ----------
    updates, age : array of int32, 0-d
        How many updates there were, and how many since the operators were made.
    dampings : dict of str to 0-d array
        That the operators were made with.
    statistics : dict of str to Statistics
        Running sums.
    operators : dict of str to CurvatureOperator
        As of the last refresh.
    status : dict of str to 0-d array of int32
        `kfac_core.Status` of each block in the last update and refresh.
    """

    updates: Array
    age: Array
    dampings: dict[str, Array]
    statistics: dict[str, Statistics]
    operators: dict[str, CurvatureOperator]
    status: dict[str, Array]


class TracedEstimator:
    """The functions of an estimator, of a state that is given and returned.

    Parameters
    ----------
    settings : Estimator
        Whose blocks and options, as they are at each call, say what is done; its own
        statistics are neither read nor changed.

    Raises
    ------
    UnsupportedError
        For `Eigen` blocks, whose bases have a schedule of their own.
    """

    def __init__(self, settings: Estimator, /) -> None:
        for name, block in settings.blocks.items():
            if isinstance(block.approximation, Eigen):
                raise UnsupportedError(
                    f"Block {name!r}: Eigen's bases are taken by `Estimator.rebase`. Use "
                    "an `Estimator`, or another approximation."
                )
        self.settings = settings
        self.blocks = settings.blocks

    def initial(self, like: Array, /) -> TracedState:
        """Return the state before the first update, of an array's library and device."""
        xp = namespace_of(like=like)
        zero = xp.zeros((), dtype=xp.int32, device=device_of(like))
        statistics = {
            name: block.initial(like, precision=self.settings.precision)
            for name, block in self.blocks.items()
        }
        state = TracedState(
            *(zero, zero, self._dampings(statistics, None, xp), statistics, {}),
            dict.fromkeys(self.blocks, zero),
        )
        made = {name: self._operator(name, state) for name in self.blocks}
        return replaced(state, operators=made)

    def updated(self, state: TracedState, captured: Captured, /) -> TracedState:
        """Return the state after one update, as `Estimator.update` makes it.

        Parameters
        ----------
        state : TracedState
            Never modified.
        captured : Captured
            What the blocks saw; a block that is left out keeps its statistics.

        Returns
        -------
        TracedState
            With the flags of this update; with the old statistics and counts where
            there are any.

        Raises
        ------
        ConventionError
            Where the batches have other conventions than the settings.
        KFACError
            For arrays that do not fit.
        """
        settings = self.settings
        promised = settings.conventions
        same = captured.loss == promised.loss
        if not same or captured.sources not in (None, promised.sources):
            raise ConventionError(
                f"Expected batches captured under {promised}, got loss={captured.loss!r}, "
                f"sources={captured.sources!r}. Say the same in both."
            )
        grouped = settings.tied_weights.grouped(captured.batches)
        fed = {settings._known(name): detached(b) for name, b in grouped.items()}
        xp = namespace_of(state=state.updates)
        decay: Any = settings.decay
        weight: Any = settings._weight
        if settings.burn_in:
            burning = state.updates < settings.burn_in
            held = next(iter(state.dampings.values()))
            one = xp.ones((), dtype=held.dtype, device=device_of(held))
            decay = xp.where(burning, one, decay)
            weight = xp.where(burning, one, weight)
        new, _ = updated_blocks(
            *(self.blocks, {name: state.statistics[name] for name in fed}, fed),
            *(dict.fromkeys(fed, decay), dict.fromkeys(fed, weight)),
            settings=settings._update_settings("status"),
        )
        status = {n: x * 0 for n, x in state.status.items()}
        status |= {name: statistics.status for name, statistics in new.items()}
        good = self.is_good(replaced(state, status=status))
        kept = {
            name: map_structure(
                lambda a, b: xp.where(good, a, b), new[name], state.statistics[name]
            )
            for name in new
        }
        count = xp.astype(good, xp.int32)
        return replaced(
            state,
            updates=state.updates + count,
            age=state.age + count,
            statistics={**state.statistics, **kept},
            status=status,
        )

    def refreshed(
        self,
        state: TracedState,
        /,
        *,
        damping: Scalar | Mapping[str, Scalar] | None = None,
    ) -> TracedState:
        """Return the state with new operators, as `Estimator.refresh` makes them.

        Parameters
        ----------
        state : TracedState
            Never modified.
        damping : float, 0-d array, or mapping of str to these, optional
            In the place of the settings' own.

        Returns
        -------
        TracedState
            In which a block that failed keeps its operator and adds to its flags.
        """
        xp = namespace_of(state=state.updates)
        dampings = self._dampings(state.statistics, damping, xp)
        asked = replaced(state, dampings=dampings)
        made = {name: self._operator(name, asked) for name in self.blocks}
        flags = {name: operator.status() for name, operator in made.items()}
        return replaced(
            state,
            age=state.age * 0,
            dampings={
                name: xp.where(flags[name] == 0, dampings[name], state.dampings[name])
                for name in made
            },
            operators={
                name: unless_failed(operator, state.operators[name])
                for name, operator in made.items()
            },
            status={name: state.status[name] | flags[name] for name in made},
        )

    def precondition(
        self, state: TracedState, gradients: Mapping[str, Mapping[str, Any]], /
    ) -> dict[str, dict[str, Any]]:
        """Multiply gradients by the inverse of each block's damped curvature.

        Parameters
        ----------
        state : TracedState
            Never modified.
        gradients : mapping of str to mapping of str to array
            As for `Estimator.precondition`.

        Returns
        -------
        dict of str to dict of str to array
            Of the same form.
        """
        return {
            self.settings._known(name): apply_product(
                *(self.blocks[name], state.operators[name], gradient),
                product="multiply_inverse",
                arguments=(),
                options={},
                name=name,
            )[0]
            for name, gradient in gradients.items()
        }

    def is_good(self, state: TracedState, /) -> Array:
        """Return whether no block is flagged, as a 0-d boolean."""
        flags = list(state.status.values())
        xp = namespace_of(state=flags[0])
        return xp.all(xp.stack(flags) == 0)

    def estimator(self, state: TracedState, /) -> Estimator:
        """Return an estimator that holds a state: to save it, or for its reports.

        Parameters
        ----------
        state : TracedState
            Of arrays with values; this waits for them.

        Returns
        -------
        Estimator
            New, of the same settings.
        """
        updates, age = int(state.updates), int(state.age)
        made = copy.copy(self.settings)
        made._states = {
            name: BlockState(
                statistics=replaced(statistics, status=statistics.status * 0),
                operator=state.operators[name] if updates > 0 else None,
                updates=updates,
                age=min(age, updates),
                damping=state.dampings[name] if updates > 0 else None,
            )
            for name, statistics in state.statistics.items()
            if updates > 0
        } or {name: BlockState() for name in self.blocks}
        made._inverse_stacks = None
        return made

    def state(self, estimator: Estimator, start: TracedState, /) -> TracedState:
        """Return the state that an estimator holds, such as one that was loaded.

        Parameters
        ----------
        estimator : Estimator
            With the blocks and settings of this one.
        start : TracedState
            As `initial` makes it: what a block without statistics has.

        Returns
        -------
        TracedState
            With no flags.

        Raises
        ------
        StateError
            Where its blocks are of another form, were updated differently often, or have
            statistics and no operators, whose products would be zero.
        """
        held = {name: estimator.state(name) for name in self.blocks}
        if bare := [n for n, s in held.items() if s.updates and s.operator is None]:
            raise StateError(
                f"Expected operators of {bare}: call the estimator's "
                'refresh(check="status") first.'
            )
        if len({state.updates for state in held.values()}) > 1:
            raise StateError(
                "Expected blocks that saw the same number of updates, got "
                f"{ {name: state.updates for name, state in held.items()} }."
            )
        found = replaced(
            start,
            updates=start.updates + max(s.updates for s in held.values()),
            age=start.age + max(s.age for s in held.values()),
            dampings={
                name: start.dampings[name]
                if s.damping is None
                else start.dampings[name] * 0 + s.damping
                for name, s in held.items()
            },
            statistics={
                name: s.statistics or start.statistics[name] for name, s in held.items()
            },
            operators={
                name: s.operator or start.operators[name] for name, s in held.items()
            },
        )
        if not combinable(found, start):
            raise StateError(
                "Expected an estimator whose blocks and damping rule are those of the "
                "settings; its statistics or operators are of another form. For operators "
                'that an ordinary refresh made, call its refresh(check="status").'
            )
        return found

    def _operator(self, name: str, state: TracedState) -> CurvatureOperator:
        settings, statistics = self.settings, state.statistics
        own = settings.shared_factors.completed(name, statistics[name], statistics)
        refresh = Refresh(
            *({name: self.blocks[name]}, {}, {name: own}, state.dampings),
            *(settings._refresh_settings(), "status"),
        )
        return refresh.operator(name)[0]

    def _dampings(
        self,
        statistics: Mapping[str, Statistics],
        damping: Scalar | Mapping[str, Scalar] | None,
        xp: Namespace,
    ) -> dict[str, Array]:
        """Return each block's damping as an array of the statistics' dtype."""
        chosen: Any = self.settings.damping if damping is None else damping
        every = chosen if isinstance(chosen, Mapping) else None
        return {
            name: xp.asarray(
                chosen if every is None else every[name],
                dtype=held.dtype,
                device=device_of(held.any_weight),
            )
            for name, held in statistics.items()
        }
