"""Which weights have which block, which have none and why, as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import kfac_core as kc

__all__ = ["APPROXIMATIONS", "approximation_of"]

APPROXIMATIONS: dict[str, Any] = {
    "dense": kc.Kronecker(),
    "conv": kc.Kronecker(),
    "embedding": kc.Kronecker(input="diagonal"),
    "scale_shift": kc.Diagonal(),
}
"""The default approximation of each kind of layer."""

LARGEST_FACTOR = 8192
"""A dense layer's side with more features than this has a diagonal factor by default."""


def approximation_of(site: Any, chosen: Mapping[Any, Any], /) -> Any:
    """Return the approximation of a block; None where it is to be left alone.

    Parameters
    ----------
    site : Site
        The block.
    chosen : mapping
        Approximations by name of the block, class of its module, or kind of layer, the
        first of these that is there.

    Returns
    -------
    Approximation or None
        That which was chosen, or the default of its kind; diagonal on sides of more than
        `LARGEST_FACTOR` features, such as the logits of a large vocabulary.

    Raises
    ------
    kfac_core.ConventionError
        For another approximation of a weight that embeds ids and makes logits too.
    """
    found = _chosen_or_default(site, chosen)
    if site.part.tied and found is not None and found != APPROXIMATIONS["embedding"]:
        raise kc.ConventionError(
            f"{site.name!r} is an embedding whose weight makes logits too: expected "
            f"{APPROXIMATIONS['embedding']!r} or None in `approximations`, got {found!r}."
        )
    return found


def _chosen_or_default(site: Any, chosen: Mapping[Any, Any]) -> Any:
    if site.name in chosen:
        return chosen[site.name]
    for kind in type(site.module).__mro__:
        if kind in chosen:
            return chosen[kind]
    if site.kind in chosen:
        return chosen[site.kind]
    if site.kind != "dense":
        return APPROXIMATIONS[site.kind]
    sides = zip(("input", "output"), site.layer.matrix_shape, strict=True)
    large = {side: "diagonal" for side, n in sides if n > LARGEST_FACTOR}
    return replace(APPROXIMATIONS["dense"], **large)


def require_known(chosen: Mapping[Any, Any], sites: Mapping[str, Any], /) -> None:
    """Raise `ConventionError` for approximations of nothing.

    Parameters
    ----------
    chosen : mapping
        See `approximation_of`.
    sites : mapping of str to Site
        All blocks.
    """
    for key, approximation in chosen.items():
        matches = any(
            key in (site.name, site.kind) or key in type(site.module).__mro__
            for site in sites.values()
        )
        if not matches and key not in APPROXIMATIONS:
            raise kc.ConventionError(
                f"`approximations` has {key!r}, which is no block ({', '.join(sites)}), no "
                f"class of a covered module, and no kind ({', '.join(APPROXIMATIONS)})."
            )
        if approximation is not None and not hasattr(approximation, "problem_with"):
            raise kc.ConventionError(
                f"Expected `approximations` to hold approximations such as Kronecker(), or "
                f"None to leave a layer alone; got {approximation!r} for {key!r}."
            )
