"""The README's links lead somewhere, in the source tree and on a package index."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

pytestmark = pytest.mark.skipif(
    not (ROOT / "docs").is_dir(), reason="the documentation is not here"
)


@pytest.fixture(scope="module")
def readme():
    """The text of the README."""
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_link_leads_to_a_file(readme):
    """And to a heading of it, where the link names one."""
    links = [link for link in LINK.findall(readme) if "://" not in link]
    assert len(links) > 20

    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        if anchor:
            text = (ROOT / path).read_text(encoding="utf-8")
            titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            slugs = [
                re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles
            ]
            assert anchor in slugs, link


def test_an_index_shows_no_relative_link(readme):
    """As the build's substitutions leave the text: words stay, pictures go."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    hooks = project["tool"]["hatch"]["metadata"]["hooks"]
    shown = readme
    for change in hooks["fancy-pypi-readme"]["substitutions"]:
        replacement = change["replacement"]
        shown = re.sub(change["pattern"], replacement, shown)

    links = LINK.findall(shown)
    assert links
    assert all(link.startswith("https://") for link in links)
    assert "](docs/" in readme
    assert "urls" not in project["project"]
