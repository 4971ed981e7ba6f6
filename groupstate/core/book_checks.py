"""What must hold of a book before an event is applied to it, where the state machine doesn't say so already.

Rule: an event that a user's call can make wrong raises an error that names what is wrong; one that only this library
writes is asserted.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.held import OpenBatch
from groupstate.core.phases import next_phase
from groupstate.core.shelf import has_rows
from groupstate.errors import BadMark, DuplicateGroup, UnknownBatch

if TYPE_CHECKING:
    from groupstate.core.book import Book


def check_submitted(book: "Book", event: ev.GroupSubmitted) -> None:
    where = book.is_taken(event.group_id)
    if where is not None:
        raise DuplicateGroup(event.group_id, where)
    assert event.size >= 1
    assert event.cause != "refill" or book.credits, "a refill without credit"


def check_fenced(book: "Book", event: ev.ResultFenced) -> None:
    if event.group_id not in book.groups:
        next_phase(book.departed.get(event.group_id), ev.ResultFenced, event.group_id)


def check_requested(book: "Book", event: ev.BatchRequested) -> None:
    assert event.request == book.last_request + 1


def check_request_cancelled(book: "Book", event: ev.BatchRequestCancelled) -> None:
    assert event.request in book.requests


def check_starved(book: "Book", event: ev.DatasetStarved) -> None:
    assert event.dataset in book.uses


def check_forfeited(book: "Book", event: ev.RefillForfeited) -> None:
    assert event.count > 0


def check_sampled(book: "Book", event: ev.BatchSampled) -> Sequence[Group]:
    assert event.request in book.requests
    assert event.batch == book.last_batch + 1
    assert len(set(event.group_ids)) == len(event.group_ids) == len(event.lags)
    groups = [book.live(group_id, ev.BatchSampled) for group_id in event.group_ids]
    for group in groups:
        next_phase(group.phase, ev.BatchSampled, group.group_id)
        assert has_rows(group)
        assert group.partition == event.partition
    return groups


def check_batch(book: "Book", event: ev.BatchReturned | ev.BatchCommitted, tried: str) -> OpenBatch:
    batch = book.batches.get(event.batch)
    if batch is None:
        state = "was committed or returned already" if event.batch <= book.last_batch else "was never sampled"
        raise UnknownBatch(event.batch, tried, state)
    return batch


def check_rewound(book: "Book", event: ev.RunRewound) -> None:
    if all(mark.seq != event.mark_seq for mark in book.marks):
        kept = ", ".join(f"{mark.mark} (event {mark.seq})" for mark in book.marks) or "none"
        raise BadMark(f"mark {event.mark} at event {event.mark_seq} can't be gone back to; marks that are kept: {kept}")
    assert not book.batches, "batches come back before the run is rewound"


Check = Callable[["Book", Any], object]
CHECKS: Final[dict[type[ev.Event], Check]] = {
    ev.GroupSubmitted: check_submitted,
    ev.ResultFenced: check_fenced,
    ev.RefillForfeited: check_forfeited,
    ev.DatasetStarved: check_starved,
    ev.BatchRequested: check_requested,
    ev.BatchRequestCancelled: check_request_cancelled,
    ev.BatchSampled: check_sampled,
    ev.BatchReturned: lambda book, event: check_batch(book, event, "return"),
    ev.BatchCommitted: lambda book, event: check_batch(book, event, "commit"),
    ev.RunRewound: check_rewound,
}
