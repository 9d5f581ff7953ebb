"""Two deep networks that are hard for first-order methods: K-FAC with its defaults.

A classifier of digits with eight hidden layers of tanh, and an autoencoder.  SGD with
momentum and Adam have a grid of learning rates each, of which the best is shown; K-FAC has
the options that `KFAC` and `KFACOptimizer` have by themselves.
"""

import argparse
import itertools
import math
import time

import torch
from data import batches, digits
from torch import nn
from torch.nn import functional as fn

from kfac_core import KFACError
from kfac_core_shims.torch import KFAC, KFACOptimizer

GRIDS = {
    "SGD, momentum 0.9": (0.003, 0.01, 0.03, 0.1, 0.3),
    "Adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
    "KFAC(model), SGD 0.1, momentum 0.9": (0.1,),
    "KFACOptimizer(model)": (None,),
}


def stack(*widths):
    """Return linear layers of these widths with tanh between them."""
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def classifier():
    """Return a network, its loss and its likelihood."""
    network = stack(64, *[48] * 8, 10)
    return network, lambda z, x, y: fn.cross_entropy(z, y), "categorical"


def autoencoder():
    """Return a network, its loss and its likelihood."""
    network = stack(64, 48, 32, 16, 6, 16, 32, 48, 64)

    def loss(z, x, y):
        each = fn.binary_cross_entropy_with_logits(z, x.flatten(1), reduction="none")
        return each.sum(1).mean()

    return network, loss, "bernoulli"


def train(build, method, rate, data, *, steps, size):
    """Return the training loss at the end, and the seconds of training."""
    torch.manual_seed(0)
    network, loss_of, likelihood = build()
    kfac = None
    if method == "KFACOptimizer(model)":
        optimizer = KFACOptimizer(network, likelihood=likelihood)
    elif method == "Adam":
        optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    else:
        optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)
    if method.startswith("KFAC(model)"):
        kfac = KFAC(network, likelihood=likelihood, lr=optimizer)
    started = time.process_time()
    stream = batches(data.train_inputs, data.train_targets, size=size, seed=0)
    for x, y in itertools.islice(stream, steps):
        x, y = torch.from_numpy(x), torch.from_numpy(y)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(network(x), x, y)
            loss.backward()
            if kfac is not None:
                kfac.step()
            return loss

        try:
            optimizer.step(closure)
        except KFACError:  # Too large a rate: the numbers have left their range.
            return math.inf, time.process_time() - started
    seconds = time.process_time() - started
    x, y = (torch.from_numpy(a) for a in (data.train_inputs, data.train_targets))
    with torch.no_grad():
        loss = float(loss_of(network(x), x, y))
    return loss if math.isfinite(loss) else math.inf, seconds


def main():
    """Print a table for each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="20 steps, one rate each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = 20 if arguments.quick else arguments.steps
    data = digits()
    for build in (classifier, autoencoder):
        print(f"| {build.__name__}, {steps} steps | rate | training loss | seconds |")
        print("| --- | --- | --- | --- |")
        for method, rates in GRIDS.items():
            if arguments.quick:
                rates = rates[len(rates) // 2 :][:1]
            found = {
                rate: train(build, method, rate, data, steps=steps, size=128)
                for rate in rates
            }
            rate = min(found, key=lambda rate: found[rate][0])
            loss, seconds = found[rate]
            shown = "found" if rate is None else f"{rate:g}"
            print(f"| {method} | {shown} | {loss:.3g} | {seconds:.1f} |", flush=True)
        print()


if __name__ == "__main__":
    main()
