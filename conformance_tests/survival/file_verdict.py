"""What may come of reading a file: the state that was saved, a sound one, or an error."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kfac_core as kc

from ..builders.estimators import make_estimator
from ..builders.layers import conv_layer, dense_layer
from ..builders.memory import PeakMemory
from ..builders.states import arrays_of, differences, frozen
from .container import opened

DENSE = dense_layer(2, 2)
CONV = conv_layer(2, 2, (2,), bias=False)
KINDS: dict[str, tuple[Any, Any, str]] = {
    "kronecker": (DENSE, kc.Kronecker(), "factored"),
    "exact": (DENSE, kc.Kronecker(), "exact"),
    "diagonal": (DENSE, kc.Kronecker(input="diagonal"), "factored"),
    "uncorrelated": (CONV, kc.Kronecker(input="uncorrelated"), "factored"),
    "eigen": (DENSE, kc.EKFAC(), "exact"),
    "full": (DENSE, kc.Full(), "factored"),
    "tnt": (kc.Parameters(shapes={"w": (2, 2, 2)}), kc.TNT(), "factored"),
    "symmetric": (DENSE, kc.Series(variant="symmetric", steps=3), "factored"),
    "infinite": (DENSE, kc.Series(variant="infinite"), "factored"),
}
"""One small block of each kind, by the name that it has in its file."""

SLACK = 1_000_000
"""Bytes that reading may take whatever the file: messages, tables, buffers."""
TIMES = 60
"""Bytes that reading may take for each byte of the file."""


def made(kind: str, /) -> kc.Estimator:
    """Return an estimator of a kind that has seen nothing."""
    layer, approximation, rule = KINDS[kind]
    return make_estimator(
        {kind: kc.Block(layer, approximation)},
        **{"decay": 0.9, "damping": 0.25, "reduction": "sum", "damping_rule": rule},
    )


def trained(kind: str, /) -> kc.Estimator:
    """Return an estimator of a kind with statistics and an operator."""
    rng = np.random.default_rng(5)
    estimator = made(kind)
    for _ in range(2):
        estimator.update({kind: _batch(kind, rng)})
    if kind == "eigen":
        estimator.rebase(moments="kronecker")
    estimator.refresh()
    return estimator


def _batch(kind: str, rng: np.random.Generator) -> kc.Batch | kc.GradientBatch:
    if kind == "tnt":
        gradients = {"w": rng.normal(size=(4, 2, 2, 2))}
        return kc.GradientBatch(gradients, batch_size=4, sources=4)
    x, g = rng.normal(size=(4, 3, 2)), rng.normal(size=(4, 3, 2))
    if kind == "uncorrelated":
        g = g[:, :2]
    return kc.Batch(x, g)


_BLOCKS = b'"blocks": {"'
"""What stands before the name of the first block in a file."""


class Reader:
    """Reads files whose memory may be measured.

    Parameters
    ----------
    path : path-like
        Where each is put to be read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.peak = path, 0

    @contextlib.contextmanager
    def reading(self, data: bytes, /, *, measured: bool) -> Iterator[None]:
        """Require that what is done within takes memory in proportion to the file."""
        memory = PeakMemory()
        try:
            with memory if measured else contextlib.nullcontext():
                yield
        finally:
            self.peak = max(self.peak, memory.peak)
            assert memory.peak <= SLACK + TIMES * len(data), (memory.peak, len(data))


class Judge(Reader):
    """Says what came of reading a file; holds the states that were saved.

    Parameters
    ----------
    folder : path-like
        In which files are put to be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "mutated.npz")
        self.again = folder / "again.npz"
        self.seeds: dict[str, bytes] = {}
        self.saved: dict[Any, Any] = {}
        self.fresh = {kind: made(kind) for kind in KINDS}
        for kind in KINDS:
            estimator = trained(kind)
            kc.save_checkpoint(self.path, estimator)
            self.seeds[kind] = self.path.read_bytes()
            header = opened(self.seeds[kind])
            loaded = made(kind)
            kc.load_checkpoint(self.path, loaded, backend="numpy")
            self.saved[_seal(self.seeds[kind])] = frozen(loaded.state_dict())
            assert header.document["state"]["blocks"]

    def verdict(self, data: bytes, /, *, measured: bool = True) -> str:
        """Read a file, and raise `AssertionError` for whatever must not be.

        Parameters
        ----------
        data : bytes
            The file.
        measured : bool
            Whether its memory is measured, which takes as long again.

        Returns
        -------
        str
            ``"refused"``, ``"as saved"`` or ``"sound"``.
        """
        self.path.write_bytes(data)
        kind = self._kind(data, with_header=measured)
        estimator = self.fresh[kind]
        before = estimator.state, estimator.network, estimator.damping
        try:
            with self.reading(data, measured=measured):
                kc.load_checkpoint(self.path, estimator, backend="numpy")
        except kc.StateError:
            now = estimator.state, estimator.network, estimator.damping
            assert all(a is b for a, b in zip(before, now, strict=True))
            return "refused"
        self.fresh[kind] = made(kind)
        found = frozen(estimator.state_dict())
        seal = _seal(data)
        if seal in self.saved:
            assert differences(found, self.saved[seal]) == []
            return "as saved"
        self._require_sound(estimator, kind, found)
        return "sound"

    def _kind(self, data: bytes, *, with_header: bool) -> str:
        """Return the kind that a file says it is; the header's reader is tried too."""
        if with_header:
            with contextlib.suppress(kc.StateError):
                kc.read_header(self.path)
        at = data.find(_BLOCKS)
        name = data[at + len(_BLOCKS) : at + len(_BLOCKS) + 20].split(b'"')[0]
        kind = name.decode("latin-1")
        return kind if at >= 0 and kind in KINDS else "kronecker"

    def _require_sound(self, estimator: kc.Estimator, kind: str, found: Any) -> None:
        """Require a state that is finite, can be saved again, and can be used."""
        for x in arrays_of(estimator.state_dict()):
            assert np.all(np.isfinite(x)), "a number that is not finite"
        kc.save_checkpoint(self.again, estimator)
        second = made(kind)
        kc.load_checkpoint(self.again, second, backend="numpy")
        assert differences(frozen(second.state_dict()), found) == []
        layer = KINDS[kind][0]
        shapes = layer.shapes if kind == "tnt" else _shapes(layer)
        vectors = {kind: {name: np.ones(shape) for name, shape in shapes.items()}}
        with np.errstate(all="ignore"), contextlib.suppress(kc.KFACError):
            result = second.precondition(vectors)[kind]
            for name, shape in shapes.items():
                assert result[name].shape == shape
        with np.errstate(all="ignore"), contextlib.suppress(kc.KFACError):
            second.update({kind: _batch(kind, np.random.default_rng(3))})
            second.refresh()


def _shapes(layer: Any) -> dict[str, tuple[int, ...]]:
    if layer.kind == "conv":
        return {"weight": (2, 2, 2)}
    return {"weight": (2, 2), "bias": (2,)}


def _seal(data: bytes) -> Any:
    """Return the names and checksums that a file carries; None for no archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return tuple((part.filename, part.CRC) for part in archive.infolist())
    except Exception:
        return None
