"""Arrays of any library: namespaces, backends, structures, dispatch, precision.

Here is what the author of an approximation needs of it.  `kfac_core.structure`,
`kfac_core.replaced` and `kfac_core.map_structure` are the decorator of a class of arrays,
and what is done with its instances.
"""

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import (
    Scalar,
    as_scalar,
    cast,
    device_of,
    full_of,
    own_namespace,
    status_unless,
)
from kfac_core.array.status import Check

__all__ = [
    "Array",
    "Check",
    "Namespace",
    "Scalar",
    "as_scalar",
    "cast",
    "device_of",
    "full_of",
    "own_namespace",
    "status_unless",
]
