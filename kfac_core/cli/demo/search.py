"""The choice of learning rates: the same effort for every method.

Each method is run for *all* of its steps with each learning rate of its grid, and the
run that reaches the least training loss is the one that is reported.  The grids have
one size and one ratio, two; that of K-FAC ends at one, the whole way to the minimum of
its quadratic model.  Nothing else is searched: momenta, decays and the first damping
are fixed where the methods are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kfac_core.cli.demo.training import METHODS, Problem, Run, train

__all__ = ["GRIDS", "QUICK_GRIDS", "Search", "search"]

GRIDS: dict[str, tuple[float, ...]] = {
    "SGD": (0.01, 0.02, 0.04, 0.08, 0.16),
    "Adam": (0.001, 0.002, 0.004, 0.008, 0.016),
    "K-FAC": (0.0625, 0.125, 0.25, 0.5, 1.0),
}

# Every other learning rate: the same ends, in three runs.
QUICK_GRIDS = {method: rates[::2] for method, rates in GRIDS.items()}


@dataclass(frozen=True)
class Search:
    """Every run of every method.

    Attributes
    ----------
    runs : dict
        For each method its runs, in the order of its grid.
    """

    runs: dict[str, list[Run]]

    def best(self, method: str, /) -> Run:
        """Return the run of a method that reached the least training loss."""
        return min(self.runs[method], key=lambda run: run.losses[run.best])

    @property
    def target(self) -> float:
        """Adam's best training loss, which the table counts steps and seconds to."""
        adam = self.best("Adam")
        return adam.losses[adam.best]


def search(
    problem: Problem,
    /,
    *,
    grids: dict[str, tuple[float, ...]],
    begin: Callable[[str, float], None] = lambda method, rate: None,
    advance: Callable[[int], None] = lambda steps: None,
) -> Search:
    """Run every method with every learning rate of its grid.

    Parameters
    ----------
    problem : Problem
        What is trained on.
    grids : dict
        The learning rates of each method.
    begin : callable
        Told the method and the learning rate of each run that begins.
    advance : callable
        Told how many more steps were made.

    Returns
    -------
    Search
        The runs.
    """
    runs: dict[str, list[Run]] = {method: [] for method in METHODS}
    for method in METHODS:
        for rate in grids[method]:
            begin(method, rate)
            run = train(method, problem, learning_rate=rate, advance=advance)
            runs[method].append(run)
    return Search(runs)
