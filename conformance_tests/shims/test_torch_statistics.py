"""Statistics without a step, several draws, tokens, and tied layers with some biases."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import KFAC  # noqa: E402

from ..builders.torch_rows import root_of_hessian  # noqa: E402

EXACT = {"likelihood": "categorical", "fisher": "exact", "decay": 1.0, "kl_clip": None}


pytestmark = pytest.mark.usefixtures("torch_float64")


class Tied(torch.nn.Module):
    """Two linear layers with one weight, of which one has a bias."""

    def __init__(self, *, biased):
        super().__init__()
        layers = [torch.nn.Linear(4, 4, bias=has) for has in biased]
        layers[1].weight = layers[0].weight
        self.first, self.second = layers
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Functional(torch.nn.Module):
    """The same by `F.linear`, once with the bias and once without."""

    def __init__(self):
        super().__init__()
        self.first, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = torch.tanh(torch.nn.functional.linear(x, self.first.weight))
        return self.head(x)


def output_gradients(outputs, z):
    """Return the gradients at a layer's outputs, one for each token and column of z."""
    B = torch.stack([root_of_hessian(row) for row in z.reshape(-1, z.shape[-1])])
    rows, P = B.shape[:2]
    T = rows // len(z)
    found = []
    for t in range(T):
        for c in range(P):
            v = torch.zeros(len(z), T, P)
            v[:, t] = B.reshape(len(z), T, P, P)[:, t, :, c]
            v = v.reshape(z.shape)
            (g,) = torch.autograd.grad(z, outputs, v, retain_graph=True)
            found.append(g.detach())
    return torch.stack(found)


def seen_outputs(module, call):
    """Return the inputs and outputs of each call of a module."""
    seen = []
    hook = module.register_forward_hook(lambda m, a, y: seen.append((a[0], y)))
    result = call()
    hook.remove()
    return result, seen


def factors_of(kfac, name):
    averages = kfac.estimator.state[name].statistics.averages
    return [averages[s].value(debias=True).full().numpy() for s in ("input", "output")]


def test_a_data_set_in_parts_has_the_statistics_of_all_its_rows():
    """Batches of 4, 4 and 2, without a step: no gradient, count or parameter changes."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    )
    x = torch.randn(10, 4)
    before = [p.detach().clone() for p in model.parameters()]
    kfac = KFAC(model, update_every=7, **EXACT)
    kfac.update(model(part) for part in x.split(4))
    assert kfac.steps == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)
    )

    z, [(h, y)] = seen_outputs(model[2], lambda: model(x))
    g = output_gradients(y, z)
    ones = torch.cat([h, torch.ones(10, 1)], 1).detach()
    A, G = factors_of(kfac, "2")
    np.testing.assert_allclose(A, (ones.T @ ones / 10).numpy(), rtol=1e-12)
    np.testing.assert_allclose(G, torch.einsum("mni,mnj->ij", g, g) / 10, rtol=1e-12)

    # One batch after the other, of one size, with decay 1; and passes of a backward pass.
    other = KFAC(model, **EXACT)
    for part in x[:8].split(4):
        torch.nn.functional.cross_entropy(
            model(part), torch.zeros(4, dtype=int)
        ).backward()
        other.update()
    A, _ = factors_of(other, "2")
    ones = ones[:8]
    np.testing.assert_allclose(A, (ones.T @ ones / 8).numpy(), rtol=1e-12)
    other.estimator.refresh()
    operator = other.estimator.operator("2")
    assert operator.vector_shape == (6, 3)


def test_empirical_statistics_use_the_losses_of_the_loop():
    """The loop clears, differentiates and gives None; outputs are refused by name."""
    model = torch.nn.Linear(4, 3)
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    kfac = KFAC(model, likelihood="categorical", fisher="empirical", decay=1.0)

    def passes():
        for rows in (slice(0, 4), slice(4, 6)):
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            yield

    kfac.update(passes())
    g = torch.softmax(model(x), -1) - torch.nn.functional.one_hot(y, 3)
    _, G = factors_of(kfac, "")
    np.testing.assert_allclose(G, (g.T @ g / 6).detach().numpy(), rtol=1e-12)
    with pytest.raises(kc.ConventionError, match="give None"):
        kfac.update(model(x))
    with pytest.raises(kc.NotReadyError, match="No outputs"):
        kfac.update()


def test_updates_of_ekfac_are_in_its_bases():
    """Of squared errors, where the block is exactly ``A (x) I`` in every basis.

    Second moments of an update were taken in the coordinates.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    x, y = torch.randn(12, 4), torch.randn(12, 3)
    kfac = KFAC(
        model,
        likelihood="gaussian",
        fisher="exact",
        approximations={"0": kc.EKFAC()},
        damping_rule="exact",
        damping=0.1,
        update_every=5,
        refresh_every=1,
        kl_clip=None,
    )

    def direction():
        """Return the gradient, and the direction of a step."""
        model.zero_grad()
        loss = 0.5 * ((model(x) - y) ** 2).sum(-1).mean()
        loss.backward()
        gradient = model[0].weight.grad.clone(), model[0].bias.grad.clone()
        kfac.step()
        found = model[0].weight.grad, model[0].bias.grad
        return [np.column_stack([W.numpy(), b.numpy()]).T for W, b in (gradient, found)]

    direction()
    kfac.update(model(x))
    V, found = direction()

    X = np.column_stack([x.numpy(), np.ones(12)])
    F = np.kron(X.T @ X / 12, np.eye(3)) + 0.1 * np.eye(15)
    expected = np.linalg.solve(F, V.ravel()).reshape(5, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_several_draws_are_as_many_sources_of_one_pass():
    """Their mean comes nearer to the sum over labels, and no two updates draw alike."""
    model = torch.nn.Linear(4, 3)
    x = torch.randn(6, 4)
    exact = KFAC(model, **EXACT)
    exact.update(model(x))
    _, expected = factors_of(exact, "")

    def drawn(samples, times=1):
        kfac = KFAC(model, likelihood="categorical", samples=samples, decay=1.0)
        found = []
        for _ in range(times):
            kfac.estimator.reset("")
            kfac.update(model(x))
            found.append(factors_of(kfac, "")[1])
        return found

    one, many = drawn(1)[0], drawn(2000)[0]
    off = np.abs(many - expected).max() / np.abs(expected).max()
    assert off < 0.1
    assert np.abs(one - expected).max() / np.abs(expected).max() > off
    first, second = drawn(1, times=2)
    assert not np.allclose(first, second)
    with pytest.raises(kc.ConventionError, match="`samples` must be 1"):
        KFAC(model, samples=2, **EXACT).update(model(x))


@pytest.mark.parametrize("kind", ["first", "second", "functional"])
def test_tied_layers_of_which_some_have_a_bias_are_one_block(kind):
    """A use without the bias has the coordinate 0; nothing is left alone."""
    if kind == "functional":
        model = Functional()
        b = model.first.bias
    else:
        model = Tied(biased=(kind == "first", kind == "second"))
        b = (model.first if kind == "first" else model.second).bias
    W = model.first.weight
    kfac = KFAC(model, **EXACT)
    assert kfac.skipped == {}
    x = torch.randn(7, 4)
    kfac.update(model(x))

    has = (kind != "second", kind == "second")
    u1 = torch.nn.functional.linear(x, W, b if has[0] else None)
    h = torch.tanh(u1)
    u2 = torch.nn.functional.linear(h, W, b if has[1] else None)
    z = model.head(torch.tanh(u2))
    ones = torch.ones(7, 1)
    rows = torch.cat(
        [torch.cat([x, ones * has[0]], 1), torch.cat([h, ones * has[1]], 1)]
    ).detach()
    A, G = factors_of(kfac, "first")
    np.testing.assert_allclose(A, (rows.T @ rows / 14).numpy(), rtol=1e-12, atol=1e-15)
    g = torch.cat([output_gradients(u, z) for u in (u1, u2)], 1)
    expected = torch.einsum("mni,mnj->ij", g, g) / 7
    np.testing.assert_allclose(G, expected.numpy(), rtol=1e-11, atol=1e-15)
    assert kfac.estimator.blocks["first"].layer.bias

    # A step writes both gradients.
    torch.nn.functional.cross_entropy(model(x), torch.zeros(7, dtype=int)).backward()
    plain = [W.grad.clone(), b.grad.clone()]
    kfac.step()
    assert not any(
        torch.allclose(p, q.grad) for p, q in zip(plain, (W, b), strict=True)
    )


def test_parts_with_unlike_rows_for_each_example_are_named():
    """Sequences of two lengths: each part's statistics are a mean over its own rows."""
    model = torch.nn.Linear(3, 4)
    kfac = KFAC(model, likelihood="categorical", fisher="exact", decay=1.0)
    with pytest.warns(UserWarning, match="from 2 to 5.*over examples"):
        kfac.update(model(torch.randn(6, n, 3)) for n in (2, 5))

    kfac = KFAC(model, likelihood="categorical", fisher="exact", decay=1.0)
    parts = [torch.randn(6, 2, 3), torch.randn(6, 5, 3)]
    for x in parts:
        kfac.observe(model(x))
    kfac.update()
    rows = torch.cat([x.reshape(-1, 3) for x in parts])
    p = torch.softmax(model(rows).detach(), -1)
    G = (torch.diag(p.sum(0)) - p.T @ p) / len(p)
    _, found, scale = kfac.factors("")
    torch.testing.assert_close(scale * found, G)
