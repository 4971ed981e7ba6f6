"""The only writer of the log.

Rule 1: check, post to the log, apply to the book: in this order and without suspending between them.
Rule 2: the end of the last session and the group's terminal event are one unit of the log.
Rule 3: a result for anything but the open attempt is fenced: recorded, counted, without effect.
"""

import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.group import SETTLED, Group, fence_reason, terminal_event
from groupstate.core.phases import Phase
from groupstate.core.rules import Rules
from groupstate.core.trajectory import Yielded, yielded
from groupstate.errors import (
    LogError,
    LogFailed,
    SessionStateError,
    UnknownBatch,
    UnknownGroup,
    UnusableResult,
    WeightVersionError,
)
from groupstate.log.port import EventLog
from groupstate.logs import Logger

log = Logger("groupstate.ledger")

MESSAGE_CHARS_MAX = 2_000
"""Length at which a failure's text is cut: a log of a run with a million failures must stay readable."""

CUT = " ... (cut)"

DOUBLINGS_MAX = 60
"""Of the delay before an attempt: more would be longer than anything lasts, and past what a number can hold."""

Observer = Callable[[ev.Record], None]

_SESSION_ENDS = (ev.SessionFinished, ev.SessionFailed)


@attrs.frozen
class Ending:
    """How sessions of a group that still run are brought to an end from outside."""

    failure: ev.FailureKind
    message: str
    cancels: bool = False
    """The group counts as cancelled; else what it has yielded decides what it is."""


CANCELLED = Ending("cancelled", "cancelled by run.cancel", cancels=True)
DOOMED = Ending("cancelled", "the group could not be sampled any more", cancels=True)
ABANDONED = Ending("cancelled", "the validation round that it was for was given up", cancels=True)
SPARE = Ending("spare", "the group has all the sessions that it needs")


class Ledger:
    def __init__(self, event_log: EventLog, rules: Rules, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.log = event_log
        self.rules = rules
        self.clock_ns = clock_ns
        self.book = Book()
        self.observers: list[Observer] = []
        """Called after each record was applied; they take note and never record."""
        self.listeners: dict[type[ev.Event], tuple[Observer, ...]] = {}
        """The same for events of one kind, after the observers: who asks for few kinds costs the others nothing."""
        self.whole_seq = 0
        """The last event of the last step of which all is done: applied, and told to observers and listeners."""
        self.after_step: Callable[[], None] = lambda: None
        """Called once all that `record` wrote is applied."""
        self.settle: Callable[[], None] = lambda: None
        """Runs the rules; called once a step from outside is recorded."""
        self.run_key = str(getattr(event_log, "log_id", "")) or uuid.uuid4().hex
        """What batches are told apart by that come from several runs. A log in memory has no id."""
        self.endings: dict[str, Ending] = {}
        """Groups whose open sessions are being ended, and that have not settled yet."""

    # Recording ---------------------------------------------------------------------------------------

    def record(self, event: ev.AnyEvent) -> int:
        """Number one event, keep it, apply it; with the terminal event that follows from it.

        Returns:
            The seq of the last record written.

        Raises:
            GroupstateError: the event can't happen now; nothing has changed.
            LogFailed: the log is broken; nothing has changed.
        """
        seq = self.book.last_seq + 1
        at_ns = self.clock_ns()
        after = self.book.preview(event, seq, at_ns)
        records = [ev.Record(seq, at_ns, event)]
        if after is not None and isinstance(event, _SESSION_ENDS):
            ending = self.endings.get(event.group_id)
            terminal = terminal_event(
                after,
                survivors_min=self.rules.survivors_min,
                cancelled=ending is not None and ending.cancels,
            )
            if terminal is not None:
                records.append(ev.Record(seq + 1, at_ns, terminal))
        self._keep(records)
        return records[-1].seq

    def _keep(self, records: list[ev.Record]) -> None:
        """Post what was checked, as one unit of the log, and take it in."""
        self.log.post(records)
        self.apply(records)
        self.after_step()

    def apply(self, records: Iterable[ev.Record]) -> None:
        """Take records that are in the log already into the book, all of them.

        Raises:
            What an observer or a listener raised first, once the book is as the log has it; an interrupt goes before
            errors, and what else was raised stands in the notes.
        """
        apply, observers, listeners = self.book.apply, self.observers, self.listeners
        faults: list[BaseException] = []
        for record in records:
            apply(record)
            if self.endings and isinstance(record.event, ev.GroupFinished | ev.GroupFailed | ev.GroupRequeued):
                self.endings.pop(record.event.group_id, None)
            try:
                for observer in observers:
                    observer(record)
                for listener in listeners.get(type(record.event), ()):
                    listener(record)
            except BaseException as error:
                faults.append(error)
        if self.book.released:
            self.log.payloads.free(self.book.released)
            self.book.released = []
        if faults:
            _raise_first(faults)
        self.whole_seq = self.book.last_seq

    def listen(self, listener: Observer, kinds: Iterable[type[ev.Event]]) -> None:
        """Call `listener` for each event of these kinds from here on."""
        for kind in kinds:
            self.listeners[kind] = (*self.listeners.get(kind, ()), listener)

    def unlisten(self, listener: Observer, kinds: Iterable[type[ev.Event]]) -> None:
        """Call it no more; where it wasn't called nothing changes."""
        for kind in kinds:
            self.listeners[kind] = tuple(each for each in self.listeners.get(kind, ()) if each != listener)

    # Sessions ----------------------------------------------------------------------------------------

    def start(
        self, group_id: str, session: int, attempt: int | None = None, *, worker: str = "", version: int | None = None
    ) -> int | None:
        """Open the attempt that is due.

        Args:
            attempt: the attempt that the caller means; None for the one that is due.
            version: weight version of the first token, where it is known.

        Returns:
            The attempt's number; None if it was fenced.
        """
        group = self._addressed(group_id, session, attempt or 0, "started")
        if group is None:
            return None
        number = group.sessions[session].attempt if attempt is None else attempt
        if self._fenced(group, session, number, "started"):
            return None
        self.record(ev.SessionStarted(group_id, session, number, worker, version))
        self.settle()
        return number

    def start_all(self, group_id: str, *, version: int | None = None) -> bool:
        """Open the attempts that are due of a group's sessions, as one unit of the log: they begin together.

        Returns:
            Whether they are open; else nothing has changed, since the group has left or not all of them wait.
        """
        group = self.book.groups.get(group_id)
        if group is None or group.phase is not Phase.PENDING or any(s.state != "waiting" for s in group.sessions):
            return False
        seq, at_ns = self.book.last_seq, self.clock_ns()
        self._keep(
            [
                ev.Record(seq + number + 1, at_ns, ev.SessionStarted(group_id, number, session.attempt, "", version))
                for number, session in enumerate(group.sessions)
            ]
        )
        self.settle()
        return True

    def finish(self, group_id: str, session: int, attempt: int | None, result: Any) -> ev.FenceReason | None:
        """Record what an attempt returned: its trajectories, or a failure if there are none to use.

        Args:
            result: what the session returned, or the `Yielded` that was made of it.

        Returns:
            None if it was taken, else why it was fenced.

        Raises:
            UnusableResult: the result can't be recorded; the session's failure is.
            SessionStateError: the attempt was never started, or there is no such session.
        """
        group = self._addressed(group_id, session, attempt or 0, "finished")
        if group is None:
            return "gone"
        number = group.sessions[session].attempt if attempt is None else attempt
        fenced = self._fenced(group, session, number, "finished")
        if fenced:
            return fenced
        self._need_open(group, session)
        if group.filled:
            self._end(ev.SessionFailed(group_id, session, number, SPARE.failure, SPARE.message))
            return "settled"
        try:
            given = result if type(result) is Yielded else yielded(result, session=session, group_id=group_id)
            if given.error:
                raise UnusableResult(given.error)
        except UnusableResult as error:
            self._end(ev.SessionFailed(group_id, session, number, "refused", cut(str(error))))
            raise
        if not given.records and self.rules.empty_session == "fail":
            self._end(ev.SessionFailed(group_id, session, number, "empty", "it returned no trajectory"))
            return None
        ref = None if given.payload is None else self.log.payloads.put(given.payload)
        try:
            self._end(ev.SessionFinished(group_id, session, number, given.records, ref))
        except LogFailed:
            raise
        except LogError as error:
            # Nothing was written: what got past the door can't be kept, and that is this session's failure alone.
            self._end(ev.SessionFailed(group_id, session, number, "refused", cut(str(error))))
            raise UnusableResult(f"session {session} of group {group_id!r} can't be recorded: {error}") from error
        return None

    def fail(
        self,
        group_id: str,
        session: int,
        attempt: int | None,
        failure: ev.FailureKind,
        message: str = "",
        *,
        retryable: bool = False,
    ) -> ev.FenceReason | None:
        """Record that an attempt, begun or not, ended without a result.

        Returns:
            None if it was taken, else why it was fenced.
        """
        group = self._addressed(group_id, session, attempt or 0, "failed")
        if group is None:
            return "gone"
        number = group.sessions[session].attempt if attempt is None else attempt
        fenced = self._fenced(group, session, number, "failed")
        if fenced:
            return fenced
        delay = self._retry_delay(group, session) if retryable else None
        self._end(ev.SessionFailed(group_id, session, number, failure, cut(message), delay))
        return None

    def _end(self, event: ev.SessionFinished | ev.SessionFailed) -> None:
        if isinstance(event, ev.SessionFailed):
            self._record_failure(event)
        else:
            self.record(event)
        self.settle()

    def _record_failure(self, event: ev.SessionFailed) -> None:
        seq = self.book.last_seq + 1
        self.record(event)
        # Without its text, which may be a prompt's or an answer's.
        log.info(
            "session failed",
            group=event.group_id,
            session=event.session,
            attempt=event.attempt,
            kind=event.failure,
            retried=event.retry_in_s is not None,
            seq=seq,
        )

    def _retry_delay(self, group: Group, session: int) -> float | None:
        """Seconds until the next attempt; None if there is none."""
        tries = group.sessions[session].tries
        if tries >= self.rules.attempts_max or group.group_id in self.endings or group.filled:
            return None
        return retry_delay_s(self.rules, tries)

    def _addressed(
        self, group_id: str, session: int, attempt: int, result: Literal["started", "finished", "failed"]
    ) -> Group | None:
        """The live group that a result is for; a result for one that has left is fenced as gone."""
        group = self.book.groups.get(group_id)
        if group is None:
            if group_id not in self.book.departed:
                raise UnknownGroup(group_id, f"record that session {session} {result}", "it was never submitted")
            self._fence(group_id, session, attempt, result, "gone")
            return None
        if not 0 <= session < group.size:
            raise SessionStateError(
                f"group {group_id!r} has sessions 0 to {group.size - 1}, so there is no session {session}"
            )
        return group

    def _fenced(
        self, group: Group, session: int, attempt: int, result: Literal["started", "finished", "failed"]
    ) -> ev.FenceReason | None:
        reason = fence_reason(group, session, attempt, result)
        if reason is not None:
            self._fence(group.group_id, session, attempt, result, reason)
        return reason

    def _fence(
        self,
        group_id: str,
        session: int,
        attempt: int,
        result: Literal["started", "finished", "failed"],
        reason: ev.FenceReason,
    ) -> None:
        seq = self.record(ev.ResultFenced(group_id, session, attempt, result, reason))
        log.info(
            "result fenced", group=group_id, session=session, attempt=attempt, result=result, reason=reason, seq=seq
        )

    @staticmethod
    def _need_open(group: Group, session: int) -> None:
        state = group.sessions[session].state
        if state != "open":
            raise SessionStateError(
                f"session {session} of group {group.group_id!r} is {state}, so it cannot finish; start it first"
            )

    # Batches -----------------------------------------------------------------------------------------

    def commit(self, batch: int, run_key: str = "") -> int:
        """The trainer is done with a batch, for good. See `record`.

        Args:
            run_key: of the run that the batch was sampled from; empty where only its number is known.

        Raises:
            UnknownBatch: it isn't out, or is another run's.
        """
        self._need_own(batch, run_key, "commit")
        return self.record(ev.BatchCommitted(batch))

    def release(self, batch: int, run_key: str = "") -> int:
        """Give a batch back untrained. See `commit`."""
        self._need_own(batch, run_key, "release")
        return self.record(ev.BatchReturned(batch, "released"))

    def _need_own(self, batch: int, run_key: str, tried: str) -> None:
        if run_key not in ("", self.run_key):
            raise UnknownBatch(
                batch,
                tried,
                f"is of run {run_key!r}, and this is run {self.run_key!r}; {tried} it where it was sampled",
            )

    # Groups and weights ------------------------------------------------------------------------------

    def end(self, group_id: str, ending: Ending) -> None:
        """End the open sessions of a group that nobody but the caller runs; each is recorded as its end."""
        ending = self.mark_ending(group_id, ending)
        for number, session in enumerate(self.book.group(group_id).sessions):
            if session.state not in SETTLED:
                message = cut(ending.message)
                self._record_failure(ev.SessionFailed(group_id, number, session.attempt, ending.failure, message))
        self.settle()

    def mark_ending(self, group_id: str, ending: Ending) -> Ending:
        """Say how a group's open sessions end. Of two endings the first holds, but one that cancels the group goes
        before one that doesn't."""
        held = self.endings.get(group_id)
        if held is None or (ending.cancels and not held.cancels):
            self.endings[group_id] = ending
        return self.endings[group_id]

    def publish(self, weight_version: int) -> None:
        """Make a weight version the current one. The current one again changes nothing.

        Raises:
            WeightVersionError: it is below the current one.
        """
        current = self.book.weight_version
        if weight_version < current:
            raise WeightVersionError(
                f"weight version {weight_version} is below the current version {current} of lineage "
                f"{self.book.lineage}; versions only rise within a lineage. To go back to a checkpoint, "
                "open the run with resume_at=mark"
            )
        if weight_version > current:
            self.record(ev.WeightsPublished(weight_version, self.book.lineage))
        self.settle()


def retry_delay_s(rules: Rules, tries: int) -> float:
    """Seconds between the end of an attempt, of so many so far, and the next one: doubled each time."""
    return float(rules.retry_delay_s * 2 ** min(tries - 1, DOUBLINGS_MAX))


def cut(message: str) -> str:
    """A text that can be stored: not endless, and without half a surrogate pair."""
    whole = message.encode(errors="backslashreplace").decode()
    if len(whole) <= MESSAGE_CHARS_MAX:
        return whole
    return whole[: MESSAGE_CHARS_MAX - len(CUT)] + CUT


def _raise_first(faults: list[BaseException]) -> NoReturn:
    first = min(faults, key=lambda fault: isinstance(fault, Exception))
    for other in faults:
        if other is not first:
            first.add_note(f"then {type(other).__name__} was raised too: {other}")
    try:
        raise first
    finally:
        faults.clear()  # Its traceback has the frames that have these.
        del first
