"""The program that trains deep networks with the defaults runs, and its table is whole."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "docs/examples/training/torch_deep.py"

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="the documentation is not here"),
    pytest.mark.skipif(
        importlib.util.find_spec("sklearn") is None,
        reason="scikit-learn has the digits",
    ),
]


def test_deep_networks_train_with_the_defaults():
    """Each method has a finite loss; K-FAC's is below that of the start."""
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), "--quick"],
        capture_output=True,
        text=True,
        check=True,
    )
    tables = [table.splitlines() for table in ran.stdout.strip().split("\n\n")]

    assert [table[0].split(" | ")[0] for table in tables] == [
        "| classifier",
        "| autoencoder",
    ]
    for table, start in zip(tables, (math.log(10), 64 * math.log(2)), strict=True):
        losses = {
            row.split(" | ")[0].strip("| "): float(row.split(" | ")[2])
            for row in table[2:]
        }
        assert len(losses) >= 4  # and kfac-pytorch, where it is installed
        assert all(math.isfinite(loss) for loss in losses.values())
        assert losses["KFAC(model), SGD 0.1, momentum 0.9"] < start
        assert losses["KFACOptimizer(model)"] < 0.7 * start
