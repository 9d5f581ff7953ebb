"""What the curvature methods share: statistics of sampled targets, and a schedule.

A method is an object with `direction(seen)`, which is to be subtracted.
"""

import kfac_core as kc

DECAY = 0.95
REFRESH_EVERY = 5
# Young averages change quickly, so the first operators live for one step.
WARM_UP = 5


def is_due(step):
    """Say whether factorizations are recomputed in a step; steps count from 0."""
    return step < WARM_UP or step % REFRESH_EVERY == 0


class Estimated:
    """The direction ``P V`` of a `kfac_core.Estimator`.

    Parameters
    ----------
    problem : Problem
        Whose layers have a block each.
    approximation : kfac_core.Approximation
        Of every block.
    damping : float
        Of the block, split between factors as `rule` says.
    coupling : kfac_core.Coupling, optional
        What blocks have in common.
    """

    def __init__(
        self, problem, approximation, *, damping, rule="factored", coupling=None
    ):
        self.steps = 0
        self.estimator = kc.Estimator(
            {n: kc.Block(x, approximation) for n, x in problem.layers.items()},
            decay=DECAY,
            damping=damping,
            damping_rule=rule,
            reduction="sum",
            coupling=coupling,
        )

    @property
    def damping(self):
        """The damping of the next refresh."""
        return self.estimator.damping

    @damping.setter
    def damping(self, damping):
        self.estimator.damping = damping

    def direction(self, seen):
        """Average what a batch shows in, refresh when it is time, and precondition."""
        self.estimator.update(self.rows(seen))
        if self.due(self.steps):
            self.refresh()
        self.steps += 1
        return self.estimator.precondition(seen.gradient)

    def rows(self, seen):
        """Return what the statistics are made of."""
        return seen.of_model()

    def due(self, step):
        """Say whether to refresh."""
        return is_due(step)

    def refresh(self):
        """Make new operators."""
        self.estimator.refresh()
