"""
Check your own K-FAC
====================

Write what your implementation computed in one training step to a file, and ``kfac-core
verify`` recomputes it. If one of the common defects explains a difference, a line says
which.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import kfac_core as kc
from kfac_core_conformance.records import RecordWriter

rng = np.random.default_rng(0)
inputs, output_grads = rng.normal(size=(64, 4)), rng.normal(size=(64, 3))

# %%
# The answers of your library: here, of three lines of NumPy. One of them has the most
# common defect.

A = inputs.T @ inputs / 64
G = output_grads.T @ output_grads / 64
A_wrong = A / 64  # the mean over examples, taken twice

layer = kc.Dense(in_features=4, out_features=3, bias=False, weight_layout="io")
writer = RecordWriter(
    {"fc1": kc.Block(layer, kc.Kronecker())},
    decay=0.9,
    damping=0.1,
    damping_rule="factored",
    loss="sum",
    producer="my_library 1.2",
)
writer.update({"fc1": kc.Batch(inputs, output_grads)})
writer.check("fc1", "factor", factor="input", expected=A_wrong)
writer.check("fc1", "factor", factor="output", expected=G)

# %%
# The verdict names the factor and the reason.

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "step.safetensors"
    writer.save(path)
    command = [sys.executable, "-m", "kfac_core", "verify", str(path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
print(answer.stdout)
assert answer.returncode == 1
assert "1/64" in answer.stdout
