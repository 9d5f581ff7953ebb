"""Exchanges over JAX's named axes, inside a program that is mapped over devices.

Conventions.  Inside ``shard_map``, ``pmap`` or ``vmap`` with an axis name, all devices run
one program: the rank is a traced number, and arrays have one shape on all devices.  Parts
therefore have equal lengths; shards of unequal sizes are padded and masked.  Exchanges are
traced where they are called, and the compiler decides when they run: `Handle.wait` returns
at once, and there is no timeout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from kfac_core.distributed.communicator import Communicator, Handle, Operation
from kfac_core.errors import UnsupportedError


class AxisCommunicator(Communicator):
    """The devices of one or several named axes.

    Make it inside the mapped function.

    Parameters
    ----------
    axis_name : str or tuple of str, optional
        Axes; by default all that the caller is inside of.
    """

    name = "jax"

    def __init__(self, axis_name: Any = None) -> None:
        import jax

        self._axis = mapped_axes() if axis_name is None else axis_name
        # The sum of a Python number is known while the program is traced.
        size = int(jax.lax.psum(1, self._axis))
        super().__init__(0, size, timeout=math.inf)
        self.rank: Any = jax.lax.axis_index(self._axis)

    def __repr__(self) -> str:
        return f"AxisCommunicator({self._axis!r}, size={self.size})"

    def split(self, groups: Sequence[Sequence[int]], /) -> NoReturn:
        """Raise `UnsupportedError`: a group is an axis of its own."""
        raise UnsupportedError(
            "Devices of a mapped axis are not split: map over an axis for the groups and "
            "one within them, and make a communicator of either."
        )

    def _split(self, groups: Sequence[Sequence[int]], /) -> NoReturn:
        raise NotImplementedError  # `split` raises.

    def _length_here(self, counts: Sequence[int]) -> int:
        if len(set(counts)) != 1:
            raise UnsupportedError(
                "Expected parts of equal lengths, since arrays have one shape on all "
                f"devices of a mapped axis, got {list(counts)}. Pad them."
            )
        return counts[0]

    def _entering(self, flat: Any) -> Any:
        return flat

    def _leaving(self, values: Any, like: Any) -> Any:
        return values

    def _begin(
        self, operation: Operation, flat: Any, arguments: Mapping[str, Any]
    ) -> Handle:
        # With one device too: only what was added up over an axis is known to be the same
        # on all of it.
        return Handle(self._start(operation, flat, arguments))

    def _start(
        self, operation: Operation, values: Any, arguments: Mapping[str, Any], /
    ) -> Callable[[], Any]:
        begin: Any = getattr(self, f"_{operation}")
        result = begin(values, **arguments)
        return lambda: result

    def _all_reduce(self, values: Any, overwrite: bool) -> Any:
        import jax

        return jax.lax.psum(values, self._axis)

    def _reduce_scatter(self, values: Any, counts: Sequence[int]) -> Any:
        import jax

        self._length_here(counts)
        return jax.lax.psum_scatter(values, self._axis, tiled=True)

    def _all_gather(self, values: Any, counts: Sequence[int]) -> Any:
        import jax

        return jax.lax.all_gather(values, self._axis, tiled=True)

    def _all_to_all(
        self, values: Any, send: Sequence[int], receive: Sequence[int]
    ) -> Any:
        import jax

        self._length_here([*send, *receive])
        return jax.lax.all_to_all(values, self._axis, 0, 0, tiled=True)


def mapped_axes() -> tuple[Any, ...]:
    """Return the names of the mapped axes that the caller is inside of."""
    import jax
    import jax.extend.core as jex

    name = "unsafe_get_axis_names_DO_NOT_USE"
    # Before JAX 0.10 it was in `jax.core`.
    names: Any = getattr(jex, name, None) or getattr(jax.core, name)
    return tuple(names())


def problem() -> str | None:
    """Return why the engine cannot be used here, or None."""
    if importlib.util.find_spec("jax") is None:
        return "JAX is not installed; pip install 'kfac-core[jax]'"
    if "jax" not in sys.modules or not mapped_axes():
        return "call it inside a function that is mapped over devices (shard_map, pmap)"
    return None


def versions() -> dict[str, str]:
    """Return the versions of the libraries behind the engine."""
    if importlib.util.find_spec("jax") is None:
        return {}
    return {"jax": importlib.metadata.version("jax")}


def connect(*, timeout: float) -> AxisCommunicator:
    """Return the communicator of the devices of all mapped axes.

    Parameters
    ----------
    timeout : float
        Ignored: a compiled program waits as JAX does.

    Returns
    -------
    AxisCommunicator
        Communicator of the axes that the caller is inside of.
    """
    return AxisCommunicator()
