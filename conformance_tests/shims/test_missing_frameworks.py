"""An integration whose framework is missing names the extra that installs it."""

import pytest

from ..builders.programs import run_python

PROGRAM = """
import sys
sys.modules["{0}"] = None
import kfac_core_shims.{0}
"""


@pytest.mark.parametrize("framework", ["torch", "jax", "keras", "sklearn"])
def test_the_extra_is_named(framework):
    ran = run_python("-c", PROGRAM.format(framework), timeout=120)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: this integration needs {framework}")
    assert f"'kfac-core[{framework}]'" in last
