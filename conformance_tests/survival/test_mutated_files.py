"""Damaged and forged files: an error, the state that was saved, or a sound one.

The full number is that of ``python -m conformance_tests.fuzzing``, which lets coverage
guide it; its corpus is read here too.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from . import file_mutation, record_mutation
from .container import opened, sealed
from .file_verdict import Judge
from .record_verdict import RecordJudge

CORPUS = Path(__file__).parents[1] / "fuzzing" / "corpus"
FILES = 150


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return Judge(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return RecordJudge(tmp_path_factory.mktemp("records"))


def verdicts(judge, mutate):
    """Return what came of reading mutated files, each from a seed of its own."""
    found = set()
    for seed in range(FILES):
        rng = random.Random(seed)
        data = mutate(judge.seeds[rng.choice(list(judge.seeds))], rng)
        found.add(judge.verdict(data, measured=seed % 8 == 0))
    return found


def test_a_file_that_was_not_touched_is_as_saved(judge):
    """Of each kind of block; and put together again it says the same."""
    for kind, data in judge.seeds.items():
        assert judge.verdict(data) == "as saved", kind
        assert judge.verdict(sealed(opened(data))) in ("as saved", "sound"), kind


@pytest.mark.parametrize("mutate", [file_mutation.damaged, file_mutation.forged])
def test_a_mutated_checkpoint_is_refused_or_sound(judge, mutate):
    """Whatever is damaged and not refused is exactly what was saved."""
    found = verdicts(judge, mutate)

    assert "refused" in found
    if mutate is file_mutation.damaged:
        assert "sound" not in found


@pytest.mark.parametrize("mutate", [file_mutation.damaged, record_mutation.forged])
def test_a_mutated_record_is_refused_or_can_be_checked(records, mutate):
    """A record has no checksum: what is read is what the file says, and can be checked."""
    assert verdicts(records, mutate) == {"refused", "sound"}


def test_the_corpus_is_read_as_it_must_be(records):
    """What the fuzzer found worth keeping, and whatever once went wrong."""
    files = sorted((CORPUS / "record").iterdir())
    assert files
    for file in files:
        records.verdict(file.read_bytes())
