"""The estimator: a network together with its current state.

`Estimator` is the only stateful object; it wraps the pure functions of `Network`.  There
are three stages: `Estimator.update` accumulates *statistics*; `Estimator.refresh` makes an
immutable *operator* from them, with the current damping; and products such as
`Estimator.precondition` use the operators of the last refresh.

A call that raises leaves every block unchanged.  One thread at a time may change an
estimator; a second one is refused.  Inputs are detached, so that results
belong to no gradient graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, get_args

from kfac_core import constraints, errors
from kfac_core.approximations.approximation import MomentStart
from kfac_core.array import Array, Check, Scalar, replaced
from kfac_core.array.precision import Precision
from kfac_core.block import BatchLike, Block, Vector
from kfac_core.conventions import Conventions, LossReduction, SourceReduction
from kfac_core.damping import DampingRule
from kfac_core.distributed.executor import DistributedExecutor
from kfac_core.distributed.options import Distributed
from kfac_core.distributed.placement import Placement
from kfac_core.execution.background import BackgroundRefresh
from kfac_core.execution.hosted import Hosted
from kfac_core.execution.stacked import Stacked
from kfac_core.execution.threaded import Threaded, library_of
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.factorizations import Factorization
from kfac_core.losses.modes import EstimationMode
from kfac_core.network import Network
from kfac_core.operators.operator import (
    FACTORIZATION_OF,
    VECTOR_PRODUCTS,
    CurvatureOperator,
)
from kfac_core.options import Averaging, Coupling, Execution, Refreshing
from kfac_core.report import Report, report_of
from kfac_core.serialization import dump_state, parse_state
from kfac_core.stages import EXECUTOR, PREPARE, Executor, LazyMoments
from kfac_core.state import NetworkState


class _Change:
    """A context in which one thread changes an estimator; other threads raise.

    This is not a lock, which an interrupt could leave locked: a new state replaces only the
    state that it was computed from.
    """

    def __init__(self, estimator: Estimator) -> None:
        # A cycle would keep all statistics until garbage is collected.
        self._estimator: Estimator = weakref.proxy(estimator)
        self._thread: int | None = None

    def __enter__(self) -> NetworkState:
        thread = threading.get_ident()
        # An interrupt may have left this thread's number here.
        if self._thread not in (None, thread):
            raise errors.ConcurrentChangeError(_CHANGED)
        self._thread = thread
        return self._estimator.state

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread = None


_CHANGED = (
    "Another thread changed this estimator at the same time; this call changed "
    "nothing. Call methods that change an estimator from one thread at a time, or use "
    "one for each thread."
)


class Estimator:
    r"""Block-diagonal curvature of a network, and its damped inverse.

    `update` accumulates the statistics of each block (a layer with an approximation),
    `refresh` makes operators from them, and `precondition` multiplies gradients V by the
    damped inverses.  For K-FAC (`Kronecker`) with ``damping_rule="factored"``,

    .. math:: (F + \lambda I)^{-1} V \approx
        \frac{1}{S} \, (A + \alpha I)^{-1} \, V \, (G + \beta I)^{-1},
        \qquad S \alpha \beta = \lambda .

    Parameters
    ----------
    blocks : mapping of str to Block
        Blocks by name.
    reduction : {"sum", "mean", "mean_rows"}
        Reduction of the loss that was differentiated: the sum over the batch, the mean
        over its N examples, or the mean over all unmasked rows (tokens, time steps).  A
        wrong value scales G by N^2, indistinguishable from different damping.
    damping : float, 0-d array, or mapping of str to these
        Tikhonov damping ``lam >= 0`` of all blocks, or of each block by name, in units of
        the curvature of one example.  A 0-d array is used on its device and is not copied
        to the host.
    decay : float
        Factor on the old statistics at each update, in [0, 1].
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        How the damping is applied: split between the two factors by their mean
        eigenvalues, split evenly, or added to the whole block (which needs
        eigendecompositions); see `kfac_core.damping`.
    sources : {"sum", "mean"}
        Whether outer products of several backpropagated vectors are summed or averaged.
    mode : str, optional
        Estimation mode of the output gradients, such as ``"gradients"``; saved with the
        state and checked when a state is loaded.
    averaging : Averaging, optional
        Debiasing, burn-in and the weight of updates.
    refreshing : Refreshing, optional
        Which factorizations a refresh prepares, and how failures are handled.
    coupling : Coupling, optional
        Shared factors, tied weights and chains of layers.
    precision : Precision, optional
        Dtypes of storing, computing and applying.  By default all are the dtype of a
        block's first batch, or float32 if that is narrower.
    execution : Execution, Distributed or Executor, optional
        How the loops over blocks are run.  By default equal small blocks are stacked,
        on one thread.  With `kfac_core.distributed.Distributed` blocks are divided among
        processes.

    Attributes
    ----------
    network : Network
        Description of the blocks, with the pure functions.
    state : NetworkState
        Statistics and operators; ``state[name]`` is the state of one block.

    Raises
    ------
    ConventionError, DampingError, DecayError, UnknownBlockError, UnsupportedError
        For options out of range.

    Notes
    -----
    Shapes: a block with an n x n and an m x m factor has a matrix V of n rows and m
    columns; for a dense layer ``n = in`` (``in + 1`` with a bias) and ``m = out``.

    Units: F is the curvature of the loss of one example; the damping has the same unit.

    Cost for a block with an n x n and an m x m factor: ``R (n^2 + M m^2)`` flops for an
    update with R rows and M backpropagated vectors, ``n^3 + m^3`` for a refresh,
    ``2 n m (n + m)`` for `precondition`, which never synchronizes with the device.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, sections 4.2, 5, 6.3 and 8.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> x, g = rng.normal(size=(32, 3)), rng.normal(size=(32, 2))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> estimator = kc.Estimator(
    ...     {"fc": kc.Block(layer, kc.Kronecker())}, reduction="sum", damping=1e-2
    ... )
    >>> estimator.update({"fc": kc.Batch(x, g)})
    >>> estimator.refresh()
    >>> gradient = {"fc": {"weight": x.T @ g / 32, "bias": g.mean(axis=0)}}
    >>> direction = estimator.precondition(gradient)
    >>> direction["fc"]["weight"].shape
    (3, 2)
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
        coupling: Coupling | None = None,
        precision: Precision | None = None,
        execution: Execution | Distributed | Executor | None = None,
    ) -> None:
        constraints.require_options(
            locals(),
            decay=constraints.DECAY,
            mode=constraints.one_of(*get_args(EstimationMode), None),
        )
        if not isinstance(execution, (Execution, Distributed)):
            of_kind = constraints.optional(EXECUTOR)
            constraints.require_range("execution", execution, of_kind)
        options = execution if isinstance(execution, Execution) else Execution()
        if isinstance(execution, Distributed):
            options = execution.execution
        self.network = Network(
            blocks,
            conventions=Conventions(reduction=reduction, sources=sources),
            damping_rule=damping_rule,
            coupling=coupling,
            averaging=averaging,
            refreshing=refreshing,
            precision=precision,
            max_patch_elements=options.max_patch_elements,
        )
        self.mode = mode
        self.damping = damping
        self._decay = decay
        self.state = self.network.empty()
        # A fresh object for each reset.  A background refresh compares identities, and
        # so never installs an operator of statistics that were reset meanwhile.
        self._resets: dict[str, object] = {}
        self._execution = execution
        self._executor = self._first_executor()
        self._change = _Change(self)
        self._last_refresh: threading.Event | None = None

    def __repr__(self) -> str:
        return (
            f"Estimator(damping={self._damping!r}, decay={self._decay}, of\n"
            f"{self.network!r},\nholding {self.state!r})"
        )

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks by name; layers that are a chain are one."""
        return self.network.blocks

    @property
    def conventions(self) -> Conventions:
        """Scaling of the output gradients."""
        return self.network.conventions

    @property
    def damping(self) -> Scalar | Mapping[str, Scalar]:
        """Damping of the next refresh; assigning an invalid damping raises."""
        return self._damping

    @damping.setter
    def damping(self, damping: Scalar | Mapping[str, Scalar]) -> None:
        self.network.layers.require_damping(damping)
        self._damping = dict(damping) if isinstance(damping, Mapping) else damping

    @property
    def decay(self) -> float:
        """Decay of the next update; assigning an invalid decay raises."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        constraints.require_range("decay", decay, constraints.DECAY)
        self._decay = decay

    @property
    def placement(self) -> Placement:
        """Owners and holders of the blocks, where they are divided among processes.

        Prints as a table.  Raises `UnsupportedError` for an estimator of one process.
        """
        return self._distributed("placement").placement

    def report(self) -> Report:
        """Return each block's condition, damping split, residual check and age.

        Returns
        -------
        Report
            Reports by block, which print as a table.  Synchronizes with the device.
        """
        state = self.gathered()
        return Report(
            {
                name: report_of(self.blocks[name], block_state)
                for name, block_state in state.blocks.items()
            }
        )

    def update(
        self, batches: Mapping[str, BatchLike], /, *, check: Check = "raise"
    ) -> None:
        """Accumulate the statistics of a batch, for some or all blocks.

        ``sum <- decay * sum + weight * C``, with C the statistics of the batch.

        Parameters
        ----------
        batches : mapping of str to Batch, GradientBatch or sequence of Batch
            Inputs and output gradients of each block's layer; omitted blocks are
            unchanged.  A sequence holds several uses of one layer in each example, which
            are treated as shared positions of one weight.
        check : {"raise", "status"}
            ``"raise"`` raises if a batch is not finite in any block, and synchronizes with
            the device once.  ``"status"`` then sets ``state[name].status`` and leaves all
            blocks unchanged.

        Raises
        ------
        UnknownBlockError, ShapeError, DtypeError, MixedArraysError
            For unknown names and incompatible arrays, in either mode.
        ConventionError
            If only some uses of a tied weight, or only some layers of a chain, are given.
        NotFiniteError
            If rows are not finite (``check="raise"``); names the block and the argument.
        """
        with self._change as before:
            after = self.network.update(
                before, batches, decay=self._decay, check=check, executor=self._executor
            )
            self._install(before, after)

    def absorb(self, moments: Mapping[str, Statistics | LazyMoments], /) -> None:
        """Accumulate the merged statistics of a batch that was processed in parts.

        Equal to one `update` with the whole batch up to rounding, for any sizes of the
        parts.

        Parameters
        ----------
        moments : mapping of str to Statistics
            Statistics of each part from `kfac_core.batch_moments`, with this estimator's
            ``conventions`` and precision (and for `kfac_core.EKFAC` its statistics),
            added up by `Statistics.merged`.  For a mean loss, N is the number of examples
            of each part.  Or a function of the block's statistics (or None) that returns
            them: with ``Distributed(reduce="owner")`` the bases of `kfac_core.EKFAC` are
            on every rank only while it runs.

        Raises
        ------
        ArgumentError, UnknownBlockError, ShapeError
            For anything but statistics of this network's blocks.
        ConventionError
            For second moments in other bases.
        """
        with self._change as before:
            after = self.network.absorb(
                before, moments, decay=self._decay, executor=self._executor
            )
            self._install(before, after)

    def reset(self, name: str, /) -> None:
        """Make one block as it was before its first batch."""
        self.state = self.network.reset(self.state, name)
        self._resets[name] = object()

    def rebase(
        self,
        names: Iterable[str] | None = None,
        /,
        *,
        moments: MomentStart,
        check: Check = "raise",
    ) -> None:
        """Recompute the eigenbases of `EKFAC` blocks.

        Call it before the first `refresh` of such a block, and from then on less often
        than `refresh`: the eigendecompositions cost about ten times as much.  Operators are
        unchanged until the next refresh.

        Parameters
        ----------
        names : iterable of str, optional
            Blocks to rebase; by default all `EKFAC` blocks with statistics.
        moments : {"kronecker", "carried", "zero"}
            How the second moments start in the new bases: from the eigenvalues of the
            factors, transformed from the old bases, or at zero.  After ``"zero"``, call
            `update` before the next refresh.
        check : {"raise", "status"}
            ``"raise"`` raises if an eigendecomposition fails, and synchronizes with the
            device.  ``"status"`` then keeps the old bases and sets a flag.

        Raises
        ------
        UnknownBlockError, UnsupportedError, NotReadyError
            For an unknown name, a block without bases, or without statistics.
        NotFiniteError, FactorizationError
            If a factor has no accurate basis (``check="raise"``).

        Notes
        -----
        About ``9 (n^3 + m^3)`` flops per block.
        """
        with self._change as before:
            after = self.network.rebase(
                before,
                moments=moments,
                names=names,
                check=check,
                executor=self._executor,
            )
            self._install(before, after)

    def refresh(
        self, names: Iterable[str] | None = None, /, *, check: Check = "raise"
    ) -> None:
        """Make new operators from the current statistics and damping.

        Parameters
        ----------
        names : iterable of str, optional
            Blocks to refresh; by default all that have statistics.
        check : {"raise", "status"}
            With ``"raise"``, a failed factorization goes through the fallback chain
            (working precision, then float64, then clipped eigenvalues) and raises if all
            fail, which synchronizes with the device a few times per block.  With
            ``"status"``, it sets ``state[name].status`` and the block keeps its operator.

        Raises
        ------
        UnknownBlockError, NotReadyError
            For an unknown block name, or a block without statistics or bases.
        DampingError
            For a damping that is negative or not finite.
        NotFiniteError, FactorizationError
            If a block that cannot be factorized has no previous operator, or exceeds
            ``Refreshing.failure_budget`` (``check="raise"``).  Within the budget the block
            keeps its operator and counts a failure.
        """
        with self._change as before:
            after = self.network.refresh(
                before,
                damping=self._damping,
                names=names,
                check=check,
                executor=self._executor,
            )
            self._install(before, after)

    def start_refresh(
        self, names: Iterable[str] | None = None, /, *, check: Check = "raise"
    ) -> BackgroundRefresh:
        """Start a refresh in a thread; steps continue with the current operators.

        It uses the statistics and damping at the time of the call.  Array libraries release
        the GIL while they compute, so that a refresh overlaps with other work if a core or
        a device is idle.  PyTorch's CUDA tensors are computed on a stream of their own.

        Parameters
        ----------
        names, check
            See `refresh`.

        Returns
        -------
        BackgroundRefresh
            Its ``install()`` replaces the operators.  Their ages count the updates since
            this call; failures are handled as by `refresh`.

        Raises
        ------
        UnknownBlockError, NotReadyError
            As `refresh`.

        Notes
        -----
        After `load_state_dict`, ``install()`` raises `NotReadyError`: its operators are of
        discarded statistics.  For the same reason blocks that were reset are left out.
        """
        constraints.require_check(check)
        started = self.state
        ready = self.network.ready(started, names)

        def refreshed() -> NetworkState:
            try:
                # One that nobody installs may still exchange its messages.
                if previous is not None:
                    previous.wait()
                return network.refresh(
                    started,
                    damping=damping,
                    names=ready,
                    check=check,
                    executor=executor,
                )
            finally:
                ended.set()

        # Executors cache stacks and views between calls, so the thread gets its own one.
        executor = self._new_executor()
        if isinstance(self._executor, DistributedExecutor):
            # Its messages must not mix with those of the training loop.
            executor = self._executor.in_background(executor)
        damping, network, ended = self._damping, self.network, threading.Event()
        resets = dict(self._resets)

        def install(refreshed_state: NetworkState) -> None:
            if self.network is not network:
                raise errors.NotReadyError(
                    "A state was loaded after this refresh was started, so its "
                    "operators belong to discarded statistics. Start another one."
                )
            unchanged = [n for n in ready if self._resets.get(n) is resets.get(n)]
            with self._change as before:
                after = before.with_operators_of(refreshed_state, started, unchanged)
                self._install(before, after)

        previous, self._last_refresh = self._last_refresh, ended
        library = library_of([started])
        beside = refreshed if library is None else library.in_background(refreshed)
        return BackgroundRefresh(beside, install)

    def operator(self, name: str, /) -> CurvatureOperator:
        """Return a block's operator as of its last refresh, or raise `NotReadyError`."""
        return self.network.operator(self.state, name)

    def precondition(self, gradients: Vector, /) -> dict[str, dict[str, Array]]:
        """Multiply gradients by the inverse of each block's damped curvature.

        For a Kronecker-factored block this is ``A^-1 V G^-1 / S`` with damped factors.

        Parameters
        ----------
        gradients : mapping of str to mapping of str to array
            Gradients of the mean loss, of some or all blocks, by parameter, in the layer's
            layout.

        Returns
        -------
        dict of str to dict of str to array
            New arrays with the same names, shapes, dtypes and devices.

        Raises
        ------
        KFACError
            See `apply`.
        """
        # The usual case skips `apply`, whose checks of names cost as much as the
        # products of a small network.
        if "inverse" not in self.network.refreshing.factorizations:
            return self.apply("multiply_inverse", gradients)
        return self.network.apply(
            "multiply_inverse", self.state, gradients, executor=self._executor
        )

    def viewed(self, vectors: Vector, /) -> Vector:
        """Return `HostViews` where NumPy is to compute what `precondition` returns."""
        # Counts in arrays, and layers of chains, are the library's.
        counts = (type(b.refreshes) is int for b in self.state.blocks.values())
        if self.network.layers.has_chains or not all(counts):
            return vectors
        return self._executor.viewed(vectors)

    def apply(
        self,
        product: str,
        vectors: Vector,
        /,
        *arguments: object,
        **options: object,
    ) -> dict[str, dict[str, Array]]:
        """Apply any product of `CurvatureOperator` to parameter-shaped vectors.

        A factorization that the last refresh did not prepare is computed at the first
        call and kept.

        Parameters
        ----------
        product : str
            The name of a method of `CurvatureOperator` that takes and returns a
            vector, such as ``"multiply_matpower"``.
        vectors : mapping of str to mapping of str to array
            Vectors of some or all blocks, by parameter.
        *arguments, **options
            Arguments of the product besides the vector, such as an exponent.

        Returns
        -------
        dict of str to dict of str to array
            Arrays in the same structure.

        Raises
        ------
        UnknownBlockError, NotReadyError
            For an unknown name, or a block that was never refreshed.
        ConventionError
            For an unknown product, or if only some layers of a chain are given.
        ShapeError, DtypeError, MixedArraysError
            For vectors of incompatible shape, dtype, library or device.
        KFACError
            See the product.
        """
        before = state = self.state
        constraints.require_one_of("product", product, VECTOR_PRODUCTS)
        needed = FACTORIZATION_OF.get(product)
        if needed and needed not in self.network.refreshing.factorizations:
            state = self._prepared(needed, vectors)
        products = self.network.apply(
            product, state, vectors, *arguments, executor=self._executor, **options
        )
        # Do not overwrite a change that another thread made in the meantime.
        if state is not before and self.state is before:
            self.state = state
        return products

    def _install(self, before: NetworkState, after: NetworkState) -> None:
        """Install a new state if the state that it was computed from is still current."""
        if self.state is not before:
            raise errors.ConcurrentChangeError(_CHANGED)
        self.state = after

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which gets its own executor and guard."""
        # Executors hold caches by `id`, locks and threads, none of which survives a
        # copy.
        without = dict.fromkeys(("_executor", "_change", "_last_refresh"))
        return {**vars(self), **without}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._executor = self._first_executor()
        self._change = _Change(self)

    def _first_executor(self) -> Executor:
        """Return the estimator's executor, which may be of many processes."""
        executor = self._new_executor()
        if isinstance(self._execution, Distributed):
            return DistributedExecutor(self.network, self._execution, executor)
        return executor

    def _new_executor(self) -> Executor:
        """Return the executor of the options, or a new one made from them."""
        options = self._execution or Execution()
        if isinstance(options, Distributed):
            options = options.execution
        if isinstance(options, Executor):
            return options
        workers = options.workers
        inner: Executor = Hosted()
        return Stacked(Threaded(workers, inner) if workers > 1 else inner)

    def _prepared(
        self, factorization: Factorization, names: Iterable[str]
    ) -> NetworkState:
        """Return the state with one more factorization of some operators."""
        blocks = dict.fromkeys(map(self.network.layers.block_of, names))
        operators = {name: self.operator(name) for name in blocks}
        tasks = {
            name: (self.blocks[name], operator, factorization)
            for name, operator in operators.items()
        }
        prepared = self._executor(PREPARE, tasks)
        return self.state.updated(
            {
                name: replaced(self.state[name], operator=operator)
                for name, operator in prepared.items()
                if operator is not operators[name]
            }
        )

    @property
    def owned_blocks(self) -> list[str]:
        """The blocks that this process owns: all of one process."""
        if isinstance(self._executor, DistributedExecutor):
            return self._executor.partition.owned()
        return [*self.blocks]

    def state_dict(
        self, *, owned: bool = False, deferred: bool = False
    ) -> dict[str, Any]:
        """Return settings, statistics and operators as plain dicts and arrays.

        Parameters
        ----------
        owned : bool
            Whether only the blocks that this process owns are returned, of all rows; those
            of all processes together are the state.
        deferred : bool
            Whether arrays are the state's own, and what has to be packed is a function that
            returns it: for writing them one at a time, without a second state in memory.

        Returns
        -------
        dict
            Descriptions, conventions and settings, and the arrays of each block's
            statistics and operator by path, copied in their library and on their device.
            Counts and dampings are Python numbers; this synchronizes with the device.
        """
        executor = self._executor
        if owned and isinstance(executor, DistributedExecutor):
            state = executor.owned(self.state)
        else:
            state = self.gathered()
        return dump_state(
            self.network,
            state,
            self._promises(),
            damping=self._damping,
            decay=self._decay,
            deferred=deferred,
        )

    def load_state_dict(
        self, state: Mapping[str, Any], /, *, owned: bool = False
    ) -> None:
        """Restore a state that `state_dict` returned.

        Parameters
        ----------
        state : mapping
            State of an estimator with the same blocks and conventions.
        owned : bool
            Whether it has the blocks of `owned_blocks` alone.  Collective then.

        Raises
        ------
        StateError
            If anything does not match; the estimator is then unchanged.
        """
        executor = self._executor
        error: Exception | None = None
        with self._change as before:
            network, loaded = self.network, before
            settings: dict[str, Any] = {}
            try:
                network, loaded, settings = parse_state(
                    state,
                    network,
                    self._promises(),
                    self.owned_blocks if owned else None,
                )
            except errors.KFACError as raised:
                error = raised
            if owned and isinstance(executor, DistributedExecutor):
                # Every process takes part, also the one that failed: the others would
                # wait for it.
                loaded = executor.shared(loaded, error=error)
            elif error is not None:
                raise error
            elif isinstance(executor, DistributedExecutor):
                loaded = executor.scattered(loaded)
            damping, decay = settings["damping"], settings["decay"]
            if self.state is not before:
                raise errors.ConcurrentChangeError(_CHANGED)
            # Without a call in between, no interrupt can separate these assignments.
            self.network, self.state = network, loaded
            self._damping, self._decay = damping, decay

    def gathered(self) -> NetworkState:
        """Return the state of all rows, which is `state` on one process.

        Where processes divide the blocks it is collective, and every rank gets the
        statistics and operators of all blocks, which takes the memory of one process.
        """
        if isinstance(self._executor, DistributedExecutor):
            return self._executor.gathered(self.state)
        return self.state.as_part(None)

    def check_replicas(self, **arrays: Mapping[str, Any] | Array) -> None:
        """Raise unless all processes hold equal replicas.

        These are counts, dampings, bases, operators that several processes hold, and the
        given arrays.  Collective: every rank calls it.  Synchronizes with the device.

        Parameters
        ----------
        **arrays : array or mapping of str to array
            Further arrays that must be equal bit for bit, such as ``parameters=...``.

        Raises
        ------
        ReplicaError
            Naming the value that differs, and the rank.
        UnsupportedError
            For an estimator of one process.
        """
        self._distributed("check_replicas").check_replicas(self.state, **arrays)

    def _distributed(self, name: str) -> DistributedExecutor:
        if isinstance(self._executor, DistributedExecutor):
            return self._executor
        raise errors.UnsupportedError(
            f"`{name}` comes from several processes, and this estimator runs on one. "
            "Create it with Estimator(..., execution=Distributed(communicator=...))."
        )

    def _promises(self) -> dict[str, Any]:
        """Return the conventions that a state and the estimator that loads it share."""
        return {
            "reduction": self.conventions.reduction,
            "sources": self.conventions.sources,
            "debias": self.network.averaging.debias,
            "mode": self.mode,
        }
