"""Update, refresh and precondition as compiled programs, where a library has a compiler.

Conventions.  One program for each stage and each set of blocks and shapes, made at its
first call; dampings, decays and weights are inputs of it, so that no change of theirs
compiles anything.  The statistics that go into an update are given up (donated): the
library may write the new ones over them.  What was compiled, and how long that took, is
kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kfac_core.array.backend import Namespace, backend_of
from kfac_core.array.structure import leaves, map_structure
from kfac_core.errors import UnsupportedError

__all__ = ["Compilation", "Program", "copied_from", "distinct"]

T = TypeVar("T")


@dataclass
class Compilation:
    """What was compiled so far.

    Attributes
    ----------
    programs : dict of str to int
        How many programs each stage has.
    seconds : dict of str to float
        How long the calls took that compiled one, their first run included.
    """

    programs: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Program:
    """A pure function that is compiled for each new form of its arguments.

    Parameters
    ----------
    stage : str
        What it is called in the `Compilation`.
    function : callable
        Of structures, dicts and arrays.
    compilation : Compilation
        Where to count.
    donate : tuple of int
        The arguments that are given up.
    """

    def __init__(
        self,
        stage: str,
        function: Callable[..., Any],
        compilation: Compilation,
        /,
        *,
        donate: tuple[int, ...] = (),
    ) -> None:
        self._stage = stage
        self._function = function
        self._compilation = compilation
        self._donate = donate
        self._compiled: dict[str, Callable[..., Any]] = {}

    def __call__(self, xp: Namespace, /, *arguments: Any) -> Any:
        """Run the program for the arguments, compiling it if it is new.

        Raises
        ------
        UnsupportedError
            Where the library has no compiler.
        """
        backend = backend_of(xp)
        run = self._compiled.get(backend.name)
        if run is None:
            run = backend.compiled(self._traced, donate=self._donate)
            if run is None:
                raise UnsupportedError(
                    f"{backend.name} has no function compiler here. Leave out "
                    "`compiled=True`, or use JAX arrays."
                )
            self._compiled[backend.name] = run
        before = self._compilation.programs.get(self._stage, 0)
        start = time.perf_counter()
        result = run(*arguments)
        if self._compilation.programs.get(self._stage, 0) > before:
            taken = time.perf_counter() - start
            total = self._compilation.seconds.get(self._stage, 0.0)
            self._compilation.seconds[self._stage] = total + taken
        return result

    def _traced(self, *arguments: Any) -> Any:
        # Runs while a program is being made, and not again.
        programs = self._compilation.programs
        programs[self._stage] = programs.get(self._stage, 0) + 1
        return self._function(*arguments)


def distinct(given: T, /, *, xp: Namespace) -> T:
    """Return structures of which no array stands in two places, to be given up."""
    seen: set[int] = set()

    def once(x: Any) -> Any:
        if id(x) in seen:
            return xp.asarray(x, copy=True)
        seen.add(id(x))
        return x

    return map_structure(once, given)


def copied_from(made: T, given: Any, /, *, xp: Namespace) -> T:
    """Return what a program made, with copies of the arrays that it passed through.

    A compiler may return an argument itself where nothing was computed with it.  Where
    that argument is given up later, whoever kept the result would lose it too.

    Parameters
    ----------
    made : structure or dict
        Of which no array is to be one of `given`.
    given : structure or dict
        The arguments.
    xp : namespace
        Of all arrays.

    Returns
    -------
    structure or dict
        Of the same form.
    """
    arguments = {id(x) for _, x in leaves(given)}
    return map_structure(
        lambda x: xp.asarray(x, copy=True) if id(x) in arguments else x, made
    )
