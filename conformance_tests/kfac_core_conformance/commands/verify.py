"""``kfac-core verify``: recompute the answers of verification records.

Each file is read and checked on its own: a bad one costs one line on standard error.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfac_core.array.selection import enable_float64, selected_backend
from kfac_core.cli.options import add_json, add_verbosity, positive
from kfac_core.cli.screen import (
    complain,
    print_json,
    print_table,
    printable,
)
from kfac_core.errors import RecordError

if TYPE_CHECKING:
    from kfac_core_conformance.records import CheckDtype, Verdict

SUMMARY = "recompute the answers in verification records"
EXAMPLES = (
    "kfac-core verify step.safetensors",
    "kfac-core verify records/",
    "kfac-core verify --backend torch:cuda:0 --dtype float32 --json *.safetensors",
)
EXIT_CODES = {
    0: "every answer agrees",
    1: "an answer differs",
    2: "a file cannot be read, even if all others agree, or the backend is unusable",
}

_COLUMNS = ("block", "operation", "damping", "error", "limit", "result")


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "records", nargs="+", metavar="RECORD", help="a .safetensors file, or a folder"
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
        type=positive,
        metavar="MIB",
        help="the largest array that a record may ask for (default: 64 MiB and 64 times "
        "the size of its file)",
    )
    add_verbosity(parser, also="the answers that agree")
    add_json(parser)


def run(arguments: argparse.Namespace, /) -> int:
    """Verify the records and print the verdicts.

    Parameters
    ----------
    arguments : argparse.Namespace
        As `add_arguments` declared.

    Returns
    -------
    int
        The exit code; see `EXIT_CODES`.

    Raises
    ------
    KFACError
        If the backend cannot be used.
    """
    try:
        # Only now: `kfac-core --help` needs none of the packages of records.
        import kfac_core_conformance.records  # noqa: F401
    except ImportError as error:
        return complain("verify", error)
    selection = selected_backend(arguments.backend)
    if arguments.dtype == "float64":
        enable_float64(backend=arguments.backend)
    limit = arguments.memory_limit
    results = []
    paths = [path for argument in arguments.records for path in _files(argument)]
    for path in paths:
        result = _verified(
            path,
            backend=arguments.backend,
            dtype=arguments.dtype,
            memory_limit=None if limit is None else limit * 2**20,
        )
        results.append(result)
        if not (arguments.json or arguments.quiet):
            _print_result(result, every=arguments.verbose)
    code = _exit_code(results)
    if arguments.json:
        document = {
            "backend": selection.spec,
            "dtype": arguments.dtype,
            "exit_code": code,
            "records": [_plain_result(result) for result in results],
        }
        print_json(document)
    elif not arguments.quiet and any(r["problem"] is None for r in results):
        print(_total(results, f"{selection.spec}, {arguments.dtype}"))
    return code


def _files(path: str) -> list[str]:
    """Return the records of a folder, at any depth, or the file itself."""
    if not Path(path).is_dir():
        return [path]
    records = sorted(map(str, Path(path).rglob("*.safetensors")))
    if not records:
        raise RecordError(f"{printable(path)}: the folder has no .safetensors file")
    return records


def _total(results: list[dict[str, Any]], where: str) -> str:
    """Return one line for all files together."""
    verdicts = [verdict for result in results for verdict in result["verdicts"]]
    agreeing = sum(verdict.agrees for verdict in verdicts)
    files = f"{len(results)} file" if len(results) == 1 else f"{len(results)} files"
    line = f"{agreeing} of {len(verdicts)} answers in {files} agree ({where})"
    unread = sum(result["problem"] is not None for result in results)
    return f"{line}; {unread} not read" if unread else line


def _verified(
    path: str, *, backend: str | None, dtype: CheckDtype, memory_limit: int | None
) -> dict[str, Any]:
    """Return the verdicts of one file, or its problem; no content raises."""
    from kfac_core_conformance import records

    try:
        record = records.read_record(path, memory_limit=memory_limit)
        verdicts = records.check_record(record, backend=backend, dtype=dtype)
    except RecordError as error:
        return {"record": path, "problem": str(error), "verdicts": ()}
    except Exception as error:
        # A file may reveal a defect of this library or of an array library; the other
        # files are still checked.
        reason = printable(f"{type(error).__name__}: {error}")[:300]
        problem = f"{printable(path)}: could not be checked: {reason}"
        return {"record": path, "problem": problem, "verdicts": ()}
    return {"record": path, "problem": None, "verdicts": verdicts}


def _exit_code(results: list[dict[str, Any]]) -> int:
    if any(result["problem"] is not None for result in results):
        return 2
    return 0 if all(v.agrees for result in results for v in result["verdicts"]) else 1


def _plain_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result as plain data."""
    return {
        "record": printable(result["record"]),
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
        "error": verdict.error,
        "tolerance": verdict.tolerance,
        "agrees": verdict.agrees,
        "problem": verdict.problem,
        "diagnosis": verdict.diagnosis,
    }


def _print_result(result: dict[str, Any], *, every: bool) -> None:
    """Print the answers that differ, or all; one line for a file that cannot be read."""
    if result["problem"] is not None:
        complain("verify", result["problem"])
        return
    verdicts = result["verdicts"]
    rows = [_cells(verdict) for verdict in verdicts if every or not verdict.agrees]
    agreeing = sum(verdict.agrees for verdict in verdicts)
    summary = f"{agreeing} of {len(verdicts)} agree" if verdicts else "nothing to check"
    if rows or not verdicts:
        print_table(f"{printable(result['record'])}: {summary}", _COLUMNS, rows)
    explained = [f"{_label(v)}: {v.diagnosis}" for v in verdicts if v.diagnosis]
    for line in dict.fromkeys([*explained, *_advice(verdicts)]):
        text = printable(line)
        print(textwrap.fill(text, 80, initial_indent="  ", subsequent_indent="    "))


def _label(verdict: Verdict) -> str:
    """Return which check it was, as ``fc factor=input`` or ``fc multiply_inverse``."""
    if verdict.operation == "factor":
        return f"{verdict.block} {verdict.detail}"
    return f"{verdict.block} {verdict.operation} {verdict.detail}".strip()


def _advice(verdicts: Sequence[Verdict]) -> list[str]:
    """Return which checks would show why an inverse differs, where nothing else does."""
    lines = []
    for block in dict.fromkeys(verdict.block for verdict in verdicts):
        of_block = [verdict for verdict in verdicts if verdict.block == block]
        wrong = [v for v in of_block if v.problem is None and not v.agrees]
        explained = any(v.diagnosis for v in wrong)
        if explained or {v.operation for v in wrong} != {"multiply_inverse"}:
            continue
        # Only the factored rules split the damping.
        split = any((v.rule or "").startswith("factored") for v in wrong)
        useful = ["factor", "damping_split"] if split else ["factor"]
        known = {v.operation for v in of_block}
        missing = [f"`{name}`" for name in useful if name not in known]
        if missing:
            word = "check" if len(missing) == 1 else "checks"
            names = " and ".join(missing)
            lines.append(f"{block}: add the {word} {names}, to see where it begins")
    return lines


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
        f"{verdict.tolerance:.0e}",
        word,
    )
