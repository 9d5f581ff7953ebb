"""The cost model against formulas written out by hand, and the command that prints it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.distributed import Distributed, run_ranks

from ..builders.benchmark_folder import import_benchmarks
from ..builders.shards import dense

pytest.importorskip("kfac_core_backends")
import_benchmarks()

from benchmarks.plan.__main__ import main  # noqa: E402
from benchmarks.plan.exchanges import predicted_traffic  # noqa: E402
from benchmarks.plan.model import (  # noqa: E402
    Machine,
    known_networks,
    network_of,
    predicted_steps,
    read_shapes,
)
from benchmarks.simulated import counted_messages, summary  # noqa: E402

PLAIN = Machine(
    flops=1e9, node=4, near=(1e-6, 1e9), far=(1e-5, 1e8), base=1e-4, bytes=4
)


@pytest.mark.parametrize(
    ("ranks", "stride", "hops", "rate"),
    [
        (4, 1, 3e-6, 1e9),  # within a node
        (2, 2, 1e-6, 1e9),
        (8, 1, 6e-6 + 1e-5, 1e8),  # two nodes: one hop between them
        (4, 4, 3e-5, 1e8),  # one rank of each of four nodes
    ],
)
def test_a_gather_takes_hops_and_bytes(ranks, stride, hops, rate):
    """The latency of each hop, and all parts but the own over the slowest link."""
    expected = 1e-4 + hops + (ranks - 1) / ranks * 4000 / rate

    assert math.isclose(PLAIN.gather(1000, ranks, stride), expected)
    assert PLAIN.gather(1000, 1) == 0.0


def test_a_predicted_step_is_the_sum_of_its_parts(tmp_path):
    """One layer of 3 x 2 on two ranks, by hand."""
    file = tmp_path / "net.json"
    layers = [{"name": "fc", "inputs": 3, "outputs": 2, "rows": 5}]
    file.write_text(json.dumps({"name": "one", "layers": layers}))

    alone = predicted_steps(
        read_shapes(str(file)).network(),
        1,
        rows={"fc": 5},
        machine=PLAIN,
        examples=7,
        interval=10,
    )[0]
    owner, everybody = predicted_steps(
        read_shapes(str(file)).network(),
        2,
        rows={"fc": 5},
        machine=PLAIN,
        examples=7,
        interval=10,
    )

    assert math.isclose(alone.seconds["statistics"], 7 * 5 * 13 / 0.85 / 1e9)
    assert alone.seconds["reduce"] == alone.seconds["directions"] == 0.0
    # Triangles of 6 and 3, two weights, two numbers of rows, the positions and theirs;
    # both ranks send as long messages, of which one is padding.
    gather = 1e-4 + 1e-6 + 0.5 * 2 * 4 * 15 / 1e9
    assert math.isclose(owner.seconds["reduce"], gather / 10)
    assert math.isclose(owner.seconds["directions"], 1e-4 + 1e-6 + 0.5 * 2 * 24 / 1e9)
    assert owner.seconds["operators"] == everybody.seconds["directions"] == 0.0
    operators = 1e-4 + 1e-6 + 0.5 * 2 * 4 * 18 / 1e9
    assert math.isclose(everybody.seconds["operators"], operators / 10)
    # A vote has the weights of three averages, and 35 more; in float64.
    vote = PLAIN.all_reduce(2 * (3 + 3 + 32), 2)
    assert math.isclose(owner.seconds["votes"], vote)
    assert owner.busiest == owner.sent == 4 * 6 + 4 * 15 / 10
    # Squares of two sums, two inverses and their factors; and those of a batch.
    assert everybody.memory == 4 * (2 * 15 + 2 * 18)
    assert everybody.peak == everybody.memory + 2 * 2 * 4 * 18 + 4 * 2 * 2 * 15
    assert owner.total == sum(owner.seconds.values())


@pytest.mark.parametrize("size", [7, 64, 1024])
@pytest.mark.parametrize("reduce", ["refresh", "owner"])
def test_messages_of_many_ranks_are_as_predicted(size, reduce):
    """One rank's program among partners that count; no rank sends or holds much more.

    The last of seven ranks multiplies with rows of the largest inverse.
    """
    sizes = [(3, 40), (40, 40), (200, 17), (200, 300)]
    network = kc.Network(
        {
            f"fc{k}": kc.Block(dense(n, m, bias=False), kc.Kronecker())
            for k, (n, m) in enumerate(sizes)
        },
        conventions=kc.Conventions(reduction="sum", sources="sum"),
    )

    counted, predicted, placement = counted_messages(network, size, reduce=reduce)

    assert counted == predicted
    workers = placement.workers["fc3"]
    assert (size == 7) == (workers[-1] == size - 1)
    numbers = summary(counted, placement)
    assert numbers["busiest"] <= 3 * numbers["mean"]
    # Triangles in float32, and six numbers of each block.
    triangles = sum(n * (n + 1) // 2 + m * (m + 1) // 2 for n, m in sizes)
    rows = 300 * 300 + len(workers) * (200 * 200 + 1)
    assert numbers["buffer"] == 4 * max(triangles + 3 * 6, rows)
    assert numbers["seconds"] <= 2 * numbers["ring"]


def test_bases_that_owners_lend_are_as_predicted():
    """At each update as matrices, to all ranks; kept by the owner of each block alone."""
    shapes = {"a": (6, 4), "b": (4, 9), "c": (9, 9)}
    blocks = {name: kc.Block(dense(*s), kc.EKFAC()) for name, s in shapes.items()}
    blocks["d"] = kc.Block(dense(5, 7), kc.Kronecker())
    rng = np.random.default_rng(0)
    rows = {n: rng.normal(size=(2, 8, 9)) for n in blocks}

    def run(communicator):
        options = Distributed(
            communicator=communicator, holders=1, reduce="owner", bucket_bytes=700
        )
        made = kc.Estimator(blocks, reduction="sum", execution=options)
        batches = {}
        for name, block in blocks.items():
            layer = block.layer
            x, g = rows[name]
            x, g = x[:, : layer.in_features], g[:, : layer.out_features]
            batches[name] = kc.Batch(x, g)
        made.update(batches)
        made.rebase(moments="kronecker")
        communicator.traffic.reset()
        made.update(batches)
        predicted = predicted_traffic(
            *(made.network, options, made.placement),
            rank=communicator.rank,
            like=np.zeros(1),
        )
        return communicator.traffic, predicted["update"]

    for counted, predicted in run_ranks(3, run):
        assert counted.calls == predicted.calls
        assert counted.payload == predicted.payload
    network = kc.Network(
        {f"{k}": blocks["c"] for k in range(48)},
        conventions=kc.Conventions(reduction="sum", sources="sum"),
    )
    alone, *_, divided = (
        predicted_steps(network, p, machine=PLAIN, reduce="owner")[0] for p in (1, 2, 8)
    )
    assert divided.memory == alone.memory / 8


def test_the_networks_have_their_numbers_of_parameters():
    """As published: 25.5, 302 (without embeddings) and 6.98 billion in linear layers."""
    sizes = {
        name: sum(n * m for _, n, m, _ in read_shapes(name).layers)
        for name in known_networks()
    }

    assert sizes["resnet50"] == 25_503_912
    assert sizes["bert_large"] == 24 * (4 * 1025 * 1024 + 1025 * 4096 + 4097 * 1024) + (
        1025 * 1024
    )
    assert sizes["llama8b"] == 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        '{"name": "x", "layers": []}',
        '{"name": "x", "layers": [{"name": "a", "inputs": 0, "outputs": 2}]}',
        '{"name": "x", "layers": [{"name": "a"}]}',
        '{"name": "x", "layers": [{"name": "a", "inputs": 4.5, "outputs": 2}]}',
        '{"name": "x", "layers": [{"name": "a", "inputs": true, "outputs": 2}]}',
        '{"name": "x", "layers": [{"name": "a", "inputs": 1e30, "outputs": 2}]}',
        '{"name": "x", "layers": [5]}',
        "[1]",
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, text):
    """With what was expected, and what is known."""
    file = tmp_path / "net.json"
    file.write_text(text)

    with pytest.raises(kc.RecordError, match="bert_large, llama8b, resnet50"):
        read_shapes(str(file))


def test_the_plan_of_a_program(tmp_path):
    """An estimator that a program makes; what has no blocks is refused."""
    program = tmp_path / "program.py"
    program.write_text(
        "import kfac_core as kc\n"
        "layer = kc.Dense(in_features=3, out_features=2, bias=False, "
        "weight_layout='io')\n"
        "def make():\n"
        "    return kc.Estimator({'fc': kc.Block(layer, kc.Kronecker())}, "
        "reduction='sum')\n"
    )

    name, network, rows = network_of(f"{program}:make")

    assert name == "make"
    assert network.blocks["fc"].layer.matrix_shape == (3, 2)
    assert rows == {}
    assert main([f"{program}:make", "--ranks", "2", "--rows", "5"]) == 0
    assert main([f"{program}:nothing"]) == 2
    assert main([f"{program}:layer"]) == 2
    assert main([]) == 2
    assert main(["--measure", "alone"]) == 0
