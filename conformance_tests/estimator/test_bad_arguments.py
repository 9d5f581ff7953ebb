"""Bad settings, names, vectors and orders of calls: a clear error and nothing changed."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc

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
def batch(backend, rng):
    """A good batch."""
    return kc.Batch(*(backend.asarray(rng.normal(size=(N, k))) for k in (n, m)))


@pytest.fixture
def kept(batch):
    """An estimator that has seen a batch and has operators."""
    made = estimator()
    made.update({"fc1": batch, "fc2": batch})
    made.refresh()
    return made


def assert_refused(kept, error, match, act):
    """Assert that a call raises what it should and leaves the state as it was."""
    before = frozen(kept.state_dict())

    with pytest.raises(error, match=match):
        act()

    assert differences(before, frozen(kept.state_dict())) == []


NUMBERS = {
    # name: a way to write the number
    "python": float,
    "numpy64": np.float64,
    "numpy32": np.float32,
}
BAD_DAMPINGS = [-0.1, np.nan, np.inf]
BAD_DECAYS = [-0.1, 1.1, np.nan, np.inf]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("value", BAD_DAMPINGS)
def test_a_bad_damping_is_refused_when_made(number, value):
    """An estimator with a negative or non-finite damping cannot be made."""
    with pytest.raises(kc.DampingError, match="`damping` to be a finite number >= 0"):
        estimator(damping=NUMBERS[number](value))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("value", BAD_DAMPINGS)
def test_a_bad_damping_is_refused_when_set(backend, kept, number, value):
    """Assigning a bad damping raises and leaves the good one."""

    def act():
        kept.damping = NUMBERS[number](value)

    assert_refused(kept, kc.DampingError, "`damping` to be a finite number >= 0", act)


def test_a_damping_of_another_library_is_said_to_be_one(backend, batch):
    """It was said that one of two devices was `cpu` and the other `cpu`."""
    if backend.name == "numpy":
        pytest.skip("NumPy's own scalars are those of the batch")
    made = estimator()
    made.update({"fc1": batch, "fc2": batch})
    made.damping = np.array(0.2)
    with pytest.raises(kc.MixedArraysError, match="`damping` is a 0-d array of numpy"):
        made.refresh()


def test_a_mapping_of_dampings_is_a_copy(backend, batch):
    """The caller's own may change; that of the constructor was followed, unchecked."""
    given = {"fc1": 0.1, "fc2": 0.2}
    made = estimator(damping=given)
    given["fc1"] = -1.0
    assert made.damping == {"fc1": 0.1, "fc2": 0.2}


@pytest.mark.parametrize("value", BAD_DAMPINGS)
@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi", "exact"])
def test_a_bad_damping_in_an_array_is_refused_by_refresh(backend, batch, rule, value):
    """A 0-d array is looked at by ``refresh``, which raises and keeps the operators."""
    kept = estimator(damping_rule=rule)
    kept.update({"fc1": batch})
    kept.refresh()
    kept.damping = backend.asarray(np.array(value))

    match = r"(?=.*fc1)(?=.*damping).*finite number"
    assert_refused(kept, kc.DampingError, match, kept.refresh)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("value", BAD_DECAYS)
def test_a_bad_decay_is_refused_when_made(number, value):
    """An estimator with a decay outside [0, 1] cannot be made."""
    with pytest.raises(kc.DecayError, match=r"`decay` to be a number in \[0, 1\]"):
        estimator(decay=NUMBERS[number](value))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("value", BAD_DECAYS)
def test_a_bad_decay_is_refused_when_set(backend, kept, number, value):
    """Assigning a decay outside [0, 1] raises and leaves the good one."""

    def act():
        kept.decay = NUMBERS[number](value)

    assert_refused(kept, kc.DecayError, r"`decay` to be a number in \[0, 1\]", act)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_bad_weight_is_refused(number, value):
    """The weight of an update is a finite number above zero."""
    with pytest.raises(kc.DecayError, match="`weight` to be a finite number > 0"):
        estimator(weight=NUMBERS[number](value))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "bad", [{"decay": 1.5}, {"decay": -0.5}, {"decay": 0.9, "weight": -1.0}]
)
def test_a_bad_coefficient_of_a_block_is_refused(backend, batch, number, bad):
    """The pure update refuses what the estimator refuses, however it is written."""
    options = {name: NUMBERS[number](value) for name, value in bad.items()}
    start = block().initial(batch.inputs)

    with pytest.raises(kc.DecayError, match=r"`decay`|`weight`"):
        block().update(start, batch, conventions=SUMMED, **options)


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("damping_rule", "tikhonov", "`damping_rule`.*'factored'.*'exact'.*'tikhonov'"),
        (
            "reduction",
            "average",
            "`reduction`.*'sum', 'mean', 'mean_rows'.*'average'",
        ),
        ("sources", "max", "`sources`.*'sum', 'mean'.*'max'"),
        ("factorizations", ("lu",), "`factorizations`.*'inverse', 'cholesky'.*'lu'"),
    ],
)
def test_an_unknown_option_is_refused(option, value, match):
    """An option that names no convention raises and lists those that there are."""
    with pytest.raises(kc.ConventionError, match=match):
        estimator(**{option: value})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: kc.Kronecker(sharing="half"), "`sharing`.*'expand', 'reduce'"),
        (lambda: kc.Kronecker(input="sparse"), "`input`.*'full'.*'sparse'"),
        (lambda: kc.Precision(storage="float16"), "`storage`.*float32"),
        (
            lambda: kc.Dense(
                in_features=1, out_features=1, bias=True, weight_layout="HWIO"
            ),
            "`weight_layout`.*'io', 'oi'.*'HWIO'",
        ),
    ],
    ids=["sharing", "factor", "storage", "layout"],
)
def test_an_unknown_description_is_refused(make, match):
    """A description with an unknown name raises and lists those that there are."""
    with pytest.raises(kc.ConventionError, match=match):
        make()


@pytest.mark.parametrize("option", ["rule", "factorizations"])
def test_an_unknown_option_of_a_block_is_refused(backend, batch, option):
    """The pure function for an operator lists what it knows."""
    statistics = block().update(
        block().initial(batch.inputs), batch, conventions=SUMMED, decay=0.9
    )
    options = {"rule": "exact", "factorizations": ("inverse",)}
    options[option] = "nothing" if option == "rule" else ("nothing",)

    with pytest.raises(kc.ConventionError, match=f"`{option}`.*'nothing'"):
        block().operator(statistics, damping=0.1, **options)


@pytest.mark.parametrize(
    "call",
    [
        lambda kept, batch: kept.update({"fc1": batch, "fc3": batch}),
        lambda kept, batch: kept.refresh(["fc1", "fc3"]),
        lambda kept, batch: kept.precondition({"fc3": {}}),
        lambda kept, batch: kept.operator("fc3"),
        lambda kept, batch: kept.state["fc3"],
    ],
    ids=["update", "refresh", "precondition", "operator", "state"],
)
def test_an_unknown_block_is_refused(backend, kept, batch, call):
    """A name that is no block raises and lists those that are."""
    kept.damping = 0.2  # so that a refresh of the good block would be seen

    assert_refused(
        kept,
        kc.UnknownBlockError,
        "^Unknown block 'fc3'; the blocks are 'fc1', 'fc2'",
        lambda: call(kept, batch),
    )


def test_an_unknown_product_is_refused(backend, kept):
    """A product that operators do not have raises and lists those that they have."""
    with pytest.raises(kc.ConventionError, match=r"`product`.*'multiply'.*'divide'"):
        kept.apply("divide", {})


def test_refresh_needs_an_update(backend, batch):
    """A block without statistics cannot be refreshed, alone or beside another."""
    kept = estimator()
    assert_refused(kept, kc.NotReadyError, "call `update` first", kept.refresh)
    kept.update({"fc1": batch})

    assert_refused(
        kept,
        kc.NotReadyError,
        "Block 'fc2'.*call `update` first",
        lambda: kept.refresh(["fc1", "fc2"]),
    )


def test_precondition_needs_a_refresh(backend, batch):
    """A block without operator cannot precondition."""
    kept = estimator()
    kept.update({"fc1": batch})
    gradients = {"fc1": vectors(backend)}

    assert_refused(
        kept,
        kc.NotReadyError,
        "Block 'fc1'.*call `update` and `refresh` first",
        lambda: kept.precondition(gradients),
    )


def vectors(backend, weight=(n, m), bias=(m,), dtype="float64"):
    """Return parameter-shaped arrays."""
    shapes = {"weight": weight, "bias": bias}
    return {name: backend.asarray(np.ones(s, dtype)) for name, s in shapes.items()}


BAD_VECTORS = {
    "missing": (
        lambda b: {"weight": vectors(b)["weight"]},
        kc.ShapeError,
        r"Block 'fc2'.*\['bias', 'weight'\], got \['weight'\]",
    ),
    "unknown": (
        lambda b: vectors(b) | {"scale": vectors(b)["bias"]},
        kc.ShapeError,
        r"Block 'fc2'.*got \['bias', 'scale', 'weight'\]",
    ),
    "weight": (
        lambda b: vectors(b, weight=(m, n)),
        kc.ShapeError,
        r"Block 'fc2'.*`weight` to have shape \(4, 3\), got \(3, 4\)",
    ),
    "bias": (
        lambda b: vectors(b, bias=(m, 1)),
        kc.ShapeError,
        r"Block 'fc2'.*`bias` to have shape \(3,\), got \(3, 1\)",
    ),
    "integers": (
        lambda b: vectors(b, dtype="int32"),
        kc.DtypeError,
        "`weight`.*floating.*int32",
    ),
    "list": (
        lambda b: vectors(b) | {"bias": [1.0, 1.0, 1.0]},
        kc.DtypeError,
        "`bias` to be an array, got list",
    ),
    "number": (lambda b: vectors(b) | {"bias": 1.0}, kc.DtypeError, "`bias`"),
    "none": (lambda b: vectors(b) | {"bias": None}, kc.DtypeError, "`bias`"),
}


@pytest.mark.parametrize("case", BAD_VECTORS)
@pytest.mark.parametrize("factorizations", [("inverse",), ()])
def test_vectors_that_do_not_fit_are_refused(backend, batch, case, factorizations):
    """Bad gradients raise, naming block and parameter; what was prepared stays so."""
    make, error, match = BAD_VECTORS[case]
    kept = estimator(factorizations=factorizations)
    kept.update({"fc1": batch, "fc2": batch})
    kept.refresh()
    gradients = {"fc2": make(backend)}

    assert_refused(kept, error, match, lambda: kept.precondition(gradients))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda x, g: (x, g), "Block 'fc1'.*got ndarray.*kfac_core.Batch"),
        (lambda x, g: {"inputs": x}, "Block 'fc1/inputs'.*got ndarray"),
    ],
    ids=["tuple", "mapping"],
)
def test_what_is_no_batch_is_refused_by_its_block(wrong, match):
    """A mapping was said to be of the block 'inputs'."""
    with pytest.raises(kc.ArgumentError, match=match):
        estimator().update({"fc1": wrong(np.ones((N, n)), np.ones((N, m)))})


@pytest.mark.parametrize(
    ("layer", "approximation"),
    [
        (block().layer, kc.Kronecker()),
        (block().layer, kc.Full()),
        (kc.ScaleShift(scale_shape=(n,), shift_shape=None), kc.Full()),
        (
            kc.Embedding(num_embeddings=n, features=m, weight_layout="io"),
            kc.Kronecker(input="diagonal"),
        ),
        (
            kc.Conv(
                in_channels=n,
                out_channels=m,
                kernel_size=(1,),
                padding="valid",
                bias=False,
                weight_layout="oi_spatial",
                data_layout="channels_first",
            ),
            kc.Kronecker(),
        ),
    ],
    ids=["kronecker", "full", "scale", "embedding", "conv"],
)
def test_gradients_alone_are_refused_where_inputs_are_needed(
    backend, layer, approximation
):
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


@pytest.mark.parametrize("layer", ["chain", "series"])
def test_exact_damping_of_a_chain_is_refused_in_one_sentence(backend, rng, layer):
    """The block was named twice."""
    T = 3 if layer == "series" else 1
    shape = (N, T) if T > 1 else (N,)
    wide = kc.Dense(in_features=n, out_features=n, bias=True, weight_layout="io")
    if layer == "series":
        blocks = {"a": kc.Block(wide, kc.Series(variant="infinite"))}
        sharing = kc.Sharing()
    else:
        blocks = {name: kc.Block(wide, kc.Kronecker()) for name in "ab"}
        sharing = kc.Sharing(chains={"c": ("a", "b")})
    made = kc.Estimator(blocks, reduction="sum", damping_rule="exact", sharing=sharing)
    rows = [backend.asarray(rng.normal(size=(*shape, n))) for _ in range(2)]
    made.update({name: kc.Batch(*rows) for name in blocks})
    with pytest.raises(kc.UnsupportedError, match="'factored'") as caught:
        made.refresh()
    assert str(caught.value).count("Block ") == 1
