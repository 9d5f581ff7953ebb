"""What stands between the kit and a library: a name, what it can do, and three answers.

An adapter translates, and nothing else: it builds the library's objects from a `Problem`,
asks the library, and gives back what the library said, scaled where the two define
curvature with another constant.  What the library cannot do it leaves out.  A method that
is not there, a capability that is not declared, and a problem for which `NotOfferedError`
is raised are all shown as "not offered", and are no failures.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kfac_core.errors import KFACError
from kfac_core_conformance.layer import BiasPosition, WeightLayout
from kfac_core_conformance.network import Loss
from kfac_core_conformance.problem import (
    Approximation,
    Dtype,
    Estimation,
    Problem,
    Reduction,
    Sharing,
)

__all__ = [
    "Adapter",
    "AdapterError",
    "Capabilities",
    "NotOfferedError",
    "load_adapter",
]


class AdapterError(KFACError, ImportError):
    """An adapter cannot be loaded, or is none."""


class NotOfferedError(KFACError, NotImplementedError):
    """What an adapter raises for a problem that its library does not do."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a library can do, and in which order its dense blocks are.

    Parameters
    ----------
    weight_layout : {"io", "oi"}
        Of every weight that is handed over or given back, and of dense blocks.
    bias_position : {"last", "first", "after"}
        In dense blocks: a last or first row beside the inputs, or behind the weight.
    bias : tuple of bool
        Whether layers may have one.
    layers : tuple of {"dense", "conv"}
        Kinds of layers.
    losses : tuple of {"mse", "ce"}
        See `kfac_core_conformance.network`.
    estimations, approximations, sharing, reductions, dtypes : tuple of str
        As the fields of `kfac_core_conformance.Problem`; `sharing` is empty where weights
        cannot be shared.
    damping_rules : tuple of {"factored", "factored_unit_pi", "exact"}
        As ``docs/conventions.md`` defines them.
    moving_average : bool
        Whether there may be more than one update.
    parts : bool
        Whether a batch may be fed in micro-batches of different sizes.
    """

    weight_layout: WeightLayout
    bias_position: BiasPosition
    bias: tuple[bool, ...] = (True, False)
    layers: tuple[str, ...] = ("dense",)
    losses: tuple[Loss, ...] = ("mse",)
    estimations: tuple[Estimation, ...] = ("ggn",)
    approximations: tuple[Approximation, ...] = ("kronecker",)
    sharing: tuple[Sharing, ...] = ()
    reductions: tuple[Reduction, ...] = ("sum",)
    dtypes: tuple[Dtype, ...] = ("float64",)
    damping_rules: tuple[str, ...] = ()
    moving_average: bool = False
    parts: bool = False

    def lacks(self, problem: Problem, /, *, rule: str | None = None) -> str | None:
        """Return what a problem needs and is not declared; None where nothing is."""
        layers = problem.network.layers
        needs: list[tuple[str, object, Sequence[object]]] = [
            *(("layers", layer.kind, self.layers) for layer in layers),
            *(("bias", layer.bias, self.bias) for layer in layers),
            ("losses", problem.loss, self.losses),
            ("estimations", problem.estimation, self.estimations),
            ("approximations", problem.approximation, self.approximations),
            ("reductions", problem.reduction, self.reductions),
            ("dtypes", problem.dtype, self.dtypes),
        ]
        if problem.shared:
            needs.append(("sharing", problem.sharing, self.sharing))
        if rule is not None:
            needs.append(("damping_rules", rule, self.damping_rules))
        for name, needed, offered in needs:
            if needed not in offered:
                return f"{needed!r} is not among its {name.replace('_', ' ')}"
        if len(problem.updates) > 1 and not self.moving_average:
            return "it has no moving average"
        if problem.parts and not self.parts:
            return "it takes no micro-batches of different sizes"
        return None


class Adapter(Protocol):
    """What a library has to answer; `blocks` alone will do.

    Attributes
    ----------
    name, version : str
        Of the library.
    capabilities : Capabilities
        What it can do.
    """

    name: str
    version: str
    capabilities: Capabilities

    def blocks(self, problem: Problem, /) -> Sequence[Any]:
        """Return each layer's undamped block, (P, P), in the declared order.

        Parameters
        ----------
        problem : Problem
            Whose curvature is meant; never modified.

        Returns
        -------
        sequence of array
            NumPy arrays, or what `numpy.asarray` takes.
        """
        ...

    def multiply(
        self, problem: Problem, vectors: Sequence[Mapping[str, Any]], /
    ) -> Sequence[Mapping[str, Any]]:
        """Return each layer's undamped block times a vector.

        Parameters
        ----------
        problem : Problem
            Whose curvature is meant.
        vectors : sequence of mapping of str to numpy.ndarray
            For each layer ``"weight"`` and, where there is one, ``"bias"``, in the declared
            weight layout.

        Returns
        -------
        sequence of mapping of str to array
            In the same form.
        """
        ...

    def multiply_inverse(
        self,
        problem: Problem,
        vectors: Sequence[Mapping[str, Any]],
        /,
        *,
        damping: float,
        rule: str,
    ) -> Sequence[Mapping[str, Any]]:
        """Return the inverse of each layer's damped block times a vector.

        Parameters
        ----------
        problem, vectors
            As for `multiply`.
        damping : float
            0 for none.
        rule : {"factored", "factored_unit_pi", "exact"}
            One of the declared ones.

        Returns
        -------
        sequence of mapping of str to array
            In the same form.
        """
        ...


def load_adapter(spec: str, /) -> Adapter:
    """Import an adapter.

    Parameters
    ----------
    spec : str
        ``module:object``, or ``path/to/file.py:object``.  A class, or a function without
        arguments, is called.

    Returns
    -------
    Adapter
        What was found.

    Raises
    ------
    AdapterError
        Where it cannot be imported, or has no name, version, capabilities or `blocks`.
    """
    where, colon, name = spec.rpartition(":")
    if not (colon and where and name):
        raise AdapterError(
            f"expected `--adapter` as MODULE:OBJECT or FILE.py:OBJECT, got {spec!r}."
        )
    try:
        found = getattr(_module(where), name)
        if (callable(found) and not hasattr(found, "capabilities")) or isinstance(
            found, type
        ):
            found = found()
    except Exception as error:
        # Whatever the module of somebody else raises, it is the reason.
        reason = f"{type(error).__name__}: {error}"
        raise AdapterError(f"{spec} cannot be loaded: {reason}") from error
    missing = [
        wanted
        for wanted in ("name", "version", "capabilities", "blocks")
        if not hasattr(found, wanted)
    ]
    if missing:
        raise AdapterError(
            f"{spec} is no adapter: it has no {', '.join(missing)}; see "
            "kfac_core_conformance.Adapter."
        )
    if not isinstance(found.capabilities, Capabilities):
        raise AdapterError(
            f"{spec} is no adapter: its `capabilities` is no "
            "kfac_core_conformance.Capabilities, but "
            f"{type(found.capabilities).__name__}."
        )
    adapter: Adapter = found
    return adapter


def _module(where: str) -> Any:
    """Import a module by its name, the current folder included, or from a file."""
    if not where.endswith(".py"):
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        return importlib.import_module(where)
    path = Path(where).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {where}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
