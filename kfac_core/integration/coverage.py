"""The parameters of a model that an integration covers, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from kfac_core.block import Block
from kfac_core.report import aligned


def coverage_table(
    blocks: Mapping[str, Block],
    skipped: Mapping[str, str],
    /,
    *,
    updates: Mapping[str, int] | None = None,
) -> str:
    """Return a table of blocks, and of the parameters that have none.

    Parameters
    ----------
    blocks : mapping of str to kfac_core.Block
        Blocks by name.
    skipped : mapping of str to str
        Reasons by name of a parameter.
    updates : mapping of str to int, optional
        Updates of each block so far: one that has none where others have some is marked,
        such as a layer that the model does not call, or calls without gradients.

    Returns
    -------
    str
        One line for each.
    """
    rows = []
    updates = updates or {}
    started = any(updates.values())
    for name, block in blocks.items():
        shapes = block.layer.parameter_shapes.values()
        sizes = " + ".join("x".join(map(str, shape)) for shape in shapes)
        note = "no rows yet" if started and not updates[name] else ""
        kind, approximation = block.layer.kind, repr(block.approximation)
        rows.append((name or "(model)", kind, sizes, approximation, note))
    lines = [f"  {line}" for line in aligned(rows)]
    if skipped:
        lines.append("left alone, with their gradients as they are:")
        lines += [f"  {name}: {reason}" for name, reason in skipped.items()]
    return "\n".join(lines)
