"""The program of wave functions: local energies, directions against dense solves, a run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from ..builders.tolerances import assert_close  # noqa: E402

FOLDER = Path(__file__).parents[2] / "docs/examples"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the documentation is not here"
)


@pytest.fixture(scope="module")
def program():
    """The program as a module."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("wave_functions")
    sys.path.remove(str(FOLDER))


def positions(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class GroundState(nn.Module):
    """The trap's ground state, a determinant of powers."""

    def forward(self, x):
        _, log_determinant = torch.linalg.slogdet(torch.linalg.vander(x))
        return log_determinant - 0.5 * x.square().sum(1)

    def potential(self, x):
        return 0.5 * x.square().sum(1)


def test_local_energies_of_an_eigenstate_are_its_energy(program):
    x = 2.0 * positions(40, 5)
    energies = program.local_energies(GroundState(), x)
    torch.testing.assert_close(energies, torch.full_like(energies, 12.5))


def test_local_energies_of_a_product_of_hydrogen_orbitals(program):
    """Of ``exp(-2 |r_1| - 2 |r_2|)`` they are -4 and the electrons' repulsion."""

    class Product(program.Helium):
        def forward(self, x):
            return -2.0 * x.reshape(-1, 2, 3).norm(dim=2).sum(1)

    x = positions(40, 6)
    repulsion = 1.0 / (x[:, :3] - x[:, 3:]).norm(dim=1)
    energies = program.local_energies(Product(), x)
    torch.testing.assert_close(energies, repulsion - 4.0)


@pytest.mark.parametrize("name", ["trap", "helium"])
def test_images_of_reference_functions_are_those_by_autograd(program, name):
    """H phi over phi is the local energy of phi."""

    class Reference(nn.Module):
        potential = staticmethod(program.SYSTEMS[name]().potential)

        def forward(self, x):
            return program.SYSTEMS[name]().references(x)[0][:, self.term].abs().log()

    reference = Reference()
    x = positions(20, 5 if name == "trap" else 6)
    functions, images = program.SYSTEMS[name]().references(x)
    for reference.term in range(0, functions.shape[1], 7):
        energies = program.local_energies(reference, x)
        image = energies * functions[:, reference.term]
        torch.testing.assert_close(images[:, reference.term], image)


@pytest.mark.parametrize("name", ["trap", "helium"])
def test_exchanging_particles_leaves_the_density(program, name):
    torch.manual_seed(0)
    network = program.SYSTEMS[name]().double()
    x = positions(9, network.coordinates)
    particles = 5 if name == "trap" else 2
    exchanged = x.reshape(9, particles, -1).flip(1).reshape(x.shape)
    torch.testing.assert_close(network(exchanged), network(x))


def centered_jacobian(network, x):
    """Return the derivatives of log psi less their means, shape (N, P)."""
    parameters = dict(network.named_parameters())
    function = torch.func.jacrev(lambda p: torch.func.functional_call(network, p, (x,)))
    J = torch.cat(
        [D.detach().reshape(len(x), -1) for D in function(parameters).values()], 1
    )
    return J - J.mean(0)


def flat(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()]).clone()


@pytest.mark.parametrize("name", ["trap", "helium"])
def test_spring_and_the_gradient_equal_dense_solves(program, name):
    """Two steps, of which the second has momentum, and the gradient that Adam gets."""
    torch.manual_seed(0)
    network = program.SYSTEMS[name](width=6).double()
    trainer = program.Spring(network, 0.1)
    mu, phi = 0.95, 0.0
    walkers = program.Walkers(network, 30, seed=0)
    for _ in range(2):
        x = walkers.move(network, 50)
        energies = program.local_energies(network, x)
        J, before = centered_jacobian(network, x), flat(network)
        e = energies - energies.mean()
        trainer.step(network, x, energies)
        lam = 0.1 * 0.1 * e.square().mean().sqrt() + 1e-4
        F = J.T @ J / 30 + lam * torch.eye(J.shape[1]).to(J)
        phi = torch.linalg.solve(F, J.T @ e / 30 + lam * mu * phi)
        assert_close((before - flat(network)) / 0.1, phi, "trajectory", "float64")
    assert not trainer.optimizer.formed

    J = centered_jacobian(network, x)
    program.FirstOrder(network, 0.0).step(network, x, energies)
    gradient = torch.cat([p.grad.flatten() for p in network.parameters()])
    torch.testing.assert_close(gradient, 2.0 * J.T @ e / 30)


def test_spring_reaches_the_ground_state(program):
    """In forty steps from a random network, and not below it."""
    network, _ = program.train("trap", "SPRING", 0.3, seed=0, steps=40, walkers=128)
    energy, error, variance = program.measured(network, walkers=128, blocks=8)
    assert 12.5 - 6.0 * error < energy < 12.7
    assert variance < 0.6


@pytest.mark.parametrize("method", ["K-FAC", "Adam"])
def test_other_methods_lower_the_energy(program, method):
    rate = {"K-FAC": 0.03, "Adam": 0.01}[method]
    options = {"seed": 0, "walkers": 128}
    start, _ = program.train("trap", method, rate, steps=1, **options)
    network, _ = program.train("trap", method, rate, steps=15, **options)
    before, _, _ = program.measured(start, walkers=128, blocks=8)
    after, error, _ = program.measured(network, walkers=128, blocks=8)
    assert 12.5 - 6.0 * error < after < before


def test_near_an_eigenstate_a_step_is_linear_in_the_local_energies():
    """Energies have no spread there, and the damping must not vanish."""
    from kfac_core_shims.torch import GaussNewton

    x, energies = positions(30, 2), positions(30, seed=1)
    changes = []
    for scale in (1e-7, 1e-9):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        before = torch.cat([p.detach().flatten() for p in net.parameters()])
        optimizer = GaussNewton(net, centered=True)
        optimizer.step(lambda net=net, scale=scale: (net(x)[:, 0], scale * energies))
        after = torch.cat([p.detach().flatten() for p in net.parameters()])
        changes.append((after - before) / scale)
    torch.testing.assert_close(changes[1], changes[0], rtol=1e-3, atol=1e-4)
