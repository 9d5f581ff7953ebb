"""The command: search, print the tables, write the numbers and the picture."""

import argparse
import json
import sys
from pathlib import Path

from methods import figure, report
from methods.autoencoder import Autoencoder
from methods.catalogue import METHODS
from methods.classifier import Classifier
from methods.search import SEEDS, search
from methods.table import budget, table

PROBLEMS = Autoencoder, Classifier
# Two settings of each grid, one seed, few steps: enough to see that everything runs.
QUICK = {"every": 6, "seeds": SEEDS[:1]}
QUICK_PART = 10


def main(arguments=None):
    """Run the comparison; return the exit status."""
    options = parser().parse_args(arguments)
    if options.read:
        result = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        result = compared(options)
    for part in result["problems"].values():
        print(f"\n{budget(part)}\n\n{table(part)}")
    if options.json:
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if options.figure:
        figure.draw(result, options.figure)
    return 0


def parser():
    """Return the parser of the options."""
    options = argparse.ArgumentParser(prog="python docs/examples/methods")
    options.add_argument("--quick", action="store_true", help="few steps, two settings")
    options.add_argument(
        "--problem", choices=[p.name for p in PROBLEMS], help="one of the two"
    )
    options.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        choices=[m.name for m in METHODS],
        help="some of the methods",
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write every number")
    options.add_argument("--figure", type=Path, metavar="FILE", help="draw the picture")
    options.add_argument(
        "--read", type=Path, metavar="FILE", help="run nothing; show an earlier --json"
    )
    return options


def compared(options):
    """Run what the options say; return everything that came out."""
    methods = [m for m in METHODS if m.name in (options.methods or [m.name])]
    plan = QUICK if options.quick else {"every": 1, "seeds": SEEDS}
    result = {"settings": report.settings(plan["seeds"]), "problems": {}}
    for kind in PROBLEMS:
        problem = kind()
        if options.problem in (None, problem.name):
            steps = problem.steps // (QUICK_PART if options.quick else 1)
            results = search(problem, methods, steps=steps, tell=tell, **plan)
            part = report.of_problem(problem, results, methods, steps=steps)
            result["problems"][problem.name] = part
    return result


def tell(text):
    """Say on the terminal what is being run."""
    print(text, file=sys.stderr, flush=True)
