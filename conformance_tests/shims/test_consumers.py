"""What puts this core below laplace-torch and curvlinops, where these are installed.

Each is compared with the library's own computation, and the first with dense matrices too.
"""

import importlib
import os
import warnings

import numpy as np
import pytest

REQUIRED = "KFAC_CORE_TEST_CONSUMERS" in os.environ

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from kfac_core_shims import torch as kfac_torch  # noqa: E402


@pytest.fixture
def shim():
    """Return a function that imports what is for a library, or skips without it."""

    def load(name):
        if not REQUIRED:
            pytest.importorskip(name, reason=f"{name} is not installed")
        with warnings.catch_warnings():
            # What these libraries are made of calls it when it is imported.
            warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
            return importlib.import_module(f"kfac_core_shims.{name}")

    return load


def network(kind):
    torch.manual_seed(3)
    if kind == "dense":
        layers = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)]
    else:
        layers = [nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers).double()


def batches(kind, loss, sizes=(6, 3)):
    shape = (4,) if kind == "dense" else (2, 3, 3)
    found = []
    for n in sizes:
        x = torch.randn(n, *shape, dtype=torch.float64)
        y = torch.randint(3, (n,))
        if not isinstance(loss, nn.CrossEntropyLoss):
            y = torch.nn.functional.one_hot(y, 3).double()
        found.append((x, y))
    return found


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(
    ("likelihood", "reduction", "fisher"),
    [
        (nn.CrossEntropyLoss, "mean", "type-2"),
        (nn.CrossEntropyLoss, "sum", "empirical"),
        (nn.MSELoss, "mean", "type-2"),
        (nn.MSELoss, "sum", "type-2"),
        (nn.BCEWithLogitsLoss, "mean", "empirical"),
        (nn.CrossEntropyLoss, "mean", "forward-only"),
    ],
    ids=lambda made: made if isinstance(made, str) else made.__name__,
)
def test_the_operators_are_those_of_curvlinops(
    shim, kind, sharing, separate, likelihood, reduction, fisher
):
    """Products, norms, determinants, and inverses by each of its three ways of damping."""
    ours = shim("curvlinops")
    theirs = importlib.import_module("curvlinops")
    model, loss = network(kind), likelihood(reduction=reduction)
    given = model, loss, list(model.parameters()), batches(kind, loss)
    options = {
        "fisher_type": fisher,
        "kfac_approx": sharing,
        "separate_weight_and_bias": separate,
    }
    there = theirs.KFACLinearOperator(*given, **options)
    here = ours.KFACLinearOperator(*given, **options)
    v = torch.randn(here.shape[0], 3, dtype=torch.float64)

    def assert_same(got, expected, rtol=1e-9):
        scale = float(expected.abs().max())
        assert float((got - expected).abs().max()) <= rtol * scale

    assert_same(here @ v, there @ v)
    assert_same(here.trace, there.trace)
    assert_same(here.frobenius_norm, there.frobenius_norm)
    assert_same((here @ v[:, 0]), there @ v[:, 0])
    for rule in (
        {"use_heuristic_damping": True},
        {"use_heuristic_damping": True, "min_damping": 0.5},
        {"use_exact_damping": True},
        {},
        {"damping": (0.1, 0.3)},
    ):
        own = {"damping": 0.1} | rule
        expected = theirs.KFACInverseLinearOperator(there, **own) @ v
        assert_same(ours.KFACInverseLinearOperator(here, **own) @ v, expected)


def test_collected_factors_are_an_operator_of_curvlinops(shim):
    """Products of lists of tensors, as those of SciPy's operator of the same factors."""
    ours = shim("curvlinops")
    from kfac_core_shims.torch import collect, scipy_operator

    model = network("conv")
    factors = collect(model, [x for x, _ in batches("conv", nn.MSELoss())])
    for inverse in (False, True):
        options = {"damping": 0.1, "inverse": inverse}
        here = ours.FactorsLinearOperator(factors, **options)
        v = torch.randn(here.shape[1], 3, dtype=torch.float64)
        expected = scipy_operator(factors, **options) @ v.numpy()
        np.testing.assert_allclose((here @ v).numpy(), expected)
        parts = [torch.randn_like(p) for p in model.parameters()]
        flat = torch.cat([p.flatten() for p in parts])
        products = torch.cat([p.flatten() for p in here @ parts])
        torch.testing.assert_close(products, here @ flat)


def test_determinants_are_those_of_curvlinops(shim):
    """Of factors of full rank; of singular ones the logarithm is minus infinity."""
    ours = shim("curvlinops")
    theirs = importlib.import_module("curvlinops")
    model, loss = nn.Sequential(nn.Linear(2, 2)).double(), nn.MSELoss()
    x, y = (torch.randn(9, 2, dtype=torch.float64) for _ in range(2))
    given = model, loss, list(model.parameters()), [(x, y)]
    there = theirs.KFACLinearOperator(*given, fisher_type="type-2")
    here = ours.KFACLinearOperator(*given, fisher_type="type-2")
    assert float(here.det) == pytest.approx(float(there.det), rel=1e-9)
    assert float(here.logdet) == pytest.approx(float(there.logdet), rel=1e-9)
    few = (*given[:3], [(x[:1], y[:1])])
    singular = ours.KFACLinearOperator(*few, fisher_type="type-2")
    assert float(singular.logdet) == -np.inf
    assert float(singular.det) == 0.0


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("interface", ["CoreGGN", "CoreEF"])
def test_the_backend_is_that_of_laplace_torch(shim, interface, likelihood, kind):
    """Factors of a data set in two batches, as those of its curvlinops backend."""
    ours = shim("laplace")
    theirs = importlib.import_module("laplace.curvature")
    model = network(kind)
    loss = nn.CrossEntropyLoss() if likelihood == "classification" else nn.MSELoss()
    name = "CurvlinopsGGN" if interface == "CoreGGN" else "CurvlinopsEF"
    for sharing in ("expand", "reduce"):
        totals = []
        for kind_of in (getattr(theirs, name), getattr(ours, interface)):
            made = kind_of(model, likelihood)
            torch.manual_seed(0)
            parts = [
                made.kron(x, y, N=9, kfac_approx=sharing)
                for x, y in batches(kind, loss)
            ]
            totals.append((sum(p[0] for p in parts), parts[0][1] + parts[1][1]))
        (loss_there, there), (loss_here, here) = totals
        torch.testing.assert_close(loss_here, loss_there)
        expected = there.to_matrix()
        off = (here.to_matrix() - expected).abs().max() / expected.abs().max()
        assert float(off) < 1e-12


def test_the_backends_factors_are_exact_for_one_linear_layer(shim):
    """Summed over N examples, the block of a weight is dense: ``sum H (x) x x^T``."""
    ours = shim("laplace")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    x, y = (
        torch.randn(5, 3, dtype=torch.float64),
        torch.zeros(5, 2, dtype=torch.float64),
    )
    _, kron = ours.CoreGGN(model, "regression").kron(x, y, N=5)
    X = x.numpy()
    F = np.zeros((8, 8))
    F[:6, :6], F[6:, 6:] = np.kron(np.eye(2), X.T @ X), 5.0 * np.eye(2)
    np.testing.assert_allclose(kron.to_matrix().numpy(), F, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_posterior_of_a_model_is_that_of_laplace_torch(shim, subset):
    """Without biases, which laplace-torch takes apart from their weights."""
    shim("laplace")
    library = importlib.import_module("laplace")
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)]
    model = nn.Sequential(*layers).double().eval()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=7
    )
    expected = library.Laplace(
        model, "classification", subset_of_weights=subset, hessian_structure="kron",
        prior_precision=2.0,
    )  # fmt: skip
    expected.fit(data)
    found = kfac_torch.Posterior(
        model, data, prior_precision=2.0, last_layer=subset == "last_layer",
        ekfac=False, fisher="exact",
    )  # fmt: skip
    tolerances = {"rtol": 1e-8, "atol": 1e-10}
    torch.testing.assert_close(
        found.log_marginal_likelihood(),
        expected.log_marginal_likelihood(),
        **tolerances,
    )
    probabilities = expected(x[:5], link_approx="probit")
    torch.testing.assert_close(found.probabilities(x[:5]), probabilities, **tolerances)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_posterior_by_this_backend_is_that_of_laplace_torch(shim, subset):
    """Evidence and predictive deviations, as with the library's own backend."""
    ours = shim("laplace").CoreGGN
    theirs = importlib.import_module("laplace.curvature").CurvlinopsGGN
    library = importlib.import_module("laplace")
    model, loss = network("dense"), nn.MSELoss()
    data = torch.utils.data.TensorDataset(*batches("dense", loss, (12,))[0])
    new = torch.randn(3, 4, dtype=torch.float64)
    found = []
    for backend in (ours, theirs):
        posterior = library.Laplace(
            model,
            "regression",
            subset_of_weights=subset,
            hessian_structure="kron",
            sigma_noise=0.3,
            backend=backend,
        )
        posterior.fit(torch.utils.data.DataLoader(data, batch_size=5))
        variances = posterior(new)[1].diagonal(dim1=1, dim2=2).flatten()
        evidence = posterior.log_marginal_likelihood().reshape(1)
        found.append(torch.cat([evidence, variances]).detach())
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)
