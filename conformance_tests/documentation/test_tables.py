"""Tables that programs write into pages: each is found, and a wrong number is seen."""

import importlib
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(
    not DOCS.is_dir(), reason="the documentation is not here"
)


@pytest.fixture(scope="module")
def tables():
    """The program, as a module."""
    before = list(sys.path)
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("tables")
    sys.path[:] = before
    del sys.modules["tables"]


def test_every_table_is_on_its_page(tables):
    """Between its marks, as a table with a head."""
    for name in tables.TABLES:
        lines = tables.shown(name).splitlines()
        assert len(lines) > 3, name
        assert set(lines[1]) <= set("| -:"), name


def test_every_mark_has_a_program(tables):
    """A page says by its marks which tables are written by a program."""
    for path in (DOCS.parent / "README.md", *DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert text.count("<!-- table: ") == text.count("<!-- end -->"), path
        for part in text.split("<!-- table: ")[1:]:
            name = part.partition(" -->")[0]
            assert tables.ROOT / tables.TABLES[name].page == path


def test_the_benchmark_page_shows_the_measurements_that_are_kept(tables):
    """Its tables are those of `benchmarks.pages`, number by number."""
    names = [name for name in tables.TABLES if name.startswith("benchmark ")]
    assert names
    for name in names:
        assert tables.TABLES[name].program() == tables.shown(name), name


def test_wrong_numbers_in_a_table_are_reported(tables):
    """By more than its last digit, but for seconds."""
    printed = "| a | loss | seconds |\n| --- | --- | --- |\n| x (0.03) | 1.25 | 3.0 |"

    assert tables.differences(printed, printed) == []
    assert tables.differences(printed.replace("1.25", "1.26"), printed) == []
    assert tables.differences(printed.replace("3.0", "9.0"), printed) == []
    for wrong in ("1.27", "1.23", "-1.25", "diverges"):
        assert len(tables.differences(printed.replace("1.25", wrong), printed)) == 1
    small = printed.replace("1.25", "8.89e-06")
    assert tables.differences(small.replace("8.89", "8.87"), small)
    assert tables.differences(printed.replace("x (", "y ("), printed)
    assert tables.differences(printed + "\n| z | 1 | 2 |", printed)
