"""Files under other names, in other layouts, and of a part of an estimator."""

import os
import stat

import numpy as np
import pytest

import kfac_core as kc

from ..builders.estimators import make_estimator
from ..builders.states import differences, frozen
from ..builders.tolerances import assert_close

N, n, m = 6, 4, 3


def dense(layout="io"):
    return kc.Dense(in_features=n, out_features=m, bias=True, weight_layout=layout)


def conv(weight_layout="spatial_io", data_layout="channels_last"):
    return kc.Conv(
        in_channels=2,
        out_channels=3,
        kernel_size=(2, 2),
        padding="same",
        bias=True,
        weight_layout=weight_layout,
        data_layout=data_layout,
    )


def make(blocks, *, damping=0.2):
    blocks = {name: kc.Block(layer, kc.Kronecker()) for name, layer in blocks.items()}
    options = {"damping_rule": "factored", "reduction": "sum"}
    return make_estimator(blocks, decay=0.9, damping=damping, **options)


def trained(names, *, damping=0.2, seed=0):
    rng = np.random.default_rng(seed)
    estimator = make({name: dense() for name in names}, damping=damping)
    batches = {
        name: kc.Batch(rng.normal(size=(N, n)), rng.normal(size=(N, m)))
        for name in names
    }
    estimator.update(batches)
    estimator.refresh()
    estimator.update(batches)
    return estimator


def written(estimator, folder):
    """Return what an estimator's file says."""
    path = folder / "again.npz"
    kc.save_checkpoint(path, estimator)
    return kc.read_header(path)


@pytest.mark.parametrize("each", [False, True], ids=["one damping", "each its own"])
@pytest.mark.parametrize(
    "names",
    [("tensor",), ("packed", "n"), ("mapping",), ("structure",), ("a", "a/b"), ("",)],
    ids=str,
)
def test_a_block_may_have_any_name(tmp_path, names, each):
    """Also one by which the document says that a tensor stands there."""
    damping = dict.fromkeys(names, 0.2) if each else 0.2
    path = tmp_path / "state.npz"
    first, second = trained(names, damping=damping), trained(names, seed=1)
    kc.save_checkpoint(path, first)

    kc.load_checkpoint(path, second, backend="numpy")

    assert second.damping == damping
    assert written(second, tmp_path) == kc.read_header(path)


def test_statistics_alone_can_be_loaded(tmp_path):
    """A refresh gives what it would have given; the file is smaller."""
    path = tmp_path / "state.npz"
    first, second = trained("a"), make({"a": dense()})
    kc.save_checkpoint(path, first)
    whole = path.stat().st_size
    kc.save_checkpoint(path, first, parts="statistics")

    kc.load_checkpoint(path, second, backend="numpy")

    assert path.stat().st_size < 0.6 * whole
    assert second.state["a"].operator is None
    assert second.state["a"].updates == 2
    for estimator in (first, second):
        estimator.refresh()
    one, other = (written(e, tmp_path)["document"] for e in (first, second))
    # How a residual is summed depends on which triangles are held.
    states = [frozen(estimator.state_dict()) for estimator in (first, second)]
    assert [p for p in differences(*states) if "residual" not in p] == []
    assert one.pop("tensors").keys() == other.pop("tensors").keys()
    assert one == other


def test_operators_alone_can_be_loaded(tmp_path):
    """The next update begins new statistics, as if none had been."""
    path = tmp_path / "state.npz"
    first, second, fresh = trained("a"), make({"a": dense()}), make({"a": dense()})
    kc.save_checkpoint(path, first, parts="operators")

    kc.load_checkpoint(path, second, backend="numpy")

    V = {"a": {"weight": np.ones((n, m)), "bias": np.ones(m)}}
    one, other = (e.precondition(V)["a"]["weight"] for e in (first, second))
    assert np.array_equal(one, other)
    assert second.state["a"].statistics is None
    with pytest.raises(kc.NotReadyError):
        second.refresh(["a"])
    rng = np.random.default_rng(3)
    batch = kc.Batch(rng.normal(size=(N, n)), rng.normal(size=(N, m)))
    for estimator in (second, fresh):
        estimator.update({"a": batch})
        estimator.refresh()
    one, other = (e.precondition(V)["a"]["weight"] for e in (second, fresh))
    assert np.array_equal(one, other)
    assert second.state["a"].updates == 1
    with pytest.raises(kc.ConventionError, match="parts"):
        kc.save_checkpoint(path, first, parts="moments")


@pytest.fixture
def elsewhere(rng):
    """What one framework fed, what another calls the same, and both's parameters."""
    there = make(
        {"0": conv("oi_spatial", "channels_first"), "2": dense("oi")},
        damping={"0": 0.3, "2": 0.1},
    )
    here = make({"conv": conv(), "head": dense()})
    x, g = rng.normal(size=(N, 5, 4, 2)), rng.normal(size=(N, 5, 4, 3))
    h, k = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    first = (np.moveaxis(a, -1, 1) for a in (x, g))
    there.update({"0": kc.Batch(*first), "2": kc.Batch(h, k)})
    there.refresh()
    W, V = rng.normal(size=(2, 2, 2, 3)), rng.normal(size=(n, m))
    b = rng.normal(size=3)
    foreign = {
        "0": {"weight": np.transpose(W, (3, 2, 0, 1)), "bias": b},
        "2": {"weight": V.T, "bias": b},
    }
    ours = {"conv": {"weight": W, "bias": b}, "head": {"weight": V, "bias": b}}
    return there, here, foreign, ours


NAMES = {"0": "conv", "2": "head"}


def test_a_file_of_one_framework_is_read_by_another(tmp_path, elsewhere):
    """Names and layouts differ; statistics, operators and dampings are the same."""
    there, here, foreign, ours = elsewhere
    path = tmp_path / "state.npz"
    kc.save_checkpoint(path, there)

    kc.load_checkpoint(path, here, backend="numpy", names=NAMES, layouts="any")

    assert here.damping == {"conv": 0.3, "head": 0.1}
    expected, got = there.precondition(foreign), here.precondition(ours)
    weight = np.transpose(expected["0"]["weight"], (2, 3, 1, 0))
    assert_close(got["conv"]["weight"], weight, "product", "float64")
    assert_close(got["head"]["weight"], expected["2"]["weight"].T, "product", "float64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "blocks"),
        ({"names": NAMES}, "layout"),
        ({"names": {"0": "conv"}, "layouts": "any"}, "blocks"),
        ({"names": {"0": "2"}, "layouts": "any"}, "its own"),
        ({"names": {"1": "conv"}, "layouts": "any"}, r"no blocks \['1'\]"),
        ({"names": {"0": "head", "2": "conv"}, "layouts": "any"}, "layer"),
    ],
    ids=str,
)
def test_mismatched_files_raise(tmp_path, elsewhere, options, message):
    """Nothing is guessed, and nothing was changed."""
    there, here, _, _ = elsewhere
    path = tmp_path / "state.npz"
    kc.save_checkpoint(path, there)
    before = frozen(here.state_dict())

    with pytest.raises(kc.StateError, match=message):
        kc.load_checkpoint(path, here, backend="numpy", **options)

    assert differences(before, frozen(here.state_dict())) == []
    with pytest.raises(kc.ConventionError, match="layouts"):
        kc.load_checkpoint(path, here, layouts="other")


@pytest.mark.skipif(os.name != "posix", reason="modes and links of POSIX")
def test_the_file_is_as_others_are(tmp_path):
    """Readable for whom the umask lets; a link leads to the file still."""
    target, link = tmp_path / "real.npz", tmp_path / "link.npz"
    link.symlink_to(target)
    plain = tmp_path / "plain"
    plain.write_bytes(b"")

    kc.save_checkpoint(link, trained("a"))

    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [target.name, link.name, plain.name]
    )
