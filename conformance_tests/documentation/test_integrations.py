"""The vocabulary of the integrations: one meaning, one default."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import kfac_core_shims

PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "integrations.py"

pytestmark = pytest.mark.skipif(
    not PROGRAM.is_file(), reason="the documentation is not here"
)

DEFAULTS = {
    "likelihood": "None",
    "fisher": "'gradients'",
    "kl_clip": "0.001",
    "damping": "0.03",
    "decay": "0.95",
    "update_every": "5",
    "refresh_every": "25",
}
MEANT = {*DEFAULTS, "reduction"}


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("integrations", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["torch", "jax", "keras", "numpy"])
def test_defaults_are_those_of_the_vocabulary(program, name):
    """Of every option; `reduction` is that of the loss, where the loss is seen."""
    found = program.defaults(name)
    elsewhere = program.ELSEWHERE.get(name, {})
    expected = {o: d for o, d in DEFAULTS.items() if o not in elsewhere}

    assert {option: found[option] for option in MEANT if option in found} == (
        expected | {"reduction": found["reduction"]}
    )
    assert found["reduction"] in ((None,) if name == "jax" else ("None", "'mean'"))
    assert {*program.MEANING} == MEANT


def test_the_table_has_a_column_for_each_integration(program):
    """And a row for each option, with the defaults as the code writes them."""
    lines = [line.strip("| ").split(" | ") for line in program.table().splitlines()]
    head, _, *rows = lines

    assert head[2:] == ["PyTorch", "JAX", "Keras", "NumPy"]
    assert [row[0] for row in rows] == [f"`{option}=`" for option in program.MEANING]
    damping = next(row for row in rows if row[0] == "`damping=`")
    assert damping[2:] == ["`0.03`"] * 4
    assert all(all(row) for row in rows)


def used_names(tree):
    """Return what a shim takes from the subpackages that are made for integrations."""
    shared = {"integration", "losses", "steps"}
    return {
        f"{node.value.attr}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in shared
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "kc"
    }


def test_the_page_on_writing_a_shim_names_all_that_the_shims_use():
    """Whoever writes another one finds there what these are made of."""
    page = (PROGRAM.parents[1] / "writing_a_shim.md").read_text(encoding="utf-8")
    files = Path(kfac_core_shims.__file__).parent.rglob("*.py")
    used = set()
    for path in files:
        used |= used_names(ast.parse(path.read_text(encoding="utf-8")))

    assert len(used) > 10
    assert [name for name in used if not re.search(rf"`{re.escape(name)}`", page)] == []
