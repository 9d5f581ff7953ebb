"""What a loaded estimator does is what the saved one does, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import leaves

from ..builders.adapters import WITHOUT_ADAPTERS
from ..builders.states import differences, frozen
from .blocks import CASES, batch_of, gradient_of, made

FACTORIZATIONS = ((), ("inverse",), ("cholesky",), ("eigenbasis", "cholesky"))
PRODUCTS = {
    "multiply": (),
    "multiply_inverse": (),
    "multiply_cholesky": (),
    "multiply_matpower": (-0.5,),
}


@pytest.fixture(autouse=True)
def only_numpy(backend):
    if backend.name != "numpy":
        pytest.skip("the driver of sequences has the other libraries")


def trained(case, **options):
    """Return an estimator whose statistics came in both ways."""
    held = made(case, **options)
    for seed in range(2):
        held.update(batch_of(case, seed))
    if case not in ("chain", "kfoc"):
        block = held.blocks["a"]
        parts = kc.batch_moments(
            block, batch_of(case, 3)["a"], conventions=held.conventions
        )
        held.absorb({"a": parts})
    if any(block.approximation.has_bases for block in held.blocks.values()):
        held.rebase(moments="kronecker")
    return held


def answers(held, case):
    """Return each product, or the class of the library's error."""
    found = {}
    vectors = gradient_of(case)
    if case == "chain":
        return frozen(held.precondition(vectors))
    for product, options in PRODUCTS.items():
        try:
            found[product] = frozen(held.apply(product, vectors, *options))
        except kc.KFACError as error:
            found[product] = type(error).__name__
    return found


@pytest.mark.parametrize("factorizations", FACTORIZATIONS, ids="-".join)
@pytest.mark.parametrize("case", CASES)
def test_products_of_a_loaded_state(tmp_path, case, factorizations):
    """Also those that need a factorization that was not prepared."""
    refreshing = kc.Refreshing(factorizations=factorizations)
    held = trained(case, refreshing=refreshing)
    held.refresh()
    kc.save_checkpoint(tmp_path / "state", held)
    other = made(case, refreshing=refreshing)
    kc.load_checkpoint(tmp_path / "state", other)

    assert answers(other, case) == answers(held, case)
    held.refresh()
    other.refresh()
    states = [frozen(e.state_dict()) for e in (held, other)]
    assert differences(*states) == []


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
