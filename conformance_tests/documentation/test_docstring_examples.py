"""The examples in docstrings run and print what stands there."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from ..builders.doctests import assert_prints

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(
    not DOCS.is_dir(), reason="the documentation is not here"
)


def documented():
    """Every public object of the packages with pages, by its path."""
    sys.path.insert(0, str(DOCS / "extensions"))
    packages = importlib.import_module("api_groups").core_packages()
    sys.path.remove(str(DOCS / "extensions"))
    del sys.modules["api_groups"]
    found = {}
    for package in packages:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = inspect.unwrap(getattr(module, name))
            if "\n>>> " in (inspect.getdoc(value) or ""):
                found.setdefault(value, f"{package}.{name}")
    return {path: value for value, path in found.items()}


OBJECTS = documented() if DOCS.is_dir() else {}


@pytest.mark.parametrize("path", OBJECTS)
def test_an_example_prints_what_it_says(path):
    assert_prints(OBJECTS[path], path)
