"""The examples in the docstrings of the integrations run and print what stands there."""

import importlib
import os

import pytest

from ..builders.doctests import assert_prints

os.environ.setdefault("KERAS_BACKEND", "torch")

EXAMPLES = {
    "numpy": ["KFAC"],
    "sklearn": ["KFACClassifier", "KFACRegressor"],
    "torch": ["KFAC", "KFACOptimizer", "register_layer"],
    "jax": ["KFAC", "Network", "KFACOptimizer"],
    "keras": ["KFAC"],
}


@pytest.mark.parametrize(
    ("framework", "name"),
    [(f, name) for f, names in EXAMPLES.items() for name in names],
)
def test_an_example_prints_what_it_says(framework, name):
    pytest.importorskip(framework)
    module = importlib.import_module(f"kfac_core_shims.{framework}")
    assert_prints(getattr(module, name), name)
