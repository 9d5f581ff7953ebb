"""The curvature of a network: a description, a state, and pure functions of both.

A `Network` describes blocks by name, conventions and coupling, without arrays.
`Network.update` and `Network.refresh` take a `NetworkState` and return a new one;
`Network.precondition` returns products.  Each is a loop of a stage over blocks.

A state is a pytree: ``jax.jit(network.update)`` works.  Traced code cannot raise: with
``check="status"`` a stage reads no value, keeps the old state of a block that failed, and
leaves flags in ``state[name].status``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np
from array_api_compat import is_numpy_array

from kfac_core import constraints, errors, stages
from kfac_core import state as states
from kfac_core.approximations.approximation import MomentStart
from kfac_core.approximations.options import UpdateOptions
from kfac_core.array import Array, Check, Scalar, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.array.precision import Precision
from kfac_core.block import BatchLike, Block, Vector
from kfac_core.conventions import Conventions
from kfac_core.damping import DampingRule
from kfac_core.factors.average import require_decay
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.feeding import require_finite_rows
from kfac_core.linalg.factorizations import Solving
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.options import RANGES, Averaging, Coupling, Refreshing
from kfac_core.sharing.layers import NamedLayers
from kfac_core.stages import Executor, LazyMoments, ProductCall, Task, plain
from kfac_core.state import BlockState, NetworkState

_OPTIONS = {
    "blocks": constraints.mapping_to(constraints.instance_of(Block)),
    "conventions": constraints.instance_of(Conventions),
    "damping_rule": RANGES["rule"],
    "coupling": constraints.optional(constraints.instance_of(Coupling)),
    "averaging": constraints.optional(constraints.instance_of(Averaging)),
    "refreshing": constraints.optional(constraints.instance_of(Refreshing)),
    "precision": RANGES["precision"],
    "max_patch_elements": RANGES["max_patch_elements"],
}


class Network:
    r"""Description of a network's blocks, with pure functions of its state.

    `update` computes ``sum <- decay * sum + weight * C`` with the statistics C of a batch,
    `refresh` makes operators, and `precondition` applies them; see `Estimator` for the
    formulas, units and costs.  Every function takes a `NetworkState`, modifies none of its
    arguments, and raises `StateError` for a state of other blocks or of another process.
    A network holds no arrays, is hashable, and equals a network of equal parts.

    Parameters
    ----------
    conventions : Conventions
        Scaling of the output gradients: loss reduction, and sum or mean over
        backpropagated vectors.
    max_patch_elements : int, optional
        See `Execution`.
    blocks, damping_rule, coupling, averaging, refreshing, precision
        See `Estimator`.

    Raises
    ------
    ConventionError, UnknownBlockError, UnsupportedError
        For options out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> x, g = rng.normal(size=(32, 3)), rng.normal(size=(32, 2))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> network = kc.Network(
    ...     {"fc": kc.Block(layer, kc.Kronecker())},
    ...     conventions=kc.Conventions(reduction="sum", sources="sum"),
    ... )
    >>> state = network.update(network.empty(), {"fc": kc.Batch(x, g)}, decay=0.95)
    >>> state = network.refresh(state, damping=1e-2)
    >>> gradient = {"fc": {"weight": x.T @ g / 32, "bias": g.mean(axis=0)}}
    >>> network.precondition(state, gradient)["fc"]["bias"].shape
    (2,)
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        *,
        conventions: Conventions,
        damping_rule: DampingRule = "factored",
        coupling: Coupling | None = None,
        averaging: Averaging | None = None,
        refreshing: Refreshing | None = None,
        precision: Precision | None = None,
        max_patch_elements: int | None = None,
    ) -> None:
        constraints.require_options(locals(), **_OPTIONS)
        self.layers = NamedLayers(blocks, coupling or Coupling())
        self.blocks = self.layers.blocks
        self.conventions = conventions
        self.damping_rule: DampingRule = damping_rule
        self.coupling = coupling or Coupling()
        self.averaging = averaging or Averaging()
        self.refreshing = refreshing or Refreshing()
        self.precision = precision or Precision()
        self.max_patch_elements = max_patch_elements
        self.shared_factors = self.layers.factors
        # Computed once, since every update and refresh asks for them.
        self._taken = {n: self.shared_factors.taken_by(n) for n in self.blocks}
        self._solving = {n: self._solving_of(block) for n, block in self.blocks.items()}
        if self.layers.has_chains and self.refreshing.damping_scaling != "none":
            raise errors.UnsupportedError(
                "A relative damping needs the undamped curvature, which a chain does "
                "not have. Take damping_scaling='none', got "
                f"{self.refreshing.damping_scaling!r}."
            )
        # Read the flags of all blocks together, in one synchronization with the device.
        self._update_options = UpdateOptions(
            conventions,
            decay=1.0,
            weight=self.averaging.weight,
            max_patch_elements=max_patch_elements,
            deferred=True,
        )
        self._refresh_options = self.refreshing.options(
            rule=damping_rule, debias=self.averaging.debias, precision=self.precision
        )
        options = [getattr(self, name) for name in _OPTIONS if name != "blocks"]
        # `jax.jit` caches by equality, so equal networks must compare equal.
        self._parts = (tuple(self.blocks.items()), *options)

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

    def with_options(self, **changes: Any) -> Network:
        """Return the same blocks with other options."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        return Network(**(options | {"blocks": self.layers.by_layer} | changes))

    def empty(self) -> NetworkState:
        """Return a state without arrays, for before the first batch."""
        return NetworkState({name: BlockState() for name in self.blocks})

    def initial(
        self, like: Array, /, *, damping: Scalar, executor: Executor = plain
    ) -> NetworkState:
        """Return an initial state in the structure that every stage returns.

        For function compilers: counts are 0-d arrays, operators are placeholders, and
        products are zero before the first refresh.

        Parameters
        ----------
        like : array
            Array whose library, device and dtype the state takes.
        damping, executor
            See `refresh`.

        Returns
        -------
        NetworkState
            State of which no two arrays share memory, so that all may be donated.
        """
        start = states.initial_state(self.blocks, like, damping, self.precision)

        def refreshed() -> NetworkState:
            return self.refresh(
                start, damping=damping, check="status", executor=executor
            )

        xp, device = ns.namespace_of(like=like), ns.device_of(like)
        # A compiled step needs a state whose form never changes.  JAX finds the form of
        # an operator by tracing a refresh, without computing one.
        form: NetworkState = backend_of(xp).placeholder(refreshed, device=device)
        after: dict[str, BlockState] = {}
        for name, before in start.blocks.items():
            operator = map_structure(states.copied, form.blocks[name].operator)
            after[name] = replaced(before, operator=operator)
        return start.updated(after)

    def update(
        self,
        state: NetworkState,
        batches: Mapping[str, BatchLike],
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
            State to read.
        batches, check
            See `Estimator.update`, as the errors.
        decay : float or 0-d array
            Factor on the old statistics, in [0, 1].
        executor : Executor
            How the loop over blocks is run; by default in turn.

        Returns
        -------
        NetworkState
            State with the structure of `state`.
        """
        require_decay(decay)
        constraints.require_check(check)
        state = state.part_of(self.blocks, executor.share)
        common = replaced(self._update_options, check=check, decay=decay)
        tasks: dict[str, Task] = {}
        try:
            by_block = executor.to_update(self.layers.batches(batches), self.blocks)
            for name, batch in by_block.items():
                before, options = state.blocks[name], common
                statistics = before.statistics
                if statistics is None and not executor.updates_all:
                    statistics = self.blocks[name].first_statistics(
                        batch,
                        precision=self.precision,
                        max_patch_elements=self.max_patch_elements,
                        name=name,
                    )
                if self._taken[name]:
                    options = replaced(options, skip=self._taken[name])
                if self.averaging.burn_in:
                    now = states.coefficients(before, statistics, self.averaging, decay)
                    options = replaced(options, decay=now[0], weight=now[1])
                tasks[name] = self.blocks[name], statistics, batch, options
        except Exception as error:
            executor.tell(error)
        # Nothing of `state` has changed so far.  What raises below leaves it as it was.
        updated, good = executor(stages.UPDATE, tasks), 1
        if check == "raise":
            require_finite_rows(updated)
        elif updated:
            old = {name: task[1] for name, task in tasks.items()}
            # A batch counts in all blocks or in none, so that they describe the same
            # data.
            updated, good = states.all_or_none(updated, old)
        return states.after_updates(state, updated, good)

    def absorb(
        self,
        state: NetworkState,
        moments: Mapping[str, Statistics | LazyMoments],
        /,
        *,
        decay: Scalar,
        executor: Executor = plain,
    ) -> NetworkState:
        """Return the state after an update with merged statistics of a batch in parts.

        Parameters
        ----------
        state, decay, executor
            See `update`.
        moments
            See `Estimator.absorb`, as the errors.
        """
        state = state.part_of(self.blocks, executor.share)
        tasks: dict[str, Task] = {}
        try:
            by_block = executor.to_update(self.layers.moments(moments), self.blocks)
            for name, part in by_block.items():
                block, before = self.blocks[name], state.blocks[name]
                old = before.statistics
                # Bases of another process come while the executor absorbs.
                if callable(part) and not (old is not None and old.lacks_bases):
                    part = part(old)
                if part is not None and not callable(part):
                    like = part.like if old is None else old.like
                    empty = block.initial(like, precision=self.precision)
                    # What a process keeps may be packed, or no sums at all.
                    states.require_same_form(name, part, empty)
                    old = old or empty
                now = states.coefficients(before, old, self.averaging, decay)
                tasks[name] = block, old, part, *now
        except Exception as error:
            executor.tell(error)
        return states.after_updates(state, executor(stages.ABSORB, tasks), 1)

    def reset(self, state: NetworkState, name: str, /) -> NetworkState:
        """Return the state with one block as it was before its first batch.

        Where counts are arrays (`initial`), the structure stays the same, and products are
        zero until the next refresh.
        """
        block, before = self.blocks[self.layers.known(name)], state[name]
        return state.updated({name: states.reset_state(block, before, self.precision)})

    def rebase(
        self,
        state: NetworkState,
        /,
        *,
        moments: MomentStart,
        names: Iterable[str] | None = None,
        check: Check = "raise",
        executor: Executor = plain,
    ) -> NetworkState:
        """Return the state with eigenbases recomputed from the current factors.

        Parameters
        ----------
        state, executor
            See `update`.
        moments, names, check
            See `Estimator.rebase`, as the errors.
        """
        constraints.require_one_of("moments", moments, get_args(MomentStart))
        state = state.part_of(self.blocks, executor.share)
        with_bases = [n for n, b in self.blocks.items() if b.approximation.has_bases]
        if names is None:
            names = [n for n in with_bases if state.blocks[n].statistics is not None]
        tasks: dict[str, Task] = {}
        for name in self.layers.known_names(names):
            block = self.blocks[name]
            if name not in with_bases:
                raise errors.UnsupportedError(
                    f"Block {name!r} ({block.approximation.name}) has no bases; only EKFAC "
                    "blocks have bases."
                )
            statistics = state.blocks[name].known_statistics(name)
            tasks[name] = block, statistics, moments, check
        after: dict[str, BlockState] = {}
        for name, statistics in executor(stages.REBASE, tasks).items():
            after[name] = states.after_rebase(
                state.blocks[name],
                statistics,
                missing=moments == "zero",
                flagged=check == "status",
            )
        return state.updated(after)

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
        state, executor
            See `update`.
        damping : float, 0-d array, or mapping of str to these
            Damping ``lam >= 0`` of all blocks, or of each block by name.
        names, check
            See `Estimator.refresh`, as the errors.
        """
        constraints.require_check(check)
        state = state.part_of(self.blocks, executor.share)
        # Numbers first: `isinstance` of an abstract class takes microseconds.
        is_one = isinstance(damping, ns.NUMBER) or not isinstance(damping, Mapping)
        dampings: Any = dict.fromkeys(self.blocks, damping) if is_one else damping
        options = self._refresh_options
        tasks: dict[str, Task] = {}
        for name in self.ready(state, names):
            lam: Any = dampings[name]
            statistics: Any = state.blocks[name].statistics
            if self._taken[name]:
                statistics = self.shared_factors.completed(name, state.blocks)
            if isinstance(lam, np.generic) and not is_numpy_array(statistics.like):
                # A Python number, since an array of another library could not be combined.
                lam = float(lam)
            solving = self._solving[name]
            # Blocks of equal damping share one options object, which stacks then
            # recognize at once.
            if lam is not options.damping or solving != options.solving:
                options = replaced(options, damping=lam, solving=solving, check=check)
            tasks[name] = self.blocks[name], statistics, options
        if self.shared_factors.pairs:
            run = functools.partial(executor, stages.REFRESH)
            results = self.shared_factors.refreshed(tasks, run)
        else:
            results = executor(stages.REFRESH, tasks)
        budget = self.refreshing.failure_budget
        return states.after_refreshes(state, results, check=check, budget=budget)

    def precondition(
        self,
        state: NetworkState,
        gradients: Vector,
        /,
        *,
        executor: Executor = plain,
    ) -> dict[str, dict[str, Array]]:
        """Return each block's damped inverse times its gradient; see `apply`."""
        return self.apply("multiply_inverse", state, gradients, executor=executor)

    def apply(
        self,
        product: str,
        state: NetworkState,
        vectors: Vector,
        /,
        *arguments: object,
        executor: Executor = plain,
        **options: object,
    ) -> dict[str, dict[str, Array]]:
        """Apply any product of `CurvatureOperator` to parameter-shaped vectors.

        Parameters
        ----------
        state, executor
            See `update`.
        product, vectors, *arguments, **options
            See `Estimator.apply`, as the result and the errors.
        """
        # Any executor applies the operators of this process; those of others raise.
        share = state.share if executor.share is None else executor.share
        state = state.part_of(self.blocks, share)
        tasks: dict[str, Task] = {}
        is_viewed = type(vectors) is stages.HostViews and product == "multiply_inverse"
        try:
            call = ProductCall.of(product, arguments, options)
            for name, vector in self.layers.vectors(vectors).items():
                operator = self.operator(state, name)
                tasks[name] = self.blocks[name], operator, vector, call
        except Exception as error:
            executor.tell(error, product=True)
        products: Any
        if is_viewed:
            bound = executor(stages.INVERSE_OF_VIEWS, tasks)
            products = stages.HostViews({n: parts for n, (parts, _) in bound.items()})
            products.size = sum(float(size) for _, size in bound.values())
        else:
            products = executor(stages.APPLY, tasks)
        for name, vector in products.items():
            # A state of `initial` holds a placeholder until its first good refresh.  A
            # traced count cannot raise, so the products are zero until then.
            if type(refreshes := state.blocks[name].refreshes) is not int:
                products[name] = states.zero_unless(refreshes > 0, vector)
        return self.layers.products(products) if self.layers.has_chains else products

    def operator(self, state: NetworkState, name: str, /) -> CurvatureOperator:
        """Return a block's operator as of its last refresh; see `Estimator.operator`."""
        if type(name) is not str or name not in self.blocks:
            name = self.layers.known(name)
        block_state = state.blocks[name]
        operator, refreshes = block_state.operator, block_state.refreshes
        if operator is None or (type(refreshes) is int and not refreshes):
            has_bases = self.blocks[name].approximation.has_bases
            block_state.require_ready(name, has_bases=has_bases)
            raise errors.NotReadyError(
                f"Block {name!r} has no operator yet; call `refresh` first."
            )
        return operator

    def ready(
        self, state: NetworkState, names: Iterable[str] | None = None, /
    ) -> list[str]:
        """Return the blocks that can be refreshed, by default all with statistics."""
        if names is None:
            names = [n for n, b in state.blocks.items() if b.statistics is not None]
            if not names:
                raise errors.NotReadyError(
                    "No block has statistics yet; call `update` first."
                )
        else:
            names = self.layers.known_names(names)
        for name in names:
            has_bases = self.blocks[name].approximation.has_bases
            state.blocks[name].require_ready(name, has_bases=has_bases)
        return names

    def _solving_of(self, block: Block) -> Solving:
        """Return how a block is solved: only full factors have a choice."""
        full = block.approximation.factor_shapes(block.layer)
        # Only full factors have triangles; the exact rule divides in the eigenbasis.
        if not full or self.damping_rule == "exact":
            return "inverse"
        return self.refreshing.solving
