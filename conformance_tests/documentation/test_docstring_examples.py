"""The examples in docstrings run and print what stands there."""

import doctest
import importlib
import inspect
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(
    not DOCS.is_dir(), reason="the documentation is not here"
)

# What a reader of the quick starts and the concepts meets.
SHOWN = [
    "Averaging",
    "Batch",
    "Block",
    "BlockTridiagonal",
    "Chain",
    "Conv",
    "Conventions",
    "CurvatureOperator",
    "DampingError",
    "Dense",
    "Diagonal",
    "Eigen",
    "Embedding",
    "Estimator",
    "Execution",
    "FactorizationError",
    "Full",
    "GradientBatch",
    "KFOC",
    "Kronecker",
    "Network",
    "NetworkState",
    "NotFiniteError",
    "NotReadyError",
    "Parameters",
    "Posterior",
    "Precision",
    "Refreshing",
    "ScaleShift",
    "ScaledIdentity",
    "Series",
    "Sharing",
    "Statistics",
    "Status",
    "TNT",
    "array.map_structure",
    "array.replaced",
    "asarray",
    "damping.factored_shifts",
    "enable_float64",
    "factors.Average",
    "layers.choose_patches",
    "layers.steps_of",
    "layers.unfold_time",
    "levenberg_marquardt",
    "linalg.kronecker_multiply",
    "linalg.damped_matrix",
    "load_checkpoint",
    "losses.Bernoulli",
    "losses.Categorical",
    "losses.Gaussian",
    "losses.drawn_vectors",
    "losses.noise_spec",
    "losses.source_reduction_of",
    "losses.vectors",
    "operators.FactoredKronecker",
    "operators.SpectralOperator",
    "posterior.Evidence",
    "posterior.functional_variance",
    "roots.refreshed_basis",
    "save_checkpoint",
    "steps.curvature_of_outputs",
    "steps.inner_product",
    "steps.kl_clip",
    "steps.linear_combination",
    "structure",
    "to_numpy",
    "use_backend",
]


def documented():
    """Every public object of the packages with pages, by its path."""
    sys.path.insert(0, str(DOCS / "extensions"))
    packages = importlib.import_module("api_groups").core_packages()
    sys.path.remove(str(DOCS / "extensions"))
    del sys.modules["api_groups"]
    found = {}
    for package in packages:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = inspect.unwrap(getattr(module, name))
            if "\n>>> " in (inspect.getdoc(value) or ""):
                found.setdefault(value, f"{package}.{name}")
    return {path: value for value, path in found.items()}


OBJECTS = documented() if DOCS.is_dir() else {}


@pytest.mark.parametrize("path", OBJECTS)
def test_an_example_prints_what_it_says(path):
    """With nothing in its namespace but what it imports itself."""
    text = inspect.getdoc(OBJECTS[path])
    test = doctest.DocTestParser().get_doctest(text, {}, path, None, None)
    report = []
    result = doctest.DocTestRunner().run(test, out=report.append)

    assert result.attempted > 0
    assert not result.failed, "".join(report)


@pytest.mark.parametrize("name", SHOWN)
def test_a_name_of_the_first_pages_has_an_example(name):
    """A reader who looks it up sees it used."""
    assert f"kfac_core.{name}" in OBJECTS
