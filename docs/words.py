"""Count the words that a reader of the guide reads: ``python docs/words.py [PAGE ...]``.

The guide is every page of `docs` but the changelog, the contributing page and the pages
made from docstrings (`api.md`, `module_texts.md`, the gallery).  Text, headings and cells
of tables count.  Programs and their output, formulas set apart, pictures, tables that are
made by the build, markup and the bars of tables do not; inline code and an inline formula
are one word each.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MOST = 40_000
APART = ("api", "changelog", "contributing", "module_texts")
# Fences whose content is text.
TEXT = ("note", "tip", "warning", "important", "grid", "dropdown", "tab", "glossary")
FENCE = re.compile(r"^\s*(`{3,}|:{3,}|~{3,})(.*)$")
WORD = re.compile(r"\w")


def words(text: str) -> int:
    """Return the number of words of a page in Markdown."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    read: list[str] = []
    hidden = ""
    for line in text.splitlines():
        fence = FENCE.match(line)
        if hidden:
            if fence and fence[1] == hidden and not fence[2].strip():
                hidden = ""
        elif fence:
            name = fence[2].strip().strip("{").split("}")[0].split("-")[0]
            if fence[2].strip() and name not in TEXT:
                hidden = fence[1]
            elif fence[2].strip():
                read.append(fence[2].partition("}")[2])
        elif not re.match(r"^\s*(:[\w-]+:|\|[\s:|-]+\|$|\(.*\)=$)", line):
            read.append(line)
    page = "\n".join(read)
    page = re.sub(r"!\[[^]]*\]\([^)]*\)", "", page)
    page = re.sub(r"\]\([^)]*\)", "]", page)
    page = re.sub(r"\{[\w:]+\}(?=`)", "", page)
    page = re.sub(r"``[^`]+``|`[^`]+`|\$[^$]+\$", " x ", page)
    return sum(bool(WORD.search(word)) for word in page.split())


def guide(folder: Path) -> dict[str, int]:
    """Return the words of each page of the guide."""
    pages = sorted(p for p in folder.glob("*.md") if p.stem not in APART)
    return {p.stem: words(p.read_text(encoding="utf-8")) for p in pages}


def main(names: list[str]) -> int:
    """Print the words of pages; return 1 if the guide has too many."""
    counts = guide(Path(__file__).parent)
    for name in names or sorted(counts, key=counts.__getitem__):
        print(f"{counts[name]:7,d}  {name}")
    total = sum(counts.values())
    print(f"{total:7,d}  words on {len(counts)} pages, at most {MOST:,d}")
    return int(total > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
