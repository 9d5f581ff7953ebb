"""Writing an estimator to a file, atomically.

Conventions.  A ``.safetensors`` file whose metadata hold one JSON document under
`METADATA_KEY`: format, version, the release that wrote it, the digest of each tensor, and
`kfac_core.Estimator.state_dict` without its arrays.  These are the tensors: the block's
name, a slash and the path, in which there is none.  The digest of the document stands
under `DIGEST_KEY`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_args

import array_api_compat
import numpy as np

import kfac_core
from kfac_core.array.selection import to_numpy
from kfac_core.checkpoint.digest import tensor_digest, text_digest
from kfac_core.conventions import require_one_of
from kfac_core.errors import StateError
from kfac_core.estimator import Estimator

__all__ = [
    "DIGEST_KEY",
    "FORMAT",
    "METADATA_KEY",
    "VERSION",
    "Parts",
    "load_library",
    "save_checkpoint",
]

METADATA_KEY = "kfac_core_checkpoint"
DIGEST_KEY = "kfac_core_checkpoint_sha256"
FORMAT = "kfac_core.checkpoint"
VERSION = 2

Parts: TypeAlias = Literal["all", "statistics", "operators"]


def save_checkpoint(
    path: str | os.PathLike[str], estimator: Estimator, /, *, parts: Parts = "all"
) -> None:
    """Write the state of an estimator to a file.

    To a temporary file beside it, which takes its name when it is complete: a file of
    that name is the old one or the new one, never a part of one.  A link is followed.

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
    ConventionError
        For other `parts`.
    StateError
        If safetensors is not installed.
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
    require_one_of("parts", parts, get_args(Parts))
    library = load_library()
    state = _only(estimator.state_dict(), parts)
    tensors: dict[str, Any] = {}
    for name, block in state["blocks"].items():
        for inner, value in [*block["values"].items()]:
            if array_api_compat.is_array_api_obj(value):
                # In the order of the axes: the library writes memory as it lies.
                tensors[f"{name}/{inner}"] = np.asarray(to_numpy(value), order="C")
                del block["values"][inner]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "producer": f"kfac_core {kfac_core.__version__}",
        "digests": {name: tensor_digest(values) for name, values in tensors.items()},
        "state": state,
    }
    text = json.dumps(document, allow_nan=False)
    metadata = {METADATA_KEY: text, DIGEST_KEY: text_digest(text)}
    target = Path(os.path.realpath(path))
    # `tempfile` is not used, since its files ignore the umask and are private.
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}.part"
    try:
        with temporary.open("xb") as file:
            file.write(library.numpy.save(tensors, metadata=metadata))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


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


def load_library() -> ModuleType:
    """Import safetensors, which is needed only for files.

    Raises
    ------
    StateError
        If it is not installed, with what to do.
    """
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise StateError(
            "checkpoints need the package safetensors; install it with "
            "pip install 'kfac-core[records]'"
        ) from error
    module: ModuleType = safetensors
    return module
