"""Estimators in files: whole or not at all, and the same on every backend."""

import contextlib
import json

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.cli import main

from ..builders.block_kinds import PAIRS, fed
from ..builders.estimators import make_estimator
from ..builders.memory import PeakMemory
from ..builders.states import differences, frozen, wholes
from ..builders.tolerances import assert_close

SETTINGS = {"decay": 0.8, "damping": 0.3, "reduction": "sum"}


def make(pair="kronecker", **options):
    layer, approximation = PAIRS[pair]
    rule = "exact" if approximation.name == "ekfac" else "factored"
    settings = SETTINGS | {"damping_rule": rule} | options
    return make_estimator({"a": kc.Block(layer, approximation)}, **settings)


def trained(backend, rng, pair="kronecker", **options):
    estimator = make(pair, **options)
    for _ in range(2):
        estimator.update({"a": fed(backend, rng, PAIRS[pair][0])})
    estimator.rebase(moments="kronecker")
    estimator.refresh()
    estimator.update({"a": fed(backend, rng, PAIRS[pair][0])})
    return estimator


def test_a_file_of_one_backend_is_read_by_another(backend, rng, tmp_path):
    """Written here, read on NumPy, written there, read here: nothing has changed."""
    there, back = tmp_path / "there.npz", tmp_path / "back.npz"
    first, second, third = trained(backend, rng), make(), make()
    kc.save_checkpoint(there, first)
    kc.load_checkpoint(there, second, backend="numpy")
    kc.save_checkpoint(back, second)
    kc.load_checkpoint(back, third, backend=backend.selection)

    assert isinstance(second.state["a"].statistics.like, np.ndarray)
    expected, got = (
        wholes(first.state["a"].statistics),
        wholes(third.state["a"].statistics),
    )
    for name, value in expected.items():
        assert got[name].tobytes() == value.tobytes()
    rng = np.random.default_rng(3)
    V = rng.normal(size=(4, 3))
    results = [
        backend.to_numpy(
            e.precondition({"a": {"weight": backend.asarray(V)}})["a"]["weight"]
        )
        for e in (first, third)
    ]
    assert_close(results[1], results[0], "product", "float64")


def test_symmetric_matrices_take_half_the_space(rng, tmp_path):
    """A triangle is stored, of the statistics and of what was made of them."""
    layer = kc.Dense(in_features=200, out_features=100, bias=False, weight_layout="io")
    estimator = make_estimator(
        {"a": kc.Block(layer, kc.Kronecker())}, **SETTINGS, damping_rule="factored"
    )
    x, g = rng.normal(size=(300, 200)), rng.normal(size=(300, 100))
    estimator.update({"a": kc.Batch(x, g)})
    path = tmp_path / "state.npz"
    kc.save_checkpoint(path, estimator)

    triangles = 8 * (200 * 201 // 2 + 100 * 101 // 2)
    assert triangles < path.stat().st_size < triangles + 4000


def trained_on_numpy(rng):
    estimator = make()
    x, g = rng.normal(size=(6, 4)), rng.normal(size=(6, 3))
    estimator.update({"a": kc.Batch(x, g)})
    estimator.refresh()
    return estimator


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_part_of_a_file_is_refused(rng, tmp_path, kept):
    path = tmp_path / "state.npz"
    kc.save_checkpoint(path, trained_on_numpy(rng))
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(kc.StateError, match="damaged, incomplete"):
        kc.load_checkpoint(path, make())
    with pytest.raises(kc.StateError, match="damaged, incomplete"):
        kc.read_header(path)


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("place", ["document", "header", "tensor", "checksum"])
def test_a_flipped_bit_is_refused(rng, tmp_path, place, bit):
    """Wherever one bit of a name, a count or a number is another, the file is damaged."""
    path = tmp_path / "state.npz"
    kc.save_checkpoint(path, trained_on_numpy(rng))
    raw = bytearray(path.read_bytes())
    shape = raw.index(b"'shape'")
    raw[
        {
            "document": raw.index(b"updates") + 11,  # the count itself
            "header": shape + 10,
            "tensor": raw.index(b"\n", shape) + 3,
            "checksum": raw.rindex(b"PK\x01\x02") + 16,
        }[place]
    ] ^= 1 << bit
    path.write_bytes(raw)
    estimator = make()
    before = frozen(estimator.state_dict())

    with pytest.raises(kc.StateError, match=r"damaged|shape"):
        kc.load_checkpoint(path, estimator)

    assert differences(before, frozen(estimator.state_dict())) == []


def test_numpy_opens_the_file(rng, tmp_path):
    """An array that is a number of the estimator, and the document as text."""
    path, estimator = tmp_path / "state.npz", trained_on_numpy(rng)
    kc.save_checkpoint(path, estimator)
    with np.load(path) as file:
        document = json.loads(file["checkpoint.json"])
        index = document["tensors"]["a/statistics.averages.output.weight"]
        assert file[f"{index}"] == 1.0


def test_inspect_describes_a_file(rng, tmp_path, capsys):
    """Layers, kernel order, conventions, ages and shapes, without reading a tensor."""
    path = tmp_path / "state.npz"
    kc.save_checkpoint(path, trained_on_numpy(rng), about={"examples": 7})

    assert main(["inspect", str(path)]) == 0
    summary = capsys.readouterr().out.splitlines()
    assert summary[5].split()[:3] == ["dense", "kronecker", "1"]
    assert main(["inspect", "--blocks", str(path)]) == 0
    text = capsys.readouterr().out
    for word in (
        "weight_layout io",
        "examples 7",
        "kronecker",
        "reduction sum",
        "decay 0.8",
        "age 0",
    ):
        assert word in text
    assert main(["inspect", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["blocks"]["a"]["layer"]["in_features"] == 4
    shape = found["blocks"]["a"]["tensors"]["statistics.averages.input.sum"]["shape"]
    assert shape == [5, 2]
    path.write_bytes(b"nothing")
    assert main(["inspect", str(path)]) == 2
    assert "damaged" in capsys.readouterr().err


def test_files_of_other_blocks_are_joined(backend, rng, tmp_path):
    """Four blocks from four files; each as it was to the bit."""
    blocks, parts = {}, []
    for i in range(4):
        layer, kind = PAIRS["kronecker"]
        blocks[f"b{i}"] = kc.Block(layer, kind)
        one = make_estimator({f"b{i}": blocks[f"b{i}"]}, **SETTINGS)
        one.update({f"b{i}": fed(backend, rng, layer)})
        parts.append(tmp_path / f"{i}.npz")
        kc.save_checkpoint(parts[-1], one)
    path = tmp_path / "joined.npz"
    kc.checkpoint.join_checkpoints(path, parts, about={"examples": 3})
    whole = make_estimator(blocks, **SETTINGS)
    kc.load_checkpoint(path, whole, backend="numpy")
    last = make_estimator({"b3": blocks["b3"]}, **SETTINGS)
    kc.load_checkpoint(parts[-1], last, backend="numpy")
    expected = wholes(last.state["b3"].statistics)
    for name, value in wholes(whole.state["b3"].statistics).items():
        assert value.tobytes() == expected[name].tobytes()
    with pytest.raises(kc.StateError, match="has blocks of the files before"):
        kc.checkpoint.join_checkpoints(path, [parts[0], parts[0]])


def test_collecting_by_parts_has_one_part_in_memory(tmp_path):
    """Factors, bases and moments of one layer of many, and less than as much beside."""
    w = 128
    layer = kc.Dense(in_features=w, out_features=w, bias=False, weight_layout="io")
    blocks = {f"layer{i}": kc.Block(layer, kc.EKFAC()) for i in range(6)}
    data = [np.random.default_rng(k).normal(size=(4, w)) for k in range(2)]

    @contextlib.contextmanager
    def capture(taken):
        yield lambda x, seed: ([{name: kc.Batch(x, x) for name in taken}], len(x))

    def run(taken, name):
        kc.integration.collect_statistics(
            taken,
            capture,
            data,
            fisher="exact",
            path=tmp_path / name,
            max_elements=1,
        )

    run({"layer0": blocks["layer0"]}, "first")  # Imports what is imported when needed.
    with PeakMemory() as memory:
        run(blocks, "all")
    assert memory.peak < 2 * 5 * w * w * 8
