"""The library, device and dtype of new arrays."""

from __future__ import annotations

from dataclasses import dataclass

from kfac_core.array.types import Array, Namespace


@dataclass(frozen=True)
class Place:
    """A library, a device and a dtype for new arrays.

    Attributes
    ----------
    xp : namespace
        Array API namespace of the library.
    dtype : dtype
        Dtype of that library.
    device : device
        Device of that library.
    """

    xp: Namespace
    dtype: object
    device: object

    def zeros(self, *shape: int) -> Array:
        """Return zeros; without a shape a 0-d array."""
        return self.xp.zeros(shape, dtype=self.dtype, device=self.device)

    def eye(self, n: int, /) -> Array:
        """Return the n x n identity."""
        return self.xp.eye(n, dtype=self.dtype, device=self.device)

    def flags(self, *shape: int) -> Array:
        """Return int32 zeros: a `Status` without failures."""
        return self.xp.zeros(shape, dtype=self.xp.int32, device=self.device)
