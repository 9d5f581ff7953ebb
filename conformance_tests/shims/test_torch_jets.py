"""`GaussNewton` on plain autograd against jets of Taylor coefficients, written by hand."""

import pytest

torch = pytest.importorskip("torch")
shim = pytest.importorskip("kfac_core_shims.torch")
nn = torch.nn


class Jets(nn.Module):
    """Value, slopes and Laplacian of a tanh network; biases are in the weights."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList()
        for layer in layers:
            n, m = layer.in_features, layer.out_features
            jet = nn.Linear(n + 1, m, bias=False, dtype=torch.float64)
            with torch.no_grad():
                jet.weight.copy_(torch.cat([layer.weight, layer.bias[:, None]], dim=1))
            self.layers.append(jet)

    def forward(self, x):
        N, d = x.shape
        jet, one = x.new_zeros(N, d + 2, d), x.new_zeros(N, d + 2, 1)
        jet[:, 0], jet[:, 1:-1], one[:, 0] = x, torch.eye(d), 1.0
        for i, layer in enumerate(self.layers):
            if i > 0:
                u = torch.tanh(jet[:, :1])
                slope, first = 1.0 - u * u, jet[:, 1:-1]
                bend = -2.0 * u * first.square().sum(1, keepdim=True)
                jet = torch.cat([u, slope * first, slope * (jet[:, -1:] + bend)], dim=1)
            jet = layer(torch.cat([jet, one], dim=-1))
        return jet[:, -1, 0]


def test_the_first_direction_is_that_of_jets_by_hand():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    ).double()
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    jets = Jets(layers)
    x = torch.rand(40, 2, dtype=torch.float64).requires_grad_()

    def by_autograd():
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        second = [
            torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i]
            for i in (0, 1)
        ]
        return second[0] + second[1] + 1.0

    def moved(model, linears, residuals):
        """Return the first direction; a bias is the last column of a jet's weight."""

        def numbers():
            parts = [
                layer.weight
                if layer.bias is None
                else torch.cat([layer.weight, layer.bias[:, None]], dim=1)
                for layer in linears
            ]
            return torch.cat([part.detach().flatten() for part in parts])

        before = numbers()
        optimizer = shim.GaussNewton(model, lr=1.0, damping=1e-4, momentum=0.0)
        optimizer.step(residuals)
        assert optimizer.formed == {}
        return before - numbers()

    expected = moved(jets, jets.layers, lambda: jets(x.detach()) + 1.0)
    direction = moved(net, layers, by_autograd)

    assert float((direction - expected).norm()) < 1e-8 * float(expected.norm())
