"""Which sampleable groups a waiting `sample()` gets, and what keeps it waiting.

Rule 1: pure functions; nothing is recorded here.
Rule 2: the order is total, so that it is the same in every process and every replay.
"""

import itertools
from collections.abc import Iterable, Iterator

from groupstate.core.book import Book
from groupstate.core.events import TRAIN
from groupstate.core.evict import Evict
from groupstate.core.group import Group
from groupstate.core.held import OpenRequest
from groupstate.core.rules import Rules


def ready_for(book: Book, rules: Rules, partition: str = TRAIN) -> int:
    """Groups that a `sample()` could be given at the current version."""
    if rules.targets_versions and partition == TRAIN:
        return book.ready_count_at(book.weight_version)
    return book.ready_count(partition)


def in_flight_for(book: Book, rules: Rules, partition: str = TRAIN) -> int:
    """Groups in flight that such a `sample()` could yet be given."""
    if rules.targets_versions and partition == TRAIN:
        return book.in_flight_count_at(book.weight_version)
    return book.in_flight_count(partition)


def is_for_now(book: Book, rules: Rules, group: Group) -> bool:
    """Whether the current version is one that the group may be sampled at."""
    return not rules.targets_versions or group.partition != TRAIN or group.first_version == book.weight_version


def held_by_stale(book: Book, rules: Rules, partition: str = TRAIN) -> Group | None:
    """`wait`: a group in flight that has reached its lag bound, and so holds a waiting sampler."""
    return at_lag_bound(book, rules, partition) if rules.waits_for_stale and book.waiting(partition) else None


def at_lag_bound(book: Book, rules: Rules, partition: str = TRAIN) -> Group | None:
    """`wait`: a group in flight that has reached its lag bound, and so would hold whoever samples."""
    if not rules.waits_for_stale:
        return None
    if partition != TRAIN and rules.wait_gates == "training":
        return None
    for groups in book.in_flight_by_age(partition):
        oldest = next(groups)
        bound = rules.lag_bound(oldest.dataset)
        if bound is not None and book.lag(oldest) >= bound:
            return oldest
    return None


def why_not(book: Book, rules: Rules, request: OpenRequest) -> str | None:
    """What keeps the oldest waiting `sample()` of a partition from being served; None if nothing does."""
    ready = ready_for(book, rules, request.partition)
    if ready < request.size:
        made = ""
        if rules.targets_versions and request.partition == TRAIN:
            made = f" at weight version {book.weight_version}, for which they are made"
        return f"{ready} of {request.size} groups are sampleable{made}"
    held = why_held(book, rules, request.partition)
    if held is not None:
        return held
    if request.partition == TRAIN and rules.drains and book.in_flight_count():
        return f"{book.in_flight_count()} groups in flight are being drained"
    if request.partition == TRAIN and rules.has_own_selection:
        return f"selection {rules.selection!r} has taken none of the {ready} sampleable groups"
    return None


def why_held(book: Book, rules: Rules, partition: str = TRAIN) -> str | None:
    """How `wait` holds a partition; None if it doesn't."""
    oldest = held_by_stale(book, rules, partition)
    if oldest is None:
        return None
    bound = rules.lag_bound(oldest.dataset)
    return f"group {oldest.group_id!r} in flight has lag {book.lag(oldest)}, the bound is {bound}"


def selected(
    book: Book,
    rules: Rules,
    request: OpenRequest,
    *,
    wanted: frozenset[str] | None = None,
    reserved: frozenset[str] = frozenset(),
) -> list[Group]:
    """The first groups by the rules' order; fewer than the request's size if there are no more.

    Args:
        wanted: the very groups to take; None for any that are not `reserved` for somebody else.
    """
    ready = _in_order(book, rules, request.partition)
    if wanted is not None:
        ready = (group for group in ready if group.group_id in wanted)
    elif reserved:
        ready = (group for group in ready if group.group_id not in reserved)
    return list(itertools.islice(ready, request.size))


def _in_order(book: Book, rules: Rules, partition: str) -> Iterator[Group]:
    """Validation always takes the oldest first."""
    if partition == TRAIN and rules.selection == "freshest_first":
        return book.freshest(partition)
    if partition == TRAIN and rules.targets_versions:
        return book.ready_at(book.weight_version, partition)
    return book.ready(partition)


def surplus(book: Book, rules: Rules, request: OpenRequest, chosen: Iterable[Group]) -> list[Evict]:
    """Sync mode with a filter: what is sampleable beyond a full batch is discarded."""
    if not rules.drains or request.partition != TRAIN or book.source_exhausted:
        return []
    if rules.batch_size is None or request.size < rules.batch_size:
        return []
    taken = {group.group_id for group in chosen}
    return [Evict(g.group_id, ("surplus",), book.lag(g), 0) for g in book.ready() if g.group_id not in taken]


def unservable(book: Book, rules: Rules, *, no_more: bool = False) -> OpenRequest | None:
    """With no more prompts to come: the first waiting training sampler that what is left can't serve.

    Args:
        no_more: the source gives nothing any more, exhausted or not.
    """
    if not (book.source_exhausted or no_more) or book.credits:
        return None
    left = ready_for(book, rules) + in_flight_for(book, rules)
    for request in book.waiting():
        if request.size > left:
            return request
        left -= request.size
    return None
