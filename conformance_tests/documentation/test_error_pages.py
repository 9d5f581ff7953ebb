"""The page on errors has a section for every exception, and each raises what it says."""

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
