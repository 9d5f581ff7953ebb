"""Every option of every public constructor, function and method is refused by name.

The walk finds each public callable, gives it arguments that the table of constraints
accepts, and one option that it does not.  Data (batches, states, vectors) are no options.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect

import pytest

import kfac_core as kc
from kfac_core import constraints
from kfac_core.array.structure import fields_of

from .test_constraints import OPTIONS

PARTS = (
    *("approximations", "array", "checkpoint", "damping", "distributed", "execution"),
    *("factors", "influence", "integration", "layers", "linalg", "losses"),
    *("operators", "posterior", "report", "roots", "steps"),
)
# The module of each integration, and what it needs.
INTEGRATIONS = {"numpy": "numpy", "torch": "torch", "jax": "jax"}

# By class or function, why its options are not refused where it is called.
EXCEPTIONS = {
    "Estimator": "its methods run in every step; `CALLS` of `test_constraints.py`",
    "Network": "likewise; an `Estimator` hands its options on",
    "Approximation": "called by a `Block` with what that has checked; likewise:",
    "Layer": "",
    "Factor": "",
    "FullFactor": "",
    "DiagonalFactor": "",
    "OperatorOptions": "",
    "UpdateOptions": "",
    "UpdateShares": "",
    "factor_of": "",
    "shifted_matrix": "",
    "kronecker_operator": "",
    "spectral_operator": "",
    "raise_for": "",
    "as_scalar": "",
    "status_unless": "",
    "choose_patches": "",
    "factored_shifts": "",
    "steps_of": "",
    "unfold_time": "",
    "MatrixPower": "",
    "ShiftedMatrix": "asked by operators, which check; likewise:",
    "ShiftedDiagonal": "",
    "SymmetricMatrix": "",
    "Backend": "made by adapters, which name themselves",
    "get_backend": "",
    "Communicator": "made by engines; likewise:",
    "DistributedExecutor": "",
    "Place": "",
    "Placement": "made by `place`, and never by a user; results likewise:",
    "BlockLoad": "",
    "Agreement": "",
    "Traffic": "",
    "BlockReport": "",
    "FactorReport": "",
    "NoiseSpec": "",
    "Selection": "",
    "Influence": "",
    "Posterior": "",
    "require_damping": "are constraints themselves",
    "require_positive": "",
    "interval_at": "",
    "use_backend": "an `UnknownBackendError` lists the names, which no table knows",
    "set_default_backend": "",
    "selected_backend": "",
    "asarray": "",
    "enable_float64": "",
    "row_loss": "of any object that looks like a loss",
    "RowLoss": "made by `row_loss`",
    "value_at": "a schedule may return anything",
    "framework_conv": "makes a `Conv`, which checks",
    "LayerCall": "made by integrations of what they saw; likewise:",
    "batches_of_calls": "",
    "batches_in_parts": "",
    "structure": "a decorator of classes",
    "dense": "traced, and its weight is an array",
    "tap": "",
    "kfac_core_shims.torch.kfac.KFAC.note": "called by hooks; likewise:",
    "kfac_core_shims.torch.kfac.KFAC.observe_pass": "",
    "kfac_core_shims.torch.kfac.KFAC.observe": "its weights are an array",
}
DATA = {
    "path": "unused",
    # Names for messages, iterables of batches, and functions.
    **dict.fromkeys(("name", "calls", "passes", "closure", "function", "finish"), "x"),
    **dict.fromkeys(("psum", "refresh", "install"), "x"),
}
NOT_ACCEPTED = (object(), 1j, -7.5, "no such\0", [object()])


def public():
    """Return each public class and function with the name of its package."""
    names = ["kfac_core", *(f"kfac_core.{part}" for part in PARTS)]
    for name, needed in INTEGRATIONS.items():
        if importlib.util.find_spec(needed) is not None:
            names.append(f"kfac_core_shims.{name}")
    found = {}
    for name in names:
        package = importlib.import_module(name)
        for public_name in getattr(package, "__all__", vars(package)):
            value = getattr(package, public_name)
            is_class = inspect.isclass(value)
            if public_name.startswith("_") or not (
                is_class or inspect.isfunction(value)
            ):
                continue
            if is_class and issubclass(value, (BaseException, int)):
                continue
            if value.__module__.startswith("kfac_core"):
                found.setdefault(value, f"{name}:{public_name}")
    return found


def called():
    """Return constructors, functions and methods that have options, and which."""
    found = {}
    for value, name in public().items():
        if value in OPTIONS or value.__name__ in EXCEPTIONS:
            continue
        if inspect.isfunction(value):
            found[name] = value
            continue
        if "__init__" in vars(value) and not fields_of(value):
            found[name] = value
        for inner, part in vars(value).items():
            if f"{value.__module__}.{value.__name__}.{inner}" in EXCEPTIONS:
                continue
            part = getattr(part, "__func__", part)
            if inspect.isfunction(part) and not inner.startswith("_"):
                found[f"{name}.{inner}"] = part
    return {
        (name, option): call
        for name, call in found.items()
        for option, constraint in constraints.constraints_of(call).items()
        if constraint.error is not kc.ArgumentError and option not in DATA
        if not is_of_an_approximation(call)
    }


def is_of_an_approximation(call):
    """Whether a `Block` calls it."""
    folders = ("kfac_core.approximations", "kfac_core.layers", "kfac_core.factors")
    return call.__module__.startswith(folders)


CALLED = called()


@pytest.fixture(scope="module")
def samples():
    """Return values of which each constraint accepts one."""
    words = (
        *("inverse", "sum", "mean", "raise", "factored", "io", "gradients", "fisher"),
        *("full", "input", "uniform", "dense", "float32", "channels_last", "same"),
        *("kronecker", "multiply", "triangular", "refuse", "keep", "dense"),
    )
    found = [True, 1, 0.5, 1.5, *words, None, (), (1, 1), {}, print]
    found += [(word,) for word in words]
    found += OPTIONS.values()
    found.append(kc.distributed.connect("alone"))
    for cls in public():
        if inspect.isclass(cls):
            with contextlib.suppress(TypeError):
                found.append(object.__new__(cls))
    return found


def sample_of(constraint, samples):
    """Return a value that a constraint accepts."""
    return next(filter(constraint.accepts, samples), object())


@pytest.mark.parametrize("key", CALLED, ids=lambda key: ".".join(key))
def test_an_option_that_cannot_be_is_refused(key, samples):
    """Whatever the other arguments are, the error is the library's and names it."""
    call, option = CALLED[key], key[1]
    table = constraints.constraints_of(call)
    junk = next(x for x in NOT_ACCEPTED if not table[option].accepts(x))
    arguments, options = [], {}
    for name, parameter in inspect.signature(call).parameters.items():
        given = parameter.default
        if name == option:
            given = junk
        elif given is parameter.empty:
            given = DATA.get(name, object())
            if name in table:
                given = sample_of(table[name], samples)
        if parameter.kind is parameter.KEYWORD_ONLY:
            options[name] = given
        elif parameter.kind is not parameter.VAR_KEYWORD:
            arguments.append(given)

    with pytest.raises(kc.KFACError, match=f"`{option}`"):
        call(*arguments, **options)


def test_the_walk_finds_what_users_call():
    """The row that must differ: an empty walk would refuse everything."""
    names = {name.rpartition(":")[2] for name, _ in CALLED}

    assert len(CALLED) > 100
    assert {"kl_clip", "inverse_root", "block_posterior", "KFAC", "vectors"} <= names
    assert "Posterior" in EXCEPTIONS
    assert "CurvatureOperator.multiply" in names


def test_exceptions_exist():
    """No reason is given for what is not there any more."""
    if any(importlib.util.find_spec(x) is None for x in INTEGRATIONS.values()):
        pytest.skip("some of them are of frameworks that are not installed")
    known = {value.__name__ for value in public()}

    assert {name for name in EXCEPTIONS if "." not in name} - known == set()
