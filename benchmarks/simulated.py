"""Messages of up to 1,024 ranks, as the program of one of them sends them.

Run ``python -m benchmarks.simulated``.  One rank runs an update, a refresh and a step with
partners that only count (`benchmarks.plan.counted`), and its messages are compared with the
prediction, part by part.  From the parts follow the bytes that each rank sends, the largest
array that a rank holds for a message, and the time of a step's directions with the
constants of H100 nodes, beside that of a ring in which all ranks have as much.  The flops
of the busiest rank, on average over the steps between refreshes, stand beside those without
blocks whose directions are divided.

Exits with 1 if a message differs, if the busiest rank sends more than three times the mean,
if an array has more than 256 MB, or directions take more than twice the time of the ring.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import numpy as np

import kfac_core as kc
from benchmarks.plan.counted import CountedRank
from benchmarks.plan.exchanges import Message, predicted_messages, rows_sent
from benchmarks.plan.model import MACHINES, read_shapes
from kfac_core.cli.screen import print_table
from kfac_core.distributed import Distributed, Placement

MOST, LARGEST, SLOWEST = 3.0, 256e6, 2.0


def counted_messages(
    network: kc.Network, size: int, *, reduce: Any = "refresh"
) -> tuple[dict[str, list[Message]], dict[str, list[Message]], Placement]:
    """Return the messages of one rank by stage: those counted, and those predicted.

    With them comes the placement of all ranks.

    The rank owns no block where there are more ranks than blocks, so that a refresh
    factorizes none.
    """
    communicator = CountedRank(size - 1, size)
    options = Distributed(communicator=communicator, holders=1, reduce=reduce)
    estimator = kc.Estimator(
        network.blocks, reduction="sum", damping=1.0, execution=options
    )
    batches, gradients = {}, {}
    for name, block in network.blocks.items():
        n, m = block.layer.matrix_shape
        x, g = np.ones((1, n), np.float32), np.ones((1, m), np.float32)
        batches[name] = kc.Batch(x, g)
        gradients[name] = {
            key: np.zeros(shape, np.float32)
            for key, shape in block.layer.parameter_shapes.items()
        }
    counted = {}
    for stage, call in (
        ("update", lambda: estimator.update(batches)),
        ("refresh", estimator.refresh),
        ("precondition", lambda: estimator.precondition(gradients)),
    ):
        communicator.messages.clear()
        call()
        counted[stage] = list(communicator.messages)
    predicted = predicted_messages(
        *(estimator.network, options, estimator.placement),
        rank=communicator.rank,
        like=np.zeros(1, np.float32),
    )
    return counted, predicted, estimator.placement


def busiest(placement: Placement, interval: int) -> float:
    """Return the flops of a step of the busiest rank, with its share of a refresh."""
    flops = zip(placement.flops(), placement.products(), strict=True)
    return max(refresh / interval + product for refresh, product in flops)


def summary(stages: dict[str, list[Message]], placement: Placement) -> dict[str, float]:
    """Return numbers of all messages: bytes, the largest array, and times.

    Returns
    -------
    dict of str to float
        ``mean`` and ``busiest`` bytes of a rank, ``buffer``, and ``seconds`` of a step's
        directions beside those of a ``ring``.
    """
    messages = [message for stage in stages.values() for message in stage]
    size, width = placement.size, MACHINES["h100"].bytes
    of_owners = width * np.asarray(rows_sent(placement))
    sent = np.sum([message.sent() for message in messages], axis=0) + of_owners
    machine = MACHINES["h100"]
    directions = [m for m in stages["precondition"] if m.operation == "all_gather"]
    return {
        "mean": float(sent.mean()),
        "busiest": float(sent.max()),
        "buffer": float(max(of_owners.max(), *(m.buffer for m in messages))),
        "seconds": sum(machine.uneven(m.parts, m.width) for m in directions),
        "ring": machine.gather(
            sum(m.payload for m in directions) / machine.bytes, size
        ),
    }


def main() -> int:
    """Print a table; return 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", nargs="?", default="resnet50")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--reduce", default="refresh", choices=["refresh", "owner"])
    chosen = parser.parse_args()
    rows, good = [], True
    network = read_shapes(chosen.network).network()
    for size in chosen.ranks:
        counted, predicted, placement = counted_messages(
            network, size, reduce=chosen.reduce
        )
        numbers = summary(counted, placement)
        most = numbers["busiest"] / numbers["mean"]
        slower = numbers["seconds"] / numbers["ring"]
        good = good and counted == predicted and most <= MOST
        good = good and numbers["buffer"] <= LARGEST and slower <= SLOWEST
        rows.append(
            (
                str(size),
                str(sum(map(len, counted.values()))),
                "yes" if counted == predicted else "NO",
                f"{numbers['mean'] / 1e6:.0f}",
                f"{most:.2f}",
                f"{numbers['buffer'] / 1e6:.0f}",
                f"{1e3 * numbers['seconds']:.1f}",
                f"{1e3 * numbers['ring']:.1f}",
                *(
                    f"{busiest(made, Distributed.interval) / 1e9:.1f}"
                    for made in (placement, replace(placement, workers={}))
                ),
            )
        )
    columns = ("ranks", "messages", "as predicted", "MB sent", "busiest", "largest MB")
    print_table(
        f"{chosen.network}: an update, a refresh and a step, owners send directions",
        (*columns, "ms of directions", "of a ring", "GFLOP", "undivided"),
        rows,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
