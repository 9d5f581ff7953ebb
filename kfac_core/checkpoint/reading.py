"""Reading an estimator from a file, without trusting the file.

Conventions.  Nothing is executed or unpickled, and nothing is changed unless everything
fits.  A damaged file raises only `StateError`, with the place, the value and the
expectation. A tensor is read only after its shape was compared with the estimator's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kfac_core import constraints, errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.array.selection import asarray, selected_backend
from kfac_core.checkpoint import writing
from kfac_core.checkpoint.archive import Archive, opened, path_of
from kfac_core.checkpoint.translation import Layouts, renamed, with_layouts_of
from kfac_core.constraints import shown
from kfac_core.estimator import Estimator
from kfac_core.serialization import DeferredArray


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
        With the same blocks and conventions; unchanged if anything does not fit.
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
    ...     path = f"{folder}/curvature.npz"
    ...     kc.save_checkpoint(path, saved)
    ...     kc.load_checkpoint(path, loaded)
    >>> V = {"fc": {"weight": np.ones((3, 2)), "bias": np.ones(2)}}
    >>> a, b = (e.precondition(V)["fc"]["weight"] for e in (saved, loaded))
    >>> bool((a == b).all())
    True
    """
    constraints.require_kind("estimator", estimator, Estimator, "an Estimator")
    constraints.require_options(
        locals(),
        backend=constraints.optional(constraints.TEXT),
        names=constraints.optional(constraints.mapping_to(constraints.TEXT)),
        layouts=constraints.literal(Layouts),
    )
    selected_backend(backend)
    with opened(path) as archive:
        state = _state(archive, _document(archive), backend)
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
    with opened(path) as archive:
        document = _document(archive)
        blocks = _state(archive, copy.deepcopy(document), "numpy")["blocks"]
        return {
            "document": document,
            "tensors": {
                f"{name}/{path}": (value.dtype, value.shape)
                for name, block in blocks.items()
                for path, value in block["values"].items()
                if isinstance(value, DeferredArray)
            },
            "bytes": path_of(path).stat().st_size,
        }


def join_checkpoints(
    path: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]],
    /,
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the blocks of several files to one, an array at a time.

    Parameters
    ----------
    path : path-like
        The file; replaced where it exists.
    parts : sequence of path-like
        Checkpoints of other blocks each, under the same conventions and settings.
    about : mapping, optional
        As of `save_checkpoint`.

    Raises
    ------
    StateError
        For files that `load_checkpoint` would not read, that have a block in common, or
        that differ in conventions or settings.  `path` is then as it was.
    """
    constraints.require_any("parts", parts)
    target = writing.target_of(path)
    with contextlib.ExitStack() as stack:
        archives = [stack.enter_context(opened(part)) for part in parts]
        documents = [_document(archive) for archive in archives]
        joined, first = documents[0], {**documents[0]["state"], "blocks": None}
        lengths = [1 + max(d["tensors"].values(), default=-1) for d in documents]
        for number, document in enumerate(documents[1:], 1):
            state = document["state"]
            if {**state, "blocks": None} != first:
                raise errors.StateError(
                    f"{parts[number]}: has other conventions or settings than {parts[0]}."
                )
            if common := joined["state"]["blocks"].keys() & state["blocks"].keys():
                raise errors.StateError(
                    f"{parts[number]}: has blocks of the files before, {sorted(common)}."
                )
            joined["state"]["blocks"].update(state["blocks"])
            # Arrays are written one after the other, so indices of a part move by the
            # arrays before it.
            start = sum(lengths[:number])
            joined["tensors"].update(
                {name: start + index for name, index in document["tensors"].items()}
            )
            joined["transposed"] += document["transposed"]
        if about is not None:
            joined["about"] = dict(about)

        def arrays() -> Iterator[Any]:
            for archive, length in zip(archives, lengths, strict=True):
                yield from map(archive.read, range(length))

        writing.write_atomically(target, joined, arrays())


def _state(archive: Archive, document: dict[str, Any], backend: str | None) -> Any:
    """Return the state in a file, whose arrays are read when they are asked for."""
    blocks = document["state"]["blocks"]
    transposed = frozenset(document["transposed"])
    headers = {
        index: archive.header(index) for index in {*document["tensors"].values()}
    }
    for name, index in document["tensors"].items():
        block, _, path = name.rpartition("/")
        if block not in blocks or path in blocks[block]["values"]:
            raise errors.StateError(
                f"the tensor {shown(name)} does not belong to any block."
            )
        dtype, shape = headers[index]
        if name in transposed:
            shape = (*shape[:-2], *shape[-2:][::-1])
        blocks[block]["values"][path] = DeferredArray(
            dtype,
            shape,
            functools.partial(_read, archive, index, name in transposed, backend),
            functools.partial(asarray, np.zeros((), dtype), backend=backend),
        )
    return document["state"]


def _read(archive: Archive, index: int, transposed: bool, backend: str | None) -> Array:
    values = asarray(archive.read(index), backend=backend)
    if transposed and values.ndim > 1:
        return ns.own_namespace(values).matrix_transpose(values)
    return values


def _document(archive: Archive) -> dict[str, Any]:
    """Return the JSON document of a file, its format and version checked."""
    text = archive.document()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.StateError(
            f"the document is not JSON: {shown(str(error))}."
        ) from None
    good = isinstance(document, dict) and document.get("format") == writing.FORMAT
    _require(good, f"a document of format {writing.FORMAT!r}")
    version = document.get("version")
    producer = shown(document.get("producer", "an unknown release"))
    # A JSON true equals 1 in Python.
    good = type(version) is int and version == writing.VERSION
    actual = f"{shown(version)}; it was written by {producer}"
    _require(good, f"version {writing.VERSION} of {writing.FORMAT!r}, got {actual}")
    state, tensors = document.get("state"), document.get("tensors")
    blocks = state.get("blocks") if isinstance(state, dict) else None
    good = isinstance(blocks, dict) and all(map(_is_block, blocks.values()))
    _require(good, "a document with a state of blocks")
    indices = tensors.values() if isinstance(tensors, dict) else [None]
    good = all(type(index) is int for index in indices)
    _require(good, "a document that says where its tensors are")
    transposed = document.get("transposed")
    good = isinstance(transposed, list) and all(isinstance(n, str) for n in transposed)
    _require(good, "a document that says which tensors are transposed")
    checked: dict[str, Any] = document
    return checked


def _require(good: bool, expected: str) -> None:
    """Raise unless a document is as expected."""
    if not good:
        raise errors.StateError(f"expected {expected}.")


def _is_block(part: object) -> bool:
    """Whether a part of a document has the form of a block."""
    parts = ("layer", "approximation", "values")
    return isinstance(part, dict) and all(
        isinstance(part.get(name), dict) for name in parts
    )
