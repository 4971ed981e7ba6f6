"""What each kind of event changes in a book (`CHANGES`), one function for each.

Rule 1: everything that could be wrong is checked before anything is changed.
Rule 2: nothing here reads a rule, but the few that say how groups are kept in order (`in_force`); the log
carries them.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from groupstate.core import book_checks as checks
from groupstate.core import events as ev
from groupstate.core.group import Group, evolve, submitted, versions_used
from groupstate.core.held import MARKS_KEPT, UNDELIVERED, Credit, DatasetUse, Mark, OpenBatch, OpenRequest, Window
from groupstate.core.phases import IN_FLIGHT, TERMINAL, Phase, kept_empty
from groupstate.core.shelf import Shelf
from groupstate.errors import UnsupportedLog

if TYPE_CHECKING:
    from groupstate.core.book import Book

DEPARTED_IDS_MAX = 1_000_000
"""Ids of groups that have left, kept to refuse their reuse and to fence their late results (10 to 30 MB)."""

BASES = frozenset({"dispatch", "first_token", "oldest_token", "newest_token", "target_version"})
"""What the rules may count lag from."""

# Groups --------------------------------------------------------------------------------------------


def _submitted(book: "Book", event: ev.GroupSubmitted, seq: int, at_ns: int) -> None:
    checks.check_submitted(book, event)
    group = submitted(event, seq, at_ns)
    book.groups[group.group_id] = group
    _shelf(book, group.partition).add(group)
    book.totals["submitted"] += 1
    _dataset(book, group.dataset)["submitted"] += 1
    window = _count_in(book, group.partition)
    window.submitted += 1
    if event.cause == "refill":
        book.credits.popleft()
        book.totals["refills"] += 1
        window.refills += 1
    book.source_position = max(book.source_position, event.source_position + 1)
    if event.source_position >= 0:
        book.totals["drawn"] += 1
        known = book.source_positions.get(event.dataset, 0)
        book.source_positions[event.dataset] = max(known, event.source_position + 1)
    if group.partition == ev.TRAIN:
        _used_more(book, group)


def _used_more(book: "Book", group: Group) -> None:
    """A training group was submitted."""
    if group.target_version is not None:
        book.targets[group.target_version] += 1
    use = book.uses.get(group.dataset)
    if use is None:
        use = book.uses[group.dataset] = DatasetUse()
    if not use.open and not use.new:
        use.version = use.told_version = book.weight_version
    use.submitted += 1
    use.open += 1
    use.new += 1


def _changed(book: "Book", event: Any, seq: int, at_ns: int) -> Group:
    """Replace the live group that an event is about; gives it as it was."""
    group_id = event.group_id
    before = book.groups.get(group_id) or book.live(group_id, type(event))
    known = book.previewed
    if known is None or known[0] is not event or known[3] is not before or known[1:3] != (seq, at_ns):
        after = evolve(before, event, seq, at_ns)
    else:
        after = known[4]
    if after.phase is before.phase and after.aged_from == before.aged_from:
        book.groups[group_id] = after
    else:
        _put(book, before, after)
    return before


def _evicted(book: "Book", event: ev.GroupEvicted, seq: int, at_ns: int) -> None:
    before = book.live(event.group_id, ev.GroupEvicted)
    after = evolve(before, event, seq, at_ns)
    _leave(book, before, after.phase)
    _let_go(book, after)
    book.totals["evicted"] += 1
    book.totals["credit"] += event.credit
    _dataset(book, before.dataset)["evicted"] += 1
    book.credits.extend([Credit(before.needed, before.dataset, before.group_id, before.target_version)] * event.credit)
    if before.partition == ev.TRAIN:
        book.uses[before.dataset].evicted += 1
        book.uses[before.dataset].open -= 1
        if before.target_version is not None and before.target_version in book.targets:
            book.targets[before.target_version] -= 1
    window = _count_in(book, before.partition)
    window.evicted_groups += 1
    for reason in event.reasons:
        window.evicted[reason] += 1
        book.totals[f"evicted/{reason}"] += 1
    if "stale" in event.reasons:
        window.stale_lags.append(event.lag)
    if event.shared_value is not None:
        window.filtered_values[event.shared_value] += 1


def _fenced(book: "Book", event: ev.ResultFenced, seq: int, at_ns: int) -> None:
    checks.check_fenced(book, event)
    book.totals["fenced"] += 1
    group = book.groups.get(event.group_id)
    if group is not None:
        _count_in(book, group.partition).fenced += 1


def _session_finished(book: "Book", event: ev.SessionFinished, seq: int, at_ns: int) -> None:
    _changed(book, event, seq, at_ns)
    count_finished(book, 1, sum([row.response_tokens for row in event.trajectories]))


def count_finished(book: "Book", sessions: int, response_tokens: int) -> None:
    book.totals["sessions_finished"] += sessions
    book.totals["response_tokens"] += response_tokens


def _session_failed(book: "Book", event: ev.SessionFailed, seq: int, at_ns: int) -> None:
    before = _changed(book, event, seq, at_ns)
    book.totals[f"session_failed/{event.failure}"] += 1
    _count_in(book, before.partition).sessions_failed[event.failure] += 1


def _forfeited(book: "Book", event: ev.RefillForfeited, seq: int, at_ns: int) -> None:
    checks.check_forfeited(book, event)
    for _ in range(min(event.count, len(book.credits))):
        book.credits.pop()
        book.totals["forfeited"] += 1
    _count_in(book, ev.TRAIN).forfeited += event.count


def _requeued(book: "Book", event: ev.GroupRequeued, seq: int, at_ns: int) -> None:
    before = _changed(book, event, seq, at_ns)
    _count_in(book, before.partition).requeued += event.by_rule
    _let_go(book, replace(before, prompt=None))


# Batches -------------------------------------------------------------------------------------------


def _requested(book: "Book", event: ev.BatchRequested, seq: int, at_ns: int) -> None:
    checks.check_requested(book, event)
    book.requests[event.request] = OpenRequest(
        event.request, event.partition, event.size, event.weight_version, seq, at_ns
    )
    _shelf(book, event.partition)
    book.last_request = event.request


def _request_cancelled(book: "Book", event: ev.BatchRequestCancelled, seq: int, at_ns: int) -> None:
    checks.check_request_cancelled(book, event)
    del book.requests[event.request]


def _sampled(book: "Book", event: ev.BatchSampled, seq: int, at_ns: int) -> None:
    groups = checks.check_sampled(book, event)
    for group, lag in zip(groups, event.lags, strict=True):
        after = replace(evolve(group, event, seq, at_ns), batch=event.batch, sampled_lag=lag)
        _put(book, group, after)
        _dataset(book, group.dataset)["sampled"] += 1
        _opened(book, group, -1)
    del book.requests[event.request]
    book.batches[event.batch] = OpenBatch(
        event.batch, event.partition, event.group_ids, event.lags, event.weight_version, seq
    )
    book.last_batch = event.batch
    book.totals["batches"] += 1
    book.windows_out[event.batch] = _count_in(book, event.partition)
    book.windows[event.partition] = Window()


def _returned(book: "Book", event: ev.BatchReturned, seq: int, at_ns: int) -> None:
    batch = checks.check_batch(book, event, "return")
    del book.batches[event.batch]
    reported = book.windows_out.pop(event.batch, None)
    if reported is not None and event.reason in UNDELIVERED:
        _count_in(book, batch.partition).add(reported)
    for group_id in batch.group_ids:
        group = book.groups[group_id]
        _put(book, group, _back(book, group, evolve(group, event, seq, at_ns)))
        _opened(book, group, 1)
    book.totals["batches_returned"] += 1


def _opened(book: "Book", group: Group, one: int) -> None:
    """A training group has gone into a batch, or come out of one."""
    if group.partition != ev.TRAIN:
        return
    use = book.uses[group.dataset]
    use.open += one
    if one < 0:
        use.new = 0
        use.version = use.told_version = book.weight_version


def _back(book: "Book", before: Group, after: Group) -> Group:
    """A group made for one version keeps no lag: it is sampled at that version, or never."""
    kept = None if book.basis == "target_version" else before.sampled_lag
    return replace(after, kept_lag=kept, batch=0, sampled_lag=0)


def _committed(book: "Book", event: ev.BatchCommitted, seq: int, at_ns: int) -> None:
    batch = checks.check_batch(book, event, "commit")
    del book.batches[event.batch]
    book.windows_out.pop(event.batch, None)
    for group_id in batch.group_ids:
        before = book.groups[group_id]
        _leave(book, before, Phase.COMMITTED)
        _dataset(book, before.dataset)["committed"] += 1
        after = evolve(before, event, seq, at_ns)
        if book.marks:
            book.aside[group_id] = after
            book.committed_at.append((seq, group_id))
        else:
            _let_go(book, after)
    book.totals["committed"] += len(batch.group_ids)
    book.totals[f"committed/{batch.partition}"] += len(batch.group_ids)
    book.totals["batches_committed"] += 1


# The run -------------------------------------------------------------------------------------------


def _run_started(book: "Book", event: ev.RunStarted, seq: int, at_ns: int) -> None:
    in_force(book, event.rules, event.weight_version, event.lineage)
    book.run_id, book.started_at_ns, book.openings, book.library = event.run_id, at_ns, 1, event.library
    book.rules_version = event.rules_version


def _recovered(book: "Book", event: ev.RunRecovered, seq: int, at_ns: int) -> None:
    in_force(book, event.rules, event.weight_version, event.lineage)
    book.rules_version = event.rules_version
    book.closed = False
    book.openings += 1
    book.library = event.library
    # Who waited is gone with its process, and the source may hold more than it did.
    book.requests.clear()
    book.source_exhausted = False


def in_force(book: "Book", rules: dict[str, Any], weight_version: int, lineage: int) -> None:
    """The rules and the line of weights from here on."""
    basis = rules.get("basis", "dispatch")
    if basis not in BASES:
        raise UnsupportedLog(
            f"the log's rules count lag from {basis!r} (basis), which this version of groupstate doesn't know: "
            "a newer one wrote it. Open it with that version, or a later one"
        )
    book.rules = rules
    book.basis = basis
    book.kept_empty = kept_empty(rules)
    own = rules.get("datasets", {})
    classes = frozenset(name for name, settings in own.items() if settings.get("lag_max") is not None)
    if classes != book.lag_classes:
        book.lag_classes = classes
        for partition, shelf in book.shelves.items():
            shelf.classify(classes, (g for g in book.groups.values() if g.partition == partition))
    _at_version(book, weight_version, lineage)


def _at_version(book: "Book", weight_version: int, lineage: int) -> None:
    """A line of weights begins, maybe below where the one before it was."""
    book.weight_version = weight_version
    book.lineage = lineage
    for use in book.uses.values():
        use.version = min(use.version, weight_version)
        use.told_version = min(use.told_version, weight_version)


def _published(book: "Book", event: ev.WeightsPublished, seq: int, at_ns: int) -> None:
    book.weight_version = event.weight_version
    book.lineage = event.lineage
    needed_from = min([event.weight_version, *(mark.weight_version for mark in book.marks)])
    for version in [version for version in book.targets if version < needed_from]:
        del book.targets[version]


def _starved(book: "Book", event: ev.DatasetStarved, seq: int, at_ns: int) -> None:
    checks.check_starved(book, event)
    use = book.uses[event.dataset]
    use.told_version, use.new = book.weight_version, 0
    book.totals["starved"] += 1
    _count_in(book, ev.TRAIN).starved[event.dataset] += 1


def _exhausted(book: "Book", event: ev.SourceExhausted, seq: int, at_ns: int) -> None:
    book.source_exhausted = True


def _source_opened(book: "Book", event: ev.SourceOpened, seq: int, at_ns: int) -> None:
    book.source = event


def _held(book: "Book", event: ev.AdmissionHeld, seq: int, at_ns: int) -> None:
    book.held_reason = event.reason


def _marked(book: "Book", event: ev.CheckpointMarked, seq: int, at_ns: int) -> None:
    book.last_mark = event.mark
    book.marks.append(Mark(event.mark, seq, event.weight_version, event.lineage, event.name))
    del book.marks[:-MARKS_KEPT]
    book.mark_seqs.append(seq)
    while book.committed_at and book.committed_at[0][0] <= book.marks[0].seq:
        _let_go(book, book.aside.pop(book.committed_at.popleft()[1]))


def _rewound(book: "Book", event: ev.RunRewound, seq: int, at_ns: int) -> None:
    checks.check_rewound(book, event)
    _at_version(book, event.weight_version, event.lineage)
    book.marks = [mark for mark in book.marks if mark.seq <= event.mark_seq]
    while book.mark_seqs and book.mark_seqs[-1] > event.mark_seq:
        book.mark_seqs.pop()
    for group in list(book.groups.values()):
        capped = _capped(group, event.weight_version)
        if capped is not group:
            _shelf(book, group.partition).remove(group)
            _shelf(book, group.partition).add(capped)
            book.groups[group.group_id] = capped
    undone = [group_id for at, group_id in book.committed_at if at > event.mark_seq]
    book.committed_at = deque((at, g) for at, g in book.committed_at if at <= event.mark_seq)
    for group_id in undone:
        before = book.aside.pop(group_id)
        after = _capped(_back(book, before, evolve(before, event, seq, at_ns)), event.weight_version)
        book.groups[group_id] = after
        _shelf(book, after.partition).add(after)
        _dataset(book, after.dataset)["committed"] -= 1
        book.totals[f"committed/{after.partition}"] -= 1
        _opened(book, after, 1)
    book.departed.remove(undone)
    book.totals["committed"] -= len(undone)


def _closed(book: "Book", event: ev.RunClosed, seq: int, at_ns: int) -> None:
    book.closed = True


# Parts of these ------------------------------------------------------------------------------------


def _count_in(book: "Book", partition: ev.Partition) -> Window:
    if partition not in book.windows:
        book.windows[partition] = Window()
    return book.windows[partition]


def _shelf(book: "Book", partition: ev.Partition) -> Shelf:
    shelf = book.shelves.get(partition)
    if shelf is None:
        shelf = book.shelves[partition] = Shelf(book.lag_classes)
    return shelf


def _put(book: "Book", before: Group, after: Group) -> None:
    """Replace a live group by what it is in another phase, and move it between the indexes."""
    after = _aged(book, before, after)
    _shelf(book, before.partition).move(before, after)
    book.groups[after.group_id] = after


def _aged(book: "Book", before: Group, after: Group) -> Group:
    """A group that has just become terminal keeps the version of then, and counts its lag from what the basis
    says."""
    if before.phase not in IN_FLIGHT or after.phase not in TERMINAL:
        return after
    empty = not after.trajectory_count and after.partition == ev.TRAIN
    after = replace(
        after,
        ended_version=book.weight_version,
        kept_empty=empty and after.phase in book.kept_empty,
    )
    used = None if book.basis in {"dispatch", "target_version"} else versions_used(before)
    if used is None:
        return after
    first, oldest, newest = used
    version = {"first_token": first, "oldest_token": oldest, "newest_token": newest}[book.basis]
    return replace(after, version=version, aged_from=version)


def _leave(book: "Book", group: Group, phase: Phase) -> None:
    _shelf(book, group.partition).remove(group)
    del book.groups[group.group_id]
    depart(book, group.group_id, phase)


def _let_go(book: "Book", group: Group) -> None:
    if book.notes_released:
        book.released += group.payloads()


def depart(book: "Book", group_id: str, phase: Phase) -> None:
    book.departed.add(group_id, phase)
    if len(book.departed) > DEPARTED_IDS_MAX:
        book.departed.forget_oldest()


def _dataset(book: "Book", name: str) -> Counter[str]:
    if name not in book.datasets:
        book.datasets[name] = Counter()
    return book.datasets[name]


def _capped(group: Group, weight_version: int) -> Group:
    """Work of the abandoned line of weights counts its lag from the mark, but for what awaits a later version."""
    if group.ended_version > weight_version:
        group = replace(group, ended_version=weight_version)
    if group.aged_from <= weight_version or group.target_version is not None:
        return group
    return replace(group, aged_from=weight_version, rewound_to=weight_version)


Change = Callable[["Book", Any, int, int], object]
CHANGES: Final[dict[type[ev.Event], Change]] = {
    ev.RunStarted: _run_started,
    ev.WeightsPublished: _published,
    ev.SourceExhausted: _exhausted,
    ev.AdmissionHeld: _held,
    ev.DatasetStarved: _starved,
    ev.SourceOpened: _source_opened,
    ev.CheckpointMarked: _marked,
    ev.RunRecovered: _recovered,
    ev.RunRewound: _rewound,
    ev.RunClosed: _closed,
    ev.GroupSubmitted: _submitted,
    ev.GroupFinished: _changed,
    ev.GroupFailed: _changed,
    ev.GroupEvicted: _evicted,
    ev.GroupRequeued: _requeued,
    ev.ResultFenced: _fenced,
    ev.RefillForfeited: _forfeited,
    ev.SessionStarted: _changed,
    ev.SessionFinished: _session_finished,
    ev.SessionFailed: _session_failed,
    ev.BatchRequested: _requested,
    ev.BatchRequestCancelled: _request_cancelled,
    ev.BatchSampled: _sampled,
    ev.BatchReturned: _returned,
    ev.BatchCommitted: _committed,
}
