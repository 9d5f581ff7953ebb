"""Ground states by networks: SPRING, K-FAC and Adam at equal CPU seconds.

A network gives log |psi| of the positions of some particles.  Positions are drawn from
psi^2 by the Metropolis algorithm, and the mean of the local energies

    E(x) = V(x) - 1/2 sum_i (d^2 log psi / dx_i^2 + (d log psi / dx_i)^2)

is minimized.  Where psi is the ground state, E(x) is the same everywhere, so that the
variance of the local energy says how near it is.  There are fermions in a one-dimensional
harmonic trap, whose energy is half the square of their number, and helium, at -2.9037.
Energies are measured with control variates: for any phi the mean of

    (phi E - H phi) / psi

is zero, and near the ground state combinations of it cancel most of the noise of E.

    python docs/examples/wave_functions.py helium --seconds 3.3 10 20 --seeds 3
"""

import argparse
import itertools
import math
import time

import torch
from torch import nn

from kfac_core import KFACError
from kfac_core_shims.torch import KFAC, GaussNewton

RATES = {
    "SPRING": (0.3,),
    "K-FAC": (0.1, 0.3, 1.0, 3.0, 10.0),
    "Adam": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
}


class Trap(nn.Module):
    """Fermions of one spin in a harmonic trap, psi = det phi_j(x_i; all x) exp(-x^2 / 2).

    Each layer sees a particle and the mean over all, so that exchanging two particles
    exchanges two rows of the determinant.
    """

    def __init__(self, particles=5, width=32):
        super().__init__()
        self.coordinates, self.energy = particles, particles**2 / 2
        self.first = nn.Linear(2, width)
        self.second = nn.Linear(2 * width, width)
        self.orbitals = nn.Linear(width, particles)

    def forward(self, x):
        """Return log |psi|, shape (N,), of positions, shape (N, particles)."""
        h = torch.tanh(self.first(with_mean(x[:, :, None])))
        h = h + torch.tanh(self.second(with_mean(h)))
        _, log_determinant = torch.linalg.slogdet(self.orbitals(h))
        return log_determinant - 0.5 * x.square().sum(1)

    def potential(self, x):
        return 0.5 * x.square().sum(1)

    def references(self, x):
        """Return |phi| and H phi of the ground state, shapes (N, 1)."""
        phi = torch.linalg.vander(x).det().abs() * torch.exp(-0.5 * x.square().sum(1))
        return phi[:, None], self.energy * phi[:, None]


class Helium(nn.Module):
    """Two electrons of opposite spins, psi = sum_k phi_k(r_1, r_2) phi_k(r_2, r_1).

    As in the FermiNet (Pfau et al. 2020, arXiv:1909.02487) a layer sees an electron, the
    mean over both and their distance, and orbitals fall off exponentially.
    """

    coordinates, energy = 6, -2.903724

    def __init__(self, orbitals=4, width=32):
        super().__init__()
        self.first = nn.Linear(9, width)
        self.second = nn.Linear(2 * width + 1, width)
        self.orbitals = nn.Linear(width, orbitals)
        self.decay = nn.Linear(1, orbitals, bias=False)
        with torch.no_grad():
            self.decay.weight.fill_(2.0)
            self.orbitals.bias.fill_(1.0)

    def forward(self, x):
        """Return log |psi|, shape (N,), of positions, shape (N, 6)."""
        r = x.reshape(-1, 2, 3)
        length = r.norm(dim=2, keepdim=True)
        apart = (r[:, :1] - r[:, 1:]).norm(dim=2, keepdim=True).expand_as(length)
        features = with_mean(torch.cat([r, length], dim=2))
        h = torch.tanh(self.first(torch.cat([features, apart], dim=2)))
        h = h + torch.tanh(self.second(torch.cat([with_mean(h), apart], dim=2)))
        orbitals = self.orbitals(h) * torch.exp(-self.decay(length))
        return orbitals.prod(dim=1).sum(dim=1).abs().log()

    def potential(self, x):
        r = x.reshape(-1, 2, 3)
        apart = (r[:, 0] - r[:, 1]).norm(dim=1)
        return 1.0 / apart - (2.0 / r.norm(dim=2)).sum(dim=1)

    def references(self, x, decay=2.2):
        """Return Hylleraas's functions phi and H phi, shapes (N, K).

        They are ``s^k t^m u^n exp(-decay s)``, some times log s (Fock), with s and t the
        sum and the difference of the distances to the nucleus, u that of the electrons.
        """
        r = x.reshape(-1, 2, 3)
        length, u = r.norm(dim=2), (r[:, 0] - r[:, 1]).norm(dim=1)
        s, t, V = length.sum(1), length[:, 1] - length[:, 0], self.potential(x)
        mixed_s, mixed_t = s * (u**2 - t**2) / u, t * (s**2 - u**2) / u
        functions, images = [], []
        for k, m, n, log in TERMS:
            a = s**k * (s.log() if log else 1.0)
            a_s = (k * a + log * s**k) / s
            a_ss = (k * (k - 1) * a + log * (2 * k - 1) * s**k) / s**2
            a_s, a_ss = a_s - decay * a, a_ss - 2.0 * decay * a_s + decay**2 * a
            b, b_t, b_tt = t**m, m * t ** (m - 1), m * (m - 1) * t ** (m - 2)
            c, c_u, c_uu = u**n, n * u ** (n - 1), n * (n - 1) * u ** (n - 2)
            second = a_ss * b * c + a * b_tt * c + a * b * (c_uu + 2.0 * c_u / u)
            across = (mixed_s * a_s * b + mixed_t * a * b_t) * c_u
            across = across + 2.0 * (s * a_s * b - t * a * b_t) * c
            functions.append(a * b * c)
            kinetic = -second - 2.0 * across / (s**2 - t**2)
            images.append(kinetic + V * functions[-1])
        envelope = torch.exp(-decay * s)[:, None]
        return torch.stack(functions, 1) * envelope, torch.stack(images, 1) * envelope


def is_term(k, m, n, log):
    """Whether a function is one of Hylleraas's, or one for what they cannot follow."""
    total = k + m + n
    if log:
        return k >= 0 and 2 <= total <= 4
    return total <= 7 if k >= 0 else 2 <= total <= 5


POWERS = itertools.product(range(-2, 8), range(0, 8, 2), range(8), (0, 1))
TERMS = [powers for powers in POWERS if is_term(*powers)]
"""Powers of s, t and u, and whether with log s."""


def with_mean(h):
    """Append the mean over particles to the features of each, shape (N, particles, n)."""
    return torch.cat([h, h.mean(dim=1, keepdim=True).expand_as(h)], dim=2)


SYSTEMS = {"trap": Trap, "helium": Helium}


def local_energies(network, x):
    """Return E(x), shape (N,), with the derivatives of log psi by autograd."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
    kinetic = -0.5 * slope.square().sum(1)
    for i in range(x.shape[1]):
        (bend,) = torch.autograd.grad(slope[:, i].sum(), x, retain_graph=True)
        kinetic = kinetic - 0.5 * bend[:, i]
    return (kinetic + network.potential(x)).detach()


class Walkers:
    """Positions that follow psi^2 by Metropolis steps of all particles at once."""

    def __init__(self, network, count, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.positions = self.normal(count, network.coordinates)
        self.length = 0.5

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    @torch.no_grad()
    def move(self, network, steps=10):
        """Take steps, with a length of which about half are accepted; return positions."""
        x, accepted = self.positions, 0.0
        log_psi = network(x)
        for _ in range(steps):
            trial = x + self.length * self.normal(*x.shape)
            log_trial = network(trial)
            unit = torch.rand(len(x), generator=self.generator, dtype=torch.float64)
            moves = unit.log() < 2.0 * (log_trial - log_psi)
            x = torch.where(moves[:, None], trial, x)
            log_psi = torch.where(moves, log_trial, log_psi)
            accepted += float(moves.double().mean()) / steps
        self.length *= 1.1 if accepted > 0.5 else 0.9
        self.positions = x
        return x


class Spring:
    """SPRING: `GaussNewton` on centered rows."""

    def __init__(self, network, rate):
        self.optimizer = GaussNewton(network, centered=True, lr=rate)

    def step(self, network, x, energies):
        self.optimizer.step(lambda: (network(x), energies))


class FirstOrder:
    """Adam, on the gradient of the energy, ``2 mean((E - mean E) d log psi)``."""

    def __init__(self, network, rate):
        self.optimizer = torch.optim.Adam(network.parameters(), lr=rate)

    def step(self, network, x, energies):
        self.optimizer.zero_grad()
        log_psi = network(x)
        self.observe(log_psi)
        (2.0 * (energies - energies.mean()) * log_psi).mean().backward()
        self.optimizer.step()

    def observe(self, log_psi):
        pass


class Preconditioned(FirstOrder):
    """SGD behind K-FAC: the Fisher matrix of psi^2 is that of rows of log psi."""

    def __init__(self, network, rate):
        self.optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)
        self.kfac = KFAC(
            network,
            lr=self.optimizer,
            likelihood="gaussian",
            fisher="exact",
            output=None,
            refresh_every=1,
        )
        self.optimizer.register_step_pre_hook(lambda *_: self.kfac.step())

    def observe(self, log_psi):
        self.kfac.observe(log_psi[:, None])


METHODS = {"SPRING": Spring, "K-FAC": Preconditioned, "Adam": FirstOrder}


def train(name, method, rate, *, seed, seconds=math.inf, steps=math.inf, walkers=512):
    """Train for CPU seconds or steps; return the network and the number of steps.

    The rate falls to zero over the run, as a cosine, for each method.
    """
    torch.manual_seed(seed)
    network = SYSTEMS[name]().double()
    sampler = Walkers(network, walkers, seed)
    sampler.move(network, 200)
    begun = time.process_time()
    trainer = METHODS[method](network, rate)
    [group] = trainer.optimizer.param_groups
    for step in itertools.count():
        spent = time.process_time() - begun
        share = step / steps if math.isfinite(steps) else spent / seconds
        if share >= 1.0:
            return network, step
        group["lr"] = 0.5 * rate * (1.0 + math.cos(math.pi * share))
        x = sampler.move(network)
        trainer.step(network, x, local_energies(network, x))


def measured(network, *, seed=1000, walkers=1024, blocks=64):
    """Return the mean of the local energy, its standard error, and the variance.

    A third of the blocks chooses what combination of control variates is taken off.  The
    error is that of means over the others, since successive positions are correlated.
    """
    sampler = Walkers(network, walkers, seed)
    sampler.move(network, 200)
    energies, controls = [], []
    for _ in range(blocks):
        for _ in range(3):
            x = sampler.move(network)
        E = local_energies(network, x)
        with torch.no_grad():
            phi, image = network.references(x)
            # |psi| serves, where psi and phi change their signs at the same places.
            controls.append((phi * E[:, None] - image) / network(x).exp()[:, None])
        energies.append(E)
    first = blocks // 3
    noise, scale = torch.cat(controls[:first]), controls[0].std(0)
    columns = torch.cat([torch.ones_like(noise[:, :1]), noise / scale], 1)
    levels = torch.cat(energies[:first])[:, None]
    fit = torch.linalg.lstsq(columns, levels, rcond=1e-9, driver="gelsd").solution
    c = fit[1:, 0] / scale
    rest = zip(energies[first:], controls[first:], strict=True)
    means = torch.stack([(E - control @ c).mean() for E, control in rest])
    error = float(means.std()) / math.sqrt(len(means))
    return float(means.mean()), error, float(torch.cat(energies).var())


def run(name, method, rate, seed, **limit):
    """Train and measure; return the energy above the exact one, its error, the variance."""
    try:
        network, steps = train(name, method, rate, seed=seed, **limit)
    except (KFACError, RuntimeError) as problem:  # The numbers left their range.
        print(f"{name:8}{method:8}{rate:<8g}seed {seed}  {problem}", flush=True)
        return math.inf, math.inf, math.inf
    energy, error, variance = measured(network)
    above = energy - network.energy
    if not math.isfinite(above):
        above = variance = math.inf
    print(
        f"{name:8}{method:8}{rate:<8g}seed {seed}  {steps:5} steps  energy + {above:.2e} "
        f"({error:.0e})  variance {variance:.2e}",
        flush=True,
    )
    return above, error, variance


def compare(name, seeds, **limit):
    """Run each method with the rate of least variance for the first seed; print a table.

    Return what each method's runs came to, an array of shape (seeds, 3).
    """
    rows = [
        "| method | rate | energy above the exact one | variance |",
        "| --- " * 4 + "|",
    ]
    reached = {}
    for method, rates in RATES.items():
        first = {rate: run(name, method, rate, 0, **limit) for rate in rates}
        rate = min(rates, key=lambda rate: first[rate][2])
        runs = [first[rate]]
        runs += [run(name, method, rate, seed, **limit) for seed in range(1, seeds)]
        reached[method] = torch.tensor(runs)
        above, error, variance = (f"{x:.1e}" for x in reached[method].quantile(0.5, 0))
        low, high = (f"{x:.1e}" for x in reached[method][:, 2].aminmax())
        rows.append(
            f"| {method} | {rate:g} | {above} +- {error} | {variance} ({low} to {high}) |"
        )
    print("\n" + "\n".join(rows) + "\n")
    return reached


def draw(reached, path):
    """Draw what `compare` returned for each number of seconds, with bars of the seeds."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8.0, 3.2), layout="constrained")
    titles = "error of the energy", "variance of the local energy"
    for axes, title, column in zip(panels, titles, (0, 2), strict=True):
        for method, marker in zip(METHODS, "osD", strict=True):
            runs = torch.stack([by_method[method] for by_method in reached.values()])
            # No error is known better than its standard error.
            values = torch.maximum(runs[:, :, column], runs[:, :, 1])
            low, middle, high = values.quantile(torch.tensor([0.0, 0.5, 1.0]), 1)
            bars = torch.stack([middle - low, high - middle])
            axes.errorbar(list(reached), middle, bars, marker=marker, label=method)
        axes.set(title=title, xlabel="CPU seconds", xscale="log", yscale="log")
        axes.set_xticks(list(reached), [f"{seconds:g}" for seconds in reached])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("systems", nargs="*", choices=[[], *SYSTEMS], default=[])
    parser.add_argument("--seconds", type=float, nargs="+", default=[10.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", help="file for a picture of the last system")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.systems or SYSTEMS:
        print(name, flush=True)
        reached = {s: compare(name, options.seeds, seconds=s) for s in options.seconds}
    if options.picture:
        draw(reached, options.picture)


if __name__ == "__main__":
    main()
