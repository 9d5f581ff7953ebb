"""Posteriors of models: dense float64 matrices, evidence and samples."""

import pytest

import kfac_core as kc
from kfac_core.posterior import spectral_blocks

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from kfac_core_shims.torch import Posterior  # noqa: E402

from ..builders.torch_rows import jacobians  # noqa: E402


def problem(outputs=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, outputs))
    x, y = torch.randn(14, 4, dtype=torch.float64), torch.randint(outputs, (14,))
    return model.double().eval(), [*zip(x.split(6), y.split(6), strict=True)]


def dense_precisions(posterior, tau):
    """Return each layer's N F + tau I, with the bias as the last row of its matrix."""
    factors = posterior.factors
    found = {}
    for name, F in spectral_blocks(factors.blocks, factors.statistics).items():
        D = F.to_dense(damped=False)
        if name != "1":
            found[name] = 14 * D + tau * torch.eye(len(D), dtype=D.dtype)
    return found


@pytest.mark.parametrize("ekfac", [True, False])
def test_covariances_are_those_of_dense_jacobians(ekfac):
    """``J P^-1 J^T`` of the layers, whole and a few outputs at a time."""
    model, data = problem(outputs=9)
    posterior = Posterior(model, data, prior_precision=2.0, ekfac=ekfac)
    x = data[0][0]
    J = jacobians(model, x)
    expected = torch.zeros(6, 9, 9, dtype=torch.float64)
    for name, P in dense_precisions(posterior, 2.0).items():
        both = torch.cat([J[f"{name}.weight"], J[f"{name}.bias"][..., None]], dim=-1)
        rows = both.mT.flatten(2)
        expected += rows @ torch.linalg.solve(P, rows.mT)
    torch.testing.assert_close(posterior.covariance(data[0]), expected)
    variance = expected.diagonal(dim1=1, dim2=2)
    for number in (64, 4, 1):
        found = posterior.variance(data[0], outputs_at_a_time=number)
        torch.testing.assert_close(found, variance)
    p = torch.softmax(model(x) / torch.sqrt(1 + torch.pi / 8 * variance), dim=1)
    torch.testing.assert_close(posterior.probabilities(data[0]), p)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("likelihood", ["bernoulli", nn.BCEWithLogitsLoss()])
def test_probabilities_of_bernoulli_outputs_are_each_outputs_own(outputs, likelihood):
    """They were a softmax over the outputs, which of one output is 1."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, outputs).double(), torch.randn(9, 4, dtype=torch.float64)
    posterior = Posterior(
        model,
        [(x, (x[:, :outputs] > 0).double())],
        likelihood=likelihood,
        fisher="exact",
        ekfac=False,
    )
    p = torch.sigmoid(model(x)).detach()
    one = torch.cat([x, torch.ones(9, 1)], dim=1).double()
    A, G = one.mT @ one / 9, torch.diag((p * (1 - p)).mean(0))
    P = 9 * torch.kron(A, G) + torch.eye(5 * outputs)
    J = torch.einsum("ni,oc->noic", one, torch.eye(outputs).double()).flatten(2)
    v = (J @ torch.linalg.inv(P.double()) @ J.mT).diagonal(dim1=1, dim2=2)
    expected = torch.sigmoid(model(x) / torch.sqrt(1 + torch.pi * v / 8))
    torch.testing.assert_close(posterior.probabilities(x), expected.detach())


def test_probabilities_of_a_regression_are_refused():
    model, data = problem()
    likelihood = kc.losses.Gaussian(variance=0.5)
    posterior = Posterior(model, data, likelihood=likelihood, fisher="exact")
    with pytest.raises(kc.UnsupportedError, match="the likelihood is Gaussian"):
        posterior.probabilities(data[0])


def test_the_evidence_is_that_of_dense_matrices():
    model, data = problem()
    posterior = Posterior(model, data, prior_precision=2.0)
    for tau, one in ((2.0, posterior), (5.0, posterior.with_prior(5.0))):
        expected = -nn.functional.cross_entropy(
            model(torch.cat([x for x, _ in data])),
            torch.cat([y for _, y in data]),
            reduction="sum",
        )
        for name, P in dense_precisions(posterior, tau).items():
            layer = model.get_submodule(name)
            theta = torch.cat([layer.weight.flatten(), layer.bias])
            expected = expected - 0.5 * tau * theta @ theta
            expected = expected + 0.5 * (len(theta) * torch.tensor(tau).double().log())
            expected = expected - 0.5 * torch.logdet(P)
        torch.testing.assert_close(one.log_marginal_likelihood(), expected.detach())


def test_rows_that_do_not_count_are_no_evidence():
    model, _ = problem()
    x, y = torch.randn(14, 2, 4, dtype=torch.float64), torch.randint(3, (14, 2))
    y[::3, 1] = -100

    def forward(model, batch):
        return model(batch[0]), (batch[1] >= 0).double()

    posterior = Posterior(model, [(x, y)], prior_precision=2.0, forward=forward)
    log_p = -nn.functional.cross_entropy(model(x).mT, y, reduction="sum")
    values = posterior.factors.parameters()
    mode = {name: values[name] for name in posterior.posterior.blocks}
    terms = posterior.posterior.evidence(log_p.detach(), mode, prior_mean=0.0)
    torch.testing.assert_close(
        posterior.log_marginal_likelihood(), terms.log_marginal_likelihood
    )


def test_samples_have_the_posteriors_covariance():
    model, data = problem()
    likelihood = kc.losses.Gaussian(variance=0.5)
    posterior = Posterior(
        model,
        [x for x, _ in data],
        likelihood=likelihood,
        last_layer=True,
        fisher="exact",
    )
    assert [*posterior.posterior.blocks] == ["2"]
    samples = [*posterior.samples(4000, seed=1)]
    assert all(torch.equal(s["0.weight"], model[0].weight) for s in samples[:3])
    W = torch.stack([s["2.weight"].flatten() for s in samples])
    P = dense_precisions(posterior, 1.0)["2"]
    C = torch.linalg.inv(P).reshape(6, 3, 6, 3)[:5, :, :5].permute(1, 0, 3, 2)
    C = C.reshape(15, 15)
    assert float((torch.cov(W.T) - C).norm() / C.norm()) < 0.1
    torch.testing.assert_close(
        W.mean(0), model[2].weight.flatten().detach(), atol=0.02, rtol=0.0
    )
