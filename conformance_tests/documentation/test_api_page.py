"""The page of the API shows every public name, and the pages name only what there is."""

import importlib
import inspect
import pkgutil
import re
import typing
from pathlib import Path

import pytest

import kfac_core

DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = (
    "kfac_core",
    "kfac_core.execution",
    "kfac_core.losses",
    "kfac_core.steps",
    "kfac_core.approximations",
    "kfac_core.array",
    "kfac_core.factors",
    "kfac_core.layers",
    "kfac_core.linalg",
    "kfac_core.operators",
    "kfac_core_conformance.records",
    "kfac_core_conformance",
)
ENTRY_POINTS = {"kfac_core.backends", "kfac_core.commands"}
# Their classes are imported from `kfac_core` itself.
PARTLY = ("kfac_core.posterior", "kfac_core.influence")

pytestmark = pytest.mark.skipif(
    not DOCS.is_dir(), reason="the documentation is not here"
)


@pytest.fixture(scope="module")
def page():
    """The source of the page."""
    return (DOCS / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_is_on_the_page(page, package):
    """As a member that has a docstring of its own, or as data that is described."""
    module = importlib.import_module(package)
    described = set(re.findall(rf"^\.\. py:data:: {package}\.(\w+)$", page, re.M))
    shown = rf"^\.\. automodule:: {package}\n   :members:$"

    assert re.search(shown, page, re.M)
    for name in set(module.__all__) - described:
        found = getattr(module, name)
        assert inspect.isclass(found) or inspect.isfunction(inspect.unwrap(found)), name
        assert found.__doc__, name
    for name in described:
        value = getattr(module, name)
        text = page.split(f"py:data:: {package}.{name}\n")[1].split(".. py:")[0]
        assert all(f'``"{choice}"``' in text for choice in typing.get_args(value))


@pytest.mark.parametrize("package", PARTLY)
def test_what_else_a_package_has_is_on_the_page(page, package):
    """A name that `kfac_core` does not have is among the members that are listed."""
    module = importlib.import_module(package)
    rest = set(module.__all__) - set(kfac_core.__all__)
    block = re.search(rf"automodule:: {package}\n   :members:((?:.+\n)+)", page)
    listed = set(re.findall(r"\w+", block[1])) if block else set()

    assert rest <= listed


def test_no_public_name_is_that_of_a_module():
    """A name would become its module as soon as anything imports that."""
    modules = {found.name for found in pkgutil.iter_modules(kfac_core.__path__)}

    assert not modules & set(kfac_core.__all__)
    importlib.import_module("kfac_core.posterior.spectra")
    assert inspect.isfunction(kfac_core.spectral_blocks)


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
