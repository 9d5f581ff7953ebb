"""The documentation's backend of a third party, and adapters that are broken.

What needs dpnp runs with ``--backend=dpnp``, where the example is installed.
"""

from __future__ import annotations

import itertools
import os
import sys

import numpy as np
import pytest

from kfac_core.array.backend import ENTRY_POINT_GROUP, native_operations

from ..builders.programs import run_python


def test_the_example_backend_computes(requires_backend):
    """The adapter of the example is loaded, with the operations that it brings."""
    requires_backend("dpnp", adapter=True)

    assert native_operations("dpnp") == {"solve_triangular", "count_indices"}


def views(xp, asarray, values):
    """Yield the same values as an array and as views that go to and fro, or stay."""
    yield values, asarray(values)
    for axis in range(values.ndim):
        yield np.flip(values, axis=axis), xp.flip(asarray(values), axis=axis)
        one = np.take(values, [0], axis=axis)
        repeated = xp.broadcast_to(asarray(one), values.shape)
        yield np.broadcast_to(one, values.shape), repeated


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_a_view_is_as_good_as_a_copy(backend, rng, shape):
    """Products, and choices by one condition, read repeated and reversed elements."""
    if backend.name == "jax":
        pytest.skip("JAX has no views, and compiles every case")
    xp = backend.xp
    A, B = rng.normal(size=shape), rng.normal(size=shape)
    cases = itertools.product(*(list(views(xp, backend.asarray, x)) for x in (A, B)))

    for (a, there), (b, beside) in cases:
        product = xp.matmul(xp.matrix_transpose(there), beside)
        expected = np.einsum("...ij,...ik->...jk", a, b)
        np.testing.assert_allclose(backend.to_numpy(product), expected, atol=1e-12)
        chosen = xp.where(xp.all(there == there), there, beside)
        np.testing.assert_array_equal(backend.to_numpy(chosen), a)


BROKEN = {
    "it raises": ("raise OSError('libsycl.so.8 is missing')", "OSError: libsycl"),
    "it is no Python": ("def", "SyntaxError"),
    "it has no name": ("", "expected its `name` to be 'broken', got None"),
    "it has another name": ("name = 'torch'", "'broken', got 'torch'"),
}

# Libraries that take long to import are not there.
ALONE = "import sys; sys.modules.update(torch=None, jax=None, cupy=None, dpnp=None)\n"

PROGRAM = """
import warnings
import kfac_core as kc
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        kc.asarray(__import__("numpy").ones(2))
    except kc.BackendUnavailableError as error:
        print(error)
print(*(w.message for w in caught))
"""


def with_adapter(folder, text, program, *, name="broken"):
    """Run a program with an adapter installed as the package ``kfac-broken 0.7``."""
    info = folder / "kfac_broken-0.7.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: kfac-broken\nVersion: 0.7\n"
    (info / "METADATA").write_text(metadata)
    entry = f"[{ENTRY_POINT_GROUP}]\n{name} = kfac_broken_{name}\n"
    (info / "entry_points.txt").write_text(entry)
    (folder / f"kfac_broken_{name}.py").write_text(text + "\n")
    # Before whatever of that name is installed.
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return run_python(
        "-c", program, env=os.environ | {"PYTHONPATH": paths, "KFAC_CORE_BACKEND": name}
    )


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_adapter_cannot_be_chosen(tmp_path, case):
    """The error says whose adapter it is, what is wrong and what to do."""
    text, wrong = BROKEN[case]

    done = with_adapter(tmp_path, text, ALONE + PROGRAM)

    assert done.returncode == 0, done.stderr
    refused, warned = done.stdout.splitlines()
    assert "'broken' (from KFAC_CORE_BACKEND=broken) cannot be used here" in refused
    assert "uninstall it. Usable here: " in refused
    assert "numpy" in refused.partition("Usable here: ")[2]
    for said in (refused, warned):
        assert "'kfac_broken_broken', of the package kfac-broken 0.7" in said
        assert wrong in said


def test_arrays_outlive_a_broken_adapter(tmp_path):
    """A broken adapter warns once, and the definitions compute with the arrays."""
    program = (
        "import array_api_strict as xp, numpy as np, kfac_core as kc, warnings\n"
        "from kfac_core.linalg.gram import gram\n"
        "warnings.simplefilter('always')\n"
        "rows = xp.asarray(np.arange(6.0).reshape(3, 2))\n"
        "for _ in range(2): print(kc.to_numpy(gram(rows)).tolist())\n"
    )

    done = with_adapter(tmp_path, "1 / 0", program, name="array_api_strict")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[[20.0, 26.0], [26.0, 35.0]]"] * 2
    assert done.stderr.count("ZeroDivisionError") == 1
