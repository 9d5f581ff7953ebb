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


def _decimals(line):
    return [float(number) for number in re.findall(r"\d\.\d{3}", line)]


def _mean_loss(logits, labels):
    """The softmax's cross-entropy, for complex numbers too."""
    largest = logits.real.max(axis=1, keepdims=True)
    log_sum = np.log(np.sum(np.exp(logits - largest), axis=1)) + largest[:, 0]
    return np.mean(log_sum - np.sum(labels * logits, axis=1))


@pytest.mark.parametrize("name", ["a layer under a mean", "a recurrent cell"])
def test_output_gradients_are_those_of_the_loss(figures, rng, name):
    """The derivative of the mean loss along a direction of W, by a complex step."""
    network = figures("network")
    labels = np.eye(10)[rng.integers(10, size=6)]
    x = rng.normal(size=(6, 4, 5))
    if name == "a layer under a mean":
        made = network.Network(x, labels, hidden=3)
        W, rows, head = made.W, made.x, made.head

        def means(W):
            return network.with_ones(np.tanh(rows @ W).mean(axis=1))

        v = (network.softmax(means(W) @ head) - labels) / 6
        g = made.backward(v)
    else:
        W, head = rng.normal(size=(5 + 3 + 1, 3)), rng.normal(size=(4, 10))
        rows, states = network.unrolled(x, W)

        def means(W):
            state = np.zeros((6, 3))
            for step in range(4):
                state = np.tanh(
                    network.with_ones(np.concatenate([x[:, step], state], 1)) @ W
                )
            return network.with_ones(state)

        v = (network.softmax(means(W) @ head) - labels) / 6
        g = network.through_time(v @ head[:-1].T, states, W)
    direction = rng.normal(size=W.shape)

    slope = _mean_loss(means(W + 1e-30j * direction) @ head, labels).imag / 1e-30
    gradient = np.einsum("nsi,nso->io", rows, g)

    np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-10)


@pytest.mark.parametrize("name", MAKERS)
def test_no_direction_is_better_than_the_exact_one(figures, layers, name):
    """Shares of the decrease lie in (0, 1], and that of the whole block is 1."""
    rows = {row.name: row for row in figures("fidelity").fidelities(layers[name])}

    assert all(0.0 < row.decrease <= 1.0 + 1e-9 for row in rows.values())
    assert rows["Full()"].decrease == pytest.approx(1.0, abs=1e-9)
    assert rows["Full()"].block < 1e-12
    assert rows["Eigen()"].block <= rows["Kronecker()"].block
    assert rows["KFOC(iterations=5)"].block <= rows["Kronecker()"].block


def test_rules_of_damping_add_at_least_the_damping(figures, layers):
    """The exact rule adds one damping to each eigenvalue, the factored ones more."""
    added = figures("rules").added(layers["dense"], damping=0.1)

    np.testing.assert_allclose(added["exact"][1], 1.0, rtol=1e-9)
    assert np.min(added["factored"][1]) > 1.0
    assert np.sum(added["factored_unit_pi"][1]) > np.sum(added["factored"][1])


def test_factored_products_are_shorter(figures, layers):
    """And the exact rule is the dense solution."""
    found = figures("rules").compared(layers["dense"], dampings=np.asarray([0.1]))
    rows = {row.rule: row for row in found}

    assert rows["exact"].error < 1e-10
    assert rows["factored_unit_pi"].length < rows["factored"].length < 0.5


def test_errors_grow_with_the_condition_number(figures):
    """What the page on precision says of each way of inverting."""
    roundoff = figures("roundoff")
    at = {c: {r.way: r for r in roundoff.inverted(c)} for c in (1e3, 1e5, 1e7)}

    for condition, rows in at.items():
        cholesky, basis = rows["float32 Cholesky"], rows["float32 eigenbasis"]
        assert 1e-9 * condition < cholesky.error < 1e-7 * condition
        assert basis.error > 1.5 * cholesky.error
        assert rows["float64 Cholesky"].error < 1e-15 * condition
    assert at[1e5]["kfac_core, float32"].fallback == "working"
    assert at[1e7]["kfac_core, float32"].error is None
    stored = roundoff.stored(1e5)
    assert 0.05 > stored["float32"] > 1e-4 > 1e-9 > stored["float64"]
    refused = roundoff.stored(1e7)
    assert np.isnan(refused["float32"])
    assert refused["float64"] < 1e-7


def test_the_pictures_are_drawn(figures, layers, tmp_path):
    """One of them; each is a picture of more than nothing."""
    pytest.importorskip("matplotlib")
    drawing, fidelity = figures("drawing"), figures("fidelity")
    seen = layers["dense"]
    drawing.draw_fidelity([(seen, fidelity.fidelities(seen))], tmp_path / "made.png")

    assert (tmp_path / "made.png").stat().st_size > 10_000
    for name in ("approximations", "damping", "precision"):
        assert (DOCS / "figures" / f"{name}.png").stat().st_size > 10_000
