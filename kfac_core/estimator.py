"""The estimator: a network, its state, and when a snapshot of it is taken.

The one object that holds a `NetworkState`, over functions that hold nothing.  Three objects
in time: *statistics* change with every `Estimator.update`; an *operator* is made from them
at `Estimator.refresh`, with the damping of that moment, and does not change afterwards; a
product such as `Estimator.precondition` uses the operators as they are.

A call that raises leaves every block as it was.  Results belong to no gradient graph: what
is fed is detached first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from kfac_core.approximations.eigen import MomentStart
from kfac_core.array.namespaces import Scalar
from kfac_core.array.precision import Precision
from kfac_core.array.status import Check
from kfac_core.array.structure import replaced
from kfac_core.block import BatchLike, Block
from kfac_core.conventions import (
    Conventions,
    LossReduction,
    SourceReduction,
    require_one_of,
)
from kfac_core.damping import DampingRule
from kfac_core.execution.background import BackgroundRefresh
from kfac_core.execution.costs import CostTable, Rates, block_costs, solving_of
from kfac_core.execution.hosted import Hosted
from kfac_core.execution.movement import Movement
from kfac_core.execution.stacked import Stacked
from kfac_core.execution.threaded import Threaded
from kfac_core.factors.average import require_decay
from kfac_core.factors.statistics import Statistics
from kfac_core.losses.modes import EstimationMode
from kfac_core.network import Executor, Network, NetworkState
from kfac_core.operators.operator import FACTORIZATION_OF, CurvatureOperator
from kfac_core.options import Averaging, Execution, Refreshing, Sharing
from kfac_core.report import Report, report_of
from kfac_core.serialization import dump_state, parse_state

__all__ = ["Estimator"]


class Estimator:
    """Keeps the curvature of a network, block by block.

    Parameters
    ----------
    blocks : mapping of str to Block
        The blocks by name.
    reduction : {"sum", "mean", "mean_rows"}
        Over what the loss that was differentiated is summed or averaged; see
        `kfac_core.Conventions`.  A wrong value scales output factors by N^2.
    damping : float, 0-d array, or mapping of str to these
        Tikhonov damping, >= 0, of the whole network or of each block by name; a 0-d
        array is never read on the host.
    decay : float
        What old statistics are multiplied with at each update, in [0, 1].
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        How the damping is applied; see `kfac_core.damping`.
    sources : {"sum", "mean"}
        Whether outer products of several backpropagated vectors are summed or averaged.
    mode : str, optional
        The estimation mode that the output gradients come from, such as
        ``"gradients"``; written into the state and checked when one is loaded.
    averaging : Averaging, optional
        Debiasing, burn-in and the weight of updates.
    refreshing : Refreshing, optional
        What a refresh prepares, and what it does about failures.
    sharing : Sharing, optional
        Factors and weights that blocks have in common, and chains of layers.
    precision : Precision, optional
        The dtypes of storage, computing and applying.
    execution : Execution or Executor, optional
        How the loops over blocks are run.  By default equal small blocks are computed as
        stacks, on one thread.
    rates : Rates, optional
        How fast this machine is at what, for ``Refreshing(solving="cheaper")``.

    Attributes
    ----------
    network : Network
        The description, with the pure functions.
    state : NetworkState
        Everything that changes; ``state[name]`` is that of a block.

    Raises
    ------
    ConventionError, DampingError, DecayError, UnknownBlockError, UnsupportedError
        For options out of range.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        *,
        reduction: LossReduction,
        damping: Scalar | Mapping[str, Scalar] = 1e-3,
        decay: float = 0.95,
        damping_rule: DampingRule = "factored",
        sources: SourceReduction = "sum",
        mode: EstimationMode | None = None,
        averaging: Averaging | None = None,
        refreshing: Refreshing | None = None,
        sharing: Sharing | None = None,
        precision: Precision | None = None,
        execution: Execution | Executor | None = None,
        rates: Rates | None = None,
    ) -> None:
        require_decay(decay)
        if mode is not None:
            require_one_of("mode", mode, get_args(EstimationMode))
        chosen = execution if isinstance(execution, Execution) else Execution()
        refreshing = refreshing or Refreshing()
        costs = {n: block_costs(b, rates or Rates()) for n, b in blocks.items()}
        self.network = Network(
            blocks,
            conventions=Conventions(reduction=reduction, sources=sources),
            damping_rule=damping_rule,
            sharing=sharing,
            averaging=averaging,
            refreshing=refreshing,
            precision=precision,
            solving={
                name: solving_of(
                    None if damping_rule == "exact" else cost,
                    refreshing.solving,
                    refreshing.interval,
                )
                for name, cost in costs.items()
            },
            max_patch_elements=chosen.max_patch_elements,
        )
        self._costs = {
            name: cost
            for name, cost in costs.items()
            if cost is not None and name in self.network.blocks
        }
        self.mode = mode
        self.network.require_damping(damping)
        self._damping = damping
        self._decay = decay
        self.state = self.network.empty()
        self._movement: Movement | None = None
        if refreshing.threshold is not None:
            self._movement = Movement(self.network, refreshing.threshold)
        self._execution = execution
        self._executor = self._new_executor()

    def __repr__(self) -> str:
        return (
            f"Estimator(damping={self._damping!r}, decay={self._decay}, of\n"
            f"{self.network!r},\nholding {self.state!r})"
        )

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks by name."""
        return self.network.blocks

    @property
    def conventions(self) -> Conventions:
        """How output gradients are scaled."""
        return self.network.conventions

    @property
    def costs(self) -> CostTable:
        """What each block's stages cost, and how it is solved; ``print`` shows a table."""
        interval = self.network.refreshing.interval
        return CostTable(self._costs, self.network.solving, interval)

    @property
    def damping(self) -> Scalar | Mapping[str, Scalar]:
        """The damping of the next refresh; assigning a bad one changes nothing."""
        return self._damping

    @damping.setter
    def damping(self, damping: Scalar | Mapping[str, Scalar]) -> None:
        self.network.require_damping(damping)
        self._damping = dict(damping) if isinstance(damping, Mapping) else damping

    @property
    def decay(self) -> float:
        """The decay of the next update; assigning a bad one changes nothing."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        require_decay(decay)
        self._decay = decay

    def report(self) -> Report:
        """Return each block's condition, damping split, residual check and age.

        Returns
        -------
        Report
            A mapping by block, which prints as a table; this synchronizes with the
            device.
        """
        return Report(
            {
                name: report_of(self.blocks[name], held)
                for name, held in self.state.blocks.items()
            }
        )

    def update(
        self, batches: Mapping[str, BatchLike], /, *, check: Check = "raise"
    ) -> None:
        """Feed the statistics of some or all blocks; see `Network.update`.

        Parameters
        ----------
        batches : mapping of str to Batch, GradientBatch or sequence of Batch
            What each block's layer saw; blocks that are left out stay as they are.  A
            sequence is several uses of one layer in each example (tied weights), whose
            rows are shared positions of one and the same weight; so are the batches of
            the names in ``Sharing.weights``.
        check : {"raise", "status"}
            Whether rows that are not finite raise, for which the device is synchronized
            with once, or leave every block as it was and set ``state[name].status``.

        Raises
        ------
        UnknownBlockError
            For an unknown block name.
        ConventionError
            If some uses of a tied weight, or layers of a chain, are fed and others not.
        ShapeError, DtypeError, MixedArraysError
            For arrays that do not fit, in either mode.
        NotFiniteError
            For arrays that are not finite (``check="raise"``); the message names them.

        Notes
        -----
        ``R (n^2 + M m^2)`` flops a block for R rows; twice that where the backend has
        no symmetric update.
        """
        self.state = self.network.update(
            self.state,
            batches,
            decay=self._decay,
            check=check,
            executor=self._executor,
        )

    def absorb(self, moments: Mapping[str, Statistics], /) -> None:
        """Feed statistics of batches that came in parts; see `Network.absorb`.

        Parameters
        ----------
        moments : mapping of str to Statistics
            As `kfac_core.Block.moments` makes them of a part, with this estimator's
            ``conventions`` and precision, and `kfac_core.Block.merge` adds them up.  (The
            N of a mean loss is then that of each part.)

        Raises
        ------
        UnknownBlockError
            For an unknown block name.
        """
        self.state = self.network.absorb(self.state, moments, decay=self._decay)

    def rebase(
        self,
        names: Iterable[str] | None = None,
        /,
        *,
        moments: MomentStart,
        check: Check = "raise",
    ) -> None:
        """Recompute the bases of `Eigen` blocks; see `Network.rebase`.

        To be called before the first `refresh` of such a block, and again on a schedule
        of its own: an eigendecomposition costs ten times what `refresh` does for them.
        An operator stays as it was until the next refresh.

        Parameters
        ----------
        names : iterable of str, optional
            The blocks; all with `Eigen` that have statistics where left out.
        moments : {"kronecker", "carried", "zero"}
            What the second moments are in the new bases; see
            `kfac_core.Eigen.rebased`.  After ``"zero"`` an update has to come before
            the next refresh.
        check : {"raise", "status"}
            Whether a failed eigendecomposition raises, for which the device is
            synchronized with, or leaves the block's bases as they were, flagged.

        Raises
        ------
        UnknownBlockError, UnsupportedError, NotReadyError
            For a name that is no block, a block without bases, or without statistics.
        NotFiniteError, FactorizationError
            If a factor has no certified basis; every block then keeps its bases.
        """
        self.state = self.network.rebase(
            self.state,
            moments=moments,
            names=names,
            check=check,
            executor=self._executor,
        )

    def refresh(
        self, names: Iterable[str] | None = None, /, *, check: Check = "raise"
    ) -> None:
        """Make new operators with the damping as it is now; see `Network.refresh`.

        Parameters
        ----------
        names : iterable of str, optional
            The blocks; all that have statistics where left out.
        check : {"raise", "status"}
            Whether a failed factorization climbs the fallback chain and then raises, for
            which the device is synchronized with a few times a block; or is left in
            ``state[name].status``, where a block keeps its previous operator.

        Raises
        ------
        UnknownBlockError
            For an unknown block name.
        NotReadyError
            For a block without statistics, or with `Eigen` and no bases yet.
        DampingError
            For a damping that is negative or not finite.
        NotFiniteError, FactorizationError
            If a block has no earlier operator, or has failed as often in a row as
            ``Refreshing.failure_budget`` allows.  Nothing changes then, the count of
            failures included: it counts the refreshes that returned, with a block's
            previous operator kept.
        """
        chosen = self.network.ready(self.state, names)
        if check == "raise" and self._movement is not None:
            chosen = self._movement.of(self.state, chosen, damping=self._damping)
        self.state = self.network.refresh(
            self.state,
            damping=self._damping,
            names=chosen,
            check=check,
            executor=self._executor,
        )

    def start_refresh(
        self, names: Iterable[str] | None = None, /, *, check: Check = "raise"
    ) -> BackgroundRefresh:
        """Start a refresh in a thread, while steps go on with the operators there are.

        With the statistics and dampings of this moment.  Array libraries compute outside
        Python's lock, so that a refresh takes place beside the caller's own work where
        there is a core (or a device) to spare.

        Parameters
        ----------
        names, check
            See `refresh`.

        Returns
        -------
        BackgroundRefresh
            Whose ``install()`` puts the new operators in place.  Their ages count the
            updates since this call; what a failure means is as for `refresh`.

        Raises
        ------
        UnknownBlockError, NotReadyError
            See `refresh`.
        """
        started = self.state
        chosen = self.network.ready(started, names)

        def refreshed() -> NetworkState:
            return self.network.refresh(
                started, damping=damping, names=chosen, check=check, executor=executor
            )

        # An executor remembers what it computed, and the steps go on with this one's.
        executor = self._new_executor()
        damping = self._damping

        def install(made: NetworkState) -> None:
            self.state = self.network.with_operators_of(
                self.state, made, started, names=chosen
            )

        return BackgroundRefresh(refreshed, install)

    def operator(self, name: str, /) -> CurvatureOperator:
        """Return a block's operator as of its last refresh.

        Parameters
        ----------
        name : str
            The block.

        Returns
        -------
        CurvatureOperator
            Immutable operator.

        Raises
        ------
        UnknownBlockError
            For an unknown block name.
        NotReadyError
            Before the block's first refresh.
        """
        return self.network.operator(self.state, name)

    def precondition(
        self, gradients: Mapping[str, Mapping[str, Any]], /
    ) -> dict[str, dict[str, Any]]:
        """Multiply gradients by the inverse of each block's damped curvature.

        Parameters
        ----------
        gradients : mapping of str to mapping of str to array
            For some or all blocks, the parameters' gradients in the layer's layout.

        Returns
        -------
        dict of str to dict of str to array
            New arrays with the same names, shapes, dtypes and devices.

        Raises
        ------
        UnknownBlockError, NotReadyError
            See `operator`.
        ConventionError
            If some layers of a chain are given, and others not.
        ShapeError, DtypeError, MixedArraysError
            For gradients of incompatible shape, dtype, library or device.

        Notes
        -----
        Two matrix products a block, ``2 n m (n + m)`` flops; never synchronizes with a
        device.
        """
        if "inverse" not in self.network.refreshing.factorizations:
            return self.apply("multiply_inverse", gradients)
        return self.network.apply(
            "multiply_inverse", self.state, gradients, executor=self._executor
        )

    def apply(
        self,
        product: str,
        vectors: Mapping[str, Mapping[str, Any]],
        /,
        *arguments: Any,
        **options: Any,
    ) -> dict[str, dict[str, Any]]:
        """Apply any product of `CurvatureOperator` to parameter-shaped vectors.

        A factorization that the product needs and that no refresh prepared is made at
        the first call, and kept.

        Parameters
        ----------
        product : str
            The name of a method of `CurvatureOperator` that takes and returns a
            vector, such as ``"multiply_matpower"``.
        vectors : mapping of str to mapping of str to array
            For some or all blocks.  An embedding's weight may be `SparseRows`, and is
            that in the result then.
        *arguments, **options
            Arguments of the product besides the vector, such as an exponent.

        Returns
        -------
        dict of str to dict of str to array
            Arrays in the same structure.

        Raises
        ------
        ConventionError
            For an unknown product, and where some layers of a chain are given and others
            not.
        KFACError
            As `precondition` and the product itself.
        """
        state = self.state
        needed = FACTORIZATION_OF.get(product)
        if needed not in (None, *self.network.refreshing.factorizations):
            state = self._prepared(needed, vectors)
        products = self.network.apply(
            product,
            state,
            vectors,
            *arguments,
            executor=self._executor,
            **options,
        )
        self.state = state
        return products

    def _new_executor(self) -> Executor:
        """Return the executor that was given, or a new one as the options say."""
        if self._execution is not None and not isinstance(self._execution, Execution):
            return self._execution
        workers = 1 if self._execution is None else self._execution.workers
        inner: Executor = Hosted()
        return Stacked(Threaded(workers, inner) if workers > 1 else inner)

    def _prepared(self, factorization: Any, names: Iterable[str]) -> NetworkState:
        """Return the state with operators in which a factorization has been made."""
        blocks = dict.fromkeys(map(self.network.block_of, names))
        held = {name: self.operator(name) for name in blocks}
        made = {
            name: operator.prepared(factorization, name=name)
            for name, operator in held.items()
        }
        return self.state.updated(
            {
                name: replaced(self.state[name], operator=operator)
                for name, operator in made.items()
                if operator is not held[name]
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the estimator holds, as plain dicts and arrays.

        Returns
        -------
        dict
            Descriptions, conventions and settings; and of each block's statistics and
            operator the arrays by path, as copies of their library and device.  Counts
            and dampings are Python's numbers, for which this synchronizes with the device.
        """
        return dump_state(
            self.network,
            self.state,
            self._promises(),
            damping=self._damping,
            decay=self._decay,
        )

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take over a state that `state_dict` made.

        Parameters
        ----------
        state : mapping
            State of an estimator with the same blocks and conventions.

        Raises
        ------
        StateError
            If anything does not fit; nothing was changed then.
        """
        network, loaded, settings = parse_state(state, self.network, self._promises())
        self.network, self.state = network, loaded
        self._damping, self._decay = settings["damping"], settings["decay"]

    def _promises(self) -> dict[str, Any]:
        """Return what a state must share with the estimator that it is loaded into."""
        return {
            "reduction": self.conventions.reduction,
            "sources": self.conventions.sources,
            "debias": self.network.averaging.debias,
            "mode": self.mode,
        }
