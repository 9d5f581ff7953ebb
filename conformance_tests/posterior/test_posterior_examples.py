"""The examples on posteriors and influence, in a quick form, and what they must find."""

import importlib.util
import re
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


@pytest.mark.parametrize("page", ["posteriors", "influence"])
def test_the_examples_of_the_pages_run(page, capsys):
    """The last program of each page, with NumPy, runs and prints numbers."""
    text = (FOLDER.parent / f"{page}.md").read_text(encoding="utf-8")
    *_, program = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
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
