"""Kronecker factors in PyTorch's order of a weight, for other libraries."""

from __future__ import annotations

from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch.sites import Site


def factors_of(site: Site, statistics: Any, /) -> tuple[Any, Any, Any]:
    """Return both factors of a layer's block, and the scale of their product.

    Parameters
    ----------
    site : Site
        The block.
    statistics : kfac_core.Statistics or None
        Its statistics.

    Returns
    -------
    input, output, scale : torch.Tensor
        See `KFAC.factors`.

    Raises
    ------
    kfac_core.UnsupportedError
        For a block that is not a product of two full factors of one weight.
    kfac_core.NotReadyError
        Without statistics.
    """
    name = site.name
    if statistics is None:
        raise kc.NotReadyError(f"Layer {name!r} has no statistics yet. Call `update`.")
    weight, layer = site.parameters.get("weight"), site.layer
    averages = statistics.averages
    sides = [s for s in ("input", "output") if s in averages]
    values = [averages[side].value(debias=True) for side in sides]
    whole = len(values) == 2 and all(hasattr(value, "full") for value in values)
    plain = layer.groups == 1 and not site.part.rows
    outputs = layer.matrix_shape[1]
    if weight is None or not (whole and plain) or weight.shape[0] != outputs:
        raise kc.UnsupportedError(
            f"Layer {name!r} is not a product of two full factors of one weight. Ask "
            "kfac.estimator.operator(name)."
        )
    A, G = (value.full() for value in values)
    # Which of PyTorch's inputs each row of the block's matrix is of.
    n = len(A) - ("bias" in site.parameters)
    places = torch.arange(n, dtype=A.dtype, device=A.device)
    places = places.expand(outputs, n).reshape(weight.shape)
    in_layer = site.part.to_layer(places)
    parameters = {"weight": in_layer.reshape(layer.parameter_shapes["weight"])}
    if "bias" in site.parameters:
        parameters["bias"] = torch.full((outputs,), n, dtype=A.dtype, device=A.device)
    order = torch.argsort(layer.parameters_to_matrix(parameters)[:, 0])
    return A[order][:, order], G, averages["repeats"].value(debias=True)
