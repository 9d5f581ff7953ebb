"""An integration whose framework is missing names the extra that installs it."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["{0}"] = None
import kfac_core_shims.{0}
"""


@pytest.mark.parametrize("framework", ["torch", "jax", "keras", "sklearn"])
def test_the_extra_is_named(framework):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(framework)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: this integration needs {framework}")
    assert f"'kfac-core[{framework}]'" in last
