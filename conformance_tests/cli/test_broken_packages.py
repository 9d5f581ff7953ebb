"""Optional packages that raise, and entry points that cannot be read: it works without."""

from __future__ import annotations

import json
import os
import sys

import pytest

from ..builders.programs import run_python

BROKEN = {
    "scipy": "raise OSError('libopenblas.so: cannot open shared object file')",
    "threadpoolctl": "raise SystemExit('no threads here')",
    "torch": "raise OSError('libtorch_cpu.so: undefined symbol')",
    "jax": "raise RuntimeError('jaxlib is of another version')",
    "cupy": "raise SystemExit(3)",
}
TRAINING = """
import numpy as np
import kfac_core as kc
layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
held = kc.Estimator({"a": kc.Block(layer, kc.Kronecker())}, reduction="sum",
                    execution=kc.Execution(workers=2))
rng = np.random.default_rng(3)
held.update({"a": kc.Batch(rng.normal(size=(4, 3)), rng.normal(size=(4, 2)))})
held.refresh()
given = {"a": {"weight": np.ones((3, 2)), "bias": np.ones(2)}}
print(held.precondition(given)["a"]["weight"].shape)
"""


@pytest.fixture
def broken(tmp_path):
    """A folder of packages that raise, before all others; a function that runs Python."""
    for name, line in BROKEN.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line + "\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "KFAC_CORE_BACKEND": "numpy"}

    def run(*arguments):
        return run_python(*arguments, env=environment, cwd=tmp_path)

    return run


def test_the_library_works_without_broken_packages(broken):
    """NumPy alone is enough, whatever the others raise."""
    found = broken("-c", TRAINING)

    assert found.returncode == 0, found.stderr
    assert found.stdout == "(3, 2)\n"


def test_doctor_reports_broken_packages(broken):
    """And goes on to the other backends."""
    found = broken("-W", "ignore", "-m", "kfac_core", "doctor", "--all", "--json")

    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert "libopenblas" in told["broken"]["scipy.linalg"]
    assert "no threads" in told["broken"]["threadpoolctl"]
    assert told["backends"]["numpy"]["usable"]
    for name in ("torch", "jax", "cupy"):
        assert not told["backends"][name]["usable"]
    assert "undefined symbol" in told["backends"]["torch"]["problem"]
    assert "SystemExit" in told["backends"]["cupy"]["problem"]
    text = broken("-W", "ignore", "-m", "kfac_core", "doctor", "--all").stdout
    assert "broken: scipy.linalg (OSError: libopenblas" in text
