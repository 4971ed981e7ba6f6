"""What opening a log again does: everything that was under way gets a place to go on from.

Rule 1: each change that recovery makes is an event, so that a replay shows it.
Rule 2: recovery twice in a row changes nothing more.
"""

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.evict import credit_of
from groupstate.core.folding import Replay
from groupstate.core.group import Group
from groupstate.core.phases import TERMINAL, Phase
from groupstate.core.rules import RULES_VERSION, Rules, recorded_rules
from groupstate.core.snapshot import decoded, restore
from groupstate.errors import BadMark, BadSettings, CompactedLog, UnsupportedLog
from groupstate.log.collection import without_collection
from groupstate.log.port import EventLog
from groupstate.log.snapshots import Snapshot
from groupstate.logs import Logger
from groupstate.runtime.ledger import Ledger
from groupstate.version import VERSION

log = Logger("groupstate.recovery")

OnRewind: TypeAlias = Literal["keep", "evict"]
"""What becomes of groups that ended on the line of weights that a run goes back from."""


class CheckpointMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place in a run to go back to. Small JSON, to be kept beside the weights."""

    run_id: str
    mark: int
    seq: int
    weight_version: int
    lineage: int
    name: str = ""

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "CheckpointMark":
        """
        Raises:
            BadMark: not a mark.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise BadMark(f"not a checkpoint mark: {error}") from error


def mark(ledger: Ledger, name: str = "") -> CheckpointMark:
    """Mark this place in the log."""
    book = ledger.book
    number, version, lineage = book.last_mark + 1, book.weight_version, book.lineage
    seq = ledger.record(ev.CheckpointMarked(number, version, lineage, name))
    return CheckpointMark(run_id=book.run_id, mark=number, seq=seq, weight_version=version, lineage=lineage, name=name)


def load(ledger: Ledger) -> None:
    """Fold the log into the ledger's book, from its newest snapshot on that can be read, if there is one.

    Raises:
        UnsupportedLog: the snapshot can't be read, and the events before it are gone.
    """
    with without_collection():
        ledger.book, why = _newest_book(ledger.log, ledger.book)
        try:
            fold(ledger, ledger.log.read(ledger.book.last_seq + 1))
        except CompactedLog as error:
            raise UnsupportedLog(
                f"no snapshot of this run can be read by this version of groupstate{why}, and {error}. "
                "Open the run with the version that wrote it, or a later one"
            ) from error


def fold(ledger: Ledger, records: Iterable[ev.Record]) -> None:
    """Take what is in the log already into the book of a ledger that nobody watches yet."""
    assert not ledger.observers, "an observer sees every event"
    assert not ledger.listeners, "a listener sees every event of its kind"
    replay = Replay(ledger.book)
    for record in records:
        replay.apply(record)
    replay.settle()
    ledger.apply(())


def _newest_book(event_log: EventLog, empty: Book) -> tuple[Book, str]:
    """The book of the newest snapshot that this version can read, and why it couldn't read a newer one; `empty`
    without any. The log's own snapshot is let go of, since it is large."""
    snapshot: Snapshot | None = getattr(event_log, "snapshot", None)
    if snapshot is not None:
        event_log.snapshot = None  # type: ignore[attr-defined]
    why = ""
    while snapshot is not None:
        try:
            return restore(decoded(snapshot.parts())), why
        except (ValueError, msgspec.MsgspecError) as error:
            why = why or f" ({error})"
            text = "more events are replayed"
            log.warning("a snapshot can't be read", seq=snapshot.info.seq, error=str(error), consequence=text)
        snapshot = event_log.snapshot_before(snapshot.info.seq)  # type: ignore[attr-defined]
    return empty, why


def start(ledger: Ledger, *, run_id: str, weight_version: int, seed: int) -> None:
    """The first event of a new log."""
    ledger.record(
        ev.RunStarted(
            run_id,
            ledger.rules.to_dict(),
            RULES_VERSION,
            weight_version,
            lineage=1,
            library=VERSION,
            seed=seed,
        )
    )


def recover(
    ledger: Ledger,
    *,
    torn_bytes: int,
    weight_version: int | None = None,
    resume_at: CheckpointMark | None = None,
    on_rewind: OnRewind = "keep",
) -> None:
    """Bring a book that was read from a log into a state that a run can go on from.

    Batches that were out come back, groups with a started attempt are requeued with a new attempt and their
    original stamp; with a mark, later commits are undone, and with `on_rewind` "evict" the groups that ended since
    are given up. A new lineage of weight versions begins.

    Raises:
        BadMark: a mark of another run, of a later log, or too old.
        BadSettings: both a mark and a weight version are given, and they differ.
    """
    book = ledger.book
    if resume_at is not None:
        _check_mark(book, resume_at)
        if weight_version not in (None, resume_at.weight_version):
            raise BadSettings(
                f"weight_version is {weight_version} and the mark says {resume_at.weight_version}; "
                "leave weight_version out when resuming at a mark"
            )
        weight_version = resume_at.weight_version
    version = book.weight_version if weight_version is None else weight_version
    lineage = book.lineage + 1
    ledger.record(ev.RunRecovered(ledger.rules.to_dict(), RULES_VERSION, version, lineage, torn_bytes, library=VERSION))
    for batch in sorted(book.batches):
        ledger.record(ev.BatchReturned(batch, "recovery"))
    if resume_at is not None:
        evicts = on_rewind == "evict"
        ledger.record(ev.RunRewound(resume_at.mark, resume_at.seq, version, lineage, evicts))
        if evicts:
            _evict_abandoned(ledger, resume_at)
    running = [group.group_id for group in book.in_phase(Phase.RUNNING)]
    for group_id in running:
        ledger.record(ev.GroupRequeued(group_id, "recovery"))
    log.info("run recovered", seq=book.last_seq, torn_bytes=torn_bytes, requeued=len(running), lineage=lineage)


def _evict_abandoned(ledger: Ledger, mark: CheckpointMark) -> None:
    """Give up the training groups that ended on the line of weights behind the mark."""
    book = ledger.book
    ended = [group for phase in sorted(TERMINAL) for group in book.in_phase(phase, ev.TRAIN)]
    # Nobody waits for a batch yet, so sync mode owes nothing for them.
    credit = credit_of(("stale",), ledger.rules, unmet=False)
    for group in ended:
        if is_abandoned(group, mark):
            text = f"it ended behind mark {mark.mark}, which the run went back to"
            event = ev.GroupEvicted(group.group_id, ("stale",), book.lag(group), credit, message=text)
            ledger.record(event)


def is_abandoned(group: Group, mark: CheckpointMark) -> bool:
    """Of the line of weights behind the mark: submitted after it, or made for a version above its own."""
    return group.submitted_seq > mark.seq or group.stamp > mark.weight_version


def hear_of_damage(event_log: EventLog) -> None:
    """Warn of what the payload store finds damaged by itself."""
    if hasattr(event_log.payloads, "warn"):
        event_log.payloads.warn = log.warning


def keep_live_payloads(book: Book, event_log: EventLog) -> int:
    """Sweep payloads that no live group refers to; returns how many there were."""
    keep_only = getattr(event_log.payloads, "keep_only", None)
    if keep_only is None:
        return 0
    live = [*book.groups.values(), *book.aside.values()]
    swept = int(keep_only({ref.key for group in live for ref in group.payloads()}))
    if swept:
        log.info("payloads of no group were swept", count=swept)
    return swept


def _check_mark(book: Book, mark: CheckpointMark) -> None:
    if mark.run_id != book.run_id:
        raise BadMark(f"mark {mark.mark} is of run {mark.run_id!r}, this log is of run {book.run_id!r}")
    if mark.seq > book.last_seq:
        raise BadMark(
            f"mark {mark.mark} is at event {mark.seq}, but the log ends at event {book.last_seq}: "
            "the log is older than the checkpoint"
        )
    if all((m.mark, m.seq) != (mark.mark, mark.seq) for m in book.marks):
        kept = ", ".join(str(m.mark) for m in book.marks) or "none"
        raise BadMark(f"mark {mark.mark} can't be gone back to any more; marks that are kept: {kept}")


def stored_rules(book: Book) -> Rules:
    """The rules that the log was last run under.

    Raises:
        BadSettings: they can't be read, as when a later version wrote them; give the run rules.
    """
    advice = "Open the run with that version, or give it rules: open_run(rules=...)"
    wrote = f"groupstate {book.library or 'of an unknown version'} wrote them, and this is {VERSION}"
    if book.rules_version > RULES_VERSION:
        raise BadSettings(
            f"the rules in the log are of version {book.rules_version}, and this version of groupstate knows rules up "
            f"to version {RULES_VERSION}, so they may mean something else here: {wrote}. {advice}"
        )
    try:
        return recorded_rules(book.rules, "the rules in the log")
    except BadSettings as error:
        raise BadSettings(f"{error}. {wrote[0].upper()}{wrote[1:]}. {advice}") from error
