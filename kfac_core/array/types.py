"""Types of what comes from any library of arrays.

To type checkers they are `Any`: the libraries share no class.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array of any library that follows the Array API standard."""

Namespace: TypeAlias = Any
"""The Array API namespace of such a library."""

DType: TypeAlias = Any
"""A dtype of such a library."""

Device: TypeAlias = Any
"""A device of such a library."""

Scalar: TypeAlias = Any
"""A Python number, or a 0-d array of the same library as the other arrays."""

Tree: TypeAlias = Any
"""A structure, dict, tuple, array, number or None, nested in any way."""
