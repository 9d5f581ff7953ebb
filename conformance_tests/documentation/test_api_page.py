"""Every public name has a page of the API, and the guides name only what there is."""

import importlib
import inspect
import os
import re
import sys
import typing
from pathlib import Path

import pytest

import kfac_core
from kfac_core.array.capabilities import capability_table

DOCS = Path(__file__).parents[2] / "docs"
ENTRY_POINTS = {"kfac_core.backends", "kfac_core.commands", "kfac_core.communicators"}

pytestmark = pytest.mark.skipif(
    not DOCS.is_dir(), reason="the documentation is not here"
)


@pytest.fixture(scope="module")
def api_groups():
    """The module that says which names are on which page."""
    sys.path.insert(0, str(DOCS / "extensions"))
    yield importlib.import_module("api_groups")
    sys.path.remove(str(DOCS / "extensions"))
    del sys.modules["api_groups"]


@pytest.fixture(scope="module")
def names(api_groups):
    """All names with a page, less those of modules that need a framework."""
    found = []
    for group in api_groups.GROUPS:
        packages = [name for name in group.packages if "shims" not in name]
        kept = api_groups.Group(
            group.slug, group.title, group.intro, tuple(packages), group.defined_in
        )
        found += api_groups.names_of(kept)
    return found


def test_every_public_name_has_one_page(api_groups, names):
    """Names of `kfac_core` itself, and those of each package that are not among them."""
    expected = {f"kfac_core.{name}" for name in kfac_core.__all__}
    for package in api_groups.core_packages()[1:]:
        module = importlib.import_module(package)
        again = kfac_core.__all__ if package.startswith("kfac_core.") else ()
        expected |= {f"{package}.{name}" for name in set(module.__all__) - set(again)}
    paths = [name.path for name in names]

    assert sorted(paths) == sorted(expected)
    assert len({path.lower() for path in paths}) == len(paths)


def test_every_name_is_documented(api_groups, names):
    """By a docstring; an alias of a type by a text that shows all its choices."""
    for name in names:
        assert name.summary, name.path
        if name.path in api_groups.DATA:
            literal = typing.get_origin(name.value) is typing.Literal
            for choice in typing.get_args(name.value) if literal else ():
                assert f'``"{choice}"``' in name.summary, name.path
        else:
            found = name.value
            assert inspect.isclass(found) or inspect.isfunction(inspect.unwrap(found))
            assert found.__doc__
    assert set(api_groups.DATA) <= {name.path for name in names}
    assert set(api_groups.ALSO_CALLED) <= {name.path for name in names}


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_the_names_in_a_page_exist(path):
    """Whatever is written as `kfac_core.…`, or as one of its attributes in prose."""
    text = path.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)

    # A group of entry points has the form of a name.
    for name in set(re.findall(r"`(kfac_core(?:\.\w+)+)", prose)) - ENTRY_POINTS:
        assert _resolved(name), name


def _resolved(name):
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.skipif(
    os.environ.get("KFAC_CORE_TEST_NO_BACKENDS") == "1", reason="no backend is loaded"
)
def test_the_table_of_native_operations_is_that_of_the_backends(monkeypatch):
    """The page is built without the libraries; here it is compared where they are."""
    monkeypatch.syspath_prepend(str(DOCS / "extensions"))
    module = importlib.import_module("native_table")
    shown = {
        cells[0].strip("` "): dict(zip(module.NAMES, cells[1:], strict=True))
        for cells in (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in module.table().splitlines()[2:]
        )
    }
    pytest.importorskip("scipy")
    found = capability_table()

    assert list(shown) == list(found)
    for operation, row in found.items():
        for name, capability in row.items():
            if name in module.NAMES and capability != "unavailable":
                assert shown[operation][name] == capability, (operation, name)
