"""What all ranks agree on before any of them raises, changes or trusts anything.

Conventions.  A vote is one small vector of float64, added up over the ranks.  Its first
entries count the ranks on which something failed, and compare a digest of what all ranks
must do alike: with h_r the digest of rank r, ``sum h_r = p h`` and ``sum h_r^2 = p h^2``
hold on a rank with digest h only if all are equal.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kfac_core import errors
from kfac_core.distributed.communicator import Communicator
from kfac_core.errors import CommunicationError, KFACError, ReplicaError

__all__ = ["Agreement", "told", "untold"]


class Agreement:
    """Votes and messages between the ranks of a communicator.

    Parameters
    ----------
    communicator : Communicator
        Of all ranks that take part.

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
        values: ArrayLike,
        /,
        *,
        error: Exception | None = None,
    ) -> np.ndarray[Any, Any]:
        """Return the sum of all ranks' values, or raise the same error on all.

        Parameters
        ----------
        step : str
            What every rank must be doing.
        values : numbers, shape (k,)
            This rank's summands; of one length on all ranks.
        error : Exception, optional
            What failed on this rank.

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
            If ranks are at different steps.
        """
        p = self.communicator.size
        h = float(zlib.crc32(step.encode()) & 0xFFFFF)
        head = np.asarray([float(error is not None), h, h * h])
        ballot = np.concatenate([head, np.asarray(values, np.float64)])
        total = self.communicator.all_reduce(ballot).wait()
        if total[0]:
            self._raise(error)
        if total[1] != p * h or total[2] != p * h * h:
            steps = self.texts(step)
            rank = next(r for r, other in enumerate(steps) if other != steps[0])
            ranks = self.communicator.ranks
            raise ReplicaError(
                f"Rank {ranks[0]} is at {steps[0]!r} and rank {ranks[rank]} at "
                f"{steps[rank]!r}. All ranks must call the same methods with the "
                "same options."
            )
        return np.asarray(total[3:])

    def texts(self, text: str, /) -> list[str]:
        """Return the texts of all ranks, in their order."""
        found = self.gathered(np.frombuffer(text.encode(), np.uint8))
        return [bytes(part).decode() for part in found]

    def gathered(
        self, own: np.ndarray[Any, Any], /, *, length: int | None = None
    ) -> list[np.ndarray[Any, Any]]:
        """Return the one-dimensional arrays of all ranks.

        Parameters
        ----------
        own : numpy.ndarray, shape (k,)
            This rank's array.
        length : int, optional
            k, where it is the same on all ranks.

        Returns
        -------
        list of numpy.ndarray
            In the order of the ranks.
        """
        p = self.communicator.size
        lengths = self._lengths(own) if length is None else [length] * p
        joined = self.communicator.all_gather(own, lengths).wait()
        return np.split(np.asarray(joined), np.cumsum(lengths)[:-1])

    def _lengths(self, own: np.ndarray[Any, Any]) -> list[int]:
        length = np.asarray([own.shape[0]], np.int64)
        ones = [1] * self.communicator.size
        return [int(n) for n in self.communicator.all_gather(length, ones).wait()]

    def _raise(self, error: Exception | None) -> None:
        """Raise the first error of all ranks, on every rank."""
        found = self.texts("" if error is None else json.dumps(told(error)))
        rank = next(r for r, text in enumerate(found) if text)
        if rank == self.communicator.rank and error is not None:
            raise error
        raise untold(json.loads(found[rank]), self.communicator.ranks[rank])


def told(error: Exception, /) -> dict[str, str | None]:
    """Return an error as plain data."""
    reason = getattr(error, "reason", None)
    message = str(error) if reason is None else str(reason)
    factor = getattr(error, "factor", None)
    return {"class": type(error).__name__, "message": message, "factor": factor}


def untold(data: dict[str, str | None], rank: int, /) -> KFACError:
    """Return the error of another rank, which its message names."""
    name, message = data["class"] or "", f"Rank {rank}: {data['message']}"
    cls = getattr(errors, name, None)
    if cls is None:
        return CommunicationError(f"Rank {rank} raised {name}: {data['message']}")
    if name == "FactorizationError":
        return errors.FactorizationError(message, factor=data["factor"])
    made: KFACError = cls(message)
    return made
