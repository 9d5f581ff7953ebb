"""``python -m benchmarks``: times beside other libraries and the machine's roofline."""

import argparse
import sys

from benchmarks.command import add_arguments, main
from kfac_core.cli import ended

parser = argparse.ArgumentParser(
    prog="python -m benchmarks",
    description="Time the library beside others and the machine's roofline.",
)
add_arguments(parser)
sys.exit(ended("bench", main, parser.parse_args()))
