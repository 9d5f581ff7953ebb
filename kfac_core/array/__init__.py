"""Arrays of any library: namespaces, backends, structures, dispatch, precision.

Here is what the author of an approximation needs of it.  `kfac_core.structure`,
`kfac_core.array.replaced` and `kfac_core.array.map_structure` are the decorator of a
class of arrays, and what is done with its instances.
"""

from kfac_core.array.backend import Backend, get_backend
from kfac_core.array.namespaces import (
    as_scalar,
    cast,
    device_of,
    full_of,
    own_namespace,
    status_unless,
)
from kfac_core.array.place import Place
from kfac_core.array.selection import Selection, selected_backend
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import map_structure, replaced
from kfac_core.array.types import Array, DType, Namespace, Scalar

__all__ = [
    "Array",
    "Backend",
    "Check",
    "DType",
    "Namespace",
    "Place",
    "Scalar",
    "Selection",
    "Status",
    "as_scalar",
    "cast",
    "device_of",
    "full_of",
    "get_backend",
    "map_structure",
    "own_namespace",
    "replaced",
    "selected_backend",
    "status_unless",
]
