"""The file of a record: a safetensors container, read without trusting it.

Nothing is executed, unpickled or mapped to memory, and only `RecordError` is raised, also
for a file that becomes shorter meanwhile.  Names, dtypes and shapes are known before any
data are read.  A tensor is read only on request, and only after its dtype and shape have
been accepted, so no more is allocated than the file holds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

import kfac_core.checkpoint.container as containers
from kfac_core.errors import RecordError, StateError
from kfac_core_conformance.records.schema import Shape
from kfac_core_conformance.records.text import one_line, shown

__all__ = ["METADATA_KEY", "Container", "HostArray", "open_container"]

METADATA_KEY = "kfac_core_record"

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""A NumPy array."""

_FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
_INTEGERS = {
    **{f"I{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
}
_READ = _FLOATS | _INTEGERS | {"BOOL": "?", "BF16": "V2"}
"""The dtypes that tensors may have at all, as NumPy's."""

DTYPES: dict[str, tuple[str, ...]] = {
    "floating": (*_FLOATS,),
    "answer": ("F32", "F64"),
    "integer": (*_INTEGERS,),
    "mask": ("BOOL", *_INTEGERS, *_FLOATS),
}
"""The dtypes of safetensors that a tensor may have, by its use."""


@dataclass(frozen=True)
class Container:
    """An open file: the document's text, and tensors that are read by name.

    Attributes
    ----------
    size : int
        The file's size in bytes.
    document : str
        The text of the JSON document.
    tensors : mapping of str to (str, tuple of int)
        Dtype and shape of each tensor, by name.
    """

    size: int
    document: str
    tensors: Mapping[str, tuple[str, Shape]]
    _file: containers.Container

    def shape(self, name: str, kind: str, /) -> Shape:
        """Return the shape of a tensor, after checking everything but its values.

        Parameters
        ----------
        name : str
            The tensor.
        kind : {"floating", "answer", "integer", "mask"}
            Its use.

        Returns
        -------
        tuple of int
            Without a length of zero.

        Raises
        ------
        RecordError
            If it is absent, empty or of another dtype.
        """
        if name not in self.tensors:
            raise RecordError(f"the tensor {name!r} is missing")
        dtype, shape = self.tensors[name]
        if dtype not in DTYPES[kind]:
            raise RecordError(
                f"{name}: expected a dtype among {', '.join(DTYPES[kind])}, got {dtype}"
            )
        if 0 in shape:
            raise RecordError(f"{name}: the tensor is empty, of shape {shown(shape)}")
        return shape

    def load(self, name: str, kind: str, shape: Shape, /) -> HostArray:
        """Read a tensor of a known shape; its values are finite.

        Parameters
        ----------
        name : str
            The tensor.
        kind : {"floating", "answer", "integer", "mask"}
            Its use.
        shape : tuple of int
            The only shape that fits the description.

        Raises
        ------
        RecordError
            As `shape`, and for another shape or values that are not finite.
        """
        found = self.shape(name, kind)
        if found != shape:
            raise RecordError(f"{name}: expected shape {shape}, got {shown(found)}")
        with _only_record_errors(f"{name}: "):
            values: HostArray = self._file.read(name)
        if not np.all(np.isfinite(values)):
            raise RecordError(f"{name}: expected finite values, got NaN or infinity")
        return values


@contextlib.contextmanager
def open_container(path: str | os.PathLike[str], /) -> Iterator[Container]:
    """Open the file of a record.

    Parameters
    ----------
    path : path-like
        A regular file.

    Yields
    ------
    Container
        Valid inside the ``with`` block.

    Raises
    ------
    RecordError
        If it cannot be read as a record's container; the message lacks the file's name.
    """
    with contextlib.ExitStack() as stack:
        with _only_record_errors():
            place = containers.path_of(path)
            opened = stack.enter_context(containers.opened_regular(place))
            file = containers.Container(opened, _READ)
        document = file.metadata.get(METADATA_KEY)
        if document is None:
            raise RecordError(
                f"no record: expected the metadata key {METADATA_KEY!r} with a document"
            )
        tensors = {name: (x.dtype, x.shape) for name, x in file.tensors.items()}
        yield Container(file.bytes, document, tensors, file)


@contextlib.contextmanager
def _only_record_errors(prefix: str = "") -> Iterator[None]:
    """Turn any exception raised while reading into a `RecordError` of one line."""
    try:
        yield
    except RecordError:
        raise
    except StateError as error:
        raise RecordError(f"{prefix}{one_line(str(error))[:300]}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordError(f"{prefix}{one_line(reason)[:200]}") from None
