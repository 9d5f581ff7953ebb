"""The example of physics-informed networks: its jets, its solutions, and a short run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "docs/examples/training"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the documentation is not here"
)


@pytest.fixture(scope="module")
def pinn():
    """The program as a module."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("torch_pinn")
    sys.path.remove(str(FOLDER))


def derivatives(function, x, weights):
    """Return value, gradient and weighted second derivatives, by going back twice."""
    x = x.clone().requires_grad_()
    u = function(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    bent = 0.0
    for k, weight in enumerate(weights):
        (second,) = torch.autograd.grad(first[:, k].sum(), x, retain_graph=True)
        bent = bent + weight * second[:, k]
    return torch.cat([u[:, None], first, bent[:, None]], 1).detach()


def inner_points(equation, n=7):
    unit = 0.2 + 0.6 * torch.rand(n, 2, dtype=torch.float64)
    low, high = (
        torch.tensor(e, dtype=torch.float64) for e in (equation.low, equation.high)
    )
    return low + (high - low) * unit


@pytest.mark.parametrize("name", ["poisson", "burgers"])
def test_jets_are_derivatives(pinn, name):
    """Of a network with biases; a weight is used at all positions of a jet."""
    torch.manual_seed(0)
    equation = pinn.EQUATIONS[name]
    network = pinn.Jets((2, 5, 4, 1), equation.weights).double()
    with torch.no_grad():
        for layer in network.layers:
            layer.weight.normal_()
    x = inner_points(equation)

    expected = derivatives(lambda p: network(p)[:, 0], x, equation.weights)
    torch.testing.assert_close(network(x), expected)


@pytest.mark.parametrize("name", ["poisson", "burgers"])
def test_solutions_solve(pinn, name):
    """The solution's derivatives fit the equation, and its values the edge."""
    torch.manual_seed(0)
    equation = pinn.EQUATIONS[name]
    x = inner_points(equation)

    jet = derivatives(equation.solution, x, equation.weights)
    torch.testing.assert_close(
        equation.left_side(jet), equation.right_side(x), rtol=1e-8, atol=1e-8
    )
    edge = equation.on_the_edge(inner_points(equation, 8), torch.arange(8) % 4)
    if name == "poisson":
        expected = torch.zeros(8, dtype=torch.float64)
    else:
        at_start = edge[:, 0] == 0.0
        expected = torch.where(at_start, -torch.sin(torch.pi * edge[:, 1]), 0.0)
    torch.testing.assert_close(equation.solution(edge), expected, rtol=0.0, atol=1e-9)
