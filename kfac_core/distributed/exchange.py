"""Structures and directions that some processes have, sent to all of a communicator."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.distributed import transport
from kfac_core.distributed.agreement import Agreement
from kfac_core.distributed.communicator import Communicator

Vectors = Mapping[str, Array]
"""Arrays by parameter."""


class Exchange:
    """Sends structures of arrays to all ranks of a communicator.

    Their forms are sent only if they have changed.

    Parameters
    ----------
    communicator : Communicator
        Communicator of the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._agreement = Agreement(communicator)
        self._known: tuple[tuple[int, ...], list[Any]] | None = None

    def __call__(
        self, local: Mapping[str, Any], like: Array, /, *, dtype: str | None = None
    ) -> dict[str, Any]:
        """Return the values of all ranks, by name.

        Parameters
        ----------
        local : mapping of str to structure
            This rank's values, of names that no other rank has.
        like : array
            Array of their library and device.
        dtype : str, optional
            Dtype in which floating numbers are sent, if it is narrower than their own.

        Returns
        -------
        dict of str to structure
            This rank's values are those given, rounded as they were sent.
        """
        communicator = self._agreement.communicator
        packed = transport.pack(dict(local), shared=True)
        forms = self._forms_of_all(packed.form)
        lengths = [transport.lengths_of(form) for form in forms]
        handles = {}
        for name in sorted({name for of_rank in lengths for name in of_rank}):
            counts = [of_rank.get(name, 0) for of_rank in lengths]
            flat = transport.in_dtype(
                packed.flat(name, like), transport.narrower(name, dtype)
            )
            handles[name] = counts, communicator.all_gather(flat, counts)
        arrived = {
            name: _parts(transport.in_dtype(handle.wait(), name), counts)
            for name, (counts, handle) in handles.items()
        }
        values: dict[str, Any] = {}
        for member, form in enumerate(forms):
            if member == communicator.rank:
                values |= (
                    local if dtype is None else transport.rounded(dict(local), dtype)
                )
            else:
                arrays = {name: parts[member] for name, parts in arrived.items()}
                values |= transport.unpack(form, arrays)
        return values

    def _forms_of_all(self, form: transport.Form) -> list[Any]:
        """Return the forms of all ranks, which are sent only where they are new."""
        text = json.dumps(form)
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int64)
        digests = tuple(
            int(part[0]) for part in self._agreement.gathered(digest, length=1)
        )
        if self._known is None or self._known[0] != digests:
            # All ranks see the same digests, so that all of them send or none.
            texts = self._agreement.texts(text)
            self._known = digests, [json.loads(text) for text in texts]
        return self._known[1]


class SentDirections:
    """Directions of some blocks on their way to all ranks of a communicator.

    Collective: every rank makes one of the same blocks.

    Parameters
    ----------
    communicator : Communicator
        Communicator of ranks that together hold all operators.
    names : sequence of sequence of str
        Blocks whose directions each rank has.
    vectors : mapping of str to mapping of str to array
        Vectors of all these blocks, which have the forms of the directions.
    local : mapping of str to mapping of str to array
        Directions of this rank.
    failed : bool
        Whether there are none, since something failed.
    dtype : str, optional
        Dtype in which directions are sent, if it is narrower than their own.
    """

    def __init__(
        self,
        communicator: Communicator,
        names: Sequence[Sequence[str]],
        vectors: Mapping[str, Vectors],
        local: Mapping[str, Vectors],
        *,
        failed: bool,
        dtype: str | None = None,
    ) -> None:
        # By dtype, for each rank: the arrays that it sends, as (name, parameter, array).
        parts: dict[str, list[list[tuple[str, str, Array]]]] = {}
        for rank, blocks in enumerate(names):
            for name in blocks:
                for key, x in (local.get(name) or vectors[name]).items():
                    of_ranks = parts.setdefault(
                        transport.dtype_name(x), [[] for _ in names]
                    )
                    of_ranks[rank].append((name, key, x))
        self._sent = []
        for own_dtype, of_ranks in sorted(parts.items()):
            like = next(x for entries in of_ranks for *_, x in entries)
            # One more number says whether the rank failed.
            counts = [1 + sum(_size(x) for *_, x in sent) for sent in of_ranks]
            flat = _flat_with_flag(of_ranks[communicator.rank], like, failed)
            flat = transport.in_dtype(flat, transport.narrower(own_dtype, dtype))
            handle = communicator.all_gather(flat, counts)
            self._sent.append((own_dtype, of_ranks, counts, handle))

    def wait(self) -> tuple[dict[str, dict[str, Any]], bool]:
        """Return the directions by block and parameter, and whether a rank failed.

        This rank's directions are rounded as it sent them.
        """
        directions: dict[str, dict[str, Any]] = {}
        failed = False
        for own_dtype, of_ranks, counts, handle in self._sent:
            arrived = _parts(transport.in_dtype(handle.wait(), own_dtype), counts)
            for entries, flat in zip(of_ranks, arrived, strict=True):
                failed = failed or bool(flat[0] != 0)
                start = 1
                for name, key, x in entries:
                    stop = start + _size(x)
                    xp = ns.own_namespace(flat)
                    direction = xp.reshape(flat[start:stop], tuple(x.shape))
                    directions.setdefault(name, {})[key] = direction
                    start = stop
        return directions, failed


def _flat_with_flag(
    entries: Sequence[tuple[str, str, Array]], like: Array, failed: bool
) -> Array:
    xp = ns.own_namespace(like)
    flag = xp.full((1,), float(failed), dtype=like.dtype, device=ns.device_of(like))
    return xp.concat([flag, *(xp.reshape(x, (-1,)) for *_, x in entries)])


def _parts(flat: Array, counts: Sequence[int]) -> list[Array]:
    starts = [sum(counts[:k]) for k in range(len(counts))]
    return [flat[a : a + n] for a, n in zip(starts, counts, strict=True)]


def _size(x: Array) -> int:
    return math.prod(int(n) for n in x.shape)
