"""The program that trains networks of sequences in Keras runs with the defaults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..builders.programs import run_python

PROGRAM = Path(__file__).parents[2] / "docs/examples/training/keras_sequences.py"

pytest.importorskip("keras")
pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not PROGRAM.exists(), reason="the documentation is not here"
)


def test_networks_of_sequences_train_with_the_defaults():
    """LSTM, GRU and attention: no layer is left out, and K-FAC learns in one epoch."""
    ran = run_python(
        PROGRAM, "--quick", env={**os.environ, "KERAS_BACKEND": "torch"}, check=True
    )
    losses = {}
    for line in ran.stdout.splitlines()[1:]:
        network, before, after, method = line.split()
        losses[network, method] = float(before), float(after)

    networks = ("lstm", "gru", "attention")
    assert set(losses) == {(n, m) for n in networks for m in ("K-FAC", "Adam")}
    for network in networks:
        before, after = losses[network, "K-FAC"]
        assert after < 0.8 * before
