"""The life of one group, each event as a sentence with the numbers behind it.

Rule 1: the numbers are those of the log: a decision is told as it was made, under the rules in force then.
"""

import contextlib
import os
from collections.abc import Iterable
from typing import Final

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.group import Group, versions_used
from groupstate.core.phases import Phase
from groupstate.core.rules import known_rules
from groupstate.errors import UnknownGroup
from groupstate.inspect.nearest import book_before
from groupstate.inspect.reasons import reasons_in_words, spread_in_words
from groupstate.inspect.replay import applied
from groupstate.inspect.unknown import unknown_group
from groupstate.inspect.words import (
    FENCED,
    counted,
    how_known,
    joined,
    kind_of,
    name_of,
    one_line,
    rows_in_words,
    span_of,
)
from groupstate.log.reading import beginning, read_log


@attrs.frozen
class Step:
    """One thing that happened to the group, or that changed where it stands."""

    seq: int
    at_ns: int
    since_s: float
    """Seconds since the group was submitted."""
    kind: str
    text: str


@attrs.frozen
class Story:
    group_id: str
    partition: str
    size: int
    phase: str
    """Where the group is at the end of the log: a phase, or how it left."""
    now: str
    """The same as a sentence, with what it waits for."""
    held_up_by: str
    """Which session kept the group, and for how long; empty if nothing can be said."""
    versions: str
    """Which weight versions its tokens span, and which of them its lag counts from; empty for a single one."""
    steps: tuple[Step, ...]
    seen_at_ns: int = 0
    """When the log's last event was written, which ages are counted up to; 0 where nothing more can come of it."""


BY_USER: Final = "submitted by the user"
LISTED: Final = "dispatched outside, and listed here first"


def story(records: Iterable[ev.Record], group_id: str, base: Book | None = None) -> Story:
    """Tell the life of a group.

    Args:
        base: the book before the first of the records; None where they are all that there were.

    Raises:
        UnknownGroup: the log never submitted it, and the text names ids that are near; or what is told of it is gone.
        LogError: the log isn't one that a run wrote.
    """
    teller = _Teller(group_id, Book() if base is None else base)
    start = teller.book.last_seq + 1
    submitted: dict[str, None] = dict.fromkeys([*teller.book.departed, *teller.book.groups])
    for record in records:
        if isinstance(record.event, ev.GroupSubmitted):
            submitted[record.event.group_id] = None
        teller.take(record)
    if teller.last is None:
        raise unknown_group(group_id, "tell its story", submitted, left=teller.left, start=start)
    return teller.told()


def story_of(path: str | os.PathLike[str], group_id: str) -> Story:
    """The same of a run directory: no more is replayed than what follows the last snapshot before its submission.

    Raises:
        UnknownGroup, LogError: see `story`.
        NotARun, CorruptLog, LostEvents, UnsupportedLog: it can't be read.
    """
    base, start = beginning(path)
    near = book_before(path, lambda book: book.is_taken(group_id) is not None)
    if near is not None and near.last_seq >= start:
        # Of an id that nobody has submitted the whole log says what is near it.
        with contextlib.suppress(UnknownGroup):
            return story(read_log(path, near.last_seq + 1), group_id, near)
    return story(read_log(path, start), group_id, base)


class _Teller:
    def __init__(self, group_id: str, book: Book) -> None:
        self.group_id = group_id
        self.book = book
        self.rules = known_rules(book.rules)
        self.steps: list[Step] = []
        self.last: Group | None = book.groups.get(group_id) or book.aside.get(group_id)
        """The group as it last was in the book."""
        self.submitted_at_ns = 0
        self.held_up_by = ""
        self.observed = False
        """Its sessions run outside: the log knows them by what was listed."""
        self.batches: set[int] = set()
        self.left: Phase | None = book.departed.get(group_id)
        """How it left the book."""

    def take(self, record: ev.Record) -> None:
        """Apply a record and keep the sentence that it is worth, if any."""
        event = record.event
        if getattr(event, "observed", False) and getattr(event, "group_id", "") == self.group_id:
            self._note_observed()
        before = self.book.groups.get(self.group_id)
        owed_by = self.book.credits[0].evicted if self.book.credits else ""
        waited_s = self._waited_s(event, record.at_ns)
        applied(self.book, record)
        after = self.book.groups.get(self.group_id)
        self.last = after or self.last
        if after is None and before is not None:
            self.left = Phase.EVICTED if isinstance(event, ev.GroupEvicted) else Phase.COMMITTED
        if isinstance(event, ev.RunStarted | ev.RunRecovered):
            self.rules = known_rules(event.rules)
        text = self._text(event, before, after, owed_by, waited_s)
        if text:
            if isinstance(event, ev.GroupSubmitted) and event.group_id == self.group_id:
                self.submitted_at_ns = record.at_ns
            since_s = (record.at_ns - self.submitted_at_ns) / 1e9
            self.steps.append(Step(record.seq, record.at_ns, since_s, kind_of(event), text))

    def _note_observed(self) -> None:
        """Who submitted it can be told only now."""
        if not self.observed:
            self.observed = True
            self.steps = [attrs.evolve(step, text=step.text.replace(BY_USER, LISTED, 1)) for step in self.steps]

    def _waited_s(self, event: ev.AnyEvent, at_ns: int) -> float:
        """How long the sampler that a batch is for had waited."""
        request = self.book.requests.get(event.request) if isinstance(event, ev.BatchSampled) else None
        return 0.0 if request is None else (at_ns - request.at_ns) / 1e9

    def _text(
        self, event: ev.AnyEvent, before: Group | None, after: Group | None, owed_by: str, waited_s: float
    ) -> str:
        if isinstance(event, ev.GroupSubmitted):
            return self._submission(event, owed_by)
        if getattr(event, "group_id", "") == self.group_id:
            return self._own(event, before, after)
        if isinstance(event, ev.BatchSampled | ev.BatchCommitted | ev.BatchReturned):
            return self._batch(event, after, waited_s)
        if isinstance(event, ev.RunRewound) and before is None and after is not None:
            return f"the run went back to mark {event.mark}, which undoes the commit: {self._standing(after)}"
        if before is None or after is None:
            return ""
        return self._around(event, before, after)

    # The group's own events --------------------------------------------------------------------------

    def _submission(self, event: ev.GroupSubmitted, owed_by: str) -> str:
        refill = event.cause == "refill"
        if event.group_id != self.group_id:
            replaces = refill and owed_by == self.group_id
            return f"group {name_of(event.group_id)} is submitted in its place" if replaces else ""
        who = {
            "submit": BY_USER,
            "admission": "submitted by the rollout's own admission",
            "refill": f"submitted as a refill for {name_of(owed_by)}",
        }[event.cause]
        parts = [counted(event.size, "session"), f"partition {event.partition}", f"stamp {event.weight_version}"]
        if event.weight_version != self.book.weight_version:
            parts[-1] += f" at version {self.book.weight_version}"
        if event.source_position >= 0:
            parts.append(f"prompt {event.source_position} of the source")
        if event.dataset:
            parts.append(f"dataset {event.dataset}")
        if event.target_version is not None:
            parts.append(f"made for version {event.target_version}")
        if event.oversample:
            parts.append(f"{event.oversample} more than it needs")
        if event.validation_round:
            parts.append("for a validation round")
        return f"{who}: {', '.join(parts)}"

    def _own(self, event: ev.AnyEvent, before: Group | None, after: Group | None) -> str:
        if isinstance(event, ev.ResultFenced):
            return (
                f"a result of session {event.session} ({event.result}, attempt {event.attempt}) changed nothing: "
                f"{FENCED[event.reason]}"
            )
        assert before is not None
        if isinstance(event, ev.GroupEvicted):
            return self._eviction(event, before)
        assert after is not None
        if isinstance(event, ev.SessionStarted):
            worker = f" on {event.worker}" if event.worker else ""
            version = "" if event.weight_version is None else f", weight version {event.weight_version}"
            return f"session {event.session} started, attempt {event.attempt}{worker}{version}{how_known(event)}"
        if isinstance(event, ev.SessionFinished):
            took = _took(before, after, event)
            rows = rows_in_words(event.trajectories, stretches=True)
            return f"session {event.session} finished{took}{how_known(event)}: {rows}; {_settled(after)}"
        if isinstance(event, ev.SessionFailed):
            return self._failure(event, before, after)
        if isinstance(event, ev.GroupRequeued):
            self.held_up_by = ""
            attempts = sorted({session.attempt for session in after.sessions})
            why = one_line(event.reason) or "no reason given"
            return f"started over ({why}): what it had is dropped, attempt {joined(map(str, attempts))} is next"
        return self._end(after)

    def _failure(self, event: ev.SessionFailed, before: Group, after: Group) -> str:
        took = _took(before, after, event)
        message = f": {one_line(event.message)}" if event.message else ""
        retry = (
            f"attempt {event.attempt + 1} is due in {event.retry_in_s:g} s"
            if event.retry_in_s is not None
            else "no further attempt"
        )
        if event.failure == "spare":
            return f"session {event.session} was spare{took}: the group has all that it needs; {_settled(after)}"
        how = f"({event.failure}){took}{how_known(event)}{message}"
        return f"session {event.session} failed {how}; {retry}; {_settled(after)}"

    def _end(self, after: Group) -> str:
        self.held_up_by = (
            "which session ended last isn't known: they were observed" if self.observed else slowest(after)
        )
        if after.terminal is Phase.FAILURE:
            why = "it was cancelled" if after.cancelled else f"{after.failed_count} of {after.size} sessions failed"
            head = f"failed: {why}"
        elif after.partial:
            head = (
                f"finished in part: {after.finished_count} of {after.size} sessions finished, "
                f"survivors_min is {self.rules.survivors_min}"
            )
        elif after.oversample:
            head = f"finished: {after.finished_count} of {after.size} sessions finished, as many as it needs"
        else:
            head = f"finished: all {counted(after.size, 'session')} finished"
        parts = [head, counted(after.trajectory_count, "trajectory", "trajectories"), f"lag {self._lag(after)}"]
        return ", ".join([*parts, *filter(None, (spread_in_words(after, self.rules), self._versions(after)))])

    def _versions(self, group: Group) -> str:
        """Which versions the tokens of a group span, and what the rules make of it; nothing for a single one."""
        used = versions_used(group)
        if used is None or used[1] == used[2]:
            return ""
        return f"it spans versions {used[1]} to {used[2]}: its lag counts from {self._counted_from(group)}"

    def _counted_from(self, group: Group) -> str:
        basis = self.rules.basis
        if group.aged_from != group.version:
            return f"{group.aged_from}, the version that the run went back to"
        if group.target_version is not None:
            return f"{group.version}, for which it is made"
        if basis == "dispatch":
            return f"{group.version}, its stamp"
        if group.in_flight:
            return f"{group.version}, its stamp, until all of it has ended (basis {basis})"
        return f"{group.version}, its {basis.replace('_', ' ')}'s"

    def _lag(self, group: Group) -> str:
        lag = self.book.lag(group)
        bound = self.rules.lag_bound(group.dataset)
        return str(lag) if bound is None else f"{lag} (lag_max {bound})"

    def _eviction(self, event: ev.GroupEvicted, before: Group) -> str:
        return f"evicted, {reasons_in_words(event, before, self.rules)}"

    # Batches, and what happens around the group ------------------------------------------------------

    def _batch(
        self, event: ev.BatchSampled | ev.BatchCommitted | ev.BatchReturned, after: Group | None, waited_s: float
    ) -> str:
        if isinstance(event, ev.BatchSampled):
            if self.group_id not in event.group_ids:
                return ""
            self.batches.add(event.batch)
            lag = event.lags[event.group_ids.index(self.group_id)]
            most = None if after is None else self.rules.lag_bound(after.dataset)
            bound = "" if most is None else f" (lag_max {most})"
            return (
                f"sampled into batch {event.batch} of {counted(len(event.group_ids), 'group')} with lag {lag}{bound} "
                f"at version {event.weight_version}; the sampler had waited {span_of(waited_s)}"
            )
        if event.batch not in self.batches:
            return ""
        if isinstance(event, ev.BatchCommitted):
            assert self.last is not None
            end = "it is trained on" if self.last.partition == ev.TRAIN else "it ended as validation"
            return f"batch {event.batch} was committed: {end}, and has left"
        assert after is not None
        why = one_line(event.reason) or "no reason given"
        return f"batch {event.batch} came back untrained ({why}): {self._standing(after)}"

    def _standing(self, group: Group) -> str:
        return f"{group.phase} again, lag {self._lag(group)}"

    def _around(self, event: ev.AnyEvent, before: Group, after: Group) -> str:
        """What happens to the run while the group is in the book."""
        if isinstance(event, ev.WeightsPublished) and self.rules.lag_max is not None and after.phase != Phase.SAMPLED:
            return f"weight version {event.weight_version} was published: its lag is {self._lag(after)}"
        if isinstance(event, ev.RunRecovered):
            return f"the run was opened again at version {event.weight_version}, lineage {event.lineage}"
        if isinstance(event, ev.RunRewound):
            return (
                f"the run went back to mark {event.mark}, version {event.weight_version}: its lag is {self._lag(after)}"
            )
        if isinstance(event, ev.RunClosed):
            return f"the run closed ({one_line(event.reason) or 'no reason given'}) while it was {after.phase}"
        return ""

    # The end -----------------------------------------------------------------------------------------

    def told(self) -> Story:
        assert self.last is not None
        live = self.book.groups.get(self.group_id)
        phase = live.phase if live is not None else self.left
        assert phase is not None
        return Story(
            group_id=self.group_id,
            partition=self.last.partition,
            size=self.last.size,
            phase=str(phase),
            now=self._now(live, phase),
            held_up_by=waits_for(live, self.book.last_at_ns) if live and live.in_flight else self.held_up_by,
            versions=self._versions(self.last),
            steps=tuple(self.steps),
            seen_at_ns=0 if live is None or self.book.closed else self.book.last_at_ns,
        )

    def _now(self, live: Group | None, phase: Phase) -> str:
        if live is None:
            return f"{phase}: it has left the book"
        if live.in_flight:
            return f"{phase} for {span_of((self.book.last_at_ns - live.submitted_at_ns) / 1e9)}, {_settled(live)}"
        if phase is Phase.SAMPLED:
            return f"sampled: batch {live.batch} is with the trainer, neither committed nor returned"
        if live.trajectory_count or live.partition == ev.VALIDATION:
            return f"{phase} and sampleable, lag {self._lag(live)}"
        return f"{phase} without a trajectory, so it is never sampled"


def _took(before: Group, after: Group, event: ev.SessionFinished | ev.SessionFailed) -> str:
    if before.sessions[event.session].state != "open":
        return " before it began"
    if event.observed:
        return ""  # All sessions of a group are recorded when it is listed as ended.
    took_ns = after.sessions[event.session].ended_at_ns - before.sessions[event.session].started_at_ns
    return f" after {span_of(took_ns / 1e9)}"


def _settled(group: Group) -> str:
    return f"{group.settled_count} of {group.size} sessions have ended"


def slowest(group: Group) -> str:
    """Which session ended last, and how long the others had been done."""
    ends = sorted((session.ended_at_ns, number) for number, session in enumerate(group.sessions))
    if len(ends) < 2:
        return ""
    last_ns, last = ends[-1]
    attempts = group.sessions[last].attempt
    tries = f", in attempt {attempts}" if attempts > 1 else ""
    return f"session {last} ended last{tries}, {span_of((last_ns - ends[-2][0]) / 1e9)} after the one before it"


def waits_for(group: Group, now_ns: int) -> str:
    """The sessions that a group in flight waits for."""
    waits = [
        f"session {number} (attempt {session.attempt}, open for {span_of((now_ns - session.started_at_ns) / 1e9)})"
        if session.state == "open"
        else f"session {number} (attempt {session.attempt}, to begin)"
        for number, session in enumerate(group.sessions)
        if session.state in ("open", "waiting")
    ]
    return f"waits for {joined(waits)}" if waits else ""
