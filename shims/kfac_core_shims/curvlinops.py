"""curvlinops' KFACLinearOperator and its inverse, computed by kfac_core.

The two classes take the place of curvlinops' own: the same arguments, attributes and
products.  They keep its way with models, parameters and tensor lists; the statistics come
from ``KFAC.update``, and every product, inverse, norm and determinant is an operator's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import curvlinops
import torch
from curvlinops._torch_base import PyTorchLinearOperator
from curvlinops.kfac import FisherType
from torch import nn

import kfac_core as kc
from kfac_core_shims.torch.layer_factors import with_layer_factors
from kfac_core_shims.torch.merging import FactorProducts

MODES: dict[Any, Any] = {
    FisherType.TYPE2: "exact",
    FisherType.MC: "gradients",
    FisherType.EMPIRICAL: "empirical",
}


class FactorsLinearOperator(PyTorchLinearOperator):
    """Collected factors of a model, or the inverse of their damped curvature.

    Parameters
    ----------
    factors : kfac_core_shims.torch.Factors
        From `collect`, or from its file by `read_factors`.
    damping : float
        lambda in ``F + lambda I``.
    inverse : bool
        Whether it is the inverse.
    """

    SELF_ADJOINT = True

    def __init__(
        self, factors: Any, *, damping: float = 0.0, inverse: bool = False
    ) -> None:
        self._products = FactorProducts(factors, damping=damping, inverse=inverse)
        shapes = [tuple(p.shape) for p in self._products.parameters]
        super().__init__(shapes, shapes)

    @property
    def device(self) -> Any:
        """Device of the parameters."""
        return self._products.parameters[0].device

    @property
    def dtype(self) -> Any:
        """Dtype of the parameters."""
        return self._products.parameters[0].dtype

    def _matmat(self, X: list[torch.Tensor]) -> list[torch.Tensor]:
        products = self._products([x.movedim(-1, 0) for x in X])
        return [x.movedim(0, -1) for x in products]


class KFACLinearOperator(curvlinops.KFACLinearOperator):
    """The Kronecker-factored Fisher or Gauss-Newton matrix of a data set."""

    def compute_kronecker_factors(self) -> None:
        """Run the model over the data once, and keep both factors of each layer."""
        self._reset_matrix_properties()
        mode = MODES.get(self._fisher_type, "empirical")
        rows = outputs = 0

        def passes() -> Iterator[Any]:
            nonlocal rows, outputs
            for x, y in self._loop_over_data(desc="KFAC matrices"):
                z = self._model_func(x)
                if isinstance(self._loss_func, nn.CrossEntropyLoss):
                    z = z.movedim(1, -1)  # classes last, as the likelihood reads them
                rows, outputs = rows + z[..., 0].numel(), z.shape[-1]
                yield z, self._loss(z, y) if mode == "empirical" else None

        kfac = with_layer_factors(
            self._model_func,
            passes(),
            likelihood=self._loss_func,
            fisher=mode,
            samples=self._mc_samples,
            positions="together",
            sharing=str(getattr(self._kfac_approx, "value", self._kfac_approx)),
        )
        # Curvature is in units of the likelihood; losses may be multiples of it.
        multiple = kfac.criterion.row.multiple(outputs)
        if mode == "empirical":
            # The factor of the loss is squared, and what its mean divides by is not.
            multiple *= kfac.criterion.row.factor
        for name, positions in self._mapping.items():
            A, G, scale = kfac.factors(name)
            if not self._is_joint(positions):
                inputs = self._model_func.get_submodule(name).weight[0].numel()
                # KFAC's last row is that of the bias, of which curvlinops makes a block
                # of its own.
                A = A[:inputs, :inputs]
            scale = multiple * scale
            if self._loss_func.reduction == "sum":
                scale = rows * scale
            if self._fisher_type == FisherType.FORWARD_ONLY:
                G, scale = torch.eye(len(G), dtype=G.dtype, device=G.device), 1.0
            if "weight" in positions:
                self._input_covariances[name] = A.clone()
            self._gradient_covariances[name] = scale * G

    def _loss(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of outputs with the last axis that of the likelihood."""
        z = z.flatten(0, -2)
        classes = isinstance(self._loss_func, nn.CrossEntropyLoss)
        loss: torch.Tensor = self._loss_func(
            z, y.flatten() if classes else y.view_as(z)
        )
        return loss

    def blocks(
        self, make: Any = kc.operators.kronecker_operator, **options: Any
    ) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """Yield the operator of each block, and the places of its parameters."""
        if not (self._input_covariances or self._gradient_covariances):
            self.compute_kronecker_factors()
        options = {"damping": 0.0, "rule": "exact", "factorizations": ()} | options
        for name, positions in self._mapping.items():
            A, B = self._input_covariances.get(name), self._gradient_covariances[name]
            if self._is_joint(positions):
                yield make(A, B, **options), (positions["weight"], positions["bias"])
                continue
            for role, place in positions.items():
                yield make(A if role == "weight" else None, B, **options), (place,)

    def _is_joint(self, positions: dict[str, int]) -> bool:
        both = "weight" in positions and "bias" in positions
        return both and not self._separate_weight_and_bias

    def _matmat(self, M: list[torch.Tensor]) -> list[torch.Tensor]:
        return _products(self.blocks(), M, lambda F, V: F.multiply(V, damped=False))

    @property
    def trace(self) -> torch.Tensor:
        """Trace of the matrix."""
        return self._cached(
            "_trace", sum(F.trace(damped=False) for F, _ in self.blocks())
        )

    @property
    def logdet(self) -> torch.Tensor:
        """Logarithm of the determinant; minus infinity of a singular matrix."""
        logdets = [F.logdet(damped=False) for F, _ in self.blocks()]
        return self._cached("_logdet", sum(logdets))

    @property
    def det(self) -> torch.Tensor:
        """Determinant of the matrix."""
        dets = [F.det(damped=False) for F, _ in self.blocks()]
        return self._cached("_det", torch.stack(dets).prod())

    @property
    def frobenius_norm(self) -> torch.Tensor:
        """Frobenius norm of the matrix."""
        norms = [F.frobenius_norm(damped=False) for F, _ in self.blocks()]
        return self._cached("_frobenius_norm", torch.stack(norms).norm())

    def _cached(self, name: str, value: Any) -> torch.Tensor:
        if getattr(self, name) is None:
            setattr(self, name, value)
        cached: torch.Tensor = getattr(self, name)
        return cached


class KFACInverseLinearOperator(curvlinops.KFACInverseLinearOperator):
    """The inverse of a damped `KFACLinearOperator`, by every rule of curvlinops."""

    def _matmat(self, X: list[torch.Tensor]) -> list[torch.Tensor]:
        blocks = list(self._inverse_gradient_covariances.values()) or list(
            self._blocks()
        )
        if self._cache:
            operators = dict(enumerate(blocks))
            self._inverse_input_covariances: Any = operators
            self._inverse_gradient_covariances: Any = operators
        return _products(blocks, X, lambda F, V: F.multiply_inverse(V))

    def _blocks(self) -> Any:
        options = {"damping": self._damping, "factorizations": ("inverse",)}
        if self._use_heuristic_damping:
            make = _Heuristic(self._min_damping)
            return self._A.blocks(make, **options | {"rule": "factored"})
        if self._use_exact_damping:
            return self._A.blocks(**options)
        return self._A.blocks(self._damped_apart, factorizations=("inverse",))

    def _damped_apart(self, A: Any, B: torch.Tensor, **options: Any) -> Any:
        """Return the operator of two factors that each have a damping of their own."""
        both = self._damping
        a, b = both if isinstance(both, tuple) else (both, both)
        if A is not None:
            A = A + a * torch.eye(len(A), dtype=A.dtype, device=A.device)
        B = B + b * torch.eye(len(B), dtype=B.dtype, device=B.device)
        return kc.operators.kronecker_operator(A, B, **options | {"rule": "factored"})


class _Heuristic:
    """Makes operators of one layer after the other; curvlinops has one inverse of B."""

    def __init__(self, least_shift: float) -> None:
        self.least_shift, self.last = least_shift, (None, None)

    def __call__(self, A: Any, B: torch.Tensor, **options: Any) -> Any:
        if A is None and self.last[0] is B:
            # A bias's own block would be damped by the whole damping.
            options["damping"] = self.last[1]
        operator: Any = kc.operators.kronecker_operator(
            A, B, least_shift=self.least_shift, **options
        )
        self.last = B, operator.output.shift
        return operator


def _products(blocks: Any, X: list[torch.Tensor], product: Any) -> list[torch.Tensor]:
    """Multiply K vectors, as lists of ``(*parameter, K)``, block by block."""
    results: list[Any] = [None] * len(X)
    for F, places in blocks:
        # (out, in, K) and (out, 1, K), to K vectors (in + 1, out)
        parts = [X[i].reshape(X[i].shape[0], -1, X[i].shape[-1]) for i in places]
        V = torch.cat(parts, dim=1).permute(2, 1, 0)
        stacked = product(F, V).permute(2, 1, 0)
        for i, part in zip(
            places, stacked.split([p.shape[1] for p in parts], dim=1), strict=True
        ):
            results[i] = part.reshape(X[i].shape)
    return results
