"""Least squares with networks: optimizers at equal CPU seconds on one thread.

    python -m benchmarks.least_squares --file runs.jsonl --picture curves.png

Differential equations on fixed points (Poisson, Burgers, heat in 4 + 1 dimensions, and a
coefficient that is found from measurements of the solution) and regressions on
mini-batches, in float64, with derivatives by ``torch.autograd``.  `GaussNewton` has its
defaults; the others have six rates each, of which the first seed chooses one.  The clock is
the process's CPU time, and stands still while errors are measured.  Seconds are those of
the machine at the file's first run, see `benchmarks.tasks.running`.  A run is a line of the
file, and is not repeated.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.tasks.running import price_of_work  # noqa: E402
from kfac_core import KFACError  # noqa: E402
from kfac_core_shims.torch import KFAC, GaussNewton  # noqa: E402

__all__ = ["METHODS", "PROBLEMS", "Equation", "Regression", "run"]

Field = Callable[[Any], Any]
"""A function of points (N, d) with values (N,)."""

RATES = 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1
MARKS = tuple(0.02 * 50 ** (i / 19) for i in range(20))
"""When errors are measured, as shares of the seconds."""


def derivatives(u: Field, x: Any, axes: tuple[int, ...] = ()) -> tuple[Any, Any, Any]:
    """Return u (N,), its slope (N, d) and the sum of second derivatives along axes (N,)."""
    value = u(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    second = torch.zeros_like(value)
    for i in axes:
        (bend,) = torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)
        second = second + bend[:, i]
    return value, slope, second


def poisson(x: Any, u: Field) -> Any:
    """Laplace's operator."""
    return derivatives(u, x, (0, 1))[2]


def burgers(x: Any, u: Field) -> Any:
    """``u_t + u u_x - nu u_xx``, in t and x."""
    value, slope, second = derivatives(u, x, (1,))
    return slope[:, 0] + value * slope[:, 1] - VISCOSITY * second


def heat(x: Any, u: Field) -> Any:
    """``u_t - (1/4) Laplace u``, in four dimensions and t."""
    _, slope, second = derivatives(u, x, (0, 1, 2, 3))
    return slope[:, 4] - 0.25 * second


def absorption(x: Any, u: Field, k: Field) -> Any:
    """``Laplace u - k u``; of the same kind everywhere, where u has no zero."""
    value, _, second = derivatives(u, x, (0, 1))
    return second - k(x) * value


VISCOSITY = 0.05


def cole_hopf(x: Any) -> Any:
    """Return the solution of Burgers' equation from ``-sin(pi x)``, by quadrature."""
    t, place = x[:, :1], x[:, 1:]
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite.hermgauss(80))
    y = math.pi * (place - 2.0 * torch.sqrt(VISCOSITY * t) * nodes)
    density = weights * torch.exp(-torch.cos(y) / (2.0 * math.pi * VISCOSITY))
    return -(torch.sin(y) * density).sum(1) / density.sum(1)


def waves(x: Any) -> Any:
    return torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])


def cooling(x: Any) -> Any:
    return torch.exp(-x[:, 4]) * torch.sin(2.0 * x[:, :4]).sum(1)


def warmth(x: Any) -> Any:
    return 1.0 + waves(x)


def coefficient(x: Any) -> Any:
    return 1.0 + 0.5 * torch.sin(math.pi * x[:, 0]) * torch.cos(math.pi * x[:, 1])


class Network(nn.Module):
    """A tanh network with one output, shape (N,)."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n, m in itertools.pairwise(widths):
            layers += [nn.Linear(n, m), nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Any) -> Any:
        """Return values."""
        return self.layers(x)[:, 0]


class Equation(nn.Module):
    """An equation at fixed points, with known values at others; networks for its fields.

    Parameters
    ----------
    operator : callable
        ``operator(x, *fields)``, its left side; the right side is that of the solution.
    exact : tuple of callable
        The solution's fields: u, of which values are known; error is that of the last.
    low, high : tuple of float
        Corners of the box.
    everywhere : bool
        Whether u is known at points inside; else at the sides, or at the start for t.
    start : int or None
        The axis of time, of which only the lower side has known values.
    source : bool
        Whether the right side is to be computed; else it is 0.
    hidden : tuple of int
        Widths of the networks.
    points : tuple of int
        Points inside, and with known values.
    weight : float
        On residuals of known values.
    """

    minibatch = False

    def __init__(
        self,
        *,
        operator: Callable[..., Any],
        exact: tuple[Field, ...],
        low: tuple[float, ...],
        high: tuple[float, ...],
        everywhere: bool = False,
        start: int | None = None,
        source: bool = True,
        hidden: tuple[int, ...] = (32, 32),
        points: tuple[int, int] = (900, 240),
        weight: float = 10.0,
    ) -> None:
        super().__init__()
        self.operator, self.exact, self.weight = operator, exact, weight
        d = len(low)
        self.fields = nn.ModuleList(Network((d, *hidden, 1)) for _ in exact).double()
        inside, outside = points
        bottom, top = torch.tensor([low, high], dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(
            inside + outside + 2000, d, generator=generator, dtype=torch.float64
        )
        x = bottom + (top - bottom) * drawn
        known = x[inside : inside + outside].clone()
        if not everywhere:
            sides = [
                (i, end) for i in range(d) for end in (0, 1) if (i, end) != (start, 1)
            ]
            for row, (i, end) in zip(range(outside), itertools.cycle(sides)):
                known[row, i] = (bottom, top)[end][i]
        self.inside, self.known = x[:inside].requires_grad_(), known
        self.values = exact[0](known)
        self.right = torch.zeros(inside, dtype=torch.float64)
        if source:
            self.right = operator(self.inside, *exact).detach()
        self.grid = x[inside + outside :]
        self.expected = exact[-1](self.grid)

    def terms(self) -> tuple[Any, Any]:
        """Return residuals of the equation, and of known values."""
        u = self.fields[0]
        left = self.operator(self.inside, *self.fields)
        return left - self.right, self.weight * (u(self.known) - self.values)

    def forward(self, points: Any) -> Any:
        """Return all residuals as rows (R, 1) of one kind, as K-FAC reads them.

        Half their mean square is the loss of `terms`.
        """
        N, M = len(self.inside), len(self.known)
        x = points.detach().requires_grad_()
        left = self.operator(x, *self.fields)[:N] - self.right
        known = self.weight * (self.fields[0](x)[N:] - self.values)
        R = N + M
        return torch.cat([left * (R / N) ** 0.5, known * (R / M) ** 0.5])[:, None]

    def next_batch(self) -> None:
        """Do nothing: points are fixed."""

    @property
    def arguments(self) -> Any:
        """What `forward` takes."""
        return torch.cat([self.inside.detach(), self.known])

    @torch.no_grad()
    def error(self) -> float:
        """Return the relative error of the last field at points that are not trained on."""
        difference = self.fields[-1](self.grid) - self.expected
        return float(difference.norm() / self.expected.norm())


class Regression(nn.Module):
    """A regression on mini-batches of 256 of 2,000 rows.

    Parameters
    ----------
    target : callable
        Values of points in [-1, 1]^d.
    d : int
        Inputs.
    """

    minibatch = True

    def __init__(self, *, target: Field, d: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        x = 2.0 * torch.rand(3000, d, generator=generator, dtype=torch.float64) - 1.0
        self.x, self.y = x, target(x)
        self.network = Network((d, 64, 64, 1)).double()
        self.rows = torch.arange(256)

    def next_batch(self) -> None:
        """Draw another batch."""
        self.rows = torch.randint(2000, (256,))

    def terms(self) -> tuple[Any]:
        """Return the residuals of the batch."""
        return (self.network(self.x[self.rows]) - self.y[self.rows],)

    def forward(self, rows: Any) -> Any:
        """Return residuals as rows (N, 1)."""
        return (self.network(self.x[rows]) - self.y[rows])[:, None]

    @property
    def arguments(self) -> Any:
        """What `forward` takes."""
        return self.rows

    @torch.no_grad()
    def error(self, rows: slice = slice(2000)) -> float:
        """Return the relative error of all training rows, or of others."""
        y = self.y[rows]
        return float((self.network(self.x[rows]) - y).norm() / y.norm())

    def test(self) -> float:
        """Return the relative error of the test rows."""
        return self.error(slice(2000, 3000))


def products(x: Any) -> Any:
    return torch.sin(3 * x[:, 0] * x[:, 1]) + x[:, 2] ** 2 * x[:, 3]


def ridges(x: Any) -> Any:
    return torch.sin(x @ torch.linspace(0.2, 2.0, 10).double()) + torch.cos(
        x @ torch.linspace(-1.0, 1.0, 10).double()
    )


def bumps(x: Any) -> Any:
    return torch.exp(-3.0 * (x - 0.2).square().sum(1)) + 0.5 * x.prod(1)


@dataclass(frozen=True)
class Case:
    """A problem, and its CPU seconds."""

    build: Callable[[], Any]
    seconds: float


SQUARE: dict[str, Any] = {"low": (0.0, 0.0), "high": (1.0, 1.0)}

PROBLEMS: dict[str, Case] = {
    "poisson": Case(
        lambda: Equation(operator=poisson, exact=(waves,), weight=30.0, **SQUARE), 15.0
    ),
    "burgers": Case(
        lambda: Equation(
            operator=burgers,
            exact=(cole_hopf,),
            low=(0.0, -1.0),
            high=(1.0, 1.0),
            start=0,
            source=False,
        ),
        5.0,
    ),
    "heat": Case(
        lambda: Equation(
            operator=heat,
            exact=(cooling,),
            low=(0.0,) * 5,
            high=(1.0,) * 5,
            start=4,
        ),
        5.0,
    ),
    "inverse": Case(
        lambda: Equation(
            operator=absorption, exact=(warmth, coefficient), everywhere=True, **SQUARE
        ),
        15.0,
    ),
    "products": Case(lambda: Regression(target=products, d=6), 4.0),
    "ridges": Case(lambda: Regression(target=ridges, d=10), 4.0),
    "bumps": Case(lambda: Regression(target=bumps, d=3), 4.0),
}


class Preconditioned(torch.optim.SGD):  # type: ignore[misc]
    """SGD with momentum behind `KFAC`, of residuals that are observed."""

    def __init__(self, model: Any, rate: float) -> None:
        super().__init__(model.parameters(), lr=rate, momentum=0.9)
        # One output in a row: the exact Fisher matrix takes one backward pass.
        self.kfac = KFAC(
            model, lr=self, likelihood="gaussian", fisher="exact", output=None
        )

    def step(self, closure: Any = None) -> None:
        """Precondition, and take the step."""
        self.kfac.step()
        super().step()


def _muon(model: Any, rate: float) -> list[Any]:
    """Return Muon for hidden matrices, and AdamW for the rest."""
    hidden, others = [], []
    for p in model.parameters():
        (hidden if p.ndim == 2 and min(p.shape) > 10 else others).append(p)
    return [torch.optim.Muon(hidden, lr=rate), torch.optim.AdamW(others, lr=rate)]


def _published_soap(model: Any, rate: float) -> list[Any]:
    module: Any = importlib.import_module("soap")
    return [
        module.SOAP(
            model.parameters(), lr=rate, weight_decay=0.0, precondition_frequency=10
        )
    ]


def _gauss_newton(model: Any, rate: float) -> list[Any]:
    return [GaussNewton(model, minibatch=model.minibatch)]


def _lbfgs(model: Any, rate: float) -> list[Any]:
    return [
        torch.optim.LBFGS(
            model.parameters(), history_size=50, line_search_fn="strong_wolfe"
        )
    ]


@dataclass(frozen=True)
class Method:
    """An optimizer, its rates, and how it is used."""

    title: str
    make: Callable[[Any, float], list[Any]]
    rates: tuple[float, ...] = (0.0,)
    cosine: bool = False
    fixed_points: bool = False


METHODS: dict[str, Method] = {
    "gauss-newton": Method("`GaussNewton`", _gauss_newton),
    "kfac": Method(
        "`KFAC`, SGD",
        lambda model, rate: [Preconditioned(model, rate)],
        (3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0),
    ),
    "lbfgs": Method("L-BFGS", _lbfgs, fixed_points=True),
    "soap": Method("SOAP, published", _published_soap, RATES),
    "muon": Method("Muon and AdamW", _muon, RATES),
    "adamw": Method(
        "AdamW, cosine",
        lambda model, rate: [torch.optim.AdamW(model.parameters(), lr=rate)],
        RATES,
        cosine=True,
    ),
    "adam": Method(
        "Adam",
        lambda model, rate: [torch.optim.Adam(model.parameters(), lr=rate)],
        RATES,
    ),
}


def run(
    problem: str,
    method: str,
    rate: float,
    seed: int,
    seconds: float,
    *,
    reference: float | None = None,
) -> dict[str, Any]:
    """Train, and return errors against CPU seconds.

    Parameters
    ----------
    problem, method : str
        In `PROBLEMS` and `METHODS`.
    rate : float
        Learning rate; 0 where there is none to choose.
    seed : int
        Of the network and the batches.
    seconds : float
        CPU seconds of training.
    reference : float, optional
        Price of work at the file's first run; by default that of now.

    Returns
    -------
    dict
        ``error``, infinite where the run broke off; ``steps``; ``curve``, pairs of seconds
        and errors; ``test`` of regressions; ``reference`` and ``slowdown``.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # Published SOAP keeps its state in it.
    price = price_of_work()
    reference = reference or price
    slowdown = price / reference
    seconds *= slowdown
    torch.manual_seed(seed)
    model, of_method = PROBLEMS[problem].build(), METHODS[method]
    cosine = of_method.cosine or (model.minibatch and method == "gauss-newton")
    marks, curve, spent, steps = [m * seconds for m in MARKS], [], 0.0, 0
    broken = False
    started = time.process_time()
    optimizers = of_method.make(model, rate)
    rates = [group["lr"] for o in optimizers for group in o.param_groups]
    spent += time.process_time() - started
    while marks and not broken:
        started = time.process_time()
        model.next_batch()
        if cosine:
            fall = 0.5 + 0.5 * math.cos(math.pi * min(1.0, spent / seconds))
            groups = [group for o in optimizers for group in o.param_groups]
            for group, first in zip(groups, rates, strict=True):
                group["lr"] = first * fall
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step(model, of_method, optimizers)
        except (KFACError, RuntimeError):  # The numbers left their range.
            broken = True
        spent += time.process_time() - started
        steps += 1
        if spent >= marks[0]:
            marks = [mark for mark in marks if mark > spent]
            curve.append((round(spent / slowdown, 4), model.error()))
    error = curve[-1][1] if curve and not broken else math.inf
    record: dict[str, Any] = {
        "error": error if math.isfinite(error) else math.inf,
        "steps": steps,
        "reference": reference,
        "slowdown": round(slowdown, 3),
    }
    if model.minibatch:
        record["test"] = model.test()
    return {**record, "curve": curve}


def step(model: Any, method: Method, optimizers: list[Any], /) -> None:
    """Take one step on the model's batch."""
    if isinstance(optimizers[0], GaussNewton):
        optimizers[0].step(model.terms)
        return

    def closure() -> Any:
        for optimizer in optimizers:
            optimizer.zero_grad()
        if isinstance(optimizers[0], Preconditioned):
            rows = model(model.arguments)
            optimizers[0].kfac.observe(rows)
            loss = 0.5 * rows.square().mean()
        else:
            loss = sum(0.5 * r.square().mean() for r in model.terms())
        loss.backward()
        return loss

    if method.fixed_points:
        optimizers[0].step(closure)
        return
    closure()
    for optimizer in optimizers:
        optimizer.step()


def wanted(
    path: Path, problems: list[str], methods: list[str], seeds: int
) -> Iterator[tuple[str, str, float, int]]:
    """Yield runs: all rates with the first seed, the best of them with the others."""
    for seed, problem, method in itertools.product(range(seeds), problems, methods):
        if METHODS[method].fixed_points and PROBLEMS[problem].seconds < 5.0:
            continue
        errors = {
            (r["rate"], r["seed"]): r["error"]
            for r in read(path)
            if (r["problem"], r["method"]) == (problem, method)
        }
        rates = METHODS[method].rates
        if seed > 0:
            rates = (min(rates, key=lambda rate: errors[rate, 0]),)
        for rate in rates:
            if (rate, seed) not in errors:
                yield problem, method, rate, seed


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def best_runs(
    runs: list[dict[str, Any]], problem: str, method: str
) -> list[dict[str, Any]]:
    """Return the runs of the rate that the first seed chose."""
    here = [r for r in runs if (r["problem"], r["method"]) == (problem, method)]
    first = [r for r in here if r["seed"] == 0]
    if not first:
        return []
    rate = min(first, key=lambda r: r["error"])["rate"]
    return [r for r in here if r["rate"] == rate]


def table(runs: list[dict[str, Any]], problem: str) -> str:
    """Return medians over seeds as a Markdown table."""
    lines = ["| method | rate | steps | error | CPU seconds to 1e-2, 1e-3, 1e-4 |"]
    lines.append("| --- " * 5 + "|")
    for name, method in METHODS.items():
        chosen = best_runs(runs, problem, name)
        if not chosen:
            continue
        rate = f"{chosen[0]['rate']:g}" if len(method.rates) > 1 else ""
        reached = []
        for target in (1e-2, 1e-3, 1e-4):
            times = [
                next((t for t, e in r["curve"] if e <= target), math.inf)
                for r in chosen
            ]
            middle = statistics.median(times)
            reached.append(f"{middle:.1f}" if math.isfinite(middle) else "-")
        steps = statistics.median(r["steps"] for r in chosen)
        error = statistics.median(r["error"] for r in chosen)
        tests = [r["test"] for r in chosen if "test" in r]
        shown = f"{error:.1e}"
        if tests:
            shown += f", test {statistics.median(tests):.1e}"
        lines.append(
            f"| {method.title} | {rate} | {steps:g} | {shown} | {', '.join(reached)} |"
        )
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw errors against seconds, a problem a panel, a line a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    problems = [p for p in PROBLEMS if any(r["problem"] == p for r in runs)]
    columns = min(4, len(problems))
    rows = math.ceil(len(problems) / columns)
    figure = Figure((3.4 * columns, 3.0 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    panels, unused = grid[: len(problems)], grid[len(problems) :]
    for axes in unused:
        axes.set_axis_off()
    for axes, problem in zip(panels, problems, strict=True):
        for i, (name, method) in enumerate(METHODS.items()):
            for r in best_runs(runs, problem, name):
                if r["curve"]:
                    seconds, errors = zip(*r["curve"], strict=True)
                    label = method.title.replace("`", "") if r["seed"] == 0 else None
                    axes.loglog(seconds, errors, color=f"C{i}", label=label)
        axes.set(title=problem, xlabel="CPU seconds", ylabel="relative error")
        axes.grid(alpha=0.25)
    where = {"loc": "center"} if len(unused) else {}
    legend = unused[0] if len(unused) else panels[0]
    legend.legend(*panels[0].get_legend_handles_labels(), frameon=False, **where)
    figure.savefig(path)


def main() -> None:
    """Run what the file lacks, print the tables and draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.least_squares")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["poisson"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0, help="of the seconds")
    parser.add_argument("--file", type=Path, default=Path("least_squares.jsonl"))
    parser.add_argument("--peers", type=Path, help="folder with SOAP's soap.py")
    parser.add_argument("--picture", type=Path, help="write a picture here")
    options = parser.parse_args()
    if options.peers is not None:
        sys.path.append(str(options.peers))
    methods = options.methods
    if "soap" in methods and importlib.util.find_spec("soap") is None:
        methods = [m for m in methods if m != "soap"]
    for key in wanted(options.file, options.problems, methods, options.seeds):
        problem, method, rate, seed = key
        seconds = PROBLEMS[problem].seconds * options.share
        reference = next((r["reference"] for r in read(options.file)), None)
        record = run(problem, method, rate, seed, seconds, reference=reference)
        names = ("problem", "method", "rate", "seed")
        line = {**dict(zip(names, key, strict=True)), "seconds": seconds, **record}
        with options.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(*key, f"{record['error']:.2e}", record["steps"], flush=True)
    runs = read(options.file)
    for problem in dict.fromkeys(r["problem"] for r in runs):
        print(f"\n{problem}\n\n{table(runs, problem)}")
    if options.picture is not None:
        draw(runs, options.picture)


if __name__ == "__main__":
    main()
