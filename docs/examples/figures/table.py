"""The table of the page on choosing an approximation."""

from collections.abc import Sequence

from .fidelity import Fidelity
from .network import Seen


def markdown(seen: Seen, rows: Sequence[Fidelity]) -> str:
    """Return the table of one layer."""
    lines = [
        f"| {seen.title} | floats kept | flops | error of the block | decrease |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        name = f"`{row.name}`" if "(" in row.name else row.name
        cost = f"{row.flops:.1e}".replace("e+0", "e") if row.flops else "0"
        error = f"{row.block:.3f}" if row.kept else ""
        lines.append(
            f"| {name} | {row.kept:,} | {cost} | {error} | {row.decrease:.3f} |"
        )
    return "\n".join(lines)
