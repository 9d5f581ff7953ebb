"""The benchmark's folder, which is on no search path: imported for its tests."""

import importlib.util
import sys

import pytest

from kfac_core.cli.bench import find_benchmarks


def import_benchmarks():
    """Import the package ``benchmarks``; skip a module where it is not there."""
    folder = find_benchmarks()
    if folder is None:
        pytest.skip("the source tree is not there", allow_module_level=True)
    if "benchmarks" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "benchmarks",
        folder / "__init__.py",
        submodule_search_locations=[str(folder)],
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = package
    spec.loader.exec_module(package)
