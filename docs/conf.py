"""Configuration of the documentation build, and the pages made from the library."""

from importlib import metadata
from pathlib import Path

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
        from kfac_core.capabilities import markdown_table
    except ImportError:
        table = "*This build has no capability table; `kfac-core doctor` prints it.*"
    else:
        table = markdown_table()
    folder = Path(__file__).parent / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "capabilities.md").write_text(table.rstrip() + "\n", encoding="utf-8")


write_capability_table()
