"""Writing an estimator to a file, all of it or nothing.

Conventions.  A ``.safetensors`` file whose metadata hold one JSON document under
`METADATA_KEY`: format, version, the release that wrote it, the digest of each tensor, and
the tree of `kfac_core.checkpoint.tree`, in which layers (with the order of their kernels'
axes), approximations, conventions, decays, weights and ages are written out.  The digest
of the document stands under `DIGEST_KEY`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_args

import kfac_core
from kfac_core.checkpoint.digest import tensor_digest, text_digest
from kfac_core.checkpoint.tree import HostArray, folded
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
VERSION = 1

Parts: TypeAlias = Literal["all", "statistics", "operators"]


def save_checkpoint(
    path: str | os.PathLike[str], estimator: Estimator, /, *, parts: Parts = "all"
) -> None:
    """Write what an estimator holds to a file.

    To a temporary file beside it, which takes its name when it is complete: a file of
    that name is the old one or the new one, never a part of one.  A link is followed.

    Parameters
    ----------
    path : path-like
        The file, usually ``*.safetensors``; replaced where it exists.
    estimator : Estimator
        Not modified.  This copies its arrays to the host, and waits for them.
    parts : {"all", "statistics", "operators"}
        Everything; or the statistics alone, of which a refresh makes the operators
        again; or the operators with their factorizations alone, which multiply as they
        did, while the next update begins new statistics.

    Raises
    ------
    ConventionError
        For other `parts`.
    StateError
        Where safetensors is not installed.
    OSError
        As writing a file.
    """
    require_one_of("parts", parts, get_args(Parts))
    library = load_library()
    tensors: dict[str, HostArray] = {}
    tree = folded(_only(estimator.state_dict(), parts), "", tensors)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "producer": f"kfac_core {kfac_core.__version__}",
        "digests": {name: tensor_digest(values) for name, values in tensors.items()},
        "state": tree,
    }
    text = json.dumps(document, allow_nan=False)
    metadata = {METADATA_KEY: text, DIGEST_KEY: text_digest(text)}
    target = Path(os.path.realpath(path))
    # Not of `tempfile`, whose files nobody else may read, whatever the umask says.
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
    """Return a state with the statistics or the operators of its blocks left out."""
    left_out: dict[Parts, dict[str, Any]] = {
        "all": {},
        "statistics": {"operator": None, "damping": None, "failures": 0},
        "operators": {
            "statistics": None,
            "updates": 0,
            "basis_age": None,
            "moments_missing": False,
        },
    }
    blocks = {
        name: {**block, **left_out[parts]} for name, block in state["blocks"].items()
    }
    return {**state, "blocks": blocks}


def load_library() -> ModuleType:
    """Import safetensors, which only files need.

    Raises
    ------
    StateError
        Where it is not installed, with what to do.
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
