"""A book as plain values that can be kept, and the same book again.

Rule 1: capturing copies references alone, so it may be done between two events; turning it into bytes can wait for
another thread, because groups are values that nothing changes.
Rule 2: fields of what is kept are only ever appended, with a default, as with events.
Rule 3: a book that was restored and one that was replayed are the same in every respect.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

import attrs
import msgspec
from msgspec.structs import replace

from groupstate.core.book import Book
from groupstate.core.book_changes import in_force
from groupstate.core.departed import Blocks, Departed, Left, index_parts, parts_of
from groupstate.core.events import SourceOpened
from groupstate.core.group import Group, without_yield
from groupstate.core.held import Credit, DatasetUse, Mark, OpenBatch, OpenRequest, Window
from groupstate.core.phases import Phase
from groupstate.core.shelf import Shelf

STATE_VERSION: Final = 2
"""Raised where an older library would misread a newer state."""


class LaterState(ValueError):
    """A state that a later version of the library wrote, and that this one would misread."""


PACKED_SINCE: Final = 2
"""The version of a state beside which ids of groups that have left are packed."""

GROUPS_PER_PART: Final = 500
IDS_PER_PART: Final = 20_000
BLOCKS_PER_PART: Final = 20
BUCKETS_PER_PART: Final = 2_000
"""Sizes of the parts: one is encoded in about a millisecond, so that an event loop beside it is not held up."""


class BookState(msgspec.Struct, kw_only=True):
    """All of a book but its groups and the ids of those that have left."""

    version: int = 1
    run_id: str = ""
    started_at_ns: int = 0
    openings: int = 0
    library: str = ""
    rules: dict[str, Any] = {}
    rules_version: int = 1
    weight_version: int = 0
    lineage: int = 1
    last_seq: int = 0
    last_at_ns: int = 0
    last_request: int = 0
    last_batch: int = 0
    last_mark: int = 0
    source_position: int = 0
    source_positions: dict[str, int] = {}
    source_exhausted: bool = False
    source: SourceOpened | None = None
    held_reason: str = ""
    closed: bool = False
    requests: list[OpenRequest] = []
    batches: list[OpenBatch] = []
    credits: list[Credit] = []
    marks: list[Mark] = []
    mark_seqs: list[int] = []
    windows: dict[str, dict[str, Any]] = {}
    windows_out: dict[int, dict[str, Any]] = {}
    totals: dict[str, int] = {}
    datasets: dict[str, dict[str, int]] = {}
    uses: dict[str, DatasetUse] = {}
    targets: dict[int, int] = {}
    committed_at: list[tuple[int, str]] = []
    phases: dict[str, dict[str, list[int]]] = {}
    """Per partition and phase the groups, as places in the list of all, in the order in which they came to it."""


@attrs.frozen
class Capture:
    """A book at one moment."""

    state: BookState
    groups: Sequence[Group]
    aside: Sequence[Group]
    departed: Departed
    live: bool = False
    """Finished groups are kept without what their sessions yielded."""

    def told(self, groups: Sequence[Group], start: int = 0, stop: int | None = None) -> list[Group]:
        """Some of the groups, as they are kept."""
        some = islice(groups, start, stop)
        return list(map(without_yield, some)) if self.live else list(some)


class _Version(msgspec.Struct):
    """All that is read of a state of a later version."""

    version: int = 1


def capture(book: Book) -> Capture:
    """The book as it is now. Costs a copy of its lists, not of what is in them."""
    return Capture(
        _state(book, list(book.committed_at)),
        list(book.groups.values()),
        list(book.aside.values()),
        book.departed.copy(),
    )


def capture_live(book: Book) -> Capture:
    """The same for looking alone: without the groups that have left, neither those that a mark could bring back nor the
    ids of the others, and without what the sessions of finished groups yielded. Its size follows what is live."""
    return Capture(_state(book, []), list(book.groups.values()), [], Departed(), live=True)


def _state(book: Book, committed_at: list[tuple[int, str]]) -> BookState:
    places = {group_id: place for place, group_id in enumerate(book.groups)}
    return BookState(
        run_id=book.run_id,
        started_at_ns=book.started_at_ns,
        openings=book.openings,
        library=book.library,
        rules=book.rules,
        rules_version=book.rules_version,
        weight_version=book.weight_version,
        lineage=book.lineage,
        last_seq=book.last_seq,
        last_at_ns=book.last_at_ns,
        last_request=book.last_request,
        last_batch=book.last_batch,
        last_mark=book.last_mark,
        source_position=book.source_position,
        source_positions=dict(book.source_positions),
        source_exhausted=book.source_exhausted,
        source=book.source,
        held_reason=book.held_reason,
        closed=book.closed,
        requests=list(book.requests.values()),
        batches=list(book.batches.values()),
        credits=list(book.credits),
        marks=list(book.marks),
        mark_seqs=list(book.mark_seqs),
        windows={name: _flat(window) for name, window in book.windows.items()},
        windows_out={batch: _flat(window) for batch, window in book.windows_out.items()},
        totals=dict(book.totals),
        datasets={name: dict(counts) for name, counts in book.datasets.items()},
        uses={name: attrs.evolve(use) for name, use in book.uses.items()},
        targets=dict(book.targets),
        committed_at=committed_at,
        phases={
            partition: {str(phase): [places[g] for g in ids] for phase, ids in shelf.phases.items() if ids}
            for partition, shelf in book.shelves.items()
        },
    )


def restore(taken: Capture) -> Book:
    """A book that goes on from a capture."""
    state, book = taken.state, Book()
    book.run_id = state.run_id
    in_force(book, state.rules, state.weight_version, state.lineage)
    for name in (
        "started_at_ns",
        "openings",
        "library",
        "rules_version",
        "last_seq",
        "last_at_ns",
        "last_request",
        "last_batch",
        "last_mark",
        "source_position",
        "source_positions",
        "source_exhausted",
        "source",
        "held_reason",
        "closed",
        "marks",
    ):
        setattr(book, name, getattr(state, name))
    groups = taken.told(taken.groups)
    book.groups = {group.group_id: group for group in groups}
    book.aside = {group.group_id: group for group in taken.aside}
    book.departed = taken.departed.copy()
    book.requests = {request.request: request for request in state.requests}
    book.batches = {batch.batch: batch for batch in state.batches}
    book.credits = deque(state.credits)
    book.mark_seqs.extend(state.mark_seqs)
    book.windows = {name: _window(fields) for name, fields in state.windows.items()}
    book.windows_out = {batch: _window(fields) for batch, fields in state.windows_out.items()}
    book.totals = Counter(state.totals)
    book.datasets = {name: Counter(counts) for name, counts in state.datasets.items()}
    book.uses = state.uses
    book.targets = Counter(state.targets)
    book.committed_at = deque(state.committed_at)
    for partition, phases in state.phases.items():
        book.shelves[partition] = _shelf(book.lag_classes, groups, phases)
    return book


def _flat(window: Window) -> dict[str, Any]:
    """The fields of a window, copied."""
    fields = {field.name: getattr(window, field.name) for field in attrs.fields(Window)}
    return {
        name: dict(value) if isinstance(value, Counter) else list(value) if isinstance(value, list) else value
        for name, value in fields.items()
    }


def _window(fields: dict[str, Any]) -> Window:
    window = Window()
    for name, value in fields.items():
        setattr(window, name, Counter(value) if isinstance(getattr(window, name), Counter) else value)
    return window


def _shelf(classes: frozenset[str], groups: Sequence[Group], phases: dict[str, list[int]]) -> Shelf:
    shelf = Shelf(classes)
    shelf.fill({Phase(name): [groups[place] for place in places] for name, places in phases.items()})
    return shelf


# As bytes --------------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()
_VERSION = msgspec.msgpack.Decoder(_Version)
_STATE = msgspec.msgpack.Decoder(BookState)
_GROUPS = msgspec.msgpack.Decoder(list[Group])
_LEFT = msgspec.msgpack.Decoder(Left)
_BLOCKS = msgspec.msgpack.Decoder(Blocks)
_INDEX = msgspec.msgpack.Decoder(dict[int, bytes])

STATE, GROUPS, ASIDE, LEFT, BLOCKS, INDEX = range(1, 7)
"""Kinds of parts."""


def encoded(taken: Capture) -> Iterator[tuple[int, bytes]]:
    """The parts of a capture, each as (kind, bytes). Meant for another thread than the event loop's."""
    departed = taken.departed
    blocks, newest = departed.packed(), departed.newest()
    version = max(taken.state.version, PACKED_SINCE if blocks.blocks else 1)
    yield STATE, _ENCODER.encode(replace(taken.state, version=version))
    for kind, groups in ((GROUPS, taken.groups), (ASIDE, taken.aside)):
        for start in range(0, len(groups), GROUPS_PER_PART):
            yield kind, _ENCODER.encode(taken.told(groups, start, start + GROUPS_PER_PART))
    for some in parts_of(blocks, BLOCKS_PER_PART):
        yield BLOCKS, _ENCODER.encode(some)
    for buckets in index_parts(departed.index(), BUCKETS_PER_PART):
        yield INDEX, _ENCODER.encode(buckets)
    for start in range(0, len(newest.ids), IDS_PER_PART):
        stop = start + IDS_PER_PART
        yield LEFT, _ENCODER.encode(Left(newest.ids[start:stop], newest.phases[start:stop]))


def decoded(parts: Iterator[tuple[int, bytes]]) -> Capture:
    """A capture from its parts.

    Raises:
        LaterState: a later version's.
        ValueError: the parts are not those of a capture.
        msgspec.MsgspecError: the same.
    """
    state: BookState | None = None
    groups: list[Group] = []
    aside: list[Group] = []
    departed = Departed()
    for kind, data in parts:
        if kind == STATE:
            # Looked at by itself, since the rest may be of other types by then.
            version = _VERSION.decode(data).version
            if version > STATE_VERSION:
                raise LaterState(
                    f"its state is of version {version}; this version of groupstate reads up to version {STATE_VERSION}"
                )
            state = _STATE.decode(data)
        elif kind == GROUPS:
            groups += _GROUPS.decode(data)
        elif kind == ASIDE:
            aside += _GROUPS.decode(data)
        elif kind == LEFT:
            departed.update(_LEFT.decode(data).pairs())
        elif kind == BLOCKS:
            departed.take_blocks(_BLOCKS.decode(data))
        elif kind == INDEX:
            departed.take_index(_INDEX.decode(data))
        else:
            raise ValueError(f"it has a part of kind {kind}, which isn't known")
    if state is None:
        raise ValueError("it has no state")
    departed.check()
    return Capture(state, groups, aside, departed)
