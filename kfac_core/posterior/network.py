"""The posterior of a whole network: independent blocks, and parameters by name.

Conventions.  As `kfac_core.posterior.block` for each block; blocks are independent, so
that log-determinants and covariances of outputs add up.  The parameters of a network are
a mapping of blocks to mappings of names to arrays, as an estimator takes and gives them.
Parameters that no block holds are fixed: their posterior has no width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add, or_
from typing import Any, TypeAlias

from kfac_core import constraints
from kfac_core.array import Array, Check, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.block import Block
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import AnyRows, Layer
from kfac_core.layers.parameter_stacks import matrices_to_stack, stack_to_matrices
from kfac_core.layers.rows import Batch
from kfac_core.layers.whole_rows import whole_rows
from kfac_core.posterior.block import BlockPosterior, block_posterior
from kfac_core.posterior.evidence import Evidence
from kfac_core.posterior.functional import (
    covariance_of_rows,
    functional_covariance,
    functional_variance,
    variance_of_rows,
)
from kfac_core.posterior.spectra import spectral_blocks

Parameters: TypeAlias = Mapping[str, Mapping[str, Array]]
"""A network's parameters: blocks to names to arrays."""

Jacobians: TypeAlias = Mapping[str, Mapping[str, Array] | Batch | Sequence[Batch]]
"""For each block: parameter-shaped derivatives with the axes (examples, outputs) in
front, or a `Batch` of the layer's inputs and of the derivatives of the outputs with
respect to the layer's output, one source for each output."""


@dataclass(frozen=True)
class Posterior:
    r"""The posterior of a network; made by `Posterior.of_statistics` or by hand.

    Each block is normal about the mode, with the precision

    .. math:: P = N F + \tau I.

    Parameters
    ----------
    blocks : mapping of str to Block
        Blocks whose layers are used.
    posteriors : mapping of str to BlockPosterior
        Posteriors with the same names.

    Raises
    ------
    UnknownBlockError
        If the names differ.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> layer = kc.Dense(in_features=3, out_features=1, bias=False, weight_layout="io")
    >>> estimator = kc.Estimator({"fc": kc.Block(layer, kc.Kronecker())}, reduction="sum")
    >>> estimator.update({"fc": kc.Batch(rng.normal(size=(50, 3)), np.ones((50, 1)))})
    >>> statistics = {"fc": estimator.state["fc"].statistics}
    >>> posterior = kc.Posterior.of_statistics(
    ...     estimator.blocks, statistics, examples=50, prior_precision=1.0
    ... )
    >>> mode = {"fc": {"weight": np.zeros((3, 1))}}
    >>> sample = posterior.sample(mode, {"fc": {"weight": rng.normal(size=(3, 1))}})
    >>> sample["fc"]["weight"].shape
    (3, 1)
    """

    blocks: Mapping[str, Block]
    posteriors: Mapping[str, BlockPosterior]

    def __post_init__(self) -> None:
        constraints.require_names("posteriors", self.posteriors, self.blocks)

    @classmethod
    def of_statistics(
        cls,
        blocks: Mapping[str, Block],
        statistics: Mapping[str, Statistics],
        /,
        *,
        examples: Scalar,
        prior_precision: Scalar | Mapping[str, Scalar],
        check: Check = "raise",
    ) -> Posterior:
        """Decompose the curvature of each block and add the prior.

        Parameters
        ----------
        blocks, statistics, check
            See `kfac_core.posterior.spectral_blocks`.
        examples : float or 0-d array
            N; see `block_posterior`.
        prior_precision : float, 0-d array, or mapping of str to these
            tau, of all blocks or of each.

        Returns
        -------
        Posterior
            Its prior and N can be changed without a new decomposition.

        Raises
        ------
        KFACError
            As `spectral_blocks` and `block_posterior`.
        """
        spectra = spectral_blocks(blocks, statistics, check=check)
        taus = _by_block(prior_precision, spectra)
        posteriors = {
            name: block_posterior(
                F, examples=examples, prior_precision=taus[name], check=check, name=name
            )
            for name, F in spectra.items()
        }
        return cls(dict(blocks), posteriors)

    def with_prior(
        self, prior_precision: Scalar | Mapping[str, Scalar], /
    ) -> Posterior:
        """Return the posterior for other prior precisions, without decompositions."""
        taus = _by_block(prior_precision, self.posteriors)
        return Posterior(
            self.blocks,
            {name: p.with_prior(taus[name]) for name, p in self.posteriors.items()},
        )

    def with_examples(self, examples: Scalar, /) -> Posterior:
        """Return the posterior for another N, without decompositions."""
        return Posterior(
            self.blocks,
            {name: p.with_examples(examples) for name, p in self.posteriors.items()},
        )

    def logdet(self) -> Array:
        """Return ``log det P``, 0-d."""
        return reduce(add, (p.logdet() for p in self.posteriors.values()))

    def evidence(
        self,
        log_likelihood: Scalar,
        parameters: Parameters,
        /,
        *,
        prior_mean: Parameters | float,
    ) -> Evidence:
        """Return the terms of the log-marginal likelihood; see `Evidence`.

        Parameters
        ----------
        log_likelihood : float or 0-d array
            ``log p(D | theta*)``, summed over the data, with its constants.
        parameters : mapping of str to mapping of str to array
            Parameters ``theta*`` at the mode.
        prior_mean : mapping of str to mapping of str to array, or float
            mu, or one number for all its entries.

        Returns
        -------
        Evidence
            Evidence as 0-d arrays in the dtype of the posterior.

        Raises
        ------
        UnknownBlockError, ShapeError, DtypeError, MixedArraysError
            For parameters of incompatible shape, dtype, library or device.
        """
        constraints.require_names("parameters", parameters, self.blocks)
        if isinstance(prior_mean, Mapping):
            constraints.require_names("prior_mean", prior_mean, self.blocks)
        scatter = []
        for name, p in self.posteriors.items():
            layer = self.blocks[name].layer
            xp, dtype = p.curvature.namespace, p.curvature.dtype
            theta = ns.cast(xp, _matrix_of(layer, parameters[name], p), dtype)
            mu: Any
            if isinstance(prior_mean, Mapping):
                mu = ns.cast(xp, _matrix_of(layer, prior_mean[name], p), dtype)
            else:
                mu = ns.as_scalar(xp, prior_mean, dtype, "prior_mean")
            scatter.append(p.scatter(theta - mu))
        prior = [p.logdet_prior() for p in self.posteriors.values()]
        total = reduce(add, scatter)
        xp = ns.own_namespace(total)
        value = ns.as_scalar(xp, log_likelihood, total.dtype, "log_likelihood")
        return Evidence(
            ns.full_of(xp, value, total), total, reduce(add, prior), self.logdet()
        )

    def sample(
        self, mean: Parameters, noise: Parameters, /
    ) -> dict[str, dict[str, Array]]:
        """Return ``theta* + P^-1/2 z``.

        Parameters
        ----------
        mean : mapping of str to mapping of str to array
            Mean ``theta*``.
        noise : mapping of str to mapping of str to array
            z, independent standard normal numbers of the parameters' shapes; leading
            axes, the same for all, are as many samples.

        Returns
        -------
        dict of str to dict of str to array
            Parameters with those leading axes, in the dtype of the mean.

        Raises
        ------
        UnknownBlockError, ShapeError, DtypeError, MixedArraysError
            For arrays of incompatible shape, dtype, library or device.
        """
        constraints.require_names("mean", mean, self.blocks)
        constraints.require_names("noise", noise, self.blocks)
        samples, leading = {}, {}
        for name, p in self.posteriors.items():
            layer = self.blocks[name].layer
            _matrix_of(layer, mean[name], p)  # only checked: samples have its layout
            Z = stack_to_matrices(layer, noise[name])
            leading[name] = tuple(Z.shape[:-2])
            # In the layout of the parameters, with the axes of the noise in front.
            deviations = matrices_to_stack(layer, p.sample(Z))
            samples[name] = {
                key: mean[name][key]
                + ns.cast(ns.own_namespace(x), x, mean[name][key].dtype)
                for key, x in deviations.items()
            }
        constraints.require_same("leading axes of `noise` in all blocks", leading)
        return samples

    def functional_covariance(self, jacobians: Jacobians, /) -> Array:
        """Return the covariance of the linearized outputs, ``J P^-1 J^T``.

        Parameters
        ----------
        jacobians : mapping of str to (mapping of str to array, or Batch)
            For every block; see `Jacobians`.

        Returns
        -------
        array, shape (N, K, K)
            Without observation noise.

        Raises
        ------
        UnknownBlockError, ShapeError, DtypeError, MixedArraysError
            For Jacobians that do not fit, or of blocks that disagree on N and K.
        """
        return self._functional(jacobians, functional_covariance, covariance_of_rows)

    def functional_variance(self, jacobians: Jacobians, /) -> Array:
        """Return the diagonals of `functional_covariance`, shape (N, K)."""
        return self._functional(jacobians, functional_variance, variance_of_rows)

    def status(self) -> Array:
        """Return the flags of all blocks, 0-d int32."""
        return reduce(or_, (p.status() for p in self.posteriors.values()))

    def _functional(
        self,
        jacobians: Jacobians,
        of_matrices: Callable[[BlockPosterior, Array], Array],
        of_rows: Callable[[BlockPosterior, AnyRows], Array],
    ) -> Array:
        constraints.require_names("jacobians", jacobians, self.blocks)
        parts = {}
        for name, p in self.posteriors.items():
            J, layer = jacobians[name], self.blocks[name].layer
            if isinstance(J, Mapping):
                parts[name] = of_matrices(p, stack_to_matrices(layer, J))
            else:
                parts[name] = of_rows(p, whole_rows(layer, J))
        shapes = {name: tuple(part.shape) for name, part in parts.items()}
        constraints.require_same(
            "examples and outputs in `jacobians` of all blocks", shapes
        )
        # Blocks are independent in the posterior, so their covariances of outputs add
        # up.
        return reduce(add, parts.values())


def _matrix_of(
    layer: Layer, parameters: Mapping[str, Array], posterior: BlockPosterior
) -> Array:
    """Return a layer's parameters as its matrix, of the posterior's library."""
    matrix = layer.parameters_to_matrix(parameters)
    ns.namespace_of(posterior=posterior.prior_precision, parameters=matrix)
    return matrix


def _by_block(
    value: Scalar | Mapping[str, Scalar], blocks: Mapping[str, object]
) -> Mapping[str, Scalar]:
    """Return a value for each block."""
    if isinstance(value, Mapping):
        constraints.require_names("prior_precision", value, blocks)
        return value
    return dict.fromkeys(blocks, value)
