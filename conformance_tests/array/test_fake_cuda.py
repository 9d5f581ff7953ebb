"""PyTorch's fake tensors on a CUDA device that is not there.

A fake tensor has a shape, a dtype and a device, but no numbers.  An operation that puts
two devices together raises an error that names both, and one that would bring a number to
the host raises ``DataDependentOutputException``.  So these tests prove that nothing is left
on the host and that nothing synchronizes with the device in secret; they prove nothing
about numbers, and no GPU runs.
"""

from __future__ import annotations

import contextlib

import pytest

import kfac_core as kc

from ..builders.every_product import KINDS, N, block, every_product, m, n

RULES = ["factored", "factored_unit_pi", "exact"]


@pytest.fixture
def torch(requires_backend):
    """PyTorch itself."""
    requires_backend("torch")
    import torch

    return torch


def basic_index(torch, x, key):
    """Index by integers, slices, None and Ellipsis, through operators alone."""
    aten = torch.ops.aten
    keys = key if isinstance(key, tuple) else (key,)
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if Ellipsis not in keys:
        keys = (*keys, Ellipsis)
    axis = 0
    for k in keys:
        if k is Ellipsis:
            axis += x.ndim - axis - _axes_after(keys) if used else x.ndim - axis
        elif k is None:
            x, axis = aten.unsqueeze(x, axis), axis + 1
        elif isinstance(k, slice):
            start, stop, step = k.indices(x.shape[axis])
            x, axis = aten.slice(x, axis, start, max(start, stop), step), axis + 1
        else:
            x = aten.select(x, axis, k)
    return x


def _axes_after(keys):
    """Return how many axes the keys behind the Ellipsis take."""
    behind = keys[keys.index(Ellipsis) + 1 :]
    return sum(k is not None for k in behind)


def is_basic(key):
    """Whether a key is made of integers, slices, None and Ellipsis."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(k is None or k is Ellipsis or isinstance(k, int | slice) for k in keys)


@contextlib.contextmanager
def fake_cuda(torch):
    """Let fake CUDA tensors be computed with, also where PyTorch has no CUDA.

    ``x[key]`` and ``~x`` hold a device guard in their Python bindings, which a wheel
    without CUDA refuses for a CUDA tensor, real or fake.  The operators behind them have
    no guard, so that both are routed to those; whatever is not basic indexing is not.
    """
    from torch._subclasses import FakeTensorMode
    from torch.overrides import TorchFunctionMode

    class WithoutGuards(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.__getitem__ and is_basic(args[1]):
                return basic_index(torch, *args)
            if function is torch.Tensor.__invert__:
                return torch.bitwise_not(*args)
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), WithoutGuards():
        yield


def batch(torch, dtype, *, masked=False):
    """Return a batch with a shared axis, and a vector, on the fake device."""
    place = {"device": "cuda", "dtype": getattr(torch, dtype)}
    x, g = torch.ones(N, 2, n, **place), torch.ones(N, 2, m, **place)
    mask = torch.ones(N, 2, device="cuda", dtype=torch.bool) if masked else None
    return kc.Batch(x, g, mask), torch.ones(n + 1, m, **place)


def estimator(rule="factored"):
    """Return an estimator of one block."""
    return kc.Estimator(
        {"fc": block()},
        decay=0.9,
        damping=0.1,
        damping_rule=rule,
        reduction="mean_rows",
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_pure_functions_stay_on_the_device(torch, dtype, rule, kind, masked):
    """Statistics, operator and every product stay on the device, and nothing waits."""
    with fake_cuda(torch):
        rows, V = batch(torch, dtype, masked=masked)
        found = every_product(kind, rule, rows, V)

    status = found.pop("status")
    assert {x.device.type for x in (*found.values(), status)} == {"cuda"}
    assert {x.dtype for x in found.values()} == {V.dtype}
    assert not status.shape


@pytest.mark.parametrize("rule", RULES)
def test_the_estimator_stays_on_the_device(torch, dtype, rule):
    """Update, refresh and precondition with ``check="status"`` never wait."""
    kept = estimator(rule)
    with fake_cuda(torch):
        rows, V = batch(torch, dtype)
        for _ in range(2):  # the second refresh chooses between two operators
            kept.update({"fc": rows}, check="status")
            kept.refresh(check="status")
        gradients = {"weight": V[:-1].mT, "bias": V[-1]}
        result = kept.precondition({"fc": gradients})["fc"]

    for name, x in result.items():
        assert x.device.type == "cuda", name
        assert x.dtype == getattr(torch, dtype), name


def test_a_damping_on_the_device_is_not_read(torch):
    """A 0-d damping stays where it is, and what is made from it is there too."""
    kept = estimator()
    with fake_cuda(torch):
        rows, _ = batch(torch, "float32")
        kept.damping = torch.full((), 0.1, device="cuda")
        kept.update({"fc": rows}, check="status")
        kept.refresh(check="status")
        status = kept.operator("fc").status()

    assert status.device.type == "cuda"


@pytest.mark.parametrize("call", ["update", "refresh"])
def test_raising_looks_at_a_value(torch, call):
    """The row that must fail: ``check="raise"`` synchronizes with the device."""
    kept = estimator()
    with fake_cuda(torch):
        rows, _ = batch(torch, "float32")
        if call == "refresh":
            kept.update({"fc": rows}, check="status")
        act = {"update": lambda: kept.update({"fc": rows}), "refresh": kept.refresh}

        with pytest.raises(
            (RuntimeError, AssertionError),
            match=r"_local_scalar_dense|numpy\(\)|CUDA|cuda",
        ) as caught:
            act[call]()

    assert not isinstance(caught.value, kc.KFACError)
