"""Writing an estimator to a file, atomically.

Conventions.  An archive of arrays (`kfac_core.checkpoint.archive`) with one JSON document:
format, version, the release that wrote it, and `kfac_core.Estimator.state_dict` without its
arrays.  ``tensors`` says by name which array of the archive a tensor is: the block's name,
a slash and the path, in which there is none.  Equal arrays are written once.  A tensor
whose memory is in the order of its columns is written transposed, and named under
``transposed``: roundoff depends on the order, and a run is resumed to the bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import array_api_compat
import numpy as np

import kfac_core
from kfac_core import constraints, errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.array.selection import to_numpy
from kfac_core.checkpoint import archive
from kfac_core.estimator import Estimator
from kfac_core.execution.hosted import host_view
from kfac_core.linalg.packing import Triangle

FORMAT = "kfac_core.checkpoint"
VERSION = 2

Parts: TypeAlias = Literal["all", "statistics", "operators"]


def save_checkpoint(
    path: str | os.PathLike[str],
    estimator: Estimator,
    /,
    *,
    parts: Parts = "all",
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the state of an estimator to a file.

    The file is written under a temporary name and renamed when it is complete, so that it
    is never partial.  A link is followed. Arrays that are equal to the bit are written
    once.

    Parameters
    ----------
    path : path-like
        The file, usually ``*.npz``; replaced where it exists.
    estimator : Estimator
        Estimator; not modified.  Copying its arrays to the host synchronizes with the
        device.
    parts : {"all", "statistics", "operators"}
        Everything; or the statistics alone, of which a refresh makes the operators
        again; or the operators with their factorizations alone, which multiply as they
        did, while the next update begins new statistics.
    about : mapping, optional
        What the caller notes about the file, as JSON; `read_header` returns it in the
        document.

    Raises
    ------
    ArgumentError
        For an invalid path or estimator.
    ConventionError
        For other `parts`.
    StateError
        If something stands at the path that is not a regular file, or for a damping that
        could not be loaded.
    OSError
        As writing a file.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> blocks = {"fc": kc.Block(layer, kc.Kronecker())}
    >>> estimator = kc.Estimator(blocks, reduction="sum")
    >>> estimator.update({"fc": kc.Batch(np.ones((4, 3)), np.ones((4, 2)))})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "curvature.npz"
    ...     kc.save_checkpoint(path, estimator)
    ...     again = kc.Estimator(blocks, reduction="sum")
    ...     kc.load_checkpoint(path, again)
    """
    constraints.require_kind("estimator", estimator, Estimator, "an Estimator")
    constraints.require_range("parts", parts, constraints.literal(Parts))
    target = target_of(path)
    state = _only(estimator.state_dict(deferred=True), parts)
    tensors: dict[str, int] = {}
    transposed: list[str] = []
    document = {
        "format": FORMAT,
        "version": VERSION,
        "producer": f"kfac_core {kfac_core.__version__}",
        "tensors": tensors,
        "transposed": transposed,
        "state": state,
    }
    if about is not None:
        document["about"] = dict(about)
    write_atomically(target, document, _arrays(state["blocks"], tensors, transposed))


def _arrays(
    blocks: Mapping[str, Any], tensors: dict[str, int], transposed: list[str]
) -> Iterator[archive.StoredArray]:
    """Yield the arrays of a state that differ; note by name which array a tensor is."""
    indices: dict[bytes, int] = {}
    for name, block in blocks.items():
        for inner, value in [*block["values"].items()]:
            values: archive.StoredArray
            if isinstance(value, Triangle):
                view = _on_host(value.array)
                values = to_numpy(value()) if view is None else Triangle(view)
            elif array_api_compat.is_array_api_obj(value):
                view = _on_host(value)
                values = to_numpy(value) if view is None else view
                if not ns.is_row_major(values):
                    transposed.append(f"{name}/{inner}")
                    values = np.swapaxes(values, -1, -2)
                values = np.asarray(values, order="C")
                del view
            else:
                continue
            # Equal arrays, as of shared factors, are stored once.
            key = _key(values)
            is_new = key not in indices
            tensors[f"{name}/{inner}"] = indices.setdefault(key, len(indices))
            # One array at a time is on the host, and none outlives its write.
            del block["values"][inner], value
            if is_new:
                yield values
            del values


def target_of(path: str | os.PathLike[str], /) -> Path:
    """Return the file that a checkpoint replaces; raise for what is not a regular file."""
    target = Path(os.path.realpath(archive.path_of(path)))
    if os.path.lexists(target) and not target.is_file():
        raise errors.StateError(
            f"{target}: not a regular file; it would be replaced. Give another path."
        )
    return target


def write_atomically(
    target: Path,
    document: Mapping[str, Any],
    arrays: Iterable[archive.StoredArray],
    /,
) -> None:
    """Write a document and arrays, one after the other, to a file that replaces another.

    Parameters
    ----------
    target : Path
        The file.
    document : mapping
        What is not an array, as JSON; read after the arrays.
    arrays : iterable of numpy.ndarray or Triangle
        Arrays in the order that the document says.
    """
    # Not by `tempfile`, which creates private files and ignores the umask.
    temporary = target.with_name(f".{target.name[:48]}.{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as file:
            archive.write_archive(file, document, arrays)
            file.flush()
            # Before the rename: a crash must not leave a new name for data that never
            # reached the disk.
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _on_host(x: Array) -> np.ndarray[Any, np.dtype[Any]] | None:
    """Return an array as NumPy reads it where it lies; None where it must be copied."""
    if isinstance(x, np.ndarray):
        return x
    return host_view(x, xp=ns.own_namespace(x))


def _key(values: archive.StoredArray) -> bytes:
    """Return a digest that is equal for equal arrays."""
    digest = hashlib.sha256(f"{values.dtype.name} {values.shape}".encode())
    for piece in archive.pieces_of(values):
        digest.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return digest.digest()


def _only(state: dict[str, Any], parts: Parts) -> dict[str, Any]:
    """Leave the statistics or the operators of the blocks out of a state."""
    left_out: dict[Parts, tuple[str, dict[str, int]]] = {
        "all": ("", {}),
        "statistics": ("operator.", {"failures": 0}),
        "operators": (
            "statistics.",
            {"updates": 0, "basis_age": -1, "moments_missing": 0},
        ),
    }
    start, counts = left_out[parts]
    for block in state["blocks"].values():
        values = block["values"]
        for path in [p for p in values if start and p.startswith(start)]:
            del values[path]
        values.update(counts)
        if parts == "statistics":
            values.pop("damping", None)
    return state
