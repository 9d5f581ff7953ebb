"""The problems of the least-squares benchmark have the solutions that errors are of."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
least_squares = pytest.importorskip("benchmarks.least_squares")

EQUATIONS = [
    name for name, case in least_squares.PROBLEMS.items() if not case.build().minibatch
]


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_solution_has_no_residual(name):
    """Fields in place of the networks; Burgers' equation has no right side of its own."""
    problem = least_squares.PROBLEMS[name].build()
    del problem.fields
    problem.fields = list(problem.exact)
    for residuals in problem.terms():
        assert float(residuals.detach().abs().max()) < 1e-7
    assert problem.error() == 0.0


@pytest.mark.parametrize("name", EQUATIONS)
def test_rows_and_terms_have_one_loss(name):
    """What K-FAC observes, and what the other optimizers differentiate."""
    torch.manual_seed(0)
    problem = least_squares.PROBLEMS[name].build()
    of_rows = 0.5 * problem(problem.arguments).square().mean()
    of_terms = sum(0.5 * r.square().mean() for r in problem.terms())
    torch.testing.assert_close(of_rows, of_terms)


def test_a_run_is_measured():
    record = least_squares.run("bumps", "gauss-newton", 0.0, seed=0, seconds=0.2)
    errors = [error for _, error in record["curve"]]
    # A network that knows nothing has the error 1; how many steps there are is the clock's.
    assert record["error"] == errors[-1] < 1.0
    assert record["steps"] >= len(errors) > 0
