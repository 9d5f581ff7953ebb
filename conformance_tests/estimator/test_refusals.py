"""What cannot be is refused by name, where it enters, and nothing is changed by it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array import namespaces
from kfac_core.array.structure import fields_of

from ..builders.estimators import make_estimator
from ..builders.layers import dense_layer
from ..builders.options import BLOCK, DENSE, FUNCTIONS, OPTIONS, VECTOR
from ..builders.states import differences, frozen

N, n, m = 6, 4, 3
SUMMED = kc.Conventions(reduction="sum", sources="sum")
RNG = np.random.default_rng(5)
BATCH = kc.Batch(RNG.normal(size=(N, n)), RNG.normal(size=(N, m)))


def estimator(**options):
    """Return an estimator of two equal blocks."""
    settings = {"decay": 0.9, "damping": 0.1, "reduction": "sum"}
    return make_estimator({"fc1": BLOCK, "fc2": BLOCK}, **settings | options)


def trained(x, g, **options):
    """Return an estimator with statistics and operators."""
    held = estimator(**options)
    held.update({name: kc.Batch(x, g) for name in ("fc1", "fc2")})
    held.refresh()
    return held


@pytest.fixture
def arrays(backend, rng):
    """Inputs and output gradients in float64."""
    return tuple(backend.asarray(rng.normal(size=(N, k))) for k in (n, m))


@pytest.fixture
def held(arrays):
    """An estimator that has seen a batch and has operators."""
    return trained(*arrays)


def assert_refused(held, error, match, act):
    """Assert that a call raises what it should and leaves the state as it was."""
    before = frozen(held.state_dict())

    with pytest.raises(error, match=match):
        act()

    assert differences(before, frozen(held.state_dict())) == []


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
    ("name", "option"),
    [(name, option) for name, (_, good) in FUNCTIONS.items() for option in good],
)
def test_invalid_options_are_named(name, option):
    """The good call passes; whatever else comes, the error names the option."""
    function, good = FUNCTIONS[name]
    function(**good)
    for junk in JUNK:
        if option in ("approximation", "layer") and isinstance(junk, type):
            continue
        names = f"`{option}`|Unknown block 'junk'"
        with pytest.raises(kc.KFACError, match=names) as found:
            function(**good | {option: junk})
        assert len(str(found.value)) < 600


def test_bad_numbers_are_named():
    """Those that are of the right kind, and out of range or one by one good."""
    cases = [
        (lambda: estimator(weight=0.0), "`weight` to be a finite number > 0"),
        (lambda: estimator(factorizations=("lu",)), "`factorizations`.*'inverse'"),
        (lambda: kc.steps.add_l2(VECTOR, VECTOR, weight_decay=math.nan), "`weight_d"),
        (lambda: kc.distributed.connect(timeout=0.0), "`timeout`"),
        (lambda: kc.steps.gamma_candidates(1.0, factor=1.0), "`factor`"),
    ]
    for call, match in cases:
        with pytest.raises(kc.KFACError, match=match):
            call()


def test_numbers_and_strings_of_numpy_are_accepted():
    """A size may be an integer of NumPy, a damping a scalar of it, a name its string."""
    layer = kc.Dense(
        in_features=np.int64(n), out_features=m, bias=True, weight_layout=np.str_("io")
    )
    made = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker(sharing=np.str_("reduce")))},
        reduction=np.str_("sum"),
        damping=np.float32(0.5),
        decay=np.float64(0.5),
        averaging=kc.Averaging(burn_in=np.int32(2)),
    )
    made.update({"fc": BATCH}, check=np.str_("raise"))

    made.load_state_dict(made.state_dict())
    assert made.damping == 0.5


NUMBERS = {
    # option: values that no number of Python or NumPy may have, the error, the message
    "damping": (
        [-0.1, np.float32("nan"), np.inf, None, 1j, [0.1], np.ones(2), True],
        kc.KFACError,
        "`damping`",
    ),
    "decay": (
        [-0.1, 1.1, np.float32("nan"), np.inf, None, "x", np.ones(2), True],
        kc.DecayError,
        r"`decay` to be a number in \[0, 1\]",
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_setters_validate_like_the_constructor(backend, held, name):
    """And leaves the good value."""
    values, error, match = NUMBERS[name]
    for value in values:
        with pytest.raises(error, match=match):
            estimator(**{name: value})
        assert_refused(held, error, match, lambda v=value: setattr(held, name, v))


def test_a_damping_of_another_library_raises(backend, held):
    """It was said that one of two devices was `cpu` and the other `cpu`."""
    if backend.name == "numpy":
        pytest.skip("NumPy's own scalars are those of the batch")
    held.damping = np.array(0.2)
    with pytest.raises(kc.MixedArraysError, match="`damping` is a 0-d array of numpy"):
        held.refresh()


def test_a_mapping_of_dampings_is_a_copy():
    """The caller's own may change; that of the constructor was followed, unchecked."""
    given = {"fc1": 0.1, "fc2": 0.2}
    made = estimator(damping=given)
    given["fc1"] = -1.0
    assert made.damping == {"fc1": 0.1, "fc2": 0.2}


def moments_of_another_size():
    """Return statistics of a block of other sizes."""
    layer = dense_layer(2, 2)
    batch = kc.Batch(np.ones((N, 2)), np.ones((N, 2)))
    return kc.batch_moments(kc.Block(layer, kc.Kronecker()), batch, conventions=SUMMED)


CALLS = {
    "update nothing": lambda e: e.update(None),
    "update a name": lambda e: e.update("fc1"),
    "update no uses": lambda e: e.update({"fc1": []}),
    "update arrays": lambda e: e.update({"fc1": (np.ones((N, n)), np.ones((N, m)))}),
    "update the second": lambda e: e.update({"fc1": BATCH, "fc2": None}),
    "update check": lambda e: e.update({"fc1": BATCH}, check="Raise"),
    "absorb nothing": lambda e: e.absorb(None),
    "absorb a number": lambda e: e.absorb({"fc1": 3}),
    "absorb other sizes": lambda e: e.absorb({"fc1": moments_of_another_size()}),
    "refresh a string": lambda e: e.refresh("fc1"),
    "refresh numbers": lambda e: e.refresh([3]),
    "refresh check": lambda e: e.refresh(check="x"),
    "start check": lambda e: e.start_refresh(check="x"),
    "rebase moments": lambda e: e.rebase(moments="x"),
    "rebase names": lambda e: e.rebase(3, moments="zero"),
    "precondition nothing": lambda e: e.precondition(None),
    "precondition a number": lambda e: e.precondition({"fc1": 3}),
    "apply a number": lambda e: e.apply(3, {}),
    "power without exponent": lambda e: e.apply("multiply_matpower", {}),
    "product with exponent": lambda e: e.apply("multiply", {}, exponent=0.5),
    "two exponents": lambda e: e.apply("multiply_matpower", {}, 0.5, 1.0),
    "operator of a number": lambda e: e.operator(3),
    "load nothing": lambda e: e.load_state_dict(None),
    "save to a number": lambda e: kc.save_checkpoint(3, e),
    "save to NUL": lambda e: kc.save_checkpoint("a\0b", e),
    "save parts": lambda e: kc.save_checkpoint("unused", e, parts=["all"]),
    "load None": lambda e: kc.load_checkpoint(None, e),
    "load layouts": lambda e: kc.load_checkpoint("unused", e, layouts=None),
    "load names": lambda e: kc.load_checkpoint("unused", e, names="fc1"),
    "header of NUL": lambda e: kc.read_header("a\0b"),
    "set a damping": lambda e: setattr(e, "damping", "x"),
    "set a decay": lambda e: setattr(e, "decay", None),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_the_wrong_kind_is_refused(name):
    """The error is the library's own, and the state stays as it was."""
    held = trained(BATCH.inputs, BATCH.output_grads)

    assert_refused(held, kc.KFACError, ".", lambda: CALLS[name](held))


@pytest.mark.parametrize("code", ["i8", "O", "c16", ">f8", "g"])
def test_statistics_begin_in_a_floating_dtype(code):
    """Of other arrays they were of that dtype, or an error without a name."""
    with pytest.raises(kc.DtypeError, match="`like`"):
        BLOCK.initial(np.ones(3).astype(code))


@pytest.mark.parametrize(
    "call",
    [
        lambda held, batch: held.update({"fc1": batch, "fc3": batch}),
        lambda held, batch: held.refresh(["fc1", "fc3"]),
        lambda held, batch: held.precondition({"fc3": {}}),
        lambda held, batch: held.operator("fc3"),
        lambda held, batch: held.state["fc3"],
    ],
    ids=["update", "refresh", "precondition", "operator", "state"],
)
def test_an_unknown_block_is_refused(backend, held, arrays, call):
    """A name that is no block raises and lists those that are."""
    held.damping = 0.2  # so that a refresh of the good block would be seen

    assert_refused(
        held,
        kc.UnknownBlockError,
        "^Unknown block 'fc3'; the blocks are 'fc1', 'fc2'",
        lambda: call(held, kc.Batch(*arrays)),
    )


def test_calls_before_their_time_are_refused(backend, arrays):
    """A block without statistics cannot be refreshed, without operator not applied."""
    held = estimator()
    assert_refused(held, kc.NotReadyError, "call `update` first", held.refresh)
    held.update({"fc1": kc.Batch(*arrays)})

    for match, act in (
        ("Block 'fc2'.*call `update` first", lambda: held.refresh(["fc1", "fc2"])),
        (
            "Block 'fc1' has no operator yet; call `refresh` first",
            lambda: held.precondition({"fc1": vectors(backend)}),
        ),
        ("Block 'fc2'.*call `update` first", lambda: held.operator("fc2")),
    ):
        assert_refused(held, kc.NotReadyError, match, act)


def vectors(backend, weight=(n, m), bias=(m,), dtype="float64"):
    """Return parameter-shaped arrays."""
    shapes = {"weight": weight, "bias": bias}
    return {name: backend.asarray(np.ones(s, dtype)) for name, s in shapes.items()}


BAD_VECTORS = {
    "missing": (
        lambda b: {"weight": vectors(b)["weight"]},
        kc.ShapeError,
        r"Block 'fc2'.*`parameters`.*missing \['bias'\]",
    ),
    "unknown": (
        lambda b: vectors(b) | {"scale": vectors(b)["bias"]},
        kc.ShapeError,
        r"Block 'fc2'.*`parameters`.*unknown \['scale'\]",
    ),
    "weight": (
        lambda b: vectors(b, weight=(m, n)),
        kc.ShapeError,
        r"Block 'fc2'.*`weight` to have shape \(4, 3\), got \(3, 4\)",
    ),
    "integers": (
        lambda b: vectors(b, dtype="int32"),
        kc.DtypeError,
        "`weight`.*floating.*int32",
    ),
    "none": (lambda b: vectors(b) | {"bias": None}, kc.DtypeError, "`bias`"),
}


@pytest.mark.parametrize("case", BAD_VECTORS)
@pytest.mark.parametrize("factorizations", [("inverse",), ()])
def test_vectors_that_do_not_fit_are_refused(backend, arrays, case, factorizations):
    """Bad gradients raise, naming block and parameter; what was prepared stays so."""
    make, error, match = BAD_VECTORS[case]
    held = trained(*arrays, factorizations=factorizations)
    gradients = {"fc2": make(backend)}

    assert_refused(held, error, match, lambda: held.precondition(gradients))


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
        r"`output_grads`.*examples and shared axes must match `inputs`",
    ),
    "shared_axis": (
        lambda b, x, g: kc.Batch(ones(b, N, 2, n), g),
        kc.ShapeError,
        r"`output_grads` to have shape \(6, 2, 3\)",
    ),
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
    "integer_inputs": (
        lambda b, x, g: kc.Batch(ones(b, N, n, dtype="int32"), g),
        kc.DtypeError,
        "`inputs`.*floating.*int32.*astype",
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
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("check", ["raise", "status"])
def test_a_batch_that_does_not_fit_is_refused(backend, held, arrays, case, check):
    """In either mode, first and later, and no block of the call moves."""
    make, error, match = BAD[case]
    batches = {"fc1": kc.Batch(*arrays), "fc2": make(backend, *arrays)}

    for one in (held, estimator()):
        assert_refused(
            one,
            error,
            f"Block 'fc2'.*{match}",
            lambda one=one: one.update(batches, check=check),
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spoilt", [(True, False), (False, True), (True, True)])
def test_numbers_that_are_not_finite_are_refused(backend, held, arrays, value, spoilt):
    """NaN or infinity raises, naming block and arguments, and no block moves."""
    bad = kc.Batch(
        *(
            with_entry(backend, x, value) if here else x
            for x, here in zip(arrays, spoilt, strict=True)
        )
    )
    names = ("`inputs`", "`output_grads`")
    named = " and ".join(n for n, here in zip(names, spoilt, strict=True) if here)

    assert_refused(
        held,
        kc.NotFiniteError,
        f"'fc2': {named} of this batch hold NaN or infinity.*skip the batch",
        lambda: held.update({"fc1": kc.Batch(*arrays), "fc2": bad}),
    )


def test_a_bad_block_drops_the_whole_batch(backend, held, arrays):
    """With ``check="status"`` every block keeps its sums; the bad one is flagged."""
    x, g = arrays
    bad = kc.Batch(with_entry(backend, x, np.nan), g)
    before = frozen(held.state_dict())["blocks"]

    held.update({"fc1": kc.Batch(2.0 * x, g), "fc2": bad}, check="status")

    after = frozen(held.state_dict())["blocks"]
    flags = [int(held.state[name].statistics.status) for name in ("fc1", "fc2")]
    assert flags == [kc.Status.OK, kc.Status.INPUTS_NOT_FINITE]
    found = [path for path in differences(before, after) if "averages" in path]
    assert found == []


def test_libraries_are_not_mixed(backend, held, arrays):
    """Not within a batch, and not between a batch and the statistics."""
    x, _ = arrays
    other = np
    if backend.name == "numpy":
        other = pytest.importorskip("array_api_strict")

    for batch, match in (
        (kc.Batch(x, other.ones((N, m))), "`inputs`.*`output_grads`.*Convert one"),
        (
            kc.Batch(other.ones((N, n)), other.ones((N, m))),
            "Block 'fc1'.*`statistics`.*where their first batch was",
        ),
    ):
        assert_refused(
            held,
            kc.MixedArraysError,
            match,
            lambda batch=batch: held.update({"fc1": batch}),
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
        lambda: BLOCK.initial(x),
        lambda: kc.gram(x),
        lambda: namespaces.own_namespace(x),
    ):
        with pytest.raises(
            kc.BackendUnavailableError, match=f"{words}.*needs 2024.12 or newer"
        ):
            admitted()


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


@pytest.mark.parametrize(
    ("layer", "approximation"),
    [
        (DENSE, kc.Kronecker()),
        (kc.ScaleShift(scale_shape=(n,), shift_shape=None), kc.Full()),
    ],
    ids=["kronecker", "scale"],
)
def test_gradient_batches_raise_where_inputs_are_needed(backend, layer, approximation):
    """It was an AttributeError of a name that nobody had written."""
    made = kc.Estimator({"a": kc.Block(layer, approximation)}, reduction="sum")
    gradients = {"weight": backend.asarray(np.ones((n, m)))}
    with pytest.raises(kc.UnsupportedError, match=r"Block 'a'.*`Batch` of inputs"):
        made.update({"a": kc.GradientBatch(gradients, batch_size=2)})


def test_a_mean_over_rows_needs_rows(backend, rng):
    """A norm's and bare parameters' gradients were taken for those of a mean over N.

    With two tokens an example their block was four times too small.
    """
    norm = kc.Block(kc.ScaleShift(scale_shape=(n,), shift_shape=None), kc.Full())
    bare = kc.Block(kc.Parameters(shapes={"w": (n,)}), kc.Full())
    x, g = rng.normal(size=(2, N, 2, n))
    batch = kc.Batch(backend.asarray(x), backend.asarray(g / (2 * N)))
    gradients = kc.GradientBatch({"w": backend.asarray(g[0, 0])}, batch_size=N)
    for layer, given in ((norm, batch), (bare, gradients)):
        made = kc.Estimator({"a": layer}, reduction="mean_rows")
        with pytest.raises(kc.ConventionError, match=r"Block 'a'.*reduction='sum'"):
            made.update({"a": given})

    # What the message says to do.
    made = kc.Estimator({"a": norm}, reduction="sum", damping=0.1, damping_rule="exact")
    made.update({"a": kc.Batch(batch.inputs, batch.output_grads * (2 * N))})
    made.refresh()
    D = (x * g).sum(axis=1)
    got = backend.to_numpy(made.operator("a").to_dense(damped=False))
    np.testing.assert_allclose(got, D.T @ D / N, rtol=1e-10)
