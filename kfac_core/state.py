"""The state of a network: statistics, operators and counts, as one structure of arrays.

Conventions.  Counts are Python ints in a state that grows call by call (`Network.empty`),
and 0-d arrays of int32 in one of fixed structure (`Network.initial`), which function
compilers trace.  The functions here return new states and modify none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, Scalar, finite, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.choice import choose
from kfac_core.array.precision import Precision
from kfac_core.array.structure import array_fields, combinable, leaves, structure
from kfac_core.block import Block
from kfac_core.factors.statistics import Statistics
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.options import Averaging

_COUNTS = (
    "updates",
    "age",
    "refreshes",
    "failures",
    "moments_missing",
    "status",
    "steps",
)

Count: TypeAlias = Any
"""An int, or a 0-d array of int32 in a state that is traced by a function compiler."""


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
        Damping of the operator.
    updates, age, refreshes, failures : int or 0-d array of int32
        Number of updates, of updates since the last refresh, of refreshes, and of
        consecutive failed refreshes.
    basis_age : int or 0-d array of int32
        Number of updates since the bases were computed; -1 before that.
    moments_missing : int or 0-d array of int32
        1 if the bases were computed with zero moments and no update came since, else 0.
    status : int or 0-d array of int32
        `kfac_core.Status` flags of the last update and refresh.
    steps : int or 0-d array of int32
        Number of steps taken with this state, with or without an update, where an
        integration keeps it here for its schedules.
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
    steps: Count = 0

    def known_statistics(self, name: str, /) -> Statistics:
        """Return the statistics, or raise `NotReadyError` before the first update."""
        if self.statistics is None:
            raise errors.NotReadyError(
                f"Block {name!r} has no statistics yet; call `update` first."
            )
        return self.statistics

    def require_ready(self, name: str, *, has_bases: bool) -> None:
        """Raise `NotReadyError` if there is nothing to make an operator from.

        Parameters
        ----------
        name : str
            Name of the block.
        has_bases : bool
            Whether the operator is made from moments in bases.
        """
        if self.statistics is None:
            self.known_statistics(name)
        if not has_bases:
            return
        # Counts that are arrays may be traced, and their values cannot be read.
        never = type(self.basis_age) is int and self.basis_age < 0
        missing = type(self.moments_missing) is int and self.moments_missing
        if never or missing:
            raise errors.NotReadyError(
                f"Block {name!r} has no moments in the bases of its factors yet; call "
                f"{'`rebase`' if never else '`update`'} first."
            )


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
            raise constraints.unknown_block(name, self.blocks)
        return self.blocks[name]

    def updated(self, blocks: Mapping[str, BlockState], /) -> NetworkState:
        """Return a state in which some blocks are replaced."""
        return NetworkState({**self.blocks, **blocks}, self.share)

    def with_operators_of(
        self, refreshed: NetworkState, started: NetworkState, names: Iterable[str], /
    ) -> NetworkState:
        """Return the state with operators of a refresh that ran in the background.

        Parameters
        ----------
        refreshed : NetworkState
            Result of the refresh.
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
            now, new = self.blocks[name], refreshed.blocks[name]
            blocks[name] = replaced(
                now,
                operator=new.operator,
                damping=new.damping,
                # Updates since the start of the refresh, which ran meanwhile, have aged
                # its operator.
                age=new.age + now.updates - started.blocks[name].updates,
                refreshes=new.refreshes,
                failures=new.failures,
            )
        return self.updated(blocks)

    def part_of(
        self, blocks: Mapping[str, Block], share: tuple[int, int] | None, /
    ) -> NetworkState:
        """Return the state as a process's part; raise for one of other blocks."""
        if self.blocks.keys() != blocks.keys():
            hint, kind = "It is the state of another network.", errors.StateError
            constraints.require_names("blocks", self.blocks, blocks, hint, error=kind)
        return self if self.share == share else self.as_part(share)

    def as_part(self, share: tuple[int, int] | None, /) -> NetworkState:
        """Return the state as a process's part, if it is one or has no rows yet.

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
        raise errors.StateError(
            f"The state belongs to {_owner(self.share)}, and the call to "
            f"{_owner(share)}. No other process can use a process's part of a state: "
            "save what `Estimator.state_dict` returns, which loads on any number of "
            "processes."
        )

    def in_form_of(self, form: NetworkState, /) -> NetworkState:
        """Return the state, such as one loaded from a file, in the structure of another.

        Its numbers may be Python numbers, and its blocks may be without statistics or
        operators.

        Parameters
        ----------
        form : NetworkState
            State from `Network.initial`, which supplies the parts that a block lacks.

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
        for name, initial in form.blocks.items():
            block = self.blocks[name]
            if block.statistics is not None and block.operator is None:
                raise errors.StateError(
                    f"Block {name!r} has statistics and no operator: call `refresh` first."
                )
            if block.statistics is None:
                blocks[name] = initial
                continue
            numbers = {
                field: in_form(value, getattr(initial, field))
                for field, value in array_fields(block)
                if field not in ("statistics", "operator")
            }
            blocks[name] = replaced(block, **numbers)
            if not combinable(blocks[name], initial):
                raise errors.StateError(
                    f"Block {name!r}: expected statistics and an operator of the form that "
                    "this network's stages return under a compiler. Where the options are "
                    'the same, call `refresh` with check="status".'
                )
        return map_structure(copied, NetworkState(blocks, self.share))

    def is_good(self) -> Array:
        """Return whether no block is flagged, as a 0-d boolean array."""
        flags = [block.status for block in self.blocks.values()]
        xp = ns.own_namespace(flags[0])
        return xp.all(xp.stack(flags) == 0)

    def __repr__(self) -> str:
        updated = [n for n, b in self.blocks.items() if b.statistics is not None]
        ready = [n for n, b in self.blocks.items() if b.operator is not None]
        return (
            f"NetworkState({len(self.blocks)} blocks, {len(updated)} with statistics, "
            f"{len(ready)} with operators)"
        )


def _owner(share: tuple[int, int] | None) -> str:
    return "all rows" if share is None else f"rank {share[0]} of {share[1]} processes"


def initial_state(
    blocks: Mapping[str, Block],
    like: Array,
    damping: Scalar | Mapping[str, Scalar],
    precision: Precision,
    /,
) -> NetworkState:
    """Return a state whose counts are 0-d arrays, without operators.

    Parameters
    ----------
    blocks : mapping of str to Block
        Blocks by name.
    like : array
        Array whose library, device and dtype the state takes.
    damping : float, 0-d array or mapping of str to these
        Damping of all blocks, or of each.
    precision : Precision
        Precision whose storage dtype is used.

    Returns
    -------
    NetworkState
        State of which no two arrays share memory.
    """
    xp, device = ns.namespace_of(like=like), ns.device_of(like)
    place = {"dtype": xp.int32, "device": device}
    states: dict[str, BlockState] = {}
    for name, block in blocks.items():
        statistics = block.initial(like, precision=precision)
        lam = damping[name] if isinstance(damping, Mapping) else damping
        states[name] = BlockState(
            statistics=map_structure(copied, statistics),
            damping=xp.asarray(lam, dtype=statistics.dtype, device=device),
            basis_age=xp.full((), -1, **place),
            **{count: xp.zeros((), **place) for count in _COUNTS},
        )
    return NetworkState(states)


def reset_state(block: Block, before: BlockState, precision: Precision) -> BlockState:
    """Return a block's state as before its first batch, in the structure it has."""
    if isinstance(before.updates, int) or before.statistics is None:
        return BlockState()
    empty = block.initial(before.statistics.like, precision=precision)
    return replaced(
        before,
        statistics=map_structure(copied, empty),
        # Arithmetic with the old counts keeps arrays arrays, and numbers numbers.
        basis_age=before.basis_age * 0 - 1,
        **{count: getattr(before, count) * 0 for count in _COUNTS},
    )


def coefficients(
    before: BlockState,
    statistics: Statistics | None,
    averaging: Averaging,
    decay: Scalar,
) -> tuple[Scalar, Scalar]:
    """Return the decay and the weight of a block's next update: 1 during burn-in."""
    if not averaging.burn_in:
        return decay, averaging.weight
    # A count may be traced; then both coefficients are arrays.
    burning = before.updates < averaging.burn_in
    if isinstance(burning, bool) or statistics is None:
        # A decay of 1 makes the first updates a plain mean, in which no batch is
        # favoured.
        return (1.0, 1.0) if burning else (decay, averaging.weight)
    xp, one = statistics.namespace, statistics.namespace.ones_like(statistics.like)

    def after_burn_in(value: Scalar) -> Array:
        value = ns.as_scalar(xp, value, one.dtype, "decay")
        return xp.where(burning, one, value * one)

    return after_burn_in(decay), after_burn_in(averaging.weight)


def all_or_none(
    statistics: Mapping[str, Statistics], previous: Mapping[str, Statistics | None]
) -> tuple[dict[str, Statistics], Array]:
    """Return new statistics if no block is flagged, else old ones, and whether none is."""
    xp = next(iter(statistics.values())).namespace
    good = xp.all(xp.stack([new.status for new in statistics.values()]) == 0)
    old: Any = {n: previous[n] for n in statistics if previous[n] is not None}
    chosen: Any = choose(good, {name: statistics[name] for name in old}, old, xp=xp)
    everything: dict[str, Statistics] = {**statistics, **chosen}
    return {
        name: replaced(everything[name], status=new.status)
        for name, new in statistics.items()
    }, good


def require_same_form(name: str, moments: Statistics, old: Statistics) -> None:
    """Raise unless the statistics of a batch are of the form of a block's."""
    ns.namespace_of(moments=moments.like, statistics=old.like)
    shapes, expected = (
        {path: tuple(x.shape) for path, x in leaves(part.averages)}
        for part in (moments, old)
    )
    if shapes != expected:
        raise errors.ShapeError(
            f"Expected `moments[{name!r}]` to hold arrays of shapes {expected}, got "
            f"{shapes}."
        )


def zero_unless(ready: Array, vector: dict[str, Any]) -> dict[str, Any]:
    """Return a product, or zero for a traced state that was never refreshed."""
    xp = ns.own_namespace(ready)
    return map_structure(lambda x: xp.where(ready, x, xp.zeros_like(x)), vector)


def after_rebase(
    before: BlockState, statistics: Statistics, *, missing: bool, flagged: bool
) -> BlockState:
    """Return a block's state in new bases, whose moments may be missing."""
    flags = statistics.status if flagged else before.status * 0
    return replaced(
        before,
        statistics=statistics,
        basis_age=before.basis_age * 0,
        moments_missing=before.moments_missing * 0 + int(missing),
        status=before.status | flags,
    )


def after_update(
    before: BlockState, statistics: Statistics, good: Array | int
) -> BlockState:
    """Return a block's state with new statistics; counts increase if `good`."""
    one = good
    if not isinstance(good, int):
        xp = ns.own_namespace(good)
        # A count that depends on a value that cannot be read here becomes an array.
        one = int(good) if finite.is_plain(good, xp=xp) else ns.cast(xp, good, xp.int32)
    if not isinstance(before.updates, int):
        one = ns.own_namespace(before.updates).zeros_like(before.updates) + one
    basis_age, status = before.basis_age, statistics.status
    if isinstance(basis_age, int):
        # -1 says that no basis exists; it must not count up to one that is 0 updates
        # old.
        basis_age = basis_age if basis_age < 0 else basis_age + one
    else:
        xp = ns.own_namespace(basis_age)
        basis_age = xp.where(basis_age < 0, basis_age, basis_age + one)
        # Copy it: a state whose arrays are donated must not hold one of them twice.
        status = copied(status)
    return replaced(
        before,
        statistics=statistics,
        updates=before.updates + one,
        age=before.age + one,
        basis_age=basis_age,
        # Arithmetic in place of a branch, since `one` may be traced: the first good
        # update brings the moments.
        moments_missing=before.moments_missing * (1 - one),
        status=status,
    )


def after_updates(
    state: NetworkState, statistics: Mapping[str, Statistics], good: Array | int, /
) -> NetworkState:
    """Return a network's state with new statistics of some blocks; as `after_update`."""
    after: dict[str, BlockState] = {}
    for name, new in statistics.items():
        after[name] = after_update(state.blocks[name], new, good)
    return state.updated(after)


def after_refreshes(
    state: NetworkState, results: Mapping[str, Any], /, *, check: Check, budget: int
) -> NetworkState:
    """Return a network's state with new operators, or raise past a budget of failures.

    Results are operators with their dampings, or errors, by block.
    """
    after: dict[str, BlockState] = {}
    for name, refreshed in results.items():
        before = state.blocks[name]
        if isinstance(refreshed, errors.KFACError):
            failures = before.failures + 1
            # A stale operator preconditions well for a while; a first refresh has none
            # to keep.
            if before.operator is None or failures > budget:
                raise refreshed
            after[name] = replaced(before, failures=failures)
        elif check == "raise":
            after[name] = _after_refresh(before, *refreshed)
        else:
            after[name] = _after_refresh_in_status(before, *refreshed)
    return state.updated(after)


def _after_refresh(
    before: BlockState, operator: CurvatureOperator, damping: Scalar
) -> BlockState:
    """Return a block's state with a new operator without flags."""
    return replaced(
        before,
        operator=operator,
        damping=in_form(damping, before.damping),
        age=before.age * 0,
        refreshes=before.refreshes + 1,
        failures=before.failures * 0,
    )


def _after_refresh_in_status(
    before: BlockState, operator: CurvatureOperator, damping: Scalar
) -> BlockState:
    """Return a block's state with the new operator, or the old one if that has flags."""
    status = operator.status()
    xp = ns.own_namespace(status)
    good = status == 0
    # If the host has the flag, count a failed refresh in Python numbers.
    if finite.is_plain(status, xp=xp) and not bool(good):
        failures = before.failures + 1
        return replaced(before, failures=failures, status=before.status | status)
    previous = before.operator
    if previous is not None and combinable(operator, previous):
        operator = choose(good, operator, previous, xp=xp)
        if before.damping is not None and type(before.damping) not in (int, float):
            damping = xp.where(good, damping, before.damping)
    new = _after_refresh(before, operator, damping)
    status = before.status | status
    if isinstance(before.refreshes, int):
        # On a device the flag is not read: the refresh counts, and the status tells.
        return replaced(new, status=status)
    # Traced counts: multiply by 0 or 1 in place of a branch.
    failed = ns.cast(xp, xp.logical_not(good), before.refreshes.dtype)
    return replaced(
        new,
        age=before.age * failed,
        refreshes=before.refreshes + 1 - failed,
        failures=(before.failures + 1) * failed,
        status=status,
    )


def in_form(value: Scalar | None, like: Scalar | None) -> Scalar:
    """Return a number as an array if `like` is one, else unchanged."""
    # NumPy scalars count as arrays here, though some are instances of float or int.
    if like is None or type(like) in (int, float):
        return value
    xp = ns.own_namespace(like)
    return xp.zeros_like(like) + (0 if value is None else value)


def copied(x: Array) -> Array:
    """Return a copy of an array."""
    return ns.own_namespace(x).asarray(x, copy=True)
