"""The runs of the two PyTorch examples: Adam and K-FAC, each with the same search."""

import argparse
import math
import sys
import time

import numpy as np
import torch
from curves import Curve, best, plot, table
from data import batches
from torch.nn.functional import cross_entropy

from kfac_core import KFACError
from kfac_core_shims.torch import KFAC

GRIDS = {
    "Adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
    "K-FAC": (0.003, 0.01, 0.03, 0.1, 0.3),
}
"""Five learning rates for each, a factor of about three apart."""


def train(method, rate, seed, *, build, data, steps, size, options, read=512):
    """Train one model, and return its curve of the loss on `read` training examples."""
    torch.manual_seed(seed)
    model = build()
    if method == "Adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        kfac = None
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        kfac = KFAC(model, lr=optimizer, **options)
    curve, seconds = Curve(f"{method}, learning rate {rate:g}"), 0.0
    chosen = np.random.default_rng(0).permutation(len(data.train_inputs))[:read]
    measured = data.train_inputs[chosen], data.train_targets[chosen]
    stream = batches(data.train_inputs, data.train_targets, size=size, seed=seed)
    curve.add(0, 0.0, loss_and_error(model, *measured)[0])
    for step in range(1, steps + 1):
        inputs, targets = map(torch.from_numpy, next(stream))
        started = time.process_time()
        optimizer.zero_grad()
        outputs = model(inputs)
        cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
        try:
            if kfac is not None:
                kfac.step()
        except KFACError:  # Too large a rate: the numbers have left their range.
            curve.add(step, seconds, math.inf)
            break
        optimizer.step()
        seconds += time.process_time() - started
        if step % max(1, steps // 30) == 0 or step == steps:
            loss, _ = loss_and_error(model, *measured)
            curve.add(step, seconds, loss)
            if not math.isfinite(loss):
                break
    curve.test = loss_and_error(model, data.test_inputs, data.test_targets)[1]
    return curve


@torch.no_grad()
def loss_and_error(model, inputs, targets):
    """Return the mean loss, and the share of rows whose likeliest class is wrong."""
    model.eval()
    outputs = model(torch.from_numpy(inputs)).flatten(0, -2)
    targets = torch.from_numpy(targets).flatten()
    model.train()
    read = targets >= 0  # The loss ignores labels of -100.
    error = (outputs.argmax(-1) != targets)[read].float().mean()
    return float(cross_entropy(outputs, targets)), float(error)


def runs(*, seeds, **problem):
    """Search both grids, and return the curves of the best rate of each method."""
    torch.set_num_threads(1)
    curves = []
    for method, rates in GRIDS.items():
        tried = {}
        for rate in rates:
            tried[rate] = [train(method, rate, 0, **problem)]
            if sys.stderr.isatty():
                loss = tried[rate][0].losses[-1]
                print(f"{method}, {rate:g}: training loss {loss:.4f}", file=sys.stderr)
        rate = best(tried)
        tried[rate] += [
            train(method, rate, seed, **problem) for seed in range(1, seeds)
        ]
        curves += tried[rate]
    return curves


def main(title, picture, *, steps, **problem):
    """Print the table of the best runs, and draw them."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seeds", type=int, default=2, help="runs of the best rates")
    parser.add_argument("--output", default=picture, help="where the picture goes")
    arguments = parser.parse_args()
    curves = runs(seeds=arguments.seeds, steps=arguments.steps, **problem)
    print(table(curves))
    plot(curves, arguments.output, title=title)
