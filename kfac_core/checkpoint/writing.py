"""Writing an estimator to a file, atomically.

Conventions.  A ``.safetensors`` file whose metadata hold one JSON document under
`METADATA_KEY`: format, version, the release that wrote it, the digest of each tensor, and
`kfac_core.Estimator.state_dict` without its arrays.  These are the tensors: the block's
name, a slash and the path, in which there is none.  Of several tensors with one digest only
the first is in the file.  A tensor whose memory is in the order of its columns is written
transposed, and named under ``transposed``: roundoff depends on the order, and a run is
resumed to the bit.  The digest of the document stands under `DIGEST_KEY`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, get_args

import array_api_compat
import numpy as np

import kfac_core
from kfac_core.array.namespaces import is_row_major
from kfac_core.array.selection import to_numpy
from kfac_core.checkpoint.container import path_of, write_container
from kfac_core.checkpoint.digest import tensor_digest, text_digest
from kfac_core.constraints import one_of, require_kind, require_range
from kfac_core.errors import StateError
from kfac_core.estimator import Estimator

__all__ = [
    "DIGEST_KEY",
    "FORMAT",
    "METADATA_KEY",
    "VERSION",
    "Parts",
    "save_checkpoint",
]

METADATA_KEY = "kfac_core_checkpoint"
DIGEST_KEY = "kfac_core_checkpoint_sha256"
FORMAT = "kfac_core.checkpoint"
VERSION = 2

_LONGEST_START = 200
"""Bytes of a file's name that the name of its temporary file may begin with."""

Parts: TypeAlias = Literal["all", "statistics", "operators"]


def save_checkpoint(
    path: str | os.PathLike[str], estimator: Estimator, /, *, parts: Parts = "all"
) -> None:
    """Write the state of an estimator to a file.

    To a temporary file beside it, which takes its name when it is complete: a file of
    that name is the old one or the new one, never a part of one, also after a loss of
    power.  A link is followed.  A file that is replaced keeps its mode, and its owner
    where that is allowed.  Arrays that are equal to the bit are written once.

    Parameters
    ----------
    path : path-like
        The file, usually ``*.safetensors``; replaced where it exists.
    estimator : Estimator
        Estimator; not modified.  Copying its arrays to the host synchronizes with the
        device.
    parts : {"all", "statistics", "operators"}
        Everything; or the statistics alone, of which a refresh makes the operators
        again; or the operators with their factorizations alone, which multiply as they
        did, while the next update begins new statistics.

    Raises
    ------
    ArgumentError
        For a path or an estimator that is none.
    ConventionError
        For other `parts`.
    StateError
        If something stands at the path that is no regular file, or its folder is missing.
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
    ...     path = Path(folder) / "curvature.safetensors"
    ...     kc.save_checkpoint(path, estimator)
    ...     again = kc.Estimator(blocks, reduction="sum")
    ...     kc.load_checkpoint(path, again)
    """
    target = Path(os.path.realpath(path_of(path)))
    require_kind("estimator", estimator, Estimator, "an Estimator")
    require_range("parts", parts, one_of(*get_args(Parts)))
    before = _replaceable(target)
    state = _only(estimator.state_dict(), parts)
    tensors: dict[str, Any] = {}
    digests: dict[str, str] = {}
    written: set[str] = set()
    transposed: list[str] = []
    for name, block in state["blocks"].items():
        for inner, value in [*block["values"].items()]:
            if array_api_compat.is_array_api_obj(value):
                values = to_numpy(value)
                if not is_row_major(values):
                    transposed.append(f"{name}/{inner}")
                    values = np.swapaxes(values, -1, -2)
                values = np.asarray(values, order="C")
                digest = tensor_digest(values)
                # The arrays that an operator shares with statistics are written once.
                if digest not in written:
                    written.add(digest)
                    tensors[f"{name}/{inner}"] = values
                digests[f"{name}/{inner}"] = digest
                del block["values"][inner]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "producer": f"kfac_core {kfac_core.__version__}",
        "digests": digests,
        "transposed": transposed,
        "state": state,
    }
    text = json.dumps(document, allow_nan=False)
    metadata = {METADATA_KEY: text, DIGEST_KEY: text_digest(text)}
    temporary = _beside(target)
    try:
        with _created(temporary, before) as file:
            write_container(file, tensors, metadata)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


def _replaceable(target: Path) -> os.stat_result | None:
    """Return what is known of the file that is replaced; None if there is none."""
    try:
        before = target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        if not target.parent.is_dir():
            raise StateError(
                f"{target}: there is no folder {target.parent}. Make it first."
            ) from None
        return None
    if not stat.S_ISREG(before.st_mode):
        raise StateError(
            f"{target}: not a regular file; it would be replaced. Give another path."
        )
    return before


def _beside(target: Path) -> Path:
    """Return a new name in the folder of a file, no longer than names may be."""
    name = target.name
    if len(os.fsencode(name)) > _LONGEST_START:
        name = name[: _LONGEST_START // 4]
    # `tempfile` is not used, since its files ignore the umask and are private.
    return target.parent / f".{name}.{secrets.token_hex(8)}.part"


def _created(temporary: Path, before: os.stat_result | None) -> BinaryIO:
    """Create a file with the mode and the owner of the one that it replaces."""
    if before is None:
        return temporary.open("xb")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(temporary, flags, 0o600)
    file = os.fdopen(descriptor, "wb")
    if hasattr(os, "fchmod"):
        try:
            # Only a superuser may give a file away; others keep their own.
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
        except BaseException:
            file.close()
            raise
    return file


def _sync_folder(folder: Path) -> None:
    """Write a renaming to the disk, where folders can be synchronized."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # A folder that may be written to and not read.
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


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
