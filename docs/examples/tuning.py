"""How the options of K-FAC change a run, on three small problems.

A classifier and an autoencoder of scikit-learn's digits and a regression of a smooth
function, each a dense network of two or three layers, trained by the integration of
NumPy.  For each problem the loss after a fixed number of steps is shown against the
learning rate for several dampings, with and without the KL clip, against the refresh
interval and the batch size; Adam's with its best learning rate is a line.

    python docs/examples/tuning.py --output docs
    python docs/examples/tuning.py --quick
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import kfac_core as kc
from kfac_core_shims.numpy import KFAC

STEPS = 150
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)
CLIPS = (None, 1e-2, 1e-3)
INTERVALS = (1, 5, 20, 75)
SIZES = (32, 128, 512)
ADAM_RATES = (0.001, 0.003, 0.01, 0.03)
USUAL = {"rate": 0.1, "damping": 0.01, "clip": None, "interval": 5, "size": 128}
# The color of a method is the same in all figures; shades are of K-FAC's.
KFAC_SHADES = ("#004D38", "#009E73", "#5CC9A7", "#B5E5D5")
ADAM = "#E69F00"


@dataclass
class Problem:
    """A dense network with tanh between its layers, its loss and its examples."""

    name: str
    widths: tuple[int, ...]
    loss: kc.losses.Loss
    inputs: np.ndarray
    targets: np.ndarray
    floor: float

    def initial(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the parameters that all runs begin with."""
        rng = np.random.default_rng(0)
        return {
            f"layer{i}": {
                "weight": rng.normal(size=(n, m)) / math.sqrt(n),
                "bias": np.zeros(m),
            }
            for i, (n, m) in enumerate(
                zip(self.widths[:-1], self.widths[1:], strict=True)
            )
        }

    def forward(self, parameters, inputs):
        """Return the input of each layer, and the outputs."""
        seen, h = {}, inputs
        for name, layer in parameters.items():
            seen[name] = h
            z = h @ layer["weight"] + layer["bias"]
            h = np.tanh(z)
        return seen, z

    def backward(self, parameters, seen, g):
        """Return the gradient of each layer's output."""
        gradients = {}
        for name in reversed(parameters):
            gradients[name] = g
            g = g @ parameters[name]["weight"].T * (1.0 - seen[name] ** 2)
        return gradients

    def mean_loss(self, parameters):
        """Return the loss of all examples above the least there can be, or infinity."""
        _, z = self.forward(parameters, self.inputs)
        value = -float(np.mean(self.loss.log_probability(z, self.targets))) - self.floor
        return value if math.isfinite(value) else math.inf


def problems():
    """Return the three problems."""
    images, labels = load_digits(return_X_y=True)
    images = images[:1500] / 16.0
    labels = labels[:1500]
    rng = np.random.default_rng(1)
    x = rng.uniform(-1.0, 1.0, size=(1500, 6))
    y = np.sin(3.0 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.5 * x[:, 3:4] ** 2
    gray = images[(images > 0.0) & (images < 1.0)]
    entropies = -gray * np.log(gray) - (1.0 - gray) * np.log(1.0 - gray)
    entropy = float(entropies.sum()) / len(images)
    constant = 0.5 * math.log(2.0 * math.pi * 0.1)
    bits, normal = kc.losses.Bernoulli(), kc.losses.Gaussian(variance=0.1)
    classes = kc.losses.Categorical()
    deep = (64, 32, 8, 32, 64)
    return [
        Problem("classifier", (64, 32, 10), classes, images, labels, 0.0),
        Problem("autoencoder", deep, bits, images, images, entropy),
        Problem("regression", (6, 32, 32, 1), normal, x, y, constant),
    ]


def batches(problem, size, steps):
    """Return the indices of each batch."""
    rng = np.random.default_rng(2)
    return [rng.choice(len(problem.inputs), size, replace=False) for _ in range(steps)]


def gradients(problem, parameters, rows):
    """Return the layers' inputs, the outputs, and the gradient of the mean loss."""
    seen, z = problem.forward(parameters, problem.inputs[rows])
    g = problem.loss.gradient(z, problem.targets[rows]) / len(rows)
    outputs = problem.backward(parameters, seen, g)
    of_batch = {
        name: {"weight": seen[name].T @ g, "bias": g.sum(axis=0)}
        for name, g in outputs.items()
    }
    return seen, z, of_batch


def train_kfac(problem, steps, **changed):
    """Return the loss after training by K-FAC with these options."""
    options = USUAL | changed
    parameters = problem.initial()
    kfac = KFAC(
        parameters,
        learning_rate=options["rate"],
        momentum=0.9,
        kl_clip=options["clip"],
        damping=options["damping"],
        decay=0.95,
        refresh_every=options["interval"],
    )
    for step, rows in enumerate(batches(problem, options["size"], steps)):
        seen, z, of_batch = gradients(problem, parameters, rows)
        drawn = kc.losses.drawn_vectors(
            problem.loss, z, mode="gradients", seed=step, shared=False
        )
        outputs = problem.backward(parameters, seen, drawn.vectors[0])
        for name, g in outputs.items():
            kfac.observe(name, kc.Batch(seen[name], g))
        try:
            kfac.step(of_batch)
        except (kc.NotFiniteError, kc.FactorizationError):
            return math.inf
    return problem.mean_loss(parameters)


def train_adam(problem, steps, rate):
    """Return the loss after training by Adam."""
    parameters = problem.initial()
    moments = [
        [layer[name], np.zeros_like(layer[name]), np.zeros_like(layer[name])]
        for layer in parameters.values()
        for name in layer
    ]
    for step, rows in enumerate(batches(problem, USUAL["size"], steps), start=1):
        _, _, of_batch = gradients(problem, parameters, rows)
        flat = [
            of_batch[name][part] for name in parameters for part in parameters[name]
        ]
        for (values, m, v), g in zip(moments, flat, strict=True):
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            scale = np.sqrt(v / (1.0 - 0.999**step)) + 1e-8
            values -= rate * m / (1.0 - 0.9**step) / scale
    return problem.mean_loss(parameters)


def measured(problem, steps):
    """Return all losses of one problem, by figure and option."""
    with np.errstate(all="ignore"):
        return {
            "adam": min(train_adam(problem, steps, rate) for rate in ADAM_RATES),
            "damping": {
                damping: [
                    train_kfac(problem, steps, rate=rate, damping=damping)
                    for rate in RATES
                ]
                for damping in DAMPINGS
            },
            "clip": {
                clip: [
                    train_kfac(problem, steps, rate=rate, clip=clip) for rate in RATES
                ]
                for clip in CLIPS
            },
            "interval": [
                train_kfac(problem, steps, clip=CLIPS[-1], interval=interval)
                for interval in INTERVALS
            ],
            "size": [
                train_kfac(problem, steps, clip=CLIPS[-1], size=size) for size in SIZES
            ],
        }


def table(results):
    """Return the losses of the page's table as Markdown."""
    lines = [
        "| training loss above the floor | " + " | ".join(results) + " |",
        "| --- |" + " --- |" * len(results),
        _row("Adam, best of 4 learning rates", results, lambda losses: losses["adam"]),
        _row(
            "K-FAC without a clip, best of 28",
            results,
            lambda losses: min(_all(losses["damping"])),
        ),
    ]
    lines.append(
        _row(
            f"K-FAC with `kl_clip={CLIPS[-1]:g}`, worst of learning rates 0.03 to 3",
            results,
            lambda losses: max(losses["clip"][CLIPS[-1]][RATES.index(0.03) :]),
        )
    )
    return "\n".join(lines)


def _row(words, results, loss_of):
    cells = [loss_of(losses) for losses in results.values()]
    shown = [f"{cell:.1g}" if cell < 100.0 else "diverges" for cell in cells]
    return f"| {words} | {' | '.join(shown)} |"


def _all(rows):
    return [loss for row in rows.values() for loss in row]


def draw(results, folder):
    """Draw learning rates against dampings and clips, and intervals and sizes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = (
        ("rates", ("damping", "clip"), "learning rate"),
        ("intervals", ("interval", "size"), None),
    )
    for file, rows, label in kinds:
        figure = Figure(figsize=(10.5, 5.8), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(rows), len(results))
        for axes_of_row, kind in zip(grid, rows, strict=True):
            for axes, (name, losses) in zip(axes_of_row, results.items(), strict=True):
                _draw_one(axes, kind, losses, label)
                axes.set_title(name, loc="left", fontsize=10)
            axes_of_row[0].set_ylabel("training loss above its floor")
            # Beside the last axes: inside, it would hide lines.
            axes_of_row[-1].legend(
                frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0)
            )
        figure.savefig(folder / f"tuning_{file}.png")


def _draw_one(axes, kind, losses, label):
    axes.axhline(losses["adam"], color=ADAM, linestyle="--", label="Adam, best rate")
    if label:
        for color, (option, row) in zip(
            KFAC_SHADES, losses[kind].items(), strict=False
        ):
            text = "no clip" if option is None else f"{kind} {option:g}"
            axes.plot(RATES, row, ".-", color=color, label=f"K-FAC, {text}")
        axes.set_xlabel(label)
        axes.set_xscale("log")
    else:
        places = INTERVALS if kind == "interval" else SIZES
        words = "steps between refreshes" if kind == "interval" else "batch size"
        axes.plot(places, losses[kind], ".-", color=KFAC_SHADES[1], label="K-FAC")
        axes.set_xlabel(words)
    axes.set_yscale("log")
    lowest = min(_all(losses["damping"]) + _all(losses["clip"]) + losses["size"])
    axes.set_ylim(0.5 * lowest, 30.0 * losses["adam"])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, no pictures")
    parser.add_argument("--output", type=Path, help="folder of the pictures")
    options = parser.parse_args()
    steps = 5 if options.quick else STEPS
    results = {problem.name: measured(problem, steps) for problem in problems()}
    for name, losses in results.items():
        print(name, losses)
    print(table(results))
    if options.output:
        draw(results, options.output)


if __name__ == "__main__":
    main()
