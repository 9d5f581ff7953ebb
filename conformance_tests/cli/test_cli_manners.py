"""What every command has in common: help, JSON, exit codes, and silence in a pipe.

Each command runs in a process of its own, its streams pipes, as a script would run it,
with the variables set by which some libraries are made to write colors anyway.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.cli import commands, main

from ..builders.layers import dense_layer
from ..builders.programs import run_python
from ..conformance.test_records import path_of

ROOT = Path(__file__).parents[2]
NAMES = tuple(commands())

# Everything that could move a cursor or color a terminal; a line ends with "\n" alone.
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")

OWN = "kfac_core_conformance.own:Own"

# A call of each command that answers, and one that cannot.
GOOD = {
    "demo": ("--quick", "--seconds", "0.1", "--output", "OUT"),
    "doctor": (),
    "verify": ("-v", "RECORD"),
    "inspect": ("CHECKPOINT",),
    "conformance": ("-v", "--adapter", OWN, "--only", "B1", "A4"),
}
BAD = {
    "demo": ("--quick", "--output", "RECORD/nothing"),
    "verify": ("nothing.safetensors",),
    "inspect": ("RECORD",),
    "conformance": ("--adapter", "no_such_module:x"),
}
NEEDS = {"demo": ("sklearn", "matplotlib"), "verify": ("safetensors", "msgspec")}


def run(name, *arguments):
    """Run a command; the doctor finds no library that would only cost time."""
    blocked = ("torch", "jax", "cupy") if name == "doctor" else ()
    program = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "from kfac_core.cli import main\n"
        f"sys.exit(main({[name, *arguments]!r}))\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "KFAC_CORE_BACKEND"}
    return run_python(
        "-c",
        program,
        env=env | {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"},
        timeout=300,
    )


@pytest.fixture(params=NAMES)
def name(request):
    """A command that can run here."""
    for module in NEEDS.get(request.param, ()):
        pytest.importorskip(module)
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The file of a small estimator."""
    layer = dense_layer(3, 2)
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())}, decay=0.9, damping=0.1, reduction="sum"
    )
    estimator.update({"fc": kc.Batch(np.ones((4, 3)), np.ones((4, 2)))})
    path = tmp_path_factory.mktemp("state") / "state.npz"
    kc.save_checkpoint(path, estimator)
    return str(path)


@pytest.fixture
def filled(request, tmp_path):
    """Put paths into the arguments of a call."""

    def fill(arguments):
        words = {"OUT": str(tmp_path), "RECORD": str(path_of("numpy_dense_reduce"))}
        if "CHECKPOINT" in arguments:
            words["CHECKPOINT"] = request.getfixturevalue("checkpoint")
        found = []
        for argument in arguments:
            for word, path in words.items():
                argument = argument.replace(word, path)
            found.append(argument)
        return found

    return fill


def test_a_pipe_gets_text_and_nothing_else(name, filled):
    """No progress, no color, no control character; standard error is empty."""
    done = run(name, *filled(GOOD[name]))

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) >= 2
    assert CONTROL.findall(done.stdout) == []


def test_json_is_one_document_and_nothing_else(name, filled):
    """``--json`` is there for every command, and its numbers are finite."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    done = run(name, *filled(GOOD[name]), "--json")

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert isinstance(json.loads(done.stdout, parse_constant=refuse), dict)


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_errors_are_one_line_and_exit_code_2(name, flags, filled):
    """The line names the command; standard output has no half of an answer."""
    if name == "doctor":
        pytest.skip("it answers, whatever it finds; test_cli.py has its exit codes")

    done = run(name, *filled(BAD[name]), *flags)

    assert done.returncode == 2
    if name == "verify" and flags:
        # The other records are answered: the document says which could not be read.
        assert json.loads(done.stdout)["records"][0]["error"]
        return
    [line] = done.stderr.splitlines()
    assert line.startswith(f"kfac-core {name}: ")
    assert CONTROL.findall(line) == []
    assert "Traceback" not in done.stdout
    assert done.stdout == ""


def test_the_page_has_every_command_option_and_exit_code(capsys):
    """``docs/command_line.md`` says what the help says."""
    page = ROOT / "docs" / "command_line.md"
    if not page.is_file():
        pytest.skip("the documentation is not there")
    text = page.read_text(encoding="utf-8")
    for name, module in commands().items():
        _, _, rest = text.partition(f"\n## {name}\n")
        section = rest.partition("\n## ")[0]
        with pytest.raises(SystemExit):
            main([name, "--help"])
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))
        shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section))
        assert options - {"--help"} <= shown | {"--json"}, name
        assert shown <= options, name
        for code in module.EXIT_CODES:
            assert re.search(rf"^\| {code} \|", section, re.MULTILINE), (name, code)


def test_a_closed_pipe_ends_without_a_traceback():
    """``kfac-core ... | head`` ends without a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kfac_core", "conformance", "--list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    _, errors = process.communicate(timeout=120)

    assert process.returncode == 141
    assert errors == b""


def test_conformance_has_an_exit_code_for_each_end(capsys, tmp_path, monkeypatch):
    """Wrong is 1, nothing to check is 2, a name that there is not is 2."""
    path = tmp_path / "adapters.py"
    path.write_text(
        "import dataclasses\n"
        "from kfac_core_conformance.own import Own\n"
        "class Wrong(Own):\n"
        "    def blocks(self, problem):\n"
        "        return [2 * x for x in super().blocks(problem)]\n"
        "class Raising(Own):\n"
        "    def blocks(self, problem):\n"
        "        raise OSError('out of\\n\\x1b[31mink')\n"
        "class Nothing(Own):\n"
        "    capabilities = dataclasses.replace(Own.capabilities, losses=())\n"
    )

    def ends(name, *options):
        call = ["conformance", "--adapter", f"{path}:{name}", *options]
        code = main(call)
        return code, *capsys.readouterr()

    code, out, err = ends("Wrong", "--only", "B1")
    assert (code, err) == (1, "")
    assert out.count("  1.0e+00  1.0e-10  differs") == 4
    code, out, err = ends("Raising", "--only", "B1", "--json")
    found = json.loads(out)
    assert (code, err, found["exit_code"]) == (1, "", 1)
    assert found["counts"] == {"holds": 0, "differs": 0, "raised": 4, "not offered": 0}
    code, out, err = ends("Raising", "--only", "B1")
    assert CONTROL.findall(out) == []
    code, out, err = ends("Nothing", "--only", "B1")
    assert code == 2
    assert "offers nothing" in err
    code, out, err = ends("Wrong", "--only", "nonsense")
    assert (code, out) == (2, "")
    assert "--list" in err
