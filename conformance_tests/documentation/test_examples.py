"""The example programs of the documentation train: their loss falls."""

import importlib
import sys
from pathlib import Path

import pytest

import kfac_core as kc

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROGRAMS = ["shampoo", "kl_shampoo"]

pytestmark = pytest.mark.skipif(
    not EXAMPLES.is_dir(), reason="the documentation is not here"
)


@pytest.fixture
def example(monkeypatch):
    """A function that imports an example by name, as running it would."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in PROGRAMS:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_trains(backend, example, capsys, request, name):
    """In 21 steps the loss on all digits falls from 2.3 to less than half of that."""
    if name != "shampoo":  # One of the programs is enough for a start.
        request.getfixturevalue("compiles_long")
    with kc.use_backend(f"{backend.name}:{backend.spec.partition(':')[2]}"):
        before, after = example(name).train(steps=21)

    assert 2.0 < before < 3.0
    assert after < 0.5 * before
    assert "step   20  loss" in capsys.readouterr().out
