"""The page of the API shows every public name, and the pages name only what there is."""

import ast
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
    "kfac_core.distributed",
    "kfac_core.integration",
    "kfac_core.losses",
    "kfac_core.steps",
    "kfac_core.damping",
    "kfac_core.report",
    "kfac_core.roots",
    "kfac_core.posterior",
    "kfac_core.influence",
    "kfac_core.approximations",
    "kfac_core.operators",
    "kfac_core.layers",
    "kfac_core.factors",
    "kfac_core.linalg",
    "kfac_core.array",
    "kfac_core_conformance",
    "kfac_core_conformance.records",
)
ENTRY_POINTS = {"kfac_core.backends", "kfac_core.commands", "kfac_core.communicators"}

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
    block = page.split(f".. automodule:: {package}\n")[1].split("\n\n")[0]
    hidden = re.search(r":exclude-members: (.+)", block)
    # A class is shown once: what is left out here is in the first section.
    assert set(hidden[1].split(", ") if hidden else ()) <= set(kfac_core.__all__)
    for name in set(module.__all__) - described:
        found = getattr(module, name)
        assert inspect.isclass(found) or inspect.isfunction(inspect.unwrap(found)), name
        assert found.__doc__, name
    for name in described:
        value = getattr(module, name)
        text = page.split(f"py:data:: {package}.{name}\n")[1].split(".. py:")[0]
        assert all(f'``"{choice}"``' in text for choice in typing.get_args(value))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_section(page, package):
    """Under its own name, with the package's members in it."""
    assert f"\n## {package}\n" in page
    section = page.split(f"\n## {package}\n")[1].split("\n## ")[0]

    assert f".. automodule:: {package}\n" in section


def test_the_modules_texts_are_of_the_same_packages():
    """What the API page shows, and what the page of the modules' texts goes through."""
    source = (DOCS / "conf.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }

    assert ast.literal_eval(values["PACKAGES"]) == PACKAGES


def test_every_public_package_is_listed():
    """Whatever the top of `kfac_core` offers as a module, but files and errors."""
    modules = {entry.name for entry in pkgutil.iter_modules(kfac_core.__path__)}
    source = (Path(kfac_core.__path__[0]) / "__init__.pyi").read_text(encoding="utf-8")
    offered = set(re.findall(r"^    (\w+) as \1,$", source, re.M)) & modules

    # Their public names are all at the top.
    at_the_top = {"checkpoint", "errors"}
    assert {f"kfac_core.{name}" for name in offered - at_the_top} <= set(PACKAGES)


def test_no_public_name_is_that_of_a_module():
    """A name would become its module as soon as anything imports that."""
    modules = {found.name for found in pkgutil.iter_modules(kfac_core.__path__)}

    assert not modules & set(kfac_core.__all__)
    importlib.import_module("kfac_core.posterior.spectra")
    assert inspect.isfunction(kfac_core.posterior.spectral_blocks)


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
