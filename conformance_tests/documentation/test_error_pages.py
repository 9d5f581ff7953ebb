"""The page on errors has a section for every exception, and each raises what it says."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from kfac_core import errors

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
CLASSES = sorted(
    name
    for name, found in vars(errors).items()
    if inspect.isclass(found) and issubclass(found, errors.KFACError)
)

pytestmark = pytest.mark.skipif(
    not PAGE.is_file(), reason="the documentation is not here"
)


@pytest.fixture(scope="module")
def sections():
    """The text below each heading of the second level, by heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_exception_has_a_section(sections):
    """And no section is of an exception that there is not."""
    found = sorted(name for name in sections if name.endswith("Error"))

    assert sorted(errors.__all__) == CLASSES
    assert found == CLASSES


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"KFACError"}))
def test_a_section_says_causes_and_remedy_and_raises(sections, name):
    """The examples run with those of the other pages; here it is which they expect."""
    section = sections[name]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    expected = {
        argument.attr
        for block in blocks
        for call in ast.walk(ast.parse(block))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "shows"
        for argument in call.args
        if isinstance(argument, ast.Attribute)
    }

    assert "\nUsual causes\n: " in section
    assert "\nWhat to do\n: " in section
    assert name in expected


@pytest.mark.parametrize("name", CLASSES)
def test_the_table_names_the_builtin(name):
    """A row for each, with the class that somebody would catch who knows no better."""
    found = getattr(errors, name)
    builtin = [base for base in found.__mro__[1:] if base.__module__ != errors.__name__]
    shown = builtin[0].__name__
    if builtin[0].__module__ != "builtins":
        shown = f"numpy.linalg.{shown}"
    row = rf"^\| \[`{name}`\]\(#{name.lower()}\) \| `{re.escape(shown)}` \| .+ \|$"

    assert re.search(row, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
