"""The vocabulary of the integrations: one meaning, one default."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "integrations.py"

pytestmark = pytest.mark.skipif(
    not PROGRAM.is_file(), reason="the documentation is not here"
)

DEFAULTS = {
    "likelihood": "None",
    "fisher": "'gradients'",
    "kl_clip": "0.001",
    "damping": "0.005",
    "decay": "0.95",
    "update_every": "10",
    "refresh_every": "50",
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
    if name == "jax":
        expected["refresh_every"] = "25"  # counted in updates

    assert {option: found[option] for option in MEANT if option in found} == (
        expected | {"reduction": found["reduction"]}
    )
    assert found["reduction"] in ((None,) if name == "jax" else ("None", "'mean'"))
    assert {*program.MEANING} == MEANT
