#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.2.9"]
# ///
"""Every check of the project, one session each.

`nox -l` lists them. What follows `--` goes to the program that a session runs:
`nox -s tests -- -n auto -k kronecker`.

Sessions that install PyTorch use pip and `constraints/torch-cpu.txt`: uv does not read
pip's configuration, and so may take a CUDA build where pip finds a CPU build.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent.resolve()
# A module is compiled once, not once in every process of the tests.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
# As many processes as there are cores; a later `-n` among the arguments wins.
PARALLEL = ["-n", "auto", "--dist", "worksteal"]
# PyTorch has 2,000 modules, of which a session imports a few: Python compiles these itself.
TORCH_CPU = ["-c", "constraints/torch-cpu.txt", "--no-compile"]
# Libraries that two examples stand below, without what these have for CUDA and vision.
CONSUMERS = [
    "laplace-torch==0.3",
    "curvlinops-for-pytorch==3.0.1",
    "backpack-for-pytorch",
    "unfoldNd",
    "einconv",
    "linear_operator",
    "asdfghjkl==0.1a4",
    "torchmetrics",
    "lightning-utilities",
]

# The way from rows to products, inside of compiled programs and outside, and the answers
# of other libraries.  What these do not run on JAX every day runs every night.
JAX_TESTS = [
    "conformance_tests/approximations/test_contract.py",
    "conformance_tests/array/test_smoke.py",
    "conformance_tests/conformance/test_records.py",
    "conformance_tests/distributed/test_traced.py",
    "conformance_tests/estimator/test_network_jit.py",
    "conformance_tests/estimator/test_network_state.py",
    "conformance_tests/estimator/test_tracing_jax.py",
    "conformance_tests/influence/test_influence.py",
    "conformance_tests/linalg/test_fallback.py",
    "conformance_tests/linalg/test_gram.py",
    "conformance_tests/losses/test_estimation_modes.py",
    "conformance_tests/posterior/test_posterior.py",
    "conformance_tests/roots",
    "conformance_tests/samples",
    "conformance_tests/steps/test_steps_tracing.py",
]

# Kernels of OpenBLAS for processors of 64-bit Intel and AMD, newest first.  Each adds in
# an order of its own.
KERNELS = ["SkylakeX", "Haswell", "Zen", "Nehalem"]
# Options with which XLA compiles sooner what is slower; it ends the process for one that
# its version does not know.
QUICK_XLA = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
]
XLA_PROBE = "import jax; jax.numpy.ones(2) + 1"
# Prints the kernels that NumPy's BLAS computes with.
KERNEL_PROBE = """
import numpy
import threadpoolctl
numpy.ones((64, 64)) @ numpy.ones((64, 64))
print(*[pool.get("architecture") for pool in threadpoolctl.threadpool_info()])
"""

# The versions of Python that are supported; those that are not installed are passed over.
PYTHONS = nox.project.python_versions(PYPROJECT)

# Prints the backends that have a GPU here, and what they are, as one line of JSON.
GPU_PROBE = """
import json
found = {}
try:
    import cupy
    if cupy.is_available():
        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        found["cupy"] = f"cupy {cupy.__version__}, {name}"
except ImportError:
    pass
try:
    import torch
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        found["torch:cuda"] = f"torch {torch.__version__}, {name}"
except ImportError:
    pass
try:
    import jax
    name = jax.devices("gpu")[0].device_kind
    found["jax:gpu"] = f"jax {jax.__version__}, {name}"
except (ImportError, RuntimeError):
    pass
print(json.dumps(found))
"""


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group of `pyproject.toml`."""
    requirements: list[str] = nox.project.dependency_groups(PYPROJECT, name)
    return requirements


def install(
    session: nox.Session, extras: str, *needed: str, torch: bool = False
) -> None:
    """Install the project in place, with extras and what its tests need."""
    requirements = ["-e", f".[{extras}]", *group("test"), *needed]
    session.install(*requirements, *(TORCH_CPU if torch else []))


def run_tests(
    session: nox.Session, *arguments: str, env: dict[str, str] | None = None
) -> None:
    """Run tests on all cores; what follows `--` comes last."""
    session.run("pytest", *arguments, *PARALLEL, *session.posargs, env=env)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the conformance tests on NumPy and array-api-strict."""
    install(session, "scipy")
    run_tests(session)


@nox.session(name="tests-torch", venv_backend="virtualenv")
def tests_torch(session: nox.Session) -> None:
    """Run the conformance tests on PyTorch, on the CPU; `--thorough` twice."""
    install(session, "scipy,torch", torch=True)
    run_on_torch(session)


def run_on_torch(session: nox.Session) -> None:
    """Run the tests of `tests-torch` in the session's environment."""
    run_tests(session, "--backend=torch")
    if "--thorough" in session.posargs:
        # On one thread PyTorch leaves its refreshes to NumPy; the others see it compute.
        # What is compiled is never left to NumPy.
        chosen = "(estimator or refresh or stack or shim) and not tracing"
        on_host = {"KFAC_CORE_TEST_TORCH_ON_HOST": "1"}
        run_tests(session, "--backend=torch", "-k", chosen, env=on_host)


@nox.session(name="tests-jax")
def tests_jax(session: nox.Session) -> None:
    """Run the tests of what JAX compiles, on the CPU; `--thorough` runs all tests."""
    install(session, "scipy,jax")
    run_on_jax(session)


def run_on_jax(session: nox.Session) -> None:
    """Run the tests of `tests-jax` in the session's environment."""
    requested = ("--thorough", "conformance_tests")
    chosen = any(argument.startswith(requested) for argument in session.posargs)
    paths = [] if chosen else JAX_TESTS
    run_tests(session, "--backend=jax", *paths, env=quick_to_compile(session))


def quick_to_compile(session: nox.Session) -> dict[str, str]:
    """Return the environment in which JAX compiles least."""
    # What one process has compiled the others need not compile again.
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(Path(session.create_tmp()).resolve() / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    if "--thorough" not in session.posargs:
        # Most of what is compiled runs once, on arrays of a few numbers.
        environment["XLA_FLAGS"] = quick_xla(session)
    return environment


def quick_xla(session: nox.Session) -> str:
    """Return those of `QUICK_XLA` that the session's XLA knows."""
    known: list[str] = []
    for option in QUICK_XLA:
        flags = " ".join([*known, option])
        probed = session.run(
            "python",
            "-c",
            XLA_PROBE,
            env={"XLA_FLAGS": flags},
            silent=True,
            success_codes=range(-64, 256),
        )
        if "Unknown flag" not in str(probed):
            known.append(option)
    return " ".join(known)


FRAMEWORKS = "scipy,torch,flax,keras,sklearn"
TRACED = ["equinox", "dm-haiku"]  # whose modules are found in JAX's traces


@nox.session(name="tests-shims", venv_backend="virtualenv")
def tests_shims(session: nox.Session) -> None:
    """Run the tests of the shims, with every framework that they feed from."""
    install(session, FRAMEWORKS, *TRACED, torch=True)
    run_shims(session)


def run_shims(session: nox.Session) -> None:
    """Run the tests of `tests-shims` in the session's environment."""
    # The documentation's pages that need a framework are run here too; integrations
    # without one, and the other pages, are run by `tests`.
    paths = [
        "conformance_tests/shims",
        "--ignore=conformance_tests/shims/test_numpy.py",
        "--ignore=conformance_tests/shims/test_sklearn.py",
        PAGE_TESTS,
        "conformance_tests/documentation/test_gallery.py",
        "conformance_tests/documentation/test_readme.py",
    ]
    environment = quick_to_compile(session)
    environment["KFAC_CORE_TEST_PAGES"] = "frameworks"
    run_tests(session, *paths, env=environment)
    if "--thorough" in session.posargs:
        keras = "conformance_tests/shims/test_keras.py"
        on_jax = {"KERAS_BACKEND": "jax", "XLA_FLAGS": quick_xla(session)}
        run_tests(session, keras, env=on_jax)


@nox.session(venv_backend="virtualenv")
def loops(session: nox.Session) -> None:
    """Run PyTorch's training loops, and Lightning, accelerate and Hugging Face."""
    trainers = ["accelerate", "lightning", "peft", "transformers>=5"]
    install(session, "scipy,torch,sklearn", *trainers, torch=True)
    folder = ROOT / "docs" / "examples" / "loops"
    for path in sorted(folder.glob("*.py")):
        session.run("python", str(path), env={"HF_HUB_OFFLINE": "1"})
    tests = [
        "conformance_tests/shims/test_torch_libraries.py",
        "conformance_tests/shims/test_trainers.py",
        PAGE_TESTS,
    ]
    chosen = ["-k", "libraries or trainers"]
    session.run("pytest", "--backend=numpy", *tests, *chosen, *session.posargs)


PROCESSES = "conformance_tests/distributed/test_processes.py"
PAGE_TESTS = "conformance_tests/documentation/test_documentation.py"


@nox.session(name="tests-distributed", venv_backend="virtualenv")
def tests_distributed(session: nox.Session) -> None:
    """Run the tests of several processes, and the examples: gloo, MPI, JAX's devices.

    With `--thorough` the examples with more processes too, and trainers of others.
    """
    trainers = ["accelerate", "lightning"] if "--thorough" in session.posargs else []
    install(session, "torch,mpi,jax", "mpich", *trainers, torch=True)
    run_processes(session)


def run_processes(session: nox.Session) -> None:
    """Run the tests of `tests-distributed` in the session's environment."""
    environment = quick_to_compile(session)
    environment["KFAC_CORE_TEST_PROCESSES"] = "torch,mpi,jax"
    session.run(
        "pytest", "--backend=numpy", PROCESSES, *session.posargs, env=environment
    )


@nox.session(venv_backend="virtualenv")
def frameworks(session: nox.Session) -> None:
    """Run tests-torch, -jax, -shims and -distributed in one environment."""
    install(session, f"{FRAMEWORKS},mpi", *TRACED, "mpich", torch=True)
    failed: list[str] = []
    for run in (run_on_torch, run_on_jax, run_shims, run_processes):
        session.log(run.__doc__)
        try:
            run(session)
        except nox.command.CommandFailed:
            failed.append(run.__name__)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(name="tests-openmpi", venv_backend="virtualenv")
def tests_openmpi(session: nox.Session) -> None:
    """Run those of MPI with Open MPI, which reports a rank that is gone."""
    install(session, "mpi", "openmpi")
    environment = {"KFAC_CORE_TEST_PROCESSES": "mpi"}
    session.run(
        "pytest", "--backend=numpy", PROCESSES, *session.posargs, env=environment
    )


@nox.session(name="no-backends", venv_backend="virtualenv")
def no_backends(session: nox.Session) -> None:
    """Run the tests without any backend file: the generic path; `--thorough` on PyTorch."""
    thorough = "--thorough" in session.posargs
    install(session, "scipy,torch" if thorough else "scipy", torch=thorough)
    backend = "--backend=numpy,torch" if thorough else "--backend=numpy"
    run_tests(session, backend, env={"KFAC_CORE_TEST_NO_BACKENDS": "1"})


@nox.session(venv_backend="virtualenv", venv_params=["--system-site-packages"])
def gpu(session: nox.Session) -> None:
    """Run the conformance tests on every installed library that finds a GPU.

    The libraries are those of the interpreter; nothing that knows of CUDA is
    installed. With `nox -s gpu --no-venv` nothing is installed at all, and the tests
    run in the environment of nox.
    """
    if session.virtualenv.venv_backend != "none":
        install(session, "scipy")
    output = session.run("python", "-c", GPU_PROBE, silent=True)
    if not isinstance(output, str):  # under --install-only nothing was run
        return
    found: dict[str, str] = json.loads(output.splitlines()[-1])
    if not found:
        session.error("neither CuPy, PyTorch nor JAX finds a GPU in this interpreter")
    for backend, description in found.items():
        session.log(f"{backend}: {description}")
    backends = ",".join(found)
    session.run("python", "-m", "pytest", f"--backend={backends}", *session.posargs)


@nox.session(name="third-party", venv_backend="virtualenv")
def third_party(session: nox.Session) -> None:
    """Run the conformance tests on the documentation's own backend, dpnp (3 GB)."""
    install(session, "scipy", "./docs/examples/third_party_backend[cpu]")
    driver = Path(session.virtualenv.location).resolve() / "lib" / "libintelocl.so"
    run_tests(session, "--backend=dpnp", env={"OCL_ICD_FILENAMES": str(driver)})


@nox.session(venv_backend="virtualenv")
def consumers(session: nox.Session) -> None:
    """Compare what is below laplace-torch and curvlinops with these libraries."""
    install(session, "scipy,torch", torch=True)
    session.install("einops", "jaxtyping", "opt_einsum", "packaging", "tqdm")
    session.install("--no-deps", *CONSUMERS)
    session.run(
        "pytest",
        "--backend=numpy",
        "conformance_tests/shims/test_consumers.py",
        "conformance_tests/conformance/test_curvlinops_beside.py",
        f"{PAGE_TESTS}::test_the_examples_of_a_page_run[docs/consumers.md]",
        *session.posargs,
        env={"KFAC_CORE_TEST_CONSUMERS": "1"},
    )


@nox.session(name="cupy-signatures")
def cupy_signatures(session: nox.Session) -> None:
    """Bind every call of the CuPy backend to CuPy's signatures; needs no GPU."""
    install(session, "scipy,cupy-cuda12")
    session.run(
        "pytest", "conformance_tests/array/test_cupy_signatures.py", *session.posargs
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check the format, the lint rules and the numpydoc form of docstrings."""
    session.install(*group("lint"))
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", *session.posargs, ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the packages with mypy."""
    session.install("-e", ".", *group("types"))
    session.run("mypy", *session.posargs)


@nox.session(name="types-of-pages", venv_backend="virtualenv")
def types_of_pages(session: nox.Session) -> None:
    """Check the README's and quick starts' programs as a user's, by mypy and pyright."""
    frameworks = ".[scipy,torch,flax,keras,sklearn]"
    session.install(frameworks, "mypy>=2.4,<3", "pyright[nodejs]", *TORCH_CPU)
    session.run("python", "docs/check_types.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning or a broken reference is an error."""
    session.install("-e", ".[records,scipy]", *group("docs"))
    session.run("python", "docs/words.py")
    strict = ["-nTW", "--keep-going", "-j", "auto", "-b", "html"]
    session.run("sphinx-build", *strict, "docs", "docs/_build/html", *session.posargs)
    session.run("python", "docs/links.py", "docs/_build/html")


@nox.session(venv_backend="virtualenv")
def gallery(session: nox.Session) -> None:
    """Run the programs of the gallery, and draw the pictures of their pages."""
    session.install("-e", ".[torch,demo,records]", *TORCH_CPU)
    session.run("python", "docs/draw_gallery.py", *session.posargs)


@nox.session(venv_backend="virtualenv")
def tables(session: nox.Session) -> None:
    """Recompute the tables of pages, and compare them; `-- --check --quick` is short."""
    session.install(
        "-e", ".[demo,records,torch,sklearn]", "transformers>=5", *TORCH_CPU
    )
    session.run("python", "docs/tables.py", *(session.posargs or ["--check"]))


@nox.session
def screens(session: nox.Session) -> None:
    """Look at the built pages in Chromium, where it is installed: pictures, overflow."""
    docs(session)
    session.run(
        "python", "docs/screenshots.py", "docs/_build/html", "docs/_build/screens"
    )


def build(session: nox.Session) -> dict[str, Path]:
    """Build wheel and sdist into an empty folder; return them by suffix."""
    session.install("build", "twine")
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder)
    folder.mkdir()
    session.run("python", "-m", "build", "--outdir", str(folder / "dist"), silent=True)
    return {path.suffix: path for path in sorted((folder / "dist").glob("*"))}


def empty_environment(session: nox.Session, folder: Path) -> str:
    """Make an environment with nothing in it; return its Python."""
    session.run("python", "-m", "venv", str(folder))
    scripts = "Scripts" if sys.platform == "win32" else "bin"
    return str(folder / scripts / "python")


@nox.session
def package(session: nox.Session) -> None:
    """Build wheel and sdist, check them, and use each in an empty environment."""
    built = build(session)
    session.run("python", "-m", "twine", "check", "--strict", *map(str, built.values()))
    program = ROOT / "conformance_tests" / "builders" / "installed.py"
    for suffix, path in built.items():
        folder = path.parents[1] / suffix.removeprefix(".")
        python = empty_environment(session, folder)
        session.run(python, "-m", "pip", "install", "-q", str(path), external=True)
        with session.chdir(folder):
            session.run(python, "-I", str(program), external=True)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build, install the wheel by itself, and test it away from the source."""
    built = build(session)
    if not built:  # under --install-only nothing was run
        return
    folder = built[".whl"].parents[1]
    python = empty_environment(session, folder / "env")
    requirement = f"kfac-core[scipy] @ {built['.whl'].as_uri()}"
    session.run(
        python, "-m", "pip", "install", "-q", requirement, *group("test"), external=True
    )

    # The tests come from the sdist, less the packages: only the wheel can answer.
    shutil.unpack_archive(built[".gz"], folder, filter="data")
    source = folder / built[".gz"].name.removesuffix(".tar.gz")
    for name in ("kfac_core", "backends", "shims"):
        shutil.rmtree(source / name)
    shutil.rmtree(source / "conformance_tests" / "kfac_core_conformance")
    with session.chdir(source):
        session.run(python, "-m", "pytest", *session.posargs, external=True)


@nox.session
def release(session: nox.Session) -> None:
    """Build, check and test wheel and sdist, and write what is new into `dist/`."""
    version = PYPROJECT["project"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = version if f"\n## [{version}]" in changes else "Unreleased"
    if section != version:
        session.warn(f"CHANGELOG.md has no section [{version}]: taking [{section}]")
    _, _, after = changes.partition(f"\n## [{section}]")
    notes = after.partition("\n")[2].partition("\n## ")[0].strip()
    package(session)
    wheel(session)
    target = ROOT / "dist"
    shutil.copytree(Path(session.create_tmp()) / "dist", target, dirs_exist_ok=True)
    (target / f"notes-{version}.md").write_text(notes + "\n", encoding="utf-8")


@nox.session
def robustness(session: nox.Session) -> None:
    """Run the long, hostile and unlucky runs at their full size: about half an hour."""
    install(session, "scipy")
    command = ["pytest", "--backend=numpy", "-s", "conformance_tests/survival"]
    session.run(*command, *session.posargs, env={"KFAC_CORE_SURVIVAL": "full"})


@nox.session(venv_backend="virtualenv")
def sequences(session: nox.Session) -> None:
    """Run random sequences of calls; `-- --backend=torch --seconds=600 --faults`."""
    backend = next((b for b in ("torch", "jax") if b in " ".join(session.posargs)), "")
    extras = f"scipy,{backend}" if backend else "scipy"
    install(session, extras, torch=backend == "torch")
    session.run("python", "-m", "conformance_tests.sequences", *session.posargs)


@nox.session(venv_backend="uv", python=PYTHONS[0])
@nox.parametrize("backend", ["numpy", "torch", "jax"])
def lowest(session: nox.Session, backend: str) -> None:
    """Run the tests on the lowest version of every bound, on the oldest Python."""
    extra = "scipy" if backend == "numpy" else f"scipy,{backend}"
    lowest_of_each = ["--resolution", "lowest-direct", "--torch-backend", "cpu"]
    install(session, extra, *lowest_of_each)
    # The checks of the first scikit-learn that is supported ask SciPy for it.
    run_tests(session, f"--backend={backend}", env={"SCIPY_ARRAY_API": "1"})


@nox.session(venv_backend="uv|virtualenv", python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """Run the tests on NumPy with each supported Python that is installed."""
    install(session, "scipy")
    run_tests(session)


@nox.session(venv_backend="virtualenv")
def precision(session: nox.Session) -> None:
    """Compare products with references of 120 digits; print right, refused and wrong."""
    install(session, "scipy,torch,jax", torch=True)
    names = session.posargs or ("numpy", "torch", "jax")
    env = {"XLA_FLAGS": quick_xla(session)}
    session.run("python", "-m", "conformance_tests.precision", *names, env=env)


@nox.session
def kernels(session: nox.Session) -> None:
    """Run the tests on NumPy with each of OpenBLAS's kernels, on one and two threads."""
    install(session, "scipy")
    runs = [(kernel, threads) for kernel in KERNELS for threads in (1, 2)]
    run_with_kernels(session, runs)
    # NumPy warns of infinities by what kernels compute; BLAS, called directly, does not.
    runs = [(kernel, 1) for kernel in KERNELS]
    run_with_kernels(session, runs, env={"KFAC_CORE_TEST_NO_BACKENDS": "1"})


def kernels_of(session: nox.Session, env: dict[str, str] | None = None) -> list[str]:
    """Return the kernels of a process's NumPy; none where the processor lacks them."""
    # Without the instructions the probe ends by a signal.
    probed = session.run(
        "python",
        "-c",
        KERNEL_PROBE,
        env=env,
        silent=True,
        success_codes=range(-64, 256),
    )
    return probed.split() if isinstance(probed, str) else []


def run_with_kernels(
    session: nox.Session,
    runs: list[tuple[str, int]],
    env: dict[str, str] | None = None,
) -> None:
    """Run tests for each pair of a kernel and a number of threads that works here."""
    found = 0
    for kernel, threads in runs:
        environment = {
            "OPENBLAS_CORETYPE": kernel,
            "OPENBLAS_NUM_THREADS": str(threads),
            **(env or {}),
        }
        # A library without the kernels takes others.
        if kernel not in kernels_of(session, environment):
            session.log(f"left out: {kernel}, which NumPy's BLAS does not have here")
            continue
        found += 1
        session.log(f"{kernel}, threads of BLAS: {threads}")
        # Processes that each have threads of BLAS take the processors from each other.
        parallel = PARALLEL if threads == 1 else []
        command = "pytest", "--backend=numpy", *parallel, *session.posargs
        session.run(*command, env=environment)
    if not found:
        session.skip("NumPy's BLAS has none of these kernels here")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Feed mutated files to both readers, and random arguments: ten minutes each."""
    session.install("-e", ".[scipy,records]", "atheris==3.0.0", "numpy")
    runs = session.posargs or ["-max_total_time=600"]
    for reader in ("checkpoint", "record"):
        session.run("python", "-m", "conformance_tests.fuzzing", reader, *runs)
    session.run("python", "-m", "conformance_tests.fuzzing.arguments", "--seconds=600")


@nox.session(venv_backend="virtualenv")
def bench(session: nox.Session) -> None:
    """Time the library beside others and the machine's floor; nothing else should run."""
    session.install(
        "-e", ".[scipy,torch,jax]", "-r", "benchmarks/requirements.txt", *TORCH_CPU
    )
    session.run("python", "-m", "benchmarks", "--threads", "1", "2", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demonstration; KFAC_CORE_BACKEND chooses an installed backend."""
    session.install("-e", ".[demo]")
    session.run("python", "-m", "kfac_core", "demo", *session.posargs)


if __name__ == "__main__":
    nox.main()
