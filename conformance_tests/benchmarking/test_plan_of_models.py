"""The plan of a program's model: PyTorch's module, and Flax's."""

from __future__ import annotations

import pytest

from ..builders.benchmark_folder import import_benchmarks

import_benchmarks()

from benchmarks.plan.__main__ import main  # noqa: E402
from benchmarks.plan.model import network_of  # noqa: E402

TORCH = """
import torch

def make():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
    )
"""
FLAX = """
import flax.linen as nn
import jax
import jax.numpy as jnp
from kfac_core_shims import jax as shim

class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.tanh(nn.Dense(8)(x)))

def network():
    model, x = Classifier(), jnp.zeros((2, 6))
    return shim.Network(model.apply, model.init(jax.random.key(0), x), x)

def make():
    return shim.KFAC(network(), reduction="mean")
"""


@pytest.mark.parametrize(
    ("library", "text", "name"),
    [("torch", TORCH, "make"), ("flax", FLAX, "network"), ("flax", FLAX, "make")],
)
def test_the_plan_of_a_model(tmp_path, capsys, library, text, name):
    """Its layers, with the bias among the inputs, and a time for each number of holders."""
    pytest.importorskip(library)
    program = tmp_path / "program.py"
    program.write_text(text)

    _, network, _ = network_of(f"{program}:{name}")
    shapes = [block.layer.matrix_shape for block in network.blocks.values()]

    assert shapes == [(7, 8), (9, 4)]
    assert main([f"{program}:{name}", "--ranks", "4", "--rows", "5"]) == 0
    assert "4 ranks; imbalance" in capsys.readouterr().out
