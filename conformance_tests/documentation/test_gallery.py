"""The programs of the gallery run by themselves; here each for a moment."""

import os
import re
from pathlib import Path

import pytest

from ..builders.programs import run_python

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"
PROGRAMS = sorted(path.stem for path in GALLERY.glob("plot_*.py"))
# What makes a program long, and what it is here.
SHORTER = {r"^SECONDS = .*": "SECONDS = 0.3", r"^STEPS = .*": "STEPS = 4"}
NEEDS = {"plot_record": "msgspec"}

pytestmark = pytest.mark.skipif(
    os.environ.get("KFAC_CORE_TEST_PAGES") != "frameworks",
    reason="another session has the frameworks",
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_runs(tmp_path, name):
    for module in ("sklearn", "matplotlib", NEEDS.get(name, "torch")):
        pytest.importorskip(module)
    text = (GALLERY / f"{name}.py").read_text(encoding="utf-8")
    for line, shorter in SHORTER.items():
        text = re.sub(line, shorter, text, flags=re.MULTILINE)
    # Compared after 0.3 seconds curves say nothing, so that only errors fail.
    program = tmp_path / f"{name}.py"
    program.write_text(text, encoding="utf-8")
    environment = os.environ | {"MPLBACKEND": "Agg"}
    ran = run_python(program, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
