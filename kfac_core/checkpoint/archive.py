"""The file: an ``.npz`` archive of NumPy arrays and one JSON document.

Conventions.  An uncompressed zip archive, as `numpy.savez` writes it.  The member
`DOCUMENT` describes the arrays ``0.npy``, ``1.npy``, and so on; `numpy.load` opens the file
without this library.  Zip keeps a checksum of each member, so that damage is an error.
Shape and dtype of an array are read before its numbers are.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from kfac_core import errors
from kfac_core.constraints import shown
from kfac_core.linalg.packing import Triangle

StoredArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]] | Triangle"
"""What is written: an array, or a triangle that is packed as it is written."""

DOCUMENT = "checkpoint.json"
DTYPES = ("float64", "float32", "int32")
"""The dtypes of the arrays of a checkpoint."""


class Archive:
    """An open file, whose members are read by name.

    Parameters
    ----------
    path : Path
        A zip archive.
    """

    def __init__(self, path: Path) -> None:
        with _damage_as_state_error():
            self._zip = zipfile.ZipFile(path)

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    def document(self) -> str:
        """Return the JSON document."""
        if DOCUMENT not in self._zip.namelist():
            raise errors.StateError(f"not a checkpoint: it holds no {DOCUMENT}.")
        with self._member(DOCUMENT) as member:
            return member.read().decode()

    def header(self, index: int, /) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of an array; its numbers are not read."""
        with self._member(f"{index}.npy") as member:
            # `write_array` uses version 1.0 for short headers such as these.
            np.lib.format.read_magic(member)
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            if dtype.name not in DTYPES:
                raise errors.StateError(
                    f"expected arrays of {', '.join(DTYPES)}, got {dtype}."
                )
            return dtype.name, shape

    def read(self, index: int, /) -> np.ndarray[Any, np.dtype[Any]]:
        """Return an array, in the machine's byte order."""
        with self._member(f"{index}.npy") as member:
            values = np.lib.format.read_array(member, allow_pickle=False)
            return np.asarray(values, dtype=values.dtype.newbyteorder("="))

    @contextlib.contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        with _damage_as_state_error():
            info = self._zip.getinfo(name)
            # A compressed member could be a thousand times larger than the file.
            if info.compress_type != zipfile.ZIP_STORED:
                raise errors.StateError(f"{name} is compressed.")
            with self._zip.open(info) as member:
                yield member


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], /) -> Iterator[Archive]:
    """Open a checkpoint; whatever is wrong is a `StateError` that begins with its name.

    Parameters
    ----------
    path : path-like
        Regular file, or a link to one.

    Yields
    ------
    Archive
        The open file.

    Raises
    ------
    ArgumentError
        For anything but a path.
    StateError
        For a file that cannot be read, or that is not a checkpoint.
    """
    place = path_of(path)
    try:
        # Opening a FIFO would wait for a writer.
        if place.exists() and not place.is_file():
            raise errors.StateError("not a regular file.")
        with contextlib.closing(Archive(place)) as archive:
            yield archive
    except OSError as error:
        raise errors.StateError(
            f"{_short(place)}: {error.strerror or error}."
        ) from None
    except errors.StateError as error:
        raise errors.StateError(f"{_short(place)}: {error}") from None


def write_archive(
    file: IO[bytes],
    document: Mapping[str, Any],
    arrays: Iterable[StoredArray],
    /,
) -> None:
    """Write an archive, an array at a time.

    Parameters
    ----------
    file : binary file
        Open for writing.
    document : mapping
        The JSON document; read after the arrays, which may add to it.
    arrays : iterable of numpy.ndarray or Triangle
        Arrays of the dtypes `DTYPES`, in NumPy.
    """
    # A `ZipInfo` without a time, so that equal states give equal files.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for index, values in enumerate(arrays):
            info = zipfile.ZipInfo(f"{index}.npy")
            descr = np.lib.format.dtype_to_descr(values.dtype)
            header = {"descr": descr, "fortran_order": False, "shape": values.shape}
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                # `write_array` would copy 16 MiB at a time.
                for piece in pieces_of(values):
                    member.write(np.ascontiguousarray(piece).data)
                    del piece
            del values  # Before the next one is computed.
        text = json.dumps(document, allow_nan=False)
        archive.writestr(zipfile.ZipInfo(DOCUMENT), text)


def pieces_of(values: StoredArray, /) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    """Yield an array, or a triangle some rows at a time."""
    if isinstance(values, Triangle):
        yield from values.pieces()
    else:
        yield values


def path_of(path: str | os.PathLike[str], /) -> Path:
    """Return a path, or raise `ArgumentError`.

    Parameters
    ----------
    path : str, bytes or path-like
        Argument of the caller.

    Returns
    -------
    pathlib.Path
        The path.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        text = "\0"
    if "\0" in text:
        raise errors.ArgumentError(
            f"Expected `path` to be a string without NUL characters or a path, got "
            f"{shown(path)}."
        )
    return Path(text)


@contextlib.contextmanager
def _damage_as_state_error() -> Iterator[None]:
    """Turn exceptions of `zipfile` and NumPy for damaged files into a `StateError`."""
    try:
        yield
    except (errors.StateError, OSError, MemoryError):
        raise
    except Exception as error:
        raise errors.StateError(
            f"damaged, incomplete, or not a checkpoint ({shown(str(error))})."
        ) from error


def _short(path: Path) -> str:
    """Return a path as text; a long one without its middle."""
    text = str(path)
    return text if len(text) <= 300 else f"{text[:140]}...{text[-140:]}"
