"""What a loaded estimator does is what the saved one does, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import leaves

from ..builders.adapters import WITHOUT_ADAPTERS
from .blocks import CASES, batch_of, made


@pytest.fixture(autouse=True)
def only_numpy(backend):
    if backend.name != "numpy":
        pytest.skip("the driver of sequences has the other libraries")


def trained(case, **options):
    """Return an estimator whose statistics came in both ways."""
    held = made(case, **options)
    for seed in range(2):
        held.update(batch_of(case, seed))
    if case != "chain":
        block = held.blocks["a"]
        parts = kc.batch_moments(
            block, batch_of(case, 3)["a"], conventions=held.conventions
        )
        held.absorb({"a": parts})
    if any(block.approximation.has_bases for block in held.blocks.values()):
        held.rebase(moments="kronecker")
    return held


@pytest.mark.parametrize("case", CASES)
def test_a_state_holds_arrays_and_no_scalars(case):
    """NumPy rounds powers of its scalars and of 0-d arrays differently."""
    held = trained(case)
    held.refresh()

    for name, block in held.state.blocks.items():
        for part in (block.statistics, block.operator):
            kinds = {path: type(x) for path, x in leaves(part)}
            scalars = [p for p, kind in kinds.items() if issubclass(kind, np.generic)]
            assert scalars == [], name


@pytest.mark.skipif(
    WITHOUT_ADAPTERS, reason="only an adapter knows that flags are read"
)
def test_a_first_refresh_that_fails_by_status_installs_nothing(tmp_path):
    """So that the state can be saved, and the next refresh does it."""
    held = made("kronecker", damping=0.0)
    batch = batch_of("kronecker", 1)["a"]
    held.update({"a": kc.Batch(batch.inputs * 0.0, batch.output_grads * 0.0)})
    held.refresh(check="status")

    assert held.state["a"].operator is None
    assert held.state["a"].status != 0
    kc.save_checkpoint(tmp_path / "state", held)
    other = made("kronecker")
    kc.load_checkpoint(tmp_path / "state", other)
    other.damping = 1.0
    other.refresh(check="status")
    assert other.state["a"].operator is not None
