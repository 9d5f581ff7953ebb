"""Which backend serves where no array decides, and how arrays go there and back."""

from __future__ import annotations

import contextlib
import os
import threading

import numpy as np
import pytest

import kfac_core as kc

from ..builders.programs import run_python

VARIABLE = "KFAC_CORE_BACKEND"


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    """Start without any choice."""
    monkeypatch.delenv(VARIABLE, raising=False)


# What was given: the argument, the context and the variable; and which of them is
# taken, for what reason.
ORDER = {
    "nothing": ((None, None, None), "numpy", "the default"),
    "variable": ((None, None, 3), 3, f"from {VARIABLE}=array_api_strict:device2"),
    "context": ((None, 1, 3), 1, "chosen by use_backend"),
    "argument": ((0, 1, 3), 0, "given as an argument"),
    "argument_alone": ((0, None, 3), 0, "given as an argument"),
}
SPECS = ["numpy", "array_api_strict", *(f"array_api_strict:device{i}" for i in (1, 2))]


@pytest.mark.parametrize("case", ORDER)
def test_the_order_of_choices(monkeypatch, case):
    """An argument goes before a context, a variable, NumPy."""
    given, taken, reason = ORDER[case]
    argument, context, variable = (None if i is None else SPECS[i] for i in given)
    if variable:
        monkeypatch.setenv(VARIABLE, variable)

    with kc.use_backend(context) if context else contextlib.nullcontext():
        chosen = kc.array.selected_backend(argument)

    assert chosen.spec == (taken if isinstance(taken, str) else SPECS[taken])
    assert chosen.reason == reason


def test_the_import_does_not_read_the_variable():
    """A wrong variable is no error before the backend is needed."""
    program = (
        "import kfac_core as kc\n"
        "print('imported')\n"
        "try: kc.asarray(__import__('numpy').ones(2))\n"
        "except kc.UnknownBackendError as error: print(error)\n"
    )

    done = run_python(
        "-c", program, env=os.environ | {VARIABLE: "nonsense"}, check=True
    )

    first, second = done.stdout.splitlines()
    assert first == "imported"
    assert "'nonsense'" in second


@pytest.mark.parametrize(
    "choose",
    [
        lambda: kc.array.selected_backend("nonsense"),
        lambda: kc.use_backend("nonsense").__enter__(),
        lambda: kc.asarray(np.ones(2), backend="nonsense"),
        lambda: kc.enable_float64(backend="nonsense"),
    ],
    ids=["selected", "context", "asarray", "float64"],
)
def test_an_unknown_name_is_refused(choose, requires_adapters):
    """An unknown name raises, lists what is registered and says what to do."""
    with pytest.raises(
        kc.UnknownBackendError,
        match=rf"'nonsense'.*cupy, .*jax, .*numpy, .*torch.*{VARIABLE}.*install",
    ):
        choose()

    assert kc.array.selected_backend().name == "numpy"


@pytest.mark.parametrize("name", ["torch", "jax", "cupy"])
def test_a_backend_that_is_not_installed_is_refused(name, requires_adapters):
    """A known backend without its library says what to install and what is usable."""
    program = (
        "import sys\n"
        f"sys.modules[{name!r}] = None\n"
        "import kfac_core as kc\n"
        f"try: kc.array.selected_backend({name!r})\n"
        "except kc.KFACError as error: print(type(error).__name__, error)\n"
    )

    done = run_python("-c", program, check=True)

    assert done.stdout.startswith(f"BackendUnavailableError Backend '{name}'")
    assert "pip install" in done.stdout
    assert "Usable here: " in done.stdout
    assert "numpy" in done.stdout


@pytest.mark.parametrize(
    ("name", "device"),
    [("torch", "cuda:99"), ("torch", "nonsense"), ("jax", "gpu:99"), ("jax", "cpu:99")],
)
def test_an_unknown_device_of_a_library_is_refused(requires_backend, name, device):
    """The native backends refuse a device that is not there, and say which are."""
    requires_backend(name)

    with pytest.raises(kc.BackendUnavailableError, match=rf"{name}:{device}.*cpu"):
        kc.array.selected_backend(f"{name}:{device}")


def test_the_context_restores(monkeypatch):
    """A context gives back what was chosen before, also after an exception."""
    monkeypatch.setenv(VARIABLE, "array_api_strict:device1")
    seen = []

    with kc.use_backend("numpy") as outer:
        with (
            contextlib.suppress(RuntimeError),
            kc.use_backend("array_api_strict:device2"),
        ):
            seen.append(kc.array.selected_backend().spec)
            raise RuntimeError
        seen.append(kc.array.selected_backend().spec)

    assert outer.name == "numpy"
    assert seen == ["array_api_strict:device2", "numpy"]
    assert kc.array.selected_backend().spec == "array_api_strict:device1"


def test_the_context_is_of_one_thread(monkeypatch):
    """A thread started inside a context sees the choice of the process."""
    monkeypatch.setenv(VARIABLE, "array_api_strict:device1")
    seen = []
    thread = threading.Thread(
        target=lambda: seen.append(kc.array.selected_backend().spec)
    )

    with kc.use_backend("array_api_strict:device2"):
        thread.start()
        thread.join()
        inside = kc.array.selected_backend().spec

    assert inside == "array_api_strict:device2"
    assert seen == ["array_api_strict:device1"]


VALUES = {
    "negative_strides": np.arange(12.0).reshape(3, 4)[::-1, ::-2],
    "transposed": np.arange(12.0, dtype=np.float32).reshape(3, 4).T,
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3)),
    "float32": np.array([1.5, -0.0, np.inf], np.float32),
    "int64": np.array([1, -(2**40)]),
    "bool": np.array([True, False]),
}


@pytest.mark.parametrize("case", VALUES)
def test_arrays_go_there_and_back(backend, case):
    """Values, shape and dtype survive, on the chosen device, and nothing is shared."""
    values = VALUES[case].copy(order="A") if case == "scalar" else VALUES[case]
    before = values.copy()
    spec = ":".join([backend.name, *backend.spec.split(":")[1:]])

    there = kc.asarray(values, backend=spec)
    back = kc.to_numpy(there)
    back[...] = 0

    again = kc.to_numpy(there)
    np.testing.assert_array_equal(again, before)
    assert (again.dtype, again.shape) == (before.dtype, before.shape)
    np.testing.assert_array_equal(values, before)


def test_jax_without_float64_raises(requires_backend):
    """Without 64-bit floats JAX refuses float64 values, until they are switched on."""
    requires_backend("jax", adapter=True)
    program = (
        "import numpy as np, kfac_core as kc\n"
        "try: kc.asarray(np.ones(2), backend='jax')\n"
        "except kc.DtypeError as error: print(error)\n"
        "print(kc.asarray(np.ones(2, np.float32), backend='jax').dtype)\n"
        "kc.enable_float64(backend='jax')\n"
        "print(kc.asarray(np.ones(2), backend='jax').dtype)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "JAX_ENABLE_X64"}

    done = run_python("-c", program, env=env, check=True)

    refused, narrow, wide = done.stdout.splitlines()
    assert "round float64 to 32 bits" in refused
    assert "enable_float64" in refused
    assert (narrow, wide) == ("float32", "float64")


def test_what_is_no_array_is_refused_by_name():
    """A matrix in parts says how it becomes an array."""
    K = kc.linalg.SymmetricMatrix(array=np.eye(3), full_storage=True)
    with pytest.raises(kc.DtypeError, match=r"got SymmetricMatrix.*x.full\(\)"):
        kc.to_numpy(K)
    with pytest.raises(kc.DtypeError, match="got list"):
        kc.to_numpy([1.0])
