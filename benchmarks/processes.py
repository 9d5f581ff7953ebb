"""The processes of a run, one a library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.libraries import LIBRARIES
from benchmarks.memory import MEMORY_ENVIRONMENT
from benchmarks.options import Options
from benchmarks.process import Process

Found = dict[str, Any]


class Processes:
    """The processes, one a library.

    Parameters
    ----------
    options : Options
        Which libraries, and how they are run.
    """

    def __init__(self, options: Options, /) -> None:
        self._options = options
        self._processes = {name: self._started(name) for name in options.libraries}

    def hello(self) -> Found:
        """Return what each library says of itself; those that cannot start are left."""
        found: Found = {}
        for name in self._options.libraries:
            entry = LIBRARIES[name]
            said = {
                "title": entry.title,
                "includes": entry.includes,
                "core": entry.core,
                "kernels": entry.kernels,
            }
            said |= self.ask(name, "hello")
            if "error" in said:
                self._options.say(f"{name} is left out: {said['error']}")
                self._processes.pop(name).close()
            found[name] = said
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The libraries that can be asked."""
        return tuple(self._processes)

    def ask(self, library: str, do: str, /, **arguments: Any) -> Found:
        """Ask one library; see `Process.ask`."""
        return self._processes[library].ask(do, **arguments)

    def revive(self) -> None:
        """Start the processes again that have ended."""
        for name, process in self._processes.items():
            if process.problem is not None:
                process.close()
                self._processes[name] = self._started(name)

    def apart(self, library: str, do: str, /, **arguments: Any) -> Found:
        """Ask a fresh process, which is ended then."""
        process = self._started(library, MEMORY_ENVIRONMENT)
        try:
            return process.ask(do, **arguments)
        finally:
            process.close()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.close()

    def _started(self, name: str, extra: Mapping[str, str] | None = None) -> Process:
        options = self._options
        return Process(
            name,
            python=options.pythons.get(name, options.python),
            device=options.device,
            clock=options.clock,
            threads=options.threads,
            patience=options.patience,
            extra=extra,
        )
