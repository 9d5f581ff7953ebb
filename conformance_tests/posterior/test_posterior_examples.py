"""The examples on posteriors and influence, in a quick form, and what they must find."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"


def load(name):
    """Return an example as a module, without running it."""
    pytest.importorskip("scipy", reason="the examples minimize with SciPy")
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", FOLDER / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_influence_predicts_retraining():
    """The exact Gauss-Newton ranks best, and every curvature better than none."""
    pytest.importorskip("sklearn", reason="the example reads scikit-learn's digits")
    example = load("influence")

    found = example.correlations(examples=16, queries=6)

    rho = {name: value for name, (value, _) in found.items()}
    exact = rho["Gauss-Newton, whole network"]
    assert exact > 0.8
    for name in ("EKFAC", "K-FAC"):
        assert 0.5 < rho[name] <= exact
        assert rho[name] > rho["gradients alone"]
    _, slope = found["Gauss-Newton, whole network"]
    assert 0.5 < slope < 5.0


def test_laplace_prefers_a_middling_prior_and_widens_off_the_data():
    """The evidence has a maximum inside the grid; bands are wider where no data are."""
    example = load("laplace")
    taus = (1e-3, 0.5, 1e3)

    points, grid, evidence, bands = example.run(examples=30, hidden=6, taus=taus)

    assert set(evidence) == {"K-FAC", "EKFAC", "whole blocks", "whole network"}
    for name, values in evidence.items():
        assert np.argmax(values) == 1, name
        tau, _, deviation = bands[name]
        inside = np.interp(1.25, grid, deviation)
        assert tau == 0.5
        assert inside < np.interp(0.0, grid, deviation)
        assert inside < np.interp(4.0, grid, deviation)
        assert inside > np.sqrt(example.NOISE)
    # The layers of the whole network are not independent, and lose evidence as blocks.
    assert evidence["whole network"][1] > evidence["whole blocks"][1]
    assert len(points[0]) == 30


def numbers_of(page, first):
    """Return the numbers of each row of a page's table, by the row's name."""
    text = (FOLDER.parent / f"{page}.md").read_text(encoding="utf-8")
    start = text.index(f"| {first}")
    rows = {}
    for line in text[start:].split("\n\n")[0].splitlines()[2:]:
        name, *cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        found = [cell.replace("\N{MINUS SIGN}", "-") for cell in cells]
        rows[name.strip()] = [float(x) for x in found if re.fullmatch(r"-?[\d.]+", x)]
    return rows


def test_the_tables_of_the_page_on_posteriors_are_what_is_computed():
    """To the digits that they show, whatever the order in which BLAS adds."""
    example = load("laplace")
    kinds = ("K-FAC", "EKFAC", "whole block of each layer", "whole network, dense")
    places = (-4.0, -1.25, 0.0, 1.25, 4.0)

    _, grid, evidence, bands = example.run(
        examples=60, hidden=16, taus=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    )

    printed = numbers_of("posteriors", "log-marginal")
    for kind, values in zip(kinds, evidence.values(), strict=True):
        np.testing.assert_allclose(values, printed[kind], rtol=0, atol=5.01e-3)
    printed = numbers_of("posteriors", "standard deviation")
    for kind, (tau, _, deviation) in zip(kinds, bands.values(), strict=True):
        found = np.interp(places, grid, deviation)
        assert tau == 0.3
        np.testing.assert_allclose(found, printed[kind], rtol=0, atol=5.01e-4)


def test_the_modes_of_laplace_do_not_amplify_roundoff(monkeypatch):
    """Data that are off by 1e-9 move no evidence by more than 1e-4."""
    example = load("laplace")
    sizes = {"examples": 60, "hidden": 16, "taus": (0.03, 0.3, 3.0)}
    _, _, evidence, _ = example.run(**sizes)
    data, rng = example.data, np.random.default_rng(2)

    def disturbed(count, seed):
        return [a * (1.0 + 1e-9 * rng.normal(size=a.shape)) for a in data(count, seed)]

    monkeypatch.setattr(example, "data", disturbed)
    _, _, other, _ = example.run(**sizes)

    for name, values in evidence.items():
        np.testing.assert_allclose(other[name], values, rtol=0, atol=1e-4)


def test_the_table_of_the_page_on_influence_is_what_is_computed():
    """To the digits that it shows: five seeds, each with sixty trainings."""
    pytest.importorskip("sklearn", reason="the example reads scikit-learn's digits")
    example = load("influence")

    runs = [example.correlations(examples=60, queries=40, seed=k) for k in range(5)]

    found = [np.mean([run[name] for run in runs], axis=0) for name in runs[0]]
    text = (FOLDER.parent / "influence.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (\d\.\d{3}) \| (\d\.\d\d) \|", text)
    printed = [[float(x) for x in row] for row in rows]
    assert np.shape(printed) == np.shape(found)
    np.testing.assert_allclose(np.subtract(found, printed)[:, 0], 0, atol=5.01e-4)
    np.testing.assert_allclose(np.subtract(found, printed)[:, 1], 0, atol=5.01e-3)


def test_laplace_draws_a_picture(tmp_path, monkeypatch, capsys):
    """The program prints its table, and writes a picture where one is asked for."""
    pytest.importorskip("matplotlib", reason="the example draws with Matplotlib")
    example = load("laplace")
    small = example.run(examples=20, hidden=4, taus=(0.3, 3.0))
    monkeypatch.setattr(example, "run", lambda **_: small)
    path = tmp_path / "bands.png"
    monkeypatch.setattr(sys, "argv", ["laplace.py", "--output", str(path)])

    example.main()

    assert "log-marginal likelihood" in capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("page", ["posteriors", "influence"])
def test_the_examples_of_the_pages_run(page, capsys):
    """What stands on the pages runs as it stands there, and prints numbers."""
    text = (FOLDER.parent / f"{page}.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {}

    exec(compile(program, f"{page}.md", "exec"), names)

    assert capsys.readouterr().out
    if page == "influence":
        assert names["scores"].shape == (8, 300)
        return
    X, y, tau, noise = (names[name] for name in ("X", "y", "tau", "noise"))
    covariance = noise * np.eye(50) + X @ X.T / tau
    exact = -0.5 * float(
        y[:, 0] @ np.linalg.solve(covariance, y[:, 0])
        + np.linalg.slogdet(2 * np.pi * covariance)[1]
    )
    assert abs(names["terms"].log_marginal_likelihood - exact) < 1e-8
    assert names["samples"]["fc"]["weight"].shape == (3, 3, 1)
