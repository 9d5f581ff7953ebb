"""The command ``kfac-core``: each subcommand is a module.

A subcommand's module declares its arguments and runs; its help ends with `EXAMPLES` and
`EXIT_CODES`.  Other packages add subcommands by the entry-point group
``kfac_core.commands``, each naming a module with the members of `Command`: so the command
line runs what the core must not import.  How all of them write is in
`kfac_core.cli.screen`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from types import MappingProxyType
from typing import Protocol

import kfac_core
from kfac_core import errors
from kfac_core.array.optional import entry_points_of
from kfac_core.cli.screen import WIDTH, complain

__all__ = [
    "ENTRY_POINT_GROUP",
    "Command",
    "UnloadableCommand",
    "commands",
    "ended",
    "main",
]

ENTRY_POINT_GROUP = "kfac_core.commands"

INTERRUPTED, UNREAD = 130, 141
"""Exit codes of a shell for a process that SIGINT or SIGPIPE ended."""


class Command(Protocol):
    """The interface of a subcommand's module."""

    @property
    def SUMMARY(self) -> str:  # noqa: N802 - a module's constant
        """The purpose, in one line."""

    @property
    def EXAMPLES(self) -> tuple[str, ...]:  # noqa: N802
        """Calls that a reader can copy."""

    @property
    def EXIT_CODES(self) -> Mapping[int, str]:  # noqa: N802
        """The meaning of each exit code."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Declare the arguments."""

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Do it, and return the exit code."""


class UnloadableCommand:
    """A registered subcommand whose module cannot be imported; running it prints why.

    Parameters
    ----------
    entry : EntryPoint
        The registration.
    reason : str
        The exception that importing the module raised.
    """

    SUMMARY = "cannot be loaded; run it to see why"
    EXAMPLES: tuple[str, ...] = ()
    EXIT_CODES: Mapping[int, str] = MappingProxyType({2: "always"})

    def __init__(self, entry: EntryPoint, reason: str, /) -> None:
        self._name = entry.name
        self._problem = f"its module {entry.value} cannot be imported: {reason}"

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Accept any arguments."""
        # No argument begins with this prefix, so that options are accepted too.
        parser.prefix_chars = "\0"
        parser.add_argument("arguments", nargs="*")

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Return why the command cannot be loaded, and return 2."""
        return complain(self._name, self._problem)


def commands() -> dict[str, Command]:
    """Return every subcommand by name: the core's own, then the registered ones.

    A registered command cannot take the name of one of the core's.
    """
    from kfac_core.cli import doctor, inspect

    known: dict[str, Command] = {"doctor": doctor, "inspect": inspect}
    for entry in entry_points_of(ENTRY_POINT_GROUP).values():
        if entry.name not in known:
            known[entry.name] = _loaded(entry)
    return known


def _loaded(entry: EntryPoint) -> Command:
    try:
        command: Command = entry.load()
    except (Exception, SystemExit) as error:
        # A broken package must not disable the other commands.
        return UnloadableCommand(entry, f"{type(error).__name__}: {error}")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments; by default those of the process.

    Returns
    -------
    int
        The exit code: 0 for success, 1 for an answer that is no, 2 for a call or an
        installation that cannot be used; 130 where it was interrupted, and 141 where
        nobody reads on.
    """
    parser = _parser()
    _complete(parser)
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    return ended(chosen.command, chosen.run, chosen)


def ended(
    command: str,
    run: Callable[[argparse.Namespace], int],
    arguments: argparse.Namespace,
    /,
) -> int:
    """Run a subcommand, and return its exit code whatever ends it.

    Parameters
    ----------
    command : str
        What a complaint begins with.
    run : callable
        Takes the arguments, and returns an exit code.
    arguments : argparse.Namespace
        Parsed arguments.

    Returns
    -------
    int
        As `main`.
    """
    try:
        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return _unread()
    except (errors.KFACError, OSError) as error:
        return complain(command, error)
    except KeyboardInterrupt:
        complain(command, "interrupted")
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kfac-core",
        description="K-FAC linear algebra for NumPy, PyTorch, JAX and CuPy.",
        epilog="KFAC_CORE_BACKEND=name[:device] chooses the array library. "
        "`kfac-core COMMAND --help` shows a command's options and an example.",
    )
    parser.add_argument(
        "--version", action="version", version=f"kfac-core {kfac_core.__version__}"
    )
    children = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in commands().items():
        child = children.add_parser(
            name,
            help=module.SUMMARY,
            description=module.SUMMARY,
            epilog=_epilog(module),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(child)
        child.set_defaults(run=module.run)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell where it asks for completions; argcomplete is optional."""
    if "_ARGCOMPLETE" in os.environ and find_spec("argcomplete"):
        importlib.import_module("argcomplete").autocomplete(parser)


def _epilog(module: Command) -> str:
    lines = []
    if module.EXAMPLES:
        lines.append("example:" if len(module.EXAMPLES) == 1 else "examples:")
        lines += [f"  {example}" for example in module.EXAMPLES]
        lines.append("")
    lines.append("exit codes:")
    for code, meaning in module.EXIT_CODES.items():
        lines.append(
            textwrap.fill(
                meaning, WIDTH, initial_indent=f"  {code}  ", subsequent_indent="     "
            )
        )
    return "\n".join(lines)


def _unread() -> int:
    """End where the reader of a pipe has gone, without a second error at the exit."""
    # Python flushes stdout again at exit, which would raise a second time.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNREAD
