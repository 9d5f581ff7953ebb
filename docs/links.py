"""Every link of the built pages leads somewhere: ``python docs/links.py docs/_build/html``.

Files, pages and places in pages are looked for; addresses elsewhere are not.
"""

from __future__ import annotations

import html.parser
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(html.parser.HTMLParser):
    """The places of a page that links may name, and its own links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what a tag names and links to."""
        values = {key: value for key, value in attrs if value}
        self.ids |= {values[key] for key in ("id", "name") if key in values}
        self.links |= {values[key] for key in ("href", "src") if key in values}


def broken(built: Path) -> list[str]:
    """Return a line for each link that leads nowhere."""
    paths = [p for p in built.resolve().rglob("*.html") if "_static" not in p.parts]
    pages = {path: Page(path) for path in sorted(paths)}
    lines = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                (path.parent / unquote(parts.path)).resolve() if parts.path else path
            )
            place = unquote(parts.fragment)
            known = not place or target not in pages or place in pages[target].ids
            if not (target.exists() and known):
                lines.append(f"{path.relative_to(built.resolve())}: {link}")
    return lines


if __name__ == "__main__":
    found = broken(Path(sys.argv[1]))
    print("\n".join(found))
    print(f"{len(found)} broken links")
    sys.exit(min(len(found), 1))
