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


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_both_methods_learn_for_the_same_time(name, tmp_path, monkeypatch, capsys):
    """On the integration of each framework; no run is longer than an epoch over."""
    for module in {"torch": ["torch"], "jax": ["jax", "optax"]}.get(name, []):
        pytest.importorskip(module)

    assert demo(name, tmp_path, monkeypatch, "--seconds", "0.6", "--json") == 0

    document = json.loads(capsys.readouterr().out)
    assert document["backend"] == name
    assert [run["method"] for run in document["runs"]] == ["Adam", "K-FAC"]
    for run in document["runs"]:
        assert run["errors"][-1] < run["errors"][0] or len(run["errors"]) == 1
        assert run["seconds"] == sorted(run["seconds"])
        assert all(seconds < 0.6 for seconds in run["seconds"][:-1])
    [picture] = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_kfac_is_below_adam_after_the_same_cpu_time(tmp_path, monkeypatch, capsys):
    """On NumPy, after two CPU seconds each; the sentence compares seconds alone."""
    assert demo("numpy", tmp_path, monkeypatch) == 0

    printed = capsys.readouterr().out
    assert "K-FAC reaches Adam's lowest training error" in printed
    assert "CPU seconds" in printed
    assert "steps" not in printed


@pytest.mark.parametrize("module", ["sklearn", "matplotlib"])
def test_without_its_extra_it_says_what_to_install(
    module, tmp_path, monkeypatch, capsys
):
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
