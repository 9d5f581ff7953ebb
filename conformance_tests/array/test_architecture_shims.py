"""The form of the shims: what they import, and what of the core they use."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

import kfac_core
import kfac_core_shims

ROOT = Path(kfac_core_shims.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
}

# What each shim may import, besides the standard library.
OWN = {
    "__init__": set(),
    # Packages, whose files import each other.
    "torch": {
        *("torch", "numpy", "scipy", "transformers", "lightning"),
        *("kfac_core", "kfac_core_shims"),
    },
    "jax": {"jax", "optax", "kfac_core", "kfac_core_shims"},
    # Keras has no vector-Jacobian product of its own: that is its backend's.
    "keras": {"keras", "jax", "torch", "kfac_core", "kfac_core_shims"},
    "numpy": {"numpy", "kfac_core"},
    "laplace": {"laplace", "torch", "kfac_core", "kfac_core_shims"},
    "curvlinops": {"curvlinops", "torch", "kfac_core", "kfac_core_shims"},
    "_demo": {
        *("numpy", "sklearn", "torch", "jax", "optax", "matplotlib", "threadpoolctl"),
        *("kfac_core", "kfac_core_shims"),
    },
    "sklearn": {"sklearn", "scipy", "numpy", "kfac_core", "kfac_core_shims"},
}


def test_the_shims_are_these():
    """A new shim has to say what it may import."""
    assert {name.split(".")[0] for name in FILES} <= set(OWN)


@pytest.mark.parametrize("name", FILES)
def test_a_shim_uses_public_names_only(name):
    """A shim imports ``kfac_core`` itself and no module of it, and nothing private."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            roots |= {n.split(".")[0] for n in names}
            assert [n for n in names if n.startswith("kfac_core.")] == []
        if isinstance(node, ast.ImportFrom):
            root = node.module.split(".")[0]
            roots.add(root)
            if root == "kfac_core":
                assert node.module == "kfac_core"
                used = {alias.name for alias in node.names}
                assert used <= set(kfac_core.__all__)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert not (node.value.id in ("kc", "kfac_core") and node.attr[0] == "_")

    own = OWN[name.split(".")[0]]
    assert roots - own - set(sys.stdlib_module_names) == set()


def test_the_folder_imports_no_framework():
    """Importing ``kfac_core_shims`` imports none of what its modules need."""
    assert importlib.import_module("kfac_core_shims").__doc__
    tree = ast.parse(FILES["__init__"].read_text(encoding="utf-8"))
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names}
    assert names <= {"importlib.util", "sys"}
