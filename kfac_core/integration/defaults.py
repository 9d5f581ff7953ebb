"""The defaults of all integrations, chosen on the suite of ``benchmarks/tasks``.

Conventions.  Damping and KL clip are in units of the likelihood, as in
`kfac_core.integration.RowLoss`; intervals are numbers of steps.
"""

from __future__ import annotations

from typing import Literal

from kfac_core.integration.schedules import Falling

__all__ = [
    "DAMPING",
    "DAMPING_RULE",
    "DECAY",
    "KL_CLIP",
    "MODEL_DAMPING",
    "MODEL_DAMPING_RULE",
    "MODEL_REFRESH_EVERY",
    "MODEL_UPDATE_EVERY",
    "REFRESH_EVERY",
    "UPDATE_EVERY",
]

# Beside an optimizer that has a learning rate.
DAMPING = 5e-3
# Equal shifts: in the likelihood's units G is mostly below its shift, and stays damped.
DAMPING_RULE: Literal["factored", "factored_unit_pi", "exact"] = "factored_unit_pi"
KL_CLIP = Falling(1e-3, after=200.0)
UPDATE_EVERY = 10
REFRESH_EVERY = 50
DECAY = 0.95

# Where the quadratic model chooses the step, and the damping adapts.
MODEL_DAMPING = 1e-2
MODEL_DAMPING_RULE: Literal["factored", "factored_unit_pi", "exact"] = "factored"
MODEL_UPDATE_EVERY = 5
MODEL_REFRESH_EVERY = 5
