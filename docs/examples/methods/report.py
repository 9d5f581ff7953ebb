"""Every number of a comparison, in a form that JSON has."""

import math
import statistics
from importlib import metadata

from methods.catalogue import CLIP, RULE_NAMES
from methods.curvature import DECAY, REFRESH_EVERY, WARM_UP
from methods.search import SEEDS, TUNING_SEED
from methods.training import EVALUATE_EVERY


def settings(seeds=SEEDS):
    """Return what all runs share."""
    return {
        "dtype": "float64",
        "numpy": metadata.version("numpy"),
        "kfac_core": metadata.version("kfac-core"),
        "evaluate_every": EVALUATE_EVERY,
        "refresh_every": REFRESH_EVERY,
        "warm_up": WARM_UP,
        "decay": DECAY,
        "clip": CLIP,
        "tuning_seed": TUNING_SEED,
        "seeds": list(seeds),
    }


def of_problem(problem, results, methods, *, steps):
    """Return one problem's part: its description, and what every method did."""
    train_set, _ = problem.data(TUNING_SEED)
    return {
        "title": problem.title,
        "examples": len(train_set),
        "batch_size": problem.batch_size,
        "steps": steps,
        "targets": list(problem.targets),
        "floor": problem.floor(train_set),
        "held_out_name": problem.held_out_name,
        "methods": {n: of_method(found, problem) for n, found in results.items()},
        "left_out": [m.name for m in methods if m.name not in results],
    }


def of_method(found, problem):
    """Return one method's part; medians are over the seeds that were not tuned on."""
    targets, method = problem.targets, found.method
    best = found.best(targets)
    runs = found.confirmed
    reached = [[run.reached(target) for run in runs] for target in targets]
    return {
        "rule": RULE_NAMES[method.rule],
        "option": method.option,
        "learning_rates": list(method.learning_rates),
        "values": list(method.values),
        "searched": [of_run(run, targets) for run in found.searched],
        "chosen": best.setting,
        "at_edge": at_edge(method, best.setting),
        "reached": [sum(place is not None for place in places) for places in reached],
        "steps_to": [median(places, 0) for places in reached],
        "seconds_to": [median(places, 1) for places in reached],
        "milliseconds_a_step": finite(
            statistics.median(1e3 * r.seconds[-1] / max(r.steps[-1], 1) for r in runs)
        ),
        "held_out": finite(statistics.median(run.held_out for run in runs)),
        "least": finite(statistics.median(run.least for run in runs)),
        "confirmed": [of_run(run, targets) | of_curve(run) for run in runs],
    }


def of_run(run, targets):
    """Return what one run came to."""
    return {
        "setting": run.setting,
        "seed": run.seed,
        "reached": [run.reached(target) for target in targets],
        "made": run.steps[-1],
        "least": finite(run.least),
        "held_out": finite(run.held_out),
        "failure": run.failure,
    }


def of_curve(run):
    """Return what the picture draws of a run."""
    return {
        "steps": run.steps,
        "seconds": run.seconds,
        "losses": [finite(loss) for loss in run.losses],
    }


def at_edge(method, setting):
    """Return the options whose best value is the first or the last of its grid."""
    grids = {"learning_rate": method.learning_rates, method.option: method.values}
    return [
        name for name, grid in grids.items() if setting[name] in (grid[0], grid[-1])
    ]


def median(places, index):
    """Return the median of steps or seconds; None where most runs did not get there."""
    return finite(statistics.median(p[index] if p else math.inf for p in places))


def finite(number):
    """Return a number, or None where it is not finite."""
    return number if math.isfinite(number) else None
