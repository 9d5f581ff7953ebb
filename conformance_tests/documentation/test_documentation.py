"""The examples of the documentation run, each page from top to bottom."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
from pathlib import Path

import pytest

import kfac_core

from ..builders.programs import run_python

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
    if "```python" in path.read_text(encoding="utf-8")
)
TRAINERS = {"accelerate", "lightning", "transformers"}
FRAMEWORKS = {"flax", "jax", "keras", "optax", "torch", *TRAINERS}
CONSUMERS = {"curvlinops", "laplace"}
"""Libraries whose programs alone are left out of a page where they are not installed."""


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    """Every block of Python, in order, in one program; files go to an empty folder.

    A page that imports a framework has a process of its own, since frameworks choose
    devices and backends when they are imported; where one is not installed it is left
    out.
    """
    source = program_of(page)
    program = tmp_path / "example.py"
    program.write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    # A page may import the example program that it explains.
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    frameworks = imported(source) & FRAMEWORKS
    missing = not_installed(frameworks)
    if missing:
        pytest.skip(f"{', '.join(sorted(missing))} not installed")
    if not frameworks and os.environ.get("KFAC_CORE_TEST_PAGES") == "frameworks":
        pytest.skip("another session runs the pages that need no framework")
    if not frameworks:
        runpy.run_path(str(program), run_name="__main__")
        return
    environment = {**os.environ, "PYTHONWARNINGS": "error:::__main__"}
    ran = run_python(program, env=environment)

    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.mark.parametrize(
    ("page", "call"),
    [
        ("trained_models", " collect("),
        ("trained_models", " kj.collect("),
        ("trained_models", "inverse.scores("),
        ("trained_models", ".functional_variance("),
        ("influence", " influence("),
        ("influence", "linear_datamodeling_score("),
        ("posteriors", "= Posterior("),
        ("consumers", "scipy_operator("),
        ("consumers", " Laplace("),
        ("consumers", " KFACLinearOperator("),
        ("merging", " merge("),
        ("merging", " rounded_weight("),
        ("trainers", "HuggingFaceCallback("),
        ("trainers", "LightningCallback("),
        ("trainers", "accelerated("),
    ],
)
def test_a_path_takes_at_most_twelve_lines(page, call):
    """Beyond imports; your own model and data are in a program of their own."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    pattern = r"^```python\n.*?^```$|(?:^    [^\n]*\n+)+"
    programs = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    program = next(p for p in programs if call in p)
    lines = program.removeprefix("```python").removesuffix("```").splitlines()
    imports_and_comments = ("import ", "from ", "#")
    counted = [
        line
        for line in map(str.strip, lines)
        if line and not line.startswith(imports_and_comments)
    ]

    assert 0 < len(counted) <= 12, counted


def test_examples_precondition_gradients_of_means():
    """The first rule of `docs/conventions.md`: gradients are not sums over rows."""
    package = Path(kfac_core.__file__).parent
    sources = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sources += package.rglob("*.py")
    of_sums = re.compile(r'"weight": \(*(x|inputs)\.T @ \w+\b(?! / )')
    found = [path.name for path in sources if of_sums.search(path.read_text("utf-8"))]

    assert len(sources) > 100
    assert not found


def program_of(page):
    """Return the blocks of Python of a page that can run here as one program."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return "\n".join(b for b in blocks if not not_installed(imported(b) & CONSUMERS))


def not_installed(names):
    return {name for name in names if not importlib.util.find_spec(name)}


def imported(source):
    """Return the top-level packages that a program needs, without optional ones."""
    tree = ast.parse(source)
    optional = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for inner in ast.walk(node)
    }
    names = set()
    for node in set(ast.walk(tree)) - optional:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
            if node.module == "kfac_core_shims":
                names |= {alias.name for alias in node.names}
            elif node.module.startswith("kfac_core_shims."):
                names.add(node.module.split(".")[1])
    return names
