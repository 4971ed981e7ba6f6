"""What of a log is kept, once snapshots make it possible to open a run without its beginning.

Rule 1: only segments that are full and wholly below the limit are touched, so the writer is never in the way.
Rule 2: two good snapshots stay, and every event behind the older one.
Rule 3: who reads a log, here or in another process, keeps what he still has to read.
"""

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal, TypeAlias

import attrs

from groupstate.core.arguments import as_integer
from groupstate.core.held import MARKS_REMEMBERED
from groupstate.core.near import meant
from groupstate.errors import BadSettings
from groupstate.log.archive import archive_path, pack_segment
from groupstate.log.disk import Disk, make_file, read_file
from groupstate.log.process import ProcessId, is_alive, this_process
from groupstate.log.rundir import RunDir
from groupstate.log.segments import list_segments
from groupstate.log.snapshots import WAYPOINT, list_snapshots, read_snapshot, remove_quietly, snapshot_path

Keep: TypeAlias = Literal["all", "archive"] | int
"""`all`: every event. `archive`: every event, old segments packed. A number: what came since so many checkpoints."""

SNAPSHOTS_MIN = 2
SPACING_OF_AGE = 8
"""Of two snapshots one goes when they lie nearer than a part of their age, so their number grows by the logarithm of
the events."""
READERS = "readers"


def checked_keep(keep: Keep) -> Keep:
    """
    Raises:
        BadSettings: not one of those.
    """
    if keep in ("all", "archive"):
        return keep
    marks = as_integer(keep)
    if marks is not None and 1 <= marks <= MARKS_REMEMBERED:
        return marks
    raise BadSettings(
        f"keep_log is {keep!r}; it is 'all', 'archive', or a number of checkpoints from 1 to {MARKS_REMEMBERED}"
        f"{meant(keep, ('all', 'archive'))}"
    )


@attrs.frozen
class Retired:
    """What became of old files."""

    packed: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    snapshots: tuple[int, ...] = ()


def retire(disk: Disk, run: RunDir, log_id: bytes, keep: Keep, limit: int, *, spacing: int = 0) -> Retired:
    """Pack or remove what lies wholly at or below event `limit`.

    Args:
        spacing: where all events stay, how many of them are replayed quickly enough; of snapshots that lie nearer than
            that some go. None go for 0.

    Raises:
        OSError: something can't be; all that was done is whole, and the rest is as it was.
    """
    if keep == "all":
        return Retired(snapshots=_thin_out(disk, run, spacing))
    if keep == "archive":
        snapshots = list_snapshots(disk, run)[-SNAPSHOTS_MIN:]
        limit = min(limit, snapshots[0]) if len(snapshots) == SNAPSHOTS_MIN else 0
        plain = [first for first in _full(disk, run, limit + 1) if disk.exists(run.segment(first))]
        for first in plain:
            pack_segment(disk, run, first)
        return Retired(packed=tuple(plain), snapshots=_thin_out(disk, run, spacing))
    kept = _last_good(disk, run, log_id) if _full(disk, run, limit + 1) else None
    if kept is None:
        return Retired()
    going = _full(disk, run, min([limit + 1, kept + 1, *readers(disk, run)]))
    for first in going:
        # From the oldest on, and each only once those before are gone for good: what is left is always an end of the
        # log without a gap, whichever names a power loss keeps.
        disk.fsync_dir(run.log)
        for path in (run.segment(first), archive_path(run, first)):
            if disk.exists(path):
                disk.unlink(path)
    left = list_segments(disk, run)[0]
    old = [seq for seq in list_snapshots(disk, run) if seq < min(left - 1, kept)]
    for seq in old:
        disk.unlink(snapshot_path(run, seq))
    for seq in list_snapshots(disk, run, WAYPOINT):
        if seq < left - 1:
            disk.unlink(snapshot_path(run, seq, WAYPOINT))
    return Retired(removed=tuple(going), snapshots=tuple(old))


def _thin_out(disk: Disk, run: RunDir, spacing: int) -> tuple[int, ...]:
    """Remove old snapshots that only save a little replay, and nothing where events before them are gone."""
    seqs = list_snapshots(disk, run)
    if not spacing or list_segments(disk, run)[0] != 1:
        return ()
    going = superfluous(seqs, spacing)
    for seq in going:
        disk.unlink(snapshot_path(run, seq))
    return going


def superfluous(seqs: Sequence[int], spacing: int) -> tuple[int, ...]:
    """Snapshots without which no event lies further behind one than `spacing` events, or an eighth of its age.

    Args:
        seqs: the last events of all snapshots, in order. The newest ones always stay.
    """
    going, before = [], 0
    for seq, following in pairwise(seqs[: len(seqs) - SNAPSHOTS_MIN + 1]):
        if following - before <= max(spacing, (seqs[-1] - following) // SPACING_OF_AGE):
            going.append(seq)
        else:
            before = seq
    return tuple(going)


def _last_good(disk: Disk, run: RunDir, log_id: bytes) -> int | None:
    """The older of the two newest good snapshots; None while there are not so many."""
    good = 0
    for seq in reversed(list_snapshots(disk, run)):
        good += read_snapshot(disk, run, log_id, seq) is not None
        if good == SNAPSHOTS_MIN:
            return seq
    return None


def _full(disk: Disk, run: RunDir, needed_from: int) -> list[int]:
    """Segments of which no event is needed, if all from `needed_from` on are. Never the last one."""
    return [first for first, following in pairwise(list_segments(disk, run)) if following <= needed_from]


# Readers ---------------------------------------------------------------------------------------------


@contextmanager
def reading(disk: Disk, run: RunDir, first_seq: int) -> Iterator[str]:
    """While this lasts nothing from `first_seq` on is removed.

    Only runs that ever remove events have a folder for such claims; the others are left as they are. Where a claim
    can't be made, as in a directory that may only be read, the reader has none.

    Yields the claim's path, for `claim` to move it on; empty without one."""
    path = os.path.join(run.log, READERS, f"{uuid.uuid4().hex}.json")
    try:
        if disk.exists(os.path.dirname(path)):
            claim(disk, path, first_seq)
        else:
            path = ""
    except OSError:
        path = ""
    try:
        yield path
    finally:
        if path:
            remove_quietly(disk, path)


def expect_readers(disk: Disk, run: RunDir) -> None:
    """Make the folder for readers' claims."""
    disk.makedirs(os.path.join(run.log, READERS))


def claim(disk: Disk, path: str, first_seq: int) -> None:
    """Say from which event on a reader needs the log.

    Raises:
        OSError: it can't be said; the claim is what it was.
    """
    me = this_process()
    make_file(disk, path, json.dumps({"first_seq": first_seq, **attrs.asdict(me)}).encode())


def readers(disk: Disk, run: RunDir) -> list[int]:
    """The events from which on living readers need the log. Claims of the dead are removed; one of another machine
    counts, since nobody here can tell."""
    folder = os.path.join(run.log, READERS)
    if not disk.exists(folder):
        return []
    found = []
    for name in disk.listdir(folder):
        path = os.path.join(folder, name)
        try:
            fields = json.loads(read_file(disk, path))
            first_seq = int(fields.pop("first_seq"))
            holder = ProcessId(**fields)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            continue  # of a reader that has just ended, or is just beginning
        if holder.host == this_process().host and not is_alive(holder):
            remove_quietly(disk, path)
        else:
            found.append(first_seq)
    return found
