"""Influence scores of models: dense float64 matrices, and sums over tokens and layers."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.influence import linear_datamodeling_score, retrained_losses
from kfac_core.posterior import spectral_blocks

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from kfac_core_shims.torch import (  # noqa: E402
    Posterior,
    collect,
    influence,
    self_influence,
)


class Sequences(nn.Module):
    """Tokens, attention's projections, a norm, and logits at each position."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids):
        """Return logits (N, T, 7)."""
        x = self.embed(ids)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(torch.tanh(self.norm(x)))


def sequences():
    torch.manual_seed(0)
    ids = torch.randint(7, (9, 6))
    return Sequences().double().eval(), [*ids[:, :5].split(4)], ids


def losses_of_sequences(model, ids):
    z = model(ids)
    return cross_entropy(z.transpose(1, 2), ids.roll(1, 1), reduction="none").sum(1)


def classifier():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)]
    x, y = torch.randn(20, 5, dtype=torch.float64), torch.randint(3, (20,))
    return nn.Sequential(*layers).double().eval(), [
        *zip(x.split(8), y.split(8), strict=True)
    ]


def losses(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def gradient_rows(model, loss, data, parameters):
    """Return each example's gradient of some parameters, one row after the other."""
    rows = []
    for batch in data:
        for value in loss(model, batch):
            g = torch.autograd.grad(value, parameters, retain_graph=True)
            rows.append(torch.cat([x.flatten() for x in g]))
    return torch.stack(rows)


def test_scores_by_factors_are_those_of_dense_matrices():
    """Each layer's damped block, inverted, between gradients by autograd."""
    model, data = classifier()
    factors = collect(model, data, fisher="exact")
    found = influence(model, losses, data, data[:1], factors=factors, damping=0.03)
    expected = torch.zeros(8, 20, dtype=torch.float64)
    own = torch.zeros(20, dtype=torch.float64)
    for name, F in spectral_blocks(factors.blocks, factors.statistics).items():
        layer = model.get_submodule(name)
        W = gradient_rows(model, losses, data, [layer.weight])
        b = gradient_rows(model, losses, data, [layer.bias])
        D = torch.cat([W.reshape(20, *layer.weight.shape).mT, b[:, None]], 1).flatten(1)
        damping = 0.03 * torch.eye(D.shape[1], dtype=D.dtype)
        inverse = torch.linalg.inv(F.to_dense(damped=False) + damping)
        expected += D[:8] @ inverse @ D.T
        own += torch.einsum("ni,ij,nj->n", D, inverse, D)
    torch.testing.assert_close(found.scores, expected, rtol=1e-8, atol=1e-10)
    alone = self_influence(model, losses, data, factors=factors, damping=0.03)
    torch.testing.assert_close(alone, own, rtol=1e-8, atol=1e-10)


def test_conjugate_gradients_solve_the_whole_networks_system():
    """The dense Gauss-Newton matrix of all layers with each other."""
    model, data = classifier()
    factors = collect(model, data, fisher="exact")
    found = influence(
        model,
        losses,
        data,
        data[:1],
        factors=factors,
        damping=0.03,
        solver="cg",
        tolerance=1e-11,
    )
    parameters = list(model.parameters())
    x = torch.cat([x for x, _ in data])
    p = torch.softmax(model(x).detach(), -1)
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    J = gradient_rows(model, lambda m, b: m(b).flatten(), [x], parameters)
    J = J.reshape(20, 3, -1)
    F = torch.einsum("nci,ncd,ndj->ij", J, H, J) / 20
    g = gradient_rows(model, losses, data, parameters)
    damped = F + 0.03 * torch.eye(len(F), dtype=F.dtype)
    expected = g[:8] @ torch.linalg.solve(damped, g.T)
    torch.testing.assert_close(found.scores, expected, rtol=1e-8, atol=1e-9)
    assert found.residuals.shape == (8,)
    assert float(found.residuals.max()) <= 1e-11
    assert 0 < found.iterations <= 60


@pytest.mark.parametrize("solver", ["factors", "cg"])
def test_scores_of_tokens_and_layers_add_up(solver):
    model, data, _ = sequences()
    factors = collect(model, data)
    options = {"factors": factors, "solver": solver, "damping_fraction": 0.3}
    whole = influence(model, losses_of_sequences, data, data[:1], **options)
    assert any("norm" in name for name in whole.skipped)
    layers = influence(
        model, losses_of_sequences, data, data[:1], by_layer=True, **options
    ).scores
    assert {"embed", "head", "attend.q_proj", "attend.out_proj"} <= layers.keys()
    both = {"by_layer": True, "by_token": True}
    tokens = influence(
        model, losses_of_sequences, data, data[:1], **both, **options
    ).scores
    for name, scores in layers.items():
        assert tokens[name].shape == (4, 9, 5)
        torch.testing.assert_close(tokens[name].sum(-1), scores)
    torch.testing.assert_close(sum(layers.values()), whole.scores)


class OneWeight(nn.Module):
    """A linear layer whose weight is used without its bias."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        """Return logits (N, T, 3)."""
        return nn.functional.linear(x, self.layer.weight)


def test_scores_of_tokens_of_a_weight_without_its_bias():
    """The gradient of a token is the outer product of its input and its residual."""
    torch.manual_seed(0)
    model = OneWeight().double()
    x, y = torch.randn(5, 6, 4, dtype=torch.float64), torch.randint(3, (5, 6))

    def loss(model, batch):
        z = model(batch[0]).transpose(1, 2)
        return cross_entropy(z, batch[1], reduction="none").sum(1)

    data = [*zip(x.split(3), y.split(3), strict=True)]
    factors = collect(model, data, fisher="exact")
    options = {"factors": factors, "damping": 0.1, "by_token": True}
    found = influence(model, loss, data, data, **options).scores
    g = torch.softmax(model(x).detach(), -1) - nn.functional.one_hot(y, 3)
    D = torch.einsum("nti,ntj->ntij", nn.functional.pad(x, (0, 1)), g).flatten(2)
    D[..., 12:] = 0.0
    F = spectral_blocks(factors.blocks, factors.statistics)["layer"].to_dense()
    F = F + 0.1 * torch.eye(15, dtype=F.dtype)
    expected = torch.einsum("qi,nti->qnt", D.sum(1) @ torch.linalg.inv(F), D)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


class CalledTwice(nn.Module):
    """A layer that sees each token twice: as a module or as a weight, in some order."""

    def __init__(self, how):
        super().__init__()
        self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.how = how

    def forward(self, x):
        """Return logits (N, T, 3)."""
        time_first = self.how == "time first"
        h = torch.tanh(self.twice(x.transpose(0, 1) if time_first else x))
        if self.how == "weight":
            h = nn.functional.linear(h, self.twice.weight)
        elif self.how == "cell":
            h = torch.stack([self.twice(h[:, t]) for t in range(h.shape[1])], 1)
        else:
            h = self.twice(h)
        h = h.transpose(0, 1) if time_first else h
        return self.head(torch.tanh(h))


def losses_of_tokens(model, batch):
    x, y, weights = batch
    z = model(x).transpose(1, 2)
    return (weights * cross_entropy(z, y, reduction="none")).sum(1)


def tokens(count=7, length=5):
    """Return sequences whose first token never counts, and one of a single token."""
    torch.manual_seed(1)
    x = torch.randn(count, length, 4, dtype=torch.float64)
    y = torch.randint(3, (count, length))
    weights = (torch.rand(count, length) > 0.4).double()
    weights[:, 0], weights[0] = 0.0, 0.0
    weights[0, 2] = 1.0
    return x, y, weights


@pytest.mark.parametrize("skipped", [[], ["head"]])
@pytest.mark.parametrize("how", ["module", "weight", "time first"])
def test_scores_of_tokens_of_a_layer_called_twice(how, skipped):
    """Gradients by a copy of the weights of each token, summed over both calls."""
    model, (x, y, weights) = CalledTwice(how).double(), tokens()
    data = [*zip(x.split(3), y.split(3), weights.split(3), strict=True)]
    factors = collect(
        model, data, loss=losses_of_tokens, fisher="empirical", skip_layers=skipped
    )
    found = influence(
        model, losses_of_tokens, data, data, factors=factors, damping=0.1,
        by_token=True, by_layer=True,
    ).scores  # fmt: skip
    copies = {
        name: p.detach().expand(*y.shape, *p.shape).clone().requires_grad_()
        for name, p in model.named_parameters()
    }

    def linear(name, h, bias=True):
        z = torch.einsum("ntoi,nti->nto", copies[name + ".weight"], h)
        return z + copies[name + ".bias"] if bias else z

    h = torch.tanh(linear("twice", x))
    h = torch.tanh(linear("twice", h, bias=how != "weight"))
    z = linear("head", h).transpose(1, 2)
    loss = (weights * cross_entropy(z, y, reduction="none")).sum()
    blocks = spectral_blocks(factors.blocks, factors.statistics)
    assert blocks.keys() == found.keys() == {"twice", "head"} - {*skipped}
    for name, F in blocks.items():
        parameters = [copies[name + ".weight"], copies[name + ".bias"]]
        W, b = torch.autograd.grad(loss, parameters, retain_graph=True)
        D = torch.cat([W.mT, b[:, :, None]], 2).flatten(2)
        F = F.to_dense(damped=False)
        inverse = torch.linalg.inv(F + 0.1 * torch.eye(len(F), dtype=F.dtype))
        expected = torch.einsum("qi,ij,ntj->qnt", D.sum(1), inverse, D)
        torch.testing.assert_close(found[name], expected, rtol=1e-8, atol=1e-10)


def test_sequences_of_several_lengths_have_no_scores_of_tokens():
    model, data = CalledTwice("module").double(), [tokens(3), tokens(3, 4)]
    factors = collect(model, data, loss=losses_of_tokens, fisher="empirical")
    with pytest.raises(kc.ShapeError, match="sequences of 5 tokens"):
        influence(model, losses_of_tokens, data, data, factors=factors, by_token=True)


def test_calls_of_which_no_token_is_known_have_no_scores_of_tokens():
    model, data = CalledTwice("cell").double(), [tokens()]
    factors = collect(model, data, loss=losses_of_tokens, fisher="empirical")
    with pytest.raises(kc.UnsupportedError, match="skip_layers=\\['twice'\\]"):
        influence(model, losses_of_tokens, data, data, factors=factors, by_token=True)


def test_channels_of_a_convolution_are_not_tokens():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Flatten()).double()
    data = [torch.randn(5, 4, 6, dtype=torch.float64)]
    factors = collect(model, data)
    with pytest.raises(kc.UnsupportedError, match="are not tokens"):
        influence(
            model, lambda m, x: m(x)[:, 0], data, data, factors=factors, by_token=True
        )


class Positions(nn.Module):
    """Tokens and an embedding of positions, which all sequences share."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids):
        """Return logits (N, T, 7)."""
        places = torch.arange(ids.shape[1])[None]
        return self.head(torch.tanh(self.embed(ids) + self.place(places)))


def test_embeddings_of_positions_are_left_out(tmp_path):
    """By name, of scores and posteriors; other layers' scores are those of autograd."""
    _, data, _ = sequences()
    model = Positions().double()
    factors = collect(model, data, path=tmp_path / "factors.npz")
    result = influence(
        model, losses_of_sequences, data, data[:1], factors=tmp_path / "factors.npz",
        damping=0.1, by_layer=True,
    )  # fmt: skip
    assert [*result.skipped] == ["place"]
    assert sorted(result.scores) == ["embed", "head"]
    D = gradient_rows(model, losses_of_sequences, data, [model.embed.weight])
    F = spectral_blocks(factors.blocks, factors.statistics)["embed"].to_dense()
    F = F + 0.1 * torch.eye(len(F), dtype=F.dtype)
    expected = D[:4] @ torch.linalg.solve(F, D.T)
    torch.testing.assert_close(result.scores["embed"], expected)
    posterior = Posterior(model, data, factors=factors)
    assert [*posterior.skipped] == ["place"]
    variance = posterior.variance(data[0])
    diagonal = posterior.covariance(data[0]).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(variance, diagonal.reshape(4, 5, 7))


def test_scores_have_the_order_of_the_data():
    model, data = classifier()
    dataset = torch.utils.data.TensorDataset(*data[0])
    shuffled = torch.utils.data.DataLoader(dataset, shuffle=True)
    with pytest.raises(kc.ConventionError, match="`train`"):
        self_influence(model, losses, shuffled, factors=collect(model, data))


def test_rows_are_the_gradients_of_autograd():
    """Under a huge damping scores are inner products: by rows, and of autograd alone."""
    model, data, _ = sequences()
    factors = collect(model, data)
    options = {"factors": factors, "damping": 1e9, "by_layer": True}
    first = influence(model, losses_of_sequences, data, data[:1], **options).scores
    for name, module in (("embed", model.embed), ("head", model.head)):
        parameters = list(module.parameters())
        g = gradient_rows(model, losses_of_sequences, data, parameters)
        torch.testing.assert_close(first[name] * 1e9, g[:4] @ g.T, rtol=1e-6, atol=1e-8)
    g = gradient_rows(model, losses_of_sequences, data, [model.attend.in_proj_weight])
    W = g.reshape(9, 3, -1)[:, 1]
    b = gradient_rows(model, losses_of_sequences, data, [model.attend.in_proj_bias])
    W = torch.cat([W, b.reshape(9, 3, -1)[:, 1]], dim=1)
    torch.testing.assert_close(
        first["attend.k_proj"] * 1e9, W[:4] @ W.T, rtol=1e-6, atol=1e-8
    )


def test_queries_in_files_and_of_low_rank_are_the_same_queries(tmp_path):
    """On disk to the bit; of full rank up to rounding."""
    model, data = classifier()
    factors = collect(model, data)
    options = {"factors": factors}
    whole = influence(model, losses, data, data, **options).scores
    stored = influence(model, losses, data, data, folder=tmp_path, **options).scores
    assert torch.equal(stored, whole)
    assert any(tmp_path.iterdir())
    full = influence(model, losses, data, data, rank=6, **options).scores
    torch.testing.assert_close(full, whole)
    # The gradient of one row has rank one, and a Kronecker product keeps the rank where
    # its damping does not divide: scores of rank one are near.
    near = influence(model, losses, data, data, rank=1, **options).scores
    assert float((near - whole).norm() / whole.norm()) < 0.5


def test_the_score_of_subsets_is_spearmans(tmp_path):
    """As of SciPy; trainings are read where a killed run left them."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 20))
    calls = []

    def retrain(indices, seed):
        calls.append(seed)
        noise = np.random.default_rng(seed).normal(size=3)
        return -scores[:, indices].sum(1) + noise

    options = {"examples": 20, "subsets": 12, "path": tmp_path}
    masks, values = retrained_losses(retrain, **options)
    assert len(calls) == 12
    assert (masks.sum(1) == 10).all()
    (tmp_path / "0-7.npy").unlink()
    again = retrained_losses(retrain, **options)[1]
    assert len(calls) == 13
    assert np.array_equal(again, values)
    found = linear_datamodeling_score(scores, masks, values)
    expected = [
        stats.spearmanr(-(masks @ scores[q]), values[:, q]).statistic for q in range(3)
    ]
    np.testing.assert_allclose(found.by_query, expected)
    assert found.interval[0] <= found.mean <= found.interval[1]
    with pytest.raises(kc.ShapeError, match="losses"):
        linear_datamodeling_score(scores, masks, values[:, :2])


class Gathered(nn.Module):
    """One expert of a mixture, which sees two tokens of some of the sequences."""

    def __init__(self):
        super().__init__()
        self.expert, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        """Return logits (N, 3)."""
        rows = x[::2].flatten(0, 1)
        added = self.expert(rows).reshape(x[::2].shape)
        return self.head(x.index_add(0, torch.arange(0, len(x), 2), added).sum(1))


class Reordered(Gathered):
    """A layer that sees its examples in another order: n + 8 in the place of n."""

    def forward(self, x):
        """Return logits (N, 3)."""
        added = self.expert(x.roll(8, 0)).roll(8, 0)
        return self.head((x + added).sum(1))


@pytest.mark.parametrize("network", [Gathered, Reordered])
def test_as_many_rows_of_others_as_examples_are_not_taken_for_examples(network):
    torch.manual_seed(0)
    model = network().double()
    data = [(torch.randn(16, 2, 5, dtype=torch.float64), torch.arange(16) % 3)]
    factors = collect(model, data)
    found = influence(model, losses, data, data, factors=factors, by_layer=True)
    assert sorted(found.scores) == ["head"]
    assert "expert" in found.skipped


def test_missing_queries_and_options_that_do_not_fit_raise():
    model, data = classifier()
    factors = collect(model, data)
    with pytest.raises(kc.ConventionError, match="`queries`, got none"):
        influence(model, losses, data, [], factors=factors)
    options = {"factors": factors, "solver": "cg", "storage": "float16"}
    with pytest.raises(kc.ConventionError, match="`storage`"):
        influence(model, losses, data, data, **options)
    with pytest.raises(kc.ConventionError, match="fisher"):
        collect(model, data, fisher="exactly")
