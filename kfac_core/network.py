"""The curvature of a network: a description, a state, and pure functions of both.

A `Network` describes blocks by name, conventions and sharing, without arrays.
`Network.update` and `Network.refresh` take a `NetworkState` and return a new one;
`Network.precondition` returns products.  Each is a loop of a stage
(module ``stages``) over blocks, which an executor runs.

A state is a pytree: ``jax.jit(network.update)`` works.  Traced code cannot raise, so each
stage takes ``check``.  With ``"raise"`` it reads the flags once and raises.  With
``"status"`` it reads no value, keeps the old state of a block that failed, and leaves the
flags in ``state[name].status``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np
from array_api_compat import is_numpy_array

from kfac_core import constraints, errors
from kfac_core.approximations.options import RefreshOptions, UpdateOptions
from kfac_core.array import Array, Check, Scalar, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.array.choice import choose
from kfac_core.array.precision import Precision
from kfac_core.array.structure import leaves
from kfac_core.block import Block
from kfac_core.constraints import shown
from kfac_core.conventions import Conventions
from kfac_core.damping import DampingRule, require_set_damping
from kfac_core.factors.average import require_decay
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.feeding import detached, is_empty, require_finite_rows
from kfac_core.linalg.factorizations import Solving
from kfac_core.operators.operator import VECTOR_PRODUCTS, CurvatureOperator
from kfac_core.options import Averaging, Refreshing, Sharing
from kfac_core.sharing.chains import Chains
from kfac_core.sharing.shared_factors import SharedFactors
from kfac_core.sharing.tied_weights import TiedWeights
from kfac_core.stages import (
    ABSORB,
    APPLY,
    REBASE,
    REFRESH,
    UPDATE,
    Executor,
    ProductCall,
    Tasks,
    plain,
)
from kfac_core.state import (
    BlockState,
    NetworkState,
    after_refresh,
    after_refresh_in_status,
    after_update,
    copied,
)

__all__ = ["Network"]


class Network:
    r"""Description of a network's blocks, with pure functions of its state.

    Every function takes a `NetworkState` and returns a new one, or products; none modifies
    its arguments.  `update` computes ``sum <- decay * sum + weight * C`` with the
    statistics C of a batch, `refresh` makes operators, and `precondition` applies them.
    For K-FAC (`Kronecker`) with ``damping_rule="factored"``,

    .. math:: (F + \lambda I)^{-1} V \approx
        \frac{1}{S} \, (A + \alpha I)^{-1} \, V \, (G + \beta I)^{-1},
        \qquad S \alpha \beta = \lambda .

    A network holds no arrays.  It is hashable, and equal to a network of equal parts.

    Parameters
    ----------
    blocks : mapping of str to Block
        Blocks by name.
    conventions : Conventions
        Scaling of the output gradients: loss reduction, and sum or mean over
        backpropagated vectors.
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        How the damping is applied: split between the two factors by their mean
        eigenvalues, split evenly, or added to the whole block; see `kfac_core.damping`.
    sharing : Sharing, optional
        Shared factors, tied weights and chains of layers.
    averaging : Averaging, optional
        Debiasing, burn-in and the weight of updates.
    refreshing : Refreshing, optional
        Which factorizations a refresh prepares, and how failures are handled.
    precision : Precision, optional
        Dtypes of storing, computing and applying.  By default all are the dtype of a
        block's first batch, or float32 if that is narrower.
    max_patch_elements : int, optional
        Bound on the number of elements of a convolution's patches; larger batches are
        processed in chunks of examples.

    Raises
    ------
    ConventionError, UnknownBlockError, UnsupportedError
        For options out of range.

    Notes
    -----
    Shapes: a block with an n x n and an m x m factor has a matrix V of n rows and m
    columns; for a dense layer ``n = in`` (``in + 1`` with a bias) and ``m = out``.

    Units: F is the curvature of the loss of one example; the damping has the same unit.

    Cost of a block: ``R (n^2 + M m^2)`` flops for an update with R rows and M
    backpropagated vectors, ``n^3 + m^3`` for a refresh, ``2 n m (n + m)`` for
    `precondition`.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671.

    Examples
    --------
    The functions return a new state, and change nothing:

    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> x, g = rng.normal(size=(32, 3)), rng.normal(size=(32, 2))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> network = kc.Network(
    ...     {"fc": kc.Block(layer, kc.Kronecker())},
    ...     conventions=kc.Conventions(reduction="sum", sources="sum"),
    ... )
    >>> empty = network.empty()
    >>> state = network.update(empty, {"fc": kc.Batch(x, g)}, decay=0.95)
    >>> state = network.refresh(state, damping=1e-2)
    >>> gradient = {"fc": {"weight": x.T @ g / 32, "bias": g.mean(axis=0)}}
    >>> direction = network.precondition(state, gradient)
    >>> direction["fc"]["bias"].shape
    (2,)
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        *,
        conventions: Conventions,
        damping_rule: DampingRule = "factored",
        sharing: Sharing | None = None,
        averaging: Averaging | None = None,
        refreshing: Refreshing | None = None,
        precision: Precision | None = None,
        max_patch_elements: int | None = None,
    ) -> None:
        constraints.require_options(
            locals(),
            blocks=constraints.mapping_to(constraints.instance_of(Block)),
            conventions=constraints.instance_of(Conventions),
            damping_rule=constraints.one_of(*get_args(DampingRule)),
            sharing=constraints.optional(constraints.instance_of(Sharing)),
            averaging=constraints.optional(constraints.instance_of(Averaging)),
            refreshing=constraints.optional(constraints.instance_of(Refreshing)),
            precision=constraints.optional(constraints.instance_of(Precision)),
            max_patch_elements=constraints.optional(constraints.COUNT),
        )
        sharing = sharing or Sharing()
        self.chains = Chains(sharing.chains, blocks)
        self.blocks = self.chains.blocks
        self.conventions = conventions
        self.damping_rule: DampingRule = damping_rule
        self.sharing = sharing
        self.averaging = averaging or Averaging()
        self.refreshing = refreshing or Refreshing()
        self.precision = precision or Precision()
        self.solving = {
            name: self._solving_of(block) for name, block in self.blocks.items()
        }
        self.max_patch_elements = max_patch_elements
        self.shared_factors = SharedFactors(sharing.factors, self.blocks)
        self.tied_weights = TiedWeights(sharing.weights, self.blocks)
        self._taken = {n: self.shared_factors.taken_by(n) for n in self.blocks}
        self._calls = {name: ProductCall(name) for name in VECTOR_PRODUCTS}
        decomposes = "eigenbasis" in self.refreshing.factorizations
        self._shares_bases = bool(self.shared_factors.pairs) and (
            damping_rule == "exact" or decomposes
        )
        if self.chains.of and self.refreshing.damping_scaling != "none":
            raise errors.UnsupportedError(
                "A chain has no curvature without damping that a damping could be relative "
                f"to. Take damping_scaling='none', got {self.refreshing.damping_scaling!r}."
            )
        self._parts = (
            tuple(self.blocks.items()),
            conventions,
            damping_rule,
            tuple(sharing.factors.items()),
            tuple(sharing.weights.items()),
            self.averaging,
            self.refreshing,
            self.precision,
            max_patch_elements,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Network) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

    def __repr__(self) -> str:
        lines = [f"Network({len(self.blocks)} blocks, {self.conventions},"]
        for name, block in [*self.blocks.items()][:12]:
            n, m = block.layer.matrix_shape
            kind = f"{block.layer.kind} {n} x {m}"
            lines.append(f"  {name}: {kind}, {block.approximation.name}")
        if len(self.blocks) > 12:
            lines.append(f"  and {len(self.blocks) - 12} more")
        return "\n".join([*lines, f"  damping_rule={self.damping_rule!r})"])

    def empty(self) -> NetworkState:
        """Return a state without arrays, for before the first batch."""
        return NetworkState({name: BlockState() for name in self.blocks})

    def initial(
        self, like: Array, /, *, damping: Scalar, executor: Executor = plain
    ) -> NetworkState:
        """Return an initial state in the structure that every stage returns.

        For function compilers, which need the same structure before and after a stage:
        counts are 0-d arrays, and operators are placeholders.  Products are zero before
        the first refresh.

        Parameters
        ----------
        like : array
            Array whose library, device and dtype the state takes.
        damping : float, 0-d array or mapping of str to these
            Damping ``lam``.
        executor : Executor
            How the loop over blocks is run in the refresh whose form is taken.

        Returns
        -------
        NetworkState
            State whose ``refreshes`` are zero.  No two of its arrays share memory, so that
            all of them may be donated.
        """
        xp = ns.namespace_of(like=like)
        device = ns.device_of(like)
        place: dict[str, Any] = {"dtype": xp.int32, "device": device}
        blocks: dict[str, BlockState] = {}
        for name, block in self.blocks.items():
            statistics = block.initial(like, precision=self.precision)
            of_block = damping[name] if isinstance(damping, Mapping) else damping
            counts = {
                count: xp.zeros((), **place)
                for count in ("updates", "age", "refreshes", "failures", "status")
            }
            blocks[name] = BlockState(
                statistics=map_structure(copied, statistics),
                damping=xp.asarray(of_block, dtype=statistics.dtype, device=device),
                basis_age=xp.full((), -1, **place),
                moments_missing=xp.zeros((), **place),
                **counts,
            )
        start = NetworkState(blocks)

        def refreshed() -> NetworkState:
            return self.refresh(
                start, damping=damping, check="status", executor=executor
            )

        form = backend_of(xp).placeholder(refreshed, device=device)
        return start.updated(
            {
                name: replaced(
                    blocks[name], operator=map_structure(copied, block.operator)
                )
                for name, block in form.blocks.items()
            }
        )

    def update(
        self,
        state: NetworkState,
        batches: Mapping[str, Any],
        /,
        *,
        decay: Scalar,
        check: Check = "raise",
        executor: Executor = plain,
    ) -> NetworkState:
        """Return the state after ``sum <- decay * sum + weight * C``, C of the batches.

        Parameters
        ----------
        state : NetworkState
            State to read; not modified.
        batches : mapping of str to Batch, GradientBatch or sequence of Batch
            Inputs and output gradients of each block's layer; omitted blocks are
            unchanged.  A sequence holds several uses of one layer in each example, which
            are treated as shared positions of one weight.
        decay : float or 0-d array
            Factor on the old statistics, in [0, 1].
        check : {"raise", "status"}
            ``"raise"`` raises if a batch is not finite in any block, and synchronizes with
            the device once.  ``"status"`` then sets flags and leaves all blocks unchanged.
        executor : Executor
            How the loop over blocks is run.

        Returns
        -------
        NetworkState
            State with the structure of `state`.

        Raises
        ------
        StateError
            For a state of other blocks, or of another process.
        UnknownBlockError
            For an unknown block name.
        ConventionError
            If only some uses of a tied weight, or only some layers of a chain, are given.
        ShapeError, DtypeError, MixedArraysError, DecayError
            For incompatible arguments, in either mode.
        NotFiniteError
            If rows are not finite (``check="raise"``); names the block and the argument.

        Notes
        -----
        ``R (n^2 + M m^2)`` flops per block for R rows; twice that if the backend has no
        symmetric rank-k update.

        References
        ----------
        Martens and Grosse (2015), arXiv:1503.05671, section 5.
        """
        if type(decay) is not float or not 0.0 <= decay <= 1.0:
            require_decay(decay)
        constraints.require_check(check)
        state = self._part_of(state, executor.share)
        try:
            tasks = self._update_tasks(state, batches, decay, check, executor)
        except Exception as error:
            executor.tell(error)
            raise
        statistics = executor(UPDATE, tasks)
        if check == "raise":
            require_finite_rows(statistics)
            good: Any = 1
        elif not statistics:
            return state
        else:
            statistics, good = _all_or_none(statistics, tasks)
        blocks: dict[str, BlockState] = {}
        for name, new in statistics.items():
            blocks[name] = after_update(state.blocks[name], new, good)
        return state.updated(blocks)

    def absorb(
        self,
        state: NetworkState,
        moments: Mapping[str, Statistics],
        /,
        *,
        decay: Scalar,
        executor: Executor = plain,
    ) -> NetworkState:
        """Return the state after an update with batches that came in parts.

        Equal to one `update` with the whole batch up to rounding, for any sizes of the
        parts.

        Parameters
        ----------
        state : NetworkState
            State to read; not modified.
        moments : mapping of str to Statistics
            Statistics of each part from `batch_moments`, added up by `Statistics.merged`.
        decay : float or 0-d array
            See `update`.
        executor : Executor
            How the loop over blocks is run.

        Returns
        -------
        NetworkState
            New state.

        Raises
        ------
        StateError
            For a state of other blocks, or of another process.
        UnknownBlockError
            For an unknown block name.
        """
        require_decay(decay)
        state = self._part_of(state, executor.share)
        try:
            tasks = self._absorb_tasks(state, moments, decay, executor)
        except Exception as error:
            executor.tell(error)
            raise
        statistics = executor(ABSORB, tasks)
        return state.updated(
            {n: after_update(state.blocks[n], s, 1) for n, s in statistics.items()}
        )

    def reset(self, state: NetworkState, name: str, /) -> NetworkState:
        """Return the state with one block as it was before its first batch.

        Parameters
        ----------
        state : NetworkState
            State to read; not modified.
        name : str
            Name of the block.

        Returns
        -------
        NetworkState
            State in which the block's sums and counts are zero.  Where counts are Python
            numbers the block has no statistics and no operator, and must be updated and
            refreshed before it preconditions.  Where they are arrays (`initial`), the
            structure stays the same, and products are zero until the next refresh.

        Raises
        ------
        UnknownBlockError
            For an unknown block name.
        """
        block, before = self.blocks[self.known(name)], state[name]
        if isinstance(before.updates, int) or before.statistics is None:
            return state.updated({name: BlockState()})
        empty = block.initial(before.statistics.like, precision=self.precision)
        counts = {
            field: getattr(before, field) * 0
            for field in (
                "updates",
                "age",
                "refreshes",
                "failures",
                "moments_missing",
                "status",
            )
        }
        after = replaced(
            before,
            statistics=map_structure(copied, empty),
            basis_age=before.basis_age * 0 - 1,
            **counts,
        )
        return state.updated({name: after})

    def rebase(
        self,
        state: NetworkState,
        /,
        *,
        moments: Any,
        names: Iterable[str] | None = None,
        check: Check = "raise",
        executor: Executor = plain,
    ) -> NetworkState:
        """Return the state with eigenbases recomputed from the current factors.

        For approximations with moments in a basis (`Eigen`, EKFAC).  Operators are
        unchanged until the next refresh.

        Parameters
        ----------
        state : NetworkState
            State to read; not modified.
        moments : {"kronecker", "carried", "zero"}
            How the second moments start in the new bases; see `kfac_core.Eigen.rebased`.
        names : iterable of str, optional
            Blocks to rebase; by default all that have bases and statistics.
        check : {"raise", "status"}
            ``"raise"`` raises if an eigendecomposition fails, and synchronizes with the
            device.  ``"status"`` then keeps the old bases and sets a flag.
        executor : Executor
            How the loop over blocks is run.

        Returns
        -------
        NetworkState
            State with the structure of `state`.

        Raises
        ------
        StateError
            For a state of other blocks, or of another process.
        UnknownBlockError, UnsupportedError, NotReadyError
            For a name that is no block, a block without bases, or without statistics.
        NotFiniteError, FactorizationError
            If no accurate basis was found for a factor (``check="raise"``).

        Notes
        -----
        About ``9 (n^3 + m^3)`` flops per block.
        """
        constraints.require_one_of("moments", moments, ("kronecker", "carried", "zero"))
        constraints.require_check(check)
        state = self._part_of(state, executor.share)
        if names is None:
            based = [
                name
                for name, block in self.blocks.items()
                if block.approximation.has_bases
                and state.blocks[name].statistics is not None
            ]
        else:
            constraints.require_range("names", names, constraints.NAMES)
            based = [self.known(name) for name in names]
        tasks: dict[str, tuple[Any, ...]] = {}
        for name in based:
            block = self.blocks[name]
            if not block.approximation.has_bases:
                raise errors.UnsupportedError(
                    f"Block {name!r} ({block.approximation.name}) has no bases; only Eigen "
                    "blocks have bases."
                )
            tasks[name] = (block, self._statistics_of(state, name), moments, check)
        blocks: dict[str, BlockState] = {}
        for name, statistics in executor(REBASE, tasks).items():
            before = state.blocks[name]
            flags = statistics.status if check == "status" else before.status * 0
            blocks[name] = replaced(
                before,
                statistics=statistics,
                basis_age=before.basis_age * 0,
                moments_missing=before.moments_missing * 0 + int(moments == "zero"),
                status=before.status | flags,
            )
        return state.updated(blocks)

    def refresh(
        self,
        state: NetworkState,
        /,
        *,
        damping: Scalar | Mapping[str, Scalar],
        names: Iterable[str] | None = None,
        check: Check = "raise",
        executor: Executor = plain,
    ) -> NetworkState:
        """Return the state with new operators, made from the current statistics.

        Parameters
        ----------
        state : NetworkState
            State to read; not modified.
        damping : float, 0-d array, or mapping of str to these
            Damping ``lam >= 0`` of the whole network, or of each block by name.
        names : iterable of str, optional
            Blocks to refresh; by default all that have statistics.
        check : {"raise", "status"}
            With ``"raise"``, a failed factorization goes through the fallback chain
            (working precision, then float64, then clipped eigenvalues) and raises if all
            fail, which synchronizes with the device a few times per block.  With
            ``"status"``, it sets a flag and the block keeps its previous operator.
        executor : Executor
            How the loop over blocks is run.

        Returns
        -------
        NetworkState
            State with the structure of `state`.

        Raises
        ------
        StateError
            For a state of other blocks, or of another process.
        UnknownBlockError
            For an unknown block name.
        NotReadyError
            For a block without statistics, or whose bases were never computed.
        DampingError
            For a damping that is negative or not finite.
        NotFiniteError, FactorizationError
            If a block that cannot be factorized has no previous operator, or exceeds the
            budget of consecutive failures (``check="raise"``).  Within the budget the
            block keeps its operator and counts a failure.

        Notes
        -----
        ``n^3 + m^3`` flops per block with inverses of two full factors.

        References
        ----------
        Martens and Grosse (2015), arXiv:1503.05671, sections 6.3 and 8.
        """
        constraints.require_check(check)
        state = self._part_of(state, executor.share)
        tasks = self._refresh_tasks(state, self.ready(state, names), damping, check)
        blocks: dict[str, BlockState] = {}
        if self._shares_bases:
            results = self._refreshed_with_bases(tasks, executor)
        else:
            results = executor(REFRESH, tasks)
        for name, refreshed in results.items():
            before = state.blocks[name]
            if isinstance(refreshed, errors.KFACError):
                failures = before.failures + 1
                if before.operator is None or failures > self.refreshing.failure_budget:
                    raise refreshed
                blocks[name] = replaced(before, failures=failures)
            elif check == "raise":
                blocks[name] = after_refresh(before, *refreshed)
            else:
                blocks[name] = after_refresh_in_status(before, *refreshed)
        return state.updated(blocks)

    def precondition(
        self,
        state: NetworkState,
        gradients: Mapping[str, Mapping[str, Any]],
        /,
        *,
        executor: Executor = plain,
    ) -> dict[str, dict[str, Any]]:
        """Return each block's damped inverse times its gradient.

        For a Kronecker-factored block this is ``A^-1 V G^-1 / S`` with damped factors.

        Parameters
        ----------
        state : NetworkState
            State to read; not modified.
        gradients : mapping of str to mapping of str to array
            Gradients of some or all blocks, by parameter, in the layer's layout.
        executor : Executor
            How the loop over blocks is run.

        Returns
        -------
        dict of str to dict of str to array
            Arrays with the same names, shapes, dtypes and devices.

        Raises
        ------
        StateError
            For a state of other blocks, or of another process.
        UnknownBlockError, NotReadyError
            For a name that is no block, or a block that was never refreshed.
        ConventionError
            If only some layers of a chain are given.
        ShapeError, DtypeError, MixedArraysError
            For gradients of incompatible shape, dtype, library or device.

        Notes
        -----
        ``2 n m (n + m)`` flops per block; never synchronizes with the device.

        References
        ----------
        Martens and Grosse (2015), arXiv:1503.05671, section 4.2.
        """
        return self.apply("multiply_inverse", state, gradients, executor=executor)

    def apply(
        self,
        product: str,
        state: NetworkState,
        vectors: Mapping[str, Mapping[str, Any]],
        /,
        *arguments: Any,
        executor: Executor = plain,
        **options: Any,
    ) -> dict[str, dict[str, Any]]:
        """Apply any product of `CurvatureOperator` to parameter-shaped vectors.

        Parameters
        ----------
        product : str
            The name of a method of `CurvatureOperator` that takes and returns a vector,
            such as ``"multiply_matpower"``.
        state : NetworkState
            State to read; not modified.
        vectors : mapping of str to mapping of str to array
            Vectors of some or all blocks, by parameter.  An embedding's weight may be
            `SparseRows`.
        *arguments, **options
            Arguments of the product besides the vector, such as an exponent.
        executor : Executor
            How the loop over blocks is run.

        Returns
        -------
        dict of str to dict of str to array
            Arrays in the same structure.

        Raises
        ------
        ConventionError
            For an unknown product, or if only some layers of a chain are given.
        KFACError
            See `precondition` and the product.
        """
        if type(product) is not str or product not in self._calls:
            constraints.require_one_of("product", product, VECTOR_PRODUCTS)
        if product == "multiply_matpower" and len(arguments) != 1:
            raise errors.ConventionError(
                f"Expected `multiply_matpower` with one exponent, got {shown(arguments)}: "
                "write apply('multiply_matpower', vectors, 0.5)."
            )
        if type(vectors) is not dict:
            constraints.require_kind(
                "vectors", vectors, Mapping, "a mapping of blocks to vectors"
            )
        # An operator of this process can be applied by any executor; the others refuse.
        share = state.share if executor.share is None else executor.share
        state = self._part_of(state, share)
        of_blocks = self.chains.vectors(vectors) if self.chains.of else vectors
        call = self._calls[product]
        if arguments or options:
            call = ProductCall(product, arguments, options)
        tasks: dict[str, tuple[Any, ...]] = {}
        for name, vector in of_blocks.items():
            operator = self.operator(state, name)
            tasks[name] = self.blocks[name], operator, vector, call
        products = executor(APPLY, tasks)
        for name, vector in products.items():
            refreshes = state.blocks[name].refreshes
            if not isinstance(refreshes, int):
                products[name] = _unless_new(refreshes, vector)
        return self.chains.by_layer(products) if self.chains.of else products

    def operator(self, state: NetworkState, name: str, /) -> CurvatureOperator:
        """Return a block's operator as of its last refresh.

        Raises
        ------
        UnknownBlockError
            For an unknown block name.
        NotReadyError
            Before the block's first refresh.
        """
        if type(name) is not str or name not in self.blocks:
            name = self.known(name)
        held = state.blocks[name]
        operator = held.operator
        if operator is None or (type(held.refreshes) is int and not held.refreshes):
            self._require_ready(state, name)
            raise errors.NotReadyError(
                f"Block {name!r} has no operator yet; call `refresh` first."
            )
        return operator

    def ready(
        self, state: NetworkState, names: Iterable[str] | None = None, /
    ) -> list[str]:
        """Return the names of blocks that can be refreshed, or raise `NotReadyError`.

        Parameters
        ----------
        state : NetworkState
            Current state.
        names : iterable of str, optional
            Names to check; by default all blocks that have statistics.

        Returns
        -------
        list of str
            Names of blocks that an operator can be made for.
        """
        if names is None:
            ready = [n for n, held in state.blocks.items() if held.statistics]
            if not ready:
                raise errors.NotReadyError(
                    "No block has statistics yet; call `update` first."
                )
        else:
            constraints.require_range("names", names, constraints.NAMES)
            ready = [self.known(name) for name in names]
        for name in ready:
            has_bases = self.blocks[name].approximation.has_bases
            if has_bases or state.blocks[name].statistics is None:
                self._require_ready(state, name)
        return ready

    def with_operators_of(
        self,
        state: NetworkState,
        made: NetworkState,
        started: NetworkState,
        /,
        *,
        names: Iterable[str],
    ) -> NetworkState:
        """Return a state with the operators of a state that was refreshed in parallel.

        Parameters
        ----------
        state : NetworkState
            Current state.
        made : NetworkState
            Result of `refresh` for `started`.
        started : NetworkState
            State when the refresh was started.
        names : iterable of str
            The blocks that were refreshed.

        Returns
        -------
        NetworkState
            State whose ages count the updates since `started`.
        """
        blocks: dict[str, BlockState] = {}
        for name in names:
            held, new = state.blocks[name], made.blocks[name]
            blocks[name] = replaced(
                held,
                operator=new.operator,
                damping=new.damping,
                age=new.age + held.updates - started.blocks[name].updates,
                refreshes=new.refreshes,
                failures=new.failures,
            )
        return state.updated(blocks)

    def with_options(
        self,
        *,
        damping_rule: DampingRule,
        averaging: Averaging,
        refreshing: Refreshing,
    ) -> Network:
        """Return the same network with other options."""
        return Network(
            self.chains.given,
            conventions=self.conventions,
            damping_rule=damping_rule,
            sharing=self.sharing,
            averaging=averaging,
            refreshing=refreshing,
            precision=self.precision,
            max_patch_elements=self.max_patch_elements,
        )

    def known(self, name: str, /) -> str:
        """Return the name of a block, or raise `UnknownBlockError`."""
        if type(name) is not str:
            constraints.require_kind("name", name, str, "the name of a block")
        if name in self.blocks:
            return name
        if name in self.tied_weights.uses:
            block = self.tied_weights.uses[name]
            raise errors.UnknownBlockError(
                f"{name!r} is a further use of the weight of block {block!r}, whose "
                "gradient, summed over the uses, is to be given."
            )
        if name in self.chains.of:
            raise errors.UnknownBlockError(
                f"{name!r} is a layer of the chain {self.chains.of[name]!r}, which has one "
                "damping and one operator: name the chain."
            )
        raise constraints.unknown_block(name, self.blocks)

    def block_of(self, name: str, /) -> str:
        """Return the name of a layer's block: its chain, or the layer itself."""
        return self.chains.of.get(name, name)

    def require_damping(self, damping: Scalar | Mapping[str, Scalar], /) -> None:
        """Raise `DampingError` for an invalid or missing damping of a block."""
        if not isinstance(damping, Mapping):
            require_set_damping(damping)
            return
        for name, value in damping.items():
            require_set_damping(value, name=f"damping[{self.known(name)!r}]")
        missing = sorted(set(self.blocks) - set(damping))
        if missing:
            raise errors.DampingError(
                f"Expected `damping` for every block, but {missing} have none."
            )

    def _part_of(
        self, state: NetworkState, share: tuple[int, int] | None
    ) -> NetworkState:
        """Return the state as the part of a process; raise for one of other blocks."""
        if state.blocks.keys() != self.blocks.keys():
            raise errors.StateError(
                f"Expected a state of the blocks {shown([*self.blocks])}, got one of "
                f"{shown([*state.blocks])}: it is that of another network."
            )
        return state if state.share == share else state.as_part(share)

    def _update_tasks(
        self,
        state: NetworkState,
        batches: Mapping[str, Any],
        decay: Scalar,
        check: Check,
        executor: Executor,
    ) -> dict[str, tuple[Any, ...]]:
        of_blocks = self._detached(batches)
        # Another process may have rows of a block that has none here.
        if executor.updates_all:
            of_blocks = {name: of_blocks.get(name) for name in self.blocks}
        weight, burn_in = self.averaging.weight, self.averaging.burn_in
        # The flags of all blocks are read together.
        common = UpdateOptions(
            self.conventions,
            decay,
            weight,
            frozenset(),
            check,
            self.max_patch_elements,
            deferred=True,
        )
        tasks: dict[str, tuple[Any, ...]] = {}
        for name, batch in of_blocks.items():
            before, options = state.blocks[name], common
            statistics = before.statistics
            if statistics is None and not (executor.updates_all and is_empty(batch)):
                statistics = self._first_statistics(name, batch)
            if self._taken[name]:
                options = replaced(options, skip=self._taken[name])
            if burn_in:
                # The first updates have equal weights.
                burning = before.updates < burn_in
                options = replaced(
                    options,
                    decay=_one_where(burning, decay, statistics),
                    weight=_one_where(burning, weight, statistics),
                )
            tasks[name] = self.blocks[name], statistics, batch, options
        return tasks

    def _absorb_tasks(
        self,
        state: NetworkState,
        moments: Mapping[str, Statistics],
        decay: Scalar,
        executor: Executor,
    ) -> dict[str, tuple[Any, ...]]:
        constraints.require_kind(
            "moments", moments, Mapping, "a mapping of blocks to statistics"
        )
        of_blocks: dict[str, Any] = {}
        for name, part in moments.items():
            what = "statistics, as `batch_moments` returns them"
            constraints.require_kind(f"moments[{name!r}]", part, Statistics, what)
            of_blocks[self.known(name)] = part
        if executor.updates_all:
            of_blocks = {name: of_blocks.get(name) for name in self.blocks}
        tasks: dict[str, tuple[Any, ...]] = {}
        for name, part in of_blocks.items():
            block, before = self.blocks[name], state.blocks[name]
            old = before.statistics
            if part is not None:
                if old is None:
                    old = block.initial(part.like, precision=self.precision)
                _require_moments(name, part, old)
            burning = before.updates < self.averaging.burn_in
            coefficients = (
                _one_where(burning, decay, old),
                _one_where(burning, self.averaging.weight, old),
            )
            tasks[name] = (block, old, part, *coefficients)
        return tasks

    def _detached(self, batches: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batches of each block, detached from gradient graphs."""
        if type(batches) is not dict:
            constraints.require_kind(
                "batches", batches, Mapping, "a mapping of blocks to batches"
            )
        uses = self.tied_weights.uses
        grouped = self.tied_weights.grouped(batches) if uses else batches
        grouped = self.chains.batches(grouped) if self.chains.of else grouped
        given: dict[str, Any] = {}
        for name, batch in grouped.items():
            given[name if name in self.blocks else self.known(name)] = detached(
                batch, name
            )
        return given

    def _first_statistics(self, name: str, batch: Any) -> Statistics:
        """Return zero statistics of a block, in its first batch's library."""
        block = self.blocks[name]
        try:
            # Making rows validates the batch; the first chunk of examples is enough.
            parts = block.row_parts(batch, max_patch_elements=self.max_patch_elements)
            return block.initial(next(iter(parts)).like, precision=self.precision)
        except errors.KFACError as error:
            raise type(error)(f"Block {name!r}: {error}") from None

    def _statistics_of(self, state: NetworkState, name: str) -> Statistics:
        statistics = state.blocks[name].statistics
        if statistics is None:
            raise errors.NotReadyError(
                f"Block {name!r} has no statistics yet; call `update` first."
            )
        return statistics

    def _require_ready(self, state: NetworkState, name: str) -> None:
        """Raise `NotReadyError` if a block has nothing to make an operator from."""
        self._statistics_of(state, name)
        if not self.blocks[name].approximation.has_bases:
            return
        held = state.blocks[name]
        # Counts that are arrays may be traced, and their values cannot be read.
        never = type(held.basis_age) is int and held.basis_age < 0
        missing = type(held.moments_missing) is int and held.moments_missing
        if never or missing:
            raise errors.NotReadyError(
                f"Block {name!r} has no moments in the bases of its factors yet; call "
                f"{'`rebase`' if never else '`update`'} first."
            )

    def _refresh_tasks(
        self,
        state: NetworkState,
        names: Iterable[str],
        damping: Scalar | Mapping[str, Scalar],
        check: Check,
    ) -> dict[str, tuple[Any, ...]]:
        of_blocks = type(damping) is not float and isinstance(damping, Mapping)
        options = self._refresh_options(check, 0.0 if of_blocks else damping)
        tasks: dict[str, tuple[Any, ...]] = {}
        for name in names:
            statistics: Any = state.blocks[name].statistics
            if self._taken[name]:
                everything = {n: block.statistics for n, block in state.blocks.items()}
                statistics = self.shared_factors.completed(name, statistics, everything)
            lam: Any = damping[name] if of_blocks else damping
            if isinstance(lam, np.generic) and not is_numpy_array(statistics.like):
                # A number, which no array of another library would be chosen against.
                lam = float(lam)
            solving = self.solving[name]
            if lam is not options.damping or solving != options.solving:
                options = replaced(options, damping=lam, solving=solving)
            tasks[name] = self.blocks[name], statistics, options
        return tasks

    def _refreshed_with_bases(self, tasks: Tasks, executor: Executor) -> dict[str, Any]:
        """Return the operators of tasks; blocks that take a factor take its basis too."""
        takers = [name for name in tasks if self._taken[name]]
        first = {name: task for name, task in tasks.items() if name not in takers}
        results = executor(REFRESH, first)
        second: dict[str, tuple[Any, ...]] = {}
        for name in takers:
            block, statistics, options = tasks[name]
            bases = self.shared_factors.bases(name, results)
            second[name] = block, replaced(statistics, bases=bases), options
        results |= executor(REFRESH, second)
        return {name: results[name] for name in tasks}

    def _solving_of(self, block: Block) -> Solving:
        """Return how a block is solved: only full factors have a choice."""
        full = block.approximation.factor_shapes(block.layer)
        if not full or self.damping_rule == "exact":
            return "inverse"
        return self.refreshing.solving

    def _refresh_options(self, check: Check, damping: Any) -> RefreshOptions:
        """Return what all blocks of a refresh have in common."""
        return RefreshOptions(
            damping=damping,
            rule=self.damping_rule,
            factorizations=self.refreshing.factorizations,
            check=check,
            debias=self.averaging.debias,
            damping_scaling=self.refreshing.damping_scaling,
            least_shift=self.refreshing.least_shift,
            keep_matrices=self.refreshing.keep_matrices,
            solving=self.refreshing.solving,
            precision=self.precision,
        )


def _all_or_none(
    statistics: Mapping[str, Statistics], tasks: Tasks
) -> tuple[dict[str, Statistics], Array]:
    """Return new statistics if no block is flagged, else old ones, and whether none is."""
    xp = next(iter(statistics.values())).namespace
    good = xp.all(xp.stack([new.status for new in statistics.values()]) == 0)
    old = {name: tasks[name][1] for name in statistics if tasks[name][1] is not None}
    chosen = choose(good, {name: statistics[name] for name in old}, old, xp=xp)
    everything = {**statistics, **chosen}
    return {
        name: replaced(everything[name], status=new.status)
        for name, new in statistics.items()
    }, good


def _one_where(burning: Any, value: Scalar, statistics: Statistics | None) -> Scalar:
    """Return 1 during burn-in, else the value."""
    if isinstance(burning, bool) or statistics is None:
        return 1.0 if burning else value
    xp, like = statistics.namespace, statistics.like
    value = ns.as_scalar(xp, value, like.dtype, "decay")
    return xp.where(burning, xp.ones_like(like), value * xp.ones_like(like))


def _require_moments(name: str, given: Statistics, old: Statistics) -> None:
    """Raise unless the statistics of a batch are of the form of a block's."""
    ns.namespace_of(moments=given.like, statistics=old.like)
    found, expected = (
        {path: tuple(x.shape) for path, x in leaves(part.averages)}
        for part in (given, old)
    )
    if found != expected:
        raise errors.ShapeError(
            f"Expected `moments[{name!r}]` to hold arrays of shapes {expected}, got "
            f"{found}."
        )


def _unless_new(refreshes: Array, vector: dict[str, Any]) -> dict[str, Any]:
    """Return a product, or zero for a traced state that was never refreshed."""
    xp, ready = ns.own_namespace(refreshes), refreshes > 0
    return map_structure(lambda x: xp.where(ready, x, xp.zeros_like(x)), vector)
