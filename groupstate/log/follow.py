"""Following a log that another process writes: only what is durable, in order, without an end."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import anyio

from groupstate.core.events import Record
from groupstate.errors import CorruptLog, LostEvents
from groupstate.log.disk import Disk, OsDisk
from groupstate.log.reading import Cursor, durable_seq
from groupstate.log.retention import claim, reading
from groupstate.log.rundir import RunDir, read_run_info

POLL_S = 0.05
LATE_POLLS_MAX = 100
"""Polls for which the watermark may be ahead of what can be read, as on a network file system whose caches
disagree. After that it is damage."""


async def follow(
    path: str | os.PathLike[str],
    start: int = 1,
    *,
    stop_when: Callable[[], bool] | None = None,
    poll_s: float = POLL_S,
    disk: Disk | None = None,
) -> AsyncIterator[list[Record]]:
    """The records from `start` on, in lists of one commit each, as they become durable.

    Args:
        path: the run directory.
        start: the first event wanted.
        stop_when: asked when there is nothing new; True ends the iteration. By default it never ends.
        poll_s: seconds between two looks.
        disk: where the files are; the real disk by default.

    Raises:
        NotARun: `path` is not a run directory.
        CorruptLog, LostEvents: what was durable can't be read.
    """
    disk = OsDisk() if disk is None else disk
    run = RunDir.at(path)
    log_id = read_run_info(disk, run).log_id
    cursor = Cursor(disk, run, log_id, start)
    late_polls = 0
    with reading(disk, run, start) as claimed:
        segment: int | None = None
        while True:
            try:
                for records in cursor.read(durable_seq(disk, run, log_id) or 0):
                    late_polls = 0
                    yield records
            except (CorruptLog, LostEvents):
                late_polls += 1
                if late_polls > LATE_POLLS_MAX:
                    raise
            if late_polls == 0 and stop_when is not None and stop_when():
                return
            if claimed and cursor.segment != segment and cursor.segment is not None:
                segment = cursor.segment
                with suppress(OSError):  # then the older claim stands, and keeps more
                    claim(disk, claimed, segment)
            # The files belong to another process, which can't wake this one, so here polling is right.
            await anyio.sleep(poll_s)
