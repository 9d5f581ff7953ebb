"""Feed mutated files to a reader until something comes out that must not.

``python -m conformance_tests.fuzzing checkpoint -runs=1000000`` for files of
estimators, ``record`` for
verification records.  What follows the name goes to libFuzzer.  The corpus below
`conformance_tests/fuzzing/corpus` is read; what is found on the way is kept with it
only under ``--keep``.
"""

from __future__ import annotations

import collections
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import atheris

CORPUS = Path(__file__).parent / "corpus"
SPACE = 1 << 30
"""How many bytes of addresses the process may take beside what it begins with."""
REPORTED_EACH = 100_000
MEASURED_EACH = 16
"""The memory of one in so many files is measured."""

UNSOUND = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)

INSTRUMENTED = {
    "checkpoint": ["kfac_core.checkpoint", "kfac_core.serialization"],
    "record": ["kfac_core_conformance.records"],
}


def main(arguments: list[str]) -> None:
    """Run libFuzzer on one of the readers."""
    if len(arguments) < 2 or arguments[1] not in INSTRUMENTED:
        readers = ",".join(INSTRUMENTED)
        usage = f"python -m conformance_tests.fuzzing {{{readers}}} [-runs=N ...]"
        sys.exit(f"usage: {usage}")
    name, options = arguments[1], arguments[2:]
    keep = "--keep" in options
    options = [option for option in options if option != "--keep"]
    warnings.simplefilter("error")
    with atheris.instrument_imports(include=INSTRUMENTED[name]):
        import kfac_core_conformance.records  # noqa: F401
    from conformance_tests.survival import file_mutation, record_mutation

    forged = {"checkpoint": file_mutation.forged, "record": record_mutation.forged}[
        name
    ]

    folder = Path(tempfile.mkdtemp(prefix="kfac_core-fuzzing-"))
    # libFuzzer leaves the process without a word to Python: another one clears up.
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(os.waitstatus_to_exitcode(status))
    judge = _judge(name, folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPACE, used + SPACE))
    found: collections.Counter[str] = collections.Counter()
    started = time.monotonic()

    def run(data: bytes) -> None:
        found["files"] += 1
        measured = found["files"] % MEASURED_EACH == 0
        found[judge.verdict(data, measured=measured)] += 1
        if found["files"] % REPORTED_EACH == 0:
            _report(found, judge, started)

    def mutate(data: bytes, size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        kind = rng.randrange(16)
        if kind < 8:
            return bytes(atheris.Mutate(data, size))[:size]
        whole = data
        if rng.random() < 0.5:
            whole = judge.seeds[rng.choice(list(judge.seeds))]
        if kind >= 14:
            try:
                return forged(whole, rng)[:size]
            except (*UNSOUND, struct.error):
                pass  # no sound file any more, and so nothing to forge
        return file_mutation.damaged(whole, rng)[:size]

    seeds = folder / "seeds"
    seeds.mkdir()
    for kind, data in judge.seeds.items():
        (seeds / kind.replace(" ", "_")).write_bytes(data)
    kept = CORPUS / name
    work = folder / "found"
    work.mkdir()
    where = [str(kept if keep else work), *([] if keep else [str(kept)]), str(seeds)]
    limits = ["-timeout=20", "-rss_limit_mb=2048", "-max_len=40000", "-len_control=0"]
    prefix = f"-artifact_prefix={os.environ.get('TMPDIR', '/tmp')}/kfac_core-"
    atheris.Setup(
        [arguments[0], *limits, prefix, *options, *where], run, custom_mutator=mutate
    )
    atheris.Fuzz()


def _judge(name: str, folder: Path) -> Any:
    """Return what says whether a reader did right."""
    if name == "checkpoint":
        from conformance_tests.survival.file_verdict import Judge

        return Judge(folder)
    from conformance_tests.survival.record_verdict import RecordJudge

    return RecordJudge(folder)


def _report(found: collections.Counter[str], judge: Any, started: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    counts = ", ".join(f"{number:,} {name}" for name, number in sorted(found.items()))
    seconds = time.monotonic() - started
    print(
        f"{seconds:.0f} s: {counts}; at most {judge.peak / 1e6:.2f} MB for one file; "
        f"{peak} MiB resident",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv)
