"""Configuration of the documentation build, and the pages made from the library."""

import importlib
import importlib.util
import inspect
import re
from importlib import metadata
from pathlib import Path
from typing import Any

# The packages whose public names `api.md` shows.
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

project = "kfac_core"
author = "The kfac_core developers"
copyright = author
version = release = metadata.version("kfac-core")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "_generated", "examples"]

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"kfac_core {release}"

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # Parameters give types together with shapes
# The shims import their frameworks, which need not be here.
autodoc_mock_imports = ["flax", "jax", "keras", "optax", "torch"]
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Types are prose ("array, shape (n, m)"), and Sphinx wonders which `shape` is meant.
suppress_warnings = ["ref.python"]

# No inventory of another project is fetched, so only our public names must resolve.
nitpick_ignore_regex = [(r"py:.*", r"(?!kfac_core\.\w+$).*")]


def write_capability_table() -> None:
    """Write the table of operations and backends that `backends.md` includes."""
    try:
        from kfac_core.array.capabilities import markdown_table
    except ImportError:
        table = "*This build has no capability table; `kfac-core doctor` prints it.*"
    else:
        table = markdown_table()
    folder = Path(__file__).parent / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "capabilities.md").write_text(table.rstrip() + "\n", encoding="utf-8")


def public_modules() -> list[str]:
    """Return the modules that public names are defined in, or whose docstrings name."""
    found = set()
    for package in PACKAGES:
        root = importlib.import_module(package)
        for value in (getattr(root, name) for name in root.__all__):
            defined = getattr(value, "__module__", None) or ""
            found |= {defined} if defined.startswith("kfac_core.") else set()
            members = vars(value).values() if inspect.isclass(value) else ()
            texts = [inspect.getdoc(part) or "" for part in (value, *members)]
            found |= set(re.findall(r"`(kfac_core(?:\.\w+)+)`", " ".join(texts)))
    return sorted(name for name in found - {*PACKAGES} if _is_module(name))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def as_written(app: Any, what: str, *rest: Any) -> None:
    """Show the indented formulas of a module's docstring as they stand."""
    lines: list[str] = rest[-1]
    starts = [
        i
        for i, line in enumerate(lines)
        if line.startswith("    ") and i and not lines[i - 1]
    ]
    # Of paragraphs in a row the first starts the block; what comes before is at the margin.
    for i in reversed(starts):
        before = next((line for line in reversed(lines[:i]) if line), "")
        if what == "module" and before and not before.startswith(" "):
            lines[i:i] = ["::", ""]


def setup(app: Any) -> None:
    """Connect this file to Sphinx."""
    app.connect("autodoc-process-docstring", as_written, priority=400)


def write_module_texts() -> None:
    """Write what `module_texts.md` includes: the docstring of each of these modules."""
    lines = []
    for name in public_modules():
        lines += [f"## {name.removeprefix('kfac_core.')}", "", "```{eval-rst}"]
        lines += [f".. automodule:: {name}", "   :no-index:", "```", ""]
    folder = Path(__file__).parent / "_generated"
    text = "\n".join(lines).rstrip() + "\n"
    (folder / "module_texts.md").write_text(text, encoding="utf-8")


write_capability_table()
write_module_texts()
