"""Tensors that are not what they look like: with one thread, NumPy reads their memory."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kfac_core as kc  # noqa: E402

LAYER = kc.Dense(in_features=3, out_features=2, bias=False, weight_layout="io")


class Named(torch.Tensor):
    """A subclass that adds nothing."""


RIGHT = {
    "negative bit": lambda x: torch.complex(x, -x).conj().imag,
    "subclass": lambda x: x.as_subclass(Named),
    "parameter": torch.nn.Parameter,
    "expanded": lambda x: x[..., None].expand(*x.shape, 2)[..., 1],
}
WRONG = {
    "sparse": lambda x: x.to_sparse(),
    "oneDNN": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([*x]),
    "meta": lambda x: x.to("meta"),
}


@pytest.fixture(params=[1, 2])
def threads(request):
    """Number of threads; on one, NumPy computes on the memory of tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(8, n)) for name, n in (("x", 3), ("g", 2))} | {
        "V": rng.normal(size=(3, 2))
    }


def estimator():
    blocks = {"a": kc.Block(LAYER, kc.Kronecker())}
    return kc.Estimator(blocks, reduction="sum", damping=0.1, damping_rule="exact")


def direction(arrays, kind):
    """Return the direction of one step, with all arrays or some changed by `kind`."""
    x, g, V = (kind(torch.tensor(a, dtype=torch.float32)) for a in arrays.values())
    e = estimator()
    e.update({"a": kc.Batch(x, g)})
    e.refresh()
    found = e.precondition({"a": {"weight": V}})["a"]["weight"]
    copy.deepcopy(e)
    return found.detach().numpy(force=True)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", RIGHT)
def test_valid_tensors_give_the_dense_direction(arrays, kind):
    """And states that can be copied, whatever class the tensors have."""
    x, g, V = arrays.values()
    S = np.kron(x.T @ x / 8, g.T @ g / 8) + 0.1 * np.eye(6)
    expected = np.linalg.solve(S, V.reshape(-1)).reshape(3, 2)

    np.testing.assert_allclose(direction(arrays, RIGHT[kind]), expected, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("where", ["inputs", "weight"])
def test_tensors_that_hold_no_dense_numbers_are_named(arrays, kind, where):
    """By the argument that they are, in an update and in a product."""
    x, g, V = (torch.tensor(a, dtype=torch.float32) for a in arrays.values())
    change = WRONG[kind]
    e = estimator()
    if where == "inputs":
        with pytest.raises(kc.ArgumentError, match="inputs"):
            e.update({"a": kc.Batch(change(x), g)})
        return
    e.update({"a": kc.Batch(x, g)})
    e.refresh()
    with pytest.raises(kc.ArgumentError, match="weight"):
        e.precondition({"a": {"weight": change(V)}})
