"""What all ranks agree on before any of them raises, changes or trusts anything.

Conventions.  A vote is one small message of float64, added up over the ranks, which has
the same length at every stage: ranks that are at different stages still exchange it, and
then all of them raise an error that names the difference.  It counts the ranks on which
something failed, and compares a digest of what all ranks must do alike: p digests h_r are
equal if ``p sum h_r^2 = (sum h_r)^2``.  Values that do not fit go in a second message,
after the digests were compared.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kfac_core import errors
from kfac_core.distributed.communicator import Communicator

HEAD = 5
"""Numbers of a vote besides its values."""


@dataclass
class Rider:
    """Values that travel with the next vote.

    Attributes
    ----------
    step : str
        What every rank must be doing; see `Agreement.vote`.
    values : numpy.ndarray, shape (k,)
        This rank's summands.
    total : numpy.ndarray, shape (k,), or None
        Their sum over the ranks; None before the vote.
    """

    step: str
    values: np.ndarray[Any, Any]
    total: np.ndarray[Any, Any] | None = field(default=None)


class Agreement:
    """Votes and messages between the ranks of a communicator.

    Parameters
    ----------
    communicator : Communicator
        Communicator of the ranks that take part.

    Attributes
    ----------
    communicator : Communicator
        The same.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def vote(
        self,
        step: str,
        values: ArrayLike = (),
        /,
        *,
        error: Exception | None = None,
    ) -> np.ndarray[Any, Any]:
        """Return the sum of all ranks' values, or raise the same error on all.

        Parameters
        ----------
        step : str
            What every rank must be doing, in parts that ``"; "`` divides.
        values : numbers, shape (k,)
            This rank's summands; as many on all ranks.
        error : Exception, optional
            What failed on this rank, which then need not be at the step of the others.

        Returns
        -------
        numpy.ndarray, shape (k,)
            Sum in float64.

        Raises
        ------
        KFACError
            The error of the lowest rank that failed, on every rank; of the class that
            it had there.
        CommunicationError
            For an error of another library.
        ReplicaError
            If ranks are at different steps; names what differs.
        """
        riders = self.communicator.votes.riders
        step = "; ".join([*(rider.step for rider in riders), step])
        parts = [*(rider.values for rider in riders), np.asarray(values, np.float64)]
        ballot = np.concatenate(parts)
        length = self.communicator.votes.length
        message = np.zeros(length)
        # The head comes first, so that ranks at different steps still add like to like.
        message[0] = error is not None
        message[1:HEAD] = digest_of(f"{step} {len(ballot)}")
        # What does not fit follows below, once the lengths are known to agree.
        first = ballot[: length - HEAD]
        message[HEAD : HEAD + len(first)] = first
        total = self.communicator.all_reduce(message).wait()
        # Errors first: a rank that failed is seldom at the step of the others.
        if total[0]:
            self._raise_first(error)
        if not are_equal(total[1:HEAD], self.communicator.size):
            self._raise_difference(step)
        total = total[HEAD : HEAD + len(first)]
        if len(ballot) > len(first):
            others = self.communicator.all_reduce(ballot[len(first) :]).wait()
            total = np.concatenate([total, others])
        *sums, here = np.split(total, np.cumsum([len(part) for part in parts])[:-1])
        for rider, summed in zip(riders, sums, strict=True):
            rider.total = summed
        riders.clear()
        return np.asarray(here)

    def meet(self, step: str, /, *, error: Exception | None = None) -> None:
        """Vote on a step, unless an earlier vote of the same step has `announced` it."""
        if not self.communicator.votes.announced:
            self.vote(step, error=error)

    @contextmanager
    def riding(self, step: str, values: ArrayLike, /) -> Iterator[Rider]:
        """Send values with the next vote within the context, and its step with its own.

        Parameters
        ----------
        step : str
            What every rank must be doing; see `vote`.
        values : numbers, shape (k,)
            This rank's summands.

        Yields
        ------
        Rider
            Has the sum after the vote.
        """
        rider = Rider(step, np.asarray(values, np.float64))
        riders = self.communicator.votes.riders
        riders.append(rider)
        try:
            yield rider
        finally:
            # After an error nobody may find the riders in a later vote.
            riders.clear()

    @contextmanager
    def announced(self, *, directions_follow: bool = False) -> Iterator[None]:
        """Leave out `meet` within the context: a vote has named all that it would.

        Parameters
        ----------
        directions_follow : bool
            See `Votes`.
        """
        votes = self.communicator.votes
        before = votes.announced, votes.directions_follow
        votes.announced, votes.directions_follow = True, directions_follow
        try:
            yield
        finally:
            votes.announced, votes.directions_follow = before

    def reserve(self, length: int, /) -> None:
        """Make votes at least so long; all ranks call it with the same number."""
        votes = self.communicator.votes
        votes.length = max(votes.length, length)

    def texts(self, text: str, /) -> list[str]:
        """Return the texts of all ranks, in their order."""
        encoded = self.gathered(np.frombuffer(text.encode(), np.uint8))
        return [bytes(part).decode() for part in encoded]

    def gathered(
        self, local: np.ndarray[Any, Any], /, *, length: int | None = None
    ) -> list[np.ndarray[Any, Any]]:
        """Return the one-dimensional arrays of all ranks.

        Parameters
        ----------
        local : numpy.ndarray, shape (k,)
            This rank's array.
        length : int, optional
            k, where it is the same on all ranks.

        Returns
        -------
        list of numpy.ndarray
            In the order of the ranks.
        """
        p = self.communicator.size
        lengths = self._lengths(local) if length is None else [length] * p
        joined = self.communicator.all_gather(local, lengths).wait()
        return np.split(np.asarray(joined), np.cumsum(lengths)[:-1])

    def _lengths(self, local: np.ndarray[Any, Any]) -> list[int]:
        length = np.asarray([local.shape[0]], np.int64)
        ones = [1] * self.communicator.size
        return [int(n) for n in self.communicator.all_gather(length, ones).wait()]

    def _raise_first(self, error: Exception | None) -> None:
        """Raise the first error of all ranks, on every rank."""
        texts = self.texts("" if error is None else json.dumps(error_as_data(error)))
        rank = next(r for r, text in enumerate(texts) if text)
        # The rank that failed raises its exception itself, with the traceback.
        if rank == self.communicator.rank and error is not None:
            raise error
        name = self.communicator.ranks[rank]
        raise error_from_data(json.loads(texts[rank]), name)

    def _raise_difference(self, step: str) -> None:
        """Raise for ranks at different steps, on every rank."""
        steps = [text.split("; ") for text in self.texts(step)]
        rank = next(r for r, other in enumerate(steps) if other != steps[0])
        first = _differing(steps[0], steps[rank])
        second = _differing(steps[rank], steps[0])
        ranks = self.communicator.ranks
        raise errors.ReplicaError(
            f"Rank {ranks[0]} is at {first!r} and rank {ranks[rank]} at {second!r}. All "
            "ranks must call the same methods with the same options."
        )


def digest_of(text: str, /) -> np.ndarray[Any, Any]:
    """Return numbers whose sums over ranks show whether the ranks have one text."""
    digest = zlib.crc32(text.encode())
    # 16 bits each, so that sums of squares over 2^21 ranks are exact in float64.
    halves = np.asarray([digest >> 16, digest & 0xFFFF], np.float64)
    return np.concatenate([halves, halves * halves])


def are_equal(total: np.ndarray[Any, Any], ranks: float, /) -> bool:
    """Return whether texts are equal, by the sum of `digest_of` over so many ranks."""
    sums, squares = ([int(x) for x in half] for half in np.split(total, 2))
    # By Cauchy-Schwarz equality holds only for equal digests.
    return all(int(ranks) * q == s * s for s, q in zip(sums, squares, strict=True))


def _differing(parts: Sequence[str], others: Sequence[str]) -> str:
    """Return the parts of a step that others do not have; all if they have all."""
    return "; ".join([part for part in parts if part not in others] or parts)


def error_as_data(error: Exception, /) -> dict[str, str | None]:
    """Return an error as plain data."""
    reason = getattr(error, "reason", None)
    message = str(error) if reason is None else str(reason)
    factor = getattr(error, "factor", None)
    return {"class": type(error).__name__, "message": message, "factor": factor}


def error_from_data(data: dict[str, str | None], rank: int, /) -> errors.KFACError:
    """Return the error of another rank, which its message names."""
    name, message = data["class"] or "", f"Rank {rank}: {data['message']}"
    cls = getattr(errors, name, None)
    if cls is None:
        return errors.CommunicationError(
            f"Rank {rank} raised {name}: {data['message']}"
        )
    if name == "FactorizationError":
        return errors.FactorizationError(message, factor=data["factor"])
    error: errors.KFACError = cls(message)
    return error
