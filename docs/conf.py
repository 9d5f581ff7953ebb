"""Configuration of the documentation build, and the pages made from the library."""

import importlib
import importlib.util
import inspect
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "extensions"))
import api_groups
import api_pages
import native_table

project = "kfac_core"
author = "The kfac_core developers"
copyright = author
version = release = metadata.version("kfac-core")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "api_pages",
]
exclude_patterns = [
    "_build",
    "_generated",
    "examples",
    "gallery",
    "sg_execution_times.rst",
]

# `nox -s gallery` runs the programs and draws their pictures: building pages does not.
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": "/never/",
    "within_subsection_order": "FileNameSortKey",
    "default_thumb_file": str(Path(__file__).parent / "_static" / "logo.svg"),
    "download_all_examples": False,
    "min_reported_time": 1e9,
    "show_signature": False,
    "remove_config_comments": True,
    "write_computation_times": False,
}

# Nothing is fetched from elsewhere: `_static` holds the fonts and the script of KaTeX.
mathjax_path = "katex/katex.min.js"
mathjax_options = {"defer": "defer"}
html_static_path = ["_static"]
html_js_files = [("math.js", {"defer": "defer"})]
html_search_scorer = str(Path(__file__).parent / "extensions" / "scorer.js")
html_css_files = ["katex/katex.min.css", "site.css"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
pygments_dark_style = "github-dark"  # the default underlines modules, as links
html_title = f"kfac_core {release}"
html_logo = html_favicon = "_static/logo.svg"

default_role = "py:obj"  # a link where the name is public, else code
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # Parameters give types together with shapes
# The shims import their frameworks, which need not be here.
autodoc_mock_imports = api_groups.FRAMEWORKS
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Types are prose ("array, shape (n, m)"), and Sphinx wonders which `shape` is meant.
suppress_warnings = ["ref.python"]

# No inventory of another project is fetched, so only our public names must resolve.
# Groups of entry points have the form of names.
nitpick_ignore = [
    ("py:obj", "kfac_core.backends"),
    ("py:obj", "kfac_core.commands"),
    ("py:obj", "kfac_core.communicators"),
]
nitpick_ignore_regex = [(r"py:.*", r"(?!kfac_core\.\w+$).*")]


def write_capability_table() -> None:
    """Write the table of operations and backends that `backends.md` includes."""
    folder = Path(__file__).parent / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "capabilities.md").write_text(native_table.table(), encoding="utf-8")


def write_integration_table() -> None:
    """Write the table of the integrations' options that `quickstarts.md` includes."""
    folder = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        "integrations", folder / "examples" / "integrations.py"
    )
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    generated = folder / "_generated"
    generated.mkdir(exist_ok=True)
    (generated / "integrations.md").write_text(program.table() + "\n", encoding="utf-8")


def public_modules() -> list[str]:
    """Return the modules that public names are defined in, or whose docstrings name."""
    found = set()
    for package in api_groups.core_packages():
        root = importlib.import_module(package)
        for value in (getattr(root, name) for name in root.__all__):
            defined = getattr(value, "__module__", None) or ""
            found |= {defined} if defined.startswith("kfac_core.") else set()
            members = vars(value).values() if inspect.isclass(value) else ()
            texts = [inspect.getdoc(part) or "" for part in (value, *members)]
            found |= set(re.findall(r"`(kfac_core(?:\.\w+)+)`", " ".join(texts)))
    return sorted(
        name for name in found - {*api_groups.core_packages()} if _is_module(name)
    )


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


api_pages.write_pages(Path(__file__).parent)
write_capability_table()
write_integration_table()
write_module_texts()
