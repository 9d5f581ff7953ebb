"""Backends and dtypes as fixtures.

``pytest --backend=numpy,torch,strict`` chooses the backends; ``KFAC_CORE_TEST_BACKENDS``
does the same.  A name may carry a device (``torch:cuda:0``, ``strict:device1``), and the
name of any registered third-party backend is accepted.  By default every light one runs:
NumPy, and array-api-strict on two of its devices.

NumPy inputs are read-only in every test, so that whatever writes to an input fails.

``KFAC_CORE_TEST_NO_BACKENDS=1`` hides ``kfac_core_backends`` from the import system: the
definitions in the pure standard then do everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# NumPy and SciPy each bring an OpenBLAS with threads of its own, which wait for work by
# spinning: on a few cores the two pools take the processors from each other.  Small
# problems want one thread anyway.  Said before either is imported.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

from .builders.adapters import WITHOUT_ADAPTERS  # noqa: E402

DEFAULT_BACKENDS = "numpy,strict,strict:device1"
ALIASES = {"strict": "array_api_strict"}


class _HiddenAdapters(importlib.abc.MetaPathFinder):
    """Make ``kfac_core_backends`` impossible to import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == "kfac_core_backends":
            raise ModuleNotFoundError(f"{name} is hidden by KFAC_CORE_TEST_NO_BACKENDS")


if WITHOUT_ADAPTERS:
    sys.meta_path.insert(0, _HiddenAdapters())


@dataclasses.dataclass(frozen=True)
class BackendUnderTest:
    """One backend and device, and the way to and from NumPy."""

    spec: str
    name: str
    device: Any
    xp: Any
    adapter: Any

    @property
    def selection(self) -> str:
        """Name and device as the library takes them; tests abbreviate some names."""
        return ":".join([self.name, *self.spec.split(":")[1:]])

    def asarray(self, values: Any, dtype: str | None = None) -> Any:
        """Copy values to the backend; read-only where that can be said."""
        host = np.array(values, dtype=dtype)
        if self.name == "numpy":
            host.flags.writeable = False
            return host
        return self.adapter.asarray(host, device=self.device)

    def to_numpy(self, x: Any) -> np.ndarray:
        """Bring an array to the host, in float64 where it is a float."""
        host = self.adapter.to_numpy(x)
        return host.astype(np.float64) if host.dtype.kind == "f" else host

    def dtype(self, name: str) -> Any:
        """Return the library's dtype of a name."""
        return getattr(self.xp, name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default=os.environ.get("KFAC_CORE_TEST_BACKENDS", DEFAULT_BACKENDS),
        help=f"comma-separated backends, each name[:device] (default {DEFAULT_BACKENDS})",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run every case of every test on JAX and on a second device too",
    )


# Where JAX is tested in float32 too without `--thorough`: the way from rows to products.
JAX_FLOAT32 = {"test_smoke", "test_gram", "test_fallback"}

JAX_CASES = {"test_smoke": 8, "test_records": 16}
"""How many cases of some tests JAX runs without `--thorough`: the answers of others."""

CASES = {"strict": 4, "strict:device1": 2, "torch": 8, "jax": 1}
"""How many cases of a test run on a backend without `--thorough`; on NumPy all do."""

CASES_WITHOUT_ADAPTERS = {"numpy": 4, "torch": 2}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        specs = metafunc.config.getoption("--backend").split(",")
        metafunc.parametrize("backend", specs, indirect=True)
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", ["float64", "float32"])


STRICT_WARNING = "ignore:invalid value encountered in matmul:RuntimeWarning"
"""What NumPy may say of infinities that array-api-strict hands it.

It hangs on the processor, whose kernels may compute ``inf * 0`` in lanes that nobody reads.
Of NumPy's own arrays it is an error.
"""


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what runs elsewhere, and most cases where some show the same.

    Tests of no array library run with NumPy's, and not again with those of others, nor
    without adapters.
    Eager JAX compiles every operation anew for each shape and dtype, which is nearly all
    of the time that its tests take.  On other libraries, on a second device and without
    adapters every test runs, in so many of its cases as `CASES` says, far apart.
    """
    for item in items:
        if _backend_of(item).startswith("strict"):
            item.add_marker(pytest.mark.filterwarnings(STRICT_WARNING))
    backends = config.getoption("--backend").split(",")
    if "numpy" not in backends or WITHOUT_ADAPTERS:
        elsewhere = [item for item in items if not _of_a_library(item)]
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if _of_a_library(item)]
    if config.getoption("--thorough"):
        return
    cases: dict[tuple[Any, str, str], list[pytest.Item]] = {}
    for item in items:
        if not _compiles_long(item):
            name = getattr(item, "originalname", item.name)
            cases.setdefault((item.path, name, _backend_of(item)), []).append(item)
    chosen = {item for same in cases.values() for item in _some_of(same)}
    left_out = [item for item in items if item not in chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item in chosen]


def _some_of(same: list[pytest.Item]) -> list[pytest.Item]:
    """Return so many cases of one test as its backend runs, far apart."""
    spec = _backend_of(same[0])
    known = CASES_WITHOUT_ADAPTERS if WITHOUT_ADAPTERS else CASES
    count = known.get(spec, known.get(spec.partition(":")[0], len(same)))
    if _on_jax(same[0]):
        count = JAX_CASES.get(same[0].path.stem, count)
    if len(same) <= count:
        return same
    if count == 1:
        return [same[len(same) // 2]]
    step = (len(same) - 1) / (count - 1)
    return [same[round(i * step)] for i in range(count)]


def _of_a_library(item: pytest.Item) -> bool:
    """Whether a test takes a backend, from the command line or by its name."""
    names: list[str] = getattr(item, "fixturenames", [])
    return "backend" in names or "requires_backend" in names


def _backend_of(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    return str(params.get("backend", ""))


def _on_jax(item: pytest.Item) -> bool:
    return _backend_of(item).startswith("jax")


def _compiles_long(item: pytest.Item) -> bool:
    if not _on_jax(item):
        return False
    params = item.callspec.params  # type: ignore[attr-defined]
    narrow = params.get("dtype") == "float32" and item.path.stem not in JAX_FLOAT32
    solid = item.path.stem == "test_conv_layer" and 3 in params.values()
    return narrow or solid


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> BackendUnderTest:
    """The backend under test; an unknown or unusable name is an error, not a skip."""
    return make_backend(request.param)


def make_backend(spec: str) -> BackendUnderTest:
    """Return a backend by its specification, set to its strictest."""
    from kfac_core.array.backend import get_backend

    short, _, device = spec.strip().partition(":")
    name = ALIASES.get(short, short)
    adapter = get_backend(name)
    problem = adapter.problem()
    if problem is not None:
        raise RuntimeError(f"--backend={spec}: {problem}")
    _strictest(name)
    found = adapter.device(device or None)
    return BackendUnderTest(spec, name, found, adapter.namespace(), adapter)


def _strictest(name: str) -> None:
    """Let a library be as exact and as strict as it can."""
    if name == "array_api_strict":
        import array_api_strict

        array_api_strict.set_array_api_strict_flags(
            boolean_indexing=False, data_dependent_shapes=False
        )
    if name == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_default_matmul_precision", "float32")
    if name == "torch":
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        if os.environ.get("KFAC_CORE_TEST_TORCH_ON_HOST") != "1":
            _let_pytorch_compute()


def _let_pytorch_compute() -> None:
    """Keep from NumPy what it computes for PyTorch on one thread, as here.

    ``KFAC_CORE_TEST_TORCH_ON_HOST=1`` leaves it to NumPy, as programs on one thread do;
    ``test_torch_lapack.py`` always does.
    """
    try:
        lapack = importlib.import_module("kfac_core_backends.torch_lapack")
    except ModuleNotFoundError:
        return
    if hasattr(lapack.on_one_thread, "__wrapped__"):
        return

    @functools.wraps(lapack.on_one_thread)
    def never() -> bool:
        return False

    lapack.on_one_thread = never


@pytest.fixture
def requires_backend(request: pytest.FixtureRequest) -> Callable[..., BackendUnderTest]:
    """For tests of one library: give its backend, or skip where it was not asked for.

    ``requires_backend("jax", adapter=True)`` also skips where adapters are hidden.
    """

    def require(name: str, *, adapter: bool = False) -> BackendUnderTest:
        asked = request.config.getoption("--backend").split(",")
        specs = [s for s in asked if s.strip().partition(":")[0] == name]
        if not specs:
            pytest.skip(f"a test of {name} alone, which --backend does not list")
        if adapter and WITHOUT_ADAPTERS:
            pytest.skip(
                "a test of an adapter, and KFAC_CORE_TEST_NO_BACKENDS hides all"
            )
        return make_backend(specs[0])

    return require


@pytest.fixture
def compiles_long(request: pytest.FixtureRequest, backend: BackendUnderTest) -> None:
    """For tests whose shapes stand nowhere else: JAX runs them with ``--thorough``."""
    if backend.name == "jax" and not request.config.getoption("--thorough"):
        pytest.skip("shapes that JAX compiles for seconds; see --thorough")


@pytest.fixture
def requires_adapters() -> None:
    """For tests of what adapters do: skip where they are hidden."""
    if WITHOUT_ADAPTERS:
        pytest.skip("a test of adapters, and KFAC_CORE_TEST_NO_BACKENDS hides all")


@pytest.fixture
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread, where two computations are compared bit by bit.

    On two threads BLAS adds in another order.  OpenBLAS has one number of threads for the
    process, and workers take threads from it for a while: whatever they compute, or what
    is computed beside them, is rounded otherwise then.
    """
    threadpoolctl = pytest.importorskip("threadpoolctl")
    with contextlib.suppress(ImportError):  # Only what is loaded can be held.
        importlib.import_module("scipy.linalg")
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(20150319)


def pytest_report_header(config: pytest.Config) -> Sequence[str]:
    adapters = (
        "hidden: the definitions do everything" if WITHOUT_ADAPTERS else "as found"
    )
    return [f"kfac_core backends: {config.getoption('--backend')}; adapters {adapters}"]


@pytest.fixture
def jax(requires_backend: Any) -> Any:
    """JAX itself, with 64-bit floats."""
    requires_backend("jax", adapter=True)
    import jax

    return jax
