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
import tempfile
from pathlib import Path
from types import ModuleType

import kfac_core
from kfac_core.checkpoint.digest import tensor_digest, text_digest
from kfac_core.checkpoint.tree import HostArray, folded
from kfac_core.errors import StateError
from kfac_core.estimator import Estimator

__all__ = [
    "DIGEST_KEY",
    "FORMAT",
    "METADATA_KEY",
    "VERSION",
    "load_library",
    "save_checkpoint",
]

METADATA_KEY = "kfac_core_checkpoint"
DIGEST_KEY = "kfac_core_checkpoint_sha256"
FORMAT = "kfac_core.checkpoint"
VERSION = 1


def save_checkpoint(path: str | os.PathLike[str], estimator: Estimator, /) -> None:
    """Write everything that an estimator holds to a file.

    To a temporary file beside it, which takes its name when it is complete: a file of
    that name is the old one or the new one, never a part of one.

    Parameters
    ----------
    path : path-like
        The file, usually ``*.safetensors``; replaced where it exists.
    estimator : Estimator
        Not modified.  This copies its arrays to the host, and waits for them.

    Raises
    ------
    StateError
        Where safetensors is not installed.
    OSError
        As writing a file.
    """
    library = load_library()
    tensors: dict[str, HostArray] = {}
    tree = folded(estimator.state_dict(), "", tensors)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "producer": f"kfac_core {kfac_core.__version__}",
        "digests": {name: tensor_digest(values) for name, values in tensors.items()},
        "state": tree,
    }
    text = json.dumps(document, allow_nan=False)
    metadata = {METADATA_KEY: text, DIGEST_KEY: text_digest(text)}
    target = Path(path)
    handle, temporary = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=".part"
    )
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(library.numpy.save(tensors, metadata=metadata))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


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
