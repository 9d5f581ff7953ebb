"""``kfac-core inspect``: show a checkpoint."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kfac_core.checkpoint import read_header
from kfac_core.cli.options import add_json
from kfac_core.cli.screen import aligned, print_json, printable

SUMMARY = "show what a checkpoint contains"
EXAMPLES = (
    "kfac-core inspect curvature.npz",
    "kfac-core inspect curvature.npz --blocks",
)
_COUNTS = ("updates", "age", "failures", "basis_age")
EXIT_CODES = {0: "the file was read", 2: "the file is damaged or not a checkpoint"}


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("file", help="a checkpoint, *.npz")
    parser.add_argument(
        "--blocks", action="store_true", help="show every block and its arrays"
    )
    add_json(parser)


def run(arguments: argparse.Namespace, /) -> int:
    """Print the contents of a file; no tensor of it is read.

    Parameters
    ----------
    arguments : argparse.Namespace
        Parsed arguments of `add_arguments`.

    Returns
    -------
    int
        0.

    Raises
    ------
    StateError
        If the file cannot be read.
    """
    report = contents(arguments.file)
    if arguments.json:
        print_json(report)
    else:
        # Escape names from the file, so that they cannot steer a terminal.
        print("\n".join(map(printable, _summary(report))))
        if arguments.blocks:
            print("\n".join(map(printable, _block_lines(report))))
    return 0


def contents(path: str, /) -> dict[str, Any]:
    """Return the contents of a checkpoint, as plain data.

    Parameters
    ----------
    path : str
        The file.

    Returns
    -------
    dict
        Report of its size, producer, conventions, settings, and each block.

    Raises
    ------
    StateError
        See `kfac_core.checkpoint.read_header`.
    """
    header = read_header(path)
    document = header["document"]
    state = document["state"]
    return {
        "file": str(path),
        "bytes": header["bytes"],
        "version": document["version"],
        "producer": document.get("producer"),
        "about": document.get("about"),
        "conventions": state.get("conventions"),
        "settings": state.get("settings"),
        "blocks": {
            name: _block(name, block, header["tensors"])
            for name, block in state["blocks"].items()
        },
    }


def _block(
    name: str, block: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    of_block = {}
    for full, (dtype, shape) in tensors.items():
        # Names of blocks may contain slashes, paths do not.
        owner, _, path = full.rpartition("/")
        if owner == name:
            of_block[path] = {"dtype": dtype, "shape": list(shape)}
    return {
        **{key: block[key] for key in ("layer", "approximation")},
        **{key: block["values"].get(key) for key in _COUNTS},
        "has_operator": any(path.startswith("operator.") for path in of_block),
        "tensors": of_block,
    }


def _summary(report: Mapping[str, Any]) -> list[str]:
    """Return one screen: the file, and blocks of one kind in one row, with totals."""
    blocks = report["blocks"].values()
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for block in blocks:
        kinds.setdefault(_kind(block), []).append(block)
    rows = [_row(*kind, members) for kind, members in sorted(kinds.items())]
    if len(rows) > 1:
        rows.append(_row("total", "", list(blocks)))
    columns = "layer", "approximation", "blocks", "numbers", "updates", "operators"
    return [
        f"{report['file']}: version {report['version']}, {report['bytes']:,} bytes, by "
        f"{report['producer']}",
        f"  conventions  {_pairs(report['conventions'])}",
        f"  settings     {_pairs(report['settings'])}",
        *(
            []
            if report["about"] is None
            else [f"  about        {_pairs(report['about'])}"]
        ),
        *aligned(columns, rows),
    ]


def _kind(block: Mapping[str, Any]) -> tuple[str, str]:
    layer, approximation = block["layer"] or {}, block["approximation"] or {}
    return str(layer.get("kind", "")), str(approximation.get("name", ""))


def _row(
    layer: str, approximation: str, blocks: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    tensors = [tensor for block in blocks for tensor in block["tensors"].values()]
    numbers = sum(math.prod(tensor["shape"]) for tensor in tensors)
    updates = sorted({block["updates"] or 0 for block in blocks})
    span = f"{updates[0]}" if len(updates) == 1 else f"{updates[0]} to {updates[-1]}"
    operators = sum(block["has_operator"] for block in blocks)
    return layer, approximation, str(len(blocks)), f"{numbers:,}", span, str(operators)


def _block_lines(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, block in report["blocks"].items():
        layer, approximation = block["layer"] or {}, block["approximation"] or {}
        operator = f"age {block['age']}" if block["has_operator"] else "none"
        lines += [
            "",
            f"{name}",
            f"  layer          {_pairs(layer)}",
            f"  approximation  {_pairs(approximation)}",
            f"  updates        {block['updates']}; operator: {operator}",
        ]
        width = max(map(len, block["tensors"]), default=0)
        lines += [
            f"  {path.ljust(width)}  {tensor['dtype']}  {tuple(tensor['shape'])}"
            for path, tensor in sorted(block["tensors"].items())
        ]
    return lines


def _pairs(values: object) -> str:
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(f"{name} {value}" for name, value in values.items())
