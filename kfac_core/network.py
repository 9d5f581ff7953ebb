"""The curvature of a network: a description, a state, and pure functions of both.

A `Network` describes blocks by name, conventions and sharing, without arrays.  A
`NetworkState` holds statistics and operators as one structure of arrays.
`Network.update` and `Network.refresh` take a state and return a new one;
`Network.precondition` returns products.  Each is a loop over blocks.

An *executor* runs the loop.  `plain` defines the result; those in `kfac_core.execution`
compute the same in stacks of equal blocks or on threads.

A state is a pytree: ``jax.jit(network.update)`` works.  Traced code cannot raise, so each
stage takes ``check``.  With ``"raise"`` it reads the flags once and raises.  With
``"status"`` it reads no value, keeps the old state of a block that failed, and leaves the
flags in ``state[name].status``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, get_args

import numpy as np
from array_api_compat import is_numpy_array

from kfac_core.array.backend import Array, backend_of
from kfac_core.array.choice import choose
from kfac_core.array.finite import is_plain
from kfac_core.array.namespaces import (
    Scalar,
    as_scalar,
    cast,
    device_of,
    namespace_of,
    own_namespace,
)
from kfac_core.array.precision import Precision
from kfac_core.array.status import Check
from kfac_core.array.structure import (
    array_fields,
    combinable,
    leaves,
    map_structure,
    replaced,
    structure,
)
from kfac_core.block import (
    AbsorbBlock,
    Block,
    Product,
    Rebase,
    RefreshBlock,
    UpdateBlock,
)
from kfac_core.constraints import (
    COUNT,
    NAMES,
    instance_of,
    mapping_to,
    one_of,
    optional,
    require_check,
    require_kind,
    require_one_of,
    require_options,
    require_range,
    shown,
    unknown_block,
)
from kfac_core.conventions import Conventions
from kfac_core.damping import DampingRule, require_damping
from kfac_core.errors import (
    DampingError,
    KFACError,
    NotReadyError,
    ShapeError,
    StateError,
    UnknownBlockError,
    UnsupportedError,
)
from kfac_core.factors.average import require_decay
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.feeding import detached, is_empty, require_finite_rows
from kfac_core.linalg.factorizations import Solving
from kfac_core.operators.operator import VECTOR_PRODUCTS, CurvatureOperator
from kfac_core.options import Averaging, Refreshing, Sharing
from kfac_core.sharing.chains import Chains
from kfac_core.sharing.shared_factors import SharedFactors
from kfac_core.sharing.tied_weights import TiedWeights

__all__ = ["BlockState", "Executor", "Network", "NetworkState", "plain"]

Count: TypeAlias = Any
"""An int, or a 0-d array of int32 in a state that is traced by a function compiler."""

Tasks: TypeAlias = Mapping[str, tuple[Any, ...]]
"""For each name, the block and the further arguments of a function of one block."""


class Executor(Protocol):
    """Runs a function of one block for several blocks.

    ``executor(function, tasks)`` returns, by name, what ``function(name, *task)`` returns
    for each task, up to rounding.  Executors differ in how: as stacks, on threads, or in
    another library.

    An executor with a true attribute ``updates_all`` is given a task for every block at
    each update, with None for statistics and batch where there are none, and may return
    only some of them.  One of several processes has an attribute ``share``, that of the
    states that it takes and makes; see `NetworkState`; and a method ``tell``, which raises
    what one process cannot begin a stage for on all of them.
    """

    def __call__(self, function: Callable[..., Any], tasks: Tasks, /) -> dict[str, Any]:
        """Return the function of each task, by name."""


@contextmanager
def _told(executor: Executor, stage: str, state: NetworkState) -> Iterator[None]:
    """Tell the other processes of a stage what is raised before it on this one."""
    try:
        yield
    except Exception as error:
        tell = getattr(executor, "tell", None)
        if tell is not None:
            held = {name: block.statistics for name, block in state.blocks.items()}
            tell(stage, held, error)
        raise


def plain(function: Callable[..., Any], tasks: Tasks, /) -> dict[str, Any]:
    """Run a function of one block for each block in turn.

    Parameters
    ----------
    function : callable
        Takes a name, a block and arguments.
    tasks : mapping of str to tuple
        For each name, the block and its arguments.

    Returns
    -------
    dict of str to object
        Results of the function, by name.

    Raises
    ------
    KFACError
        Errors of the function, with the name of the block added.
    """
    found: dict[str, Any] = {}
    for name, task in tasks.items():
        try:
            found[name] = function(name, *task)
        except KFACError as error:
            error.args = (f"Block {name!r}: {error}", *error.args[1:])
            raise
    return found


@structure()
class BlockState:
    """Statistics, operator and counts of one block.

    Attributes
    ----------
    statistics : Statistics or None
        Running sums, and the bases of EKFAC blocks; None before the first update.
    operator : CurvatureOperator or None
        Operator of the last refresh; None before the first.
    damping : float, 0-d array or None
        Damping that the operator was made with.
    updates, age, refreshes, failures : int or 0-d array of int32
        Number of updates, of updates since the operator was made, of refreshes, and of
        consecutive failed refreshes.
    basis_age : int or 0-d array of int32
        Number of updates since the bases were computed; -1 before that.
    moments_missing : int or 0-d array of int32
        1 if the bases were computed with zero moments and no update came since, else 0.
    status : int or 0-d array of int32
        `kfac_core.Status` flags of the last update and refresh.
    """

    statistics: Statistics | None = None
    operator: CurvatureOperator | None = None
    damping: Scalar | None = None
    updates: Count = 0
    age: Count = 0
    refreshes: Count = 0
    failures: Count = 0
    basis_age: Count = -1
    moments_missing: Count = 0
    status: Count = 0


@structure(static=("share",))
class NetworkState:
    """Statistics and operators of all blocks, as one structure of arrays.

    Attributes
    ----------
    blocks : dict of str to BlockState
        States by name of the block.
    share : tuple of int or None
        Rank and number of the processes whose part this is; None where it is the state of
        all rows.  A part is of use to no other process, and to no other number of them.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> blocks = {"fc": kc.Block(layer, kc.Kronecker())}
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> network = kc.Network(blocks, conventions=conventions)
    >>> state = network.update(network.empty(), {"fc": batch}, decay=0.95)
    >>> state = network.refresh(state, damping=0.1)
    >>> state["fc"].age, bool(state.is_good())
    (0, True)
    """

    blocks: dict[str, BlockState]
    share: tuple[int, int] | None = None

    def __getitem__(self, name: str) -> BlockState:
        """Return the state of a block, or raise `UnknownBlockError`."""
        if name not in self.blocks:
            raise unknown_block(name, self.blocks)
        return self.blocks[name]

    def updated(self, blocks: Mapping[str, BlockState], /) -> NetworkState:
        """Return a state in which some blocks are replaced."""
        return NetworkState({**self.blocks, **blocks}, self.share)

    def as_part(self, share: tuple[int, int] | None, /) -> NetworkState:
        """Return the state, if it is the part of a process or has no rows yet.

        Parameters
        ----------
        share : tuple of int or None
            Rank and number of the processes whose part is wanted; None for all rows.

        Returns
        -------
        NetworkState
            With that share.

        Raises
        ------
        StateError
            If it is the part of another process, of another number of them, or of all rows.
        """
        if self.share == share:
            return self
        if self.share is None and not any(int(b.updates) for b in self.blocks.values()):
            return NetworkState(self.blocks, share)
        raise StateError(
            f"The state is that of {_owner(self.share)}, and the call is that of "
            f"{_owner(share)}. A process's part of a state is of use to no other: save "
            "what `Estimator.state_dict` returns, which loads on any number of processes."
        )

    def is_good(self) -> Array:
        """Return whether no block is flagged, as a 0-d boolean array."""
        flags = [held.status for held in self.blocks.values()]
        xp = own_namespace(flags[0])
        return xp.all(xp.stack(flags) == 0)

    def __repr__(self) -> str:
        updated = [n for n, b in self.blocks.items() if b.statistics is not None]
        ready = [n for n, b in self.blocks.items() if b.operator is not None]
        return (
            f"NetworkState({len(self.blocks)} blocks, {len(updated)} with statistics, "
            f"{len(ready)} with operators)"
        )


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
    >>> gradient = {"fc": {"weight": x.T @ g, "bias": g.sum(axis=0)}}
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
        require_options(
            locals(),
            blocks=mapping_to(instance_of(Block)),
            conventions=instance_of(Conventions),
            damping_rule=one_of(*get_args(DampingRule)),
            sharing=optional(instance_of(Sharing)),
            averaging=optional(instance_of(Averaging)),
            refreshing=optional(instance_of(Refreshing)),
            precision=optional(instance_of(Precision)),
            max_patch_elements=optional(COUNT),
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
        checks: tuple[Check, ...] = get_args(Check)
        self._updates = {
            check: UpdateBlock(conventions, max_patch_elements, check)
            for check in checks
        }
        self._refreshes = {check: self._refresh_of(check) for check in checks}
        self._products = {name: Product(name) for name in VECTOR_PRODUCTS}
        if self.chains.of and self.refreshing.damping_scaling != "none":
            raise UnsupportedError(
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
        xp = namespace_of(like=like)
        device = device_of(like)
        place: dict[str, Any] = {"dtype": xp.int32, "device": device}
        blocks: dict[str, BlockState] = {}
        for name, block in self.blocks.items():
            statistics = block.initial(like, precision=self.precision)
            own_damping = damping[name] if isinstance(damping, Mapping) else damping
            counts = {
                count: xp.zeros((), **place)
                for count in ("updates", "age", "refreshes", "failures", "status")
            }
            blocks[name] = BlockState(
                statistics=map_structure(
                    lambda x: xp.asarray(x, copy=True), statistics
                ),
                damping=xp.asarray(own_damping, dtype=statistics.dtype, device=device),
                basis_age=xp.full((), -1, **place),
                moments_missing=xp.zeros((), **place),
                **counts,
            )
        start = NetworkState(blocks)

        def refreshed() -> NetworkState:
            return self.refresh(
                start, damping=damping, check="status", executor=executor
            )

        made = backend_of(xp).placeholder(refreshed, device=device)
        return start.updated(
            {
                name: replaced(
                    blocks[name], operator=map_structure(_copied, held.operator)
                )
                for name, held in made.blocks.items()
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
        wanted: object = check
        if type(wanted) is not str or wanted != "raise":
            require_check(check)
        state = self._own(state, getattr(executor, "share", None))
        function = self._updates[check]
        with _told(executor, "update", state):
            tasks = self._update_tasks(state, batches, decay, executor)
        found = executor(function, tasks)
        blocks: dict[str, BlockState] = {}
        if check == "raise":
            require_finite_rows(found)
            for name, new in found.items():
                blocks[name] = _after_update(state.blocks[name], new, 1)
            return state.updated(blocks)
        if not found:
            return state
        xp = next(iter(found.values())).namespace
        good = xp.all(xp.stack([new.status for new in found.values()]) == 0)
        had = {name: tasks[name][1] for name in found if tasks[name][1] is not None}
        kept = found | choose(good, {name: found[name] for name in had}, had, xp=xp)
        for name, new in found.items():
            own = replaced(kept[name], status=new.status)
            blocks[name] = _after_update(state.blocks[name], own, good)
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
            Statistics of each part from `Block.moments`, added up by `Block.merge`.
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
        state = self._own(state, getattr(executor, "share", None))
        with _told(executor, "absorb", state):
            tasks = self._absorb_tasks(state, moments, decay, executor)
        found = executor(AbsorbBlock(), tasks)
        return state.updated(
            {n: _after_update(state.blocks[n], new, 1) for n, new in found.items()}
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
        block, held = self.blocks[self.known(name)], state[name]
        if isinstance(held.updates, int) or held.statistics is None:
            return state.updated({name: BlockState()})
        empty = block.initial(held.statistics.like, precision=self.precision)
        statistics = map_structure(_copied, empty)
        counts = {
            field: getattr(held, field) * 0
            for field in (
                *("updates", "age", "refreshes", "failures"),
                *("moments_missing", "status"),
            )
        }
        made = replaced(
            held, statistics=statistics, basis_age=held.basis_age * 0 - 1, **counts
        )
        return state.updated({name: made})

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
        require_one_of("moments", moments, ("kronecker", "carried", "zero"))
        require_check(check)
        if names is not None:
            require_range("names", names, NAMES)
        with_bases = [self.known(name) for name in (() if names is None else names)]
        state = self._own(state, getattr(executor, "share", None))
        if names is None:
            with_bases = [
                name
                for name, block in self.blocks.items()
                if block.approximation.has_bases
                and state.blocks[name].statistics is not None
            ]
        tasks: dict[str, tuple[Any, ...]] = {}
        for name in with_bases:
            block = self.blocks[name]
            if not block.approximation.has_bases:
                raise UnsupportedError(
                    f"Block {name!r} ({block.approximation.name}) has no bases; only Eigen "
                    "blocks have bases."
                )
            tasks[name] = (block, self._statistics_of(state, name))
        found = executor(Rebase(moments, check), tasks)
        blocks: dict[str, BlockState] = {}
        for name, statistics in found.items():
            held = state.blocks[name]
            blocks[name] = replaced(
                held,
                statistics=statistics,
                basis_age=held.basis_age * 0,
                moments_missing=held.moments_missing * 0 + int(moments == "zero"),
                status=held.status | statistics.status
                if check == "status"
                else held.status,
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
        require_check(check)
        state = self._own(state, getattr(executor, "share", None))
        ready = self.ready(state, names)
        function, tasks = self._refresh_tasks(state, ready, damping, check)
        made = executor(function, tasks)
        blocks: dict[str, BlockState] = {}
        for name, found in made.items():
            held = state.blocks[name]
            if isinstance(found, KFACError):
                failures = held.failures + 1
                budget = self.refreshing.failure_budget
                if held.operator is None or failures > budget:
                    raise found
                blocks[name] = replaced(held, failures=failures)
            elif check == "raise":
                blocks[name] = replaced(
                    held,
                    operator=found[0],
                    damping=_in_form(found[1], held.damping),
                    age=held.age * 0,
                    refreshes=held.refreshes + 1,
                    failures=held.failures * 0,
                )
            else:
                blocks[name] = _unless_failed(held, *found)
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
        if type(product) is not str or product not in self._products:
            require_one_of("product", product, VECTOR_PRODUCTS)
        if type(vectors) is not dict:
            require_kind("vectors", vectors, Mapping, "a mapping of blocks to vectors")
        # An operator that is here can be applied here; the others refuse by name.
        state = self._own(state, getattr(executor, "share", state.share))
        given = self.chains.vectors(vectors) if self.chains.of else vectors
        tasks: dict[str, tuple[Any, ...]] = {}
        for name, own in given.items():
            operator = self.operator(state, name)
            tasks[name] = self.blocks[name], operator, own
        function = self._products[product]
        if arguments or options:
            function = Product(product, arguments, options)
        made = executor(function, tasks)
        for name, vector in made.items():
            refreshes = state.blocks[name].refreshes
            if not isinstance(refreshes, int):
                made[name] = _unless_new(refreshes, vector)
        return self.chains.by_layer(made) if self.chains.of else made

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
            raise NotReadyError(
                f"Block {name!r} has no operator yet; call `update` and `refresh` first."
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
                raise NotReadyError("No block has statistics yet; call `update` first.")
        else:
            require_range("names", names, NAMES)
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
            require_kind("name", name, str, "the name of a block")
        if name in self.blocks:
            return name
        if name in self.tied_weights.uses:
            block = self.tied_weights.uses[name]
            raise UnknownBlockError(
                f"{name!r} is a further use of the weight of block {block!r}, whose "
                "gradient, summed over the uses, is to be given."
            )
        if name in self.chains.of:
            raise UnknownBlockError(
                f"{name!r} is a layer of the chain {self.chains.of[name]!r}, which has one "
                "damping and one operator: name the chain."
            )
        raise unknown_block(name, self.blocks)

    def block_of(self, name: str, /) -> str:
        """Return the name of a layer's block: its chain, or the layer itself."""
        return self.chains.of.get(name, name)

    def require_damping(self, damping: Scalar | Mapping[str, Scalar], /) -> None:
        """Raise `DampingError` for an invalid or missing damping of a block."""
        if not isinstance(damping, Mapping):
            require_damping(damping)
            return
        for name, value in damping.items():
            require_damping(value, name=f"damping[{self.known(name)!r}]")
        missing = sorted(set(self.blocks) - set(damping))
        if missing:
            raise DampingError(
                f"Expected `damping` for every block, but {missing} have none."
            )

    def in_form_of(self, state: NetworkState, form: NetworkState, /) -> NetworkState:
        """Return a state, such as one loaded from a file, in the structure of another.

        Parameters
        ----------
        state : NetworkState
            State of this network; numbers may be Python numbers, and blocks may be without
            statistics or operators.
        form : NetworkState
            State from `initial`, for what a block does not have.

        Returns
        -------
        NetworkState
            State with the structure of `form`, which shares no array with itself or with
            either argument.

        Raises
        ------
        StateError
            If a block is of another form.
        """
        blocks: dict[str, BlockState] = {}
        for name, wanted in form.blocks.items():
            held = state.blocks[name]
            if held.statistics is not None and held.operator is None:
                raise StateError(
                    f"Block {name!r} has statistics and no operator: call `refresh` first."
                )
            if held.statistics is None:
                blocks[name] = wanted
                continue
            found = {
                field: _in_form(value, getattr(wanted, field))
                for field, value in array_fields(held)
                if field not in ("statistics", "operator")
            }
            blocks[name] = replaced(held, **found)
            if not combinable(blocks[name], wanted):
                raise StateError(
                    f"Block {name!r}: expected statistics and an operator of the form that "
                    "this network's stages return under a compiler. Where the options are "
                    'the same, call `refresh` with check="status".'
                )
        return map_structure(_copied, NetworkState(blocks, state.share))

    def _own(self, state: NetworkState, share: tuple[int, int] | None) -> NetworkState:
        """Return the state as the part of a process; raise for one of other blocks."""
        if state.blocks.keys() != self.blocks.keys():
            raise StateError(
                f"Expected a state of the blocks {shown([*self.blocks])}, got one of "
                f"{shown([*state.blocks])}: it is that of another network."
            )
        return state if state.share == share else state.as_part(share)

    def _update_tasks(
        self,
        state: NetworkState,
        batches: Mapping[str, Any],
        decay: Scalar,
        executor: Executor,
    ) -> dict[str, tuple[Any, ...]]:
        given = self._detached(batches)
        # Another process may have rows of a block that has none here.
        shared = getattr(executor, "updates_all", False)
        if shared:
            given = {name: given.get(name) for name in self.blocks}
        weight, burn_in = self.averaging.weight, self.averaging.burn_in
        tasks: dict[str, tuple[Any, ...]] = {}
        for name, batch in given.items():
            held, own_decay, own_weight = state.blocks[name], decay, weight
            statistics = held.statistics
            if statistics is None and not (shared and is_empty(batch)):
                statistics = self._first_statistics(name, batch)
            if burn_in:
                burning = held.updates < burn_in
                own_decay = _one_where(burning, decay, statistics)
                own_weight = _one_where(burning, weight, statistics)
            taken = self._taken[name]
            tasks[name] = (
                *(self.blocks[name], statistics, batch),
                *(own_decay, own_weight, taken),
            )
        return tasks

    def _absorb_tasks(
        self,
        state: NetworkState,
        moments: Mapping[str, Statistics],
        decay: Scalar,
        executor: Executor,
    ) -> dict[str, tuple[Any, ...]]:
        require_kind("moments", moments, Mapping, "a mapping of blocks to statistics")
        given: dict[str, Any] = {}
        for name, own in moments.items():
            what = "statistics, as `Block.moments` returns them"
            require_kind(f"moments[{name!r}]", own, Statistics, what)
            given[self.known(name)] = own
        if getattr(executor, "updates_all", False):
            given = {name: given.get(name) for name in self.blocks}
        tasks: dict[str, tuple[Any, ...]] = {}
        for name, own in given.items():
            block, held = self.blocks[name], state.blocks[name]
            old = held.statistics
            if own is not None:
                if old is None:
                    old = block.initial(own.like, precision=self.precision)
                _require_moments(name, own, old)
            burning = held.updates < self.averaging.burn_in
            coefficients = (
                _one_where(burning, decay, old),
                _one_where(burning, self.averaging.weight, old),
            )
            tasks[name] = (block, old, own, *coefficients)
        return tasks

    def _detached(self, batches: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batches of each block, detached from gradient graphs."""
        if type(batches) is not dict:
            require_kind("batches", batches, Mapping, "a mapping of blocks to batches")
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
        except KFACError as error:
            raise type(error)(f"Block {name!r}: {error}") from None

    def _statistics_of(self, state: NetworkState, name: str) -> Statistics:
        statistics = state.blocks[name].statistics
        if statistics is None:
            raise NotReadyError(
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
            raise NotReadyError(
                f"Block {name!r} has no moments in the bases of its factors yet; call "
                f"{'`rebase`' if never else '`update`'} first."
            )

    def _refresh_tasks(
        self,
        state: NetworkState,
        names: Iterable[str],
        damping: Scalar | Mapping[str, Scalar],
        check: Check,
    ) -> tuple[RefreshBlock, dict[str, tuple[Any, ...]]]:
        function = self._refreshes[check]
        everything: dict[str, Statistics | None] = {}
        if self.shared_factors.pairs:
            function = self._refresh_of(check, memo={})
            everything = {name: held.statistics for name, held in state.blocks.items()}
        of_blocks = type(damping) is not float and isinstance(damping, Mapping)
        tasks: dict[str, tuple[Any, ...]] = {}
        for name in names:
            own: Any = state.blocks[name].statistics
            if everything:
                own = self.shared_factors.completed(name, own, everything)
            own_damping = damping[name] if of_blocks else damping
            if isinstance(own_damping, np.generic) and not is_numpy_array(own.like):
                # A number, which no array of another library would be chosen against.
                own_damping = float(own_damping)
            tasks[name] = (self.blocks[name], own, own_damping, self.solving[name])
        return function, tasks

    def _solving_of(self, block: Block) -> Solving:
        """Return how a block is solved: only full factors have a choice."""
        full = block.approximation.factor_shapes(block.layer)
        if not full or self.damping_rule == "exact":
            return "inverse"
        return self.refreshing.solving

    def _refresh_of(
        self, check: Check, memo: dict[Any, Any] | None = None
    ) -> RefreshBlock:
        """Return the function of one block that `refresh` runs for each."""
        return RefreshBlock(
            rule=self.damping_rule,
            debias=self.averaging.debias,
            factorizations=self.refreshing.factorizations,
            damping_scaling=self.refreshing.damping_scaling,
            precision=self.precision,
            check=check,
            memo=memo,
            least_shift=self.refreshing.least_shift,
            keep_matrices=self.refreshing.keep_matrices,
        )


def _one_where(burning: Any, value: Scalar, statistics: Statistics | None) -> Scalar:
    """Return 1 during burn-in, else the value."""
    if isinstance(burning, bool) or statistics is None:
        return 1.0 if burning else value
    xp, like = statistics.namespace, statistics.like
    value = as_scalar(xp, value, like.dtype, "decay")
    return xp.where(burning, xp.ones_like(like), value * xp.ones_like(like))


def _owner(share: tuple[int, int] | None) -> str:
    return "all rows" if share is None else f"rank {share[0]} of {share[1]} processes"


def _after_update(held: BlockState, statistics: Statistics, good: Any) -> BlockState:
    """Return a block's state with new statistics, every count one higher if it is good."""
    one = good
    if not isinstance(good, int):
        xp = own_namespace(good)
        # Counts that cannot be read here become arrays.
        one = int(good) if is_plain(good, xp=xp) else cast(xp, good, xp.int32)
    if not isinstance(held.updates, int):
        one = own_namespace(held.updates).zeros_like(held.updates) + one
    aged, status = held.basis_age, statistics.status
    if isinstance(aged, int):
        aged = aged if aged < 0 else aged + one
    else:
        xp = own_namespace(aged)
        aged = xp.where(aged < 0, aged, aged + one)
        # An array of its own: a state whose arrays are donated holds none twice.
        status = _copied(status)
    return replaced(
        held,
        statistics=statistics,
        updates=held.updates + one,
        age=held.age + one,
        basis_age=aged,
        moments_missing=held.moments_missing * (1 - one),
        status=status,
    )


def _require_moments(name: str, given: Statistics, old: Statistics) -> None:
    """Raise unless the statistics of a batch are of the form of a block's."""
    namespace_of(moments=given.like, statistics=old.like)
    found, expected = (
        {path: tuple(x.shape) for path, x in leaves(part.averages)}
        for part in (given, old)
    )
    if found != expected:
        raise ShapeError(
            f"Expected `moments[{name!r}]` to hold arrays of shapes {expected}, got "
            f"{found}."
        )


def _copied(x: Array) -> Array:
    return own_namespace(x).asarray(x, copy=True)


def _in_form(value: Any, like: Any) -> Any:
    """Return a number as an array if `like` is one, else unchanged."""
    # NumPy scalars count as arrays here, though some are instances of float or int.
    if like is None or type(like) in (int, float):
        return value
    xp = own_namespace(like)
    return xp.zeros_like(like) + (0 if value is None else value)


def _unless_new(refreshes: Array, vector: dict[str, Any]) -> dict[str, Any]:
    """Return a product, or zero for a traced state that was never refreshed."""
    xp, ready = own_namespace(refreshes), refreshes > 0
    return map_structure(lambda x: xp.where(ready, x, xp.zeros_like(x)), vector)


def _unless_failed(held: BlockState, operator: Any, damping: Scalar) -> BlockState:
    """Return a block's state with the new operator if that has no flags."""
    status = operator.status()
    xp = own_namespace(status)
    good = status == 0
    previous = held.operator
    # The flag is read where that costs nothing: then the counts tell what happened.
    if is_plain(status, xp=xp) and not bool(good):
        failures = held.failures + 1
        return replaced(held, failures=failures, status=held.status | status)
    if previous is not None and combinable(operator, previous):
        operator = choose(good, operator, previous, xp=xp)
        if held.damping is not None and type(held.damping) not in (int, float):
            damping = xp.where(good, damping, held.damping)
    refreshes, age, failures = held.refreshes + 1, held.age * 0, held.failures * 0
    if not isinstance(held.refreshes, int):
        failed = cast(xp, status != 0, held.refreshes.dtype)
        refreshes = held.refreshes + 1 - failed
        age = held.age * failed
        failures = (held.failures + 1) * failed
    return replaced(
        held,
        operator=operator,
        damping=_in_form(damping, held.damping),
        age=age,
        refreshes=refreshes,
        failures=failures,
        status=held.status | status,
    )
