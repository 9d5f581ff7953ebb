"""Two physics-informed networks: K-FAC, L-BFGS and Adam in the same time.

A network u(x) is trained so that a differential equation and its boundary values hold at
random points: Poisson's equation on the unit square, and Burgers' equation, which is not
linear.  Both have known solutions, to which u is compared on a grid.

A layer computes the value of each unit, its first derivatives and a weighted sum of second
derivatives, its *jet*, with one weight.  To K-FAC these are positions that share the
weight (Dangel, Mueller and Zeinhofer 2024, arXiv:2405.15603): `kfac_core` needs nothing
but the layers.  The bias acts on the value alone; so it is a column of the weight, with an
input of 1 for the value and of 0 for the derivatives.
"""

import argparse
import itertools
import math
import time

import numpy as np
import torch
from curves import COLORS, OTHER_COLORS
from torch import nn

from kfac_core_shims.torch import KFACOptimizer

RATES = (1e-3, 3e-3, 1e-2)


class Jets(nn.Module):
    """A network of tanh layers, from points to jets of its one output.

    The jet of a unit u at a point has the shape ``(1 + d + 1,)``: u, its d first
    derivatives, and ``sum_k weights[k] d^2 u / dx_k^2``.
    """

    def __init__(self, widths, weights):
        super().__init__()
        self.weights = weights
        self.layers = nn.ModuleList()
        for inputs, outputs in itertools.pairwise(widths):
            layer = nn.Linear(inputs + 1, outputs, bias=False)
            nn.init.xavier_uniform_(layer.weight)
            with torch.no_grad():
                layer.weight[:, -1] = 0.0
            self.layers.append(layer)

    def forward(self, x):
        n, d = x.shape
        jet = torch.zeros(n, d + 2, d, dtype=x.dtype)
        jet[:, 0], jet[:, 1:-1] = x, torch.eye(d, dtype=x.dtype)
        one = torch.zeros(n, d + 2, 1, dtype=x.dtype)
        one[:, 0] = 1.0
        for i, layer in enumerate(self.layers):
            if i > 0:
                jet = self.activated(jet)
            jet = layer(torch.cat([jet, one], dim=-1))
        return jet[..., 0]

    def activated(self, jet):
        """Return the jets of tanh of units: the chain rule, twice."""
        value, first, second = jet[:, 0], jet[:, 1:-1], jet[:, -1]
        u = torch.tanh(value)
        slope = 1.0 - u * u
        weights = torch.tensor(self.weights, dtype=jet.dtype)
        squares = torch.einsum("k,nku->nu", weights, first * first)
        bent = slope * second - 2.0 * u * slope * squares
        return torch.cat([u[:, None], slope[:, None] * first, bent[:, None]], dim=1)


class Residuals(nn.Module):
    """What is to be zero at each point: of the equation inside, of the values elsewhere.

    Rows are scaled so that half the mean square over all rows is the sum of half the mean
    square of both kinds.
    """

    def __init__(self, network, equation):
        super().__init__()
        self.network, self.equation = network, equation

    def forward(self, x, inside, wanted):
        jet = self.network(x)
        left = torch.where(inside, self.equation.left_side(jet), jet[:, 0])
        share = torch.where(inside, inside.sum(), (~inside).sum()) / len(x)
        return ((left - wanted) / share.sqrt())[:, None]


class Poisson:
    """``u_xx + u_yy = f`` on the unit square, ``u = sin(pi x) sin(pi y)``."""

    low, high, weights = (0.0, 0.0), (1.0, 1.0), (1.0, 1.0)

    def left_side(self, jet):
        return jet[:, -1]

    def right_side(self, x):
        return -2.0 * math.pi**2 * self.solution(x)

    def solution(self, x):
        return torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])

    def on_the_edge(self, x, side):
        """Move points to the four sides."""
        axis, end = side % 2, side // 2
        x[torch.arange(len(x)), axis] = end.to(x.dtype)
        return x


class Burgers:
    """``u_t + u u_x = nu u_xx`` on -1 <= x <= 1, from ``u(0, x) = -sin(pi x)``."""

    viscosity = 0.05
    low, high, weights = (0.0, -1.0), (1.0, 1.0), (0.0, viscosity)

    def left_side(self, jet):
        u, u_t, u_x, bent = jet.unbind(1)
        return u_t + u * u_x - bent

    def right_side(self, x):
        return torch.zeros_like(x[:, 0])

    def solution(self, x):
        """Cole's and Hopf's integrals, by quadrature."""
        t, place = x[:, :1], x[:, 1:]
        nodes, weights = map(torch.from_numpy, np.polynomial.hermite.hermgauss(80))
        y = math.pi * (place - 2.0 * torch.sqrt(self.viscosity * t) * nodes)
        heat = weights * torch.exp(-torch.cos(y) / (2.0 * math.pi * self.viscosity))
        return -(torch.sin(y) * heat).sum(1) / heat.sum(1)

    def on_the_edge(self, x, side):
        """Move half of the points to the start in time, and half to both ends."""
        x[side < 2, 0] = 0.0
        x[side == 2, 1] = -1.0
        x[side == 3, 1] = 1.0
        return x


EQUATIONS = {"poisson": Poisson(), "burgers": Burgers()}


def drawn_points(equation, inside, outside, generator):
    """Return points, which of them are inside, and what is wanted there."""
    low = torch.tensor(equation.low, dtype=torch.float64)
    high = torch.tensor(equation.high, dtype=torch.float64)
    unit = torch.rand(inside + outside, 2, generator=generator, dtype=torch.float64)
    x = low + (high - low) * unit
    side = torch.arange(outside) % 4
    x[inside:] = equation.on_the_edge(x[inside:], side)
    is_inside = torch.arange(inside + outside) < inside
    wanted = torch.where(is_inside, equation.right_side(x), equation.solution(x))
    return x, is_inside, wanted


def relative_error(network, equation):
    """Return ``|u - u*| / |u*|`` on a grid."""
    axes = [
        torch.linspace(a, b, 52, dtype=torch.float64)[1:-1]
        for a, b in zip(equation.low, equation.high, strict=True)
    ]
    x = torch.cartesian_prod(*axes)
    with torch.no_grad():
        error = network(x)[:, 0] - equation.solution(x)
    return float(error.norm() / equation.solution(x).norm())


def optimizer_of(method, model, rate):
    """Return an optimizer; K-FAC and L-BFGS choose the length of their steps."""
    if method == "K-FAC":
        # One output in a row: the exact Fisher matrix takes one backward pass.
        return KFACOptimizer(
            model,
            likelihood="gaussian",
            fisher="exact",
            damping=1e-3,
            min_damping=1e-12,
        )
    if method == "L-BFGS":
        return torch.optim.LBFGS(
            model.parameters(), history_size=50, line_search_fn="strong_wolfe"
        )
    return torch.optim.Adam(model.parameters(), lr=rate)


def train(equation, method, rate, *, widths, points, seconds, steps):
    """Return steps, CPU seconds and errors while a network is trained."""
    torch.manual_seed(0)
    network = Jets(widths, equation.weights).double()
    model = Residuals(network, equation)
    optimizer = optimizer_of(method, model, rate)
    generator = torch.Generator().manual_seed(0)
    batch = drawn_points(equation, *points, generator)

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * model(*batch).square().mean()
        loss.backward()
        return loss

    spent, found = 0.0, []
    for step in itertools.count(1):
        if method == "Adam":
            # Fresh points at each step, which the others' models of a loss forbid.
            batch = drawn_points(equation, *points, generator)
        begun = time.process_time()
        optimizer.step(closure)
        spent += time.process_time() - begun
        done = spent > seconds or step == steps
        if done or step % (5 if method != "Adam" else 50) == 0:
            found.append((step, spent, relative_error(network, equation)))
        if done:
            return found


def run(name, *, widths, points, seconds, steps=None):
    """Train with each method, and print the errors; return the curves."""
    equation, curves = EQUATIONS[name], {}
    print(f"\n{name}: {type(equation).__doc__}")
    print(f"{'':8}{'rate':>8}{'steps':>8}{'seconds':>9}{'error':>10}")
    for method in ("K-FAC", "L-BFGS", "Adam"):
        rates = RATES if method == "Adam" else (None,)
        for rate in rates:
            limit = math.inf if steps is None else steps[method]
            options = {"widths": widths, "points": points, "steps": limit}
            curve = train(equation, method, rate, seconds=seconds, **options)
            step, spent, error = curve[-1]
            shown = "" if rate is None else f"{rate:g}"
            print(
                f"{method:8}{shown:>8}{step:>8}{spent:>9.1f}{error:>10.1e}", flush=True
            )
            best = curves.get(method)
            if best is None or error < best[-1][2]:
                curves[method] = curve
    return curves


def plot(curves, path):
    """Draw the errors against CPU time, an equation a panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = {**COLORS, "L-BFGS": OTHER_COLORS[0]}
    figure, axes = plt.subplots(
        1, len(curves), figsize=(4.5 * len(curves), 3.4), layout="constrained"
    )
    for axis, (name, methods) in zip(np.atleast_1d(axes), curves.items(), strict=True):
        for method, curve in methods.items():
            _, spent, error = zip(*curve, strict=True)
            axis.semilogy(spent, error, color=colors[method], label=method)
        axis.set(title=name, xlabel="CPU seconds", ylabel="relative error of u")
    np.atleast_1d(axes)[0].legend()
    figure.savefig(path, dpi=150)
    print(f"picture: {path}")


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "equations", nargs="*", help="poisson, burgers; both by default"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--quick", action="store_true", help="small, a few seconds")
    parser.add_argument("--output", help="write a picture here")
    given = parser.parse_args()
    unknown = set(given.equations) - set(EQUATIONS)
    if unknown:
        parser.error(f"there are {', '.join(EQUATIONS)}; got {', '.join(unknown)}")
    names = given.equations or list(EQUATIONS)
    options = {"widths": (2, 64, 64, 48, 1), "points": (600, 120)}
    options |= {"seconds": given.seconds}
    if given.quick:
        options = {"widths": (2, 24, 24, 1), "points": (150, 60), "seconds": math.inf}
        options["steps"] = {"K-FAC": 100, "L-BFGS": 10, "Adam": 400}
    curves = {name: run(name, **options) for name in names}
    if given.output:
        plot(curves, given.output)
    return curves


if __name__ == "__main__":
    main()
