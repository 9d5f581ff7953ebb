"""Stand-ins for frameworks, so that their integrations can be imported to be documented.

Sphinx's own mock objects are no classes, and PyTorch's integration registers the classes
of `torch.nn` when it is imported.  Here every attribute of a module is a class of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FRAMEWORKS = ("flax", "jax", "keras", "optax", "torch")


class _Stub(type):
    """The type of stand-ins: classes with any attribute, which can be called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub(cls.__module__, f"{cls.__qualname__}.{name}")

    def __call__(cls, *arguments: Any, **_: Any) -> Any:
        # As a decorator it gives back what it decorates.
        alone = arguments[0] if len(arguments) == 1 else None
        return alone if callable(alone) else cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __getitem__(cls, _: Any) -> Any:
        return cls


def _stub(module: str, name: str) -> _Stub:
    members = {"__module__": module, "__qualname__": name, "forward": None}
    return _Stub(name.rpartition(".")[2], (), members)


class _StubModule(ModuleType):
    """A module in which every name is a class; the same one each time."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stub(self.__name__, name)
        setattr(self, name, made)
        return made


class _Finder:
    """Finds every module below the frameworks."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the specification of a stand-in."""
        if name.partition(".")[0] in FRAMEWORKS:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def install() -> None:
    """Put the stand-ins before what is installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        for name in [n for n in sys.modules if n.partition(".")[0] in FRAMEWORKS]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
