"""The benchmark's folder, which is on no search path: imported for its tests."""

import importlib.util
import sys
from pathlib import Path

import pytest

import kfac_core

FOLDER = Path(kfac_core.__file__).parents[1] / "benchmarks"


def import_benchmarks():
    """Import the package ``benchmarks``; skip a module where it is not there."""
    if not (FOLDER / "__main__.py").is_file():
        pytest.skip("the source tree is not there", allow_module_level=True)
    if "benchmarks" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = package
    spec.loader.exec_module(package)
