"""The command ``kfac-core``: its doctor, its exit codes and its help."""

from __future__ import annotations

import json
import os

import pytest

from kfac_core.cli import commands, main

from ..builders.programs import run_python

VARIABLE = "KFAC_CORE_BACKEND"


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    """Start without any choice of a backend."""
    monkeypatch.delenv(VARIABLE, raising=False)


def run(*arguments, backend=None, blocked=()):
    """Run the command in a process of its own, with some packages not importable."""
    program = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "from kfac_core.cli import main\n"
        f"sys.exit(main({list(arguments)!r}))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return run_python(
        "-c",
        program,
        env=env if backend is None else env | {VARIABLE: backend},
        timeout=120,
    )


# Without these the answer is quick, and is that of a machine with NumPy alone.
OTHERS = ("torch", "jax", "cupy")


def test_doctor_imports_only_the_chosen_library():
    """Others are seen to be installed without the seconds that importing them takes."""
    program = (
        "import sys\n"
        "from kfac_core.cli import main\n"
        "main(['doctor', '--json'])\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = run_python("-c", program, env=env)

    assert not {"torch", "jax", "cupy"} & set(done.stderr.split())
    found = json.loads(done.stdout)
    assert "operations" not in found
    for name in OTHERS:
        backend = found["backends"][name]
        assert backend["usable"] in (None, False)
        assert (backend["problem"] is None) == (backend["usable"] is None)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("nonsense", "Unknown backend 'nonsense'"),
        ("torch", "'torch'"),
        ("array_api_strict:device9", "device9"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_doctor_fails_where_nothing_usable_is_chosen(spec, match, flags):
    """A variable with an unusable backend is exit code 2 and one clear line."""
    done = run("doctor", *flags, backend=spec, blocked=OTHERS)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    if flags:
        problem = json.loads(done.stdout)["selected"]["problem"]
    else:
        [problem] = [li for li in done.stdout.splitlines() if li.startswith("chosen:")]
    assert match in problem


class Registered:
    """An entry point of another distribution."""

    value = "another_package.command"

    def __init__(self, name, load):
        self.name, self.load = name, load


def test_a_broken_command_does_not_take_the_others_with_it(capsys, monkeypatch):
    """It is listed, and running it says in one line why it cannot be loaded."""

    def load():
        raise ModuleNotFoundError("No module named 'another_package'")

    broken = Registered("broken", load)
    monkeypatch.setattr(
        "kfac_core.cli.entry_points_of", lambda group: {"broken": broken}
    )

    assert "doctor" in commands()
    assert main(["broken", "--any", "argument"]) == 2

    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kfac-core broken: its module another_package.command")
    assert "No module named" in line


@pytest.mark.parametrize("arguments", [["dcotor"], ["doctor", "--jsn"]])
def test_a_wrong_call_is_exit_code_2(arguments, capsys):
    """The message has the wrong word; standard output stays empty."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    out, written = capsys.readouterr()
    assert out == ""
    assert "usage: kfac-core" in written
    assert arguments[-1] in written
