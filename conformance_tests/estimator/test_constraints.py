"""Every option of every public constructor and call refuses what it cannot be, by name."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import fields_of
from kfac_core.losses import Gaussian, SquaredError

from ..builders.states import differences, frozen

N, n, m = 6, 4, 3
DENSE = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")

# A good instance of each class of options.
OPTIONS = {
    kc.Dense: DENSE,
    kc.Conv: kc.Conv(
        in_channels=2,
        out_channels=4,
        kernel_size=(2,),
        padding=((0, 1),),
        bias=True,
        weight_layout="spatial_io",
        data_layout="channels_last",
    ),
    kc.Embedding: kc.Embedding(num_embeddings=5, features=2, weight_layout="io"),
    kc.ScaleShift: kc.ScaleShift(scale_shape=(2,), shift_shape=None),
    kc.Parameters: kc.Parameters(shapes={"w": (2, 3)}),
    kc.Chain: kc.Chain(names=("a", "b"), layers=(DENSE, DENSE)),
    kc.Kronecker: kc.Kronecker(),
    kc.Eigen: kc.Eigen(),
    kc.Diagonal: kc.Diagonal(),
    kc.Full: kc.Full(),
    kc.TNT: kc.TNT(),
    kc.KFOC: kc.KFOC(iterations=2),
    kc.ScaledIdentity: kc.ScaledIdentity(scale=1.0),
    kc.Series: kc.Series(variant="symmetric", steps=3),
    kc.BlockTridiagonal: kc.BlockTridiagonal(),
    kc.Averaging: kc.Averaging(),
    kc.Refreshing: kc.Refreshing(),
    kc.Sharing: kc.Sharing(),
    kc.Execution: kc.Execution(),
    kc.Precision: kc.Precision(),
    kc.Conventions: kc.Conventions(reduction="sum", sources="sum"),
    kc.Block: kc.Block(DENSE, kc.Kronecker()),
    SquaredError: SquaredError(scale=1.0),
    Gaussian: Gaussian(variance=1.0),
}
# No option may be any of these.
JUNK = [
    "junk",
    b"io",
    1j,
    [1.0],
    [None],
    np.ones(2),
    np.asarray(["io"]),
    object(),
    math.nan,
    -1,
    0.5 + 1j,
    {"junk": None},
    int,
]
FIELDS = [
    (cls, field.name)
    for cls in OPTIONS
    for field in dataclasses.fields(cls)
    if field.init
]


def test_every_class_of_options_is_here():
    """A public dataclass whose fields are options stands in the table above."""
    public = {getattr(kc, name) for name in kc.__all__}
    described = {
        cls
        for cls in public
        if dataclasses.is_dataclass(cls)
        and cls.__dataclass_params__.frozen
        and not is_of_arrays(cls)
    }

    assert described - set(OPTIONS) == {kc.posterior.Posterior, kc.influence.Influence}


def is_of_arrays(cls):
    """Whether a class is a structure of arrays, which is checked where it is used."""
    return bool(fields_of(cls))


@pytest.mark.parametrize(
    ("cls", "name"), FIELDS, ids=lambda x: getattr(x, "__name__", x)
)
def test_an_option_that_cannot_be_is_refused(cls, name):
    """Whatever comes, the error is the library's and names the option."""
    good = OPTIONS[cls]
    for junk in JUNK:
        if name in ("approximation", "layer") and isinstance(junk, type):
            continue
        options = {
            field.name: getattr(good, field.name)
            for field in dataclasses.fields(cls)
            if field.init
        }
        with pytest.raises(kc.KFACError, match=f"`{name}`") as found:
            cls(**options | {name: junk})
        assert len(str(found.value)) < 600


def test_numbers_and_strings_of_numpy_are_accepted():
    """A size may be an integer of NumPy, a damping a scalar of it, a name its string."""
    layer = kc.Dense(
        in_features=np.int64(n),
        out_features=m,
        bias=True,
        weight_layout=np.str_("io"),
    )
    made = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker(sharing=np.str_("reduce")))},
        reduction=np.str_("sum"),
        damping=np.float32(0.5),
        decay=np.float64(0.5),
        averaging=kc.Averaging(burn_in=np.int32(2)),
    )
    made.update({"fc": data()}, check=np.str_("raise"))

    made.load_state_dict(made.state_dict())
    assert made.damping == 0.5


def estimator(**options):
    """Return an estimator of two equal blocks."""
    blocks = {name: kc.Block(DENSE, kc.Kronecker()) for name in ("fc1", "fc2")}
    return kc.Estimator(blocks, **{"reduction": "sum"} | options)


ESTIMATOR_JUNK = {
    "reduction": [None, "average", 1],
    "damping": [None, "x", 1j, [0.1], (0.1,), np.ones(2), True, {"fc1": None}, {3: 1}],
    "decay": [None, "x", 1j, [0.1], np.ones(2), True, np.nan, 2, np.asarray("x")],
    "damping_rule": [None, "x", 1],
    "sources": [None, "x"],
    "mode": ["x", 3],
    "averaging": ["x", 3, kc.Averaging],
    "refreshing": ["x", kc.Averaging()],
    "sharing": ["x", {}],
    "precision": ["float32", 1],
    "execution": ["x", 3],
}


@pytest.mark.parametrize("name", ESTIMATOR_JUNK)
def test_an_estimator_refuses_options(name):
    """The constructor names the option."""
    for junk in ESTIMATOR_JUNK[name]:
        with pytest.raises(kc.KFACError, match=f"`{name}|`name`"):
            estimator(**{name: junk})


@pytest.mark.parametrize(
    "blocks", [None, [1], {"a": 3}, {3: kc.Block(DENSE, kc.Full())}]
)
def test_blocks_are_a_mapping_of_names(blocks):
    """Anything else is refused where it is given."""
    with pytest.raises(kc.KFACError, match="`blocks`"):
        kc.Estimator(blocks, reduction="sum")


def data():
    """Return a batch of float64 numbers."""
    rng = np.random.default_rng(5)
    return kc.Batch(rng.normal(size=(N, n)), rng.normal(size=(N, m)))


def gradient():
    """Return a gradient of a block."""
    return {"weight": np.ones((n, m)), "bias": np.ones(m)}


def moments_of_another_size():
    """Return statistics of a block of other sizes."""
    layer = kc.Dense(in_features=2, out_features=2, bias=True, weight_layout="io")
    batch = kc.Batch(np.ones((N, 2)), np.ones((N, 2)))
    summed = kc.Conventions(reduction="sum", sources="sum")
    return kc.Block(layer, kc.Kronecker()).moments(batch, conventions=summed)


CALLS = {
    "update nothing": lambda e: e.update(None),
    "update a batch": lambda e: e.update(data()),
    "update a name": lambda e: e.update("fc1"),
    "update None": lambda e: e.update({"fc1": None}),
    "update a number": lambda e: e.update({"fc1": 3}),
    "update a mapping": lambda e: e.update({"fc1": {"fc1": data()}}),
    "update arrays": lambda e: e.update({"fc1": (np.ones((N, n)), np.ones((N, m)))}),
    "update the second": lambda e: e.update({"fc1": data(), "fc2": None}),
    "update a number's name": lambda e: e.update({3: data()}),
    "update check": lambda e: e.update({"fc1": data()}, check="Raise"),
    "update check of None": lambda e: e.update({"fc1": data()}, check=None),
    "absorb nothing": lambda e: e.absorb(None),
    "absorb None": lambda e: e.absorb({"fc1": None}),
    "absorb a number": lambda e: e.absorb({"fc1": 3}),
    "absorb a batch": lambda e: e.absorb({"fc1": data()}),
    "absorb other sizes": lambda e: e.absorb({"fc1": moments_of_another_size()}),
    "refresh a string": lambda e: e.refresh("fc1"),
    "refresh a number": lambda e: e.refresh(3),
    "refresh numbers": lambda e: e.refresh([3]),
    "refresh lists": lambda e: e.refresh([["fc1"]]),
    "refresh check": lambda e: e.refresh(check="x"),
    "refresh check of 1": lambda e: e.refresh(check=1),
    "start check": lambda e: e.start_refresh(check="x"),
    "start names": lambda e: e.start_refresh("fc1"),
    "rebase moments": lambda e: e.rebase(moments="x"),
    "rebase moments of None": lambda e: e.rebase(moments=None),
    "rebase names": lambda e: e.rebase(3, moments="zero"),
    "precondition nothing": lambda e: e.precondition(None),
    "precondition a number": lambda e: e.precondition({"fc1": 3}),
    "precondition two numbers": lambda e: e.precondition({"fc1": 3, "fc2": 3}),
    "precondition an array": lambda e: e.precondition({"fc1": np.ones((n, m))}),
    "apply a number": lambda e: e.apply(3, {}),
    "apply a list": lambda e: e.apply([], {}),
    "operator of a number": lambda e: e.operator(3),
    "operator of a list": lambda e: e.operator([]),
    "load nothing": lambda e: e.load_state_dict(None),
    "save to a number": lambda e: kc.save_checkpoint(3, e),
    "save to None": lambda e: kc.save_checkpoint(None, e),
    "save to NUL": lambda e: kc.save_checkpoint("a\0b", e),
    "save to bytes with NUL": lambda e: kc.save_checkpoint(b"a\0b", e),
    "save a number": lambda e: kc.save_checkpoint("unused", 3),
    "save parts": lambda e: kc.save_checkpoint("unused", e, parts=["all"]),
    "load NUL": lambda e: kc.load_checkpoint("a\0b", e),
    "load None": lambda e: kc.load_checkpoint(None, e),
    "load into a number": lambda e: kc.load_checkpoint("unused", 3),
    "load layouts": lambda e: kc.load_checkpoint("unused", e, layouts=None),
    "load names": lambda e: kc.load_checkpoint("unused", e, names="fc1"),
    "header of NUL": lambda e: kc.read_header("a\0b"),
    "set a damping": lambda e: setattr(e, "damping", "x"),
    "set dampings": lambda e: setattr(e, "damping", {"fc1": "x", "fc2": 1.0}),
    "set a decay": lambda e: setattr(e, "decay", None),
    "set an array for a decay": lambda e: setattr(e, "decay", np.asarray(0.5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_the_wrong_kind_is_refused(name):
    """The error is the library's own, and the state stays as it was."""
    held = estimator()
    held.update({"fc1": data(), "fc2": data()})
    held.refresh()
    before = frozen(held.state_dict())

    with pytest.raises(kc.KFACError) as found:
        CALLS[name](held)

    assert str(found.value)
    assert differences(before, frozen(held.state_dict())) == []


def test_names_may_be_a_generator():
    """An iterable that can be read once is read once."""
    held = estimator()
    held.update({"fc1": data(), "fc2": data()})
    held.refresh(name for name in ("fc1", "fc2"))

    assert held.state["fc2"].refreshes == 1


Z = np.ones((3, 2))
VECTOR = {"fc": {"weight": np.ones((2, 2))}}
POSTERIOR = {"blocks": {"a": kc.Block(DENSE, kc.Kronecker())}, "statistics": {}}
# What a function refuses: a good call, and bad values of its options.
FUNCTIONS = {
    "levenberg_marquardt": (
        lambda **o: kc.levenberg_marquardt(o.pop("damping"), o.pop("ratio", 1.0), **o),
        {"damping": 1.0, "decay": 0.5},
        {"damping": -1, "decay": 1.5, "minimum": -1.0, "lower": 0.8},
    ),
    "kl_clip": (
        lambda **o: kc.steps.kl_clip(VECTOR, VECTOR, **o),
        {"learning_rate": 0.1, "bound": 1.0},
        {"learning_rate": -1.0, "bound": 0.0, "check": "Raise"},
    ),
    "trust_region_rate": (
        lambda **o: kc.steps.trust_region_rate(np.asarray(1.0), **o),
        {"bound": 1.0, "maximum": 1.0},
        {"bound": "large", "maximum": 0},
    ),
    "add_l2": (
        lambda **o: kc.steps.add_l2(VECTOR, VECTOR, **o),
        {"weight_decay": 0.1},
        {"weight_decay": math.nan},
    ),
    "decay_decoupled": (
        lambda **o: kc.steps.decay_decoupled(VECTOR, VECTOR, **o),
        {"weight_decay": 0.1, "learning_rate": 0.1},
        {"weight_decay": None, "learning_rate": -0.1},
    ),
    "gamma_candidates": (
        lambda **o: kc.steps.gamma_candidates(o.pop("gamma"), **o),
        {"gamma": 1.0, "factor": 0.5},
        {"gamma": 0.0, "factor": 1.0, "minimum": -1.0},
    ),
    "noise_spec": (
        lambda **o: kc.losses.noise_spec(o.pop("loss"), Z, **o),
        {"loss": kc.losses.Categorical(), "mode": "gradients"},
        {"loss": "categorical", "mode": "fisher", "samples": 0},
    ),
    "vectors": (
        lambda **o: kc.losses.vectors(kc.losses.Categorical(), Z, **o),
        {"mode": "exact"},
        {"mode": "fisher", "weight": -1.0, "positions": "both"},
    ),
    "drawn_vectors": (
        lambda **o: kc.losses.drawn_vectors(kc.losses.Categorical(), Z, **o),
        {"mode": "gradients", "seed": 0, "shared": True},
        {"mode": "fisher", "seed": -1, "shared": 1, "samples": 0.5},
    ),
    "inverse_root": (
        lambda **o: kc.roots.inverse_root(np.eye(2), **o),
        {"degree": 2, "damping": 0.1},
        {"degree": 0, "check": None},
    ),
    "block_posterior": (
        lambda **o: kc.posterior.block_posterior(None, **o),
        None,
        {"examples": -1, "prior_precision": 0.0},
    ),
    "spectral_blocks": (
        lambda **o: kc.posterior.spectral_blocks(
            o.pop("blocks"), o.pop("statistics"), **o
        ),
        None,
        {"blocks": [], "debias": 1, "precision": "float32", "check": "x"},
    ),
    "connect": (kc.distributed.connect, None, {"timeout": 0.0}),
    "run_ranks": (
        lambda **o: kc.distributed.run_ranks(o.pop("size"), lambda c: c.rank, **o),
        {"size": 1},
        {"size": 0, "timeout": -1.0},
    ),
    "Threaded": (kc.execution.Threaded, {"workers": 1}, {"workers": 0, "inner": 3}),
    "Stacked": (kc.execution.Stacked, {}, {"fewest": 0, "inner": None}),
}
DEFAULTS = {
    "block_posterior": {"examples": 1, "prior_precision": 1.0},
    "spectral_blocks": {"blocks": {}, "statistics": {}},
    "connect": {},
}


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, (*_, bad) in FUNCTIONS.items() for option in bad],
)
def test_a_function_refuses_an_option(name, option):
    """The good call passes, and the error of the bad one names the option."""
    function, good, bad = FUNCTIONS[name]
    if good is not None:
        function(**good)

    options = DEFAULTS[name] if good is None else good
    with pytest.raises(kc.KFACError, match=f"`{option}`"):
        function(**options | {option: bad[option]})
