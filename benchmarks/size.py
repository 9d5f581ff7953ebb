"""``python -m benchmarks.size``: how large the tree is, and what its lines are spent on.

A code line holds a token that is neither comment nor docstring.  A refusal is an ``if``
whose only end is a ``raise``, or a call of ``require...`` or of ``warnings.warn`` that
stands by itself; its share is that of its lines in the code lines.  A body's length is the
code lines of a function without its signature and docstring.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

from kfac_core.cli.screen import print_table

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "core": ("kfac_core",),
    "backends": ("backends",),
    "integrations": ("shims",),
    "tests": ("conformance_tests",),
    "documentation": ("docs",),
    "benchmarks": ("benchmarks",),
}
KIT = "kfac_core_conformance"
"""Folder of the conformance kit, a package of its own and no test."""

BUDGETS = {"core": 19_500, "integrations": 9_500, "tests": 33_000}
"""Code lines that the design asks for."""

REFUSALS = {"core": 0.07, "integrations": 0.10}
"""Greatest share of refusals that it asks for."""

_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


@dataclass
class Size:
    """What some files hold, in lines.

    Attributes
    ----------
    code, comments, refusals : int
        Code lines, lines with a comment, and code lines of refusals.
    longest : int
        Code lines of the longest body of a function.
    where : str
        That function.
    """

    code: int = 0
    comments: int = 0
    refusals: int = 0
    longest: int = 0
    where: str = ""

    def add(self, other: Size) -> None:
        """Add what other files hold."""
        self.code += other.code
        self.comments += other.comments
        self.refusals += other.refusals
        if other.longest > self.longest:
            self.longest, self.where = other.longest, other.where


def size_of(text: str, name: str = "") -> Size:
    """Return the size of a program, from its text."""
    tree = ast.parse(text)
    lines, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    refused: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *functions)):
            for statement in node.body:
                if _is_text(statement):
                    lines -= _span(statement)
        if _is_refusal(node):
            refused |= _span(node)
    size = Size(len(lines), len(comments), len(refused & lines))
    for node in ast.walk(tree):
        if isinstance(node, functions):
            body = set().union(*map(_span, node.body)) & lines
            if len(body) > size.longest:
                size.longest, size.where = len(body), f"{name}:{node.name}"
    return size


def sizes(root: Path = ROOT) -> dict[str, Size]:
    """Return the size of each package of a source tree; the kit is one of its own."""
    found = {name: Size() for name in (*PACKAGES, "kit")}
    for package, folders in PACKAGES.items():
        for folder in folders:
            for path in sorted((root / folder).rglob("*.py")):
                kind = "kit" if KIT in path.parts else package
                name = str(path.relative_to(root))
                found[kind].add(size_of(path.read_text(encoding="utf-8"), name))
    return found


def main() -> int:
    """Print the table, with the budgets beside it; return 1 where one does not hold."""
    rows, held = [], True
    for name, size in sizes().items():
        budget, share = BUDGETS.get(name), size.refusals / max(size.code, 1)
        most = REFUSALS.get(name)
        held &= budget is None or size.code <= budget
        held &= most is None or share <= most
        rows.append(
            (
                name,
                f"{size.code:,}",
                "" if budget is None else f"{budget:,}",
                f"{share:.1%}",
                "" if most is None else f"{most:.0%}",
                f"{100 * size.comments / max(size.code, 1):.1f}",
                f"{size.longest} ({size.where})",
            )
        )
    columns = ("package", "code lines", "budget", "refusals", "at most")
    columns += ("comments per 100", "longest body")
    print_table("sizes", columns, rows, width=140)
    return 0 if held else 1


def _is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring, or one of an attribute."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_refusal(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.body[-1], ast.Raise) and not node.orelse
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    function = ast.unparse(node.value.func)
    name = function.rpartition(".")[2]
    return name.lstrip("_").startswith("require") or function == "warnings.warn"


def _span(node: ast.stmt | ast.AST) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
