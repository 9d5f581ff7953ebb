"""The examples of the documentation run, each page from top to bottom."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
    if "```python" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    """Every block of Python, in order, in one program; files go to an empty folder."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    program = tmp_path / "example.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    runpy.run_path(str(program), run_name="__main__")


def test_there_are_examples():
    """The search for them finds the README and more than one page."""
    assert Path("README.md") in PAGES
    assert len(PAGES) > 2
