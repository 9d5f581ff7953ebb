"""The sizes of the source tree: how they are counted, and the budgets that hold."""

from __future__ import annotations

from ..builders.benchmark_folder import import_benchmarks

import_benchmarks()

from benchmarks.size import KIT, size_of, sizes  # noqa: E402

PROGRAM = '''"""A docstring,
of two lines."""
import warnings  # a comment beside code


def checked(x, *,
            y):
    """A docstring."""
    # A comment.
    if x < 0:
        raise ValueError(
            "no"
        )
    require_finite(x)
    warnings.warn("so")
    if y:
        return x
    text = """two
lines"""
    return text
'''


def test_lines_of_a_program_are_counted():
    """By hand: 14 lines of code, 2 comments, 6 lines of refusals, a body of 11."""
    size = size_of(PROGRAM, "program")

    assert (size.code, size.comments, size.refusals) == (14, 2, 6)
    assert (size.longest, size.where) == (11, "program:checked")
    assert size_of('"""Nothing."""\n').code == 0


def test_the_kit_does_not_count_as_tests(tmp_path):
    """It is a package of the wheel; a file counts once."""
    for folder in ("conformance_tests", f"conformance_tests/{KIT}", "kfac_core"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "module.py").write_text("x = 1\n")

    found = sizes(tmp_path)

    assert {name: size.code for name, size in found.items() if size.code} == {
        "core": 1,
        "tests": 1,
        "kit": 1,
    }
