"""The program that asks curvlinops and this library the same, where curvlinops is."""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_both_give_the_same_numbers(monkeypatch):
    """Products, and inverses under both rules of damping, to rounding."""
    pytest.importorskip("curvlinops", reason="curvlinops is not installed")
    if not EXAMPLES.is_dir():
        pytest.skip("the documentation is not here")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    differences = importlib.import_module("curvlinops_beside").main()
    sys.modules.pop("curvlinops_beside")

    assert len(differences) == 3
    assert max(differences.values()) < 1e-12
