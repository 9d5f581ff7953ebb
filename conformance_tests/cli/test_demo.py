"""The demonstration: what it prints, draws and refuses, and that K-FAC is ahead."""

import json
import sys

import pytest

from kfac_core.cli import main

pytest.importorskip("sklearn", reason="the demo needs its extra")
pytest.importorskip("matplotlib", reason="the demo needs its extra")


def demo(backend, folder, monkeypatch, *options):
    """Run the command on an array library, and return its exit code."""
    monkeypatch.setenv("KFAC_CORE_BACKEND", backend)
    return main(["demo", "--quick", "--output", str(folder), *options])


METHODS = {
    "numpy": ["KFACRegressor"],
    "torch": ["KFAC", "GaussNewton"],
}


@pytest.mark.parametrize("name", METHODS)
def test_all_methods_learn_for_the_same_time(name, tmp_path, monkeypatch, capsys):
    """On the integration of each framework; no run is longer than an epoch over."""
    if name == "torch":
        pytest.importorskip("torch")

    assert demo(name, tmp_path, monkeypatch, "--seconds", "0.3", "--json") == 0

    document = json.loads(capsys.readouterr().out)
    assert document["backend"] == name
    methods = [run["method"] for run in document["runs"]]
    assert methods == [m for ours in METHODS[name] for m in (ours, "Adam")]
    for run in document["runs"]:
        assert run["losses"][-1] < run["losses"][0] or len(run["losses"]) == 1
        assert run["seconds"] == sorted(run["seconds"])
        assert all(seconds < 0.3 for seconds in run["seconds"][:-1])
    [picture] = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_sentence_names_the_lower_loss():
    """In losses after equal seconds, by the medians of seeds; never in steps."""
    from kfac_core_shims import _demo

    runs = [
        _demo.Run("p", method, rate, seed, [1.0], [loss])
        for method, rate, losses in (("K", None, (1, 2, 9)), ("Adam", 0.1, (6, 8, 7)))
        for seed, loss in enumerate(losses)
    ]
    sentence = _demo._verdict(runs, "p", "K", 4.0)
    assert sentence.endswith("K is lower, 3.5 times.")
    assert "4 CPU seconds" in sentence
    assert "seeds 1 to 9" in sentence
    assert "step" not in sentence
    for run in runs[:3]:
        run.losses[0] *= 7.0
    assert _demo._verdict(runs, "p", "K", 4.0).endswith("Adam is lower, 2 times.")


@pytest.mark.parametrize("module", ["sklearn", "matplotlib"])
def test_a_missing_extra_is_named(module, tmp_path, monkeypatch, capsys):
    """A missing package is one line that names the extra, and exit code 2."""
    monkeypatch.setitem(sys.modules, module, None)

    assert demo("numpy", tmp_path, monkeypatch) == 2
    assert "kfac-core[demo]" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nonsense", "array_api_strict"])
def test_a_backend_that_it_does_not_know_is_refused(
    name, tmp_path, monkeypatch, capsys
):
    assert demo(name, tmp_path, monkeypatch) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert name in err
