"""Look at the built pages in headless Chromium: overflow, formulas, pictures of pages.

``python docs/screenshots.py docs/_build/html OUTPUT`` serves the folder on this machine,
opens every page in frames of 1280 and 400 pixels, and fails where a page is wider than its
window, a formula cannot be rendered, or a picture is missing.  Pictures of every guide and
of some pages of the API go to OUTPUT.  Nothing is loaded from elsewhere: the browser finds
no other host.
"""

from __future__ import annotations

import functools
import html
import http.server
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import quote

WIDTHS = (1280, 400)
# Beside the guides.
SHOWN = (
    "api/approximations",
    "api/kfac_core.Kronecker",
    "api/kfac_core.Estimator",
    "auto_gallery/index",
    "auto_gallery/plot_autoencoder",
)
# These are shown in the dark theme too.
DARK = ("index", "five_pictures", "quickstart_torch", "recipes", "tasks", *SHOWN[1::3])
APART = ("genindex", "py-modindex", "search", "module_texts", "changelog")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 300
# Pages that one run of the browser loads, so that a busy machine is in time.
TOGETHER = 40
# What people look for, and the pages of which one must be found first.
SEARCHES = {
    "install": ("install",),
    "EKFAC": ("api/kfac_core.EKFAC",),
    "Laplace": ("posteriors", "api/kfac_core.Posterior", "auto_gallery/plot_laplace"),
    "damping": ("damping", "api/damping"),
    "distributed": ("distributed", "api/distributed"),
    "Hugging Face": ("trainers",),
    "nan loss": ("tuning",),
    "approximation conv net": ("choosing",),
    "train own model": ("quickstart_torch",),
    "train my own model": ("quickstart_torch",),
    "pytorch example": ("quickstart_torch",),
    "transformers callback": ("trainers",),
    "conv2d": ("choosing",),
    "cuda": ("hardware",),
    "kfac-jax": ("compared",),
    "difference kfac-jax": ("compared",),
}

# Loads the pages one after the other in a frame, and writes a line for each.
PROBE = """<!doctype html><title>probe</title><body><script>
const pages = {pages}, widths = {widths}, found = [];
async function load(page, width) {{
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${{width}}px;height:900px;border:0`;
  const loaded = new Promise((done) => (frame.onload = done));
  frame.src = "/" + page + ".html";
  document.body.append(frame);
  await loaded;
  const inside = frame.contentDocument.documentElement;
  const errors = inside.querySelectorAll(".katex-error").length;
  const missing = [...inside.querySelectorAll("img")]
    .filter((node) => node.complete && node.naturalWidth === 0).length;
  const bare = [...inside.querySelectorAll(".math")]
    .filter((node) => !node.querySelector(".katex")).length;
  const over = inside.scrollWidth - inside.clientWidth;
  if (over > 0 || errors + bare + missing > 0)
    found.push(`${{page}} at ${{width}}: ${{over}} pixels too wide, `
      + `${{errors + bare}} formulas not rendered, ${{missing}} pictures missing`);
  frame.remove();
}}
(async () => {{
  for (const width of widths) for (const page of pages) await load(page, width);
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = ["looked at " + pages.length, ...found].join("\\n");
  document.body.append(result);
}})();
</script>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the pages without a line for each request."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main(built: Path, output: Path) -> int:
    """Check all pages, take the pictures, and return the number of complaints."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("left out: Chromium is not installed")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary) / "site"
        shutil.copytree(built, site)
        pages = sorted(
            str(path.relative_to(site).with_suffix("")).replace("\\", "/")
            for path in site.rglob("*.html")
            if "_static" not in path.parts and "_modules" not in path.parts
        )
        guides = [page for page in pages if "/" not in page and page not in APART]
        shown = [*guides, *SHOWN]
        themed = [(page, "light") for page in shown] + [(page, "dark") for page in DARK]
        frames = [(page, theme, width) for page, theme in themed for width in WIDTHS]
        for page, theme, width in frames:
            frame = _frame(page, width, theme)
            (site / _name(page, theme, width, "html")).write_text(frame, "utf-8")
        handler = functools.partial(Quiet, directory=str(site))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        complaints = []
        for start in range(0, len(pages), TOGETHER):
            probed = pages[start : start + TOGETHER]
            text = PROBE.format(pages=probed, widths=list(WIDTHS))
            (site / "probe.html").write_text(text, encoding="utf-8")
            complaints += _complaints(browser, address, probed)
        complaints += _searched(browser, address, built)
        print(*complaints, f"{len(complaints)} complaints", sep="\n", flush=True)
        output.mkdir(parents=True, exist_ok=True)
        for page, theme, width in frames:
            picture = output / _name(page, theme, width, "png")
            _run(
                browser,
                f"{address}/{_name(page, theme, width, 'html')}",
                f"--screenshot={picture.resolve()}",
                f"--window-size={max(width, 500)},1600",
                "--virtual-time-budget=4000",
            )
        server.shutdown()
    print(f"{len(pages)} pages; pictures in {output}")
    return len(complaints)


def _name(page: str, theme: str, width: int, suffix: str) -> str:
    """Return the name of the file of a picture, or of the page that it is taken of."""
    return f"{page.replace('/', '.')}-{theme}-{width}.{suffix}"


def _frame(page: str, width: int, theme: str) -> str:
    """Return a page with another in a frame: a window cannot be 400 pixels wide."""
    style = f"width:{width}px;height:1600px;border:0"
    return (
        f'<body style="margin:0"><script>localStorage.setItem("theme", "{theme}")</script>'
        f'<iframe src="/{page}.html" style="{style}"></iframe>'
    )


def _complaints(browser: str, address: str, probed: list[str]) -> list[str]:
    dumped = _run(
        browser,
        f"{address}/probe.html",
        "--dump-dom",
        "--window-size=1400,1000",
        f"--virtual-time-budget={1000 * PATIENCE}",
    )
    result = re.search(r'<pre id="result">(.*?)</pre>', dumped, re.DOTALL)
    lines = html.unescape(result[1]).splitlines() if result else []
    if not lines or lines[0] != f"looked at {len(probed)}":
        return [f"the browser did not look at all of {', '.join(probed)}"]
    return lines[1:]


def _searched(browser: str, address: str, built: Path) -> list[str]:
    complaints = []
    for words, expected in SEARCHES.items():
        if not any((built / f"{page}.html").is_file() for page in expected):
            continue
        dumped = _run(
            browser,
            f"{address}/search.html?q={quote(words)}",
            "--dump-dom",
            "--virtual-time-budget=20000",
        )
        found = re.search(r'class="search">.*?<a href="([^"?#]+)\.html', dumped, re.S)
        first = found[1] if found else "nothing"
        if first not in expected:
            complaints.append(f"a search for {words!r} finds {first} first")
    return complaints


def _run(browser: str, address: str, *options: str) -> str:
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        *options,
        address,
    ]
    ran = subprocess.run(
        [*command[:-1], "--hide-scrollbars", command[-1]],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return ran.stdout


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1]), Path(sys.argv[2])), 1))
