"""The programs of pages pass mypy and pyright, and a misspelt name passes neither.

``python docs/check_types.py`` runs both on the README's program and on those of the pages
below, as a user's own file that imports the installed packages.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/index.md",
    *(f"docs/quickstart_{name}.md" for name in ("numpy", "torch", "jax", "keras")),
)
MYPY = ("-m", "mypy", "--config-file", "mypy.ini")
# PyTorch has no types for some of its own functions, such as `Tensor.backward`;
# scikit-learn, Keras and optax have none.
MYPY_CONFIG = """\
[mypy]
strict = True
untyped_calls_exclude = torch
[mypy-sklearn.*]
ignore_missing_imports = True
[mypy-keras.*]
ignore_missing_imports = True
[mypy-optax.*]
ignore_missing_imports = True
"""
PYRIGHT = ("-m", "pyright", "--pythonpath", sys.executable)
# What would be inferred from the code of a library without types is often wrong: Keras's
# `fit` would take only text as `verbose`.
PYRIGHT_CONFIG = '{"useLibraryCodeForTypes": false}\n'

# Each line below the imports has one letter too few, or too many.
MISSPELT = """\
import kfac_core as kc
import torch
from typing import Any
from kfac_core_shims import jax, keras, numpy, sklearn
from kfac_core_shims import torch as on_torch
from kfac_core_shims.torch import trainers

anything: Any = None
net = torch.nn.Linear(2, 2)
from kfac_core_shims.numpy import KFA
from kfac_core_shims.torch import KFA as TorchKFA
from kfac_core_shims.jax import KFA as JaxKFA
from kfac_core_shims.keras import KFA as KerasKFA
kc.Kroneker()
kc.losses.Categoricl()
kc.Dense(in_feature=1, out_features=1, bias=True, weight_layout="io")
kc.Dense(in_features=1, out_features=1, bias=True, weight_layout="oo")
on_torch.KFAC(net, dampling=2)
on_torch.SOAP(net, dampling=2)
on_torch.GaussNewton(net, dampling=2)
on_torch.Posterior(net, [], dampling=2)
trainers.accelerated(anything, net, anything, dampling=2)
trainers.HuggingFaceCallback(dampling=2)
trainers.LightningCallback(dampling=2)
jax.KFAC(anything, reduction="mean", dampling=2)
jax.GaussNewton(anything, dampling=2)
jax.KFACOptimizer(anything, {}, (), likelihood="gaussian", dampling=2)
jax.soap(anything, dampling=2)
keras.KFAC(anything, dampling=2)
numpy.KFAC({}, dampling=2)
numpy.GaussNewton(anything, dampling=2)
sklearn.KFACClassifier(dampling=2)
sklearn.KFACRegressor(dampling=2)
"""
FIRST_MISSPELT = 10


def main() -> int:
    """Run both checkers on everything, and return the number of complaints."""
    complaints = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "mypy.ini").write_text(MYPY_CONFIG, encoding="utf-8")
        (folder / "pyrightconfig.json").write_text(PYRIGHT_CONFIG, encoding="utf-8")
        programs = [_written(page, folder) for page in PAGES]
        for command in (MYPY, PYRIGHT):
            ran = _run(command, folder, *programs)
            if ran.returncode != 0:
                complaints.append(ran.stdout + ran.stderr)
        (folder / "misspelt.py").write_text(MISSPELT, encoding="utf-8")
        lines = range(FIRST_MISSPELT, len(MISSPELT.splitlines()) + 1)
        for command in (MYPY, PYRIGHT):
            shown = _run(command, folder, "misspelt.py").stdout
            seen = {int(n) for n in re.findall(r"misspelt\.py:(\d+):.*error", shown)}
            missed = sorted(set(lines) - seen)
            if missed:
                complaints.append(f"{command[1]} sees no error in lines {missed}")
    print("\n".join(complaints) or f"{len(PAGES)} pages pass mypy and pyright")
    return len(complaints)


def _written(page: str, folder: Path) -> str:
    """Write the Python of a page as one program, and return its name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    name = Path(page).stem.lower() + ".py"
    (folder / name).write_text("\n".join(blocks), encoding="utf-8")
    return name


def _run(
    command: tuple[str, ...], folder: Path, *files: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command, *files],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(min(main(), 1))
