"""The figures of the documentation: their references, and the tables beside them."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(
    not DOCS.is_dir(), reason="the documentation is not here"
)


@pytest.fixture(scope="module")
def figures():
    """A function that imports a module of the figures, as running them would."""
    pytest.importorskip("sklearn")
    pytest.importorskip("scipy")
    sys.path.insert(0, str(DOCS / "examples"))
    yield lambda name: importlib.import_module(f"figures.{name}")
    sys.path.remove(str(DOCS / "examples"))
    for name in [name for name in sys.modules if name.split(".")[0] == "figures"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def layers(figures):
    """What the three layers see."""
    network = figures("network")
    return {name: getattr(network, name)() for name in MAKERS}


MAKERS = ("dense", "convolution", "recurrent")


@pytest.mark.parametrize("name", MAKERS)
def test_the_table_of_the_page_is_what_is_computed(figures, layers, name):
    """Every number of the page on choosing, to the digits that it shows."""
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    seen = layers[name]
    rows = figures("fidelity").fidelities(seen)
    lines = figures("table").markdown(seen, rows).splitlines()
    start = page.index(lines[0])
    table = page[start:].split("\n\n")[0].splitlines()
    shown = [line for line in table if line.startswith("|")]

    assert len(shown) == len(lines) == len(rows) + 2
    for found, printed in zip(lines, shown, strict=True):
        assert re.sub(r"\d\.\d{3}", "", found) == re.sub(r"\d\.\d{3}", "", printed)
    for row, printed in zip(rows, shown[2:], strict=True):
        numbers = [row.block, row.decrease] if row.kept else [row.decrease]
        # Half of the last digit, and what roundoff may add to it.
        np.testing.assert_allclose(numbers, _decimals(printed), rtol=0, atol=5.001e-4)


@pytest.mark.parametrize("name", MAKERS)
def test_the_numbers_of_the_page_do_not_amplify_roundoff(
    figures, layers, monkeypatch, rng, name
):
    """Pixels that are off by 1e-10 move no number by more than 1e-7."""
    network, fidelities = figures("network"), figures("fidelity").fidelities
    images = network.images

    def disturbed(size, count):
        pixels, labels = images(size, count)
        return pixels * (1.0 + 1e-10 * rng.normal(size=pixels.shape)), labels

    monkeypatch.setattr(network, "images", disturbed)
    pairs = zip(
        fidelities(layers[name]), fidelities(getattr(network, name)()), strict=True
    )

    for row, other in pairs:
        assert other.block == pytest.approx(row.block, abs=1e-7), row.name
        assert other.decrease == pytest.approx(row.decrease, abs=1e-7), row.name


def test_the_numbers_of_the_five_pictures(figures, layers):
    pictures = figures("pictures")
    page = (DOCS / "five_pictures.md").read_text(encoding="utf-8")
    exact = layers["dense"].dense_block()
    kronecker = np.kron(*pictures.factors(layers["dense"]))
    blocks = pictures.blocks(layers["dense"])
    lengths = np.linspace(0.0, 14.0, 141)
    losses = pictures.losses_along(lengths)
    errors = [np.linalg.norm(b - exact) for b in (kronecker, blocks["EKFAC"])]
    said = [f"{error / np.linalg.norm(exact):.2f}" for error in errors]

    assert f"is {said[0]}." in " ".join(page.split())
    assert f"measures the eigenvalues: {said[1]}." in " ".join(page.split())
    best = {name: f"{lengths[loss.argmin()]:.0f}" for name, loss in losses.items()}
    assert best == {"gradient": "6", "K-FAC": "9"}
    assert losses["K-FAC"].min() < losses["gradient"].min()


def _decimals(line):
    return [float(number) for number in re.findall(r"\d\.\d{3}", line)]
