"""Bad batches: an error that names the argument and the remedy, and nothing changed."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array import namespaces as namespaces

from ..builders.estimators import make_estimator
from ..builders.states import differences, frozen

N, n, m = 6, 4, 3
SUMMED = kc.Conventions(reduction="sum", sources="sum")


def block():
    """Return a dense block."""
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    return kc.Block(layer, kc.Kronecker())


def estimator(**options):
    """Return an estimator of two equal blocks."""
    settings = {
        "decay": 0.9,
        "damping": 0.1,
        "damping_rule": "factored",
        "reduction": "sum",
    }
    return make_estimator({"fc1": block(), "fc2": block()}, **(settings | options))


@pytest.fixture
def arrays(backend, rng):
    """Inputs and output gradients in float64."""
    return tuple(backend.asarray(rng.normal(size=(N, k))) for k in (n, m))


@pytest.fixture
def fed(arrays):
    """An estimator that has seen a batch and has operators."""
    kept = estimator()
    batch = kc.Batch(*arrays)
    kept.update({"fc1": batch, "fc2": batch})
    kept.refresh()
    return kept


def assert_refused(kept, error, match, act):
    """Assert that a call raises what it should and leaves the state as it was."""
    before = frozen(kept.state_dict())

    with pytest.raises(error, match=match):
        act()

    assert differences(before, frozen(kept.state_dict())) == []


def with_entry(backend, x, value):
    """Return an array with its first entry replaced."""
    host = backend.adapter.to_numpy(x)
    host[0, 0] = value
    return backend.asarray(host)


def ones(backend, *shape, dtype="float64"):
    return backend.asarray(np.ones(shape, dtype))


# name: (the batch, the exception, what its message says)
BAD = {
    "features_in": (
        lambda b, x, g: kc.Batch(x[:, 1:], g),
        kc.ShapeError,
        r"`inputs` to have shape \(N, \.\.\., 4\), got \(6, 3\)",
    ),
    "features_out": (
        lambda b, x, g: kc.Batch(x, g[:, 1:]),
        kc.ShapeError,
        r"`output_grads` to have shape \(6, 3\).*got \(6, 2\)",
    ),
    "examples": (
        lambda b, x, g: kc.Batch(x, g[1:, :]),
        kc.ShapeError,
        r"`output_grads`.*examples and shared axes must be those of `inputs`",
    ),
    "shared_axis": (
        lambda b, x, g: kc.Batch(ones(b, N, 2, n), g),
        kc.ShapeError,
        r"`output_grads` to have shape \(6, 2, 3\)",
    ),
    "one_axis": (lambda b, x, g: kc.Batch(x[0, :], g), kc.ShapeError, "`inputs`"),
    "empty": (
        lambda b, x, g: kc.Batch(x[:0, :], g[:0, :]),
        kc.ShapeError,
        "Leave an empty batch out",
    ),
    "sources_not_said": (
        lambda b, x, g: kc.Batch(x, ones(b, 2, N, m)),
        kc.ShapeError,
        r"`output_grads`.*say so with `sources`",
    ),
    "sources_mismatch": (
        lambda b, x, g: kc.Batch(x, ones(b, 2, N, m), sources=3),
        kc.ShapeError,
        r"`output_grads` to have shape \(3, 6, 3\)",
    ),
    "sources_without_axis": (
        lambda b, x, g: kc.Batch(x, g, sources=1),
        kc.ShapeError,
        r"`output_grads` to have shape \(1, 6, 3\)",
    ),
    "integer_inputs": (
        lambda b, x, g: kc.Batch(ones(b, N, n, dtype="int32"), g),
        kc.DtypeError,
        "`inputs`.*floating.*int32.*astype",
    ),
    "integer_output_grads": (
        lambda b, x, g: kc.Batch(x, ones(b, N, m, dtype="int32")),
        kc.DtypeError,
        "`output_grads`.*floating.*int32.*astype",
    ),
    "complex_inputs": (
        lambda b, x, g: kc.Batch(ones(b, N, n, dtype="complex64"), g),
        kc.DtypeError,
        "`inputs`.*floating",
    ),
    "mask_dtype": (
        lambda b, x, g: kc.Batch(x, g, ones(b, N, dtype="int32")),
        kc.DtypeError,
        r"`mask` to be boolean.*mask != 0",
    ),
    "mask_shape": (
        lambda b, x, g: kc.Batch(x, g, ones(b, N - 1, dtype="bool")),
        kc.ShapeError,
        r"`mask` to have shape \(6,\), got \(5,\)",
    ),
    "list_inputs": (
        lambda b, x, g: kc.Batch([[1.0] * n] * N, g),
        kc.DtypeError,
        "`inputs` to be an array, got list.*asarray",
    ),
    "number_output_grads": (
        lambda b, x, g: kc.Batch(x, 1.0),
        kc.DtypeError,
        "`output_grads` to be an array, got float",
    ),
    "string_mask": (
        lambda b, x, g: kc.Batch(x, g, "all"),
        kc.DtypeError,
        "`mask` to be an array, got str",
    ),
    "no_inputs": (lambda b, x, g: kc.Batch(None, g), kc.DtypeError, "`inputs`"),
    "no_output_grads": (
        lambda b, x, g: kc.Batch(x, None),
        kc.DtypeError,
        "`output_grads`",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("check", ["raise", "status"])
def test_a_batch_that_does_not_fit_is_refused(backend, fed, arrays, case, check):
    """Arrays that do not fit raise in either mode, and no block of the call moves."""
    make, error, match = BAD[case]
    good, bad = kc.Batch(*arrays), make(backend, *arrays)

    assert_refused(
        fed,
        error,
        f"Block 'fc2'.*{match}",
        lambda: fed.update({"fc1": good, "fc2": bad}, check=check),
    )


@pytest.mark.parametrize("case", BAD)
def test_a_batch_that_does_not_fit_is_refused_at_first(backend, arrays, case):
    """A first batch that does not fit leaves an estimator that has seen nothing."""
    make, error, match = BAD[case]
    kept = estimator()

    assert_refused(
        kept, error, match, lambda: kept.update({"fc1": make(backend, *arrays)})
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("argument", ["inputs", "output_grads"])
def test_numbers_that_are_not_finite_are_refused(backend, fed, arrays, value, argument):
    """NaN or infinity raises, naming block and argument, and no block moves."""
    good = kc.Batch(*arrays)
    x, g = arrays
    bad = {
        "inputs": lambda: kc.Batch(with_entry(backend, x, value), g),
        "output_grads": lambda: kc.Batch(x, with_entry(backend, g, value)),
    }[argument]()

    assert_refused(
        fed,
        kc.NotFiniteError,
        f"'fc2': `{argument}` of this batch hold NaN or infinity.*skip the batch",
        lambda: fed.update({"fc1": good, "fc2": bad}),
    )


def test_both_arguments_are_named(backend, fed, arrays):
    """Where both arrays are not finite, the message names both."""
    bad = kc.Batch(*(with_entry(backend, a, np.nan) for a in arrays))

    assert_refused(
        fed,
        kc.NotFiniteError,
        "`inputs` and `output_grads`",
        lambda: fed.update({"fc1": bad}),
    )


def test_a_bad_block_drops_the_whole_batch(backend, fed, arrays):
    """With ``check="status"`` every block keeps its sums; the bad one is flagged."""
    x, g = arrays
    bad = kc.Batch(with_entry(backend, x, np.nan), g)
    before = frozen(fed.state_dict())["blocks"]

    fed.update({"fc1": kc.Batch(2.0 * x, g), "fc2": bad}, check="status")

    after = frozen(fed.state_dict())["blocks"]
    flags = [int(fed.state[name].statistics.status) for name in ("fc1", "fc2")]
    assert flags == [kc.Status.OK, kc.Status.INPUTS_NOT_FINITE]
    found = [path for path in differences(before, after) if "averages" in path]
    assert found == []


def test_libraries_are_not_mixed(backend, fed, arrays):
    """Arrays of two libraries are refused, and the message names both arguments."""
    x, _ = arrays
    if backend.name == "numpy":
        strict = pytest.importorskip("array_api_strict")
        other = strict.asarray(np.ones((N, m)))
    else:
        other = np.ones((N, m))

    assert_refused(
        fed,
        kc.MixedArraysError,
        "`inputs`.*`output_grads`.*Convert one of them",
        lambda: fed.update({"fc1": kc.Batch(x, other)}),
    )


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2023.12", "array_api_strict follows version 2023.12"),
        (None, "array_api_strict does not say which version"),
    ],
)
def test_a_library_of_too_old_a_standard_is_refused(monkeypatch, version, words):
    """The message says which version it follows, and which one is needed."""
    strict = pytest.importorskip("array_api_strict")
    if version is None:
        monkeypatch.delattr(strict, "__array_api_version__", raising=False)
    else:
        monkeypatch.setattr(strict, "__array_api_version__", version, raising=False)
    # Types of array that were met before are not asked again.
    monkeypatch.setattr(namespaces, "_namespaces", {})
    x = strict.ones((N, n))

    for admitted in (
        lambda: estimator().update({"fc1": kc.Batch(x, strict.ones((N, m)))}),
        lambda: block().initial(x),
        lambda: kc.gram(x),
        lambda: namespaces.own_namespace(x),
    ):
        with pytest.raises(
            kc.BackendUnavailableError, match=f"{words}.*needs 2024.12 or newer"
        ):
            admitted()


def test_statistics_stay_in_their_library(backend, fed):
    """A later batch of another library is refused, since the statistics are of one."""
    if backend.name == "numpy":
        strict = pytest.importorskip("array_api_strict")
        other = kc.Batch(strict.ones((N, n)), strict.ones((N, m)))
    else:
        other = kc.Batch(np.ones((N, n)), np.ones((N, m)))

    assert_refused(
        fed,
        kc.MixedArraysError,
        "Block 'fc1'.*`statistics`.*where their first batch was",
        lambda: fed.update({"fc1": other}),
    )


def test_devices_are_not_mixed():
    """Arrays on two devices are refused, and the message names both."""
    strict = pytest.importorskip("array_api_strict")
    x = strict.ones((N, n), device=strict.Device("device1"))
    g = strict.ones((N, m), device=strict.Device("device2"))
    kept = estimator()

    assert_refused(
        kept,
        kc.MixedArraysError,
        "`inputs`.*device1.*`output_grads`.*device2.*Move one of them",
        lambda: kept.update({"fc1": kc.Batch(x, g)}),
    )


def test_the_meta_device_is_refused(requires_backend):
    """PyTorch multiplies a meta tensor and a real one in silence."""
    requires_backend("torch", adapter=True)
    import torch

    kept = estimator()
    x, g = torch.ones(N, n, device="meta"), torch.ones(N, m)

    assert_refused(
        kept,
        kc.ArgumentError,
        "`inputs`.*meta, which has no numbers",
        lambda: kept.update({"fc1": kc.Batch(x, g)}, check="status"),
    )
