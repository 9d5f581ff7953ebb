"""``kfac-core conformance``: check another K-FAC library through an adapter."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kfac_core.cli.options import add_json, add_verbosity
from kfac_core.cli.screen import (
    complain,
    print_json,
    print_table,
    printable,
)
from kfac_core_conformance import (
    Check,
    Outcome,
    identity_checks,
    load_adapter,
    record_checks,
    run_check,
)

SUMMARY = "check another K-FAC library against identities and records"
EXAMPLES = (
    "kfac-core conformance --adapter kfac_core_conformance.own:Own",
    "kfac-core conformance --adapter my_adapter.py:MyLibrary --only B1 A4",
    "kfac-core conformance --adapter my_adapter.py:Mine --records *.safetensors",
)
EXIT_CODES = {
    0: "every check that the library supports holds",
    1: "an answer differs, or the library raised",
    2: "the adapter or a record cannot be loaded, or nothing was checked",
}

_STATUSES = ("holds", "differs", "raised", "not offered")


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Declare the options of the subcommand."""
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--adapter",
        metavar="MODULE:OBJECT",
        help="import path of the adapter; MODULE may be a path to a file",
    )
    asked.add_argument(
        "--list", action="store_true", help="list the checks without running any"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="only checks whose name begins with one of these (B, B1, 'A4 shared')",
    )
    parser.add_argument(
        "--records",
        nargs="+",
        metavar="RECORD",
        default=(),
        help="also check against the answers in these verification records",
    )
    add_verbosity(parser, also="the checks that hold")
    add_json(parser)


def run(arguments: argparse.Namespace, /) -> int:
    """Run the checks and print their outcomes.

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
    AdapterError, RecordError
        If one cannot be loaded.
    """
    try:
        checks = _selected(arguments)
    except ImportError as error:  # the packages of records
        return complain("conformance", error)
    if arguments.list:
        _list(checks, as_json=arguments.json)
        return 0
    adapter = load_adapter(arguments.adapter)
    if not checks:
        return complain("conformance", "no check has such a name; see --list.")
    outcomes = [run_check(adapter, check) for check in checks]
    code = _exit_code(outcomes)
    if arguments.json:
        document = {
            "adapter": arguments.adapter,
            "library": adapter.name,
            "version": adapter.version,
            "exit_code": code,
            "counts": dict(_counts(outcomes)),
            "checks": [_plain(outcome) for outcome in outcomes],
        }
        print_json(document)
    elif not arguments.quiet:
        library = f"{adapter.name} {adapter.version}"
        _print(library, outcomes, every=arguments.verbose)
    if code == 2:
        complain("conformance", "the library offers nothing of what was to be checked.")
    return code


def _selected(arguments: argparse.Namespace) -> list[Check]:
    checks = list(identity_checks())
    for path in dict.fromkeys(arguments.records):
        checks += record_checks(path)
    starts = tuple(arguments.only or ("",))
    return [
        check
        for check in checks
        # "B1" means "B1" and "B1 mse sum", and not "B16".
        if any(
            check.name == start
            or check.name.startswith(start + " ")
            or (start.isalpha() and check.name.startswith(start))
            or not start
            for start in starts
        )
    ]


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    counts = _counts(outcomes)
    if counts["differs"] or counts["raised"]:
        return 1
    return 0 if counts["holds"] else 2


def _counts(outcomes: Sequence[Outcome]) -> Counter[str]:
    counts: Counter[str] = Counter(outcome.status for outcome in outcomes)
    return Counter({status: counts[status] for status in _STATUSES})


def _print(library: str, outcomes: Sequence[Outcome], *, every: bool) -> None:
    """Print a row for each check that fails, or for all, and one total."""
    failed = ("differs", "raised")
    # What a record alone makes impossible is only counted.
    rows = [
        _cells(outcome)
        for outcome in outcomes
        if outcome.status in failed or (every and outcome.check.obstacle is None)
    ]
    if rows:
        heads = ("check", "what has to hold", "error", "allowed", "outcome")
        print_table(library, heads, rows)
    reasons = Counter(x.check.obstacle for x in outcomes if x.check.obstacle)
    if reasons and every:
        print_table(
            f"{reasons.total()} answers of the records cannot be asked for",
            ("answers", "why"),
            [(str(count), str(why)) for why, count in reasons.most_common()],
        )
    counts = _counts(outcomes)
    total = ", ".join(f"{counts[status]} {status}" for status in _STATUSES)
    print(f"{printable(library)}: {total}")


def _cells(outcome: Outcome) -> tuple[str, ...]:
    check = outcome.check
    bound = "> 1.0e-03" if check.must_differ else f"{check.tolerance:.1e}"
    word: str = outcome.status
    if outcome.message is not None:
        word += f": {outcome.message}"
    error = "" if outcome.error is None else f"{outcome.error:.1e}"
    return (check.name, check.says, error, bound, word)


def _plain(outcome: Outcome) -> dict[str, Any]:
    check = outcome.check
    return {
        "check": check.name,
        "says": check.says,
        "operation": check.operation,
        "damping": check.damping if check.rule is not None else None,
        "damping_rule": check.rule,
        "outcome": outcome.status,
        "error": outcome.error,
        "tolerance": check.tolerance,
        "must_differ": check.must_differ,
        "message": outcome.message,
    }


def _list(checks: Sequence[Check], *, as_json: bool) -> None:
    if as_json:
        print_json([{"check": check.name, "says": check.says} for check in checks])
        return
    rows = [(check.name, check.says) for check in checks]
    print_table(f"{len(rows)} checks", ("check", "what has to hold"), rows)
