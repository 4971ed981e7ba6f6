"""A log that takes snapshots, and packs or removes what lies before them; and what must be there afterwards."""

import random

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.core.folding import replayed
from groupstate.core.rules import Rules
from groupstate.core.snapshot import capture, encoded
from groupstate.errors import LogError, LogFailed, NotARun
from groupstate.log.disk import Disk
from groupstate.log.file import FileLog
from groupstate.log.reading import beginning, first_event, read_book, read_log
from groupstate.log.retention import Keep
from groupstate.log.snapshots import SnapshotInfo
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.recovery import load
from groupstate.simulate.faults import FaultyDisk

from .scenes import LOG_ID, RUN, close, make, reopen

OPTIONS = {"segment_bytes": 250, "payload_file_bytes": 400}


@attrs.define
class Kept:
    """What was posted to a log that keeps snapshots, and the book that it leads to."""

    keep: Keep
    posts: list[list[Record]] = attrs.Factory(list)
    acknowledged: int = 0
    finished: bool = False
    book: Book = attrs.Factory(Book)
    failures: list[str] = attrs.Factory(list)
    """Snapshots that could not be taken, or what could not be let go of."""

    @property
    def attempted(self) -> list[Record]:
        return [record for post in self.posts for record in post]

    def post(self, log: FileLog, *events: ev.AnyEvent) -> None:
        records = [Record(log.last_seq + number, 1000 + number, event) for number, event in enumerate(events, 1)]
        self.posts.append(records)
        log.post(records)
        for record in records:
            self.book.apply(record)

    def step(self, log: FileLog, number: int) -> None:
        """A group comes, an older one goes; sometimes a mark is made and a snapshot taken."""
        prompt = log.payloads.put(b"prompt %d " % number * 3)
        events = [ev.GroupSubmitted(f"g{number}", 1, ev.TRAIN, 0, 1, "submit", prompt=prompt)]
        gone = self.book.groups.get(f"g{number - 4}")
        if gone is not None:
            events.append(ev.SessionStarted(gone.group_id, 0, 1))
            events.append(ev.SessionFailed(gone.group_id, 0, 1, "cancelled"))
            events.append(ev.GroupFailed(gone.group_id, cancelled=True))
            events.append(ev.GroupEvicted(gone.group_id, ("cancelled",), 0, 0))
        if number % 3 == 0:
            events.append(ev.CheckpointMarked(self.book.last_mark + 1, self.book.weight_version, self.book.lineage))
        self.post(log, *events)
        if gone is not None and gone.prompt is not None:
            log.payloads.free([gone.prompt])
        if number % 2 == 0:
            self.snapshot(log)

    def snapshot(self, log: FileLog) -> None:
        book, marks = self.book, self.book.mark_seqs
        info = SnapshotInfo(book.last_seq, book.last_at_ns, book.weight_version, book.lineage)
        limit = book.last_seq if self.keep == "archive" else marks[-1] if marks else 0
        log.keep_snapshot(info, encoded(capture(book)), limit=limit)


def listen(log: FileLog, kept: Kept) -> None:
    log.on_snapshot = lambda seq, error: kept.failures.append(str(error)) if error else None


async def told(disk: Disk, keep: Keep, count: int = 10) -> Kept:
    """Post until the disk fails."""
    kept = Kept(keep)
    try:
        log = make(disk, keep=keep, **OPTIONS)
    except LogError:
        return kept
    listen(log, kept)
    try:
        kept.post(log, ev.RunStarted(LOG_ID, Rules().to_dict(), 1, 0))
        for number in range(1, count + 1):
            kept.step(log, number)
            await log.durable(log.last_seq)
            kept.acknowledged = log.last_seq
        kept.finished = True
    except LogFailed:
        pass
    await close(log)
    return kept


async def check(disk: FaultyDisk, kept: Kept, *, chance: random.Random | None = None) -> None:
    """Open what is left, hold it against what was posted, go on, and do it again after a loss of power."""
    try:
        log = reopen(disk, keep=kept.keep, **OPTIONS)
    except NotARun:
        assert kept.acknowledged == 0
        return
    assert log.last_seq >= kept.acknowledged
    assert log.last_seq in {0} | {post[-1].seq for post in kept.posts}
    known = kept.attempted[: log.last_seq]
    book = check_book(disk, log, known, kept.keep)

    more = Kept(kept.keep, [known] if known else [], log.last_seq, book=book)
    if not known:
        more.post(log, ev.RunStarted(LOG_ID, Rules().to_dict(), 1, 0))
    for number in range(100, 106):
        more.step(log, number)
    await log.durable(log.last_seq)
    await log.aclose()
    for left in (disk.copy(), disk.crash(chance=chance)):
        again = reopen(left, keep=kept.keep, **OPTIONS)
        check_book(left, again, more.attempted, kept.keep)
        await again.aclose()


def check_book(disk: FaultyDisk, log: FileLog, known: list[Record], keep: Keep) -> Book:
    """The log leads to the book of exactly these events, whichever way it is read."""
    ledger = Ledger(log, Rules())
    load(ledger)
    digest = replayed(known).digest()
    assert ledger.book.digest() == digest
    live = [ref for group in ledger.book.groups.values() for ref in group.payloads()]
    log.payloads.keep_only({ref.key for ref in live})
    assert all(log.payloads.get(ref).startswith(b"prompt") for ref in live)

    first = first_event(RUN, disk=disk)
    assert first == 1 or keep not in ("all", "archive")
    assert list(read_log(RUN, first, disk=disk)) == known[first - 1 :]
    base, start = beginning(RUN, disk=disk)
    for record in read_log(RUN, start, disk=disk):
        base = base or Book()
        base.apply(record)
    assert base is None or base.digest() == digest
    snapshot = read_book(RUN, disk=disk)
    assert snapshot is None or snapshot.digest() == replayed(known[: snapshot.last_seq]).digest()
    return ledger.book
