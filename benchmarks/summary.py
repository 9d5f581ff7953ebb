"""A quick run on one screen: the median of every stage, a column for each library."""

from __future__ import annotations

from typing import Any

from benchmarks.measured import with_unit
from kfac_core.cli.screen import aligned

__all__ = ["summary"]

Found = dict[str, Any]

# Twelve letters each, so that a row is a line where all libraries have a column.
STAGES = {
    "refresh-inverse": "inverses",
    "refresh-cholesky": "Cholesky",
    "refresh-eigen": "eigenbases",
    "refresh-driver": "LAPACK alone",
    "precondition-inverse": "precondition",
    "precondition-solve": "by solves",
    "precondition-eigen": "in bases",
    "cycle-triangular": "solves",
    "refresh-looped": "inv., looped",
    "precondition-looped": "pre., looped",
}
LIBRARIES = {
    "kfac-jax-cholesky": "kfac-jax C",
    "torch-kernels": "(torch)",
    "lapack": "(LAPACK)",
}


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
        name = workload["name"].removeprefix("small ")
        for stage, figures in workload["stages"].items():
            medians = [figures.get(library, {}).get("median") for library in libraries]
            cells = ["" if m is None else with_unit(m, "s") for m in medians]
            rows.append([name, STAGES.get(stage, stage), *cells])
            name = ""
    lines = [f"Medians on {found['threads']} thread(s) of each library"]
    heads = [LIBRARIES.get(library, library) for library in libraries]
    lines += aligned(["workload", "stage", *heads], rows)
    if any(head.startswith("(") for head in heads):
        lines.append("(in brackets: the kernels alone, without any checks)")
    for name, said in found["libraries"].items():
        if "error" in said:
            lines.append(f"left out: {name}: {said['error']}")
    return lines
