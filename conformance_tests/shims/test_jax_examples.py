"""The program that trains a module of each JAX library, without marks, runs."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from ..builders.programs import run_python

PROGRAM = Path(__file__).parents[2] / "docs/examples/training/jax_libraries.py"
MODULES = {"nnx": "flax", "linen": "flax", "equinox": "equinox", "haiku": "haiku"}

pytest.importorskip("jax")
pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="the documentation is not here"),
    pytest.mark.skipif(
        importlib.util.find_spec("sklearn") is None,
        reason="scikit-learn has the digits",
    ),
]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_trains_with_the_defaults(module, request):
    """It ends far below the loss of equal probabilities."""
    if importlib.util.find_spec(MODULES[module]) is None:
        pytest.skip(f"{MODULES[module]} is not installed")
    if module != "nnx" and not request.config.getoption("--thorough"):
        pytest.skip("JAX compiles each for seconds; see --thorough")
    ran = run_python(PROGRAM, "--steps", "15", "--modules", module, check=True)
    name, loss = ran.stdout.split(": ")

    assert name == module
    assert float(loss) < 0.5 * math.log(10)
