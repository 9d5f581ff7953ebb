"""Adapters of third parties: what they must bring, and what happens where they do not."""

from __future__ import annotations

import types

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array import backend as registry
from kfac_core.array.backend import native_operation, native_operations
from kfac_core.cli.doctor import diagnosis
from kfac_core.linalg.eigen import eigh
from kfac_core.linalg.symmetric import SymmetricMatrix


@pytest.fixture
def forgotten():
    """Forget afterwards what a test registers for array-api-strict."""
    name = "array_api_strict"
    tables = registry._loaded, registry._operations, registry._problems
    before = [table.pop(name, None) for table in tables]
    yield
    for table, value in zip(tables, before, strict=True):
        table.pop(name, None)
        if value is not None:
            table[name] = value


def strict_matrix(values):
    """Return a symmetric matrix of array-api-strict, and its namespace."""
    import array_api_strict as xp

    return SymmetricMatrix(xp.asarray(values), full_storage=True), xp


@pytest.mark.parametrize("declines", [False, True])
def test_an_adapter_may_bring_one_operation(forgotten, declines):
    """It is used, or the definition in its place where it returns NotImplemented."""
    marked = []

    def native(matrix, /, *, xp):
        marked.append(matrix)
        return NotImplemented if declines else xp.linalg.eigh(matrix.array)

    kc.register_backend(types.SimpleNamespace(name="array_api_strict", eigh=native))
    matrix, xp = strict_matrix(np.diag([1.0, 2.0]))

    w, _ = eigh(matrix, xp=xp)

    assert len(marked) == 1
    assert native_operations("array_api_strict") == {"eigh"}
    assert native_operation("solve_triangular", xp) is None
    np.testing.assert_array_equal(kc.to_numpy(w), [1.0, 2.0])
    there = kc.asarray(np.ones(2), backend="array_api_strict:device1")
    assert str(there.device) == "array_api_strict.Device('device1')"
    assert "array_api_strict" in kc.backend_names()


def test_an_adapter_that_is_out_of_order_is_refused(forgotten):
    """What an adapter says of itself stands in the error, with what is usable."""
    adapter = types.SimpleNamespace(
        name="array_api_strict", problem=lambda: "it is out of order"
    )
    kc.register_backend(adapter)

    with pytest.raises(
        kc.BackendUnavailableError, match=r"it is out of order.*Usable here: .*numpy"
    ):
        kc.array.selected_backend("array_api_strict")


def test_an_adapter_that_raises_does_not_stop_the_others(forgotten):
    """What it raises is what is wrong with it; the doctor and other choices go on."""

    def raising(*args):
        raise RuntimeError("the driver has gone")

    adapter = types.SimpleNamespace(name="array_api_strict", problem=raising)
    kc.register_backend(adapter)
    found = diagnosis()["backends"]["array_api_strict"]

    assert not found["usable"]
    assert "RuntimeError: the driver has gone" in found["problem"]
    with pytest.raises(kc.BackendUnavailableError, match="the driver has gone"):
        kc.array.selected_backend("array_api_strict")
    assert kc.array.selected_backend("numpy").name == "numpy"

    for member in ("versions", "devices"):
        members = {"versions": dict, "devices": list, "problem": lambda: None}
        members[member] = raising
        kc.register_backend(types.SimpleNamespace(name="array_api_strict", **members))
        backends = diagnosis()["backends"]
        assert "the driver has gone" in backends["array_api_strict"]["problem"]
        assert backends["numpy"]["usable"]
