"""The table of identities in the documentation, and the tests that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
PAGE = HERE.parent / "docs" / "identities.md"

# Numbers of the notes on the literature, without methods that are not here.
ALGEBRA = [f"A{i}" for i in (*range(1, 12), 14, 17, *range(22, 29))]
NETWORKS = [f"B{i}" for i in (*range(1, 8), 9, 11, *range(16, 22))]
SYSTEM = [f"C{i}" for i in range(1, 9)]


def rows_of(text):
    """Return the rows of all tables, as (identity, what it says, what holds it)."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if re.fullmatch(r"[ABC]\d+", cells[0]):
            rows.append(cells)
    return rows


def named_in(text):
    """Return the tests that are named, as (file, function)."""
    return re.findall(r"`([\w/]+/test_\w+\.py)::(test_\w+)`", text)


def missing(named):
    """Return which of the named tests there are not."""
    found = {}
    for file in {file for file, _ in named}:
        path = HERE / file
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
        found[file] = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    return [f"{file}::{name}" for file, name in named if name not in found[file]]


@pytest.fixture(scope="module")
def page():
    """The text; an installed package has no documentation beside its tests."""
    if not PAGE.exists():
        pytest.skip("docs/identities.md is not here")
    return PAGE.read_text(encoding="utf-8")


def test_every_test_in_the_table_exists(page):
    """A test that is renamed or removed has to be so in the table."""
    named = named_in(page)

    assert len(named) > 60
    assert missing(named) == []


def test_every_identity_has_one_row(page):
    """In order, and none twice."""
    rows = rows_of(page)

    assert [row[0] for row in rows] == [*ALGEBRA, *NETWORKS, *SYSTEM]
    assert all(len(row) == 3 for row in rows)


def test_every_row_names_a_test_or_the_reason_why_not(page):
    """No identity is listed without what holds it."""
    bare = [
        name
        for name, _, held in rows_of(page)
        if not named_in(held) and not held.startswith("left out: ")
    ]

    assert bare == []


def test_a_missing_test_is_reported():
    """The rows that must fail: an unknown function, and an unknown file."""
    named = named_in("`array/test_smoke.py::test_nothing` `x/test_no_file.py::test_it`")

    assert missing(named) == [
        "array/test_smoke.py::test_nothing",
        "x/test_no_file.py::test_it",
    ]
