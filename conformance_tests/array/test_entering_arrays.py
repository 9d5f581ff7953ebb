"""Arrays that cannot be computed with are refused wherever arrays are passed in."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc

from ..builders.adapters import WITHOUT_ADAPTERS
from ..builders.states import differences, frozen

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

N, n, m = 5, 3, 2
RNG = np.random.default_rng(3)
X, G = RNG.normal(size=(N, n)), RNG.normal(size=(N, m))
LAYER = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")


class Wrapper(np.ndarray):
    """A subclass of NumPy's arrays that nobody has heard of."""


def masked(x):
    """Return an array whose mask hides NaN."""
    held = np.array(x)
    held[0, 0] = np.nan
    return np.ma.masked_invalid(held)


NUMPY = {
    # name: makes the array, the error, what the message says
    "masked": (masked, kc.ArgumentError, "MaskedArray.*numpy.asarray"),
    "matrix": (
        lambda x: np.asarray(x).view(np.matrix),
        kc.ArgumentError,
        "matrix.*numpy.asarray",
    ),
    "subclass": (lambda x: x.view(Wrapper), kc.ArgumentError, "Wrapper"),
    "objects": (lambda x: x.astype(object), kc.DtypeError, "floating.*object"),
    "wide": (lambda x: x.astype(np.longdouble), kc.DtypeError, "floating.*float128"),
    "foreign": (lambda x: x.astype(">f8"), kc.DtypeError, "byte order.*>f8"),
    "foreign half": (lambda x: x.astype(">f2"), kc.DtypeError, "byte order.*>f2"),
    "strings": (lambda x: x.astype(str), kc.DtypeError, "floating"),
    "dates": (lambda x: x.astype("i8").astype("M8[s]"), kc.DtypeError, "floating"),
    "list": (lambda x: x.tolist(), kc.DtypeError, "array"),
    "records": (
        lambda x: np.zeros(x.shape, dtype=[("a", "f8")]),
        kc.DtypeError,
        "floating",
    ),
}

if ml_dtypes is not None:
    NUMPY["bfloat16"] = (
        lambda x: x.astype(ml_dtypes.bfloat16),
        kc.DtypeError,
        "floating.*bfloat16",
    )


def torch_cases():
    """Return tensors that PyTorch's functions refuse here and there, by name."""
    import torch

    def quantized(x):
        return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)

    return {
        "sparse": (lambda x: x.to_sparse(), kc.ArgumentError, "sparse_coo.*to_dense"),
        "sparse rows": (lambda x: x.to_sparse_csr(), kc.ArgumentError, "sparse_csr"),
        "nested": (
            lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
            kc.ArgumentError,
            "nested.*mask",
        ),
        "quantized": (quantized, kc.ArgumentError, "quantized.*dequantize"),
        "meta": (lambda x: x.to("meta"), kc.ArgumentError, "meta"),
        "masked": (
            lambda x: torch.masked.masked_tensor(x, x > 0),
            kc.ArgumentError,
            "masked",
        ),
        "float8": (
            lambda x: x.to(torch.float8_e4m3fn),
            kc.DtypeError,
            "floating.*float8",
        ),
    }


def cases_of(backend):
    """Return the cases of a backend's library."""
    if backend.name == "numpy":
        return NUMPY
    # An adapter says what is wrong with its library's arrays.
    known = backend.name == "torch" and not WITHOUT_ADAPTERS
    return torch_cases() if known else {}


def estimator():
    """Return an estimator of two equal blocks, which are computed as one."""
    block = kc.Block(LAYER, kc.Kronecker())
    return kc.Estimator({"a": block, "b": block}, reduction="sum", damping=0.5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_arrays_that_cannot_be_computed_with_are_refused(backend):
    """In every place where arrays come in, first and later, and nothing changes."""
    cases = cases_of(backend)
    if not cases:
        pytest.skip("its arrays are all alike")
    x, g, w, b = (backend.asarray(v) for v in (X, G, np.ones((n, m)), np.ones(m)))
    good = kc.Batch(x, g)
    held = estimator()
    held.update({"a": good, "b": good})
    held.refresh()
    before = frozen(held.state_dict())
    for name, (make, error, message) in cases.items():
        bad = make(x)
        for batches in (
            {"a": kc.Batch(bad, g), "b": kc.Batch(bad, g)},
            {"a": good, "b": kc.Batch(x, make(g))},
        ):
            for one in (held, estimator()):
                with pytest.raises(error, match=message):
                    one.update(batches)
                with pytest.raises(error, match=message):
                    one.update(batches, check="status")
        gradients = {"weight": make(w), "bias": b}
        with pytest.raises(error, match=message):
            held.precondition({"a": gradients, "b": gradients})
        with pytest.raises(error, match=message):
            held.apply("multiply_matpower", {"a": gradients}, 0.5)
        assert differences(before, frozen(held.state_dict())) == [], name


@pytest.mark.parametrize("name", ["foreign", "wide", "masked", "matrix", "objects"])
def test_a_number_in_a_strange_array_is_refused(name):
    """A damping that is a 0-d array is looked at as others are."""
    make, _, _ = NUMPY[name]
    damping = make(np.ones((1, 1)))[:1, :1]
    if name != "matrix":
        damping = damping.reshape(())

    with pytest.raises(kc.DampingError, match="`damping`"):
        kc.Estimator(
            {"a": kc.Block(LAYER, kc.Full())}, reduction="sum", damping=damping
        )


def test_memory_that_is_mapped_is_an_array(tmp_path):
    """The one subclass that only says where memory is."""
    mapped = np.memmap(tmp_path / "x", dtype=np.float64, mode="w+", shape=(N, n))
    mapped[:] = X
    one, other = estimator(), estimator()
    one.update({"a": kc.Batch(mapped, G)})
    other.update({"a": kc.Batch(X, G)})

    assert differences(frozen(one.state_dict()), frozen(other.state_dict())) == []


def test_foreign_ids_are_the_same_ids():
    """Integers in another byte order are read and not stored."""
    layer = kc.Embedding(num_embeddings=4, features=m, weight_layout="io")
    block = kc.Block(layer, kc.Kronecker(input="diagonal"))
    ids = np.asarray([0, 3, 3, 1, 2])
    states = []
    for given in (ids, ids.astype(">i8")):
        held = kc.Estimator({"a": block}, reduction="sum")
        held.update({"a": kc.Batch(given, G)})
        states.append(frozen(held.state_dict()))

    assert differences(*states) == []


def test_a_scipy_sparse_matrix_raises():
    """It has the attributes of an array, and no namespace."""
    sparse = pytest.importorskip("scipy.sparse")

    with pytest.raises(kc.DtypeError, match="`inputs` to be an array, got csr_array"):
        estimator().update({"a": kc.Batch(sparse.csr_array(X), G)})


def test_a_deleted_array_is_refused(backend):
    """JAX deletes what was donated to a compiled function."""
    if backend.name != "jax":
        pytest.skip("only JAX deletes arrays")
    x, g = backend.asarray(X), backend.asarray(G)
    g.delete()
    held = estimator()

    for batches in ({"a": kc.Batch(x, g)}, {"a": kc.Batch(g, x)}):
        with pytest.raises(kc.ArgumentError, match=r"deleted.*donating"):
            held.update(batches)
