"""Verification records: other libraries' answers, and records that are written here.

``records/`` holds the records that real implementations' answers were put into, and
ones computed by plain NumPy.  Each is checked on every backend, in both precisions.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference

safetensors = pytest.importorskip("safetensors")
pytest.importorskip("msgspec")

from kfac_core_conformance.records import (  # noqa: E402
    RecordWriter,
    check_record,
    read_record,
)
from kfac_core_conformance.records.block import describe  # noqa: E402
from kfac_core_conformance.records.condition import SLACK  # noqa: E402
from kfac_core_conformance.records.document import parse_document  # noqa: E402

from ..builders.layers import dense_layer  # noqa: E402

FOLDER = Path(__file__).parents[1] / "records"
RECORDS = sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def path_of(name):
    return FOLDER / f"{name}.safetensors"


def document_of(name):
    """Return the JSON document of a record, as it stands in the file."""
    with safetensors.safe_open(path_of(name), "np") as file:
        return json.loads(file.metadata()["kfac_core_record"])


def problems(verdicts):
    """Return the checks that differ, for a message."""
    return [v for v in verdicts if not v.agrees]


def test_the_records_are_here():
    """The suite carries every record, so that none is passed over by its absence."""
    assert len(RECORDS) == 79


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_agrees(backend, dtype, name):
    """Every answer is recomputed to its tolerance, or to its condition's in float32."""
    record = read_record(path_of(name))

    verdicts = check_record(record, backend=backend.selection, dtype=dtype)

    assert len(verdicts) == len(document_of(name)["checks"])
    assert problems(verdicts) == []
    if dtype == "float64":
        assert max(v.tolerance for v in verdicts) <= 1e-4


@pytest.mark.parametrize("name", RECORDS)
def test_a_description_comes_back(name):
    """What `describe` says of a block is what the block was made from."""
    record = read_record(path_of(name))
    document = document_of(name)
    for key, recorded in record.blocks.items():
        document["blocks"][key] = describe(recorded.block)

    again = parse_document(json.dumps(document))

    for key, description in again.blocks.items():
        original = record.document.blocks[key]
        block = record.blocks[key].block
        assert type(description.layer) is type(original.layer)
        for field in description.layer.__struct_fields__:
            stated = getattr(original.layer, field)
            if stated is not None:
                assert getattr(description.layer, field) == stated
        assert type(description.approximation) is type(original.approximation)
        for field in description.approximation.__struct_fields__:
            stated = getattr(original.approximation, field)
            assert getattr(description.approximation, field) == (
                getattr(block.approximation, field) if stated is None else stated
            )


@pytest.fixture
def problem(rng):
    """A dense layer with two updates of two sources, and a vector, in NumPy."""
    N, n, m, M = 6, 4, 3, 2
    return {
        "layer": kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="oi"),
        "batches": [
            (rng.normal(size=(N, n)), rng.normal(size=(M, N, m))) for _ in range(2)
        ],
        "vector": {"weight": rng.normal(size=(m, n)), "bias": rng.normal(size=m)},
    }


def expected_block(problem, *, decay, scale=1.0):
    """Return the damped block, densely and independently."""
    A, G, weight = 0.0, 0.0, 0.0
    for x, g in problem["batches"]:
        a, b, _ = reference.kronecker_factors(x, g * scale, bias=True)
        A, G, weight = decay * A + a, decay * G + b, decay * weight + 1.0
    return reference.damped_block(
        A / weight, G / weight, 1.0, damping=0.1, rule="factored"
    )


def expected_inverse(problem, F):
    """Return the answer to multiply_inverse, by parameter."""
    weight, bias = problem["vector"]["weight"], problem["vector"]["bias"]
    V = np.concatenate([weight.T, bias[None]])
    got = np.linalg.solve(F, V.ravel()).reshape(V.shape)
    return {"weight": got[:-1].T.copy(), "bias": got[-1]}


def written(problem, path, expected, *, convert=np.asarray, loss="sum", scale=1.0):
    """Write a record as a training step would; return its path."""
    block = kc.Block(problem["layer"], kc.Kronecker())
    writer = RecordWriter(
        {"fc": block}, decay=0.9, loss=loss, damping=0.1, damping_rule="factored"
    )
    for x, g in problem["batches"]:
        batch = kc.Batch(convert(x), convert(g * scale), sources=g.shape[0])
        writer.update({"fc": batch})
    vector = {name: convert(part) for name, part in problem["vector"].items()}
    if expected is not None:
        expected = {name: convert(part) for name, part in expected.items()}
    writer.check("fc", "multiply_inverse", vector=vector, expected=expected)
    writer.save(path)
    return path


def test_a_written_record_agrees_with_the_dense_answer(backend, problem, tmp_path):
    """What is written from any library is read back, and states the same problem."""
    expected = expected_inverse(problem, expected_block(problem, decay=0.9))

    path = written(
        problem, tmp_path / "r.safetensors", expected, convert=backend.asarray
    )

    (verdict,) = check_record(read_record(path), backend="numpy")
    assert verdict.agrees, verdict
    assert verdict.error < 1e-12
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]


def test_a_wrong_answer_differs(problem, tmp_path):
    """The row that must differ: a damping that was forgotten in one factor."""
    F = expected_block(problem, decay=0.9)
    wrong = expected_inverse(problem, F + 1e-6 * np.eye(len(F)))

    path = written(problem, tmp_path / "r.safetensors", wrong)

    (verdict,) = check_record(read_record(path))
    assert not verdict.agrees
    assert 1e-10 < verdict.error < 1e-3


def test_gradients_of_a_mean_loss_are_scaled(problem, tmp_path):
    """The format has gradients of the summed loss, whatever the framework had."""
    examples = len(problem["batches"][0][0])
    expected = expected_inverse(problem, expected_block(problem, decay=0.9))

    path = written(
        problem, tmp_path / "r.safetensors", expected, loss="mean", scale=1 / examples
    )

    assert check_record(read_record(path))[0].agrees


def test_every_operation_can_be_written(problem, tmp_path):
    """Each check of the format comes out of the writer and agrees with itself."""
    block = kc.Block(problem["layer"], kc.Kronecker())
    writer = RecordWriter(
        {"fc": block}, decay=0.5, loss="sum", damping=0.1, damping_rule="exact"
    )
    x, g = problem["batches"][0]
    writer.update({"fc": kc.Batch(x, g, sources=2)})
    vector = problem["vector"]
    writer.check("fc", "factor", factor="input")
    writer.check("fc", "multiply", vector=vector, damped=False)
    writer.check("fc", "multiply_inverse", vector=vector, damping=0.3)
    writer.check("fc", "multiply_matpower", vector=vector, exp=-0.5)
    writer.check("fc", "multiply_cholesky", vector=vector, transpose=True)
    writer.check("fc", "multiply_cholesky_inverse", vector=vector)
    writer.check("fc", "to_dense", damped=True, damping_rule="factored")
    for operation in ("logdet", "trace", "eigenvalues"):
        writer.check("fc", operation)
    writer.check("fc", "damping_split", damping_rule="factored_unit_pi", rtol=1e-9)
    writer.save(tmp_path / "r.safetensors")

    verdicts = check_record(read_record(tmp_path / "r.safetensors"))

    assert [v.operation for v in verdicts][:2] == ["factor", "multiply"]
    assert problems(verdicts) == []
    assert verdicts[2].damping == 0.3
    assert verdicts[-1].tolerance == 1e-9


def test_nothing_is_written_that_would_be_refused(problem, tmp_path):
    """A record with an infinite answer leaves no file, and an old one as it was."""
    target = tmp_path / "r.safetensors"
    target.write_bytes(b"old")
    wrong = {"weight": np.full((3, 4), np.inf), "bias": np.zeros(3)}

    with pytest.raises(kc.RecordError, match="finite"):
        written(problem, target, wrong)

    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_writer_refuses_unknown_blocks_and_operations(problem):
    """Unknown blocks and operations, and blocks that saw nothing, are errors at once."""
    block = kc.Block(problem["layer"], kc.Kronecker())
    writer = RecordWriter({"fc": block, "out": block}, decay=0.9, loss="sum")
    x, g = problem["batches"][0]

    with pytest.raises(kc.UnknownBlockError, match="fc2"):
        writer.check("fc2", "trace")
    with pytest.raises(kc.RecordError, match="invert"):
        writer.check("fc", "invert")
    with pytest.raises(kc.RecordError, match="out"):
        writer.update({"fc": kc.Batch(x, g, sources=2)})


def test_gradients_of_bare_parameters_are_written(rng, tmp_path):
    """A batch of summed gradients has its own tensors, and its batch size."""
    layer = kc.Parameters(shapes={"a": (2,), "b": ()})
    writer = RecordWriter(
        {"p": kc.Block(layer, kc.Full())},
        decay=0.0,
        loss="mean",
        damping=0.1,
        damping_rule="exact",
    )
    v = rng.normal(size=3)
    batch = kc.GradientBatch({"a": v[:2] / 5, "b": np.asarray(v[2] / 5)}, 5)
    writer.update({"p": batch})
    writer.check("p", "factor", factor="block", expected=np.outer(v, v) / 5)
    writer.save(tmp_path / "r.safetensors")

    (verdict,) = check_record(read_record(tmp_path / "r.safetensors"))

    assert verdict.agrees, verdict


def test_a_record_of_a_norm_refuses_mean_rows(rng):
    """With T rows an example, a right answer was said to be T^2 times too large."""
    layer = kc.ScaleShift(scale_shape=(3,), shift_shape=None)
    writer = RecordWriter(
        {"n": kc.Block(layer, kc.Full())},
        decay=0.9,
        loss="mean_rows",
        damping=0.1,
        damping_rule="exact",
    )
    with pytest.raises(kc.ConventionError, match="reduction='sum'"):
        writer.update({"n": kc.Batch(*rng.normal(size=(2, 5, 4, 3)))})


def test_answers_in_float32_are_held_to_float32(problem, tmp_path):
    """The default tolerance is that of the dtype in which the answer was given."""
    expected = expected_inverse(problem, expected_block(problem, decay=0.9))
    rounded = {name: part.astype(np.float32) for name, part in expected.items()}

    path = written(problem, tmp_path / "r.safetensors", rounded)

    (verdict,) = check_record(read_record(path))
    assert verdict.tolerance == 1e-4
    assert 1e-10 < verdict.error < 1e-6


@pytest.fixture
def ill_conditioned(rng, tmp_path):
    """Write a record whose input factor has a condition number of 1e5."""
    n, m = 5, 2
    A = reference.spd(rng, n, condition=1e5)
    x = np.sqrt(n) * np.linalg.cholesky(A).T
    layer = dense_layer(n, m, bias=False)
    writer = RecordWriter(
        {"fc": kc.Block(layer, kc.Kronecker())},
        decay=0.9,
        loss="sum",
        damping=0.0,
        damping_rule="factored",
    )
    writer.update({"fc": kc.Batch(x, rng.normal(size=(n, m)))})

    def save(perturbation):
        V = rng.normal(size=(n, m))
        writer.check("fc", "multiply_inverse", vector={"weight": V})
        path = tmp_path / "ill.safetensors"
        writer.save(path)
        answer = writer._tensors["expected.r0.weight"]
        writer._tensors["expected.r0.weight"] = answer * (1 + perturbation)
        writer.save(path)
        return path

    return save


def test_float32_gets_the_bound_of_its_condition(backend, ill_conditioned):
    """An ill-conditioned answer in float32 is held to what its condition number gives."""
    record = read_record(ill_conditioned(0.0))

    (double,) = check_record(record, backend=backend.selection)
    (single,) = check_record(record, backend=backend.selection, dtype="float32")

    assert double.tolerance == 1e-10
    assert 0.9e5 < single.tolerance / (SLACK * np.finfo(np.float32).eps) < 1.2e5
    assert single.agrees
    assert single.tolerance > 1e-2


def test_the_bound_does_not_excuse_a_wrong_answer(ill_conditioned):
    """The row that must differ: an answer that is wrong by more than the bound."""
    record = read_record(ill_conditioned(0.1))

    assert not check_record(record, dtype="float32")[0].agrees


def test_a_check_without_an_answer_differs(problem, tmp_path):
    """Where the library raises, the reason stands in the verdict."""
    layer = dense_layer(4, 1, bias=False)
    writer = RecordWriter({"fc": kc.Block(layer, kc.Kronecker())}, decay=0, loss="sum")
    writer.update({"fc": kc.Batch(np.ones((1, 4)), np.ones((1, 1)))})
    vector = {"weight": np.ones((4, 1))}
    singular = {"vector": vector, "expected": vector, "damping": 0.0}
    writer.check("fc", "multiply_inverse", damping_rule="factored", **singular)
    writer.check("fc", "trace")
    writer.save(tmp_path / "r.safetensors")

    first, second = check_record(read_record(tmp_path / "r.safetensors"))

    assert "damping" in first.problem
    assert not first.agrees
    assert second.agrees
