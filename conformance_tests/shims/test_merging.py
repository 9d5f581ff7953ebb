"""Merged models and operators of models, by dense matrices."""

import copy

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.posterior import spectral_blocks

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import parameters_to_vector  # noqa: E402

from kfac_core_shims.torch import (  # noqa: E402
    Posterior,
    collect,
    influence,
    merge,
    scipy_operator,
    self_influence,
)


def model(seed):
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(1, 2, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    ]
    return nn.Sequential(*layers).double().eval()


def data(seed, count=12):
    torch.manual_seed(seed)
    return torch.randn(count, 1, 3, 3, dtype=torch.float64).split(5)


def test_operators_are_the_dense_blocks_in_the_models_order():
    """The operators of three layers, and their inverses, are the dense matrices."""
    pytest.importorskip("scipy")
    one = model(0)
    factors = collect(one, data(0))
    spectra = spectral_blocks(factors.blocks, factors.statistics)
    parameters = [*one.parameters()]
    size = len(parameters_to_vector(parameters))
    F = scipy_operator(factors, damping=0.1) @ np.eye(size)
    np.testing.assert_allclose(F, F.T, atol=1e-12)
    inverse = scipy_operator(factors, damping=0.1, inverse=True) @ np.eye(size)
    np.testing.assert_allclose(F @ inverse, np.eye(size), atol=1e-10)
    head = spectra["4"].to_dense(damped=False).numpy()
    # (out, in) of PyTorch and then the bias, of rows (in + 1, out).
    order = [i * 3 + o for o in range(3) for i in range(8)] + [24 + o for o in range(3)]
    expected = head[np.ix_(order, order)] + 0.1 * np.eye(27)
    np.testing.assert_allclose(F[-27:, -27:], expected, atol=1e-12)
    v = np.random.default_rng(0).normal(size=size)
    np.testing.assert_allclose(scipy_operator(factors, damping=0.1) @ v, F @ v)


class InSingle(nn.Sequential):
    """A model that is in single precision within autocast too."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def test_nothing_but_the_model_is_autocast():
    """Factors, conjugate gradients, scores and variances are what they are without."""
    pytest.importorskip("scipy")
    torch.manual_seed(0)
    one = InSingle(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    other = copy.deepcopy(one)
    with torch.no_grad():
        other[0].weight.add_(0.1 * torch.randn(6, 4))
    batches = [(torch.randn(10, 4), torch.randint(3, (10,))) for _ in range(2)]

    def loss(model, batch):
        z = model(batch[0])
        return nn.functional.cross_entropy(z, batch[1], reduction="none")

    def computed():
        pair = [collect(m, batches, fisher="exact") for m in (one, other)]
        scored = {"loss": loss, "train": batches, "factors": pair[0]}
        posterior = Posterior(one, batches, factors=pair[0])
        operator = scipy_operator(pair[0], damping=0.1, inverse=True)
        yield from merge([one, other], pair).parameters.values()
        yield influence(one, queries=batches[:1], **scored).scores
        yield influence(one, queries=batches[:1], solver="cg", **scored).scores
        yield self_influence(one, **scored)
        yield posterior.variance(batches[0])
        yield posterior.covariance(batches[0])
        yield posterior.log_marginal_likelihood()
        yield from next(posterior.samples(1)).values()
        yield torch.from_numpy(operator @ np.ones(operator.shape[0]))

    expected = [*computed()]
    with torch.autocast("cpu", torch.bfloat16):
        found = [*computed()]
    for one_of, other_of in zip(found, expected, strict=True):
        assert torch.equal(one_of, other_of)


def test_operators_of_half_precision_are_in_single():
    half = nn.Linear(3, 2).bfloat16()
    factors = collect(half, [torch.randn(8, 3, dtype=torch.bfloat16)])
    F = spectral_blocks(factors.blocks, factors.statistics)[""].to_dense()
    operator = scipy_operator(factors) @ np.eye(8)
    assert operator.dtype == np.float32
    np.testing.assert_allclose(np.trace(operator), float(torch.trace(F)), rtol=1e-5)


def test_a_merged_model_solves_the_system_of_its_layers(tmp_path):
    models, files = [model(1), model(2)], []
    for number, one in enumerate(models):
        files.append(tmp_path / f"{number}.npz")
        collect(one, data(number, 10 + 10 * number), path=files[-1])
    for wrong in (files[::-1], files[:1] * 2, files[1:] * 2):
        with pytest.raises(kc.ConventionError, match="The file at place "):
            merge(models, wrong)
    merged = merge(models, files, damping_fraction=1e-2, tolerance=1e-10)
    assert max(merged.residuals.values()) <= 1e-9
    factors = [collect(one, data(k, 10 + 10 * k)) for k, one in enumerate(models)]
    dense, thetas = [], []
    for f in factors:
        F = spectral_blocks(f.blocks, f.statistics)["4"].to_dense(damped=False)
        dense.append(f.examples * F)
        layer = f.model[4]
        thetas.append(torch.cat([layer.weight.T, layer.bias[None]]).detach().flatten())
    eye = torch.eye(27, dtype=torch.float64)
    lam = 1e-2 * sum(torch.trace(F) for F in dense) / 27
    b = sum((F + lam / 2 * eye) @ t for F, t in zip(dense, thetas, strict=True))
    expected = torch.linalg.solve(sum(dense) + lam * eye, b).reshape(9, 3)
    torch.testing.assert_close(merged.parameters["4.weight"], expected[:8].T)
    torch.testing.assert_close(merged.parameters["4.bias"], expected[8])
    narrow = [copy.deepcopy(one).float() for one in models]
    near = merge(narrow, files, damping_fraction=1e-2, tolerance=1e-10).parameters
    torch.testing.assert_close(near["4.bias"].double(), expected[8], rtol=1e-4, atol=0)
    same = merge([models[0], models[0]], [files[0], files[0]])
    for name, p in models[0].named_parameters():
        torch.testing.assert_close(same.parameters[name], p.detach())


def test_factors_of_other_models_than_those_given_raise():
    models = [model(1), model(2)]
    factors = [collect(one, data(0)) for one in models]
    expected = merge(models, factors).parameters
    copies = [copy.deepcopy(one) for one in models]
    torch.testing.assert_close(merge(copies, factors).parameters, expected)
    with pytest.raises(
        kc.ConventionError, match="at place 0 are of a model with other"
    ):
        merge(models[::-1], factors)
    for some in (factors[:1], []):
        with pytest.raises(kc.ConventionError, match=f"2 models and {len(some)} files"):
            merge(models, some)
    with pytest.raises(kc.ConventionError, match="0 models"):
        merge([], [])
