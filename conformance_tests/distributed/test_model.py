"""The cost model against formulas written out by hand, and the command that prints it."""

from __future__ import annotations

import json
import math

import pytest

import kfac_core as kc
from kfac_core.cli import main
from kfac_core.distributed.model import (
    MACHINES,
    Machine,
    known_networks,
    predicted_steps,
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
        read_shapes(str(file)), 1, machine=PLAIN, examples=7, interval=10
    )[0]
    owner, everybody = predicted_steps(
        read_shapes(str(file)), 2, machine=PLAIN, examples=7, interval=10
    )

    assert math.isclose(alone.seconds["statistics"], 7 * 5 * 13 / 0.85 / 1e9)
    assert alone.seconds["reduce"] == alone.seconds["directions"] == 0.0
    # Triangles of 6 and 3, two weights, the positions and their weight.
    gather = 1e-4 + 1e-6 + 0.5 * 4 * 13 / 1e9
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


@pytest.mark.parametrize("ranks", [1, 6, 64])
def test_more_holders_compute_more_and_send_less(ranks):
    """Products take longer, and directions fewer bytes, with the number of holders."""
    steps = predicted_steps(
        read_shapes("resnet50"), ranks, machine=MACHINES["h100"], examples=32
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

    assert main(["plan", "resnet50", "--ranks", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["plan", "resnet50", "--ranks", "2", "4", "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert main(["plan", str(tmp_path / "none.json")]) == 2

    assert [step["holders"] for step in found["steps"]] == [1, 2, 4]
    assert text.count("  *\n") == 2
    assert picture.stat().st_size > 1000
