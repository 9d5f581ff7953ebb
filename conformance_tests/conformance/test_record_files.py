"""Damaged, hostile and contradictory files: one clear line each, and nothing else.

Every file here is made by code from one good record.  A row of `DAMAGED` changes its
document, its tensors or its bytes, and says which words the refusal must hold.
"""

from __future__ import annotations

import copy
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc

safetensors_numpy = pytest.importorskip("safetensors.numpy")
pytest.importorskip("msgspec")

from kfac_core_conformance.records import read_record  # noqa: E402

from ..builders.memory import PeakMemory  # noqa: E402

KEY = "kfac_core_record"
CHECK = {"block": "fc", "op": "multiply_inverse", "vector": "v", "expected": "r0"}
DENSE = {
    "kind": "dense",
    "in_features": 3,
    "out_features": 2,
    "bias": True,
    "weight_layout": "io",
}
DOCUMENT = {
    "format": "kfac_core.record",
    "version": 1,
    "blocks": {"fc": {"layer": DENSE, "approximation": {"name": "kronecker"}}},
    "updates": 2,
    "ema": {"decay": 0.9, "weight": 1.0, "debias": True},
    "damping": 0.1,
    "damping_rule": "factored",
    "checks": [CHECK, {"block": "fc", "op": "trace", "expected": "r1"}],
}


class Good:
    """A good record: a document and tensors, to be changed and saved."""

    def __init__(self):
        rng = np.random.default_rng(7)
        self.document = copy.deepcopy(DOCUMENT)
        self.tensors = {
            "vector.v.weight": rng.normal(size=(3, 2)),
            "vector.v.bias": rng.normal(size=2),
            "expected.r0.weight": rng.normal(size=(3, 2)),
            "expected.r0.bias": rng.normal(size=2),
            "expected.r1": np.asarray(1.0),
        }
        for u in range(2):
            self.tensors[f"update.{u}.fc.inputs"] = rng.normal(size=(5, 3))
            self.tensors[f"update.{u}.fc.output_grads"] = rng.normal(size=(1, 5, 2))

    @property
    def layer(self):
        return self.document["blocks"]["fc"]["layer"]

    @property
    def approximation(self):
        return self.document["blocks"]["fc"]["approximation"]

    @property
    def check(self):
        return self.document["checks"][0]

    def bytes(self, text=None):
        text = json.dumps(self.document) if text is None else text
        return safetensors_numpy.save(self.tensors, metadata={KEY: text})


def document(change):
    """Return the maker of a file whose document was changed."""

    def make():
        good = Good()
        change(good)
        return good.bytes()

    return make


def text(change):
    """Return the maker of a file whose document's text was changed."""
    return lambda: Good().bytes(change(json.dumps(DOCUMENT)))


def tensor(name, values):
    """Return the maker of a file with another tensor; None takes it away."""

    def change(good):
        if values is None:
            del good.tensors[name]
        else:
            good.tensors[name] = np.asarray(values)

    return document(change)


def header(change):
    """Return the maker of a file whose container's header was changed."""

    def make():
        data = Good().bytes()
        (length,) = struct.unpack("<Q", data[:8])
        found = json.loads(data[8 : 8 + length])
        change(found)
        made = json.dumps(found).encode()
        return struct.pack("<Q", len(made)) + made + data[8 + length :]

    return make


def content(change):
    """Return the maker of a file whose bytes were changed."""
    return lambda: change(Good().bytes())


def settled(**fields):
    """Return a change that sets fields of the document."""
    return lambda good: good.document.update(fields)


class Payload:
    """What a pickle would run."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


CONV = {
    "kind": "conv",
    "in_channels": 1,
    "out_channels": 1,
    "kernel_size": [1],
    "strides": [1 << 40],
    "padding": [[1 << 40, 0]],
    "bias": False,
    "weight_layout": "spatial_io",
    "data_layout": "channels_last",
}
NAN = np.full((5, 3), np.nan)
SERIES = {"name": "series", "variant": "symmetric"}
X, G = "update.0.fc.inputs", "update.0.fc.output_grads"

DAMAGED = {
    # name: (maker of the file's bytes, words of the refusal)
    "empty": (lambda: b"", "safetensors"),
    "cut-in-the-header": (content(lambda data: data[:100]), "safetensors"),
    "header-length-lies": (
        content(lambda data: struct.pack("<Q", 1 << 50) + data[8:]),
        "safetensors",
    ),
    "pickle": (lambda: pickle.dumps(Payload()), "safetensors"),
    "no-record": (lambda: safetensors_numpy.save({"x": np.zeros(1)}), "no record"),
    "not-json": (text(lambda s: s[:-1]), "not JSON"),
    "deeply-nested": (text(lambda s: "[" * 100_000 + "]" * 100_000), "nested"),
    "infinite-number": (
        text(lambda s: s.replace('"damping": 0.1', '"damping": Infinity')),
        "Infinity",
    ),
    "endless-integer": (
        text(lambda s: s.replace('"updates": 2', f'"updates": {"9" * 5000}')),
        "99, which is not finite",
    ),
    "field-twice": (
        text(lambda s: s.replace('"updates": 2', '"updates": 2, "updates": 2')),
        "twice",
    ),
    "unknown-field": (document(settled(extra=1)), "unknown field `extra`"),
    "many-updates": (
        document(settled(updates=10**12)),
        "update.2.fc.inputs' is missing",
    ),
    "no-damping": (document(lambda g: g.document.pop("damping")), "needs `damping`"),
    "lone-surrogate": (
        text(lambda s: s.replace('"op": "trace"', '"op": "\\udcff"')),
        "not Unicode",
    ),
    "forged-place": (
        document(
            lambda g: (
                g.document.pop("blocks"),
                g.document.update({"x - at `$.blocks[...].fc": 1, "blocks": 1}),
            )
        ),
        "unknown field",
    ),
    "path-as-name": (
        document(lambda g: g.check.update(expected="../r0")),
        "expected: expected a name",
    ),
    "other-width": (
        document(lambda g: g.layer.update(in_features=4)),
        "inputs: expected shape (N, ..., 4)",
    ),
    "uncorrelated-dense": (
        document(lambda g: g.approximation.update(input="uncorrelated")),
        "needs a conv layer",
    ),
    "exact-series": (
        document(
            lambda g: (
                g.approximation.clear(),
                g.approximation.update(SERIES),
                g.document.update(damping_rule="exact"),
            )
        ),
        "not a damping rule",
    ),
    "unknown-op": (
        document(lambda g: g.check.update(op="invert")),
        "checks[0].op: invalid value 'invert'",
    ),
    "unknown-block": (
        document(lambda g: g.check.update(block="fc2")),
        "expected the name of a block",
    ),
    "factor-of-another-block": (
        document(
            lambda g: g.document["checks"].append(
                {"block": "fc", "op": "factor", "factor": "block", "expected": "r1"}
            )
        ),
        "has no factor 'block'",
    ),
    "missing-tensor": (tensor(G, None), f"{G}' is missing"),
    "wrong-shape": (tensor(X, np.zeros((5, 4))), "expected shape (N, ..., 3)"),
    "other-batch": (tensor(G, np.zeros((1, 4, 2))), "expected shape (1, 5, 2)"),
    "nan": (tensor(X, NAN), "expected finite values"),
    "integers-as-inputs": (tensor(X, np.ones((5, 3), np.int64)), "expected a dtype"),
    "mask-of-a-half": (tensor("update.0.fc.mask", np.full(5, 0.5)), "expected 0 or 1"),
    "shared-axes-change": (
        document(
            lambda g: g.tensors.update(
                {X: np.ones((5, 2, 3)), G: np.ones((1, 5, 2, 2))}
            )
        ),
        "the same number of shared positions",
    ),
}


def write(folder, name, data):
    path = folder / f"{name}.safetensors"
    path.write_bytes(data)
    return path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Work in an empty folder, where an executed payload would leave its trace."""
    monkeypatch.chdir(tmp_path)


def refused(path):
    """Return the message of a refusal, after checking its form."""
    with pytest.raises(kc.RecordError) as caught:
        read_record(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert message.isprintable()
    assert len(message) < 500 + len(str(path))
    return message


def test_the_good_record_is_read(tmp_path):
    """What the damaged files are made from is itself accepted."""
    record = read_record(write(tmp_path, "good", Good().bytes()))

    assert len(record.document.checks) == 2


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name):
    """The refusal names the file, the place and what was expected; nothing is run."""
    make, words = DAMAGED[name]
    path = write(tmp_path, name, make())

    message = refused(path)

    assert words in message
    assert not (tmp_path / "executed").exists()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    """Something that would block a reader is no regular file."""
    import os

    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    os.mkfifo(tmp_path / "pipe")

    assert "not a regular file" in refused(tmp_path / "pipe")


def lonely(**layer):
    """Return a file of one example that describes a large problem."""
    good = Good()
    good.layer.update(layer)
    n, m = good.layer["in_features"], good.layer["out_features"]
    good.document["updates"] = 1
    good.document["checks"] = good.document["checks"][1:]
    good.tensors = {
        X: np.ones((1, n)),
        G: np.ones((1, 1, m)),
        "expected.r1": np.asarray(1.0),
    }
    return good


@pytest.mark.parametrize(
    ("layer", "approximation"),
    [
        ({"in_features": 20_000}, {"name": "kronecker"}),
        ({"out_features": 20_000}, {"name": "kronecker", "input": "diagonal"}),
        ({"in_features": 300, "out_features": 300}, {"name": "full"}),
        ({"in_features": 20_000}, {"name": "tnt"}),
        ({"in_features": 10_000, "out_features": 10_000}, {"name": "diagonal"}),
    ],
)
def test_a_small_file_gets_no_large_arrays(tmp_path, layer, approximation):
    """A factor of gigabytes is refused before it is made, with both sizes."""
    good = lonely(**layer)
    good.document["blocks"]["fc"]["approximation"] = approximation
    path = write(tmp_path, "large", good.bytes())

    with PeakMemory() as memory:
        message = refused(path)

    assert "memory limit" in message
    assert memory.peak < 8 * path.stat().st_size + 2**20


@pytest.mark.parametrize(
    "change", [{}, {"kernel_size": [1 << 40], "strides": [1]}, {"strides": [1, 1]}]
)
def test_padding_counts_toward_the_limit(tmp_path, change):
    """A padded axis of 2**40 elements with one output in sight of it is refused."""
    good = lonely()
    good.document["blocks"]["fc"]["layer"] = CONV | change
    outputs = 2 if not change else 1
    good.tensors[X] = np.ones((1, 1, 1))
    good.tensors[G] = np.ones((1, 1, outputs, 1))

    refused(write(tmp_path, "padded", good.bytes()))


IDS = {"kind": "embedding", "num_embeddings": 4, "features": 2, "weight_layout": "io"}


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0, 1, 4], "expected ids from 0 to 3"),
        ([0, 1, -1], "expected ids from 0 to 3"),
        ([0.0, 1.0, 2.0], "expected a dtype"),
    ],
)
def test_ids_are_in_range(tmp_path, ids, words):
    """An id is an integer of the vocabulary."""
    good = lonely()
    good.document["blocks"]["fc"]["layer"] = IDS
    good.tensors[X], good.tensors[G] = np.asarray(ids), np.ones((1, 3, 2))

    assert words in refused(write(tmp_path, "ids", good.bytes()))


@pytest.mark.parametrize(
    "approximation",
    [
        {"name": "diagonal"},
        {"name": "full"},
        {"name": "kronecker", "input": "diagonal"},
    ],
)
def test_long_id_sequences_count_toward_the_limit(tmp_path, approximation):
    """The ids of an example are compared with each other, which takes their square."""
    good = lonely()
    good.document["blocks"]["fc"] = {"layer": IDS, "approximation": approximation}
    good.tensors[X] = np.zeros((1, 50_000), np.int8)
    good.tensors[G] = np.ones((1, 1, 2))

    message = refused(write(tmp_path, "ids", good.bytes()))

    assert "memory limit" in message
