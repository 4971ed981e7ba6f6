"""What a process leaves behind when it is killed: nothing that is guarded. Real processes."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from groupstate.engines.orphans import Guard

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs handles of processes, which Linux has")

GONE_S = 30.0
"""On a busy machine; at once otherwise."""

OWNER = """
import subprocess, sys, time
from groupstate.engines.orphans import Guard

child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
guard = Guard.over([child.pid], grace_s=0.2)
print(child.pid, guard._process.pid, flush=True)
time.sleep(600)
"""

OBEDIENT = "import time; print(flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {OBEDIENT}"


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", OBEDIENT], stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


@contextmanager
def an_owner(child_code: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that guards one child. It is killed at the end, however the test ends, or leaving would wait for it."""
    with subprocess.Popen([sys.executable, "-c", OWNER, child_code], stdout=subprocess.PIPE) as owner:
        try:
            yield owner
        finally:
            owner.kill()


def handles_of(process: int) -> int:
    """How many processes it has a handle of. A file that it closes while this looks is none."""
    handles = 0
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            handles += "pidfd" in os.readlink(file)
    return handles


def wait_watching(guard: int) -> None:
    """Until it has the handles of its owner and of one process."""
    deadline_s = time.monotonic() + GONE_S
    while handles_of(guard) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_gone(handle: int, within_s: float = GONE_S) -> bool:
    return bool(select.select([handle], [], [], within_s)[0])


@pytest.mark.parametrize("child_code", [OBEDIENT, STUBBORN], ids=["obedient", "stubborn"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_what_is_guarded_ends_with_the_process_that_is_killed(number: signal.Signals, child_code: str) -> None:
    with an_owner(child_code) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        child, guard = map(os.pidfd_open, pids)
        wait_watching(pids[1])
        owner.send_signal(number)
        owner.wait()

    assert is_gone(child)
    assert is_gone(guard)


def test_a_guard_that_starts_too_late_ends_them_all_the_same() -> None:
    with an_owner(OBEDIENT) as owner:  # It is killed at once; the guard takes longer than this to start.
        assert owner.stdout is not None
        child, _ = (os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split())

    assert is_gone(child)


def test_a_guard_that_is_released_leaves_them_alone(child: "subprocess.Popen[bytes]") -> None:
    guard = Guard.over([child.pid])
    assert guard is not None
    guard.release()

    assert guard._process.returncode == 0
    assert not is_gone(os.pidfd_open(child.pid), within_s=0.2)


def test_a_guard_that_somebody_ended_is_released_too(child: "subprocess.Popen[bytes]") -> None:
    guard = Guard.over([child.pid])
    assert guard is not None
    guard._process.kill()
    guard._process.wait()
    guard.release()

    assert child.poll() is None


def test_nothing_needs_no_guard() -> None:
    assert Guard.over([]) is None
