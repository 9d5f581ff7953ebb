"""Accumulated passes, and losses differentiated in parts, have statistics of all rows."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import KFAC  # noqa: E402

cross_entropy = torch.nn.functional.cross_entropy

LAYERS = {"0": 0, "2": 2}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def tokens():
    return torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    )


def dense_factors(model, x, y, likelihood_rows):
    """Return A and G of both linear layers, of gradients of each row's cross-entropy."""
    h = torch.tanh(model[0](x))
    outputs = model[0](x), model[2](h)
    inputs = x, h
    found = {}
    for name, out, into in zip(LAYERS, outputs, inputs, strict=True):
        out = out.detach().requires_grad_()
        z = model[2](torch.tanh(out)) if name == "0" else out
        total = cross_entropy(z.flatten(0, -2), y.flatten(), reduction="sum")
        (g,) = torch.autograd.grad(total, out)
        rows = into.detach().flatten(0, -2)
        ones = torch.cat([rows, torch.ones(len(rows), 1)], 1)
        g = g.flatten(0, -2)
        # The block is S A (x) G with S rows an example: G is of the mean over rows.
        share = len(x) / likelihood_rows
        found[name] = (
            (ones.T @ ones / len(rows)).numpy(),
            (share * g.T @ g / len(rows)).numpy(),
        )
    return found


def factors_of(kfac, name):
    averages = kfac.estimator.state[name].statistics.averages
    return [averages[s].value(debias=True).full().numpy() for s in ("input", "output")]


@pytest.mark.parametrize("parts", [[8], [5, 3], [2, 6]])
def test_accumulated_batches_are_one(parts):
    """Passes of any sizes have the statistics of all rows."""
    model = tokens()
    x, y = torch.randn(8, 6, 4), torch.randint(3, (8, 6))
    kfac = KFAC(model, lr=0.1, likelihood="categorical", fisher="empirical", decay=0.5)
    for a, b in zip(x.split(parts), y.split(parts), strict=True):
        own = cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum")
        (own / y.numel()).backward()
    kfac.step()
    expected = dense_factors(model, x, y, y.numel())
    for name in LAYERS:
        A, G = factors_of(kfac, name)
        np.testing.assert_allclose(A, expected[name][0], rtol=1e-12)
        np.testing.assert_allclose(G, expected[name][1], rtol=1e-12, atol=1e-18)


def test_a_loss_that_is_differentiated_in_parts_adds_up_before_it_is_squared():
    """Gradients of parts of one loss are summed."""
    model = tokens()
    x, y = torch.randn(8, 6, 4), torch.randint(3, (8, 6))
    kfac = KFAC(model, lr=0.1, likelihood="categorical", fisher="empirical", decay=0.5)
    loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()
    kfac.step()
    expected = dense_factors(model, x, y, y.numel())
    for name in LAYERS:
        A, G = factors_of(kfac, name)
        np.testing.assert_allclose(A, expected[name][0], rtol=1e-12)
        np.testing.assert_allclose(G, expected[name][1], rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("fisher", ["gradients", "exact"])
def test_backpropagated_vectors_of_tokens(fisher):
    """Sampled labels, and the exact sum over labels of a layer."""
    x, y = torch.randn(8, 6, 4), torch.randint(3, (8, 6))
    model = tokens()
    kfac = KFAC(model, lr=0.1, likelihood="categorical", fisher=fisher, decay=0.5)
    cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    kfac.step()
    z = model(x).detach().flatten(0, 1)
    p = torch.softmax(z, -1)
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    A, G = factors_of(kfac, "2")
    h = torch.tanh(model[0](x)).detach().flatten(0, 1)
    ones = torch.cat([h, torch.ones(48, 1)], 1)
    np.testing.assert_allclose(A, (ones.T @ ones / 48).numpy(), rtol=1e-12)
    expected = (H.mean(0) * 8 / 48).numpy()
    if fisher == "exact":
        np.testing.assert_allclose(G, expected, rtol=1e-12)
    else:
        # Of the labels drawn the covariance is positive, and its rows sum to zero.
        assert np.allclose(G.sum(0), 0.0, atol=1e-12)
        assert np.trace(G) > 0.0


def test_squares_that_overflow_are_named_and_change_nothing():
    model = tokens()
    x, y = torch.randn(8, 6, 4), torch.randint(3, (8, 6))
    kfac = KFAC(
        model,
        lr=0.1,
        likelihood="categorical",
        fisher="empirical",
        update_every=1,
        decay=0.5,
    )
    cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    kfac.step()
    before = factors_of(kfac, "2")
    for p in model.parameters():
        p.grad = None
    cross_entropy(model(x * 1e200).flatten(0, 1), y.flatten()).backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(kc.NotFiniteError, match=r"'0'.*overflow"):
        kfac.step()
    for now, then in zip(factors_of(kfac, "2"), before, strict=True):
        np.testing.assert_array_equal(now, then)
