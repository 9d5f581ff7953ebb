"""What K-FAC costs on many processes, before anything is run.

Run ``python -m benchmarks.plan resnet50``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

from benchmarks.plan.model import (
    MACHINES,
    Machine,
    PredictedStep,
    chosen_step,
    known_networks,
    measured_machine,
    network_of,
    predicted_steps,
    read_machine,
)
from kfac_core.cli.options import add_json, positive
from kfac_core.cli.screen import complain, print_json, print_table, printable
from kfac_core.distributed.communicator import connect, engine
from kfac_core.distributed.options import DirectionDtype
from kfac_core.errors import KFACError, UnsupportedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prediction; return 2 where a file or an option cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan",
        description="predict the time of a step on many processes, for each strategy",
    )
    parser.add_argument(
        "network",
        nargs="?",
        help=f"one of {', '.join(known_networks())}; a JSON file of layer shapes; or "
        "program.py:name, a PyTorch module, a KFAC, or a function that returns one",
    )
    parser.add_argument(
        "--measure",
        metavar="ENGINE",
        help="measure the constants of this machine by the processes of an engine",
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        nargs="+",
        default=[4**k for k in range(6)],
        help="numbers of processes (1 4 16 64 256 1024)",
    )
    parser.add_argument(
        "--machine",
        default="h100",
        help=f"constants: {', '.join(MACHINES)}, or a file that --measure made (h100)",
    )
    parser.add_argument(
        "--rows", type=positive, default=1, help="rows of an example, if unknown (1)"
    )
    parser.add_argument(
        "--examples", type=positive, default=32, help="examples a rank and step (32)"
    )
    parser.add_argument(
        "--update-every", type=positive, default=1, help="steps between updates (1)"
    )
    parser.add_argument(
        "--interval", type=positive, default=10, help="steps between refreshes (10)"
    )
    parser.add_argument(
        "--directions",
        choices=get_args(DirectionDtype),
        help="dtype in which directions are sent (that of the machine's numbers)",
    )
    parser.add_argument(
        "--reduce",
        choices=("refresh", "owner"),
        default="refresh",
        help="where statistics are, as of `Distributed` (refresh)",
    )
    parser.add_argument(
        "--memory",
        type=positive,
        metavar="GB",
        help="room for statistics and operators",
    )
    parser.add_argument(
        "--owners", action="store_true", help="print which rank owns which block"
    )
    parser.add_argument("--plot", help="a file to draw the prediction in")
    add_json(parser)
    return _run(parser.parse_args(arguments))


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.measure is None) == (arguments.network is None):
        return complain("plan", "expected one of a network and --measure ENGINE")
    try:
        if arguments.measure is not None:
            return _measure(arguments.measure)
        name, network, rows = network_of(arguments.network)
        machine = read_machine(arguments.machine)
    except KFACError as error:
        return complain("plan", str(error))
    rows = {block: rows.get(block, arguments.rows) for block in network.blocks}
    found: dict[int, list[PredictedStep]] = {}
    without_room: dict[int, str] = {}
    for ranks in sorted(set(arguments.ranks)):
        try:
            found[ranks] = predicted_steps(
                network,
                ranks,
                machine=machine,
                examples=arguments.examples,
                rows=rows,
                update_every=arguments.update_every,
                interval=arguments.interval,
                memory=_numbers(arguments.memory, machine),
                dtypes={"directions": arguments.directions},
                reduce=arguments.reduce,
            )
        except UnsupportedError as error:
            without_room[ranks] = str(error)
    if not found:
        return complain("plan", without_room[max(without_room)])
    if arguments.json:
        print_json(
            {
                "network": name,
                "machine": arguments.machine,
                "steps": [_as_data(step) for steps in found.values() for step in steps],
                "without_room": without_room,
            }
        )
    else:
        _print(name, len(network.blocks), found, arguments)
        for ranks, problem in without_room.items():
            print(f"\n{ranks} ranks: {problem}")
    if arguments.plot:
        return _plot(found, arguments)
    return 0


def _numbers(gigabytes: int | None, machine: Machine) -> int | None:
    return None if gigabytes is None else gigabytes * 10**9 // machine.bytes


def _measure(name: str) -> int:
    """Print the constants of this machine, on the first process."""
    joined = getattr(engine(name), "joined", contextlib.nullcontext)
    with joined():
        communicator = connect(name)
        machine = measured_machine(communicator)
        if communicator.rank == 0:
            print_json(asdict(machine))
    return 0


def _as_data(step: PredictedStep) -> dict[str, Any]:
    return {
        "ranks": step.ranks,
        "holders": step.holders,
        "seconds": dict(step.seconds),
        "total": step.total,
        "bytes_sent": step.sent,
        "bytes_sent_by_the_busiest": step.busiest,
        "bytes_kept": step.memory,
        "bytes_at_most": step.peak,
        "imbalance": step.placement.imbalance(),
        "owners": dict(step.placement.owners),
    }


def _short(number: float) -> str:
    return f"{number:.2g}" if number < 100.0 else f"{number:.0f}"


_HEADS = {"statistics": "stats", "operators": "inv", "directions": "dir"}
"""Short names of parts, for a table of 80 columns."""


def _print(
    name: str,
    layers: int,
    found: dict[int, list[PredictedStep]],
    arguments: argparse.Namespace,
) -> None:
    print(printable(f"{name}: {layers} layers"))
    print(
        f"{arguments.machine}; {arguments.examples} examples a rank; updates every "
        f"{arguments.update_every}, refreshes every {arguments.interval} steps"
    )
    print("Predicted, not measured: milliseconds that K-FAC adds to a step, by parts.")
    print(
        "inv: inverses sent; dir: directions sent; MB sent by a rank, and by the busiest;"
    )
    print("GB kept, and at most with messages, by the fullest rank.")
    print("share: bytes beside those of averaging all factors at each update.")
    print("A star marks what `holders='auto'` takes.")
    for ranks, steps in found.items():
        best = chosen_step(steps)
        parts = list(best.seconds)
        print()
        print_table(
            f"{ranks} ranks; imbalance {best.placement.imbalance():.2f}",
            (
                "holders",
                *(_HEADS.get(p, p) for p in parts),
                "total",
                "MB",
                "busiest",
                "share",
                "GB",
                "peak",
            ),
            [
                (
                    f"{step.holders} *" if step is best else str(step.holders),
                    *(_short(1e3 * step.seconds[part]) for part in parts),
                    _short(1e3 * step.total),
                    f"{step.sent / 1e6:.0f}",
                    f"{step.busiest / 1e6:.0f}",
                    f"{step.sent / step.averaged:.2f}" if step.averaged else "-",
                    f"{step.memory / 1e9:.2f}",
                    f"{step.peak / 1e9:.2f}",
                )
                for step in steps
            ],
        )
        if arguments.owners:
            print(best.placement)


def _plot(found: dict[int, list[PredictedStep]], arguments: argparse.Namespace) -> int:
    try:
        import matplotlib
    except ImportError:
        return complain("plan", "`--plot` needs matplotlib: pip install matplotlib.")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    ranks = list(found)
    lines = {
        "owners send directions": [steps[0].total for steps in found.values()],
        "everybody has operators": [steps[-1].total for steps in found.values()],
        "holders='auto'": [chosen_step(steps).total for steps in found.values()],
    }
    for label, times in lines.items():
        axes.plot(ranks, [1e3 * t for t in times], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="processes", ylabel="ms a step")
    axes.set_title(f"{arguments.network}, {arguments.machine}: predicted")
    axes.legend()
    try:
        figure.savefig(arguments.plot, dpi=120)
    except ValueError as error:  # an ending that is no format of a picture
        return complain("plan", f"--plot {arguments.plot}: {error}")
    finally:
        pyplot.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
