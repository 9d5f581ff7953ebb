"""The command ``kfac-core``: one subcommand a module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import kfac_core
from kfac_core.errors import KFACError

__all__ = ["main"]


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
        installation that cannot be used.
    """
    from kfac_core.cli import bench, doctor, inspect, verify
    from kfac_core.cli.demo import command as demo

    parser = argparse.ArgumentParser(
        prog="kfac-core",
        description="Kronecker-factored curvature, for every array library.",
        epilog="KFAC_CORE_BACKEND=name[:device] chooses the array library.",
    )
    parser.add_argument(
        "--version", action="version", version=f"kfac-core {kfac_core.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, summary in (
        ("demo", demo, "train a deep autoencoder with K-FAC, SGD and Adam"),
        ("doctor", doctor, "say what was found, what is chosen and why"),
        ("verify", verify, "recompute the answers in verification records"),
        ("inspect", inspect, "say what is in a checkpoint"),
        ("bench", bench, "time it beside other libraries and the machine's floor"),
    ):
        child = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(child)
        child.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
    except KFACError as error:
        print(f"kfac-core {chosen.command}: {error}", file=sys.stderr)
        return 2
    return code
