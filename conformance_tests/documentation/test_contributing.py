"""The table from the papers' equations to the code, and the paths that are named."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TABLE = TEXT.split("## From the papers to the code")[1].split("##")[0]


@pytest.mark.parametrize("name", re.findall(r"`(kfac_core[.\w]+)`", TABLE))
def test_each_equation_is_where_the_table_says(name):
    """A module, or a function or class in the module that defines it."""
    module, _, member = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        defined = getattr(importlib.import_module(module), member)
        assert defined.__module__ == module


def test_the_table_fits_on_a_screen():
    assert 20 <= TABLE.count("\n| ") - 2 <= 25


@pytest.mark.skipif(
    not (ROOT / "kfac_core").is_dir(), reason="the source tree is not there"
)
@pytest.mark.parametrize(
    "path", re.findall(r"`((?:docs|shims|kfac_core|conformance_tests)/[\w/.]+)`", TEXT)
)
def test_each_file_that_is_named_exists(path):
    assert (ROOT / path).exists()
