"""The driver of random sequences, for a few seeds; and that it finds a defect."""

from __future__ import annotations

from collections import Counter

import pytest

import kfac_core as kc
from kfac_core.array.structure import replaced
from kfac_core.estimator import Estimator

from ..builders.adapters import WITHOUT_ADAPTERS
from ..sequences import faults
from ..sequences.driver import FindingError, Sequence
from .blocks import batch_of, made
from .size import report, sized


def sequence(backend, folder, seed, **options):
    """Return one sequence."""
    spec = backend.selection
    return Sequence(
        seed=seed,
        spec=spec,
        place=backend.asarray,
        folder=folder,
        counts=options.pop("counts", Counter()),
        **options,
    )


def test_random_sequences_have_no_findings(backend, tmp_path):
    """Every state is saved, loaded, copied and goes on; bad calls change nothing."""
    counts = Counter()
    number = {"jax": 1}.get(backend.name, sized(6, 500))
    for seed in range(number):
        sequence(backend, tmp_path, seed, counts=counts).run()

    assert counts["sequences"] == number
    report(f"\n{counts}")


def test_faults_inside_change_nothing(backend, tmp_path):
    """Whichever inner call is the one that fails."""
    if backend.name == "jax":
        pytest.skip("it takes minutes; run the driver")
    counts = Counter()
    for seed in range(sized(1, 60)):
        sequence(backend, tmp_path, seed, faults=True, length=8, counts=counts).run()

    assert sum(n for name, n in counts.items() if name.startswith("faults")) > 20
    report(f"\n{counts}")


@pytest.mark.parametrize("kind", faults.KINDS)
def test_a_fault_of_each_kind_is_met(backend, tmp_path, kind):
    """The row that must differ: the injected error does come out."""
    if backend.name != "numpy" or WITHOUT_ADAPTERS:
        pytest.skip("the injector is at the calls of NumPy's adapter")
    held = made("kronecker")
    held.update(batch_of("kronecker", 1))

    def save():
        kc.save_checkpoint(tmp_path / "x", held)

    call = save if kind == "files" else held.refresh
    raised = (Exception, KeyboardInterrupt)
    with faults.injected(kind, 1) as fault, pytest.raises(raised, match="injected"):
        call()

    assert fault.met


def test_a_defect_is_found(backend, tmp_path, monkeypatch):
    """An update that counts before it is done is told from one that does not."""
    if backend.name != "numpy":
        pytest.skip("one library is enough for the driver")
    update = Estimator.update

    def careless(self, batches, /, *, check="raise"):
        held = self.state.blocks
        self.state = self.state.updated(
            {name: replaced(b, updates=b.updates + 1) for name, b in held.items()}
        )
        update(self, batches, check=check)

    def run():
        for seed in range(20):
            sequence(backend, tmp_path, seed).run()

    monkeypatch.setattr(Estimator, "update", careless)
    with pytest.raises(FindingError, match="seed"):
        run()
