"""One target, and what a run says of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """One target, and what a run says of it.

    Attributes
    ----------
    target, where, library : str
        What is compared, on which workload or sweep, of which core.
    threads : str
        Of the run, or of both runs.
    figure, least, greatest : float or None
        What was measured (None where nothing was), and between what it should lie.
    unit : str
        ``"x"`` for a ratio, ``"s"`` for seconds, ``""`` for a plain number.
    bound : str
        What bounds it, as far as the same run measured that.
    noisy : bool
        Whether a sample behind the figure was disturbed.
    """

    target: str
    where: str
    library: str
    threads: str
    figure: float | None
    least: float | None = None
    greatest: float | None = None
    unit: str = "x"
    bound: str = ""
    noisy: bool = False

    @property
    def met(self) -> bool:
        """Whether there is a figure, and it lies where it should."""
        if self.figure is None or not math.isfinite(self.figure):
            return False
        above = self.least is None or self.figure >= self.least
        return above and (self.greatest is None or self.figure <= self.greatest)

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return dataclasses.asdict(self) | {"met": self.met}
