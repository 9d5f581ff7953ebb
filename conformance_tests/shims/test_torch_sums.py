"""Sums of outer products in the place of rows: less memory, and the same statistics."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kfac_core as kc  # noqa: E402
from kfac_core.integration import layer_calls  # noqa: E402
from kfac_core_shims.torch import KFAC  # noqa: E402

cross_entropy = torch.nn.functional.cross_entropy

LAYERS = {"0": 0, "2": 2}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["sums", "rows", "mixed"])
def held(request, monkeypatch):
    """Whether calls hold sums, rows, or whichever are fewer numbers."""
    saved = {"sums": -(10**9), "rows": 10**9, "mixed": 100}
    monkeypatch.setattr(layer_calls, "SAVED", saved[request.param])
    return request.param


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


def sums_held(kfac):
    return {
        call.block
        for seen in kfac._observations
        for call in seen.calls
        if call.sums is not None
    }


@pytest.mark.parametrize("parts", [[8], [5, 3], [2, 6]])
def test_accumulated_batches_are_one(held, parts):
    """Passes of any sizes, of which some hold sums, have the statistics of all rows."""
    model = tokens()
    x, y = torch.randn(8, 6, 4), torch.randint(3, (8, 6))
    kfac = KFAC(model, likelihood="categorical", fisher="empirical", decay=0.5)
    for a, b in zip(x.split(parts), y.split(parts), strict=True):
        own = cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum")
        (own / y.numel()).backward()
    seen = sums_held(kfac)
    assert seen == (set() if held == "rows" else set(LAYERS)) or held == "mixed"
    if held == "mixed" and parts == [2, 6]:
        assert any(c.sums is None for o in kfac._observations for c in o.calls)
        assert seen
    kfac.step()
    expected = dense_factors(model, x, y, y.numel())
    for name in LAYERS:
        A, G = factors_of(kfac, name)
        np.testing.assert_allclose(A, expected[name][0], rtol=1e-12)
        np.testing.assert_allclose(G, expected[name][1], rtol=1e-12, atol=1e-18)


def test_a_loss_that_is_differentiated_in_parts_adds_up_before_it_is_squared(held):
    """Gradients of parts of one loss are summed, and rows are let go of after the last."""
    model = tokens()
    x, y = torch.randn(8, 6, 4), torch.randint(3, (8, 6))
    kfac = KFAC(model, likelihood="categorical", fisher="empirical", decay=0.5)
    loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
    (0.25 * loss).backward(retain_graph=True)
    assert not sums_held(kfac)
    (0.75 * loss).backward()
    kfac.step()
    expected = dense_factors(model, x, y, y.numel())
    for name in LAYERS:
        A, G = factors_of(kfac, name)
        np.testing.assert_allclose(A, expected[name][0], rtol=1e-12)
        np.testing.assert_allclose(G, expected[name][1], rtol=1e-12, atol=1e-18)


def test_a_further_gradient_of_a_call_with_sums_is_refused(monkeypatch):
    monkeypatch.setattr(layer_calls, "SAVED", -(10**9))
    layer = kc.Dense(in_features=2, out_features=2, bias=True, weight_layout="oi")
    call = layer_calls.LayerCall("fc", torch.ones(3, 2))
    call.add_source(torch.ones(3, 2))
    call.sum_rows(kc.Block(layer, kc.Kronecker()), torch.float64)
    assert call.sums is not None
    assert call.inputs is None
    with pytest.raises(kc.UnsupportedError, match=r"'fc'.*retain_graph"):
        call.add_to_source(torch.ones(3, 2))


@pytest.mark.parametrize("fisher", ["gradients", "exact"])
def test_backpropagated_vectors_are_summed_too(held, fisher):
    """The same draws with sums as with rows, and the exact sum over labels of a layer."""
    x, y = torch.randn(8, 6, 4), torch.randint(3, (8, 6))
    model = tokens()
    kfac = KFAC(model, likelihood="categorical", fisher=fisher, decay=0.5)
    cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert (sums_held(kfac) == set(LAYERS)) == (held != "rows")
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


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200, 1e-170])
@pytest.mark.parametrize("where", ["inputs", "output_grads"])
def test_squares_that_cannot_be_told_are_not_summed(monkeypatch, value, where):
    """Arrays are kept where squares are not finite, or output gradients' underflow."""
    monkeypatch.setattr(layer_calls, "SAVED", -(10**9))
    layer = kc.Dense(in_features=2, out_features=2, bias=True, weight_layout="oi")
    x, g = torch.ones(3, 2), torch.ones(3, 2)
    if where == "inputs":
        x[1, 0] = value
    else:
        g *= value
    call = layer_calls.LayerCall("fc", x)
    call.add_source(g)
    call.sum_rows(kc.Block(layer, kc.Kronecker()), torch.float64)
    # Inputs are squared as they are in any case.
    is_summed = where == "inputs" and value == 1e-170
    assert (call.sums is not None) == is_summed
    assert is_summed or call.inputs is x


def test_squares_that_overflow_are_named_and_change_nothing(held):
    """The message is that of rows."""
    model = tokens()
    x, y = torch.randn(8, 6, 4), torch.randint(3, (8, 6))
    kfac = KFAC(
        model,
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


def test_rows_are_not_held_until_the_step():
    """Of many tokens only sums are there when the backward pass has ended."""
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )
    x, y = torch.randn(128, 128, 16), torch.randint(3, (128, 128))
    kfac = KFAC(model, likelihood="categorical", fisher="empirical")
    cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    calls = [call for seen in kfac._observations for call in seen.calls]
    assert {call.block for call in calls if call.sums is None} == {"2"}
    assert all(c.inputs is None and not c.output_grads for c in calls if c.sums)
    sums = next(call.sums for call in calls if call.block == "0")
    assert sums.inputs.array.shape == (17, 17)
    assert sums.count == 128 * 128
    kfac.discard()
    assert all(call.sums is None for call in calls)
