"""The cost model against formulas written out by hand, and the command that prints it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc
from conformance_tests.builders.shards import (
    batch_of,
    every_block,
    gradients_of,
    shard,
)
from kfac_core.distributed import Distributed, run_ranks
from kfac_core.distributed.placement import divisors

from ..builders.benchmark_folder import import_benchmarks

import_benchmarks()

from benchmarks.plan.__main__ import main  # noqa: E402
from benchmarks.plan.exchanges import predicted_traffic  # noqa: E402
from benchmarks.plan.model import (  # noqa: E402
    MACHINES,
    Machine,
    chosen_step,
    known_networks,
    measured_machine,
    network_of,
    predicted_steps,
    read_machine,
    read_shapes,
)

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


def test_an_all_reduce_is_a_ring_or_a_tree():
    """Large messages go around, small ones up and down."""
    ring = 1e-4 + 2 * (6e-6 + 1e-5) + 2 * 7 / 8 * 4e9 / 1e8
    tree = 1e-4 + 2 * 3 * 1e-5 + 2 * 4 / 1e8

    assert math.isclose(PLAIN.all_reduce(1e9, 8), ring)
    assert math.isclose(PLAIN.all_reduce(1, 8), min(tree, 1e-4 + 3.2e-5 + 7e-8))


def test_a_step_is_what_its_parts_are(tmp_path):
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
    # Triangles of 6 and 3, two weights, two numbers of rows, the positions and theirs.
    gather = 1e-4 + 1e-6 + 0.5 * 4 * 15 / 1e9
    vote = PLAIN.all_reduce(4, 2)
    assert math.isclose(owner.seconds["reduce"], vote + gather / 10)
    assert math.isclose(owner.seconds["directions"], 1e-4 + 1e-6 + 0.5 * 24 / 1e9)
    assert owner.seconds["operators"] == everybody.seconds["directions"] == 0.0
    operators = 1e-4 + 1e-6 + 0.5 * 4 * 18 / 1e9
    assert math.isclose(everybody.seconds["operators"], operators / 10)
    assert owner.total == sum(owner.seconds.values())


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


@pytest.mark.parametrize("name", known_networks())
def test_the_default_sends_little_and_is_near_the_quickest(name):
    """A fifth of averaging at each update; within 5% of the least predicted time."""
    network = read_shapes(name).network()
    shapes = [block.layer.matrix_shape for block in network.blocks.values()]
    for ranks, machine in itertools.product((2, 3, 8, 16), MACHINES.values()):
        steps = predicted_steps(network, ranks, machine=machine, interval=10)
        chosen = chosen_step(steps)

        numbers = sum(n * n + m * m for n, m in shapes) * (2 + 1 / 10)
        assert math.isclose(chosen.averaged, 4 * (ranks - 1) / ranks * numbers)
        assert chosen.sent <= 0.2 * chosen.averaged
        lean = [step.total for step in steps if step.sent <= 0.2 * step.averaged]
        assert chosen.total <= 1.05 * min(lean)


@pytest.mark.parametrize("ranks", [1, 6, 64])
def test_more_holders_compute_more_and_send_less(ranks):
    """Products take longer, and directions fewer bytes, with the number of holders."""
    steps = predicted_steps(
        read_shapes("resnet50").network(), ranks, machine=MACHINES["h100"], examples=32
    )

    applied = [step.seconds["apply"] for step in steps]
    kept = [step.memory for step in steps]
    assert applied == sorted(applied)
    assert kept == sorted(kept)
    assert steps[-1].seconds["directions"] == 0.0


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


def test_the_command_prints_and_draws(tmp_path, capsys):
    """The plan as JSON, as tables, and as a picture."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"

    assert main(["resnet50", "--ranks", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["resnet50", "--ranks", "2", "4", "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert main([str(tmp_path / "none.json")]) == 2
    no_picture = str(tmp_path / "plan.nothing")
    assert main(["resnet50", "--ranks", "2", "--plot", no_picture]) == 2
    assert "plan.nothing" in capsys.readouterr().err

    assert [step["holders"] for step in found["steps"]] == [1, 2, 4]
    assert len(re.findall(r"^  \d \* ", text, re.MULTILINE)) == 2
    assert picture.stat().st_size > 1000


def test_the_command_names_owners_and_what_has_no_room(capsys):
    """A block too large for a rank, by its name; other numbers of ranks are printed."""
    assert main(["resnet50", "--ranks", "2", "--owners"]) == 0
    text = capsys.readouterr().out
    network = read_shapes("resnet50").network()
    chosen = chosen_step(predicted_steps(network, 2, machine=MACHINES["h100"]))
    assert str(chosen.placement) in text

    assert main(["llama8b", "--ranks", "1", "64", "--memory", "9"]) == 0
    text = capsys.readouterr().out
    assert "64 ranks; imbalance" in text
    assert "1 ranks: Block " in text
    assert "numbers on its owner" in text
    assert main(["llama8b", "--ranks", "64", "--memory", "1"]) == 2
    assert "needs room for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reduce", "size", "wire"),
    [
        *(("refresh", size, None) for size in (2, 3, 4, 8, 16)),
        ("update", 3, None),
        ("refresh", 6, "float32"),
        ("update", 2, "float32"),
    ],
)
def test_calls_and_bytes_are_those_that_were_predicted(reduce, size, wire):
    """Of an update, a refresh and a step, on each rank and for each number of holders."""
    rng = np.random.default_rng(size)
    blocks = {
        name: block
        for name, block in every_block().items()
        if block.approximation.reduction == "sum"
    }
    batches = {
        name: shard(_HOST, batch_of(rng, block, 4), 0, 4)
        for name, block in blocks.items()
    }
    gradients = gradients_of(_HOST, rng, blocks)

    def run(communicator):
        for holders in divisors(size)[:: 2 if size > 4 else 1]:
            options = Distributed(
                communicator=communicator,
                holders=holders,
                reduce=reduce,
                bucket_bytes=1000,
                like=np.zeros(1),
                statistics_dtype=wire,
                operators_dtype=wire,
                directions_dtype=wire,
            )
            estimator = kc.Estimator(
                blocks, reduction="sum", damping=0.3, execution=options
            )
            expected = predicted_traffic(
                estimator.network,
                options,
                estimator.placement,
                rank=communicator.rank,
                like=np.zeros(1),
            )
            stages = {
                "update": functools.partial(estimator.update, batches),
                "refresh": estimator.refresh,
                "precondition": functools.partial(estimator.precondition, gradients),
            }
            estimator.update(batches)
            estimator.rebase(moments="kronecker")
            for stage in stages.values():
                stage()
            for name, stage in stages.items():
                communicator.traffic.reset()
                stage()
                found = communicator.traffic
                assert found.calls == expected[name].calls, (name, holders)
                assert found.payload == expected[name].payload, (name, holders)
                total = sum(run_total(communicator, found.total))
                assert math.isclose(
                    total, sum(run_total(communicator, expected[name].total))
                )

    def run_total(communicator, sent):
        flat = np.asarray([sent])
        return communicator.all_gather(flat, [1] * size).wait().tolist()

    run_ranks(size, run)


def test_narrow_directions_are_half_the_bytes(capsys):
    """In the plan and in the choice: what else is sent stays as it is."""
    network = read_shapes("resnet50").network()
    options = {"machine": MACHINES["gloo"], "interval": 10}
    plain, narrow = (
        predicted_steps(network, 4, dtypes={"directions": dtype}, **options)
        for dtype in (None, "bfloat16")
    )

    weights = sum(math.prod(b.layer.matrix_shape) for b in network.blocks.values())
    for one, other in zip(plain, narrow, strict=True):
        rows = 4 // one.holders
        saved = 2 * weights * (rows - 1) / rows
        assert math.isclose(one.sent - other.sent, saved, abs_tol=1e-3)
        assert one.averaged == other.averaged
        assert other.seconds["directions"] <= one.seconds["directions"]
    assert main(["resnet50", "--directions", "bfloat16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["steps"]
    assert main(["resnet50", "--json"]) == 0
    plain_steps = json.loads(capsys.readouterr().out)["steps"]
    assert found[1]["bytes_sent"] < plain_steps[1]["bytes_sent"]


def test_constants_are_measured_and_read(tmp_path):
    """All ranks have the same; a file of them is a machine; others are refused."""
    first, second = run_ranks(2, lambda c: measured_machine(c, repeats=1))
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(dataclasses.asdict(first)))

    assert first == second == read_machine(str(file))
    numbers = first.flops, first.near[1], first.gather(1, 2), first.all_reduce(1, 2)
    assert min(numbers) > 0
    with pytest.raises(kc.RecordError, match="h100, gloo, mpi"):
        read_machine(str(tmp_path / "none.json"))
    file.write_text('{"flops": 0}')
    with pytest.raises(kc.RecordError, match="no file of a machine"):
        read_machine(str(file))


def test_two_processes_measure_this_machine(tmp_path):
    """`--machine` reads the constants that one of two processes of torchrun prints."""
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    measure = ["-m", "benchmarks.plan", "--measure", "torch", "--json"]
    root = Path(__file__).parents[2]
    completed = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *measure],
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert completed.returncode == 0, completed.stderr
    (tmp_path / "here.json").write_text(completed.stdout)
    assert read_machine(str(tmp_path / "here.json")).flops > 0


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


@pytest.mark.parametrize(
    "text",
    ["raise SystemExit(3)", "import nothing_of_this_name", "def f(): return 1 / 0"],
    ids=["exit", "import", "call"],
)
def test_a_program_that_raises_is_a_complaint(tmp_path, capsys, text):
    """It was a traceback, with exit code 1."""
    program = tmp_path / "program.py"
    program.write_text(f"{text}\n")

    assert main([f"{program}:f"]) == 2

    complaint = capsys.readouterr().err
    assert complaint.startswith("kfac-core plan:")
    assert "cannot be made" in complaint


class _HOST:
    asarray = staticmethod(np.asarray)
