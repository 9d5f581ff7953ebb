"""The file of a record: a safetensors container, read without trusting it.

Nothing is executed or unpickled, and only `RecordError` is raised.  Names, dtypes and
shapes are known before any data are read.  A tensor is read only on request, and only after
its dtype and shape have been accepted, so no more is allocated than the file holds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open

from kfac_core.checkpoint.archive import path_of
from kfac_core.errors import ArgumentError, RecordError
from kfac_core_conformance.records.schema import Shape
from kfac_core_conformance.records.text import one_line, shown

METADATA_KEY = "kfac_core_record"

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""A NumPy array."""

_FLOATS = ("F16", "F32", "F64")
_INTEGERS = ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")

DTYPES: dict[str, tuple[str, ...]] = {
    "floating": _FLOATS,
    "answer": ("F32", "F64"),
    "integer": _INTEGERS,
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
    _file: Any

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
        actual = self.shape(name, kind)
        if actual != shape:
            raise RecordError(f"{name}: expected shape {shape}, got {shown(actual)}")
        with _only_record_errors(f"{name}: "):
            values: HostArray = self._file.get_tensor(name)
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
            place = path_of(path)
            if place.exists() and not place.is_file():
                raise RecordError("not a regular file")
            file = stack.enter_context(safe_open(place, framework="np"))
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {
                name: (part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
            metadata = file.metadata() or {}
        document = metadata.get(METADATA_KEY)
        if document is None:
            raise RecordError(
                f"no record: expected the metadata key {METADATA_KEY!r} with a document"
            )
        yield Container(place.stat().st_size, document, tensors, file)


@contextlib.contextmanager
def _only_record_errors(prefix: str = "") -> Iterator[None]:
    """Turn any exception raised while reading into a `RecordError` of one line."""
    try:
        yield
    except RecordError:
        raise
    except ArgumentError as error:
        raise RecordError(f"{prefix}{one_line(str(error))[:300]}") from None
    except SafetensorError as error:
        what = one_line(str(error))[:200]
        raise RecordError(
            f"{prefix}damaged, incomplete, or not a .safetensors file ({what})"
        ) from None
    except FileNotFoundError:
        # The reader's message would repeat the path.
        raise RecordError(f"{prefix}No such file or directory") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordError(f"{prefix}{one_line(reason)[:200]}") from None
