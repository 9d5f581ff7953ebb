"""`SOAP` against a naive float64 program, and as the optimizer that AdamW is."""

import copy
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import SOAP, register_layer  # noqa: E402

from ..builders import soap_reference  # noqa: E402

RATE = 1e-2
STEPS = 13


def network(classes=3):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(9, 8),
        nn.Tanh(),
        nn.Linear(8, classes),
    ).double()


def batches(count=STEPS, N=32):
    torch.manual_seed(1)
    return [
        (torch.randn(N, 2, 4).double(), torch.randint(3, (N,))) for _ in range(count)
    ]


def trained(model, optimizer, data, called=None):
    """Take a step on each batch; return the parameters."""
    for x, y in data:
        optimizer.zero_grad()
        fn.cross_entropy((called or model)(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_near(a, b, rtol=1e-8):
    assert float((a - b).norm() / b.norm()) < rtol


def naively_trained(data, *, by_rows, classes=3, eps=1e-10):
    """Train `network` with the naive program."""
    model = network(classes)
    layers = [model[0], model[3], model[5]]
    naive = {
        p: soap_reference.Naive((len(p), p[0].numel()), eps=eps)
        for module in layers
        for p in module.parameters()
    }
    share = 1.0
    for t, (x, y) in enumerate(data, start=1):
        model.zero_grad()
        rows = {}
        for module in model:
            inputs, x = x, module(x)
            if module in layers:
                x.retain_grad()
                rows[module.weight] = inputs, x
        fn.cross_entropy(x, y).backward()
        parts = []
        for p, weight in naive.items():
            V, grams = p.grad.flatten(1) if p.ndim > 1 else p.grad[:, None], ()
            if p in rows:
                a, g = rows[p][0], rows[p][1].grad
                if a.ndim == 3:
                    a = fn.unfold(a[:, :, None], (1, 2)).transpose(1, 2).flatten(0, 1)
                    g = g.transpose(1, 2).flatten(0, 1)
                grams = (g.T @ g, a.T @ a) if by_rows else (V @ V.T, V.T @ V)
            parts.append(
                weight.rotated(
                    V.numpy(),
                    [C.detach().numpy() for C in grams],
                    decay=0.8 if by_rows else soap_reference.BETA2,
                    every=not by_rows,
                )
            )
        jump = soap_reference.jump_at(t, parts)
        for weight in naive.values():
            weight.direction(jump)
        share = soap_reference.share_at(t, share, naive.values(), jump)
        for p, weight in naive.items():
            step = torch.from_numpy(weight.step(share))
            p.data -= share * RATE * step.reshape(p.shape)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_steps_are_those_of_a_naive_program():
    """Rows of convolutions and linear layers, across three changes of bases."""
    model = network()
    got = trained(model, SOAP(model, RATE), batches())
    assert_near(got, naively_trained(batches(), by_rows=True))


def test_parameters_alone_take_the_factors_of_their_gradients():
    """Without a model: SOAP as published, with factors averaged at each step."""
    # Each gradient has at most one direction without variance, so that bases are unique;
    # in that direction a step is roundoff, divided by eps.
    model = network(classes=8)
    data = [(x, y + 3 * (y % 2)) for x, y in batches()]
    optimizer = SOAP(model.parameters(), RATE, eps=1e-8)
    got = trained(model, optimizer, data)
    expected = naively_trained(data, by_rows=False, classes=8, eps=1e-8)
    assert_near(got, expected, rtol=1e-6)
    assert set(optimizer.factors.values()) == {"gradient"}


def test_parameters_without_a_basis_average_adams_directions():
    """Vectors and complex numbers: those of Adam without a first moment."""
    torch.manual_seed(0)
    values = torch.randn(5), torch.randn(3, 2, dtype=torch.complex64)
    ours = [nn.Parameter(x.clone()) for x in values]
    theirs = [nn.Parameter(x.clone()) for x in values]
    soap = SOAP(ours, lr=0.1, eps=1e-8, gain=None)
    adam = torch.optim.Adam(theirs, lr=1.0, betas=(0.0, 0.9))
    momentum = [torch.zeros_like(x) for x in values]
    expected = [x.clone() for x in values]
    for t in range(4):
        before = [x.detach().clone() for x in theirs]
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        soap.step()
        adam.step()
        for i, x in enumerate(theirs):
            d = before[i] - x.detach()
            momentum[i] += 10 / (10 + t) * (d - momentum[i])
            expected[i] -= 0.1 * (0.9 * momentum[i] + 0.1 * d)
    for a, x in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.detach(), x, rtol=1e-5, atol=1e-6)


class Columns(nn.Module):
    """A linear layer whose weight has the shape (in, out), as GPT-2's."""

    def __init__(self, n, m):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, m))

    def forward(self, x):
        return x @ self.weight


register_layer(Columns, "linear", weight_layout="io")


@pytest.mark.parametrize("layer", [nn.Linear, Columns])
@pytest.mark.parametrize(("n", "factor"), [(32, 1.0), (128, 0.5)])
def test_the_first_step_has_the_rate_in_each_direction_of_the_basis(layer, n, factor):
    """Signs of the gradient's coordinates; half as long for four times 32 inputs."""
    torch.manual_seed(0)
    model = layer(n, 4).double()
    before = model.weight.detach().clone()
    optimizer = SOAP(model, lr=0.1)
    model(torch.randn(2 * n, n).double()).cos().sum().backward()
    optimizer.step()
    length = float((model.weight.detach() - before).norm())
    assert length == pytest.approx(0.1 * factor * (4 * n) ** 0.5, rel=1e-4)


@pytest.mark.parametrize(("m", "factor"), [(32, 1.0), (128, 0.5)])
def test_steps_of_wide_embeddings_are_shorter(m, factor):
    """Four rows have four coordinates each that are not zero in their own basis."""
    torch.manual_seed(0)
    table = nn.Embedding(4, m).double()
    before = table.weight.detach().clone()
    optimizer = SOAP(table, lr=0.1)
    table(torch.arange(4)).cos().sum().backward()
    optimizer.step()
    length = float((table.weight.detach() - before).norm())
    assert length == pytest.approx(0.1 * factor * 4, rel=1e-4)


def test_rates_fall_without_a_cosine():
    """Of an embedding alone, and where the first group has no gradients."""
    frozen, table = nn.Parameter(torch.zeros(3)), nn.Embedding(5, 4)
    optimizer = SOAP([{"params": [frozen]}, {"params": table.parameters()}])
    for _ in range(6):
        optimizer.zero_grad()
        table(torch.arange(3)).square().sum().backward()
        optimizer.step()
    assert [g["share"] for g in optimizer.param_groups] == 2 * [
        pytest.approx((1 + 5 / 400) ** -0.5)
    ]


def test_weight_decay_is_decoupled():
    """Zero gradients leave ``(1 - lr weight_decay)^t`` of each weight, vectors too."""
    model = nn.Linear(4, 3).double()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = SOAP(model, lr=0.1, weight_decay=0.5, gain=None)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    for p, x in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), 0.95**2 * x)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**-10])
def test_the_scale_of_the_loss_drops_out(scale):
    """A sum takes the steps of a mean, up to Adam's eps."""
    a, b = network(), network()
    first = SOAP(a, eps=0.0)
    second = SOAP(b, eps=0.0)
    for x, y in batches():
        for model, optimizer, c in ((a, first, 1.0), (b, second, scale)):
            optimizer.zero_grad()
            (c * fn.cross_entropy(model(x), y)).backward()
            optimizer.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert_near(p.detach(), q.detach())


def test_accumulated_passes_are_one_batch():
    """Halves of a batch, one after the other."""
    a, b = network(), network()
    whole, halves = SOAP(a, RATE), SOAP(b, RATE)
    expected = trained(a, whole, batches())
    for x, y in batches():
        halves.zero_grad()
        for part in (slice(0, 16), slice(16, 32)):
            (0.5 * fn.cross_entropy(b(x[part]), y[part])).backward()
        halves.step()
    assert_near(torch.cat([p.detach().reshape(-1) for p in b.parameters()]), expected)


@pytest.mark.parametrize("factor", [100.0, float("inf")])
def test_cleared_passes_leave_no_rows(factor):
    """Rows go with the gradients that `zero_grad` clears, as after an overflow."""
    a, b = network(), network()
    expected = trained(a, SOAP(a), batches(2))
    optimizer = SOAP(b)
    data = batches(2)
    fn.cross_entropy(factor * b(data[1][0]), data[1][1]).backward()
    assert torch.equal(trained(b, optimizer, data), expected)


def test_a_batch_without_examples_changes_no_basis():
    model = network()
    optimizer = SOAP(model)
    [(x, y)] = batches(1)
    for n in (32, 0, 32):
        optimizer.zero_grad()
        fn.cross_entropy(model(x[:n]), y[:n], reduction="sum").backward()
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_models_have_hooks_on_steps_that_renew_bases_only():
    model = network()
    optimizer = SOAP(model)
    hooked = []
    for x, y in batches(12):
        hooked.append(any(m._forward_hooks for m in model.modules()))
        optimizer.zero_grad()
        fn.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert [i + 1 for i, h in enumerate(hooked) if h] == [1, 2, 3, 10]


@pytest.mark.parametrize("width", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_same_to_the_bit(width, tmp_path):
    """Between two renewals and before one; states of narrow parameters are float32."""
    data = [(x.to(width), y) for x, y in batches(16)]
    for cut in (5, 9):
        a, b = network().to(width), network().to(width)
        first = SOAP(a)
        trained(a, first, data[:cut])
        torch.save([a.state_dict(), first.state_dict()], tmp_path / "saved")
        weights, state = torch.load(tmp_path / "saved")
        b.load_state_dict(weights)
        second = SOAP(b)
        second.load_state_dict(state)
        kept = {
            x.dtype for s in second.state.values() for x in s.values() if x.ndim > 0
        }
        assert kept == {torch.float32}
        expected = trained(a, first, data[cut:])
        assert torch.equal(trained(b, second, data[cut:]), expected)


def test_a_state_of_another_optimizer_or_a_negative_count_changes_nothing():
    (model, twin), data = (network(), network()), batches(6)
    first, second = SOAP(model), SOAP(twin)
    trained(model, first, data[:3])
    trained(twin, second, data[:3])
    with pytest.raises(kc.StateError, match="another optimizer"):
        first.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    for count in ("steps", "step"):
        state = copy.deepcopy(first.state_dict())
        (state["param_groups"] if count == "steps" else state["state"])[0][count] = -1
        with pytest.raises(kc.StateError, match="steps >= 0, got -1"):
            first.load_state_dict(state)
    expected = trained(twin, second, data[3:])
    assert torch.equal(trained(model, first, data[3:]), expected)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@pytest.mark.parametrize("cut", [5, 9])
def test_copies_of_model_and_optimizer_go_on_alike(copied, cut):
    """Also a copy that is made while hooks are set, before the tenth step."""
    data = batches(16)
    model = network()
    optimizer = SOAP(model)
    trained(model, optimizer, data[:cut])
    other, second = copied((model, optimizer))
    expected = trained(model, optimizer, data[cut:])
    assert torch.equal(trained(other, second, data[cut:]), expected)


class Attending(nn.Module):
    """Attention of both kinds, with shared inputs, embeddings, and a norm."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.cell = nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 11)

    def forward(self, ids):
        x = self.tokens(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        h = self.norm(x)
        x = x + self.q(h).sigmoid() * self.k(h)
        return self.head(self.cell(x)[0])


def attending():
    torch.manual_seed(0)
    model = Attending().double()
    ids = torch.randint(11, (16, 5))
    return model, ids


def test_factors_are_those_of_the_rows():
    """Projections of attention, recurrent weights, embeddings, shared inputs."""
    model, ids = attending()
    seen = {}
    for name, module in model.named_modules():
        if name in ("attention", "q", "head", "cell", "tokens"):
            module.register_forward_hook(
                lambda m, a, y, name=name: seen.update({name: (a, y)})
            )
    optimizer = SOAP(model)
    z = model(ids)
    for x in (seen["tokens"][1], seen["q"][1], z):
        x.retain_grad()
    fn.cross_entropy(z.flatten(0, 1), ids.flatten()).backward()
    optimizer.step()

    def unit(rows):
        rows = rows.detach().flatten(0, -2)
        C = rows.T @ rows
        return C / C.trace() * len(C)

    def factor(p, name):
        return optimizer.state[p][name][0]

    expected = {
        (model.tokens.weight, "right_factor"): seen["tokens"][1].grad,
        (model.q.weight, "right_factor"): seen["q"][0][0],
        (model.q.weight, "left_factor"): seen["q"][1].grad,
        (model.head.weight, "right_factor"): seen["head"][0][0],
        (model.head.weight, "left_factor"): z.grad,
        (model.cell.weight_ih_l0, "right_factor"): seen["cell"][0][0],
        (model.attention.in_proj_weight, "attention.q_proj.right_factor"): seen[
            "attention"
        ][0][0],
    }
    for (p, name), rows in expected.items():
        torch.testing.assert_close(factor(p, name), unit(rows))
    # The bias is added to each row, so that its gradient is the sum of the rows.
    G = factor(model.attention.in_proj_weight, "attention.v_proj.left_factor")
    g = model.attention.in_proj_bias.grad[16:]
    assert float(g @ torch.linalg.pinv(G) @ g) > 0
    assert "left_factor" not in optimizer.state[model.tokens.weight]
    shared = [optimizer.state[m.weight]["right_basis"] for m in (model.q, model.k)]
    assert shared[0] is shared[1]
    assert set(optimizer.factors.values()) == {"rows"}
    assert max(optimizer.residuals().values()) < 1e-6


def test_steps_of_attention_go_on():
    """All stacks together: two parts of one parameter, copies of bases, plain vectors."""
    model, ids = attending()
    optimizer = SOAP(model, lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = fn.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_a_tied_weight_takes_the_factors_of_its_gradient():
    """Rows of an embedding and of logits are not those of one matrix."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Tanh(), head)
    optimizer = SOAP(model)
    ids = torch.randint(7, (16,))
    fn.cross_entropy(model(ids), ids).backward()
    optimizer.step()
    assert optimizer.factors == {"0.weight": "gradient"}


def test_a_layer_that_is_used_twice_has_the_rows_of_both_uses():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    x = torch.randn(8, 3).double()
    y = layer(x).tanh()
    both = torch.cat([x, y.detach()])
    optimizer = SOAP(layer)
    layer(layer(x).tanh()).square().mean().backward()
    optimizer.step()
    A = both.T @ both
    got = optimizer.state[layer.weight]["right_factor"][0]
    torch.testing.assert_close(got, A / A.trace() * 3)


def test_checkpoints_change_nothing():
    a, b = network(), network()
    expected = trained(a, SOAP(a), batches())
    optimizer = SOAP(b)

    def called(x):
        return b[3:](checkpoint(b[:3], x, use_reentrant=False))

    assert_near(trained(b, optimizer, batches(), called), expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models_take_the_same_steps(in_place):
    """They run as they are written where bases are renewed, and compiled elsewhere."""
    a, b = network(), network()
    expected = trained(a, SOAP(a), batches())
    called = b
    if in_place:
        b.compile(backend="eager")
    else:
        called = torch.compile(b, backend="eager")
    optimizer = SOAP(called)
    assert_near(trained(b, optimizer, batches(), called), expected)


def test_an_unregistered_compiled_model_warns():
    """Its rows are not seen, and its gradients' factors are taken."""
    torch._dynamo.reset()
    model = network()
    optimizer = SOAP(model)
    called = torch.compile(model, backend="eager")
    with pytest.warns(UserWarning, match=r"no rows .* at all.* torch.compile"):
        trained(model, optimizer, batches(4), called)


def test_a_weight_that_is_read_without_its_module_warns():
    """Of this layer alone, and without a word of compiled code."""

    class Reads(nn.Sequential):
        def forward(self, x):
            return fn.linear(torch.tanh(self[0](x)), self[1].weight, self[1].bias)

    model = Reads(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    optimizer = SOAP(model)
    z = model(torch.randn(6, 5).double())
    fn.cross_entropy(z, torch.arange(6) % 3).backward()
    with pytest.warns(UserWarning, match=r"layers \['1'\].*without calling") as seen:
        optimizer.step()
    assert "compile" not in str(seen[0].message)


def test_a_gradient_scaler_changes_nothing():
    a, b = network().float(), network().float()
    data = [(x.float(), y) for x, y in batches()]
    expected = trained(a, SOAP(a), data)
    optimizer, scaler = SOAP(b), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(fn.cross_entropy(b(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    got = torch.cat([p.detach().reshape(-1) for p in b.parameters()])
    assert_near(got, expected, rtol=1e-3)


def test_autocast():
    """Output gradients are narrow, and the factors are not; also of a step within it."""
    half, trained_by = torch.autocast("cpu", dtype=torch.bfloat16), {}
    for steps in ("outside", "within", "closure"):
        torch.manual_seed(0)
        model = network().float()
        optimizer = SOAP(model)
        for x, y in batches(4):

            def loss_of(model=model, optimizer=optimizer, x=x, y=y, steps=steps):
                optimizer.zero_grad()
                loss = fn.cross_entropy(model(x.float()), y)
                if steps != "outside":
                    loss.backward()
                return loss

            if steps == "closure":
                half(optimizer.step)(loss_of)
                continue
            loss = half(loss_of)()
            if steps == "outside":
                loss.backward()
            (half(optimizer.step) if steps == "within" else optimizer.step)()
        trained_by[steps] = [p.detach() for p in model.parameters()]
        factor = optimizer.state[model[3].weight]["left_factor"]
        assert factor.dtype == torch.float32
        assert bool(torch.isfinite(factor).all())
    for steps in ("within", "closure"):
        for p, q in zip(trained_by[steps], trained_by["outside"], strict=True):
            torch.testing.assert_close(p, q)


def test_parameters_come_and_go():
    """Frozen, without a gradient for some steps, and trained later."""
    model = network()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    optimizer = SOAP(model)
    data = batches(16)
    trained(model, optimizer, data[:2])
    assert torch.equal(model[0].weight, frozen)
    model[0].weight.requires_grad_(True)
    model[5].weight.requires_grad_(False)
    trained(model, optimizer, data[2:5])
    model[5].weight.requires_grad_(True)
    trained(model, optimizer, data[5:])
    steps = [float(optimizer.state[model[i].weight]["step"]) for i in (0, 3, 5)]
    assert steps == [14, 16, 13]
    assert optimizer.factors["0.weight"] == "gradient"
    assert not torch.equal(model[0].weight, frozen)


def test_parameters_whose_memory_is_exchanged():
    """Averages of weights are swapped in by ``p.data = ...``."""
    a, b = network(), network()
    expected = trained(a, SOAP(a), batches(6))
    optimizer = SOAP(b)
    trained(b, optimizer, batches(4))
    for p in b.parameters():
        p.data = p.data.clone()
    assert torch.equal(trained(b, optimizer, batches(6)[4:]), expected)


def test_groups_have_rates_of_their_own_and_schedulers_work():
    a, b = network(), network()
    expected = trained(a, SOAP(a, RATE, gain=None), batches(5))
    groups = [{"params": b[:3].parameters()}, {"params": b[3:].parameters(), "lr": 1.0}]
    optimizer = SOAP(groups, RATE, rows_of=b, gain=None)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda _: 1.0, lambda _: RATE]
    )
    got = trained(b, optimizer, batches(5))
    scheduler.step()
    assert_near(got, expected)


def test_a_closure_is_called_with_gradients_enabled():
    model = network()
    optimizer = SOAP(model)
    [(x, y)] = batches(1)

    def closure():
        optimizer.zero_grad()
        loss = fn.cross_entropy(model(x), y)
        loss.backward()
        return loss

    before = float(optimizer.step(closure).detach())
    assert float(closure().detach()) < before


@pytest.mark.parametrize("N", [2, 512])
@pytest.mark.parametrize("width", [16, 300])
def test_widths_and_batches(width, N):
    """At the default rate: fewer rows than features, and more than are kept."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 5)
    )
    optimizer = SOAP(model)
    x = torch.randn(N, 20)
    y = torch.randint(5, (N,))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = fn.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"lr": -1.0}, kc.ConventionError, "lr"),
        ({"beta2": 1.5}, kc.DecayError, "beta2"),
        ({"eps": -1.0}, kc.ConventionError, "eps"),
        ({"weight_decay": -1.0}, kc.ConventionError, "weight_decay"),
        ({"update_every": 0}, kc.ConventionError, "update_every"),
        ({"decay": 2.0}, kc.DecayError, "decay"),
        ({"block": 0}, kc.ConventionError, "block"),
        ({"max_rows": 0}, kc.ConventionError, "max_rows"),
        ({"rows_of": nn.Linear(2, 2)}, kc.ConventionError, "rows_of"),
    ],
)
def test_bad_options_raise(options, error, said):
    with pytest.raises(error, match=said):
        SOAP(nn.Linear(2, 2), **options)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = SOAP(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(kc.UnsupportedError, match="sparse"):
        optimizer.step()
