"""What an installation without the source tree must do: run by `nox -s package`."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import kfac_core as kc

PACKAGES = (
    "kfac_core",
    "kfac_core_backends",
    "kfac_core_conformance",
    "kfac_core_shims",
)


def main() -> None:
    """Use the core, look for its files, and run its command."""
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        assert found is not None, package
        assert found.origin is not None, package
        assert "site-packages" in found.origin, found.origin
        assert (Path(found.origin).parent / "py.typed").is_file(), package
    for folder in ("benchmarks", "conformance_tests", "docs"):
        assert importlib.util.find_spec(folder) is None, folder

    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(32, 3)), rng.normal(size=(32, 2))
    layer = kc.Dense(in_features=3, out_features=2, bias=False, weight_layout="io")
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())},
        reduction="sum",
        damping=0.1,
        damping_rule="exact",
    )
    estimator.update({"fc": kc.Batch(x, g)})
    estimator.refresh()
    found = estimator.precondition({"fc": {"weight": x.T @ g}})["fc"]["weight"]
    F = np.kron(x.T @ x / 32, g.T @ g / 32) + 0.1 * np.eye(6)
    expected = np.linalg.solve(F, (x.T @ g).ravel()).reshape(3, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-10)

    metadata = importlib.metadata.metadata("kfac-core")
    description = metadata.get_payload()
    assert re.search("K-FAC", description)
    assert not re.findall(r"\]\((?!https?://|#)", description)
    assert metadata.get_all("Project-URL") is None

    for arguments in ([], ["--version"], ["doctor"], ["conformance", "--list"]):
        command = [sys.executable, "-I", "-m", "kfac_core", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shown = subprocess.run(
        [sys.executable, "-I", "-m", "kfac_core"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "bench" not in shown.stdout
    print(f"kfac-core {kc.__version__} works in {sys.prefix}")


if __name__ == "__main__":
    main()
