"""Processes that may not outlive this one, however it ends: a signal that nobody handles runs no code of ours.

Rule: who has started them ends them. The guard, a small process of its own, acts only where nobody is left to.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Self

import attrs

GRACE_S = 10.0
"""Between the request to end and the end by force."""

_WATCH = """
import os, select, signal, sys

def handle(pid):
    try:
        return [os.pidfd_open(int(pid))]
    except ProcessLookupError:
        return []

owner, grace_s, *pids = sys.argv[1:]
left = [found for pid in pids for found in handle(pid)]
watched = handle(owner)
if watched and os.getppid() == int(owner):
    ready, _, _ = select.select([0, *watched], [], [])
    if 0 in ready and os.read(0, 1):
        sys.exit()
    select.select(watched, [], [])
for number in (signal.SIGTERM, signal.SIGKILL):
    for process in left:
        try:
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            pass
    while left and (gone := select.select(left, [], [], float(grace_s))[0]):
        left = [process for process in left if process not in gone]
"""
"""What the guard runs. It holds handles of the processes, so that a number that is in use again is left alone. A byte
releases it; the end of its input without one may mean that nobody holds the `Guard` any more, and says nothing."""


@attrs.define(eq=False)
class Guard:
    """Ends processes once this one has gone."""

    _process: "subprocess.Popen[bytes]"

    @classmethod
    def over(cls, pids: Sequence[int], *, grace_s: float = GRACE_S) -> Self | None:
        """None where there are none, or where the system has no handles of processes (it isn't Linux)."""
        if not pids or not hasattr(os, "pidfd_open") or not sys.executable:
            return None
        arguments = [str(os.getpid()), str(grace_s), *map(str, pids)]
        return cls(
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCH, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # A Ctrl-C is for this process, which ends them itself.
            )
        )

    def release(self) -> None:
        """They have ended, or somebody else sees to it. Waits until the guard is gone."""
        self._process.communicate(b".")
