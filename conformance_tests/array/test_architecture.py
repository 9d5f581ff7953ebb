"""The form of the packages: which way imports go, what they name, what they cost."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

import kfac_core

from ..builders.programs import run_python

ROOT = Path(kfac_core.__file__).parent

# The layers of the design, the lowest first.  A module imports from its own layer and
# from those below.
LAYERS = (
    {"errors", "constraints", "array"},
    {"linalg"},
    {"conventions", "damping", "layers", "factors", "losses"},
    {"operators"},
    {"approximations"},
    {"options"},
    {"block"},
    {"stages", "state"},
    {"sharing"},
    {"network"},
    {"serialization", "report", "execution", "distributed"},
    {"estimator"},
    {
        "checkpoint",
        "roots",
        "steps",
        "integration",
        "posterior",
        "influence",
        "samples",
    },
    {"cli", "__init__", "__main__"},
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

ARRAY_LIBRARIES = {
    *("torch", "jax", "jaxlib", "cupy", "cupyx", "scipy", "tensorflow", "keras", "mlx"),
    *("dask", "dpnp", "sparse", "ndonnx", "array_api_strict", "array_api_extra"),
}

# The packages that stand on the core, and the folders beside it.
OUTSIDE = {
    "kfac_core_conformance",
    "kfac_core_shims",
    "conformance_tests",
    "benchmarks",
}

# What each backend may import, besides the standard library.
OWN = {
    "numpy": {"numpy", "scipy", "kfac_core_backends"},
    "lapack": {"numpy", "scipy"},
    "blas_threads": {"threadpoolctl"},
    "reused_memory": {"numpy"},
    "torch": {"numpy", "torch", "array_api_compat", "kfac_core_backends"},
    "torch_distributed": {"numpy", "torch"},
    "mpi": {"numpy", "mpi4py"},
    "torch_onednn": {"torch"},
    "torch_panels": {"torch"},
    "torch_lapack": {"torch", "kfac_core_backends", "threadpoolctl"},
    "jax": {"numpy", "jax"},
    "jax_axes": {"jax"},
    "cupy": {"numpy", "cupy", "cupyx", "array_api_compat"},
}


# Those that move arrays between processes, and not within one.
ENGINES = {"jax_axes", "mpi", "torch_distributed"}


def files_of(folder):
    """Return the Python files below a folder, as (path in the folder, tree)."""
    return {
        str(path.relative_to(folder)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
    }


FILES = files_of(ROOT)


def imports_in(tree):
    """Return the full names of what is imported anywhere in a file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module)
            if node.module == "kfac_core":
                found |= {f"kfac_core.{alias.name}" for alias in node.names}
    return found


def part_of(path):
    """Return the part of the package that a file belongs to."""
    return Path(path).parts[0].removesuffix(".py")


def upward(files):
    """Return the imports that go from a lower layer to a higher one."""
    found = []
    for path, tree in files.items():
        for name in imports_in(tree):
            root, _, rest = name.partition(".")
            target = rest.split(".")[0]
            if root == "kfac_core" and RANK.get(target, -1) > RANK[part_of(path)]:
                found.append(f"{path} imports {name}")
    return found


def test_every_part_stands_in_a_layer():
    """Every module and folder of the package has its place in the order."""
    parts = {part_of(path) for path in FILES}

    assert len(FILES) > 30
    assert parts - set(RANK) == set()


def test_imports_go_one_way():
    """No module imports from a layer above its own."""
    assert upward(FILES) == []


def test_an_upward_import_is_reported():
    """The row that must fail: the search finds an import inside a function."""
    source = (
        "def f():\n    from kfac_core.operators.kronecker import FactoredKronecker\n"
    )

    found = upward({"linalg/gram.py": ast.parse(source)})

    assert found == ["linalg/gram.py imports kfac_core.operators.kronecker"]


@pytest.mark.parametrize("path", FILES)
def test_no_array_library_is_imported(path):
    """The mathematics imports NumPy and array-api-compat, and no other array library."""
    roots = {name.split(".")[0] for name in imports_in(FILES[path])}
    full = imports_in(FILES[path])

    assert roots & ARRAY_LIBRARIES == set()
    assert roots & OUTSIDE == set()
    assert {n for n in full if n.startswith("array_api_compat.")} == set()
    assert roots & {"kfac_core_backends", "benchmarks", "conformance_tests"} == set()


@pytest.mark.parametrize("path", FILES)
def test_no_array_library_is_named(path):
    """No string of the program, outside of docstrings, is the name of a library."""
    strings = {
        node.value
        for node in ast.walk(FILES[path])
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }

    assert strings & ARRAY_LIBRARIES == set()


@pytest.mark.parametrize("name", OWN)
def test_backends_import_their_own_library(requires_adapters, name):
    """A backend imports the protocol, the errors and its own library, and no more."""
    package = importlib.import_module("kfac_core_backends")
    tree = files_of(Path(package.__file__).parent)[f"{name}.py"]

    names = imports_in(tree)

    ours = {n for n in names if n.split(".")[0] == "kfac_core"}
    engine = {"kfac_core.distributed.communicator"} if name in ENGINES else set()
    shared = {f"kfac_core.array.{n}" for n in ("backend", "optional", "types")}
    assert ours <= shared | {"kfac_core.errors"} | engine
    roots = {n.split(".")[0] for n in names - ours}
    assert roots - OWN[name] - set(sys.stdlib_module_names) == set()


@pytest.mark.parametrize("path", FILES)
def test_modules_have_docstrings_and_packages_name_what_exists(path):
    """A public module's ``__all__`` has names that exist, each once."""
    tree = FILES[path]
    assert ast.get_docstring(tree)
    if path == "__main__.py":
        return

    name = ".".join(["kfac_core", *Path(path).with_suffix("").parts])
    module = importlib.import_module(name.removesuffix(".__init__"))

    listed = getattr(module, "__all__", [])
    assert [n for n in listed if not hasattr(module, n)] == []
    assert len(set(listed)) == len(listed)


HEAVY = (
    *("torch", "jax", "cupy", "scipy", "matplotlib", "rich", "sklearn", "safetensors"),
    *("array_api_strict", "pandas", "importlib_metadata", "kfac_core_backends"),
    *("msgspec", "kfac_core_conformance", "kfac_core_shims", "benchmarks"),
)


@pytest.mark.parametrize("names", ["nothing", "everything"])
def test_the_import_is_light(names):
    """``import kfac_core`` imports no array library but NumPy, and no optional one.

    Neither does the use of every public name of it.
    """
    program = "import sys, kfac_core; "
    if names == "everything":
        program += "[getattr(kfac_core, name) for name in kfac_core.__all__]; "

    done = run_python("-c", program + "print(*sorted(sys.modules))", check=True)

    modules = set(done.stdout.split())
    loaded = {name.split(".")[0] for name in modules}
    assert "kfac_core" in loaded
    assert loaded & set(HEAVY) == set()
    # Of the standard library, what would be a large share of the import's time.
    slow = {"importlib.metadata", "email", "asyncio", "multiprocessing", "http"}
    assert modules & slow == set()
    if names == "everything":
        assert {"numpy", "array_api_compat"} <= loaded


def test_every_public_name_is_loaded_and_few_stand_at_the_top():
    """What the stub says, which type checkers read, is what there is."""
    stub = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    said = {
        alias.name
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    assert said == set(kfac_core.__all__)
    assert len(said) <= 76
    for name in said:
        assert getattr(kfac_core, name) is not None
    assert said <= set(dir(kfac_core))
    with pytest.raises(AttributeError, match="nonsense"):
        kfac_core.nonsense  # noqa: B018
