"""Random programs of layers, activations and derivatives: rows right, or refused."""

import random

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core.samples import sample_gram  # noqa: E402
from kfac_core_shims.torch.jacobians import JacobianFinder  # noqa: E402

from ..builders import torch_residuals, torch_zoo  # noqa: E402
from ..builders.tolerances import relative_error  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")

ACTIVATIONS = torch.tanh, torch.sin, nn.functional.silu, nn.functional.softplus
N = 4


class Network(nn.Module):
    """A random network of one to four layers, which may use one of them again."""

    def __init__(self, rng, inputs, outputs):
        super().__init__()
        width = rng.choice([2, 3, 5])
        depth = rng.randint(0, 3)
        sizes = [inputs] + [width] * depth
        bias = rng.choice([True, True, False])
        self.hidden = nn.ModuleList(nn.Linear(n, width, bias=bias) for n in sizes[:-1])
        self.last = nn.Linear(sizes[-1], outputs, bias=rng.random() < 0.7)
        self.norm = nn.LayerNorm(width) if depth and rng.random() < 0.15 else None
        self.mixing = nn.BatchNorm1d(width) if depth and rng.random() < 0.1 else None
        self.scale = nn.Parameter(torch.ones(1)) if rng.random() < 0.15 else None
        self.tied = depth > 1 and rng.random() < 0.25
        self.skip = rng.random() < 0.3
        self.by_function = rng.random() < 0.15
        self.fused = rng.random() < 0.15
        self.activation = rng.choice(ACTIVATIONS)

    def call(self, layer, x):
        if self.by_function:
            return nn.functional.linear(x, layer.weight, layer.bias)
        if self.fused and layer.bias is not None:
            return x @ layer.weight.T + layer.bias
        return layer(x)

    def forward(self, x):
        for i, layer in enumerate(self.hidden):
            h = self.activation(self.call(layer, x))
            if i and self.tied:
                h = self.activation(self.call(self.hidden[1], h))
            x = x + h if self.skip and x.shape == h.shape else h
        if self.norm is not None:
            x = self.norm(x)
        if self.mixing is not None and x.ndim == 2:
            x = self.mixing(x)
        y = self.call(self.last, x)
        return y if self.scale is None else y * self.scale


FORMS = (
    torch_residuals.value,
    torch_residuals.slopes,
    torch_residuals.laplacian,
    torch_residuals.laplacian,
    torch_residuals.biharmonic,
    torch_residuals.length_of_slope,
    torch_residuals.mixed_vector,
    torch_residuals.product,
    torch_residuals.directional,
    torch_residuals.twice_directional,
    torch_residuals.pulled_back,
    torch_residuals.by_hessian,
    torch_residuals.of_shifted_points,
    torch_residuals.of_other_examples,
    torch_residuals.mean_over_points,
)


def program(seed):
    """Return a network and terms of residuals of it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dimensions = rng.choice([1, 2, 3])
    net = Network(rng, dimensions, rng.choice([1, 1, 2])).double()
    if rng.random() < 0.1:
        next(net.parameters()).requires_grad_(False)
    forms = [rng.choice(FORMS) for _ in range(rng.choice([1, 1, 2, 3]))]
    points = [
        torch.rand(N + i, dimensions, dtype=torch.float64).requires_grad_()
        for i in range(len(forms))
    ]
    return net, lambda: [f(net, x) for f, x in zip(forms, points, strict=True)], forms


def outcome(seed):
    """Compare K with that of autograd; return why parameters were formed."""
    net, residuals, forms = program(seed)
    if not any(p.requires_grad for p in net.parameters()):
        return "no program"
    finder = JacobianFinder(net)
    finder.wants_statistics = True
    try:
        terms = [r if r.ndim == 2 else r[:, None] for r in residuals()]
    except RuntimeError as error:
        # Of straight lines no second derivatives can be asked for, and functional
        # derivatives refuse batch norm in training.
        if "does not require grad" in str(error) or "in-place" in str(error):
            return "no program"
        raise
    if not all(term.requires_grad for term in terms):
        return "no program"
    scales = [1.0 + i for i in range(len(terms))]
    try:
        K = sample_gram(finder.jacobian(terms, scales)).full()
    except kc.KFACError as error:
        return f"refused: {error}"
    r = torch.cat([(t * s).flatten() for t, s in zip(terms, scales, strict=True)])
    parameters = [p for p in net.parameters() if p.requires_grad]
    J = torch.stack([torch_zoo.gradient_of(one, parameters) for one in r])
    if float(J.norm()) < 1e-9:
        # As slopes of a batch norm's sum: what is left is roundoff.
        return "no program"
    error = relative_error(K.numpy(), (J @ J.T).numpy())
    assert error < 1e-11, (error, [form.__name__ for form in forms], net)
    return " / ".join(sorted(set(finder.formed.values()))) or "by rows"


@pytest.mark.parametrize("seed", range(40))
def test_the_gram_matrix_of_a_random_program_is_right_or_refused(seed):
    outcome(seed)


def test_most_random_programs_are_taken_by_rows():
    found = [outcome(seed) for seed in range(40, 60)]

    assert found.count("by rows") > 10
