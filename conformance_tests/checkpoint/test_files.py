"""Files at the edges of the file system, and what they may hold."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import threading
import tracemalloc

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.checkpoint import container, writing

from ..builders.states import differences, frozen
from ..survival.container import opened, sealed

safetensors = pytest.importorskip("safetensors")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

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
    made_here = tmp_path / "state.safetensors"
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
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o604])
def test_a_file_that_is_replaced_keeps_its_mode(path, mode):
    """A private file does not become readable to all."""
    path.chmod(mode)
    kc.save_checkpoint(path, trained(6))

    assert stat.S_IMODE(path.stat().st_mode) == mode


@posix
def test_a_new_file_has_the_mode_of_the_umask(tmp_path):
    """As every other program makes it."""
    before = os.umask(0o027)
    try:
        kc.save_checkpoint(tmp_path / "new", trained())
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@posix
def test_a_file_that_is_replaced_keeps_its_owner(path):
    """Where whoever saves may give files away."""
    if os.geteuid() != 0:
        pytest.skip("only a superuser may give a file away")
    os.chown(path, 12345, 23456)
    path.chmod(0o640)
    kc.save_checkpoint(path, trained(6))
    found = path.stat()

    assert (found.st_uid, found.st_gid) == (12345, 23456)
    assert stat.S_IMODE(found.st_mode) == 0o640


@posix
def test_the_file_is_written_to_the_disk_before_its_name_is(path, monkeypatch):
    """First the numbers, then the renaming, then the folder."""
    done = []
    sync, rename = os.fsync, os.replace

    def synced(descriptor):
        kind = os.fstat(descriptor).st_mode
        done.append("folder" if stat.S_ISDIR(kind) else "file")
        sync(descriptor)

    def replaced(source, target):
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    kc.save_checkpoint(path, trained(6))

    assert done == ["file", "rename", "folder"]


@posix
def test_a_target_that_is_no_regular_file_is_refused(tmp_path):
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
    sharing = kc.Sharing(factors={"k/input": "q/input"})
    saved = kc.Estimator(blocks, **options, sharing=sharing)
    x, g = rng.normal(size=(N, n)), rng.normal(size=(2, N, m))
    saved.update({"q": kc.Batch(x, g[0]), "k": kc.Batch(x, g[1])})
    saved.refresh()
    whole, operators = tmp_path / "whole", tmp_path / "operators"
    kc.save_checkpoint(whole, saved)
    kc.save_checkpoint(operators, saved, parts="operators")

    alone = kc.Estimator(blocks, **options)
    with pytest.raises(kc.StateError, match=r"block 'k': .*'input'.*Sharing\(factors"):
        kc.load_checkpoint(whole, alone, backend="numpy")
    assert "k" not in alone.state.blocks or alone.state["k"].updates == 0

    again = kc.Estimator(blocks, **options, sharing=sharing)
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


def test_a_folder_that_is_missing_is_named(tmp_path):
    """The error named the temporary file in it."""
    target = tmp_path / "runs" / "state.safetensors"
    with pytest.raises(kc.StateError, match=r"state.safetensors: there is no folder"):
        kc.save_checkpoint(target, trained())


def test_another_precision_is_named_as_it_is_written(path):
    """It was shown as a class of NumPy."""
    block = kc.Block(LAYER, kc.Kronecker())
    narrow = kc.Estimator(
        {"a": block},
        reduction="sum",
        damping=0.3,
        decay=0.8,
        precision=kc.Precision(storage="float32"),
    )
    with pytest.raises(kc.StateError, match=r"dtype float32, .* got float64\. Load"):
        kc.load_checkpoint(path, narrow, backend="numpy")


@pytest.mark.parametrize("length", [200, 243, 255])
def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path, length):
    """The temporary file beside it has a name of its own."""
    for letter in ("a", "\N{LATIN SMALL LETTER U WITH DIAERESIS}"):
        path = tmp_path / (letter * (length // len(letter.encode())))
        kc.save_checkpoint(path, trained())
        kc.load_checkpoint(path, made(), backend="numpy")

    assert len(list(tmp_path.iterdir())) == 2


def test_a_name_in_bytes_is_a_name(tmp_path):
    """As for `open`."""
    path = os.fsencode(tmp_path / "state")
    kc.save_checkpoint(path, trained())
    kc.load_checkpoint(path, made(), backend="numpy")

    assert kc.read_header(path)["document"]["version"] == 2


def test_a_file_that_is_shortened_while_it_is_read_is_an_error(path, monkeypatch):
    """It is read and not mapped: this process goes on."""
    read = container.Container.read

    def shortened(self, name):
        os.truncate(path, path.stat().st_size - 64)
        return read(self, name)

    monkeypatch.setattr(container.Container, "read", shortened)

    assert_refused(path, "ends early|is damaged")


def test_a_file_that_changes_all_the_time_is_read_or_refused(path):
    """Another process shortens and mends it, while it is read again and again."""
    whole = path.read_bytes()
    over = threading.Event()

    def disturb():
        while not over.is_set():
            with path.open("r+b") as file:
                file.truncate(len(whole) // 2)
                file.write(whole)

    thread = threading.Thread(target=disturb)
    thread.start()
    expected = frozen(trained().state_dict())
    try:
        for _ in range(50):
            estimator = made()
            with contextlib.suppress(kc.StateError):
                kc.load_checkpoint(path, estimator, backend="numpy")
                assert differences(frozen(estimator.state_dict()), expected) == []
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    "name", ["a/statistics.averages.input.sum", "a/operator.input.inverse.matrix"]
)
def test_a_file_of_ten_gigabytes_is_refused_from_its_header(path, name):
    """By shape, before a byte of its numbers is read."""
    held = opened(path.read_bytes())
    held.tensors[name] = ("F64", [0], b"")
    raw = sealed(held)
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    begin, size = len(raw) - 8 - length, 8 * 40_000 * 32_000
    header[name] = entry([40_000, 32_000], begin, begin + size)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    os.truncate(path, 8 + len(text) + begin + size)
    assert path.stat().st_size > 10_000_000_000

    tracemalloc.start()
    try:
        assert_refused(path, "shape|numbers")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_each_array_is_in_the_file_once(path):
    """The damped matrix, what is applied, and the running sum may be the same numbers."""
    document = kc.read_header(path)["document"]
    digests = document["digests"]
    with safetensors.safe_open(str(path), "numpy") as file:
        stored = set(file.keys())

    assert len(stored) == len(set(digests.values())) < len(digests)
    assert stored < set(digests)


def test_files_are_those_of_the_safetensors_library(path, tmp_path):
    """It reads what is written here, and what it writes is read here."""
    ours = opened(path.read_bytes())
    with safetensors.safe_open(str(path), "numpy") as file:
        metadata = file.metadata()
        theirs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, values in theirs.items():
        assert values.tobytes() == ours.tensors[name][2]
    again = tmp_path / "again.safetensors"
    safetensors_numpy.save_file(theirs, str(again), metadata=metadata)
    estimator = made()
    kc.load_checkpoint(again, estimator, backend="numpy")

    assert (
        differences(frozen(estimator.state_dict()), frozen(trained().state_dict()))
        == []
    )


def header_of(tensors, *, data=b"", metadata=None):
    """Return a file with a header of any kind."""
    text = tensors
    if not isinstance(tensors, bytes):
        text = json.dumps({"__metadata__": metadata or {}, **tensors}).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape, start, end, dtype="F64"):
    """Return the entry of a tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "long": struct.pack("<Q", 2**63) + b"{}",
    "longer than the file": struct.pack("<Q", 100) + b"{}",
    "no JSON": header_of(b"not JSON"),
    "no mapping": header_of(b"[1, 2]"),
    "deep": header_of(b"[" * 100_000),
    "huge number": header_of(b'{"x": ' + b"9" * 5000 + b"}"),
    "no UTF-8": header_of(b'{"\xff": 1}'),
    "twice": header_of(
        b'{"x": {"dtype":"F64","shape":[],"data_offsets":[0,8]},'
        b'"x": {"dtype":"F64","shape":[],"data_offsets":[0,8]}}',
        data=bytes(8),
    ),
    "metadata of numbers": header_of({}, metadata={"kfac_core_checkpoint": 3}),
    "an entry that is a number": header_of({"x": 3}),
    "an entry without a shape": header_of({"x": {"dtype": "F64"}}),
    "a shape of strings": header_of({"x": entry(["1"], 0, 8)}, data=bytes(8)),
    "a shape of booleans": header_of({"x": entry([True], 0, 8)}, data=bytes(8)),
    "a negative shape": header_of({"x": entry([-1], 0, 8)}, data=bytes(8)),
    "many axes": header_of({"x": entry([1] * 100, 0, 8)}, data=bytes(8)),
    "a shape that overflows": header_of({"x": entry([2**62, 4], 0, 0)}),
    "another length": header_of({"x": entry([2], 0, 8)}, data=bytes(8)),
    "an end before the beginning": header_of({"x": entry([1], 8, 0)}, data=bytes(8)),
    "a gap": header_of({"x": entry([1], 8, 16)}, data=bytes(16)),
    "an overlap": header_of(
        {"x": entry([1], 0, 8), "y": entry([1], 0, 8)}, data=bytes(8)
    ),
    "too much": header_of({"x": entry([1], 0, 8)}, data=bytes(9)),
    "too little": header_of({"x": entry([1], 0, 8)}, data=bytes(7)),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_of_nonsense_is_refused(tmp_path, case):
    """By what is wrong with it."""
    path = tmp_path / "state.safetensors"
    path.write_bytes(HEADERS[case])

    assert_refused(path, "damaged, incomplete, or no .safetensors file")
    with pytest.raises(kc.StateError, match="damaged, incomplete"):
        kc.read_header(path)


def _settings(**changes):
    return lambda d: d["state"]["settings"].update(changes)


def _values(**changes):
    return lambda d: d["state"]["blocks"]["a"]["values"].update(changes)


DOCUMENTS = {
    # Documents with good digests: the change, and what the message says.
    "a negative burn-in": (_settings(burn_in=-1), "burn_in.*at least 0, got -1"),
    "a huge weight": (_settings(weight=1e308), "weight.*1e20.*got 1e[+]308"),
    "a tiny weight": (_settings(weight=1e-300), "weight.*got 1e-300"),
    "a huge count": (_values(updates=10**400), "updates.*finite int"),
    "a count beyond 32 bits": (_values(updates=2**31), "updates.*got 2147483648"),
    "a truth for a count": (_values(updates=True), "updates.*got True"),
    "a truth for a version": (lambda d: d.update(version=True), "version 2.*got True"),
    "a version with a point": (lambda d: d.update(version=2.0), "version 2.*got 2.0"),
    "a version of the state": (
        lambda d: d["state"].update(version=True),
        "version 2.*got True",
    ),
    "an unknown part": (lambda d: d.update(other=1), r"unknown parts: \['other'\]"),
    "an unknown part of the state": (
        lambda d: d["state"].update(other=1),
        r"unknown parts: \['other'\]",
    ),
    "an unknown part of a block": (
        lambda d: d["state"]["blocks"]["a"].update(other=1),
        r"unknown parts: \['other'\]",
    ),
    "an unknown setting": (_settings(other=1), r"\['other'\] belong to nothing"),
    "a long setting": (_settings(damping_rule="x" * 10**6), "damping_rule"),
    "a long name": (_values(**{"x" * 10**6: 1}), "belong to nothing"),
    "a long producer": (
        lambda d: d.update(version=9, producer="x" * 10**6),
        "version",
    ),
    "a long layer": (
        lambda d: d["state"]["blocks"]["a"]["layer"].update(kind="x" * 10**6),
        "layer",
    ),
    "long names of blocks": (
        lambda d: d["state"]["blocks"].update({"y" * 10**6: d["state"]["blocks"]["a"]}),
        "blocks",
    ),
    "a long digest": (
        lambda d: d["digests"].update({"z" * 10**6: "0"}),
        "missing",
    ),
    "a digest of a number": (lambda d: d["digests"].update({"z": 0}), "no digests"),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_a_value_out_of_range_is_refused(path, case):
    """Though all digests are right; and a long string is cut in the message."""
    change, match = DOCUMENTS[case]
    held = opened(path.read_bytes())
    sealed(held)
    change(held.document)
    path.write_bytes(sealed(held, digests=False))

    assert_refused(path, match)


@pytest.mark.parametrize("weight", [1e300, 2.5, -1.0])
def test_a_weight_that_no_updates_give_is_refused(path, weight):
    """After one update of weight 1, the sum of weights is 1."""
    held = opened(path.read_bytes())
    name = "a/statistics.averages.input.weight"
    held.tensors[name] = ("F64", [], struct.pack("<d", weight))
    path.write_bytes(sealed(held))

    assert_refused(path, "weight of 'input'")


@posix
@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
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
