"""Examples of docstrings, run with nothing in their namespace but what they import."""

import doctest
import inspect
from typing import Any


def assert_prints(found: Any, name: str) -> None:
    """Run the examples of an object's docstring; they print what stands there."""
    text = inspect.getdoc(inspect.unwrap(found)) or ""
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    report: list[str] = []
    result = doctest.DocTestRunner().run(test, out=report.append)

    assert result.attempted > 0
    assert not result.failed, "".join(report)
