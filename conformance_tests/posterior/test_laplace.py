"""Laplace's approximation of whole networks against closed forms and dense matrices.

Where K-FAC is exact (linear regression, the last layer of a network with a squared
error: B9) the library's numbers are those of the model itself; elsewhere they are those
of the same approximation's dense matrices.
"""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.posterior import Posterior

from ..builders import network, reference
from ..builders.layers import dense_layer
from ..builders.one_block import learn
from ..builders.tolerances import assert_close, assert_differs

NOISE, TAU = 0.25, 0.8
WIDTHS = (3, 3, 3)
NAMES = ("hidden", "last")


def statistics_of(blocks, batches):
    """Return the statistics of one batch for each block."""
    found = {}
    for name, block in blocks.items():
        found[name] = learn(block, batches[name])
        if isinstance(block.approximation, kc.EKFAC):
            rebased = kc.rebase_block(block, found[name], "zero", "raise")
            found[name] = learn(block, batches[name], rebased)
    return found


def gaussian_logpdf(y, mean, covariance):
    """Return the log-density of a normal distribution, with all its constants."""
    r = y - mean
    logdet = np.linalg.slogdet(2 * np.pi * covariance)[1]
    return -0.5 * (r @ np.linalg.solve(covariance, r) + logdet)


@pytest.fixture
def regression(backend):
    """Linear regression of three outputs, its MAP estimate and its posterior."""
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(size=(20, 3)), np.ones((20, 1))], axis=1)
    y = x @ rng.normal(size=(4, 3)) + np.sqrt(NOISE) * rng.normal(size=(20, 3))
    W = np.linalg.solve(x.T @ x / NOISE + TAU * np.eye(4), x.T @ y / NOISE)
    layer = kc.Dense(in_features=3, out_features=3, bias=True, weight_layout="oi")
    # The squared error's Hessian is I, whose columns are the vectors; see B9.
    vectors = np.broadcast_to(np.eye(3)[:, None, :], (3, 20, 3))
    fed = kc.Batch(backend.asarray(x[:, :3]), backend.asarray(vectors), sources=3)
    blocks = {"fc": kc.Block(layer, kc.Kronecker())}
    posterior = Posterior.of_statistics(
        blocks,
        statistics_of(blocks, {"fc": fed}),
        examples=len(x) / NOISE,
        prior_precision=TAU,
    )
    theta = {"fc": {"weight": backend.asarray(W[:3].T), "bias": backend.asarray(W[3])}}
    return x, y, W, posterior, theta


def log_likelihood(x, y, W):
    flat, mean = y.ravel(), (x @ W).ravel()
    return gaussian_logpdf(flat, mean, NOISE * np.eye(flat.size))


def test_the_evidence_of_linear_regression_is_exact(backend, regression):
    """B9: ``log p(D)`` is the density of y under ``N(0, sigma^2 I + X X^T / tau)``."""
    x, y, W, posterior, theta = regression

    terms = posterior.evidence(log_likelihood(x, y, W), theta, prior_mean=0.0)

    marginal = NOISE * np.eye(20) + x @ x.T / TAU
    expected = sum(gaussian_logpdf(y[:, c], np.zeros(20), marginal) for c in range(3))
    got = backend.to_numpy(terms.log_marginal_likelihood)
    assert abs(got - expected) < 1e-8
    assert_close(
        backend.to_numpy(terms.scatter), TAU * np.sum(W**2), "identity", "float64"
    )


def test_the_predictive_variance_of_linear_regression_is_exact(backend, regression):
    """B9: every output has the variance ``x^T (X^T X / sigma^2 + tau I)^-1 x``."""
    x, _, _, posterior, _ = regression
    rng = np.random.default_rng(6)
    new = np.concatenate([rng.normal(size=(7, 3)), np.ones((7, 1))], axis=1)
    derivatives = np.broadcast_to(np.eye(3)[:, None, :], (3, 7, 3))
    batch = kc.Batch(
        backend.asarray(new[:, :3]), backend.asarray(derivatives), sources=3
    )

    got = backend.to_numpy(posterior.functional_variance({"fc": batch}))

    P = x.T @ x / NOISE + TAU * np.eye(4)
    expected = np.einsum("ni,ij,nj->n", new, np.linalg.inv(P), new)
    assert got.shape == (7, 3)
    assert np.max(np.abs(got - expected[:, None])) < 1e-8


def test_the_evidence_peaks_where_the_model_does(backend, regression):
    """A new tau, at its own mode, gives the exact evidence from the same bases."""
    x, y, _, posterior, _ = regression

    for tau in (0.05, 6.0):
        W = np.linalg.solve(x.T @ x / NOISE + tau * np.eye(4), x.T @ y / NOISE)
        theta = {"weight": backend.asarray(W[:3].T), "bias": backend.asarray(W[3])}
        terms = posterior.with_prior(tau).evidence(
            log_likelihood(x, y, W), {"fc": theta}, prior_mean=0.0
        )
        marginal = NOISE * np.eye(20) + x @ x.T / tau
        expected = sum(
            gaussian_logpdf(y[:, c], 0 * y[:, c], marginal) for c in range(3)
        )
        assert abs(backend.to_numpy(terms.log_marginal_likelihood) - expected) < 1e-8


def test_a_lost_factor_of_n_changes_the_evidence(backend, regression):
    """The row that must differ: F without its N, or without the noise's 1/sigma^2."""
    x, y, W, posterior, theta = regression
    right = posterior.evidence(log_likelihood(x, y, W), theta, prior_mean=0.0)

    for wrong in (1.0, len(x)):
        terms = posterior.with_examples(wrong).evidence(
            log_likelihood(x, y, W), theta, prior_mean=0.0
        )
        assert_differs(
            backend.to_numpy(terms.log_marginal_likelihood),
            backend.to_numpy(right.log_marginal_likelihood),
            by=0.02,
        )


class Net:
    """A small network, its library's posterior, and the dense one."""

    def __init__(self, backend, approximation, *, kind, names=NAMES):
        rng = np.random.default_rng(8)
        self.backend, self.names = backend, names
        self.net = network.random_network(rng, WIDTHS, "tanh")
        self.x = rng.normal(size=(9, 3))
        vectors = network.type2_vectors(kind, self.net.outputs(self.x))
        fed = dict(
            zip(NAMES, network.batches(backend, self.net, self.x, vectors), strict=True)
        )
        layer = dense_layer(3, 3)
        self.blocks = {name: kc.Block(layer, approximation) for name in names}
        self.statistics = statistics_of(self.blocks, fed)
        self.dense = {
            name: self._dense(fed[name], approximation) for name in self.names
        }
        everything = network.jacobians(self.net, self.x)
        found = dict(zip(NAMES, everything, strict=True))
        self.jacobians = {name: found[name] for name in names}

    def _dense(self, batch, approximation):
        x = self.backend.to_numpy(batch.inputs)
        g = self.backend.to_numpy(batch.output_grads)
        A, G, _ = reference.kronecker_factors(x, g, bias=True)
        if not isinstance(approximation, kc.EKFAC):
            return np.kron(A, G)
        Q = np.kron(np.linalg.eigh(A)[1], np.linalg.eigh(G)[1])
        rows = reference.rows_of(x, g, bias=True)
        D = np.array([np.outer(r, h).ravel() for [(r, gs)] in rows for h in gs])
        return (Q * (np.sum((D @ Q) ** 2, axis=0) / len(x))) @ Q.T

    def posterior(self, tau):
        return Posterior.of_statistics(
            self.blocks, self.statistics, examples=40, prior_precision=tau
        )

    def precision(self, name, tau):
        return 40 * self.dense[name] + tau * np.eye(12)

    def parameters(self, matrices):
        return {
            name: {
                "weight": self.backend.asarray(V[..., :3, :]),
                "bias": self.backend.asarray(V[..., 3, :]),
            }
            for name, V in matrices.items()
        }

    def jacobian_stack(self, name):
        J = self.jacobians[name].reshape(9, 3, 4, 3)
        return self.parameters({name: J})[name]


@pytest.mark.parametrize("kind", [kc.Kronecker(), kc.EKFAC()], ids=["kfac", "ekfac"])
def test_the_evidence_is_that_of_the_dense_blocks(backend, kind):
    """All terms, for a tau of each block and a prior mean that is not zero."""
    net, rng = Net(backend, kind, kind="ce"), np.random.default_rng(3)
    taus = {"hidden": 0.3, "last": 2.0}
    theta = {name: rng.normal(size=(4, 3)) for name in NAMES}
    mu = {name: rng.normal(size=(4, 3)) for name in NAMES}

    terms = net.posterior(taus).evidence(
        -12.5, net.parameters(theta), prior_mean=net.parameters(mu)
    )

    scatter = sum(taus[n] * np.sum((theta[n] - mu[n]) ** 2) for n in NAMES)
    prior = sum(12 * np.log(taus[n]) for n in NAMES)
    logdet = sum(np.linalg.slogdet(net.precision(n, taus[n]))[1] for n in NAMES)
    total = -12.5 + 0.5 * (prior - logdet - scatter)
    expected = {
        "scatter": scatter,
        "logdet_prior": prior,
        "logdet_posterior": logdet,
        "log_marginal_likelihood": total,
    }
    for name, value in expected.items():
        assert abs(backend.to_numpy(getattr(terms, name)) - value) < 1e-8


@pytest.mark.parametrize("kind", [kc.Kronecker(), kc.EKFAC()], ids=["kfac", "ekfac"])
def test_predictive_covariances_add_up_over_blocks(backend, kind):
    """Jacobians as parameters for one block, as a `Batch` for another."""
    net = Net(backend, kind, kind="ce")
    derivatives = np.broadcast_to(np.eye(3)[:, None, :], (3, 9, 3))
    fed = network.batches(backend, net.net, net.x, derivatives)
    jacobians = {"hidden": net.jacobian_stack("hidden"), "last": fed[1]}
    posterior = net.posterior(0.5)

    covariance = backend.to_numpy(posterior.functional_covariance(jacobians))
    variance = backend.to_numpy(posterior.functional_variance(jacobians))

    expected = sum(
        J @ np.linalg.inv(net.precision(name, 0.5)) @ np.swapaxes(J, 1, 2)
        for name, J in net.jacobians.items()
    )
    assert np.max(np.abs(covariance - expected)) < 1e-8
    assert np.max(np.abs(variance - np.diagonal(expected, axis1=1, axis2=2))) < 1e-8


def test_the_last_layer_of_a_network_is_exact(backend):
    """B9: with a squared error, K-FAC's last block is the Gauss-Newton matrix."""
    net = Net(backend, kc.Kronecker(), kind="mse", names=("last",))
    F = network.ggn_blocks(net.net, net.x, "mse")
    P = 40 * F[1] + 0.7 * np.eye(12)
    J = net.jacobians["last"]

    posterior = net.posterior(0.7)
    got = posterior.functional_covariance({"last": net.jacobian_stack("last")})

    expected = J @ np.linalg.inv(P) @ np.swapaxes(J, 1, 2)
    assert np.max(np.abs(backend.to_numpy(got) - expected)) < 1e-8
    logdet = backend.to_numpy(posterior.logdet())
    assert abs(logdet - np.linalg.slogdet(P)[1]) < 1e-8


def test_a_hidden_layer_is_not_exact(backend):
    """B9, the row that must differ: a hidden block is not the Gauss-Newton matrix."""
    net = Net(backend, kc.Kronecker(), kind="mse", names=("hidden",))
    P = 40 * network.ggn_blocks(net.net, net.x, "mse")[0] + 0.7 * np.eye(12)

    logdet = backend.to_numpy(net.posterior(0.7).logdet())

    assert_differs(logdet, np.linalg.slogdet(P)[1])


def test_samples_are_the_mean_and_a_root_of_the_covariance(backend):
    """``theta* + P^-1/2 z`` with the symmetric root, for many z at once."""
    net, rng = Net(backend, kc.Kronecker(), kind="ce"), np.random.default_rng(4)
    theta = {name: rng.normal(size=(4, 3)) for name in NAMES}
    Z = {name: rng.normal(size=(9, 3, 4, 3)) for name in NAMES}

    samples = net.posterior(0.5).sample(net.parameters(theta), net.parameters(Z))

    for name in NAMES:
        root = reference.matrix_power(net.precision(name, 0.5), -0.5)
        expected = theta[name] + (Z[name].reshape(9, 3, 12) @ root).reshape(9, 3, 4, 3)
        weight = backend.to_numpy(samples[name]["weight"])
        bias = backend.to_numpy(samples[name]["bias"])
        assert_close(weight, expected[..., :3, :], "power", "float64")
        assert_close(bias, expected[..., 3, :], "power", "float64")
