"""``python docs/examples/methods``: run the comparison."""

import os
import sys
from pathlib import Path

# NumPy and SciPy each bring a BLAS with threads of its own, and seconds are those of all
# threads together.  To be said before either is imported.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from methods.command import main  # noqa: E402

sys.exit(main())
