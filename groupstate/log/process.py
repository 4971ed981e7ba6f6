"""Which process is which, across reused process numbers, restarts of the machine and other machines.

A process number alone is reused within hours; together with the start time it names one process until the
machine starts again, and the boot id tells that.
"""

import os
import platform
import subprocess
import uuid
from pathlib import Path

import attrs


@attrs.frozen
class ProcessId:
    pid: int
    started: str
    """Start time in the system's own words; only ever compared."""
    host: str
    boot: str

    @property
    def same_boot(self) -> bool:
        """Whether it ran on this machine since the machine last started."""
        return self.host == platform.node() and self.boot == boot_id()


def this_process() -> ProcessId:
    pid = os.getpid()
    return ProcessId(pid, start_time(pid) or "", platform.node(), boot_id())


def is_alive(process: ProcessId) -> bool:
    """Whether a process of this machine still runs. In doubt yes: its log is then left alone."""
    if not process.same_boot:
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, so it exists
    started = start_time(process.pid)
    return started is None or started == process.started


def start_time(pid: int, proc: str = "/proc") -> str | None:
    """When the process started; "" for one that has ended and wasn't collected; None if it can't be known."""
    try:
        stat = Path(proc, str(pid), "stat").read_text()
    except OSError:
        return _start_time_from_ps(pid)
    # The command's name stands in brackets and may hold anything, brackets and spaces included.
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _start_time_from_ps(pid: int) -> str | None:
    """macOS has no /proc."""
    return _answer_of("ps", "-o", "lstart=", "-p", str(pid))


def boot_id(path: str = "/proc/sys/kernel/random/boot_id") -> str:
    """Changes with every start of the machine."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return _answer_of("sysctl", "-n", "kern.bootsessionuuid") or f"host-{uuid.getnode():012x}"


def _answer_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
