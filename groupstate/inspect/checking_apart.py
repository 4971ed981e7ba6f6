"""The verdict on a long log by two processes at once: one replays it into a book, one counts its events.

Rule 1: they say whether all is well, and one number for all that they counted. Where one of them says no, where the
numbers differ, or where one can't do its work, the log is checked again by what can say what is wrong (`checked`).
Rule 2: whatever happens here, no process is left behind.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from groupstate.core.book import Book
from groupstate.core.followed import Followed
from groupstate.core.invariants import INVARIANTS, UNCOUNTED, Checker
from groupstate.core.standing import Standing
from groupstate.inspect.checking import Checked, Kept, checked
from groupstate.log.reading import beginning, durable_stop, first_event, read_log
from groupstate.logs import Logger

APART_FROM_EVENTS: Final = 250_000
"""Fewer are checked sooner than two processes have begun."""

log: Final = Logger("groupstate.checking")


class Said(msgspec.Struct):
    """What a part says of the log."""

    well: bool
    first_seq: int
    last_seq: int = 0
    standing: int = 0
    snapshots: int = 0
    waypoints: int = 0

    @property
    def counted(self) -> tuple[int, ...]:
        """What all parts say alike."""
        return self.first_seq, self.last_seq, self.standing


@contextmanager
def checking(path: str | os.PathLike[str], *, stop: int | None = None) -> Iterator[Callable[[], Checked]]:
    """Check a run directory while the block does something else.

    Args:
        stop: the first event that isn't looked at any more; by default the first that isn't durable yet.

    Gives:
        What waits for the result. It raises as `checked` does.
    """
    stop = durable_stop(path) if stop is None else stop
    first = first_event(path)
    if stop is None or stop - first < APART_FROM_EVENTS or _processors() < 2:
        yield lambda: checked(path, stop=stop)
        return
    names = ("replayed", "counted") if first == 1 else ("replayed",)
    with ExitStack() as stack:
        running = [stack.enter_context(_process(name, path, stop)) for name in names]

        def result() -> Checked:
            said = [_answer(name, process) for name, process in zip(names, running, strict=True)]
            return _agreed(said) or checked(path, stop=stop)

        yield result


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _process(name: str, path: str | os.PathLike[str], stop: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another Python that does a part, with the same library."""
    home = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, name, os.fspath(path), str(stop)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _answer(name: str, process: subprocess.Popen[bytes]) -> Said | None:
    out, err = process.communicate()
    try:
        return msgspec.json.decode(out, type=Said)
    except msgspec.DecodeError:
        text = err.decode(errors="replace").strip()
        log.warning("a part of a check failed", part=name, returncode=process.returncode, error=text[-2_000:])
        return None


def _agreed(said: list[Said | None]) -> Checked | None:
    """What is said of a log in which nothing is wrong; None where that isn't what all say."""
    parts = [part for part in said if part is not None and part.well]
    if len(parts) < len(said) or any(part.counted != parts[0].counted for part in parts):
        return None
    one = parts[0]
    return Checked(
        one.last_seq + 1 - one.first_seq, one.first_seq, one.snapshots, len(INVARIANTS), (), (), one.waypoints
    )


# In a process of its own -----------------------------------------------------------------------------------


def replayed(path: str, stop: int) -> Said:
    """Replay the log into a book, and compare it with the snapshots and waypoints."""
    base, start = beginning(path)
    kept, followed = Kept(path), Followed(base or Book())
    take, seqs = followed.take, kept.seqs
    for record in read_log(path, start, stop):
        try:
            take(record)
        except Exception:
            # Whatever it is, a replay ends here, and `checked` says why.
            return Said(False, start)
        if record.seq in seqs and kept.compare(followed.settle(), record.seq):
            return Said(False, start)
    book = followed.settle()
    return Said(True, start, book.last_seq, followed.standing.number, kept.snapshots, kept.waypoints)


def counted(path: str, stop: int) -> Said:
    """Count the events anew, with all that the invariants ask."""
    checker, standing, last = Checker(replays=False), Standing(), 0
    take, found = checker.take, checker.found
    for record in read_log(path, 1, stop):
        take(record)
        if found:
            return Said(False, 1)
        event = record.event
        if type(event) not in UNCOUNTED:
            checker.add_to(standing, event)
        last = record.seq
    return Said(True, 1, last, standing.number)


PARTS: Final[dict[str, Callable[[str, int], Said]]] = {"replayed": replayed, "counted": counted}


def main(name: str, path: str, stop: str) -> None:
    """Do a part and print what it says. Nothing that is made on the way goes round in circles, and a process that ends
    soon needn't look for it: Python's collector of garbage is off."""
    gc.disable()
    sys.stdout.buffer.write(msgspec.json.encode(PARTS[name](path, int(stop))))


if __name__ == "__main__":
    main(*sys.argv[1:])
