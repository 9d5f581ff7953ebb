"""Estimators in files: whole or not at all, and the same on every backend."""

import hashlib
import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import kfac_core as kc
import kfac_core.checkpoint.writing
from kfac_core.cli import main

from ..builders.block_kinds import PAIRS, fed
from ..builders.estimators import make_estimator
from ..builders.states import differences, frozen, wholes
from ..builders.tolerances import assert_close

SETTINGS = {"decay": 0.8, "damping": 0.3, "reduction": "sum"}


def make(pair="kronecker", **options):
    layer, approximation = PAIRS[pair]
    rule = "exact" if approximation.name == "eigen" else "factored"
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


@pytest.mark.parametrize("pair", PAIRS)
def test_what_was_saved_is_loaded_bit_by_bit(backend, rng, tmp_path, pair):
    """Statistics, operators and counts of every kind of block; then the next step."""
    path = tmp_path / "state.safetensors"
    first, second = trained(backend, rng, pair), make(pair)
    kc.save_checkpoint(path, first)

    kc.load_checkpoint(path, second, backend=backend.selection)

    one, other = first.state["a"], second.state["a"]
    for part in ("statistics", "operator"):
        got, expected = wholes(getattr(other, part)), wholes(getattr(one, part))
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name].dtype == value.dtype
            assert got[name].tobytes() == value.tobytes(), name
    for count in ("updates", "age", "failures", "basis_age"):
        assert getattr(other, count) == getattr(one, count)
    batch = fed(backend, np.random.default_rng(7), PAIRS[pair][0])
    blocks = []
    for estimator in (first, second):
        estimator.update({"a": batch})
        estimator.refresh()
        blocks.append(backend.to_numpy(estimator.operator("a").to_dense()))
    assert_close(blocks[1], blocks[0], "product", "float64")


def test_a_file_of_one_backend_is_read_by_another(backend, rng, tmp_path):
    """Written here, read on NumPy, written there, read here: nothing has changed."""
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
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
    path = tmp_path / "state.safetensors"
    kc.save_checkpoint(path, estimator)

    triangles = 8 * (200 * 201 // 2 + 100 * 101 // 2)
    assert triangles < path.stat().st_size < triangles + 4000


def test_a_save_that_fails_leaves_the_old_file(rng, tmp_path, monkeypatch):
    """Nothing of the new file is to be seen, and no part of it is left behind."""
    path = tmp_path / "state.safetensors"
    estimator = trained_on_numpy(rng)
    kc.save_checkpoint(path, estimator)
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kfac_core.checkpoint.writing, "write_container", full)
    with pytest.raises(OSError, match="No space"):
        kc.save_checkpoint(path, estimator)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def trained_on_numpy(rng):
    estimator = make()
    x, g = rng.normal(size=(6, 4)), rng.normal(size=(6, 3))
    estimator.update({"a": kc.Batch(x, g)})
    estimator.refresh()
    return estimator


def rewritten(path, change):
    """Change the JSON document of a file, and write the header anew."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    document = json.loads(header["__metadata__"]["kfac_core_checkpoint"])
    change(document, header)
    if "kfac_core_checkpoint" in header["__metadata__"]:
        header["__metadata__"]["kfac_core_checkpoint"] = document = json.dumps(document)
        digest = hashlib.sha256(document.encode()).hexdigest()
        header["__metadata__"]["kfac_core_checkpoint_sha256"] = digest
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def _values(document):
    return document["state"]["blocks"]["a"]["values"]


DAMAGE = {
    "version": (lambda d, h: d.update(version=9), "version"),
    "format": (lambda d, h: d.update(format="other"), "format"),
    "no state": (lambda d, h: d.pop("state"), "no state"),
    "no document": (
        lambda d, h: h["__metadata__"].pop("kfac_core_checkpoint"),
        "metadata key",
    ),
    "missing tensor": (
        lambda d, h: d["digests"].update({"a/elsewhere": "0"}),
        "'a/elsewhere'.*missing",
    ),
    "tensor for nothing": (
        lambda d, h: d["state"]["blocks"].update(b=d["state"]["blocks"].pop("a")),
        "belongs to nothing",
    ),
    "number for a tensor": (
        lambda d, h: _values(d).update({"operator.scale": 1.0}),
        "'a/operator.scale' belongs to nothing",
    ),
    "value for nothing": (
        lambda d, h: _values(d).update({"operator.other": 1.0}),
        "'operator.other'.*belong to nothing",
    ),
    "other layer": (
        lambda d, h: d["state"]["blocks"]["a"]["layer"].update(out_features=7),
        "layer",
    ),
    "kernel order": (
        lambda d, h: d["state"]["blocks"]["a"]["layer"].update(weight_layout="oi"),
        "weight_layout",
    ),
    "conventions": (
        lambda d, h: d["state"]["conventions"].update(reduction="mean"),
        "conventions",
    ),
    "no count": (lambda d, h: _values(d).pop("age"), "age is missing"),
    "no blocks": (lambda d, h: d["state"].update(blocks=3), "no blocks"),
    "no values": (
        lambda d, h: d["state"]["blocks"]["a"].update(values=None),
        "no blocks",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_changes_nothing(rng, tmp_path, case):
    """It is refused with what is wrong, and the estimator is as it was."""
    change, message = DAMAGE[case]
    path = tmp_path / "state.safetensors"
    kc.save_checkpoint(path, trained_on_numpy(rng))
    rewritten(path, change)
    estimator = trained_on_numpy(np.random.default_rng(5))
    before = frozen(estimator.state_dict())

    with pytest.raises(kc.StateError, match=message) as caught:
        kc.load_checkpoint(path, estimator)

    assert "\n" not in str(caught.value)
    assert differences(before, frozen(estimator.state_dict())) == []


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_part_of_a_file_is_refused(rng, tmp_path, kept):
    path = tmp_path / "state.safetensors"
    kc.save_checkpoint(path, trained_on_numpy(rng))
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(kc.StateError, match="damaged, incomplete"):
        kc.load_checkpoint(path, make())
    with pytest.raises(kc.StateError, match="damaged, incomplete"):
        kc.read_header(path)


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("place", ["document", "digest", "tensor", "last byte"])
def test_a_flipped_bit_is_refused(rng, tmp_path, place, bit):
    """Wherever one bit of a name, a count or a number is another, the file is damaged."""
    path = tmp_path / "state.safetensors"
    kc.save_checkpoint(path, trained_on_numpy(rng))
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    raw[
        {
            "document": raw.index(b"updates") + 11,  # the count itself
            "digest": raw.index(b"kfac_core_checkpoint_sha256") + 32,
            "tensor": 8 + length + 3,
            "last byte": len(raw) - 1,
        }[place]
    ] ^= 1 << bit
    path.write_bytes(raw)
    estimator = make()
    before = frozen(estimator.state_dict())

    with pytest.raises(kc.StateError, match=r"damaged|no JSON|no \.safetensors"):
        kc.load_checkpoint(path, estimator)

    assert differences(before, frozen(estimator.state_dict())) == []


def _nested(document):
    deep = {}
    for _ in range(900):
        deep = {"part": deep}
    document["state"]["blocks"]["a"]["layer"]["kind"] = deep


def _settings(document):
    return document["state"]["settings"]


FORGED = {
    # Documents that are whole and say what no estimator would: name -> change, message.
    "deep": (_nested, "expected layer"),
    "no digests": (lambda d: d.pop("digests"), "no digests"),
    "other digest": (
        lambda d: d["digests"].update(dict.fromkeys(d["digests"], "0" * 64)),
        "is damaged",
    ),
    "list for a name": (
        lambda d: d["state"]["blocks"]["a"]["layer"].update(kind=["dense"]),
        "expected layer",
    ),
    "mapping for a rule": (
        lambda d: _settings(d).update(damping_rule={}),
        "damping_rule",
    ),
    "damping of another block": (
        lambda d: _settings(d).update(damping={"b": 0.1}),
        "settings: a is missing",
    ),
    "huge damping": (lambda d: _settings(d).update(damping=10**400), "finite float"),
    "damping of a name": (
        lambda d: _values(d).update(damping="large"),
        "damping to be a finite float",
    ),
    "half a burn-in": (lambda d: _settings(d).update(burn_in=0.5), "burn_in"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_document_of_nonsense_is_refused(rng, tmp_path, case):
    """Only `StateError` comes out, and the estimator is as it was."""
    change, message = FORGED[case]
    path = tmp_path / "state.safetensors"
    kc.save_checkpoint(path, trained_on_numpy(rng))
    rewritten(path, lambda document, header: change(document))
    estimator = make()
    before = frozen(estimator.state_dict())

    with pytest.raises(kc.StateError, match=message) as caught:
        kc.load_checkpoint(path, estimator)

    assert "\n" not in str(caught.value)
    assert differences(before, frozen(estimator.state_dict())) == []


def test_values_that_are_not_finite_are_refused(rng, tmp_path):
    """The file is whole and its statistics are not."""
    path = tmp_path / "state.safetensors"
    kc.save_checkpoint(path, trained_on_numpy(rng))
    with safetensors.safe_open(str(path), "numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = "a/statistics.averages.input.sum"
    tensors[name][0, 0] = np.nan
    safetensors.numpy.save_file(tensors, path, metadata=metadata)
    digest = hashlib.sha256(b"float64 (5, 2) " + tensors[name].tobytes()).hexdigest()

    def reseal(document, header):
        old = document["digests"][name]
        found = {n: digest if d == old else d for n, d in document["digests"].items()}
        document["digests"] = found

    rewritten(path, reseal)

    with pytest.raises(kc.StateError, match="NaN or infinity"):
        kc.load_checkpoint(path, make())
    with pytest.raises(kc.StateError, match="No such file"):
        kc.load_checkpoint(tmp_path / "nowhere.safetensors", make())
    with pytest.raises(kc.StateError, match="regular"):
        kc.load_checkpoint(tmp_path, make())


def test_inspect_says_what_is_in_a_file(rng, tmp_path, capsys):
    """Layers, kernel order, conventions, ages and shapes, without reading a tensor."""
    path = tmp_path / "state.safetensors"
    kc.save_checkpoint(path, trained_on_numpy(rng))

    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    for word in (
        "weight_layout io",
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
