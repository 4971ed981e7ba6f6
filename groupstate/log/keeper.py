"""Writes snapshots and retires old segments, beside the writer: neither the event loop nor a commit waits for it.

Rule 1: a snapshot waits until the events that it holds are durable.
Rule 2: what fails here costs disk space or the time of the next opening, never an event: it is told and not tried
again before the next snapshot.
"""

import threading
from collections import deque
from collections.abc import Callable

import attrs

from groupstate.log.disk import Disk
from groupstate.log.retention import Keep, retire
from groupstate.log.rundir import RunDir
from groupstate.log.segments import flush_segment_of
from groupstate.log.snapshots import WAYPOINT, WHOLE, Parts, Shape, SnapshotInfo, write_snapshot


@attrs.frozen
class Job:
    info: SnapshotInfo
    parts: Parts
    limit: int
    """The last event that isn't needed for going back to a checkpoint that is kept."""
    spacing: int = 0
    """See `retire`."""
    shape: Shape = WHOLE
    """Nothing is retired behind a waypoint."""


class Keeper:
    def __init__(self, disk: Disk, run: RunDir, log_id: bytes, keep: Keep, *, inline: bool, sync: bool) -> None:
        """
        Args:
            sync: events are flushed before they count as durable; else it is done here, before a snapshot has them.
        """
        self._disk = disk
        self._run = run
        self._log_id = log_id
        self._keep = keep
        self._inline = inline
        self._sync = sync
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._durable_seq = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self.on_done: Callable[[int, Exception | None], None] | None = None
        """Called in the keeper's thread after each snapshot, and after a waypoint that failed: (its seq, what went
        wrong)."""

    def take(self, job: Job) -> None:
        """Queue a snapshot."""
        with self._changed:
            self._jobs.append(job)
            if self._thread is None and not self._inline:
                self._thread = threading.Thread(target=self._run_jobs, name="groupstate-keeper", daemon=True)
                self._thread.start()
        self._go_on()

    def advance(self, durable_seq: int) -> None:
        """At least so much is durable now. Called by one thread."""
        if durable_seq > self._durable_seq:
            self._durable_seq = durable_seq
        # Looked at behind the number, as the keeper looks at the number behind a job: one of the two sees the other.
        if self._jobs:
            self._go_on()

    def _go_on(self) -> None:
        with self._changed:
            self._changed.notify()
        if self._inline:
            while (job := self._next()) is not None:
                self._do(job)

    def _next(self) -> Job | None:
        """The next snapshot that may be written."""
        with self._changed:
            return self._jobs.popleft() if self._jobs and self._jobs[0].info.seq <= self._durable_seq else None

    def _run_jobs(self) -> None:
        while True:
            with self._changed:
                while not self._closing and not (self._jobs and self._jobs[0].info.seq <= self._durable_seq):
                    self._changed.wait()
            job = self._next()
            if job is None:
                return
            self._do(job)

    def _do(self, job: Job) -> None:
        error: Exception | None = None
        waypoint = job.shape is WAYPOINT
        try:
            if not self._sync and not waypoint:
                # Else a loss of power could leave a snapshot of events that are gone, and older ones removed.
                flush_segment_of(self._disk, self._run, job.info.seq)
            write_snapshot(self._disk, self._run, self._log_id, job.info, job.parts, job.shape)
            if not waypoint:
                retire(self._disk, self._run, self._log_id, self._keep, job.limit, spacing=job.spacing)
        except Exception as failure:  # a full disk or our own fault: neither is the writer's
            error = failure
        if self.on_done is not None and (error is not None or not waypoint):
            self.on_done(job.info.seq, error)

    def close(self) -> None:
        """Finish what may be written, and end. What never became durable is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
