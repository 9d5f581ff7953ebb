"""Records of a real library's answers for recurrent chains."""

import json
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.approximations.series import Series

from ..builders.one_block import learn, operator_for
from ..builders.tolerances import relative_error

safe_open = pytest.importorskip("safetensors").safe_open
FOLDER = Path(__file__).parents[1] / "records"
RECORDS = sorted(path.stem for path in FOLDER.glob("tfkfac_series_*.safetensors"))


def read(name):
    with safe_open(FOLDER / f"{name}.safetensors", "np") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()["kfac_core_record"]), tensors


def fed(backend, document, tensors, name):
    """Return a block of a record, its statistics and its operator."""
    fields = dict(document["blocks"][name]["layer"])
    assert fields.pop("kind") == "dense"
    variant = document["blocks"][name]["approximation"]["variant"]
    x = tensors[f"update.0.{name}.inputs"]
    g = tensors[f"update.0.{name}.output_grads"]
    steps = {"steps": x.shape[1]} if variant == "symmetric" else {}
    block = kc.Block(kc.Dense(**fields), Series(variant=variant, **steps))
    batch = kc.Batch(backend.asarray(x), backend.asarray(g), sources=g.shape[0])
    statistics = learn(block, batch, decay=0.95)
    operator = operator_for(
        block, statistics, damping=document["damping"], rule=document["damping_rule"]
    )
    return block, statistics, operator


def answer(backend, check, block, statistics, operator, vector):
    """Return what the library says to one check, on the host."""
    op = check["op"]
    if op == "factor":
        value = statistics.averages[check["factor"]].value(debias=True)
        return backend.to_numpy(value.full() if hasattr(value, "full") else value)
    if op == "damping_split":
        return np.array([float(operator.input.shift), float(operator.output.shift)])
    if op == "to_dense":
        return backend.to_numpy(operator.to_dense(damped=check.get("damped", False)))
    if vector is None:
        return backend.to_numpy(getattr(operator, op)())
    arguments = [check["exp"]] if "exp" in check else []
    options = {key: check[key] for key in ("transpose", "damped") if key in check}
    V = block.parameters_to_matrix({k: backend.asarray(v) for k, v in vector.items()})
    return backend.to_numpy(getattr(operator, op)(V, *arguments, **options))


def parts(tensors, prefix):
    start = f"{prefix}."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


@pytest.mark.parametrize("name", RECORDS)
def test_every_answer_of_the_record_is_reproduced(backend, name):
    """TensorFlow's K-FAC where it is right, and the dense reference where it is not."""
    document, tensors = read(name)
    made = {b: fed(backend, document, tensors, b) for b in document["blocks"]}

    for check in document["checks"]:
        block, statistics, operator = made[check["block"]]
        vector = (
            parts(tensors, f"vector.{check['vector']}") if "vector" in check else None
        )
        got = answer(backend, check, block, statistics, operator, vector)
        expected = tensors.get(f"expected.{check['expected']}")
        if expected is None:
            host = parts(tensors, f"expected.{check['expected']}")
            expected = np.vstack([np.atleast_2d(host[k]) for k in sorted(host)[::-1]])
        limit = check.get("rtol", 1e-10)
        assert relative_error(got, expected) <= limit, check


def test_there_are_records_of_both_variants():
    """The loop above has something to loop over."""
    assert sum("symmetric" in name for name in RECORDS) >= 5
    assert sum("infinite" in name for name in RECORDS) >= 3
