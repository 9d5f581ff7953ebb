"""The file: a .safetensors container, written and read piece by piece.

Conventions.  Eight bytes with the length of a JSON header, the header, and the numbers of
the tensors, little-endian and in the order of their axes.  The header has dtype, shape and
place of each tensor, and strings by name under ``__metadata__``; the tensors cover the
rest of the file without gaps.

Nothing is mapped to memory: a file that another process shortens is an error, and does
not end this process.  The header is checked before a tensor is read, and a tensor is read
when it is asked for.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kfac_core.constraints import shown
from kfac_core.errors import ArgumentError, StateError

__all__ = [
    "DTYPES",
    "Container",
    "Tensor",
    "opened",
    "opened_regular",
    "path_of",
    "write_container",
]

DTYPES: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "I32": "<i4"}
"""The dtypes of the tensors of a checkpoint, by their names in a header."""

_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000
_WORD = 8
"""The header is filled up with spaces, so that numbers stand at multiples of this."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as the header describes it.

    Attributes
    ----------
    dtype : str
        Name of the dtype in the header, such as ``"F64"``.
    code : str
        The dtype of its bytes as NumPy's, little-endian.
    shape : tuple of int
        Shape.
    start : int
        Place of its first byte in the file.
    """

    dtype: str
    code: str
    shape: tuple[int, ...]
    start: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of its numbers, in the machine's byte order."""
        return np.dtype(self.code).newbyteorder("=")


class Container:
    """An open file whose header was read and checked.

    Parameters
    ----------
    file : binary file
        Open for reading.
    dtypes : mapping of str to str
        The dtypes that tensors may have, as NumPy's by their names in a header.

    Attributes
    ----------
    metadata : dict of str to str
        Strings by name.
    tensors : dict of str to Tensor
        Tensors by name.
    bytes : int
        Size of the file.

    Raises
    ------
    StateError
        For a header that does not describe the file.
    """

    def __init__(self, file: BinaryIO, dtypes: Mapping[str, str] = DTYPES) -> None:
        self._file = file
        self._dtypes = dtypes
        self.bytes = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", self._read(0, _WORD))
        if length > min(self.bytes - _WORD, _LONGEST_HEADER):
            raise _damaged("its header is longer than it may be")
        header = _parsed(self._read(_WORD, length))
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            raise _damaged("its metadata are no strings")
        self.metadata: dict[str, str] = metadata
        self.tensors = self._described(header, _WORD + length)

    def read(self, name: str, /) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the numbers of a tensor.

        Raises
        ------
        StateError
            If the file has become shorter.
        """
        tensor = self.tensors[name]
        made = np.empty(tensor.shape, dtype=tensor.code)
        if made.size:
            self._fill(tensor.start, made.reshape(-1).view(np.uint8).data)
        return made.astype(tensor.numpy_dtype, copy=False)

    def _described(self, header: Mapping[str, Any], base: int) -> dict[str, Tensor]:
        """Return the tensors of a header; they follow each other up to the end."""
        places: dict[str, tuple[int, int]] = {}
        found: dict[str, Tensor] = {}
        for name, part in header.items():
            dtype, shape, (start, end) = _entry(name, part)
            code = self._dtypes.get(dtype)
            if code is None:
                raise StateError(
                    f"{shown(name)}: expected a dtype among {', '.join(self._dtypes)}, got "
                    f"{shown(dtype)}."
                )
            size = math.prod(shape) * np.dtype(code).itemsize
            if end - start != size:
                raise _damaged(f"the place of {shown(name)} is not as long as it is")
            places[name] = start, end
            found[name] = Tensor(dtype, code, shape, base + start)
        position = 0
        for start, end in sorted(places.values()):
            if start != position:
                raise _damaged("its tensors overlap, or leave gaps")
            position = end
        if base + position != self.bytes:
            raise _damaged(f"it has {self.bytes} bytes, not {base + position}")
        return found

    def _read(self, start: int, length: int) -> bytes:
        made = bytearray(min(length, self.bytes))
        self._fill(start, memoryview(made))
        if len(made) < length:
            raise _damaged("it ends early")
        return bytes(made)

    def _fill(self, start: int, buffer: memoryview) -> None:
        self._file.seek(start)
        done = 0
        while done < len(buffer):
            count = self._file.readinto(buffer[done:])  # type: ignore[attr-defined]
            if not count:
                raise _damaged("it ends early")
            done += count


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], /) -> Iterator[Container]:
    """Open a checkpoint; whatever is wrong is a `StateError` that begins with its name.

    Parameters
    ----------
    path : path-like
        Regular file, or a link to one.

    Yields
    ------
    Container
        Container whose header was checked.

    Raises
    ------
    ArgumentError
        For anything but a path.
    StateError
        For a file that cannot be read, or that is no sound container.
    """
    place = path_of(path)
    try:
        with opened_regular(place) as file:
            yield Container(file)
    except OSError as error:
        raise StateError(f"{_short_path(place)}: {error.strerror or error}.") from None
    except StateError as error:
        raise StateError(f"{_short_path(place)}: {error}") from None


@contextlib.contextmanager
def opened_regular(path: Path, /) -> Iterator[BinaryIO]:
    """Open a regular file for reading, without a buffer.

    Parameters
    ----------
    path : Path
        Regular file, or a link to one.

    Yields
    ------
    binary file
        The open file.

    Raises
    ------
    OSError
        For a file that cannot be read.
    StateError
        For anything but a regular file.
    """
    # A FIFO would wait for a writer.
    if not stat.S_ISREG(path.stat().st_mode):
        raise StateError("not a regular file.")
    with open(path, "rb", buffering=0) as file:
        # It may have been replaced by another one meanwhile.
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise StateError("not a regular file.")
        yield file


def write_container(
    file: BinaryIO,
    tensors: Mapping[str, np.ndarray[Any, np.dtype[Any]]],
    metadata: Mapping[str, str],
    /,
) -> None:
    """Write a container, one tensor after the other.

    Parameters
    ----------
    file : binary file
        Open for writing.
    tensors : mapping of str to numpy.ndarray
        Arrays of float64, float32 or int32, by name.
    metadata : mapping of str to str
        Strings by name.
    """
    names = {np.dtype(code): name for name, code in DTYPES.items()}
    plain = {
        name: np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("<")).reshape(x.shape)
        for name, x in tensors.items()
    }
    # The widest numbers first, so that all of them stand at multiples of their width.
    order = sorted(plain, key=lambda name: (-plain[name].itemsize, name))
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    position = 0
    for name in order:
        x = plain[name]
        header[name] = {
            "dtype": names[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [position, position + x.nbytes],
        }
        position += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _WORD)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        if plain[name].size:
            file.write(plain[name].reshape(-1).view(np.uint8).data)


def path_of(path: Any, /) -> Path:
    """Return a path, or raise `ArgumentError` for what cannot be one.

    Parameters
    ----------
    path : str, bytes or path-like
        What came.

    Returns
    -------
    pathlib.Path
        The path.

    Raises
    ------
    ArgumentError
        For another kind of argument, or a path with a NUL character.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise ArgumentError(
            f"Expected `path` to be a string or a path, got {type(path).__name__}: "
            f"{shown(path)}."
        ) from None
    if "\0" in text:
        raise ArgumentError(
            f"Expected `path` without NUL characters, got {shown(path)}."
        )
    return Path(text)


def _parsed(text: bytes) -> dict[str, Any]:
    """Return a header as a mapping in which no name stands twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise _damaged("a name stands twice in its header")
        return found

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, StateError):
            raise
        raise _damaged("its header is no JSON") from None
    if not isinstance(header, dict):
        raise _damaged("its header is no mapping")
    return header


def _entry(name: str, part: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return dtype, shape and place of a tensor, each of the right kind."""
    if isinstance(part, dict) and part.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, place = part["dtype"], part["shape"], part["data_offsets"]
        if (
            isinstance(dtype, str)
            and _is_of_sizes(shape)
            and _is_of_sizes(place)
            and len(place) == 2
            and len(shape) <= 32
        ):
            return dtype, tuple(shape), (place[0], place[1])
    raise _damaged(f"the entry of {shown(name)} in its header is none")


def _is_of_sizes(values: Any) -> bool:
    """Whether something is a list of integers that are not negative."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )


def _damaged(what: str) -> StateError:
    return StateError(f"damaged, incomplete, or no .safetensors file ({what}).")


def _short_path(path: Path) -> str:
    """Return a path as text; a long one without its middle."""
    text = str(path)
    return text if len(text) <= 300 else f"{text[:140]}...{text[-140:]}"
