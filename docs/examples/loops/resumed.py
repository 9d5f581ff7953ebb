"""Saving and resuming: a run that stops in the middle is the same to the bit.

Needs `pip install torch`.  `KFACOptimizer` resumes likewise.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from kfac_core_shims.torch import KFAC, KFACOptimizer


def data():
    """Return inputs of 16 numbers, and which quarter of them has the largest sum."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    return inputs, inputs.reshape(256, 4, 4).sum(-1).argmax(-1)


def network():
    """Return the same network each time."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4)
    return nn.Sequential(*layers)


class Run:
    """A model, its optimizer and K-FAC, which are saved together."""

    def __init__(self):
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.kfac = KFAC(self.model, lr=self.optimizer)

    def train(self, start, stop):
        """Take the steps from `start` to `stop`."""
        inputs, labels = data()
        for step in range(start, stop):
            rows = torch.arange(64) + 64 * (step % 4)
            self.optimizer.zero_grad()
            cross_entropy(self.model(inputs[rows]), labels[rows]).backward()
            self.kfac.step()
            self.optimizer.step()

    def save(self, path):
        """Write the state to a file."""
        parts = {"model": self.model, "optimizer": self.optimizer, "kfac": self.kfac}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)

    def load(self, path):
        """Read the state from a file."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.kfac.load_state_dict(state["kfac"])


class RunWithoutRate(Run):
    """The same with `KFACOptimizer`, whose state has that of K-FAC."""

    def __init__(self):
        self.model = network()
        self.optimizer = KFACOptimizer(self.model)

    def train(self, start, stop):
        """Take the steps from `start` to `stop`."""
        inputs, labels = data()
        for step in range(start, stop):
            rows = torch.arange(64) + 64 * (step % 4)
            x, y = inputs[rows], labels[rows]
            self.optimizer.step(lambda x=x, y=y: cross_entropy(self.model(x), y))

    def save(self, path):
        """Write the state to a file."""
        parts = {"model": self.model, "optimizer": self.optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)

    def load(self, path):
        """Read the state from a file."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def main():
    """Compare 30 steps with 13, a file, and 17."""
    for kind in Run, RunWithoutRate:
        whole, first, second = kind(), kind(), kind()
        whole.train(0, 30)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.pt"
            first.train(0, 13)
            first.save(path)
            second.load(path)
        second.train(13, 30)
        p, q = (parameters_to_vector(run.model.parameters()) for run in (whole, second))
        equal = torch.equal(p, q)
        print(f"{kind.__name__}: the same to the bit: {equal}")
        assert equal


if __name__ == "__main__":
    main()
