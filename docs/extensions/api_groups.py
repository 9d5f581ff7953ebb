"""Which public names the API pages show, and in which groups.

A group lists names by the package that exports them, or, for names at the top of
`kfac_core`, by the module that defines them.  So a new name has a page without an entry
here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

# Frameworks that integrations import, which need not be installed here.
FRAMEWORKS = [
    "flax",
    "jax",
    "keras",
    "lightning",
    "optax",
    "sklearn",
    "torch",
    "transformers",
]


@dataclass(frozen=True)
class Group:
    """A page that lists names.

    Parameters
    ----------
    slug, title, intro : str
        File, heading and first sentences (reStructuredText).
    packages : tuple of str
        Packages whose names are listed.
    defined_in : tuple of str
        Modules below `kfac_core`: names of `kfac_core` itself that they define.
    """

    slug: str
    title: str
    intro: str
    packages: tuple[str, ...] = ()
    defined_in: tuple[str, ...] = ()


GROUPS = (
    Group(
        "estimators",
        "Estimators and networks",
        "Describe a network's blocks, update statistics, refresh operators and "
        "precondition gradients.",
        ("kfac_core.report",),
        (
            "estimator",
            "network",
            "state",
            "stages",
            "block",
            "stages",
            "state",
            "options",
            "conventions",
            "factors.statistics",
        ),
    ),
    Group(
        "integrations",
        "Integrations of frameworks",
        "One module for each framework, and what they share: :doc:`/writing_a_shim`.",
        (
            "kfac_core_shims.torch",
            "kfac_core_shims.torch.trainers",
            "kfac_core_shims.jax",
            "kfac_core_shims.keras",
            "kfac_core_shims.numpy",
            "kfac_core_shims.sklearn",
            "kfac_core.integration",
            "kfac_core.constraints",
        ),
    ),
    Group(
        "layers",
        "Layers",
        "Shapes and layouts of parameters, and the rows that a layer hands to an "
        "approximation.",
        ("kfac_core.layers",),
        ("layers",),
    ),
    Group(
        "approximations",
        "Approximations",
        "Statistics of a block and the operator made from them: :doc:`/approximations`.",
        ("kfac_core.approximations",),
        ("approximations",),
    ),
    Group(
        "damping",
        "Damping",
        "Damping rules and their adaptation: :doc:`/damping`.",
        ("kfac_core.damping",),
        ("damping",),
    ),
    Group(
        "losses",
        "Losses and estimation modes",
        "Likelihoods, estimation modes, and the vectors to backpropagate.",
        ("kfac_core.losses",),
    ),
    Group(
        "steps",
        "The step",
        "The step of an optimizer, as pure functions: :doc:`/steps`.",
        ("kfac_core.steps",),
    ),
    Group(
        "execution",
        "Execution",
        "Executors run the loop over blocks: :doc:`/schedules`.",
        ("kfac_core.execution",),
    ),
    Group(
        "distributed",
        "Several processes",
        "Every process makes the same estimator with ``Distributed``, and gives it its own "
        "part of each batch: :doc:`/distributed`.",
        ("kfac_core.distributed",),
    ),
    Group(
        "operators",
        "Curvature operators",
        "Immutable snapshots of the curvature, which multiply, invert and take powers.",
        ("kfac_core.operators",),
        ("operators",),
    ),
    Group(
        "samples",
        "The space of samples",
        "The exact Gauss-Newton matrix of a whole network, by rows: :doc:`/samples`.",
        ("kfac_core.samples",),
    ),
    Group(
        "posteriors",
        "Posteriors",
        "Laplace posteriors: :doc:`/posteriors`.",
        ("kfac_core.posterior",),
        ("posterior",),
    ),
    Group(
        "influence",
        "Influence",
        "Influence functions: :doc:`/influence`.",
        ("kfac_core.influence",),
        ("influence",),
    ),
    Group(
        "roots",
        "Roots and bases",
        "Inverse roots and warm-started bases: :doc:`/roots`.",
        ("kfac_core.roots",),
    ),
    Group(
        "files",
        "Files",
        "Estimators in files: :doc:`/files`.",
        (),
        ("checkpoint",),
    ),
    Group(
        "arrays",
        "Arrays and backends",
        "Namespaces, backends, precision and structures of arrays: :doc:`/backends`.",
        ("kfac_core.array",),
        ("array",),
    ),
    Group(
        "matrices",
        "Factors and matrices",
        "Running averages of statistics, symmetric matrices and Kronecker products, for "
        "authors of approximations: :doc:`/new_approximation`.",
        ("kfac_core.factors", "kfac_core.linalg"),
        ("factors.damped", "linalg"),
    ),
    Group(
        "errors",
        "Errors",
        "Every exception that the library raises: :doc:`/errors`.",
        (),
        ("errors",),
    ),
    Group(
        "conformance",
        "Conformance kit",
        "Check another library against identities and records: :doc:`/conformance`.",
        ("kfac_core_conformance", "kfac_core_conformance.records"),
    ),
)

# Under which other words people look for a name.
ALSO_CALLED = {
    "kfac_core.Kronecker": "K-FAC",
    "kfac_core.TNT": "tensor-normal",
    "kfac_core.Posterior": "Laplace",
}

# Aliases of types have no docstring of their own.
DATA = {
    "kfac_core.losses.EstimationMode": "Names of modes: ``{choices}``.",
    "kfac_core.losses.Positions": (
        "What exact sources do with rows that share an example: ``{choices}``."
    ),
    "kfac_core.losses.CurvatureMatrix": "What a mode estimates: ``{choices}``.",
    "kfac_core.losses.NoiseDistribution": "Distribution of noise: ``{choices}``.",
    "kfac_core.damping.DampingRule": "How a block's damping is applied: ``{choices}``.",
    "kfac_core.factors.FactorKind": "Kinds of factors: ``{choices}``.",
    "kfac_core.linalg.Factorization": "What can be prepared: ``{choices}``.",
    "kfac_core.linalg.Solving": "How a damped matrix is divided by: ``{choices}``.",
    "kfac_core.integration.Schedule": "A number, or a function of the step.",
    "kfac_core.integration.Interval": "A number of steps, or a function of the step.",
    "kfac_core.array.Array": "An array of any library that follows the Array API.",
    "kfac_core.array.Namespace": "The namespace of such a library, called ``xp``.",
    "kfac_core.array.DType": "A dtype of such a library.",
    "kfac_core.array.Scalar": "A Python number, or a 0-d array.",
    "kfac_core.array.Check": "Whether failures raise or set a status: ``{choices}``.",
    "kfac_core.execution.plain": "The executor that computes the blocks in turn.",
    "kfac_core_conformance.records.CheckDtype": "Precision of a check: ``{choices}``.",
}


@dataclass(frozen=True)
class Name:
    """A public name.

    Parameters
    ----------
    path : str
        Where it is imported from, such as ``kfac_core.Kronecker``.
    value : object
        What it is.
    guides : list of str
        Pages that mention it.
    """

    path: str
    value: Any
    guides: list[str] = field(default_factory=list)

    @property
    def short(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The first line of its documentation."""
        if self.path in DATA:
            return data_text(self)
        lines = (inspect.getdoc(self.value) or "").splitlines()
        return lines[0] if lines else ""


def core_packages() -> list[str]:
    """Return the packages that are listed, without those that need a framework."""
    packages = [package for group in GROUPS for package in group.packages]
    found = [name for name in packages if not name.startswith("kfac_core_shims.")]
    return ["kfac_core", *found]


def names_of(group: Group) -> list[Name]:
    """Return the names of a group, in order: those of `kfac_core` itself first."""
    top = importlib.import_module("kfac_core")
    found = []
    for name in top.__all__:
        value = getattr(top, name)
        module = getattr(value, "__module__", "").removeprefix("kfac_core.")
        if any(
            module == part or module.startswith(part + ".") for part in group.defined_in
        ):
            found.append(Name(f"kfac_core.{name}", value))
    for package in group.packages:
        found += _names_of_package(package, set(top.__all__))
    return found


def _names_of_package(package: str, at_the_top: set[str]) -> Iterator[Name]:
    module = _imported(package)
    own = package.startswith("kfac_core.")
    for name in module.__all__:
        # A class is shown once: under its shortest path.
        if not (own and name in at_the_top):
            yield Name(f"{package}.{name}", getattr(module, name))


def _imported(package: str) -> ModuleType:
    if not package.startswith("kfac_core_shims."):
        return importlib.import_module(package)
    from sphinx.ext.autodoc.mock import _MockObject, mock

    # Integrations write into tables of their frameworks when they are imported.
    stand_in: Any = _MockObject
    stand_in.__setitem__ = lambda table, key, value: None
    # The annotations of validated options are evaluated, such as `float | Optimizer`.
    stand_in.__or__ = stand_in.__ror__ = lambda one, other: Any
    with mock(FRAMEWORKS):
        module = importlib.import_module(package)
        # Names that a package imports when they are first read.
        for name in module.__all__:
            getattr(module, name)
        return module


def data_text(name: Name) -> str:
    """Return the documentation of an alias of a type."""
    choices = getattr(name.value, "__args__", ())
    text = "``, ``".join(f'"{choice}"' for choice in choices)
    return DATA[name.path].format(choices=text)
