"""Exchange of arrays between processes: the interface, and the registry of engines.

Conventions.  A *rank* is one of p processes, numbered from 0.  Every function is
collective: all ranks call the same functions in the same order, with arrays of the same
length and dtype.  Arrays are one-dimensional, are not modified, and come back in the same
library, dtype and device.  Each call returns a `Handle`, whose ``wait()`` returns the
result, so that several exchanges run at a time.

An *engine* is an adapter of a library that moves arrays between processes.  It is a module
that the entry-point group ``kfac_core.communicators`` gives for a name.
"""

from __future__ import annotations

import abc
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from kfac_core import constraints, errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.array.optional import entry_points_of

ENTRY_POINT_GROUP = "kfac_core.communicators"
ENVIRONMENT_VARIABLE = "KFAC_CORE_COMMUNICATOR"

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
"""The exchanges of a `Communicator`."""


class Handle:
    """A running exchange.

    Parameters
    ----------
    finish : callable
        Blocks until the exchange is done and returns its result.
    """

    def __init__(self, finish: Callable[[], Array]) -> None:
        self._finish: Callable[[], Array] | None = finish
        self._result: Array = None

    def wait(self) -> Array:
        """Return the result, after the exchange is done.

        Raises
        ------
        CommunicationTimeoutError
            If a rank does not take part in time; the message names it.
        CommunicationError
            If a rank is gone, or calls another function.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


@dataclass
class Traffic:
    """Calls and bytes of one process, by operation.

    Attributes
    ----------
    calls : dict of str to int
        Number of calls.
    payload : dict of str to int
        Bytes of the arrays that were reduced, gathered or sent, over all ranks' parts.
    wire : dict of str to float
        Bytes that a process sends on average, with algorithms that send the least: for S
        bytes and p ranks ``2 (p - 1) / p S`` for all_reduce and ``(p - 1) / p S`` for the
        others; for all_to_all those for other ranks.
    """

    calls: dict[str, int] = field(default_factory=lambda: _zeros(0))
    payload: dict[str, int] = field(default_factory=lambda: _zeros(0))
    wire: dict[str, float] = field(default_factory=lambda: _zeros(0.0))

    def count(
        self, operation: Operation, payload: int, size: int, sent: float | None = None
    ) -> None:
        """Record one call.

        Parameters
        ----------
        operation : str
            The exchange.
        payload : int
            Number of bytes S.
        size : int
            Number of ranks p.
        sent : float, optional
            Bytes that were sent, where the formula does not say.
        """
        if sent is None:
            # A ring passes each part on size - 1 times; all_reduce is two such passes.
            sent = payload * (size - 1) / size
            if operation == "all_reduce":
                sent = 2 * sent
        self.calls[operation] += 1
        self.payload[operation] += payload
        self.wire[operation] += sent

    @property
    def total(self) -> float:
        """Bytes that this process sent, over all operations."""
        return sum(self.wire.values())

    def reset(self) -> None:
        """Set all counts to zero."""
        for counts in (self.calls, self.payload, self.wire):
            for operation in counts:
                counts[operation] = 0


@dataclass
class Votes:
    """State of the votes of a communicator; see `Agreement`.

    Attributes
    ----------
    length : int
        Numbers of the message of a vote.
    announced : bool
        Whether a vote of this step has named the stages that follow.
    directions_follow : bool
        Whether these end with the directions of all blocks, whose messages tell of a
        refresh that failed.
    riders : list of Rider
        Values that travel with the next vote.
    """

    length: int = 32
    announced: bool = False
    directions_follow: bool = False
    riders: list[Any] = field(default_factory=list)


def _zeros(zero: float) -> dict[str, Any]:
    return dict.fromkeys(get_args(Operation), zero)


class Communicator(abc.ABC):
    """Collective exchanges of one-dimensional arrays between ranks.

    An engine defines ``_start`` and ``_split``.  The public functions check their
    arguments, count the traffic, and move arrays to where the engine can read them.

    Parameters
    ----------
    rank, size : int
        Number of this process, and of all.
    timeout : float
        Seconds to wait for other ranks.

    Attributes
    ----------
    traffic : Traffic
        Calls and bytes of this process; communicators made by `split` count here too.
    votes : Votes
        State of the votes of its ranks.
    ranks : tuple of int
        What errors call the ranks: their numbers before any `split`, as the engine
        counts them.
    """

    name = "communicator"

    def __init__(self, rank: int, size: int, *, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.traffic, self.votes = Traffic(), Votes()
        self.ranks = tuple(range(size))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    def __reduce__(self) -> NoReturn:
        raise errors.UnsupportedError(
            "A communicator belongs to its processes and cannot be copied or saved, and "
            "neither can an estimator that has one. Save `Estimator.state_dict()`, which "
            "loads on any number of processes."
        )

    def split(self, groups: Sequence[Sequence[int]], /) -> Communicator:
        """Return the communicator of this rank's group.

        Parameters
        ----------
        groups : sequence of sequence of int
            Ranks of each group, the same on all ranks.  Every rank is in one group.  Within
            a group ranks are numbered in the given order.

        Returns
        -------
        Communicator
            Exchanges within the group.

        Raises
        ------
        CommunicationError
            If a rank is in no group, or in two, or ranks give different groups.
        """
        _require_groups(groups, self.size)
        self._require_same_groups(groups)
        members = next(group for group in groups if self.rank in group)
        part = self._split(groups)
        part.ranks = tuple(self.ranks[rank] for rank in members)
        # One process, one count, whatever groups it is in.
        part.traffic = self.traffic
        return part

    def _require_same_groups(self, groups: Sequence[Sequence[int]]) -> None:
        # Engines wait for ever, or mix up data, where ranks divide differently.
        layout = zlib.crc32(repr([list(group) for group in groups]).encode())
        digest = np.asarray([layout], np.int64)
        digests = self.all_gather(digest, [1] * self.size).wait().tolist()
        others = [rank for rank in range(self.size) if digests[rank] != digests[0]]
        if others:
            raise errors.CommunicationError(
                f"Rank {self.ranks[others[0]]} divides the ranks into other groups than "
                f"rank {self.ranks[0]}. All ranks must give the same groups."
            )

    @abc.abstractmethod
    def _split(self, groups: Sequence[Sequence[int]], /) -> Communicator:
        """Return the communicator of this rank's group, of groups that were checked."""

    def all_reduce(self, flat: Array, /, *, overwrite: bool = False) -> Handle:
        """Return the sum of all ranks' arrays, on every rank.

        Parameters
        ----------
        flat : array, shape (k,)
            This rank's summand.
        overwrite : bool
            Whether the engine may use its memory, also for the result.

        Returns
        -------
        Handle
            Handle of an array of shape (k,), equal to the bit on all ranks.
        """
        constraints.require_shape("flat", flat, (math.prod(flat.shape),))
        self.traffic.count("all_reduce", _bytes(flat), self.size)
        return self._begin("all_reduce", flat, {"overwrite": overwrite})

    def reduce_scatter(self, flat: Array, counts: Sequence[int], /) -> Handle:
        """Return one part of the sum of all ranks' arrays on each rank.

        Parameters
        ----------
        flat : array, shape (sum(counts),)
            This rank's summand: the parts of all ranks, one after the other.
        counts : sequence of int
            Lengths of the parts, one a rank; zero is allowed.

        Returns
        -------
        Handle
            Handle of an array of shape ``(counts[rank],)``.
        """
        self._require_counts(counts)
        constraints.require_shape("flat", flat, (sum(counts),))
        self.traffic.count("reduce_scatter", _bytes(flat), self.size)
        return self._begin("reduce_scatter", flat, {"counts": tuple(counts)})

    def all_gather(self, flat: Array, counts: Sequence[int], /) -> Handle:
        """Return the arrays of all ranks, one after the other, on every rank.

        Parameters
        ----------
        flat : array, shape (counts[rank],)
            This rank's part.
        counts : sequence of int
            Lengths of the parts, one a rank; zero is allowed.

        Returns
        -------
        Handle
            Handle of an array of shape ``(sum(counts),)``.
        """
        self._require_counts(counts)
        constraints.require_shape("flat", flat, (self._length_here(counts),))
        payload = sum(counts) * _item_size(flat)
        self.traffic.count("all_gather", payload, self.size)
        return self._begin("all_gather", flat, {"counts": tuple(counts)})

    def all_to_all(
        self, flat: Array, send: Sequence[int], receive: Sequence[int], /
    ) -> Handle:
        """Return what all ranks have for this rank, one after the other.

        Parameters
        ----------
        flat : array, shape (sum(send),)
            What this rank has for rank 0, 1, ..., one after the other.
        send, receive : sequence of int
            Lengths of what goes to, and comes from, each rank; zero is allowed.

        Returns
        -------
        Handle
            Handle of an array of shape ``(sum(receive),)``.
        """
        self._require_counts(send, receive)
        constraints.require_shape("flat", flat, (sum(send),))
        sent = (sum(send) - self._length_here(send)) * _item_size(flat)
        self.traffic.count("all_to_all", _bytes(flat), self.size, sent)
        lengths = {"send": tuple(send), "receive": tuple(receive)}
        return self._begin("all_to_all", flat, lengths)

    def _length_here(self, counts: Sequence[int]) -> int:
        """Return the length of this rank's part."""
        return counts[self.rank]

    @abc.abstractmethod
    def _start(
        self, operation: Operation, values: Array, arguments: Mapping[str, Any], /
    ) -> Callable[[], Any]:
        """Start an exchange of `_entering` values; return what waits for the result."""

    def _entering(self, flat: Array) -> Array:
        """Return an array in the form that the engine exchanges: by default, NumPy's."""
        if str(flat.dtype).endswith("bfloat16"):
            raise errors.UnsupportedError(
                f"{type(self).__name__} sends arrays of NumPy, which has no bfloat16. Send "
                "float32, or tensors of PyTorch by torch.distributed."
            )
        return backend_of(ns.own_namespace(flat)).to_numpy(flat)

    def _leaving(self, values: Array, like: Array) -> Array:
        """Return what the engine made, in the library and on the device of an array."""
        backend = backend_of(ns.own_namespace(like))
        return backend.asarray(np.asarray(values), device=ns.device_of(like))

    def _begin(
        self, operation: Operation, flat: Array, arguments: Mapping[str, Any]
    ) -> Handle:
        if self.size == 1:
            xp = ns.own_namespace(flat)
            # A copy, as from an engine: the caller may overwrite the argument or the
            # result.
            copy = xp.asarray(flat, copy=True)
            return Handle(lambda: copy)
        finish = self._start(operation, self._entering(flat), arguments)
        return Handle(lambda: self._leaving(finish(), flat))

    def _require_counts(self, *counts: Sequence[int]) -> None:
        for each in counts:
            if len(each) != self.size:
                raise errors.ShapeError(
                    f"Expected one count for each of {self.size} ranks, got {len(each)}."
                )


def _require_groups(groups: Sequence[Sequence[int]], size: int) -> None:
    """Raise `CommunicationError` unless every rank is in exactly one group."""
    members = sorted(rank for group in groups for rank in group)
    if members != list(range(size)):
        raise errors.CommunicationError(
            f"Expected every rank below {size} in exactly one group, got "
            f"{[list(group) for group in groups]}."
        )


def connect(name: str | None = None, /, *, timeout: float = 60.0) -> Communicator:
    """Return the communicator of all processes, by the name of its engine.

    Parameters
    ----------
    name : str, optional
        Name of an engine, such as ``"mpi"``; by default that of the environment variable
        ``KFAC_CORE_COMMUNICATOR``.
    timeout : float
        Seconds to wait for other ranks.

    Returns
    -------
    Communicator
        Over all processes.  Collective: every process calls this.

    Raises
    ------
    UnknownBackendError
        For an unknown name, or none; lists the names that are registered.
    BackendUnavailableError
        If the engine's library is missing, or its processes were not initialized.
    """
    constraints.require_range("name", name, constraints.optional(constraints.TEXT))
    constraints.require_range("timeout", timeout, constraints.POSITIVE)
    chosen = name or os.environ.get(ENVIRONMENT_VARIABLE)
    if not chosen:
        raise _no_engine(chosen)
    adapter = engine(chosen)
    problem = adapter.problem()
    if problem is not None:
        raise errors.BackendUnavailableError(
            f"Communicator {chosen!r} cannot be used here: {problem}."
        )
    communicator: Communicator = adapter.connect(timeout=timeout)
    return communicator


def _no_engine(name: str | None) -> errors.UnknownBackendError:
    return errors.UnknownBackendError(
        f"Unknown communicator {name!r}; registered are {', '.join(communicator_names())}. "
        f"Pass one of these names, or set {ENVIRONMENT_VARIABLE} to it."
    )


def engine(name: str, /) -> Any:
    """Return the adapter of an engine.

    Parameters
    ----------
    name : str
        Name in the entry-point group ``kfac_core.communicators``.

    Returns
    -------
    module
        With ``problem()``, ``versions()`` and ``connect(timeout=...)``.

    Raises
    ------
    UnknownBackendError
        For an unknown name.
    BackendUnavailableError
        If the adapter cannot be imported.
    """
    entry = entry_points_of(ENTRY_POINT_GROUP).get(name)
    if entry is None:
        raise _no_engine(name)
    try:
        return entry.load()
    except ImportError as error:
        raise errors.BackendUnavailableError(
            f"The adapter {entry.value!r} of communicator {name!r} cannot be imported: "
            f"{error}."
        ) from error


def communicator_names() -> tuple[str, ...]:
    """Return the names of the registered engines, whether usable here or not."""
    return tuple(sorted(entry_points_of(ENTRY_POINT_GROUP)))


def _item_size(flat: Array) -> int:
    """Return the bytes of one number of an array."""
    size = getattr(flat, "itemsize", None)
    if size is not None and not callable(size):
        return int(size)
    xp = ns.own_namespace(flat)
    if xp.isdtype(flat.dtype, "real floating"):
        return int(xp.finfo(flat.dtype).bits) // 8
    return int(xp.iinfo(flat.dtype).bits) // 8


def _bytes(flat: Array) -> int:
    return int(flat.shape[0]) * _item_size(flat)
