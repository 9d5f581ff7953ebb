"""Two deep networks that are hard for first-order methods: K-FAC with its defaults.

A classifier of digits with eight hidden layers of tanh, and an autoencoder.  SGD with
momentum, Adam, and kfac-pytorch where it is installed, have a grid of learning rates each,
of which the best is shown; K-FAC has the options that `KFAC` and `KFACOptimizer` have by
themselves.

    python docs/examples/training/torch_deep.py [--steps 150] [--seconds 5] [--seeds 3]

Each run goes on until both are reached: a number of steps, and a CPU time of training.  The
best rate is chosen by itself for each.
"""

import argparse
import importlib.util
import itertools
import math
import statistics
import time

import torch
from data import batches, digits
from torch import nn
from torch.nn import functional as fn

from kfac_core import KFACError
from kfac_core_shims.torch import KFAC, KFACOptimizer

FIRST_ORDER = {
    "SGD, momentum 0.9": (0.003, 0.01, 0.03, 0.1, 0.3),
    "Adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
}
GRIDS = {
    **FIRST_ORDER,
    "KFAC(model), SGD 0.1, momentum 0.9": (0.1,),
    "KFACOptimizer(model)": (None,),
}
if importlib.util.find_spec("kfac") is not None:
    GRIDS["kfac-pytorch, momentum 0.9"] = (0.003, 0.01, 0.03, 0.1, 0.3)


def stack(*widths):
    """Return linear layers of these widths with tanh between them."""
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def classifier():
    """Return a network, its loss and its likelihood."""
    network = stack(64, *[128] * 8, 10)
    return network, lambda z, x, y: fn.cross_entropy(z, y), "categorical"


def autoencoder():
    """Return a network, its loss and its likelihood."""
    network = stack(64, 256, 128, 64, 12, 64, 128, 256, 64)

    def loss(z, x, y):
        each = fn.binary_cross_entropy_with_logits(z, x.flatten(1), reduction="none")
        return each.sum(1).mean()

    return network, loss, "bernoulli"


def kfac_pytorch(network, rate):
    """Return kfac-pytorch's preconditioner, with its own defaults but for the rate."""
    from kfac.preconditioner import KFACPreconditioner

    return KFACPreconditioner(network, lr=rate)


def prepared(network, method, rate, likelihood):
    """Return the optimizer of a method, and what changes the gradients before it."""
    if method == "KFACOptimizer(model)":
        return KFACOptimizer(network, likelihood=likelihood), None
    if method == "Adam":
        return torch.optim.Adam(network.parameters(), lr=rate), None
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)
    if method.startswith("KFAC(model)"):
        return optimizer, KFAC(network, likelihood=likelihood, lr=optimizer)
    if method.startswith("kfac-pytorch"):
        return optimizer, kfac_pytorch(network, rate)
    return optimizer, None


def train(build, method, rate, data, *, steps, seconds, size, seed=0):
    """Return the training losses after so many steps, and after so many seconds."""
    torch.manual_seed(seed)
    network, loss_of, likelihood = build()
    optimizer, kfac = prepared(network, method, rate, likelihood)
    x, y = (torch.from_numpy(a) for a in (data.train_inputs, data.train_targets))

    def measured():
        with torch.no_grad():
            loss = float(loss_of(network(x), x, y))
        return loss if math.isfinite(loss) else math.inf

    spent, at_steps, at_seconds = 0.0, None, None
    stream = batches(data.train_inputs, data.train_targets, size=size, seed=seed)
    for step, (rows, labels) in enumerate(stream, start=1):
        rows, labels = torch.from_numpy(rows), torch.from_numpy(labels)

        def closure(rows=rows, labels=labels):
            optimizer.zero_grad()
            loss = loss_of(network(rows), rows, labels)
            loss.backward()
            if kfac is not None:
                kfac.step()
            return loss

        started = time.process_time()
        try:
            optimizer.step(closure)
        except (KFACError, torch.linalg.LinAlgError):  # The numbers left their range.
            return at_steps or math.inf, at_seconds or math.inf
        spent += time.process_time() - started
        if step == steps:
            at_steps = measured()
        if at_seconds is None and spent >= seconds:
            at_seconds = measured()
        if at_steps is not None and at_seconds is not None:
            return at_steps, at_seconds


def compared(build, data, grids, *, seeds, **budget):
    """Yield each method with its best rate and loss, by steps and by seconds."""
    for method, rates in grids.items():
        first = {rate: train(build, method, rate, data, **budget) for rate in rates}
        row = [method]
        for place in 0, 1:
            rate = min(rates, key=lambda rate: first[rate][place])
            runs = [first[rate]] + [
                train(build, method, rate, data, seed=seed, **budget)
                for seed in range(1, seeds)
            ]
            shown = "found" if rate is None else f"{rate:g}"
            row += [shown, statistics.median(run[place] for run in runs)]
        yield row


def table(build, grids, *, steps, seconds, **budget):
    """Return the table of one network, with the digits that hold on other processors."""
    heads = [build.__name__, "rate", f"{steps} steps"]
    lines = [[*heads, f"rate for {seconds:g} seconds", f"{seconds:g} seconds"]]
    lines.append(["---"] * 5)
    budget |= {"steps": steps, "seconds": seconds, "size": 512}
    for row in compared(build, digits(), grids, **budget):
        lines.append([shown(x) if isinstance(x, float) else x for x in row])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def shown(loss):
    """Return a loss with two significant digits, three from 1 on."""
    return f"{loss:.3g}" if loss >= 1.0 else f"{loss:.2g}"


def main():
    """Print a table for each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seeds", type=int, default=1, help="runs of the best rates")
    parser.add_argument("--quick", action="store_true", help="20 steps, one rate each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    budget = {"steps": given.steps, "seconds": given.seconds, "seeds": given.seeds}
    grids = GRIDS
    if given.quick:
        budget = {"steps": 20, "seconds": 0.05, "seeds": 1}
        grids = {method: r[len(r) // 2 :][:1] for method, r in GRIDS.items()}
    for build in classifier, autoencoder:
        print(f"{table(build, grids, **budget)}\n", flush=True)


if __name__ == "__main__":
    main()
