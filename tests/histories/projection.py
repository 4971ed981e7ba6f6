"""What a golden log must lead to for ever: the part of a book that was promised, value by value.

`Book.digest()` is over everything that a book holds, so it changes with each field that a later version adds; it is
compared between two ways to the same book in one version, and never kept. What is kept is a digest over the
projection here: facts about the run that a user could name. They are

- groups in the book and those set aside, in the order of their submission: what was submitted, where they are, what
  their lag counts from, and of each session its state, attempt, failure and trajectories;
- where each group that has left went;
- what samplers wait for, the batches that are out, credit that is owed, marks that can be gone back to;
- totals, the counts since the last batch of each partition, and those of each dataset;
- weight version and lineage, positions in the source, and whether the run is held or closed.

Rule 1: each value is named here by itself, so that a new field in the book changes nothing.
Rule 2: a projection that logs were kept with is never edited. To have a new fact told, add another one, and keep new
logs with it.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from groupstate.core.book import Book
from groupstate.core.events import PayloadRef, TrajectoryRecord
from groupstate.core.group import Group, Session


def projection_1(book: Book) -> dict[str, Any]:
    """The facts that logs of format 1 were first kept with."""
    both = sorted([*book.groups.values(), *book.aside.values()], key=lambda group: group.submitted_seq)
    return {
        "groups": [_group_1(group, book) for group in both],
        "left": {group_id: str(phase) for group_id, phase in book.departed.items()},
        "ready": {name: [group.group_id for group in book.ready(name)] for name in book.partitions()},
        "requests": [
            [request.request, request.partition, request.size, request.weight_version, request.seq, request.at_ns]
            for request in book.requests.values()
        ],
        "batches": [
            [batch.batch, batch.partition, list(batch.group_ids), list(batch.lags), batch.weight_version]
            for batch in book.batches.values()
        ],
        "credits": [[credit.size, credit.dataset, credit.evicted, credit.target_version] for credit in book.credits],
        "marks": [[mark.mark, mark.seq, mark.weight_version, mark.lineage, mark.name] for mark in book.marks],
        "totals": _counts(book.totals),
        "windows": {name: _window_1(book, name) for name in sorted(book.windows)},
        "datasets": {name: _counts(counts) for name, counts in sorted(book.datasets.items())},
        "uses": {name: [use.submitted, use.evicted, use.open, use.version] for name, use in sorted(book.uses.items())},
        "run": [book.run_id, book.started_at_ns, book.openings, book.last_seq, book.last_at_ns, book.closed],
        "numbers": [book.last_request, book.last_batch, book.last_mark],
        "weights": [book.weight_version, book.lineage],
        "source": [
            book.source_position,
            dict(sorted(book.source_positions.items())),
            book.source_exhausted,
            None if book.source is None else [book.source.name, book.source.kind, book.source.details],
        ],
        "held": book.held_reason,
    }


def _counts(counts: Any) -> dict[str, int]:
    """Without those that are 0: whether such a one is listed says nothing."""
    return {str(name): count for name, count in sorted(counts.items()) if count}


def _group_1(group: Group, book: Book) -> dict[str, Any]:
    return {
        "id": group.group_id,
        "phase": str(group.phase),
        "submitted": [group.partition, group.dataset, group.size, group.needed, group.stamp, group.cause],
        "at": [group.submitted_seq, group.submitted_at_ns],
        "prompt": [group.source_position, _ref(group.prompt), group.prompt_length, group.target_version],
        "lag": [group.version, group.aged_from, group.kept_lag, book.lag(group)],
        "counts": [group.finished_count, group.failed_count, group.trajectory_count],
        "requeues": [group.requeue_count, group.rule_requeue_count],
        "ended": [str(group.terminal or ""), group.partial, group.cancelled, group.ended_version],
        "batch": [group.batch, group.sampled_lag],
        "sessions": [_session_1(session) for session in group.sessions],
    }


def _session_1(session: Session) -> list[Any]:
    return [
        session.state,
        session.attempt,
        session.tries,
        session.failure,
        session.message,
        session.weight_version,
        [session.started_at_ns, session.ended_at_ns],
        _ref(session.payload),
        [_row_1(row) for row in session.trajectories],
    ]


def _row_1(row: TrajectoryRecord) -> list[Any]:
    spans = [[span.start, span.stop, span.weight_version] for span in row.spans]
    tokens = [row.prompt_tokens, row.response_tokens]
    return [row.index, dict(sorted(row.metrics.items())), tokens, spans, [list(part) for part in row.environment]]


def _ref(ref: PayloadRef | None) -> list[int] | None:
    return None if ref is None else [ref.key, ref.length, ref.crc]


def _window_1(book: Book, partition: str) -> list[Any]:
    window = book.windows[partition]
    return [
        _counts(window.evicted),
        window.evicted_groups,
        window.stale_lags,
        window.submitted,
        window.refills,
        window.forfeited,
        window.fenced,
        window.requeued,
        _counts(window.sessions_failed),
        _counts(window.starved),
        _counts(window.filtered_values),
    ]


PROJECTIONS: dict[int, Callable[[Book], dict[str, Any]]] = {1: projection_1}
NEWEST = max(PROJECTIONS)

DIGITS = 12
"""Of the digests that are kept, one for each event: enough to tell two books apart, and to keep the files small."""


def digest(book: Book, number: int) -> str:
    data = msgspec.json.encode(PROJECTIONS[number](book), order="sorted")
    return hashlib.sha256(data).hexdigest()[:DIGITS]
