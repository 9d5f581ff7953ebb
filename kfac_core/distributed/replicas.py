"""Whether processes hold the same of what must be the same."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np

from kfac_core import errors
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.array.structure import leaves
from kfac_core.array.types import Tree
from kfac_core.distributed.agreement import Agreement
from kfac_core.distributed.communicator import Communicator

_PACKAGES = "kfac_core", "kfac_core_backends", "kfac_core_shims"
"""The core, its backends and its integrations, none of which is imported."""


def require_same(communicator: Communicator, values: Mapping[str, Any], /) -> None:
    """Raise `ReplicaError` unless values are equal on all ranks, to the bit.

    Collective.

    Parameters
    ----------
    communicator : Communicator
        Communicator of the ranks.
    values : mapping of str to object
        Texts, arrays and structures of arrays, by what an error calls them.
    """
    local = {name: _digest(value) for name, value in values.items()}
    of_ranks = [json.loads(t) for t in Agreement(communicator).texts(json.dumps(local))]
    first, *_ = communicator.ranks
    for rank, other in zip(communicator.ranks, of_ranks, strict=True):
        names = [
            n for n in {**of_ranks[0], **other} if of_ranks[0].get(n) != other.get(n)
        ]
        if names:
            raise errors.ReplicaError(
                f"Rank {rank} differs from rank {first} in {', '.join(names[:5])}"
                f"{' and more' if len(names) > 5 else ''}. All ranks need the same "
                "code, options and parameters, and must call the same methods."
            )


@functools.cache
def code_digests() -> dict[str, str]:
    """Return a text for each package of this project, equal where all its files are."""
    digests = {}
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # an importer may hide it
            spec = None
        digests[package] = "" if spec is None else _digest_of_files(spec)
    return digests


def _digest_of_files(spec: ModuleSpec) -> str:
    digest = hashlib.sha256()
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(value: Tree) -> str:
    """Return a text that is equal for equal values."""
    digest = hashlib.sha256()
    if isinstance(value, str):
        digest.update(value.encode())
        return digest.hexdigest()
    for path, x in leaves(value):
        host = backend_of(ns.own_namespace(x)).to_numpy(x)
        digest.update(f"{path} {host.dtype} {host.shape}".encode())
        digest.update(np.ascontiguousarray(host).tobytes())
    return digest.hexdigest()
