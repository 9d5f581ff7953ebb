"""``python -m benchmarks`` is ``kfac-core bench``."""

import argparse
import sys

from benchmarks.command import main
from kfac_core.cli import ended
from kfac_core.cli.bench import add_arguments

parser = argparse.ArgumentParser(
    prog="python -m benchmarks",
    description="Time the library beside others and the machine's roofline.",
)
add_arguments(parser)
sys.exit(ended("bench", main, parser.parse_args()))
