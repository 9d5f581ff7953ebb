"""The command ``kfac-core verify``: its table, its exit codes, and bad files in between."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

import kfac_core as kc
from kfac_core_conformance import records
from kfac_core_conformance.commands import verify

from .test_record_files import DAMAGED, Good, elsewhere, write
from .test_records import path_of

__all__ = ["elsewhere"]

AGREEING = "numpy_dense_kron_mask"
UNREADABLE = "kfac-core verify: "
ANSWER = ("expected.r0.weight", "expected.r0.bias")


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    """Start without any choice of a backend."""
    monkeypatch.delenv("KFAC_CORE_BACKEND", raising=False)


@pytest.fixture
def run(capsys):
    """Run the subcommand; return its exit code, its lines and its error lines."""

    def call(*arguments):
        parser = argparse.ArgumentParser()
        verify.add_arguments(parser)
        code = verify.run(parser.parse_args([str(a) for a in arguments]))
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


@pytest.fixture
def said(run, tmp_path):
    """Verify a writer's record, whose answer is wrong; return all lines as one."""

    def call(writer):
        path = tmp_path / "wrong.safetensors"
        writer.save(path)
        code, lines, _ = run(path)
        assert code == 1
        # Lines are broken for a screen of 80 columns.
        assert max(map(len, lines[1:])) <= 80
        return " ".join(" ".join(lines).split())

    return call


@pytest.fixture
def differing(tmp_path):
    """A good file whose answers are random numbers."""
    return write(tmp_path, "differing", Good().bytes())


@pytest.fixture
def damaged(tmp_path):
    """A file that cannot be read."""
    return write(tmp_path, "damaged", b"x" * 100)


def test_a_folder_stands_for_its_records(run, differing, damaged, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, errors = run(tmp_path)
    assert code == 2
    assert len(errors) == 1
    assert str(damaged) in errors[0]
    with pytest.raises(kc.errors.RecordError, match="the folder has no"):
        run(tmp_path / "empty")


def test_all_agree(run, backend):
    """Exit code 0, and with ``-v`` a table with a row for every check."""
    code, [*lines, total], errors = run(
        "-v", path_of(AGREEING), "--backend", backend.selection
    )

    assert code == 0
    assert errors == []
    rows = [line for line in lines[2:] if line.startswith("  b ")]
    count = len(rows)
    assert count > 20
    assert total.startswith(f"{count} of {count} answers in 1 file agree (")
    assert lines[0].endswith(f"{count} of {count} agree")
    head = ["block", "operation", "damping", "error", "limit", "result"]
    assert lines[1].split() == head
    assert all(line.endswith("  agrees") for line in rows)
    assert max(map(len, lines[1:])) <= 80


def test_one_differs(run, differing):
    """Exit code 1, its table alone, and the total."""
    code, [*lines, total], errors = run(path_of(AGREEING), differing)

    assert code == 1
    assert errors == []
    assert lines[0] == f"{differing}: 0 of 2 agree"
    assert len(lines) == 4
    assert " answers in 2 files agree" in total
    assert run(differing, "--quiet") == (1, [], [])
    assert lines[-1].split()[:2] == ["fc", "trace"]
    assert lines[-1].endswith("  differs")


def test_damaged_files_give_one_line_each_and_nothing_else(run, tmp_path):
    """Each of many damaged files costs one line on standard error; exit code 2."""
    paths = [write(tmp_path, name, make()) for name, (make, _) in DAMAGED.items()]
    assert len(paths) >= 15

    code, lines, errors = run(*paths)

    assert code == 2
    assert lines == []
    assert len(errors) == len(paths)
    for path, error in zip(paths, errors, strict=True):
        assert error.startswith(f"{UNREADABLE}{path}: ")
    assert not (tmp_path / "executed").exists()


def test_json_for_programs(run, differing, damaged):
    """One JSON document on standard output holds everything, errors included."""
    code, lines, errors = run("--json", path_of(AGREEING), differing, damaged)

    found = json.loads("\n".join(lines))
    assert errors == []
    assert code == found["exit_code"] == 2
    assert found["backend"] == "numpy"
    assert found["dtype"] == "float64"
    good, bad, broken = found["records"]
    assert [r["agrees"] for r in found["records"]] == [True, False, False]
    assert good["error"] is None
    assert str(damaged) in broken["error"]
    assert broken["checks"] == []
    check = bad["checks"][0]
    assert check["op"] == "multiply_inverse"
    assert check["damping_rule"] == "factored"
    assert check["agrees"] is False
    assert check["error"] > check["tolerance"] == 1e-10


def test_json_has_no_infinities(run, tmp_path):
    """An answer that overflows has no error, and the JSON is still JSON."""
    good = Good()
    for name in ("update.0.fc.inputs", "update.1.fc.inputs"):
        good.tensors[name] *= 1e300
    path = write(tmp_path, "overflow", good.bytes())

    code, lines, errors = run("--json", path)

    assert (code, errors) == (1, [])
    (record,) = json.loads("\n".join(lines))["records"]
    assert [check["error"] for check in record["checks"]] == [None, None]
    assert not record["agrees"]


@pytest.mark.parametrize(
    ("tolerance", "message"),
    [
        ({"rtol": 1e308}, "rtol: expected at most 0.1"),
        ({"rtol": 0.11}, "rtol: expected at most 0.1"),
        ({"atol": 1e308}, "atol: expected at most"),
        ({"atol": 1e3}, "atol: expected at most"),
        ({"rtol": 0.09, "atol": 0.02}, "atol: expected at most"),
    ],
)
def test_a_record_that_tolerates_everything_is_refused(
    run, tmp_path, tolerance, message
):
    """An answer without one correct digit would agree, such as one of zeros."""
    good = Good()
    expected = np.sqrt(sum(np.sum(good.tensors[name] ** 2) for name in ANSWER))
    if "atol" in tolerance and tolerance["atol"] < 1:
        tolerance = {**tolerance, "atol": tolerance["atol"] * expected}
    good.document["checks"][0].update(tolerance)
    path = write(tmp_path, "tolerant", good.bytes())

    code, lines, errors = run(path)

    assert (code, lines) == (2, [])
    assert message in errors[0]


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        (1 / 32, "0.03125 = 1/32 times ours: 1/N, a mean over examples"),
        (1 / 32**2, "= 1/1024 times ours: 1/N^2, output gradients of a mean loss"),
        (32.0, "32 times ours: N, a sum where the format has a mean"),
        (32 / 31, "1.032 times ours: N/(N-1), a sample covariance: divide by N"),
        (2.0, "2 times ours"),
        (-1.0, "-1 times ours"),
    ],
)
def test_a_wrong_number_is_named(said, rng, scale, sentence):
    """A factor of the examples' number is the commonest defect of all."""
    x, g = rng.normal(size=(32, 4)), rng.normal(size=(32, 3))
    writer = _writer(x, g)
    writer.check("fc", "factor", factor="output", expected=scale * g.T @ g / 32)

    text = said(writer)

    assert " fc factor=output: the record's answer is " in text
    assert sentence in text


def test_a_transposed_answer_is_named(said, rng):
    """Where no number explains a square matrix."""
    x, g = rng.normal(size=(32, 3)), rng.normal(size=(32, 3))
    writer = _writer(x, g, rule="exact")
    V = rng.normal(size=(3, 3))
    product = (x.T @ x / 32) @ V @ (g.T @ g / 32) + 0.1 * V
    writer.check("fc", "multiply", vector={"weight": V}, expected={"weight": product.T})

    assert "transposed" in said(writer)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"output": 1 / 32**2}, "output gradients of a mean loss: multiply them by N"),
        ({"output": 32.0**2}, "output gradients that are N = 32 times too large"),
        ({"input": 32.0}, "one factor a sum: divide it by N = 32"),
        ({"output": 1 / 32}, "one factor divided by N = 32 once more"),
        ({"rule": "exact"}, 'ours with damping_rule="exact"'),
        ({"rule": "factored_unit_pi"}, 'ours with damping_rule="factored_unit_pi"'),
        ({"rule": "each factor"}, "the damping added to each factor"),
        ({"rule": "none"}, "ours without damping"),
        ({"output": 1.3}, None),
    ],
)
def test_another_convention_is_named(said, rng, wrong, sentence):
    """A damped inverse that is right by another convention, computed by NumPy alone."""
    x, g = rng.normal(size=(32, 4)), 0.3 * rng.normal(size=(32, 3))
    A = wrong.get("input", 1.0) * x.T @ x / 32
    G = wrong.get("output", 1.0) * g.T @ g / 32
    pi, r = np.sqrt((np.trace(A) / 4) / (np.trace(G) / 3)), np.sqrt(0.1)
    shifts = {
        "factored": (pi * r, r / pi),
        "factored_unit_pi": (r, r),
        "each factor": (0.1, 0.1),
    }
    rule = wrong.get("rule", "factored")
    if rule in shifts:
        s, t = shifts[rule]
        F = np.kron(A + s * np.eye(4), G + t * np.eye(3))
    else:
        F = np.kron(A, G) + (0.1 if rule == "exact" else 0.0) * np.eye(12)
    V = rng.normal(size=(4, 3))
    answer = np.linalg.solve(F, V.ravel()).reshape(4, 3)

    text = said(_inverse_record(x, g, V, answer))

    assert ("fc multiply_inverse: the record's answer is ours" in text) == bool(
        sentence
    )
    assert sentence is None or sentence in text
    assert ("add the checks" in text) == (sentence is None)


@pytest.mark.parametrize(
    ("scale", "shift", "sentence"),
    [
        (1.0, 5.0, "ours with a block that lacks the factor S = 5"),
        (5.0, 5.0, "ours with a damping that was not divided by S = 5"),
    ],
)
def test_positions_that_were_forgotten_are_named(said, rng, scale, shift, sentence):
    """The block is S A (x) G, and each factor's damping the root of damping / S."""
    x, g = rng.normal(size=(8, 5, 4)), rng.normal(size=(8, 5, 3))
    A = np.einsum("nsi,nsj->ij", x, x) / 40
    G = np.einsum("nsi,nsj->ij", g, g) / 40
    r = np.sqrt(0.1 / 5 * shift)
    pi = np.sqrt((np.trace(A) / 4) / (np.trace(G) / 3))
    V = rng.normal(size=(4, 3))
    left, right = A + pi * r * np.eye(4), G + r / pi * np.eye(3)
    answer = np.linalg.solve(left, V) @ np.linalg.inv(right) / scale

    assert sentence in said(_inverse_record(x, g, V, answer))


@pytest.mark.parametrize(
    ("order", "one", "sentence"),
    [
        ((4, 0, 1, 2, 3), 1.0, "ours with the bias first"),
        ((0, 1, 2, 3, 4), 0.5, "only the last row and column differ"),
    ],
)
def test_a_bias_elsewhere_is_named(said, rng, order, one, sentence):
    """The constant 1 comes first, or is another number."""
    x, g = rng.normal(size=(32, 4)), rng.normal(size=(32, 3))
    x1 = np.concatenate([x, np.full((32, 1), one)], axis=1)[:, list(order)]
    writer = _writer(x, g, bias=True)
    writer.check("fc", "factor", factor="input", expected=x1.T @ x1 / 32)

    assert sentence in said(writer)


def _writer(x, g, *, bias=False, rule="factored"):
    """Return the writer of a record of a dense layer with one update."""
    n, m = x.shape[-1], g.shape[-1]
    layer = kc.Dense(in_features=n, out_features=m, bias=bias, weight_layout="io")
    writer = records.RecordWriter(
        {"fc": kc.Block(layer, kc.Kronecker())},
        decay=0.9,
        damping=0.1,
        damping_rule=rule,
        loss="sum",
        producer="another library",
    )
    writer.update({"fc": kc.Batch(x, g)})
    return writer


def _inverse_record(x, g, V, answer):
    """Return the writer of a record that asks for one damped product."""
    writer = _writer(x, g)
    vector, expected = {"weight": V}, {"weight": answer}
    writer.check("fc", "multiply_inverse", vector=vector, expected=expected)
    return writer
