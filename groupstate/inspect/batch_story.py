"""Why a batch holds these groups, in this order, and what was passed over.

Rule: the book just before the batch was sampled says what there was to choose from; nothing is chosen again here.
"""

import os
from collections.abc import Iterable, Iterator

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.events import TRAIN
from groupstate.core.group import Group
from groupstate.core.phases import TERMINAL
from groupstate.core.rules import Rules, known_rules
from groupstate.core.select import is_for_now
from groupstate.errors import UnknownBatch
from groupstate.inspect.nearest import book_before
from groupstate.inspect.reasons import reasons_in_words, spread_in_words
from groupstate.inspect.replay import applied
from groupstate.inspect.story import waits_for
from groupstate.inspect.words import counted, joined, name_of, one_line, span_of
from groupstate.log.reading import beginning, read_log


@attrs.frozen
class Candidate:
    """A group that there was when the batch was sampled, with what its place in the order is made of."""

    group_id: str
    version: int
    """The weight version that the order goes by."""
    submitted_seq: int
    lag: int
    lag_max: int | None
    """The bound on its lag; None where it has none."""
    ended_seq: int
    """The event that made it terminal; 0 while it is in flight."""
    why: str
    """In words: what it brought, why it was passed over, or what it waits for."""


@attrs.frozen
class Evicted:
    """A group that was evicted since the batch before."""

    seq: int
    group_id: str
    reasons: tuple[str, ...]
    lag: int
    shared_value: float | None
    credit: int
    with_it: bool
    """Evicted in the same decision, right before the batch was written down."""
    why: str


@attrs.frozen
class BatchStory:
    batch: int
    seq: int
    """Of the event that sampled it."""
    at_ns: int
    partition: str
    weight_version: int
    request: int
    request_seq: int
    """Of the event that asked for it; 0 where that isn't known."""
    demand: int
    """Groups that were asked for."""
    waited_s: float
    older_requests: tuple[int, ...]
    """Requests of the partition that had come before and still waited."""
    sampleable: int
    """Groups that could have been taken, those of the batch and the surplus included."""
    in_flight: int
    selection: str
    order: str
    """What the order goes by, as a sentence."""
    taken: tuple[Candidate, ...]
    """In the order of the batch."""
    passed_over: tuple[Candidate, ...]
    """Sampleable and not taken, in the order of selection."""
    not_ready: tuple[Candidate, ...]
    """What the order would have put before the last one taken, had it been sampleable: in flight, or without a row."""
    evicted: tuple[Evicted, ...]
    """Since the partition's batch before, or since `told_from`."""
    told_from: int
    """The first event that was looked at."""
    batch_before_seq: int
    """Of the event that sampled the partition's batch before; 0 where it isn't among those that were looked at."""
    fate: str
    fate_seq: int
    """The event that ended it; 0 while it is with the trainer."""


def batch_story(records: Iterable[ev.Record], batch: int, base: Book | None = None) -> BatchStory:
    """Tell why a batch is as it is.

    Args:
        base: the book before the first of the records; None where they are all that there were.

    Raises:
        UnknownBatch: the log never sampled it, or what was there then is gone.
        LogError: the log isn't one that a run wrote.
    """
    book = Book() if base is None else base
    start = book.last_seq + 1
    if batch <= book.last_batch:
        raise UnknownBatch(batch, "tell of", _gone(book, batch, start))
    evicted: dict[ev.Partition, list[tuple[ev.Record, Group]]] = {}
    sampled: dict[ev.Partition, int] = {}
    remaining = iter(records)
    for record in remaining:
        event = record.event
        if isinstance(event, ev.BatchSampled):
            gone = evicted.pop(event.partition, [])
            if event.batch == batch:
                return _told(book, record, event, gone, (start, sampled.get(event.partition, 0)), remaining)
            sampled[event.partition] = record.seq
        if isinstance(event, ev.GroupEvicted) and event.group_id in book.groups:
            before = book.groups[event.group_id]
            evicted.setdefault(before.partition, []).append((record, before))
        applied(book, record)
    last = f"the log's last one is batch {book.last_batch}" if book.last_batch else "the log has no batch yet"
    raise UnknownBatch(batch, "tell of", f"was never sampled; {last}")


def batch_story_of(path: str | os.PathLike[str], batch: int) -> BatchStory:
    """The same of a run directory: no more is replayed than what follows the last snapshot with two batches to come.

    Raises:
        UnknownBatch, LogError: see `batch_story`.
        NotARun, CorruptLog, LostEvents, UnsupportedLog: it can't be read.
    """
    base, start = beginning(path)
    near = book_before(path, lambda book: book.last_batch >= batch - 1)
    if near is not None and near.last_seq >= start:
        base, start = near, near.last_seq + 1
    return batch_story(read_log(path, start), batch, base)


def _gone(book: Book, batch: int, start: int) -> str:
    held = book.batches.get(batch)
    known = "" if held is None else f" at event {held.seq}, with groups {joined(map(name_of, held.group_ids))}"
    return f"was sampled{known}, and what there was to choose from then is gone: events are told from {start} on"


def _told(
    book: Book,
    record: ev.Record,
    event: ev.BatchSampled,
    gone: list[tuple[ev.Record, Group]],
    since: tuple[int, int],
    rest: Iterator[ev.Record],
) -> BatchStory:
    rules = known_rules(book.rules)
    request = book.requests.get(event.request)
    taken = [(book.groups.get(group_id), group_id) for group_id in event.group_ids]
    last = max((_key(group, rules, event.partition) for group, _ in taken if group is not None), default=(0, 0))
    with_it = _same_decision(gone, record.seq)
    seq, fate = _fate(rest, event)
    passed_over = _passed_over(book, rules, event, last)
    return BatchStory(
        batch=event.batch,
        seq=record.seq,
        at_ns=record.at_ns,
        partition=event.partition,
        weight_version=event.weight_version,
        request=event.request,
        request_seq=0 if request is None else request.seq,
        demand=len(event.group_ids) if request is None else request.size,
        waited_s=0.0 if request is None else (record.at_ns - request.at_ns) / 1e9,
        older_requests=tuple(r.request for r in book.waiting(event.partition) if r.request < event.request),
        sampleable=book.ready_count(event.partition) + len(with_it),
        in_flight=book.in_flight_count(event.partition),
        selection=rules.selection if event.partition == TRAIN else "oldest_first",
        order=_order(rules, event.partition),
        taken=tuple(_taken(book, rules, group, group_id) for group, group_id in taken),
        passed_over=tuple(passed_over),
        not_ready=tuple(_not_ready(book, rules, event.partition, last)),
        evicted=tuple(_evicted(one, before, rules, with_it) for one, before in gone),
        told_from=since[0],
        batch_before_seq=since[1],
        fate=fate,
        fate_seq=seq,
    )


def _same_decision(gone: list[tuple[ev.Record, Group]], seq: int) -> frozenset[int]:
    """Evictions that were written down right before the batch: the surplus, and what a rule of the user's own drops."""
    found: set[int] = set()
    for record, _ in reversed(gone):
        event = record.event
        assert isinstance(event, ev.GroupEvicted)
        if record.seq != seq - 1 - len(found) or not {"surplus", "custom"} & set(event.reasons):
            break
        found.add(record.seq)
    return frozenset(found)


# The order -------------------------------------------------------------------------------------------------


def _key(group: Group, rules: Rules, partition: str) -> tuple[int, int]:
    """Where selection puts a group: the lower, the earlier."""
    freshest = partition == TRAIN and rules.selection == "freshest_first"
    return (-group.version if freshest else group.version, group.submitted_seq)


def _order(rules: Rules, partition: str) -> str:
    counted_from = "its stamp" if rules.basis in {"dispatch", "target_version"} else f"its {rules.basis}"
    counted_from = counted_from.replace("_", " ")
    then = "then in the order of submission"
    if partition != TRAIN:
        return f"validation takes the oldest weight version first ({counted_from}), {then}"
    if rules.has_own_selection:
        return "a rule of the run's own, which also says in which order"
    return {
        "oldest_first": f"the oldest weight version first ({counted_from}), {then}",
        "freshest_first": f"the newest weight version first ({counted_from}), {then}",
        "exact_version": "only groups made for the current weight version, in the order of submission",
    }[rules.selection]


# Groups ----------------------------------------------------------------------------------------------------


def _candidate(book: Book, rules: Rules, group: Group, why: str) -> Candidate:
    return Candidate(
        group.group_id,
        group.version,
        group.submitted_seq,
        book.lag(group),
        rules.lag_bound(group.dataset) if rules.bounds_lag else None,
        group.terminal_seq,
        why,
    )


def _taken(book: Book, rules: Rules, group: Group | None, group_id: str) -> Candidate:
    if group is None:
        left = book.departed.get(group_id)
        return Candidate(group_id, 0, 0, 0, None, 0, f"it was {left} before" if left else "it was never submitted")
    return _candidate(book, rules, group, _brought(group, rules))


def _brought(group: Group, rules: Rules) -> str:
    """What it ended with; or that it can't have been taken."""
    if group.batch:
        return f"batch {group.batch} holds it already: both can't be, see `groupstate check`"
    if group.phase not in TERMINAL:
        return f"it is {group.phase}: {waits_for(group, group.last_at_ns)}; see `groupstate check`"
    how = "partial" if group.partial else str(group.phase)
    parts = [f"{how}, {group.finished_count} of {group.size} sessions finished"]
    if spread := spread_in_words(group, rules):
        parts.append(spread)
    if group.kept_lag is not None:
        parts.append("its batch came back, so it keeps the lag that it was sampled with")
    return ", ".join(parts)


def _passed_over(book: Book, rules: Rules, event: ev.BatchSampled, last: tuple[int, int]) -> Iterator[Candidate]:
    taken = set(event.group_ids)
    groups = (group for group in book.ready(event.partition) if group.group_id not in taken)
    for group in sorted(groups, key=lambda group: _key(group, rules, event.partition)):
        yield _candidate(book, rules, group, _why_not_taken(book, rules, group, event, last))


def _why_not_taken(book: Book, rules: Rules, group: Group, event: ev.BatchSampled, last: tuple[int, int]) -> str:
    if not is_for_now(book, rules, group):
        return f"made for version {group.first_version}, and the batch is of version {event.weight_version}"
    if rules.has_own_selection and event.partition == TRAIN:
        return f"{rules.selection} did not select it"
    if _key(group, rules, event.partition) > last:
        return f"behind the last one taken: version {group.version}, submitted at event {group.submitted_seq}"
    if group.validation_round:
        return "kept for the validation round that submitted it"
    return "before the last one taken, and passed over: its round was given up, or the log isn't in the rules' order"


def _not_ready(book: Book, rules: Rules, partition: str, last: tuple[int, int]) -> Iterator[Candidate]:
    """Groups that the order would put before the last one taken."""
    unready = [
        group
        for group in book.groups.values()
        if group.partition == partition and not group.batch and (group.in_flight or not group.trajectory_count)
    ]
    for group in sorted(unready, key=lambda group: _key(group, rules, partition)):
        if _key(group, rules, partition) > last or group.kept_empty or (partition != TRAIN and not group.in_flight):
            continue
        why = f"{group.phase}: {waits_for(group, book.last_at_ns)}" if group.in_flight else f"{group.phase}, no row"
        yield _candidate(book, rules, group, why)


def _evicted(record: ev.Record, before: Group, rules: Rules, with_it: frozenset[int]) -> Evicted:
    event = record.event
    assert isinstance(event, ev.GroupEvicted)
    return Evicted(
        record.seq,
        event.group_id,
        event.reasons,
        event.lag,
        event.shared_value,
        event.credit,
        record.seq in with_it,
        reasons_in_words(event, before, rules),
    )


# What became of it -----------------------------------------------------------------------------------------


def _fate(rest: Iterator[ev.Record], sampled: ev.BatchSampled) -> tuple[int, str]:
    """The event that ended it, and how."""
    seq, fate = 0, "it is with the trainer, neither committed nor returned"
    for record in rest:
        event = record.event
        if isinstance(event, ev.BatchCommitted | ev.BatchReturned) and event.batch == sampled.batch:
            if isinstance(event, ev.BatchReturned):
                why = one_line(event.reason) or "no reason given"
                return record.seq, f"it came back untrained at event {record.seq} ({why})"
            seq, fate = record.seq, f"it was committed at event {record.seq}"
        elif isinstance(event, ev.RunRewound) and 0 < event.mark_seq < seq:
            return record.seq, f"{fate}, and the run went back to mark {event.mark} at event {record.seq}"
    return seq, fate


def summary(told: BatchStory) -> str:
    """The whole as one sentence."""
    waited = f"after {span_of(told.waited_s)}" if told.request_seq else "for a request that isn't told"
    return (
        f"{counted(len(told.taken), 'group')} of {told.sampleable} sampleable ones, {waited}, at version "
        f"{told.weight_version}; {counted(told.in_flight, 'group')} in flight"
    )
