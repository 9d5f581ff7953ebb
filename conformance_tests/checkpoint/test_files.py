"""Files at the edges of the file system, and what they may hold."""

from __future__ import annotations

import math
import os
import stat
import struct
import time
import zipfile

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.checkpoint import writing

from ..builders.memory import PeakMemory
from ..builders.states import differences, frozen
from ..survival.container import archived, opened, sealed

N, n, m = 6, 4, 3
LAYER = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
posix = pytest.mark.skipif(os.name == "nt", reason="modes and FIFOs are POSIX's")


def made():
    """Return an estimator that has seen nothing."""
    block = kc.Block(LAYER, kc.Kronecker())
    return kc.Estimator({"a": block}, reduction="sum", damping=0.3, decay=0.8)


def trained(seed=5):
    """Return an estimator with statistics and an operator."""
    rng = np.random.default_rng(seed)
    estimator = made()
    estimator.update({"a": kc.Batch(rng.normal(size=(N, n)), rng.normal(size=(N, m)))})
    estimator.refresh()
    return estimator


@pytest.fixture
def path(tmp_path):
    """A file of a trained estimator."""
    made_here = tmp_path / "state.npz"
    kc.save_checkpoint(made_here, trained())
    return made_here


def assert_refused(path, match):
    """Assert that a file is refused, in one short line, and that nothing changes."""
    estimator = trained(7)
    before = frozen(estimator.state_dict())
    with pytest.raises(kc.StateError, match=match) as caught:
        kc.load_checkpoint(path, estimator, backend="numpy")
    assert differences(before, frozen(estimator.state_dict())) == []
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@posix
def test_saving_to_an_irregular_file_raises(tmp_path):
    """It would be replaced by a file."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link"
    link.symlink_to(fifo)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for target in (fifo, link, loop, tmp_path, "/dev/null", ""):
        with pytest.raises(kc.StateError, match="not a regular file"):
            kc.save_checkpoint(target, trained())

    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    for source in (fifo, link, tmp_path, "/dev/null"):
        with pytest.raises(kc.StateError, match="not a regular file"):
            kc.load_checkpoint(source, made())


def test_a_factor_of_another_block_is_not_taken_for_zero(tmp_path, rng):
    """A file of shared factors made the taker's block its damping alone."""
    blocks = {
        "q": kc.Block(LAYER, kc.Kronecker()),
        "k": kc.Block(LAYER, kc.Kronecker()),
    }
    options = {"reduction": "sum", "damping": 0.3, "damping_rule": "exact"}
    coupling = kc.Coupling(factors={"k/input": "q/input"})
    saved = kc.Estimator(blocks, **options, coupling=coupling)
    x, g = rng.normal(size=(N, n)), rng.normal(size=(2, N, m))
    saved.update({"q": kc.Batch(x, g[0]), "k": kc.Batch(x, g[1])})
    saved.refresh()
    whole, operators = tmp_path / "whole", tmp_path / "operators"
    kc.save_checkpoint(whole, saved)
    kc.save_checkpoint(operators, saved, parts="operators")

    alone = kc.Estimator(blocks, **options)
    with pytest.raises(kc.StateError, match=r"block 'k': .*'input'.*Coupling\(factors"):
        kc.load_checkpoint(whole, alone, backend="numpy")
    assert "k" not in alone.state.blocks or alone.state["k"].updates == 0

    again = kc.Estimator(blocks, **options, coupling=coupling)
    kc.load_checkpoint(whole, again, backend="numpy")
    again.refresh()
    kc.load_checkpoint(operators, alone, backend="numpy")
    x = np.concatenate([x, np.ones((N, 1))], axis=1) if LAYER.bias else x
    expected = np.kron(x.T @ x / N, g[1].T @ g[1] / N)
    expected += 0.3 * np.eye(len(expected))
    for estimator in (again, alone):
        np.testing.assert_allclose(
            estimator.operator("k").to_dense(), expected, rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("length", [200, 243, 255])
def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path, length):
    """The temporary file beside it has a name of its own."""
    for letter in ("a", "\N{LATIN SMALL LETTER U WITH DIAERESIS}"):
        path = tmp_path / (letter * (length // len(letter.encode())))
        kc.save_checkpoint(path, trained())
        kc.load_checkpoint(path, made(), backend="numpy")

    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "name", ["a/statistics.averages.input.sum", "a/operator.input.inverse.matrix"]
)
def test_a_shape_that_does_not_fit_is_refused_before_the_numbers_are_read(path, name):
    """By the header of the array, which promises ten gigabytes."""
    held = opened(path.read_bytes())
    held.tensors[name] = ("F64", [40_000, 32_000], b"")
    path.write_bytes(sealed(held))

    with PeakMemory() as memory:
        assert_refused(path, "shape|numbers")
    assert memory.peak < 2_000_000


def test_each_array_is_in_the_file_once(path):
    """The damped matrix, what is applied, and the running sum may be the same numbers."""
    tensors = kc.read_header(path)["document"]["tensors"]
    with np.load(path) as file:
        stored = [name for name in file.files if name != "checkpoint.json"]

    assert len(stored) == len({*tensors.values()}) < len(tensors)


ARCHIVES = {
    "nothing": b"",
    "other bytes": b"1234567" * 100,
    "an empty archive": archived({}),
    "no JSON": archived({"checkpoint.json": b"{"}),
    "no UTF-8": archived({"checkpoint.json": b"\xff"}),
    "deep": archived({"checkpoint.json": b"[" * 100_000}),
    "a number": archived({"checkpoint.json": b"3"}),
    "compressed": archived(
        {"checkpoint.json": b"{}"}, compression=zipfile.ZIP_DEFLATED
    ),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_a_file_of_nonsense_is_refused(tmp_path, case):
    """By what is wrong with it."""
    path = tmp_path / "state.npz"
    path.write_bytes(ARCHIVES[case])

    assert_refused(
        path,
        "^[^(]*: (damaged, incomplete|not a checkpoint|the document is not JSON|"
        "expected a document of format|checkpoint.json is compressed)",
    )
    with pytest.raises(kc.StateError):
        kc.read_header(path)


def _settings(**changes):
    return lambda d: d["state"]["settings"].update(changes)


def _values(**changes):
    return lambda d: d["state"]["blocks"]["a"]["values"].update(changes)


def _layer(**changes):
    return lambda d: d["state"]["blocks"]["a"]["layer"].update(changes)


DOCUMENTS = {
    # Documents that are whole and say what no estimator would: change and message.
    "another version": (lambda d: d.update(version=9), "version"),
    "a tensor that is not there": (
        lambda d: d["tensors"].update({"a/elsewhere": 1000}),
        "damaged, incomplete.*1000",
    ),
    "a tensor for nothing": (
        lambda d: d["state"]["blocks"].update(b=d["state"]["blocks"].pop("a")),
        "does not belong to any block",
    ),
    "a number for a tensor": (
        _values(**{"operator.scale": 1.0}),
        "'a/operator.scale' does not belong to any block",
    ),
    "another kernel order": (_layer(weight_layout="oi"), "weight_layout"),
    "no blocks": (lambda d: d["state"].update(blocks=3), "state of blocks"),
    "a damping of another block": (
        _settings(damping={"b": 0.1}),
        "settings: expected a to be in the state",
    ),
    "a huge damping": (_settings(damping=10**400), "finite float"),
    "a huge roundoff": (
        _values(**{"operator.input.problem.roundoff": 1e300}),
        "roundoff.*at most 0.000976562, got 1e[+]300",
    ),
    "a flag of nothing": (_values(status=1 << 20), "status.*got 1048576"),
    "a count beyond 32 bits": (_values(updates=2**31), "updates.*got 2147483648"),
    "an unknown part of the state": (
        lambda d: d["state"].update(other=1),
        r"also \['other'\]",
    ),
    "an unknown setting": (_settings(other=1), r"also \['other'\]"),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_a_value_out_of_range_is_refused(path, case):
    """The file is whole; and a long string is cut in the message."""
    change, match = DOCUMENTS[case]
    held = opened(path.read_bytes())
    sealed(held)
    change(held.document)
    path.write_bytes(sealed(held, listed=False))

    assert_refused(path, match)


@pytest.mark.parametrize(
    ("weight", "match"),
    [
        *((number, "weight of 'input'") for number in (1e300, 2.5, -1.0)),
        *((number, "NaN or infinity|weight") for number in (math.nan, math.inf)),
    ],
)
def test_a_weight_that_no_updates_give_is_refused(path, weight, match):
    """After one update of weight 1, the sum of weights is 1."""
    held = opened(path.read_bytes())
    name = "a/statistics.averages.input.weight"
    held.tensors[name] = ("F64", [], struct.pack("<d", weight))
    path.write_bytes(sealed(held))

    assert_refused(path, match)


def test_many_unknown_values_are_refused_at_once(path):
    """Reading took seconds: each look for a part went through all of them."""
    held = opened(path.read_bytes())
    sealed(held)
    values = held.document["state"]["blocks"]["a"]["values"]
    values.update({f"unknown{k}.part": 1 for k in range(100_000)})
    path.write_bytes(sealed(held, listed=False))

    started = time.process_time()
    assert_refused(path, "values of the block, got also")
    assert time.process_time() - started < 1.5


@pytest.mark.parametrize("damping", [-1.0, math.nan])
def test_a_damping_that_could_not_be_loaded_is_not_saved(path, damping):
    """A setter does not read an array on a device; the good file stays."""
    before, estimator = path.read_bytes(), trained()
    estimator._damping = np.asarray(damping)
    with pytest.raises(kc.StateError, match="damping"):
        kc.save_checkpoint(path, estimator)

    assert path.read_bytes() == before


@posix
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_save_that_the_system_refuses_leaves_the_old_file(path, monkeypatch, call):
    """Whatever fails on the way, and no part of the new file is left behind."""
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, call, full)
    with pytest.raises(OSError, match="No space"):
        kc.save_checkpoint(path, trained(6))
    monkeypatch.undo()

    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
