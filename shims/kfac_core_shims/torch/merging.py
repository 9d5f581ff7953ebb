"""`merge` and `scipy_operator`: a model's collected factors as a linear map."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch import parallel, private
from kfac_core_shims.torch.collecting import (
    PARAMETERS,
    Factors,
    digest_of,
    factors_from,
)
from kfac_core_shims.torch.stacks import ParameterStacks


@dataclass(frozen=True)
class Merged:
    """A merged model's parameters.

    Attributes
    ----------
    parameters : dict of str to torch.Tensor
        For ``model.load_state_dict(merged.parameters, strict=False)``.
    residuals : dict of str to float
        Relative residual of the linear system of each block.
    """

    parameters: dict[str, torch.Tensor]
    residuals: dict[str, float]


def merge(
    models: Sequence[Any],
    files: Sequence[str | os.PathLike[str] | Factors],
    *,
    damping_fraction: float = 1e-3,
    tolerance: float = 1e-6,
    max_iterations: int = 500,
) -> Merged:
    r"""Return the mean of models, weighted by the curvature of each.

    .. math:: \Big(\sum_k N_k F_k + \lambda I\Big) \, W = \sum_k
        \Big(N_k F_k + \frac{\lambda}{K} I\Big) W_k

    for each layer; parameters without a block become their plain mean.

    Parameters
    ----------
    models : sequence of torch.nn.Module
        Models of one architecture, trained on different data from one start.
    files : sequence of path-like or Factors
        What `collect` made of each model and its own data.
    damping_fraction, tolerance, max_iterations
        As of `kfac_core.posterior.merged_weight`.

    Returns
    -------
    Merged
        Parameters, and the residuals of the systems.

    Raises
    ------
    kfac_core.UnknownBlockError
        If the models' blocks differ.
    kfac_core.ConventionError
        For other numbers of models and files, for `Factors` of other parameters than those
        of the model at their place, and for a file of another of the models.

    References
    ----------
    Matena and Raffel (2022), arXiv:2111.09832; Tam et al. (2024), arXiv:2312.04339.
    """
    if not len(models) == len(files) > 0:
        raise kc.ConventionError(
            f"Expected one file or `Factors` for each model, got {len(models)} models and "
            f"{len(files)} files."
        )
    factors = [factors_from(*pair) for pair in zip(models, files, strict=True)]
    for number, (one, f) in enumerate(zip(models, factors, strict=True)):
        if not _has_parameters_of(parallel.inner(one), f.model):
            raise kc.ConventionError(
                f"The `Factors` at place {number} are of a model with other parameters "
                "than the model there. Give both lists in one order."
            )
    _require_order(models, [f.collected.origin.get(PARAMETERS) for f in factors])
    for other in factors[1:]:
        kc.constraints.require_names("factors", other.blocks, factors[0].blocks)
    named = [dict(f.model.named_parameters()) for f in factors]
    device = next(factors[0].model.parameters()).device
    with torch.no_grad(), private.without_autocast(device):
        curvatures = [
            kc.posterior.spectral_blocks(f.blocks, f.statistics) for f in factors
        ]
        mean = {
            name: torch.stack([p[name].detach() for p in named]).mean(0)
            for name in named[0]
        }
        targets = {p: mean[name] for name, p in named[0].items()}
        residuals = {}
        for name, block in factors[0].blocks.items():
            merged = kc.posterior.merged_weight(
                [c[name] for c in curvatures],
                [block.parameters_to_matrix(f.sites[name].values()) for f in factors],
                examples=[f.examples for f in factors],
                damping_fraction=damping_fraction,
                tolerance=tolerance,
                max_iterations=max_iterations,
            )
            residuals[name] = merged.residual
            parts = block.matrix_to_parameters(merged.weight)
            factors[0].sites[name].place(parts, targets)
    return Merged(mean, residuals)


def _require_order(models: Sequence[Any], noted: Sequence[str | None]) -> None:
    """Raise for a file that notes the digest of another model than that at its place.

    A digest of none of the models is no error: it changes when a model is cast.
    """
    if not any(noted):
        return
    digests = [digest_of(parallel.inner(model)) for model in models]
    for number, (file, digest) in enumerate(zip(noted, digests, strict=True)):
        before = zip(noted[:number], digests[:number], strict=True)
        repeats = any(one == file and other != digest for one, other in before)
        if file is not None and file != digest and (file in digests or repeats):
            raise kc.ConventionError(
                f"The file at place {number} was collected from another of the models than "
                "that there. Give both lists in one order, and each file once."
            )


def _has_parameters_of(model: Any, other: Any) -> bool:
    if model is other:
        return True
    named, others = (dict(m.named_parameters()) for m in (model, other))
    return named.keys() == others.keys() and all(
        p.shape == others[name].shape and bool((p == others[name].to(p.device)).all())
        for name, p in named.items()
    )


class FactorProducts:
    """Products with the damped curvature of a whole model, or its inverse.

    Parameters
    ----------
    factors : Factors
        From `collect` or `read_factors`.
    damping : float
        lambda, of all blocks.
    inverse : bool
        Whether products are with the inverse of ``F + lambda I``.

    Attributes
    ----------
    parameters : list of torch.nn.Parameter
        Parameters of the blocks, in the model's order.
    """

    def __init__(self, factors: Factors, *, damping: float, inverse: bool) -> None:
        kc.constraints.require_flag("inverse", inverse)
        kc.constraints.require_range("damping", damping, kc.constraints.DAMPING)
        self._stacks = ParameterStacks(
            factors.sites, order=[*factors.model.parameters()]
        )
        self._damping, self._power = damping, -1 if inverse else 1
        self.parameters = self._stacks.parameters
        with private.without_autocast(self.parameters[0].device):
            self._spectra = kc.posterior.spectral_blocks(
                factors.blocks, factors.statistics
            )

    def __call__(self, vectors: Sequence[Any], /) -> list[Any]:
        """Multiply Q vectors, each a list of tensors (Q, *shape) by parameter."""
        products = {}
        with private.without_autocast(self.parameters[0].device):
            for name, V in self._stacks.matrices(vectors).items():
                F: Any = self._spectra[name]
                weights = (F.spectrum + self._damping) ** self._power
                products[name] = F.from_basis(F.to_basis(V) * weights).to(V.dtype)
        return self._stacks.stacks(products)


def scipy_operator(
    factors: Factors, *, damping: float = 0.0, inverse: bool = False
) -> Any:
    """Return the curvature of a model, or its inverse, as SciPy's `LinearOperator`.

    Parameters
    ----------
    factors : Factors
        From `collect`, or from its file by `read_factors`.
    damping : float
        lambda in ``F + lambda I``.
    inverse : bool
        Whether it is the inverse.

    Returns
    -------
    scipy.sparse.linalg.LinearOperator
        Of the parameters of the blocks, flat and in the model's order
        (``torch.nn.utils.parameters_to_vector`` of a model that is covered as a whole).

    Examples
    --------
    >>> import torch
    >>> from kfac_core_shims.torch import collect, scipy_operator
    >>> model = torch.nn.Linear(4, 3)
    >>> factors = collect(model, [torch.randn(10, 4)])
    >>> scipy_operator(factors, damping=1e-2, inverse=True).shape
    (15, 15)
    """
    from scipy.sparse.linalg import LinearOperator

    products = FactorProducts(factors, damping=damping, inverse=inverse)
    shapes = [p.shape for p in products.parameters]
    like = products.parameters[0]
    sizes = [shape.numel() for shape in shapes]
    # NumPy has no bfloat16, and factors of half precision are in float32.
    dtype = torch.promote_types(like.dtype, torch.float32)

    def matmat(X: Any) -> Any:
        columns = torch.as_tensor(X).T.to(like.device, dtype)
        parts = columns.split(sizes, dim=1)
        vectors = [x.reshape(len(x), *s) for x, s in zip(parts, shapes, strict=True)]
        flat = [x.flatten(1) for x in products(vectors)]
        return torch.cat(flat, dim=1).T.to(dtype).cpu().numpy()

    total = sum(sizes)
    return LinearOperator(
        (total, total),
        matvec=lambda x: matmat(x.reshape(-1, 1))[:, 0],
        rmatvec=lambda x: matmat(x.reshape(-1, 1))[:, 0],
        matmat=matmat,
        rmatmat=matmat,
        dtype=str(dtype).removeprefix("torch."),
    )
