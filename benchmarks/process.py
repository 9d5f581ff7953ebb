"""The parent's side of a worker: start it, ask it, and end it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.threads import environment

ROOT = Path(__file__).resolve().parent.parent


class Process:
    """A worker of one library, which lives until it is closed or takes too long.

    Parameters
    ----------
    library : str
        One of `benchmarks.libraries.LIBRARIES`.
    python : str
        The interpreter in whose environment the library is.
    device, clock : str
        As for `benchmarks.worker.Worker`.
    threads : int
        How many it may use.
    patience : float
        After how many seconds without a reply it is ended.
    extra : mapping of str to str
        More of its environment.
    """

    def __init__(
        self,
        library: str,
        /,
        *,
        python: str,
        device: str,
        clock: str,
        threads: int,
        patience: float,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self._patience = patience
        self._problem: str | None = None
        self._unread = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            **os.environ,
            **environment(threads, device=device),
            **(extra or {}),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        command = [python, "-W", "ignore", "-m", "benchmarks.worker", library]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [*command, device, str(threads), clock],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=variables,
                cwd=ROOT,
            )
        except OSError as error:
            self._problem = f"{python} cannot be run: {error.strerror}"

    @property
    def problem(self) -> str | None:
        """Why nothing more can be asked; None while something can."""
        return self._problem

    def ask(self, do: str, /, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the reply.

        Parameters
        ----------
        do : str
            What is asked for; see `benchmarks.worker.Worker`.
        **arguments
            Of the request.

        Returns
        -------
        dict
            The reply; ``{"error": text}`` where none came.
        """
        if self._problem is None:
            assert self._process is not None
            assert self._process.stdin is not None
            try:
                request = json.dumps({"do": do, **arguments}) + "\n"
                self._process.stdin.write(request.encode())
                self._process.stdin.flush()
            except OSError:
                self._end("the process ended")
        reply = self._reply() if self._problem is None else None
        if reply is None:
            return {"error": self._problem}
        found: dict[str, Any] = json.loads(reply)
        return found

    def close(self) -> None:
        """End the process."""
        self._end("closed")
        self._errors.close()

    def _reply(self) -> bytes | None:
        """Return one line; None where the process ended or took too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        channel = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([channel], [], [], self._patience)
            if not ready:
                self._end(f"took longer than {self._patience:g} s")
                return None
            part = os.read(channel, 1 << 16)
            if not part:
                self._end("the process ended")
                return None
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end(self, reason: str) -> None:
        if self._problem is not None:
            return
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for channel in (self._process.stdin, self._process.stdout):
            if channel is not None:
                channel.close()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1][:200]}" if lines and reason == "the process ended" else ""
        self._problem = reason + last
