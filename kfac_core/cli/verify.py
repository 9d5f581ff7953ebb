"""``kfac-core verify``: recompute the answers of verification records.

Exit codes: 0 where every answer agrees, 1 where one differs, 2 where a file could not be
read, whatever the others say.  Each file is read and checked on its own, so that a bad
one costs one line on standard error and nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from kfac_core.errors import RecordError
from kfac_core.records.check import CheckDtype, Verdict, check_record
from kfac_core.records.container import load_library
from kfac_core.records.fields import one_line
from kfac_core.records.record import read_record
from kfac_core.selection import enable_float64, selected_backend

__all__ = ["add_arguments", "run"]

_COLUMNS = ("block", "operation", "damping", "error", "tolerance", "verdict")


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "records", nargs="+", metavar="RECORD", help="a .safetensors file"
    )
    parser.add_argument(
        "--backend",
        metavar="NAME[:DEVICE]",
        help="the array library to compute with (default: the selected one)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        default="float64",
        help="the precision to compute in (default: float64)",
    )
    parser.add_argument(
        "--memory-limit",
        type=_positive,
        metavar="MIB",
        help="the largest array that a record may ask for (default: 64 MiB and 64 times "
        "the size of its file)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, /) -> int:
    """Verify the records and print what came of it.

    Parameters
    ----------
    arguments : argparse.Namespace
        As `add_arguments` declared.

    Returns
    -------
    int
        The exit code; see the module's text.

    Raises
    ------
    KFACError
        Where the backend cannot be used, or no record at all can be read here.
    """
    load_library()
    selection = selected_backend(arguments.backend)
    if arguments.dtype == "float64":
        enable_float64(backend=arguments.backend)
    limit = arguments.memory_limit
    results = []
    for path in arguments.records:
        result = _verified(
            path,
            backend=arguments.backend,
            dtype=arguments.dtype,
            memory_limit=None if limit is None else limit * 2**20,
        )
        results.append(result)
        if not arguments.json:
            _print_result(result)
    code = _exit_code(results)
    if arguments.json:
        found = {
            "backend": selection.spec,
            "dtype": arguments.dtype,
            "exit_code": code,
            "records": [_plain_result(result) for result in results],
        }
        print(json.dumps(found, indent=2, allow_nan=False))
    return code


def _verified(
    path: str, *, backend: str | None, dtype: CheckDtype, memory_limit: int | None
) -> dict[str, Any]:
    """Return what came of one file; nothing that is in it raises."""
    try:
        record = read_record(path, memory_limit=memory_limit)
        verdicts = check_record(record, backend=backend, dtype=dtype)
    except RecordError as error:
        return {"record": path, "problem": str(error), "verdicts": ()}
    except Exception as error:
        # A file may find a defect of this library or of an array library; the others
        # are checked all the same.
        reason = one_line(f"{type(error).__name__}: {error}")[:300]
        problem = f"{one_line(path)}: could not be checked: {reason}"
        return {"record": path, "problem": problem, "verdicts": ()}
    return {"record": path, "problem": None, "verdicts": verdicts}


def _exit_code(results: list[dict[str, Any]]) -> int:
    if any(result["problem"] is not None for result in results):
        return 2
    return 0 if all(v.agrees for result in results for v in result["verdicts"]) else 1


def _plain_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result as JSON has it; what is not finite becomes null."""
    return {
        "record": one_line(result["record"]),
        "error": result["problem"],
        "agrees": result["problem"] is None
        and all(v.agrees for v in result["verdicts"]),
        "checks": [_plain_verdict(verdict) for verdict in result["verdicts"]],
    }


def _plain_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "index": verdict.index,
        "block": verdict.block,
        "op": verdict.operation,
        "detail": verdict.detail,
        "damping": verdict.damping,
        "damping_rule": verdict.rule,
        "error": verdict.error if math.isfinite(verdict.error) else None,
        "tolerance": verdict.tolerance if math.isfinite(verdict.tolerance) else None,
        "agrees": verdict.agrees,
        "problem": verdict.problem,
    }


def _print_result(result: dict[str, Any]) -> None:
    """Print one line for a file that is bad, a table for one that is good."""
    if result["problem"] is not None:
        print(f"kfac-core verify: {result['problem']}", file=sys.stderr)
        return
    rows = [_cells(verdict) for verdict in result["verdicts"]]
    agreeing = sum(verdict.agrees for verdict in result["verdicts"])
    summary = f"{agreeing} of {len(rows)} agree" if rows else "nothing to check"
    title = f"{one_line(result['record'])}: {summary}"
    if not (rows and sys.stdout.isatty() and _print_pretty(title, rows)):
        print("\n".join([title, *_aligned(rows)]))


def _cells(verdict: Verdict) -> tuple[str, ...]:
    operation = f"{verdict.operation} {verdict.detail}".strip()
    damping = "" if verdict.damping is None else f"{verdict.damping:g} {verdict.rule}"
    word = "agrees" if verdict.agrees else "differs"
    if verdict.problem is not None:
        word = f"no answer: {verdict.problem}"
    return (
        verdict.block,
        operation,
        damping,
        f"{verdict.error:.1e}",
        f"{verdict.tolerance:.1e}",
        word,
    )


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a plain table."""
    if not rows:
        return []
    table = [_COLUMNS, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(_COLUMNS))]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _print_pretty(title: str, rows: list[tuple[str, ...]]) -> bool:
    """Print a table for people; return False where rich is not there to do it."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(title=Text(title), title_justify="left")
    for column in _COLUMNS:
        table.add_column(column)
    for *cells, word in rows:
        # `Text` takes what it is given literally: a record's names are not markup.
        verdict = Text(word, style="green" if word == "agrees" else "bold red")
        table.add_row(*map(Text, cells), verdict)
    Console().print(table)
    return True


def _positive(value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {value!r}")
    return number
