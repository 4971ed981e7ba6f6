"""A run at one event, as a value: where its groups are, who waits for what, and the totals."""

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.explain import Explanation, explain
from groupstate.core.held import Credit, Mark, OpenBatch, Window
from groupstate.core.phases import Phase
from groupstate.core.rules import Rules, known_rules
from groupstate.inspect.replay import book_at

LIVE = (Phase.PENDING, Phase.RUNNING, Phase.FINISHED, Phase.FAILURE, Phase.SAMPLED)


@attrs.frozen
class Header:
    run_id: str
    library: str
    """Version of groupstate that wrote last."""
    seq: int
    """The event that this is the state after."""
    started_at_ns: int
    at_ns: int
    openings: int
    """How often the run was opened, the first time included."""
    closed: bool
    closed_for: str
    """What it was closed with: the name of an error, where one ended it. Empty while it is open."""
    weight_version: int
    lineage: int
    drawn: int
    """Prompts that were taken from the source and submitted."""
    source_exhausted: bool
    admission_held: str
    """Why admission is held; empty if it isn't."""
    rules: dict[str, Any]
    """The settings that aren't the defaults, those that only a later version knows included."""


@attrs.frozen
class PartitionCounts:
    partition: str
    phases: dict[str, int]
    """Live groups per phase."""
    sampleable: int


@attrs.frozen
class Overview:
    header: Header
    partitions: tuple[PartitionCounts, ...]
    totals: dict[str, int]
    """Counts of what happened since the log began, in all partitions. What going back to a mark undid is taken off
    `committed` and `committed/PARTITION`, which count groups, and off no other: `batches_committed` counts every
    commit."""
    waits: tuple[Explanation, ...]
    """Per partition: the groups in flight, and what its oldest waiting `sample()` waits for."""
    requests: tuple[tuple[int, str, int, float], ...]
    """Waiting `sample()` calls: number, partition, groups wanted, seconds waited."""
    batches: tuple[OpenBatch, ...]
    """Batches that are with the trainer."""
    credits: tuple[Credit, ...]
    """Refills that are owed."""
    marks: tuple[Mark, ...]
    """Checkpoint marks that the run can go back to."""
    windows: dict[str, dict[str, int]]
    """Per partition: what was counted since its last batch."""
    datasets: dict[str, dict[str, int]]


def overview(records: Iterable[ev.Record], seq: int | None = None, base: Book | None = None) -> Overview:
    """The run after event `seq`; None for the end of the log.

    Args:
        base: the book before the first of the records; None where they are all that there were.

    Raises:
        BadInput: the log has no such event.
        LogError: the log isn't one that a run wrote.
    """
    closings: list[ev.RunClosed] = []
    return overview_of(book_at(_noting(records, closings), seq, base), closings[-1] if closings else None)


def _noting(records: Iterable[ev.Record], closings: list[ev.RunClosed]) -> Iterator[ev.Record]:
    for record in records:
        if isinstance(record.event, ev.RunClosed):
            closings.append(record.event)
        yield record


def overview_of(book: Book, closing: ev.RunClosed | None = None) -> Overview:
    """The run as it is in a book.

    Args:
        closing: the event that closed it, where one did; a book knows only that.
    """
    rules = known_rules(book.rules)
    return Overview(
        header=_header(book, closing),
        partitions=tuple(_counts(book, partition) for partition in book.partitions()),
        totals=dict(sorted(book.totals.items())),
        waits=tuple(explained(book, rules, partition) for partition in book.partitions()),
        requests=tuple(
            (request.request, request.partition, request.size, (book.last_at_ns - request.at_ns) / 1e9)
            for request in book.requests.values()
        ),
        batches=tuple(book.batches.values()),
        credits=tuple(book.credits),
        marks=tuple(book.marks),
        windows={name: _window(window) for name, window in sorted(book.windows.items())},
        datasets={name: dict(sorted(counts.items())) for name, counts in sorted(book.datasets.items())},
    )


def _header(book: Book, closing: ev.RunClosed | None) -> Header:
    defaults = Rules().to_dict()
    own = {name: value for name, value in book.rules.items() if name not in defaults or value != defaults[name]}
    return Header(
        run_id=book.run_id,
        library=book.library,
        seq=book.last_seq,
        started_at_ns=book.started_at_ns,
        at_ns=book.last_at_ns,
        openings=book.openings,
        closed=book.closed,
        closed_for=closing.reason if book.closed and closing is not None else "",
        weight_version=book.weight_version,
        lineage=book.lineage,
        drawn=book.totals["drawn"],
        source_exhausted=book.source_exhausted,
        admission_held=book.held_reason,
        rules=own,
    )


def _counts(book: Book, partition: str) -> PartitionCounts:
    phases = {str(phase): book.count(phase, partition=partition) for phase in LIVE}
    return PartitionCounts(partition, phases, book.ready_count(partition))


def explained(book: Book, rules: Rules, partition: str) -> Explanation:
    """What `run.explain()` said there. Whether a source was given isn't in the log; that it gave prompts is."""
    drawn = book.source_position > 0 or book.source_exhausted
    return explain(book, rules, partition=partition, now_ns=book.last_at_ns, has_source=drawn, dispatches=drawn)


def _window(window: Window) -> dict[str, int]:
    counts = {
        "submitted": window.submitted,
        "refills": window.refills,
        "forfeited": window.forfeited,
        "fenced": window.fenced,
        "evicted": window.evicted_groups,
    }
    counts |= {f"evicted/{reason}": count for reason, count in sorted(window.evicted.items())}
    counts |= {f"session_failed/{kind}": count for kind, count in sorted(window.sessions_failed.items())}
    return {name: count for name, count in counts.items() if count}
