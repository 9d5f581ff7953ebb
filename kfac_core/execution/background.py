"""A refresh in a thread, while steps continue with the current operators.

Conventions.  The thread computes from statistics and dampings as they were when it was
started; updates in the meantime count towards the age of what it makes.  Nothing changes
in the estimator until `BackgroundRefresh.install` is called, so that the step at which new
operators take over is the caller's to say, and the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kfac_core.state import NetworkState


class BackgroundRefresh:
    """A running refresh; made by `kfac_core.Estimator.start_refresh`.

    Parameters
    ----------
    refresh : callable
        Returns the refreshed state; runs in a thread.
    install : callable
        Takes over the operators of that state.
    """

    def __init__(
        self,
        refresh: Callable[[], NetworkState],
        install: Callable[[NetworkState], None],
    ) -> None:
        self._install: Callable[[NetworkState], None] | None = install
        pool = ThreadPoolExecutor(1, thread_name_prefix="kfac_core-refresh")
        self._future: Future[NetworkState] = pool.submit(refresh)
        # The thread ends with its one task.
        pool.shutdown(wait=False)

    @property
    def done(self) -> bool:
        """Whether the refresh has finished, so that `install` does not block."""
        return self._future.done()

    def install(self) -> None:
        """Install the new operators in the estimator; blocks until they are computed.

        A second call does nothing.

        Raises
        ------
        KFACError
            See `kfac_core.Estimator.refresh`.
        """
        state = self._future.result()
        # A second call installs nothing, and the closure is freed with the states that
        # it holds.
        install, self._install = self._install, None
        if install is not None:
            install(state)
