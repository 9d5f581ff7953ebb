"""A recurrent network of 100 steps in PyTorch: K-FAC beside Adam.

The adding problem: of 100 pairs of a number in [0, 1] and a mark, which is set in two
places, the sum of the two marked numbers.  Guessing the mean has an error of 1/6.

    python docs/examples/training/torch_recurrent.py [--quick]

Both methods have five learning rates; K-FAC has the other defaults of `KFAC`.
"""

import argparse
import math
import time

import torch
from curves import Curve, best, table
from torch import nn

from kfac_core import KFACError
from kfac_core_shims.torch import KFAC

GRIDS = {
    "Adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
    "K-FAC": (0.003, 0.01, 0.03, 0.1, 0.3),
}


class Adder(nn.Module):
    """A layer of LSTM cells over time, and the sum read from its last state."""

    def __init__(self, width=32):
        super().__init__()
        self.cells, self.sum = nn.LSTM(2, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x):
        _, (last, _) = self.cells(x)
        return self.sum(last[-1])


def sequences(examples, length, seed):
    """Return inputs, shape (examples, length, 2), and sums, shape (examples, 1)."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(examples, length, generator=generator)
    marks = torch.zeros(examples, length)
    # One mark in each half.
    for half in 0, 1:
        size = length // 2
        places = torch.randint(size, (examples, 1), generator=generator) + half * size
        marks.scatter_(1, places, 1.0)
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(1, keepdim=True)


def train(method, rate, *, steps, size=64, length=100):
    """Train on new sequences in each step, and return the curve."""
    torch.manual_seed(0)
    model, mse = Adder(), nn.MSELoss()
    kfac = None
    if method == "Adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        kfac = KFAC(model, likelihood=mse, lr=optimizer)
    curve, seconds = Curve(f"{method}, learning rate {rate:g}"), 0.0
    test = sequences(500, length, seed=10**6)
    for step in range(1, steps + 1):
        x, y = sequences(size, length, seed=step)
        started = time.process_time()
        optimizer.zero_grad()
        mse(model(x), y).backward()
        try:
            if kfac is not None:
                kfac.step()
        except KFACError:  # Too large a rate: the numbers have left their range.
            curve.add(step, seconds, math.inf)
            break
        optimizer.step()
        seconds += time.process_time() - started
        if step % max(1, steps // 30) == 0 or step == steps:
            with torch.no_grad():
                curve.add(step, seconds, float(mse(model(test[0]), test[1])))
    curve.test = curve.losses[-1]
    return curve


def main():
    """Search both grids, and print the table of the best runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="8 steps, one rate each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    steps = 8 if given.quick else given.steps
    kfac = KFAC(Adder(), likelihood=nn.MSELoss())
    assert kfac.skipped == {}
    print(kfac)
    curves = []
    for method, rates in GRIDS.items():
        tried = rates[2:3] if given.quick else rates
        runs = {rate: [train(method, rate, steps=steps)] for rate in tried}
        curves += runs[best(runs)]
    print(f"\n{steps} steps:\n\n{table(curves, test='test error')}")


if __name__ == "__main__":
    main()
