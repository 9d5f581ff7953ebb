"""Stacks of parameters, as the matrices of blocks and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch.sites import Site


class ParameterStacks:
    """Vectors in the space of some blocks' parameters.

    Parameters
    ----------
    sites : mapping of str to Site
        The blocks.
    order : sequence of torch.nn.Parameter, optional
        Parameters in whose order lists are; that of the blocks where left out.

    Attributes
    ----------
    parameters : list of torch.nn.Parameter
        Parameters of the blocks, each once.
    """

    def __init__(self, sites: Mapping[str, Site], order: Sequence[Any] = ()) -> None:
        self.sites = dict(sites)
        of_blocks = {id(p): p for site in self.sites.values() for p in site.trained}
        first = [p for p in order if id(p) in of_blocks]
        self.parameters = first or [*of_blocks.values()]

    def matrices(
        self, stacks: Sequence[Any], /, *, dtype: torch.dtype = None
    ) -> dict[str, Any]:
        """Return stacks (Q, *shape) of all parameters as matrices (Q, in(+1), out)."""
        by_id = {id(p): x for p, x in zip(self.parameters, stacks, strict=True)}
        matrices = {}
        for name, site in self.sites.items():
            parts = {}
            for role, shape in site.layer.parameter_shapes.items():
                x, rows = by_id[id(site.parameters[role])], site.rows_of(role)
                x = x if rows is None else x[:, rows]
                if role == "weight":
                    x = torch.stack([site.part.to_layer(one) for one in x])
                x = x.reshape(len(x), *shape)
                parts[role] = x if dtype is None else x.to(dtype)
            matrices[name] = kc.layers.parameter_stacks.stack_to_matrices(
                site.layer, parts
            )
        return matrices

    def stacks(self, matrices: Mapping[str, Any], /) -> list[Any]:
        """Return matrices as stacks of the parameters; undoes `matrices`."""
        like = next(iter(matrices.values()))
        # Parameters of no matrix stay zero: their part of a product is none.
        stacks = [like.new_zeros(len(like), *p.shape) for p in self.parameters]
        by_id = {id(p): x for p, x in zip(self.parameters, stacks, strict=True)}
        for name, V in matrices.items():
            site = self.sites[name]
            for role, x in kc.layers.parameter_stacks.matrices_to_stack(
                site.layer, V
            ).items():
                for number, one in enumerate(x):
                    targets = {p: by_id[id(p)][number] for p in site.trained}
                    site.place({role: one}, targets)
        return stacks
