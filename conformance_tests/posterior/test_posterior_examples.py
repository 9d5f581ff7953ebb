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
