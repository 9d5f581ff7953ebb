"""Tied weights: one weight used in several named places of a network.

Conventions.  ``{"decoder.1": "decoder.0"}`` says that ``decoder.1`` is another use of the
weight of block ``decoder.0``.  The curvature is of that one weight: the rows of its uses
in an example are shared positions of its block, whose factors are computed once, and the
gradient to precondition is the block's, summed over the uses as a framework gives it.
Every use of a weight is fed in the same update, since an example's gradient is the sum
over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfac_core import constraints, errors
from kfac_core.block import BatchLike, Block


class TiedWeights:
    """The names of further uses of each block's weight.

    Parameters
    ----------
    uses : mapping of str to str
        Names of further uses, to names of blocks.
    blocks : mapping of str to Block
        The blocks of the estimator.

    Raises
    ------
    UnknownBlockError
        For an unknown block name.
    ConventionError
        For a further use that is a block itself.
    UnsupportedError
        For a block whose layer has no rows to be joined.
    """

    def __init__(self, uses: Mapping[str, str], blocks: Mapping[str, Block]) -> None:
        for use, name in uses.items():
            if name not in blocks:
                raise constraints.unknown_block(name, blocks, option="Coupling.weights")
            if use in blocks:
                raise errors.ConventionError(
                    f"`Coupling.weights`: {use!r} is a block of its own. Leave it out of "
                    f"`blocks`: the curvature of the weight is in block {name!r}."
                )
            if blocks[name].layer.kind not in ("dense", "conv"):
                raise errors.UnsupportedError(
                    f"`Coupling.weights`: block {name!r} is a "
                    f"{blocks[name].layer.kind} layer; only the uses of "
                    "a dense or conv layer are joined."
                )
        self.uses = dict(uses)

    def grouped(self, batches: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the batches of each block, including its further uses.

        Parameters
        ----------
        batches : mapping of str to Batch, GradientBatch or sequence of Batch
            Batches by block, and by further use.

        Returns
        -------
        dict of str to Batch, GradientBatch or sequence of Batch
            Batches by block alone.

        Raises
        ------
        ConventionError
            If some uses of a weight were fed, and others not.
        """
        grouped = {
            name: batch for name, batch in batches.items() if name not in self.uses
        }
        for name in dict.fromkeys(self.uses.values()):
            everywhere = [name, *(use for use, of in self.uses.items() if of == name)]
            present = [place for place in everywhere if place in batches]
            if not present:
                continue
            # The gradient of a tied weight is summed over its uses, and so are the rows
            # of an example: a missing use would bias G silently.
            hint, kind = "Feed all uses of a weight at once.", errors.ConventionError
            constraints.require_names(name, present, everywhere, hint, error=kind)
            grouped[name] = [
                batch for place in everywhere for batch in _several(batches[place])
            ]
        return grouped


def _several(batch: BatchLike) -> list[BatchLike]:
    return list(batch) if isinstance(batch, list | tuple) else [batch]
