"""Adapters, which connect the kit to a library.

An adapter only translates: it builds the library's objects from a `Problem`, calls the
library, and returns the result, scaled if the library defines curvature with another
constant.  Unsupported features are left out: a missing method, an undeclared capability
and a problem for which the adapter raises `NotOfferedError` are reported as "not offered"
and are no failures.
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


class AdapterError(KFACError, ImportError):
    """An adapter cannot be loaded, or lacks a required member."""


class NotOfferedError(KFACError, NotImplementedError):
    """Raised by an adapter for a problem that its library does not support."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a library supports, and the order of parameters in its dense blocks.

    Parameters
    ----------
    weight_layout : {"io", "oi"}
        Layout of all weights passed in either direction, and of dense blocks.
    bias_position : {"last", "first", "after"}
        In dense blocks: the last or first row of the matrix, or after the whole weight.
    bias : tuple of bool
        Supported values of "the layer has a bias".
    layers : tuple of {"dense", "conv"}
        Supported kinds of layers.
    losses : tuple of {"mse", "ce"}
        Supported losses: half the squared error, and the softmax cross-entropy.
    estimations, approximations, sharing, reductions, dtypes : tuple of str
        Supported values of the fields of `kfac_core_conformance.Problem`.  `sharing` is
        empty if weights cannot be shared.
    damping_rules : tuple of {"factored", "factored_unit_pi", "exact"}
        Supported rules.  With A and G the factors and S the number of shared positions,
        ``exact`` inverts ``S A (x) G + damping I``; the factored rules invert
        ``S (A + pi r I) (x) (G + r/pi I)`` with ``r = sqrt(damping/S)``, and pi is 1 or
        ``sqrt((tr A/dim A) / (tr G/dim G))``.
    moving_average : bool
        Whether a problem may have several updates.
    parts : bool
        Whether a batch may come in micro-batches of different sizes.
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

    def unsupported(
        self, problem: Problem, /, *, rule: str | None = None
    ) -> str | None:
        """Return what a problem needs and is not declared; None if it is supported.

        Parameters
        ----------
        problem : Problem
            The problem.
        rule : str, optional
            The damping rule that it is asked with.
        """
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
            return "it does not support a moving average"
        if problem.parts and not self.parts:
            return "it does not support micro-batches of different sizes"
        return None


class Adapter(Protocol):
    """The interface of an adapter; only `blocks` is required.

    Attributes
    ----------
    name, version : str
        The library's name and version.
    capabilities : Capabilities
        What the library supports.
    """

    name: str
    version: str
    capabilities: Capabilities

    def blocks(self, problem: Problem, /) -> Sequence[Any]:
        """Return each layer's undamped block, (P, P), in the declared order.

        Parameters
        ----------
        problem : Problem
            The curvature to compute; must not be modified.

        Returns
        -------
        sequence of array
            NumPy arrays, or anything that `numpy.asarray` accepts.
        """
        ...

    def multiply(
        self, problem: Problem, vectors: Sequence[Mapping[str, Any]], /
    ) -> Sequence[Mapping[str, Any]]:
        """Return each layer's undamped block times a vector.

        Parameters
        ----------
        problem : Problem
            The curvature to compute.
        vectors : sequence of mapping of str to numpy.ndarray
            For each layer ``"weight"`` and, if it has one, ``"bias"``, in the declared
            weight layout.

        Returns
        -------
        sequence of mapping of str to array
            In the same form as `vectors`.
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
            The damping; 0 means none.
        rule : {"factored", "factored_unit_pi", "exact"}
            One of the declared rules; see `Capabilities`.

        Returns
        -------
        sequence of mapping of str to array
            In the same form as `vectors`.
        """
        ...


def load_adapter(spec: str, /) -> Adapter:
    """Import an adapter.

    Parameters
    ----------
    spec : str
        ``module:object`` or ``path/to/file.py:object``.  A class or a function is called
        without arguments.

    Returns
    -------
    Adapter
        The adapter.

    Raises
    ------
    AdapterError
        If it cannot be imported, or has no name, version, capabilities or `blocks`.
    """
    where, colon, name = spec.rpartition(":")
    if not (colon and where and name):
        raise AdapterError(
            f"expected `--adapter` as MODULE:OBJECT or FILE.py:OBJECT, got {spec!r}."
        )
    try:
        loaded = getattr(_module(where), name)
        if (callable(loaded) and not hasattr(loaded, "capabilities")) or isinstance(
            loaded, type
        ):
            loaded = loaded()
    except Exception as error:
        # The module is foreign: whatever it raises is reported as the reason.
        reason = f"{type(error).__name__}: {error}"
        raise AdapterError(f"{spec} cannot be loaded: {reason}") from error
    missing = [
        wanted
        for wanted in ("name", "version", "capabilities", "blocks")
        if not hasattr(loaded, wanted)
    ]
    if missing:
        raise AdapterError(
            f"{spec} is not an adapter: it has no {', '.join(missing)}; see "
            "kfac_core_conformance.Adapter."
        )
    if not isinstance(loaded.capabilities, Capabilities):
        raise AdapterError(
            f"{spec} is not an adapter: expected `capabilities` to be a "
            "kfac_core_conformance.Capabilities, got "
            f"{type(loaded.capabilities).__name__}."
        )
    adapter: Adapter = loaded
    return adapter


def _module(where: str) -> Any:
    """Import a module by name, also from the current folder, or from a file."""
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
