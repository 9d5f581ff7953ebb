"""The budget: every method runs all of its grid on one seed, and its best on others.

The best setting is the one that reaches the last target in the fewest steps; where none
does, the first target; where none does that either, the one with the least loss.
"""

import math
from dataclasses import dataclass, field

from methods.training import Run, train

TUNING_SEED = 0
SEEDS = (1, 2, 3)


@dataclass
class Found:
    """What is known of one method on one problem: its runs, those of the search first."""

    method: object
    searched: list[Run] = field(default_factory=list)
    confirmed: list[Run] = field(default_factory=list)

    def best(self, targets):
        """Return the run of the search that is best."""
        return min(self.searched, key=lambda run: rank(run, targets))


def rank(run, targets):
    """Return what runs are compared by, the less the better."""
    steps = [(run.reached(t) or (math.inf, math.inf))[0] for t in reversed(targets)]
    return (*steps, run.least)


def search(problem, methods, *, steps, seeds=SEEDS, every=1, tell=lambda text: None):
    """Run every method that fits a problem; return {name: `Found`}.

    Parameters
    ----------
    problem : Problem
        What is trained on.
    methods : sequence of Method
        From the catalogue.
    steps : int
        The most that a run may make.
    seeds : sequence of int
        Of the runs with the best setting.
    every : int
        1 for the whole grid, or 2 for every other setting of it, and so on.
    tell : callable
        Told what is being run.
    """
    results = {}
    for method in methods:
        if not method.fits(problem):
            continue
        found = results[method.name] = Found(method)
        tell(f"{problem.name}: {method.name}")
        for setting in method.settings()[::every]:
            run = train(problem, method, setting, seed=TUNING_SEED, steps=steps)
            found.searched.append(run)
        best = found.best(problem.targets).setting
        for seed in seeds:
            run = train(problem, method, best, seed=seed, steps=steps)
            found.confirmed.append(run)
    return results
