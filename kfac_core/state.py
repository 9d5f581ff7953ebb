"""The state of a network: statistics, operators and counts, as one structure of arrays.

Conventions.  Counts are Python ints in a state that grows call by call (`Network.empty`),
and 0-d arrays of int32 in one of fixed structure (`Network.initial`), which function
compilers trace.  The functions here return new states and modify none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from kfac_core import constraints, errors
from kfac_core.array import Array, Scalar, finite, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.choice import choose
from kfac_core.array.structure import array_fields, combinable, structure
from kfac_core.factors.statistics import Statistics
from kfac_core.operators.operator import CurvatureOperator

__all__ = [
    "BlockState",
    "Count",
    "NetworkState",
    "after_refresh",
    "after_refresh_in_status",
    "after_update",
    "copied",
    "in_form",
]

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
            raise constraints.unknown_block(name, self.blocks)
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
        raise errors.StateError(
            f"The state is that of {_owner(self.share)}, and the call is that of "
            f"{_owner(share)}. A process's part of a state is of use to no other: save "
            "what `Estimator.state_dict` returns, which loads on any number of processes."
        )

    def in_form_of(self, form: NetworkState, /) -> NetworkState:
        """Return the state, such as one loaded from a file, in the structure of another.

        Its numbers may be Python numbers, and its blocks may be without statistics or
        operators.

        Parameters
        ----------
        form : NetworkState
            State from `Network.initial`, for what a block does not have.

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
            block = self.blocks[name]
            if block.statistics is not None and block.operator is None:
                raise errors.StateError(
                    f"Block {name!r} has statistics and no operator: call `refresh` first."
                )
            if block.statistics is None:
                blocks[name] = wanted
                continue
            numbers = {
                field: in_form(value, getattr(wanted, field))
                for field, value in array_fields(block)
                if field not in ("statistics", "operator")
            }
            blocks[name] = replaced(block, **numbers)
            if not combinable(blocks[name], wanted):
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


def after_update(before: BlockState, statistics: Statistics, good: Any) -> BlockState:
    """Return a block's state with new statistics, every count one higher if it is good."""
    one = good
    if not isinstance(good, int):
        xp = ns.own_namespace(good)
        # Counts that cannot be read here become arrays.
        one = int(good) if finite.is_plain(good, xp=xp) else ns.cast(xp, good, xp.int32)
    if not isinstance(before.updates, int):
        one = ns.own_namespace(before.updates).zeros_like(before.updates) + one
    basis_age, status = before.basis_age, statistics.status
    if isinstance(basis_age, int):
        basis_age = basis_age if basis_age < 0 else basis_age + one
    else:
        xp = ns.own_namespace(basis_age)
        basis_age = xp.where(basis_age < 0, basis_age, basis_age + one)
        # A copy: a state whose arrays are donated must not hold one of them twice.
        status = copied(status)
    return replaced(
        before,
        statistics=statistics,
        updates=before.updates + one,
        age=before.age + one,
        basis_age=basis_age,
        moments_missing=before.moments_missing * (1 - one),
        status=status,
    )


def after_refresh(
    before: BlockState, operator: CurvatureOperator, damping: Scalar
) -> BlockState:
    """Return a block's state with a new operator, which is known to be good."""
    return replaced(
        before,
        operator=operator,
        damping=in_form(damping, before.damping),
        age=before.age * 0,
        refreshes=before.refreshes + 1,
        failures=before.failures * 0,
    )


def after_refresh_in_status(
    before: BlockState, operator: CurvatureOperator, damping: Scalar
) -> BlockState:
    """Return a block's state with the new operator if that has no flags."""
    status = operator.status()
    xp = ns.own_namespace(status)
    good = status == 0
    # Where reading the flag costs nothing, a failed refresh is counted at once.
    if finite.is_plain(status, xp=xp) and not bool(good):
        failures = before.failures + 1
        return replaced(before, failures=failures, status=before.status | status)
    previous = before.operator
    if previous is not None and combinable(operator, previous):
        operator = choose(good, operator, previous, xp=xp)
        if before.damping is not None and type(before.damping) not in (int, float):
            damping = xp.where(good, damping, before.damping)
    new = after_refresh(before, operator, damping)
    status = before.status | status
    if isinstance(before.refreshes, int):
        return replaced(new, status=status)
    failed = ns.cast(xp, xp.logical_not(good), before.refreshes.dtype)
    return replaced(
        new,
        age=before.age * failed,
        refreshes=before.refreshes + 1 - failed,
        failures=(before.failures + 1) * failed,
        status=status,
    )


def in_form(value: Any, like: Any) -> Any:
    """Return a number as an array if `like` is one, else unchanged."""
    # NumPy scalars count as arrays here, though some are instances of float or int.
    if like is None or type(like) in (int, float):
        return value
    xp = ns.own_namespace(like)
    return xp.zeros_like(like) + (0 if value is None else value)


def copied(x: Array) -> Array:
    """Return a copy of an array."""
    return ns.own_namespace(x).asarray(x, copy=True)
