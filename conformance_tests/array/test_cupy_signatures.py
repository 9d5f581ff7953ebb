"""Every call of CuPy that the CuPy backend makes fits CuPy's own signatures.

The calls are read from the backend's source, so that a new one cannot be forgotten, and
bound to the signatures of the installed CuPy, which needs no GPU.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc

from ..builders import fake_cupy

ROOTS = ("cupy", "cupyx")

# Functions in C that show no signature: how many positional arguments each takes, as
# CuPy's reference says.
WITHOUT_SIGNATURE = {
    "cupy.cuda.Device": (0, 1),
    "cupy.cuda.runtime.getDeviceCount": (0, 0),
}


def adapter_source() -> str:
    """Return the text of the CuPy backend, without importing it; empty if hidden."""
    try:
        package = importlib.util.find_spec("kfac_core_backends")
    except ModuleNotFoundError:  # KFAC_CORE_TEST_NO_BACKENDS
        return ""
    folder = package.submodule_search_locations[0]
    return (Path(folder) / "cupy.py").read_text(encoding="utf-8")


def calls_in(source: str) -> list[tuple[str, ast.Call]]:
    """Return every call of a function of CuPy, with its full name."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ROOTS:
                    names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ROOTS:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            parts = ast.unparse(node.func).split(".")
            if parts[0] in names:
                found.append((".".join([names[parts[0]], *parts[1:]]), node))
    return found


def signature_of(name: str) -> inspect.Signature | None:
    """Return the signature of a function by its full name; None where it shows none."""
    module_name, _, function = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        outer, _, cls = module_name.rpartition(".")
        module = getattr(importlib.import_module(outer), cls)
    except ImportError:
        # `cupyx.scipy.linalg` wants cuBLAS, which comes with a GPU's driver.
        return signature_in_source(module_name, function)
    try:
        return inspect.signature(getattr(module, function))
    except ValueError:
        return None


def signature_in_source(package: str, function: str) -> inspect.Signature:
    """Return the signature of a function from the source files of its package."""
    root, *folders = package.split(".")
    spec = importlib.util.find_spec(root)
    folder = Path(spec.submodule_search_locations[0]).joinpath(*folders)
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                bare = f"def {function}({ast.unparse(node.args)}): pass"
                scope: dict[str, object] = {}
                exec(bare, scope)
                return inspect.signature(scope[function])
    raise LookupError(f"{package} has no function {function} in its source")


def bind(name: str, arguments: list, keywords: dict) -> None:
    """Bind a call to the real function, or raise ``TypeError``."""
    signature = signature_of(name)
    if signature is not None:
        signature.bind(*arguments, **keywords)
        return
    if name not in WITHOUT_SIGNATURE:
        raise LookupError(f"{name} shows no signature; say what it takes in this file")
    least, most = WITHOUT_SIGNATURE[name]
    if keywords or not least <= len(arguments) <= most:
        raise TypeError(f"{name} takes {least} to {most} positional arguments")


@pytest.fixture
def real_cupy(requires_adapters):
    """CuPy itself, whether it finds a GPU or not."""
    return pytest.importorskip("cupy", reason="the real CuPy is not installed")


@pytest.mark.parametrize(
    ("name", "call"),
    [pytest.param(*c, id=f"{c[0]}:{c[1].lineno}") for c in calls_in(adapter_source())],
)
def test_calls_fit_the_signatures(real_cupy, name, call):
    """The arguments of the call can be bound to the function's parameters."""
    assert not any(isinstance(x, ast.Starred) for x in call.args), "cannot be checked"
    assert all(keyword.arg for keyword in call.keywords), "cannot be checked"
    arguments = [ast.unparse(x) for x in call.args]
    keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}

    bind(name, arguments, keywords)


def test_cupy_has_every_function_of_the_generic_path(real_cupy):
    """Every function that a whole step calls by name is one that CuPy has."""
    ones = np.ones
    layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    with fake_cupy.installed() as stand_in:
        x, g, V = map(stand_in.array, (ones((5, 3)), ones((5, 2)), ones((4, 2))))
        for rule in ("factored", "exact"):
            block = kc.Block(layer, kc.Kronecker())
            kept = kc.Estimator(
                {"fc": block},
                decay=0.9,
                damping=0.1,
                damping_rule=rule,
                reduction="sum",
            )
            kept.update({"fc": kc.Batch(x, g)})
            kept.refresh()
            kept.precondition({"fc": {"weight": V[:-1], "bias": V[-1]}})
        called = set(fake_cupy.CALLS)

    missing = [name for name in sorted(called) if not exists(name)]

    assert len(called) > 10
    assert missing == []


def exists(name: str) -> bool:
    """Whether CuPy has something of that full name."""
    module_name, _, function = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module_name), function)
    except ImportError:
        return bool(signature_in_source(module_name, function))
