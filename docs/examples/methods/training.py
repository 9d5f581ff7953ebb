"""One run of one method, and what is recorded of it.

Every run of a seed starts at the same parameters and sees the same batches.  The loss
over all training examples is evaluated every few steps, off the clock; a run ends where
it is at the last target, or after the last step.  The clock counts the processor's
seconds of this process, so that a busy machine does not change them much.
"""

import math
import time
from dataclasses import dataclass, field

import numpy as np

import kfac_core as kc
from kfac_core.steps import linear_combination
from methods.data import batches, stream
from methods.problem import mean_loss
from methods.seen import Seen

EVALUATE_EVERY = 2


@dataclass
class Run:
    """What happened in one run.

    `steps`, `seconds` and `losses` are of the evaluations, the first of them before the
    first step; `failure` is the error that ended the run, if one did.
    """

    method: str
    setting: dict[str, float]
    seed: int
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_out: float = math.nan
    failure: str | None = None

    @property
    def least(self):
        """The least loss."""
        return min((x for x in self.losses if math.isfinite(x)), default=math.inf)

    def reached(self, target):
        """Return (steps, seconds) of the first evaluation at a target or below."""
        for steps, seconds, loss in zip(
            self.steps, self.seconds, self.losses, strict=True
        ):
            if loss <= target:
                return steps, seconds
        return None


def train(problem, method, setting, *, seed, steps):
    """Train to the last target, or for a number of steps; return the `Run`."""
    train_set, held_out = problem.data(seed)
    parameters, noise = problem.start(seed), stream(seed, "targets")
    optimizer, rule = method.made(problem, setting)
    run, clock = Run(method.name, setting, seed), 0.0
    indices = batches(
        seed, n_examples=len(train_set), batch_size=problem.batch_size, steps=steps
    )
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _record(run, problem, parameters, train_set, steps=0, seconds=0.0)
        for made, index in enumerate(indices, start=1):
            batch = train_set.chosen(index)
            begun = time.process_time()
            try:
                seen = Seen(problem, parameters, batch, noise)
                change = rule.change(seen, optimizer, optimizer.direction(seen))
                parameters = linear_combination([1.0, 1.0], [parameters, change])
            except kc.KFACError as error:
                # What is not finite is refused by name.
                run.failure = f"{type(error).__name__}: {error}"
            clock += time.process_time() - begun
            if made % EVALUATE_EVERY == 0 or made == steps or run.failure:
                _record(run, problem, parameters, train_set, steps=made, seconds=clock)
                if run.failure or _is_over(run.losses[-1], problem.targets[-1]):
                    break
        _, logits = problem.forward(parameters, held_out.inputs)
        run.held_out = problem.held_out(logits, held_out.targets)
    return run


def _is_over(loss, target):
    return loss <= target or not math.isfinite(loss)


def _record(run, problem, parameters, examples, *, steps, seconds):
    run.steps.append(steps)
    run.seconds.append(seconds)
    run.losses.append(mean_loss(problem, parameters, examples))
