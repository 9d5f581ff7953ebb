"""The command ``kfac-core``: one subcommand a module.

A subcommand's module declares its arguments and runs; `EXAMPLES` and `EXIT_CODES` of it
are what its help ends with.  How all of them write is in `kfac_core.cli.screen`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import kfac_core
from kfac_core.cli.screen import complain
from kfac_core.errors import KFACError

__all__ = ["Command", "commands", "ended", "main"]

INTERRUPTED, UNREAD = 130, 141
"""What a shell has for a process that SIGINT or SIGPIPE ended."""


class Command(Protocol):
    """What a subcommand's module has."""

    @property
    def SUMMARY(self) -> str:  # noqa: N802 - a module's constant
        """What it does, in one line."""

    @property
    def EXAMPLES(self) -> tuple[str, ...]:  # noqa: N802
        """Calls that a reader can copy."""

    @property
    def EXIT_CODES(self) -> Mapping[int, str]:  # noqa: N802
        """What each exit code means."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Declare the arguments."""

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Do it, and return the exit code."""


def commands() -> dict[str, Command]:
    """Return the module of each subcommand, by name."""
    from kfac_core.cli import bench, conformance, doctor, inspect, verify
    from kfac_core.cli.demo import command as demo

    return {
        "demo": demo,
        "doctor": doctor,
        "verify": verify,
        "inspect": inspect,
        "conformance": conformance,
        "bench": bench,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process where left out.

    Returns
    -------
    int
        The exit code: 0 for success, 1 for an answer that is no, 2 for a call or an
        installation that cannot be used; 130 where it was interrupted, and 141 where
        nobody reads on.
    """
    # None where the process was started without them, as by `>&-`.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    parser = _parser()
    chosen = parser.parse_args(arguments)
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
        As parsed.

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
    except (KFACError, OSError) as error:
        return complain(command, error)
    except KeyboardInterrupt:
        complain(command, "interrupted")
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kfac-core",
        description="Kronecker-factored curvature, for every array library.",
        epilog="KFAC_CORE_BACKEND=name[:device] chooses the array library. "
        "`kfac-core COMMAND --help` shows a command's options and an example.",
    )
    parser.add_argument(
        "--version", action="version", version=f"kfac-core {kfac_core.__version__}"
    )
    children = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
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


def _epilog(module: Command) -> str:
    lines = ["example:" if len(module.EXAMPLES) == 1 else "examples:"]
    lines += [f"  {example}" for example in module.EXAMPLES]
    lines += ["", "exit codes:"]
    lines += [f"  {code}  {meaning}" for code, meaning in module.EXIT_CODES.items()]
    return "\n".join(lines)


def _unread() -> int:
    """End where the reader of a pipe has gone, without a second error at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNREAD
