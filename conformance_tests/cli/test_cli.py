"""The command ``kfac-core``: its doctor, its exit codes and its help."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.backend import OPERATIONS
from kfac_core.cli import commands, main

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
    return subprocess.run(
        [sys.executable, "-c", program],
        env=env if backend is None else env | {VARIABLE: backend},
        capture_output=True,
        text=True,
        timeout=120,
    )


# Without these the answer is quick, and is that of a machine with NumPy alone.
OTHERS = ("torch", "jax", "cupy")


@pytest.fixture(scope="module")
def found():
    """The diagnosis as data, where no library but NumPy can be imported."""
    done = run("doctor", "--all", "--json", blocked=OTHERS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_doctor_says_what_was_found(found):
    """The diagnosis holds versions, the choice and its reason, as JSON."""
    assert found["kfac_core"] == kc.__version__
    assert found["selected"] == {
        "spec": "numpy",
        "reason": "the default",
        "problem": None,
    }
    assert found["backends"]["numpy"]["usable"] is True
    assert found["backends"]["numpy"]["versions"]["numpy"] == np.__version__
    assert found["backends"]["numpy"]["devices"]


@pytest.mark.parametrize("name", OTHERS)
def test_doctor_says_what_is_missing(found, name):
    """A registered backend whose library is missing is listed with what to install."""
    backend = found["backends"][name]

    assert backend["usable"] is False
    assert backend["devices"] == []
    assert name in backend["problem"]
    assert "install" in backend["problem"]


def test_doctor_says_what_is_native(found):
    """Every operation is native, generic or unavailable for every backend."""
    assert set(found["operations"]) == set(OPERATIONS)
    for operation, row in found["operations"].items():
        assert set(row) == set(found["backends"]), operation
        assert set(row.values()) <= {"native", "generic", "unavailable"}, operation
        assert row["numpy"] in ("native", "generic"), operation
        assert row["torch"] == "unavailable", operation


def test_doctor_shows_the_engines_of_several_processes(found):
    """Those that can be used, and what the others need."""
    engines = found["communicators"]

    assert found["communicator"] is None
    assert {"alone", "mpi", "torch"} <= set(engines)
    assert engines["alone"]["usable"] is True
    assert engines["torch"]["usable"] is False
    assert "install torch" in engines["torch"]["problem"]


@pytest.mark.parametrize("every", [True, False], ids=["all", "short"])
def test_doctor_in_words(every):
    """The text says what is chosen, why, and what each backend and operation is."""
    done = run("doctor", *(["--all"] if every else []), blocked=OTHERS)

    assert done.returncode == 0, done.stderr
    assert f"kfac_core {kc.__version__}" in done.stdout
    assert "chosen: numpy (the default)\n  used only when no array" in done.stdout
    assert "In a checkout write `pip install '.[" in done.stdout
    for name in ("numpy", *OTHERS):
        assert name in done.stdout
    assert all((name in done.stdout) == every for name in OPERATIONS)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""


def test_doctor_imports_the_chosen_library_alone():
    """Others are seen to be installed without the seconds that importing them takes."""
    program = (
        "import sys\n"
        "from kfac_core.cli import main\n"
        "main(['doctor', '--json'])\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True
    )

    assert not {"torch", "jax", "cupy"} & set(done.stderr.split())
    found = json.loads(done.stdout)
    assert "operations" not in found
    for name in OTHERS:
        backend = found["backends"][name]
        assert backend["usable"] in (None, False)
        assert (backend["problem"] is None) == (backend["usable"] is None)


def test_doctor_says_where_the_choice_is_from():
    """A variable that names a usable backend is the reason that is given."""
    done = run("doctor", "--json", backend="array_api_strict:device1", blocked=OTHERS)

    assert done.returncode == 0, done.stderr
    selected = json.loads(done.stdout)["selected"]
    assert selected["spec"] == "array_api_strict:device1"
    assert selected["reason"] == f"from {VARIABLE}=array_api_strict:device1"


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


def test_doctor_sees_what_is_installed(requires_backend):
    """With PyTorch there, the doctor shows its version, devices and operations."""
    requires_backend("torch", adapter=True)

    done = run("doctor", "--all", "--json", blocked=("jax",))

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "cpu" in found["backends"]["torch"]["devices"]
    assert found["backends"]["torch"]["adapter"] == "loaded"
    assert found["operations"]["cholesky_inverse"]["torch"] == "native"


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("verify", "kfac_core_conformance.commands.verify"),
        ("conformance", "kfac_core_conformance.commands.conformance"),
        ("demo", "kfac_core_shims._demo"),
    ],
)
def test_other_packages_register_their_commands(name, module):
    """The core has no table of them: the entry-point group names their modules."""
    assert commands()[name].__name__ == module


@pytest.mark.parametrize("missing", ["scipy", "threadpoolctl"])
def test_doctor_says_what_a_missing_fast_path_costs(missing):
    """With the package to install; nothing is said where both are there."""
    pytest.importorskip("scipy")
    pytest.importorskip("threadpoolctl")
    done = run("doctor", blocked=(*OTHERS, missing))

    assert f"slower: without {missing}" in done.stdout.replace("SciPy", "scipy")
    assert f"pip install {missing}" in " ".join(done.stdout.split())
    assert "slower" not in run("doctor", blocked=OTHERS).stdout


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


def test_a_registered_command_does_not_replace_one_of_the_core(monkeypatch):
    """Whatever is installed, ``doctor`` is the doctor."""
    other = Registered("doctor", lambda: None)
    monkeypatch.setattr(
        "kfac_core.cli.entry_points_of", lambda group: {"doctor": other}
    )

    assert commands()["doctor"].__name__ == "kfac_core.cli.doctor"


def test_the_version_is_shown(capsys):
    """``--version`` prints the version of the package."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"kfac-core {kc.__version__}"


def test_alone_it_prints_its_help(capsys):
    """As a newcomer tries it."""
    assert main([]) == 0

    streams = capsys.readouterr()
    assert "usage: kfac-core" in streams.out
    assert all(name in streams.out for name in (*commands(), VARIABLE))
    assert streams.err == ""


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["dcotor"], "doctor"),
        (["doctor", "--jsn"], "--json"),
        (["demo", "--secnods=3"], "--seconds"),
    ],
)
def test_what_is_close_is_suggested(arguments, meant, capsys):
    """The complaint ends with the word that was meant, within 80 columns."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    written = capsys.readouterr().err
    assert " ".join(written.split()).endswith(f"; did you mean {meant!r}?")
    assert max(map(len, written.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments",
    [["cure"], ["doctor", "--nonsense"]],
    ids=["name", "option"],
)
def test_a_wrong_call_is_exit_code_2(arguments, capsys):
    """A command or an option that there is not is exit code 2, said on stderr."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    streams = capsys.readouterr()
    assert caught.value.code == 2
    assert "usage: kfac-core" in streams.err
    assert "did you mean" not in streams.err
    assert streams.out == ""
