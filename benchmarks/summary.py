"""A quick run on one screen: the median of every stage, a column for each library."""

from __future__ import annotations

from typing import Any

from benchmarks.measured import with_unit
from kfac_core.cli.screen import aligned

__all__ = ["summary"]

Found = dict[str, Any]


def summary(found: Found, /) -> list[str]:
    """Return the lines of a table, at most 80 wide.

    Parameters
    ----------
    found : dict
        As `benchmarks.run.run` gives it.

    Returns
    -------
    list of str
        Workloads and stages with medians by library, and what was left out.
    """
    libraries = [
        name for name, said in found["libraries"].items() if "error" not in said
    ]
    rows = []
    for workload in found["workloads"]:
        name = workload["name"]
        for stage, figures in workload["stages"].items():
            medians = [figures.get(library, {}).get("median") for library in libraries]
            cells = ["" if m is None else with_unit(m, "s") for m in medians]
            rows.append([name, stage, *cells])
            name = ""
    lines = [f"Medians on {found['threads']} thread(s) of each library"]
    lines += aligned(["workload", "stage", *libraries], rows)
    for name, said in found["libraries"].items():
        if "error" in said:
            lines.append(f"left out: {name}: {said['error']}")
    return lines
