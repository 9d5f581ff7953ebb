"""Calls and frames between an estimator and BLAS, of which there are to be few.

Neither depends on the clock.  Frames are this package's own; calls include those that
NumPy makes in Python, so that their bounds leave room for other versions of it.
"""

from __future__ import annotations

import numpy as np
import pytest

from kfac_core.array.backend import native_operations

from ..builders.benchmark_folder import import_benchmarks

import_benchmarks()

from benchmarks.calls import stages  # noqa: E402

MOST = {"update": (105, 9), "refresh": (192, 12), "precondition": (56, 9)}
"""Python calls, and own frames below the call, of one dense block."""


@pytest.mark.skipif(
    "gram_update" not in native_operations("numpy"),
    reason="counts the way to BLAS, which needs NumPy's native operations",
)
@pytest.mark.skipif(
    int(np.__version__.split(".")[1]) < 2 and np.__version__.startswith("2."),
    reason="NumPy 2.1 makes more calls of its own in Python",
)
def test_few_calls_lie_between_an_estimator_and_blas():
    """Each stage of a dense block stays below its number of calls and of frames."""
    found = stages()

    for stage, (calls, frames) in MOST.items():
        path = "\n".join(found[stage].path)
        assert found[stage].own <= frames, f"{stage}:\n{path}"
        assert found[stage].calls <= calls, f"{stage}: {found[stage].calls} calls"
    assert found.keys() == MOST.keys()
