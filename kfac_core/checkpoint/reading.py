"""Reading an estimator from a file, without trusting the file.

Conventions.  Nothing is executed or unpickled, and nothing is changed unless everything
fits.  Only `StateError` comes out, with what came, what was expected and where.  A tensor
is read only after its shape was found to be one that the estimator has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np

from kfac_core.array.namespaces import own_namespace
from kfac_core.array.selection import asarray, selected_backend
from kfac_core.checkpoint.container import Container, opened
from kfac_core.checkpoint.digest import tensor_digest, text_digest
from kfac_core.checkpoint.translation import Layouts, renamed, with_layouts_of
from kfac_core.checkpoint.writing import DIGEST_KEY, FORMAT, METADATA_KEY, VERSION
from kfac_core.constraints import (
    TEXT,
    mapping_to,
    one_of,
    optional,
    require_kind,
    require_options,
    shown,
)
from kfac_core.errors import StateError
from kfac_core.estimator import Estimator
from kfac_core.serialization import DeferredArray

__all__ = ["load_checkpoint", "read_header"]

_KEYS = {"format", "version", "producer", "digests", "transposed", "state"}


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
    StateError
        For a file that is damaged, incomplete, no checkpoint, of another version, or of
        an estimator with other blocks or conventions; and for float64 on a library in
        which it is switched off.
    UnknownBackendError, BackendUnavailableError
        For an unknown backend.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> blocks = {"fc": kc.Block(layer, kc.Kronecker())}
    >>> saved, loaded = (
    ...     kc.Estimator(blocks, reduction="sum", damping=0.1) for _ in range(2)
    ... )
    >>> saved.update({"fc": kc.Batch(np.ones((4, 3)), np.ones((4, 2)))})
    >>> saved.refresh()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/curvature.safetensors"
    ...     kc.save_checkpoint(path, saved)
    ...     kc.load_checkpoint(path, loaded)
    >>> V = {"fc": {"weight": np.ones((3, 2)), "bias": np.ones(2)}}
    >>> a, b = (e.precondition(V)["fc"]["weight"] for e in (saved, loaded))
    >>> bool((a == b).all())
    True
    """
    require_kind("estimator", estimator, Estimator, "an Estimator")
    require_options(
        locals(),
        backend=optional(TEXT),
        names=optional(mapping_to(TEXT)),
        layouts=one_of(*get_args(Layouts)),
    )
    with opened(path) as file:
        state = _state(file, backend)
        state = renamed(state, names) if names else state
        if layouts == "any":
            state = with_layouts_of(state, estimator.blocks)
        estimator.load_state_dict(state)


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
    with opened(path) as file:
        document = _document(file)
        places = _places(file, document["digests"])
        tensors = {
            name: (file.tensors[place].dtype, _shape(file, name, place, document))
            for name, place in places.items()
        }
        return {
            "document": document,
            "tensors": tensors,
            "bytes": file.bytes,
        }


def _state(file: Container, backend: str | None) -> Any:
    """Return the state in a file, whose arrays are read when they are asked for."""
    document = _document(file)
    state, digests = document["state"], document["digests"]
    selected_backend(backend)
    for name, place in _places(file, digests).items():
        block, _, inner = name.rpartition("/")
        found = state["blocks"].get(block, {"values": {inner}})["values"]
        if inner in found:
            raise StateError(f"the tensor {shown(name)} belongs to nothing.")
        found[inner] = DeferredArray(
            file.tensors[place].numpy_dtype.name,
            _shape(file, name, place, document),
            _reader(file, name, place, document, backend),
            _maker(file, place, backend),
        )
    return state


def _places(file: Container, digests: Mapping[str, str]) -> dict[str, str]:
    """Return for each tensor the name under which its numbers are in the file."""
    if unknown := sorted(file.tensors.keys() - digests.keys()):
        raise StateError(f"the tensors {shown(unknown)} have no digests.")
    held = {digests[name]: name for name in reversed(file.tensors)}
    found: dict[str, str] = {}
    for name, digest in digests.items():
        if name not in file.tensors and digest not in held:
            raise StateError(f"the tensor {shown(name)} is missing.")
        found[name] = name if name in file.tensors else held[digest]
    return found


def _shape(
    file: Container, name: str, place: str, document: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the shape of a tensor, which may be in the file transposed."""
    shape = file.tensors[place].shape
    if name in document["transposed"] and len(shape) > 1:
        return (*shape[:-2], shape[-1], shape[-2])
    return shape


def _reader(
    file: Container,
    name: str,
    place: str,
    document: Mapping[str, Any],
    backend: str | None,
) -> Callable[[], Any]:
    """Return what reads a tensor and compares it with its digest."""

    def read() -> Any:
        values = file.read(place)
        if tensor_digest(values) != document["digests"][name]:
            raise StateError(f"the tensor {shown(name)} is damaged.")
        made = asarray(values, backend=backend)
        if name in document["transposed"] and made.ndim > 1:
            return own_namespace(made).matrix_transpose(made)
        return made

    return read


def _maker(file: Container, place: str, backend: str | None) -> Callable[[], Any]:
    """Return what makes a 0-d array of a tensor's dtype."""
    zero = np.zeros((), file.tensors[place].numpy_dtype)
    return lambda: asarray(zero, backend=backend)


def _document(file: Container) -> dict[str, Any]:
    """Return the JSON document of a file, its format and version checked."""
    text = file.metadata.get(METADATA_KEY)
    if text is None:
        raise StateError(
            f"no checkpoint: expected the metadata key {METADATA_KEY!r}. Verification "
            "records are for `kfac-core verify`."
        )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"the document is no JSON: {shown(str(error))}.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StateError(f"expected a document of format {FORMAT!r}.")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise StateError(
            f"expected version {VERSION} of {FORMAT!r}, got {shown(version)}; it was "
            f"written by {shown(document.get('producer', 'an unknown release'))}."
        )
    if file.metadata.get(DIGEST_KEY) != text_digest(text):
        raise StateError("the document is damaged.")
    if unknown := sorted(document.keys() - _KEYS):
        raise StateError(f"the document has unknown parts: {shown(unknown)}.")
    state = document.get("state")
    blocks = state.get("blocks") if isinstance(state, dict) else None
    if not isinstance(blocks, dict) or not all(map(_is_block, blocks.values())):
        raise StateError("the document holds no state, or no blocks.")
    digests = document.get("digests")
    if not isinstance(digests, dict) or not all(
        isinstance(digest, str) for digest in digests.values()
    ):
        raise StateError("the document holds no digests of tensors.")
    transposed = document.get("transposed")
    if not isinstance(transposed, list) or not all(
        isinstance(name, str) and name in digests for name in transposed
    ):
        raise StateError("the document does not say which tensors are transposed.")
    return document


def _is_block(part: Any) -> bool:
    """Whether a part of a document has the form of a block."""
    parts = ("layer", "approximation", "values")
    return isinstance(part, dict) and all(
        isinstance(part.get(name), dict) for name in parts
    )
