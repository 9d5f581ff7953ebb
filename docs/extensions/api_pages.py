"""A page for every public name: groups, summaries, and links between guides and names.

Pages are written to ``docs/api/`` before Sphinx reads the sources.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from api_groups import ALSO_CALLED, DATA, GROUPS, Group, Name, data_text, names_of
from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform


def write_pages(docs: Path) -> None:
    """Write ``docs/api/``: a page for each group and for each name."""
    folder = docs / "api"
    folder.mkdir(exist_ok=True)
    guides = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted(docs.glob("*.md"))
    }
    written = set()
    for group in GROUPS:
        names = names_of(group)
        _write(folder / f"{group.slug}.rst", _group_page(group, names), written)
        for name in names:
            name.guides.extend(_mentioning(name, guides))
            _write(folder / f"{name.path}.rst", _name_page(name, group, names), written)
    for path in folder.glob("*.rst"):
        if path not in written:
            path.unlink()
    generated = docs / "_generated"
    generated.mkdir(exist_ok=True)
    (generated / "api_groups.md").write_text(_groups_table(), encoding="utf-8")


def _groups_table() -> str:
    """Return what ``api.md`` includes: each group with its first names, and their tree."""
    lines = ["| group | names |", "| --- | --- |"]
    for group in GROUPS:
        first = [f"[{name.short}](api/{name.path}.rst)" for name in names_of(group)]
        more = ", …" if len(first) > 6 else ""
        lines.append(
            f"| [{group.title}](api/{group.slug}.rst) | {', '.join(first[:6])}{more} |"
        )
    lines += ["", "```{toctree}", ":hidden:", ""]
    lines += [f"api/{group.slug}" for group in GROUPS]
    lines += ["```", ""]
    return "\n".join(lines)


def _write(path: Path, text: str, written: set[Path]) -> None:
    """Write a file only if it has changed, so that Sphinx need not read it again."""
    written.add(path)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _mentioning(name: Name, guides: dict[str, str]) -> list[str]:
    """Return the pages that mention a name, those that mention it most often first."""
    if name.path.startswith("kfac_core_shims."):
        module = name.path.rpartition(".")[0]
        pattern = re.compile(rf"from {module} import [^\n]*\b{name.short}\b")
    elif len(name.short) < 4:
        pattern = re.compile(rf"\bkc\.{name.short}\b")
    else:
        pattern = re.compile(rf"[`.]{name.short}\b|\b{name.short}\(")
    counts = {page: len(pattern.findall(text)) for page, text in guides.items()}
    hidden = {"index", "api", "module_texts", "changelog", "contributing"}
    found = [page for page in counts if counts[page] and page not in hidden]
    return sorted(found, key=lambda page: -counts[page])[:5]


def _group_page(group: Group, names: list[Name]) -> str:
    lines = [*_heading(group.title), group.intro, ""]
    for package in group.packages:
        lines += [f".. py:module:: {package}", ""]
    packages = dict.fromkeys(name.path.rpartition(".")[0] for name in names)
    for package in packages:
        lines += [f".. rubric:: {package}", ""]
        lines += [".. list-table::", "   :class: names", "   :widths: 30 70", ""]
        for name in names:
            if name.path.rpartition(".")[0] == package:
                lines += [
                    f"   * - :doc:`{_title(name)} <{name.path}>`",
                    f"     - {name.summary}",
                ]
        lines.append("")
    return "\n".join(lines) + "\n"


def _title(name: Name) -> str:
    if name.path in ALSO_CALLED:
        return f"{name.short} ({ALSO_CALLED[name.path]})"
    return name.short


def _name_page(name: Name, group: Group, names: list[Name]) -> str:
    title = _title(name)
    package = name.path.rpartition(".")[0]
    # Hundreds of names in the navigation of every page would be of no use to a reader.
    lines = [":orphan:", "", *_heading(title)]
    lines += [f":doc:`API </api>` / :doc:`{group.title} <{group.slug}>`", ""]
    if name.path in DATA:
        lines += [f".. py:data:: {name.path}", "", f"   {data_text(name)}", ""]
    elif inspect.isclass(name.value):
        lines += [
            f".. autoclass:: {name.path}",
            "   :members:",
            "   :show-inheritance:",
        ]
    elif callable(name.value):
        lines += [f".. autofunction:: {name.path}"]
    else:
        lines += [f".. autodata:: {name.path}"]
    lines += ["", ".. rubric:: Import", "", ".. code-block:: python", ""]
    lines += [f"   from {package} import {name.short}", ""]
    lines += [".. rubric:: See also", ""]
    if name.guides:
        pages = ", ".join(f":doc:`/{page}`" for page in name.guides)
        lines.append(f"Pages that use it: {pages}.")
    near = [other for other in names if other is not name][:60]
    here = names.index(name)
    near = sorted(near, key=lambda other: abs(names.index(other) - here))[:6]
    if near:
        links = ", ".join(f":doc:`{other.short} <{other.path}>`" for other in near)
        lines += ["", f":doc:`{group.title} <{group.slug}>`: {links}."]
    return "\n".join(lines) + "\n"


def _heading(title: str) -> list[str]:
    return [title, "=" * len(title), ""]


class LinkNames(SphinxTransform):
    """Link code such as ``kc.Kronecker()`` in a guide to the page of the name."""

    default_priority = 450

    def apply(self, **_: Any) -> None:
        """Replace literals by references, but in headings and in links."""
        if self.env.docname.startswith("api/") or self.env.docname == "changelog":
            return
        top = set(importlib.import_module("kfac_core").__all__)
        for literal in list(self.document.findall(nodes.literal)):
            linked = (nodes.reference, addnodes.pending_xref, nodes.title)
            if isinstance(literal.parent, linked):
                continue
            head = re.match(
                r"(?:kc\.|kfac_core\.)?([\w.]+)(?:\(.*\))?$", literal.astext()
            )
            if head is None:
                continue
            if not (
                literal.astext().startswith(("kc.", "kfac_core.")) or head[1] in top
            ):
                continue
            reference = addnodes.pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                reftarget=f"kfac_core.{head[1]}",
                refwarn=False,
            )
            literal.replace_self(reference)
            reference += literal


def use_navigation_of_group(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Give the page of a name the navigation of its group, which is made once."""
    group = _group_of(page)
    if group is None:
        return
    trees = app.builder.__dict__.setdefault("kfac_core_trees", {})

    def toctree(**options: Any) -> str:
        if group not in trees:
            make = app.builder._get_local_toctree
            trees[group] = make(f"api/{group}", **options)
        return str(trees[group])

    context["toctree"] = toctree


_TO_NAME = re.compile(r'(href="(?:\.\./)+api/((?:\w+\.)*(\w+))\.html)#[\w.]*?\b\3\b')
_OF_OTHERS = re.compile(r'<li><a href="(?!kfac_core)[\w/]+\.html">[\w.]+</a></li>\n?')


def link_to_public_names(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Link from sources to the public names, where viewcode takes one package for all."""
    if page.startswith("_modules/"):
        context["body"] = _TO_NAME.sub(r"\1#\2", context["body"])
    # Frameworks that are only imitated here have no source; the list has them all the same.
    if page == "_modules/index":
        context["body"] = _OF_OTHERS.sub("", context["body"])


def _group_of(page: str) -> str | None:
    """Return the group of the page of a name, such as ``api/kfac_core.Kronecker``."""
    folder, _, path = page.partition("/")
    return _groups_by_path().get(path) if folder == "api" else None


@functools.cache
def _groups_by_path() -> dict[str, str]:
    return {name.path: group.slug for group in GROUPS for name in names_of(group)}


def leave_glossary_to_its_pages(app: Any, doctree: Any, page: str) -> None:
    """Take the glossary's terms out of the search, which would find them before all."""
    if page == "glossary":
        for node in doctree.findall(addnodes.index):
            node["entries"] = []


def setup(app: Any) -> dict[str, bool]:
    """Register the transform, the navigation, and what the search leaves out."""
    app.add_transform(LinkNames)
    app.connect("doctree-resolved", leave_glossary_to_its_pages)
    app.connect("html-page-context", use_navigation_of_group, priority=400)
    app.connect("html-page-context", link_to_public_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
