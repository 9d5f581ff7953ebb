"""Reading an estimator from a file, without trusting the file.

Conventions.  Nothing is executed or unpickled, and nothing is changed unless everything
fits.  Only `StateError` comes out, with what came, what was expected and where.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from kfac_core.array.selection import asarray
from kfac_core.checkpoint.digest import tensor_digest, text_digest
from kfac_core.checkpoint.translation import Layouts, renamed, with_layouts_of
from kfac_core.checkpoint.writing import (
    DIGEST_KEY,
    FORMAT,
    METADATA_KEY,
    VERSION,
    load_library,
)
from kfac_core.constraints import require_one_of
from kfac_core.errors import StateError
from kfac_core.estimator import Estimator

__all__ = ["load_checkpoint", "read_header"]

_DTYPES = ("F32", "F64", "I32")


def load_checkpoint(
    path: str | os.PathLike[str],
    estimator: Estimator,
    /,
    *,
    backend: str | None = None,
    names: Mapping[str, str] | None = None,
    layouts: Layouts = "same",
) -> None:
    """Load a checkpoint file into an estimator.

    Parameters
    ----------
    path : path-like
        As `save_checkpoint` wrote it, on whatever backend.
    estimator : Estimator
        With the same blocks and conventions; left as it was where anything does not
        fit.
    backend : str, optional
        ``name[:device]`` on which the arrays are to be; the selected one where left
        out.
    names : mapping of str to str, optional
        By names of blocks in the file, those in the estimator, where they differ.
    layouts : {"same", "any"}
        Whether layers must keep weights and data in the layouts of the file.  Statistics
        and operators are of the block's matrix and have no layout, so that ``"any"``
        changes no number; the order of a layer's inputs and outputs must be the same.

    Raises
    ------
    ConventionError
        For other `layouts`.
    DtypeError
        For float64 on a library in which it is switched off.
    StateError
        For a file that is damaged, incomplete, no checkpoint, of another version, or of
        an estimator with other blocks or conventions.
    UnknownBackendError, BackendUnavailableError
        For an unknown backend.
    """
    require_one_of("layouts", layouts, get_args(Layouts))
    state = _read(path, backend)
    try:
        state = renamed(state, names) if names else state
        if layouts == "any":
            state = with_layouts_of(state, estimator.blocks)
        estimator.load_state_dict(state)
    except StateError as error:
        raise StateError(f"{path}: {error}") from None


def read_header(path: str | os.PathLike[str], /) -> dict[str, Any]:
    """Return the header of a file: its document, and shapes and dtypes of tensors.

    Parameters
    ----------
    path : path-like
        Path of a checkpoint.

    Returns
    -------
    dict
        ``"document"``, the JSON document; ``"tensors"``, dtype and shape by name; and
        ``"bytes"``, the size of the file.

    Raises
    ------
    StateError
        As `load_checkpoint`; no tensor is read.
    """
    with _opened(path) as file:
        document = _document(file, path)
        names = file.keys()
        tensors = {name: _described(file, name) for name in names}
    return {
        "document": document,
        "tensors": tensors,
        "bytes": Path(path).stat().st_size,
    }


def _read(path: str | os.PathLike[str], backend: str | None) -> Any:
    """Return the state in a file, its arrays on a backend."""
    with _opened(path) as file:
        document = _document(file, path)
        state, names = document["state"], set(file.keys())
        if missing := sorted(document["digests"].keys() - names):
            raise StateError(f"{path}: the tensors {missing[:3]} are missing.")
        for name in names:
            values = _tensor(file, name, path)
            if document["digests"].get(name) != tensor_digest(values):
                raise StateError(f"{path}: the tensor {name!r} is damaged.")
            block, _, inner = name.rpartition("/")
            found = state["blocks"].get(block, {"values": {inner}})["values"]
            if inner in found:
                raise StateError(f"{path}: the tensor {name!r} belongs to nothing.")
            found[inner] = asarray(values, backend=backend)
    return state


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a file; whatever its library or the system raises becomes a `StateError`."""
    library = load_library()
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise StateError(f"{path}: not a regular file.")
        handle = library.safe_open(str(path), "numpy")
    except OSError as error:
        raise StateError(f"{path}: {error.strerror or error}.") from None
    except library.SafetensorError as error:
        raise StateError(
            f"{path}: damaged, incomplete, or no .safetensors file ({error})."
        ) from None
    with handle as file:
        yield file


def _document(file: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON document of a file, its format and version checked."""
    text = (file.metadata() or {}).get(METADATA_KEY)
    if text is None:
        raise StateError(
            f"{path}: no checkpoint: expected the metadata key {METADATA_KEY!r}. "
            "Verification records are for `kfac-core verify`."
        )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path}: the document is no JSON: {error}.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StateError(f"{path}: expected a document of format {FORMAT!r}.")
    if document.get("version") != VERSION:
        raise StateError(
            f"{path}: expected version {VERSION} of {FORMAT!r}, got "
            f"{reprlib.repr(document.get('version'))}; it was written by "
            f"{reprlib.repr(document.get('producer', 'an unknown release'))}."
        )
    if (file.metadata() or {}).get(DIGEST_KEY) != text_digest(text):
        raise StateError(f"{path}: the document is damaged.")
    state = document.get("state")
    blocks = state.get("blocks") if isinstance(state, dict) else None
    if not isinstance(blocks, dict) or not all(map(_is_block, blocks.values())):
        raise StateError(f"{path}: the document holds no state, or no blocks.")
    if not isinstance(document.get("digests"), dict):
        raise StateError(f"{path}: the document holds no digests of tensors.")
    return document


def _is_block(part: Any) -> bool:
    """Whether a part of a document has the form of a block."""
    parts = ("layer", "approximation", "values")
    return isinstance(part, dict) and all(
        isinstance(part.get(name), dict) for name in parts
    )


def _described(file: Any, name: str) -> tuple[str, tuple[int, ...]]:
    part = file.get_slice(name)
    return str(part.get_dtype()), tuple(part.get_shape())


def _tensor(file: Any, name: str, path: str | os.PathLike[str]) -> Any:
    """Read a tensor, after its dtype was found good."""
    dtype, _ = _described(file, name)
    if dtype not in _DTYPES:
        raise StateError(
            f"{path}: {name}: expected a dtype among {', '.join(_DTYPES)}, got {dtype}."
        )
    return np.asarray(file.get_tensor(name))
