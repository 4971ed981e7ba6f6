"""When snapshots and waypoints are taken, and what may be let go of behind them.

Rule 1: a snapshot is taken between two steps of the ledger, where every step is whole.
Rule 2: it costs the event loop a copy of lists; the rest happens in a thread of the log's own.
"""

from collections.abc import Callable
from typing import Protocol

from groupstate.core import events as ev
from groupstate.core.arguments import integer
from groupstate.core.book import Book
from groupstate.core.snapshot import capture, capture_live, encoded
from groupstate.errors import BadSettings
from groupstate.log.retention import Keep
from groupstate.log.snapshots import Parts, SnapshotInfo
from groupstate.logs import Logger
from groupstate.runtime.ledger import Ledger

log = Logger("groupstate.keeping")

EVENTS_PER_SNAPSHOT = 250_000
"""About a second of replay."""
AT_REST = 0.1
"""At a checkpoint and at the end a snapshot is taken for so much less."""
WAYPOINTS_PER_SNAPSHOT = 5
"""So that looking at any event replays a fifth of a second."""
EVENTS_PER_LIVE_GROUP = 10
"""With so many events for each group that a waypoint holds, waypoints take less than a tenth of what the log takes,
however many groups are live."""


def checked_events(events: int) -> int:
    """
    Raises:
        BadSettings: not a number of events between two snapshots.
    """
    return integer("snapshot_events", events, least=1, error=BadSettings)


class Snapshots(Protocol):
    """A log that keeps snapshots."""

    keep: Keep
    snapshot_seq: int
    waypoint_seq: int
    on_snapshot: Callable[[int, Exception | None], None] | None

    def keep_snapshot(self, info: SnapshotInfo, parts: Parts, *, limit: int, spacing: int) -> None: ...

    def keep_waypoint(self, info: SnapshotInfo, parts: Parts) -> None: ...


class Keeping:
    def __init__(self, ledger: Ledger, *, events: int = EVENTS_PER_SNAPSHOT) -> None:
        """
        Args:
            events: events between two snapshots.
        """
        self._ledger = ledger
        self._events = events
        snapshots = getattr(ledger.log, "keep_snapshot", None)
        self._log: Snapshots | None = ledger.log if snapshots is not None else None  # type: ignore[assignment]
        self._last_seq = 0
        self._waypoint_seq = 0
        self._quiet_until = 0
        """Before this event nothing is due, unless the run is at rest: most steps end there."""
        self._resting = False
        if self._log is not None:
            self._last_seq = self._log.snapshot_seq
            self._waypoint_seq = self._log.waypoint_seq
            self._log.on_snapshot = _told
            ledger.listen(self._note, (ev.CheckpointMarked, ev.RunClosed))
            ledger.after_step = self._look

    def _note(self, record: ev.Record) -> None:
        self._resting = True

    def _look(self) -> None:
        """A step of the ledger is done. Is it time?"""
        if self._ledger.book.last_seq < self._quiet_until and not self._resting:
            return
        due: float = self._events
        if self._resting:
            due *= AT_REST
            self._resting = False
        if self._ledger.book.last_seq - self._last_seq >= due:
            self.take()
        book = self._ledger.book
        behind = max(self._events / WAYPOINTS_PER_SNAPSHOT, EVENTS_PER_LIVE_GROUP * len(book.groups))
        if book.last_seq - self._waypoint_seq >= behind:
            self.take_waypoint()
        self._quiet_until = min(
            self._last_seq + self._events, self._waypoint_seq + self._events // WAYPOINTS_PER_SNAPSHOT
        )

    def take_waypoint(self) -> None:
        """Keep what is live now, for readers to go on from."""
        assert self._log is not None
        book = self._ledger.book
        self._waypoint_seq = book.last_seq
        self._log.keep_waypoint(_info(book), encoded(capture_live(book)))

    def take(self) -> None:
        """Take a snapshot of the book as it is now."""
        assert self._log is not None
        book = self._ledger.book
        self._last_seq = book.last_seq
        self._log.keep_snapshot(_info(book), encoded(capture(book)), limit=self._limit(), spacing=self._events)

    def _limit(self) -> int:
        """The last event that isn't needed for going back."""
        assert self._log is not None
        if not isinstance(self._log.keep, int):
            return self._ledger.book.last_seq
        marks = self._ledger.book.mark_seqs
        return marks[-self._log.keep] if len(marks) >= self._log.keep else 0


def _info(book: Book) -> SnapshotInfo:
    return SnapshotInfo(book.last_seq, book.last_at_ns, book.weight_version, book.lineage)


def _told(seq: int, error: Exception | None) -> None:
    if error is None:
        log.info("snapshot taken", seq=seq)
    else:
        log.warning(
            "no snapshot could be taken, or old events not be let go of; the log goes on", seq=seq, error=str(error)
        )
