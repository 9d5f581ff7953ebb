"""Kronecker factors of the linear and conv layers of a model, for other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch.gradients import differentiate
from kfac_core_shims.torch.kfac import KFAC


def with_layer_factors(
    model: torch.nn.Module, passes: Iterable[Any], /, *, sharing: Any, **options: Any
) -> KFAC:
    """Return a `KFAC`, detached from its model, whose factors are of some passes.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    passes : iterable of pair
        The outputs of each pass, computed when it is asked for, and the loss whose
        gradients count, or None for vectors of the likelihood.
    sharing : {"expand", "reduce"}
        See `kfac_core.Kronecker`.
    **options
        Further options of `KFAC`.

    Returns
    -------
    KFAC
        See `KFAC.factors`.
    """
    kind = kc.Kronecker(sharing=sharing)
    kfac = KFAC(
        model,
        approximations={
            **dict.fromkeys(("dense", "conv"), kind),
            **dict.fromkeys(("embedding", "scale_shift")),
        },
        decay=1.0,
        output=None,
        communicator="alone",
        **options,
    )

    def outputs() -> Iterator[torch.Tensor | None]:
        for z, loss in passes:
            if loss is None:
                yield z
                continue
            kfac.observe(z)
            differentiate(loss, model.parameters())
            yield None

    kfac.update(outputs())
    kfac.remove()
    return kfac
