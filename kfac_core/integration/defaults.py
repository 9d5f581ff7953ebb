"""The defaults of all integrations, chosen on the suite of ``benchmarks/tasks``.

Conventions.  Damping and KL clip are in units of the likelihood, as in
`kfac_core.integration.RowLoss`; intervals are numbers of steps.
"""

from __future__ import annotations

from typing import Literal

from kfac_core.integration.schedules import Falling, PerOutput, Widening

# Beside an optimizer that has a learning rate.
# Too much damping slows the end of a run, and too little at the start leads a classifier of
# few examples to a minimum with twice the test error.
DAMPING = Falling(2e-2, after=50.0, power=1.5)
# Equal shifts: in the likelihood's units G is mostly below its shift, and stays damped.
DAMPING_RULE: Literal["factored", "factored_unit_pi", "exact"] = "factored_unit_pi"
# Steps fall like 1 / t, late enough that autoencoders are not slowed, and far enough that
# noise does not decide where a regression ends.
KL_CLIP = PerOutput(Falling(1e-4, after=100.0, power=2.0))
# Rarely what decides a step, since the clip does.
LEARNING_RATE = 1.0
# Curvature at the first parameters says little after twenty steps.
UPDATE_EVERY = Widening(20, 60, until=60)
REFRESH_EVERY = UPDATE_EVERY
DECAY = 0.8

# SOAP: bases turn more slowly as the rate falls.
SOAP_UPDATE_EVERY = Widening(10, 20, until=60)
SOAP_GAIN = 0.05

# Where the quadratic model chooses the step, and the damping adapts.
MODEL_DAMPING = 1e-2
MODEL_DAMPING_RULE: Literal["factored", "factored_unit_pi", "exact"] = "factored"
MODEL_UPDATE_EVERY = 5
MODEL_DECAY = 0.95
MODEL_REFRESH_EVERY = 5
