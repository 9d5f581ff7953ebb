"""The file of a record: a safetensors container, read without trusting it.

Conventions.  Nothing is executed or unpickled, and only `RecordError` comes out.  Names,
dtypes and shapes are known before any data are read; a tensor is read only when it is
asked for, and only after its dtype and shape have been found good, so that what is
allocated is never more than the file holds.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias

import numpy as np

from kfac_core.errors import RecordError
from kfac_core_conformance.records.fields import one_line, shown

__all__ = ["METADATA_KEY", "Container", "HostArray", "load_library", "open_container"]

METADATA_KEY = "kfac_core_record"

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""An array of NumPy."""

_FLOATS = ("F16", "F32", "F64")
_INTEGERS = ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")
DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "floating": _FLOATS,
        "answer": ("F32", "F64"),
        "integer": _INTEGERS,
        "mask": ("BOOL", *_INTEGERS, *_FLOATS),
    }
)
"""The dtypes of safetensors that a tensor may have, by what it is for."""


@dataclass(frozen=True)
class Container:
    """An open file: the document's text, and tensors to be asked for by name.

    Attributes
    ----------
    size : int
        The file's, in bytes.
    document : str
        The text of the JSON document.
    tensors : mapping of str to (str, tuple of int)
        Dtype and shape of each tensor, by name.
    """

    size: int
    document: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    _file: Any

    def shape(self, name: str, kind: str, /) -> tuple[int, ...]:
        """Return the shape of a tensor, after checking everything but its values.

        Parameters
        ----------
        name : str
            The tensor.
        kind : {"floating", "answer", "integer", "mask"}
            What it is for.

        Returns
        -------
        tuple of int
            Without a length of zero.

        Raises
        ------
        RecordError
            Where it is absent, empty or of another dtype.
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

    def load(self, name: str, kind: str, shape: tuple[int, ...], /) -> HostArray:
        """Read a tensor of a known shape.

        Parameters
        ----------
        name : str
            The tensor.
        kind : {"floating", "answer", "integer", "mask"}
            What it is for.
        shape : tuple of int
            The only one that fits the description.

        Returns
        -------
        numpy.ndarray
            Finite.

        Raises
        ------
        RecordError
            As `shape`, and for another shape or values that are not finite.
        """
        found = self.shape(name, kind)
        if found != shape:
            raise RecordError(f"{name}: expected shape {shape}, got {shown(found)}")
        with _only_record_errors(f"{name}: "):
            values: HostArray = np.asarray(self._file.get_tensor(name))
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
        Good as long as the block of code lasts.

    Raises
    ------
    RecordError
        Where it cannot be read as a record's container, without the file's name.
    """
    file = Path(path)
    with _only_record_errors():
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise RecordError("not a regular file; expected a .safetensors file")
        handle = load_library().safe_open(str(file), "numpy")
    with handle as opened:
        with _only_record_errors():
            document = (opened.metadata() or {}).get(METADATA_KEY)
            names = opened.keys()
            tensors = {name: _described(opened, name) for name in names}
        if document is None:
            raise RecordError(
                f"no record: expected the metadata key {METADATA_KEY!r} with a document"
            )
        yield Container(status.st_size, document, MappingProxyType(tensors), opened)


def load_library() -> ModuleType:
    """Import safetensors, which only records need.

    Raises
    ------
    RecordError
        Where it is not installed, with what to do.
    """
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise RecordError(
            "records need the package safetensors; install it with "
            "pip install 'kfac-core[records]'"
        ) from error
    module: ModuleType = safetensors
    return module


def _described(opened: Any, name: str) -> tuple[str, tuple[int, ...]]:
    part = opened.get_slice(name)
    return str(part.get_dtype()), tuple(part.get_shape())


@contextlib.contextmanager
def _only_record_errors(prefix: str = "") -> Iterator[None]:
    """Turn whatever reading a file raises into a `RecordError` of one line."""
    try:
        yield
    except RecordError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordError(f"{prefix}{one_line(reason)[:200]}") from None
    except Exception as error:
        # The library has an exception class of its own, and others of Python come out.
        raise RecordError(
            f"{prefix}not a sound safetensors file: {one_line(str(error))[:200]}"
        ) from None
