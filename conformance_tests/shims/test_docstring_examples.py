"""The examples in the docstrings of the integrations run and print what stands there."""

import doctest
import importlib
import inspect
import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")

EXAMPLES = {
    "numpy": ["KFAC"],
    "sklearn": ["KFACClassifier", "KFACRegressor"],
    "torch": ["KFAC", "KFACOptimizer", "register_layer"],
    "jax": ["KFAC", "Network", "kfac_optimizer"],
    "keras": ["KFAC"],
}


@pytest.mark.parametrize(
    ("framework", "name"),
    [(f, name) for f, names in EXAMPLES.items() for name in names],
)
def test_an_example_prints_what_it_says(framework, name):
    """With nothing in its namespace but what it imports itself."""
    pytest.importorskip(framework)
    module = importlib.import_module(f"kfac_core_shims.{framework}")
    text = inspect.getdoc(inspect.unwrap(getattr(module, name)))
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    report = []
    result = doctest.DocTestRunner().run(test, out=report.append)

    assert result.attempted > 0
    assert not result.failed, "".join(report)
