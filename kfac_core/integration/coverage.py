"""The parameters of a model that an integration covers, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from kfac_core.block import Block


def coverage_table(blocks: Mapping[str, Block], skipped: Mapping[str, str], /) -> str:
    """Return a table of blocks, and of the parameters that have none.

    Parameters
    ----------
    blocks : mapping of str to kfac_core.Block
        Blocks by name.
    skipped : mapping of str to str
        Reasons by name of a parameter.

    Returns
    -------
    str
        One line for each.
    """
    rows = []
    for name, block in blocks.items():
        shapes = block.layer.parameter_shapes.values()
        sizes = " + ".join("x".join(map(str, shape)) for shape in shapes)
        rows.append(
            (name or "(model)", block.layer.kind, sizes, repr(block.approximation))
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if skipped:
        lines.append("left alone, with their gradients as they are:")
        lines += [f"  {name}: {reason}" for name, reason in skipped.items()]
    return "\n".join(lines)
