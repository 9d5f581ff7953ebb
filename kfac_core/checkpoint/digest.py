"""Digests of what a file holds, so that a flipped bit is an error and no other state.

Conventions.  SHA-256, in hexadecimal digits.  The digest of a tensor is in the JSON
document, by the tensor's name; that of the document stands beside it.  They protect from
damage, not from a person who writes a file with digests of their own.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

__all__ = ["tensor_digest", "text_digest"]


def tensor_digest(values: np.ndarray[Any, np.dtype[Any]], /) -> str:
    """Return the digest of an array: of its dtype, its shape and its numbers.

    Parameters
    ----------
    values : numpy.ndarray
        Read in the order of its axes, as little-endian numbers.

    Returns
    -------
    str
        64 digits.  About a second for each gigabyte.
    """
    plain = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    found = hashlib.sha256(f"{plain.dtype.name} {values.shape} ".encode())
    found.update(plain.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def text_digest(text: str, /) -> str:
    """Return the digest of a text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
