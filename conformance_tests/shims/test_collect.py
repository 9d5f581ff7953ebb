"""Statistics of a data set: those of one dense computation, killed or not, in any parts."""

import functools

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.integration import collection
from kfac_core.posterior import spectral_blocks

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from kfac_core_shims.torch import collect, read_factors, register_layer  # noqa: E402

from ..builders.torch_rows import jacobians, softmax_hessians  # noqa: E402


class KilledError(Exception):
    """A run was killed."""


def stopping(after):
    """Return a progress function that stops a run after so many batches."""
    left = [after]

    def progress(done, total):
        assert 0 < done <= total
        left[0] -= 1
        if not left[0]:
            raise KilledError

    return progress


def classifier():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(4, 3)).double().eval()


def batches():
    torch.manual_seed(1)
    return [(x, None) for x in torch.randn(23, 2, 3, 3, dtype=torch.float64).split(4)]


def dense_blocks(model, data, names=("3", "5")):
    """Return layers' Gauss-Newton matrices of a cross-entropy, (in (+ 1), out) first."""
    x = torch.cat([x for x, _ in data])
    J, H = jacobians(model, x), softmax_hessians(model(x))
    found = {}
    for name in names:
        columns = [J[f"{name}.weight"]]
        if f"{name}.bias" in J:
            columns.append(J[f"{name}.bias"][..., None])
        rows = torch.cat(columns, dim=-1).transpose(-1, -2).flatten(2)
        found[name] = torch.einsum("nci,ncd,ndj->ij", rows, H, rows) / len(x)
    return found


def test_moments_are_the_diagonal_of_the_dense_block_in_its_basis():
    """E is the best diagonal: of the dense Gauss-Newton block, in the factors' basis."""
    model, data = classifier(), batches()
    factors = collect(model, data, fisher="exact")
    assert factors.examples == 23
    assert_moments_are_of(factors, dense_blocks(model, data))


def assert_moments_are_of(factors, blocks):
    spectra = spectral_blocks(factors.blocks, factors.statistics)
    for name, F in blocks.items():
        bases = factors.statistics[name].bases
        Q = np.kron(*(bases[s].eigenvectors.numpy() for s in ("input", "output")))
        expected = np.diag(Q.T @ F.numpy() @ Q)
        np.testing.assert_allclose(
            spectra[name].spectrum.flatten(), expected, atol=1e-12
        )


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two matrices beside it."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        """Add the product."""
        return self.base(x) + 2.0 * self.up(self.down(x))


def test_adapters_have_blocks_and_their_base_has_none():
    model = classifier()
    for name in ("3", "5"):
        setattr(model, name, LowRank(getattr(model, name), 2))
    model.requires_grad_(False).double()
    names = ["3.down", "3.up", "5.down", "5.up"]
    for name in names:
        model.get_submodule(name).requires_grad_(True)
    data = batches()
    factors = collect(model, data, fisher="exact")
    assert sorted(factors.blocks) == names
    assert_moments_are_of(factors, dense_blocks(model, data, names))


def test_adapters_of_peft_have_blocks():
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=["3", "5"], init_lora_weights=False)
    model, data = peft.get_peft_model(classifier(), options).eval(), batches()
    factors = collect(model, data, fisher="exact")
    names = [
        f"base_model.model.{k}.lora_{side}.default" for k in (3, 5) for side in "AB"
    ]
    assert sorted(factors.blocks) == names
    assert_moments_are_of(factors, dense_blocks(model, data, names))


@pytest.mark.parametrize("after", [1, 3, 8, 11, 20])
def test_a_killed_run_is_resumed_to_the_bit(tmp_path, after):
    """In either stage and any part; the file is that of a run that nobody stopped."""
    model, data = classifier(), batches()
    options = {"max_elements": 300, "save_every": 2}
    whole, path = tmp_path / "whole.npz", tmp_path / "stopped.npz"
    collect(model, data, path=whole, **options)
    with pytest.raises(KilledError):
        collect(model, data, path=path, progress=stopping(after), **options)
    assert not path.exists()
    collect(model, data, path=path, **options)
    assert path.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stopped.npz", "whole.npz"]


def test_parts_and_files_change_no_number(tmp_path):
    """One part in memory, and one part for each layer, read from the file."""
    model, data, path = classifier(), batches(), tmp_path / "factors.npz"
    together = spectral_blocks(*_both(collect(model, data)))
    collect(model, data, path=path, max_elements=1)
    apart = spectral_blocks(*_both(read_factors(model, path)))
    assert together.keys() == apart.keys() == {"0", "3", "5"}
    for name, operator in together.items():
        torch.testing.assert_close(apart[name].spectrum, operator.spectrum)


def _both(factors):
    return factors.blocks, factors.statistics


def test_processes_end_with_the_sums_over_all(tmp_path):
    """Three shares of the data, one of each process, are the whole of it."""
    model, data = classifier(), batches()
    expected = spectral_blocks(*_both(collect(model, data, fisher="exact")))
    # Here, since ranks are threads and PyTorch's seed is one for all of them.
    models = [classifier() for _ in range(3)]

    def run(communicator):
        own = data[communicator.rank :: 3]
        path = tmp_path / "factors.npz"
        one = models[communicator.rank]
        factors = collect(
            one, own, fisher="exact", path=path, communicator=communicator
        )
        return factors.examples, factors.statistics

    for examples, statistics in kc.distributed.run_ranks(3, run):
        assert examples == 23
        blocks = collect(model, data, fisher="exact").blocks
        for name, operator in spectral_blocks(blocks, statistics).items():
            torch.testing.assert_close(
                operator.spectrum, expected[name].spectrum, rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("stage", [1, 2])
def test_processes_go_on_together_where_one_was_killed(tmp_path, monkeypatch, stage):
    """Killed before the end of a stage was saved that the other had saved."""
    data, save = batches(), collection.save_checkpoint
    models = [classifier() for _ in range(2)]

    def run(path, communicator):
        own, model = data[communicator.rank :: 2], models[communicator.rank]
        collect(model, own, path=tmp_path / path, communicator=communicator)

    def killed(path, *arguments, **options):
        if path.name.endswith(f".part0.1of2.{stage}"):
            raise KilledError
        save(path, *arguments, **options)

    kc.distributed.run_ranks(2, functools.partial(run, "whole.npz"))
    monkeypatch.setattr(collection, "save_checkpoint", killed)
    with pytest.raises(KilledError):
        kc.distributed.run_ranks(2, functools.partial(run, "stopped.npz"))
    monkeypatch.undo()
    assert (tmp_path / f"stopped.npz.part0.0of2.{stage}").exists()
    kc.distributed.run_ranks(2, functools.partial(run, "stopped.npz"))
    first, second = (tmp_path / f"{name}.npz" for name in ("whole", "stopped"))
    assert first.read_bytes() == second.read_bytes()
    assert len([*tmp_path.iterdir()]) == 2


def test_a_killed_run_goes_on_with_another_number_of_processes(tmp_path):
    """Saved sums are of shares that no process of the new run has."""
    data, path = batches(), tmp_path / "factors.npz"
    models = [classifier() for _ in range(3)]
    expected = spectral_blocks(*_both(collect(models[0], data, fisher="exact")))

    def run(communicator, progress=lambda: None):
        rank, size = communicator.rank, communicator.size
        factors = collect(
            models[rank], data[rank::size], fisher="exact", path=path, save_every=1,
            progress=progress(), communicator=communicator,
        )  # fmt: skip
        return factors.examples, spectral_blocks(*_both(factors))

    with pytest.raises(KilledError):
        kc.distributed.run_ranks(
            2, functools.partial(run, progress=lambda: stopping(2))
        )
    for examples, spectra in kc.distributed.run_ranks(3, run):
        assert examples == 23
        for name, operator in spectra.items():
            torch.testing.assert_close(
                operator.to_dense(), expected[name].to_dense(), rtol=1e-9, atol=1e-12
            )
    assert [*tmp_path.iterdir()] == [path]


def test_sums_of_processes_whose_arrays_have_two_orders():
    """As where one process has rows of a layer and another has none."""
    x = torch.randn(2, 200, 170, dtype=torch.float64)
    of_ranks = [x[0].clone(), x[1].mT.contiguous().mT]

    def run(communicator):
        collected = object.__new__(collection._Run)
        collected.communicator = communicator
        return collected._total(of_ranks[communicator.rank])

    for total in kc.distributed.run_ranks(2, run):
        torch.testing.assert_close(total, x.sum(0))


class Mixture(nn.Module):
    """Two experts, each of which sees some of the rows."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(self, x):
        """Send rows by the sign of their first number."""
        y = x.new_zeros(len(x), 2)
        for sign, expert in zip((True, False), self.experts, strict=True):
            rows = (x[:, 0] > 0) == sign
            y[rows] = expert(x[rows])
        return y


def test_an_expert_has_the_curvature_of_all_examples():
    """Its own rows, divided by the examples of the data, whatever a batch sent to it."""
    torch.manual_seed(0)
    model = Mixture().double().eval()
    x = torch.randn(30, 3, dtype=torch.float64)
    factors = collect(model, x.split(7), likelihood="gaussian", fisher="exact")
    spectra = spectral_blocks(*_both(factors))
    for name, rows in (("experts.0", x[x[:, 0] > 0]), ("experts.1", x[x[:, 0] <= 0])):
        X = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
        expected = torch.kron(X.T @ X, torch.eye(2, dtype=X.dtype)) / len(x)
        torch.testing.assert_close(spectra[name].to_dense(), expected)


def test_an_expert_of_one_process_has_the_curvature_of_all_examples(tmp_path):
    """The other process has no rows of it; one without any batch is an error on both."""
    torch.manual_seed(0)
    models = [Mixture().double().eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(20, 3, dtype=torch.float64)
    parts = x[x[:, 0] > 0], x[x[:, 0] <= 0]
    options = {"likelihood": "gaussian", "fisher": "exact"}

    def run(communicator, shares):
        share = shares[communicator.rank]
        one = models[communicator.rank]
        factors = collect(one, share, communicator=communicator, **options)
        return spectral_blocks(*_both(factors))

    expected = spectral_blocks(*_both(collect(models[0], parts, **options)))
    shares = [[part] for part in parts]
    for spectra in kc.distributed.run_ranks(2, functools.partial(run, shares=shares)):
        for name, operator in spectra.items():
            torch.testing.assert_close(operator.spectrum, expected[name].spectrum)
    with pytest.raises(kc.NotReadyError, match="no batch on 1 process"):
        kc.distributed.run_ranks(2, functools.partial(run, shares=[[x], []]))


class StackedExperts(nn.Module):
    """Three experts whose weights are one tensor, read by one product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 2))

    def forward(self, x):
        """Multiply each expert's rows."""
        return torch.einsum("nei,eio->neo", x, self.weight)


register_layer(StackedExperts, "experts", weight_layout="io")


def test_each_expert_of_a_stack_of_weights_has_a_block():
    torch.manual_seed(0)
    model = nn.Sequential(StackedExperts(), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3))
    model = model.double().eval()
    data = [(x, None) for x in torch.randn(23, 3, 4, dtype=torch.float64).split(5)]
    factors = collect(model, data, fisher="exact")
    x = torch.cat([x for x, _ in data])
    J, H = jacobians(model, x)["0.weight"], softmax_hessians(model(x))
    blocks = {}
    for e in range(3):
        rows = J[:, :, e].flatten(2)
        F = torch.einsum("nci,ncd,ndj->ij", rows, H, rows) / len(x)
        blocks[f"0.weight.{e}"] = F
    assert sorted(factors.blocks) == [*blocks, "3"]
    assert not factors.skipped
    assert_moments_are_of(factors, blocks)


def test_empirical_gradients_are_those_of_the_losses():
    """Of one linear layer with one output K-FAC's moments are exact."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x, y = torch.randn(2, 12, 3, dtype=torch.float64)
    data = list(zip(x.split(5), y[:, :1].split(5), strict=True))

    def losses(model, batch):
        return ((model(batch[0]) - batch[1]) ** 2)[:, 0]

    factors = collect(model, data, fisher="empirical", loss=losses)
    g = 2.0 * (model(x) - y[:, :1]).detach()
    D = torch.cat([g * x, g], dim=1)
    Q = factors.statistics[""].bases["input"].eigenvectors
    expected = ((D @ Q) ** 2).mean(0)
    found = spectral_blocks(*_both(factors))[""].spectrum[:, 0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_have_statistics_in_single(half):
    model = classifier().to(half)
    data = [x.to(half) for x, _ in batches()]
    factors = collect(model, data)
    assert all(s.dtype == torch.float32 for s in factors.statistics.values())


def test_models_run_in_evaluation_mode():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(12, 3).split(5)
    expected = collect(model, x).statistics["3"].averages["block"].value(debias=True)
    model.train()
    model[2].eval()
    found = collect(model, x).statistics["3"].averages["block"].value(debias=True)
    assert torch.equal(found, expected)
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert [module.training for module in model] == [True, True, False, True]


def test_loaders_that_would_give_wrong_sums_are_refused(tmp_path):
    model, data = classifier(), batches()
    with pytest.raises(kc.ConventionError, match="got 0 examples after 23"):
        collect(model, iter(data))
    with pytest.raises(kc.NotReadyError, match="no batch"):
        collect(model, [])
    dataset = torch.utils.data.TensorDataset(torch.cat([x for x, _ in data]))
    shuffled = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
    with pytest.raises(kc.ConventionError, match="shuffle=False"):
        collect(model, shuffled, path=tmp_path / "factors.npz", save_every=1)


def test_rows_that_do_not_count_are_asked_for():
    x, y = torch.randn(4, 3), torch.tensor([0, 1, -100, 1])
    with pytest.raises(kc.ConventionError, match="labels are -100"):
        collect(nn.Linear(3, 2), [(x, y)])

    class Tokens(nn.Sequential):
        def forward(self, input, attention_mask):
            return super().forward(input)

    batch = {
        "input": torch.randn(2, 2, 3),
        "attention_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    with pytest.raises(kc.ConventionError, match="padding"):
        collect(Tokens(nn.Linear(3, 2)), [batch])


def test_unfinished_files_are_told_from_others(tmp_path):
    model, data, path = classifier(), batches(), tmp_path / "factors.npz"
    with pytest.raises(KilledError):
        collect(model, data, path=path, max_elements=1, progress=stopping(15))
    with pytest.raises(kc.StateError, match="not finished"):
        read_factors(model, tmp_path / "factors.npz.part0.2")
    with pytest.raises(kc.StateError, match="unfinished run of other options"):
        collect(model, data, path=path, max_elements=10**6)


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.npz"
    layer = kc.Dense(in_features=2, out_features=2, bias=False, weight_layout="io")
    blocks = {"a": kc.Block(layer, kc.Kronecker())}
    estimator = kc.Estimator(blocks, reduction="sum")
    estimator.update({"a": kc.Batch(np.ones((3, 2)), np.ones((3, 2)))})
    kc.save_checkpoint(path, estimator)
    with pytest.raises(kc.StateError, match="not written by `collect`"):
        collect(classifier(), batches(), path=path)
    with pytest.raises(kc.ConventionError, match="`path`"):
        collect(classifier(), batches(), save_every=2)


def normalized():
    """Return a model with running statistics."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(18, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double().eval()


@pytest.mark.parametrize("finished", [True, False])
def test_a_file_of_another_model_or_of_other_options_is_refused(tmp_path, finished):
    """Finished or not; the same model, built anew, has the file or goes on."""
    data, path = batches(), tmp_path / "factors.npz"
    options = {"path": path, "save_every": 2, "likelihood": "categorical"}
    expected = collect(normalized(), data).statistics["3"].averages["block"]
    if finished:
        collect(normalized(), data, **options)
    else:
        with pytest.raises(KilledError):
            collect(normalized(), data, progress=stopping(3), **options)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    weights = normalized()
    with torch.no_grad():
        weights[3].bias[0] += 1e-9
    buffers = normalized()
    buffers[2].running_mean += 1.0
    for model in (weights, buffers):
        with pytest.raises(
            kc.StateError, match=r"factors\.npz.*other parameters.*Delete"
        ):
            collect(model, data, **options)
    for name, value in {
        "likelihood": "gaussian",
        "fisher": "exact",
        "samples": 2,
        "positions": "separate",
    }.items():
        with pytest.raises(kc.StateError, match=f"factors.npz.*other {name}.*Delete"):
            collect(normalized(), data, **{**options, name: value})
    for other in ({"ekfac": False}, {"skip_layers": ["3"]}):
        with pytest.raises(kc.StateError, match="other layers or approximations"):
            collect(normalized(), data, **{**options, **other})
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    again = {**options, "likelihood": nn.CrossEntropyLoss(reduction="sum")}
    found = collect(normalized(), [] if finished else data, **again)
    moments = found.statistics["3"].averages["block"].value(debias=True)
    assert torch.equal(moments, expected.value(debias=True))


def test_processes_refuse_a_file_of_another_model(tmp_path):
    """All of them; running statistics of a replica may differ from those of the first."""
    data, path = batches(), tmp_path / "factors.npz"

    def run(communicator, bias=0.0):
        model = models[communicator.rank]
        with torch.no_grad():
            model[3].bias.fill_(bias)
            model[2].running_mean.fill_(communicator.rank)
        own = data[communicator.rank :: 2]
        return collect(model, own, path=path, communicator=communicator).examples

    models = [normalized() for _ in range(2)]
    for _ in range(2):
        assert kc.distributed.run_ranks(2, run) == [23, 23]
    with pytest.raises(kc.StateError, match="other parameters"):
        kc.distributed.run_ranks(2, functools.partial(run, bias=1.0))
