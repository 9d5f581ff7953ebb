"""The demonstration: what it prints, draws and refuses, and that K-FAC is ahead."""

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
    "numpy": ["KFACRegressor", "GaussNewton"],
    "torch": ["KFAC", "GaussNewton"],
    "jax": ["KFACOptimizer", "GaussNewton"],
}


@pytest.mark.parametrize("name", METHODS)
def test_all_methods_learn_for_the_same_time(name, tmp_path, monkeypatch, capsys):
    """On the integration of each framework; no run is longer than an epoch over."""
    if name != "numpy":
        pytest.importorskip(name)
    if name == "jax":
        pytest.importorskip("optax")
    from kfac_core_shims import _demo

    drawn = []
    monkeypatch.setattr(_demo, "_draw", lambda curves, path: drawn.append(curves))
    assert demo(name, tmp_path, monkeypatch, "--seconds", "0.2") == 0

    [curves] = drawn
    ours = [next(iter(methods)) for methods in curves.values()]
    assert ours == METHODS[name]
    for methods in curves.values():
        assert len(methods) == 2
        for [(times, losses)] in methods.values():
            assert losses[-1] < losses[0] or len(losses) == 1
            assert times == sorted(times)
            assert all(seconds < 0.2 for seconds in times[:-1])
    assert capsys.readouterr().out.count(" is lower, ") == 2


def test_the_sentence_names_the_lower_loss_and_bands_are_drawn(tmp_path):
    """In losses after equal seconds, by the medians of seeds; never in steps."""
    from kfac_core_shims import _demo

    curves = {
        "K": [([0.5, 1.0], [10.0, loss]) for loss in (1.0, 2.0, 9.0)],
        "Adam": [([0.5, 1.0], [10.0, loss]) for loss in (6.0, 8.0, 7.0)],
    }
    sentence = _demo._verdict("p", curves, 4.0)
    assert sentence.endswith("K is lower, 3.5 times.")
    assert "4 CPU seconds" in sentence
    assert "seeds 1 to 9" in sentence
    assert "step" not in sentence
    _demo._draw({"p": curves, "q": curves}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    curves["K"] = [
        (times, [7 * loss for loss in losses]) for times, losses in curves["K"]
    ]
    assert _demo._verdict("p", curves, 4.0).endswith("Adam is lower, 2 times.")


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


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "soon"])
def test_a_run_takes_some_seconds(seconds, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        demo("numpy", tmp_path, monkeypatch, "--seconds", seconds)

    assert ended.value.code == 2
    assert f"expected seconds > 0, got '{seconds}'" in capsys.readouterr().err
