"""What a log has of everything that a log can have."""

import typing
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from groupstate.core import events as ev
from groupstate.core.phases import TRANSITIONS
from groupstate.inspect.replay import applied

PARTS = (ev.PayloadRef, ev.TrajectoryRecord, ev.VersionSpan)


def everything() -> set[str]:
    """Every field of every kind and part, every value that a choice can have, and every cell of the transitions."""
    fields = {f"{kind.__name__}.{field.name}" for kind in (*ev.EVENT_TYPES, *PARTS) for field in _fields(kind)}
    values = {
        f"{kind.__name__}.{field.name}={value}"
        for kind in ev.EVENT_TYPES
        for field in _fields(kind)
        for value in _choices(field.type)
    }
    cells = {f"{phase} {kind.__name__}" for phase, row in TRANSITIONS.items() for kind in row}
    return fields | values | cells


def covered(records: Iterable[ev.Record], book: Any) -> set[str]:
    """What these records have of it. A field counts where it is set to something other than its default."""
    found: set[str] = set()
    for record in records:
        event = record.event
        found.update(_of(event))
        for group_id in _groups(event, book):
            live = book.groups.get(group_id)
            phase = live.phase if live is not None else book.departed.get(group_id)
            found.add(f"{phase} {type(event).__name__}")
        applied(book, record)
    return found


def _of(struct: Any) -> Iterator[str]:
    name = type(struct).__name__
    for field in _fields(type(struct)):
        value = getattr(struct, field.name)
        if field.required or value != field.get_default():
            yield f"{name}.{field.name}"
        for item in value if isinstance(value, tuple) else (value,):
            if _choices(field.type):
                yield f"{name}.{field.name}={item}"
            if isinstance(item, ev.Stored):
                yield from _of(item)


class _Field(msgspec.Struct):
    name: str
    type: Any
    info: Any

    @property
    def required(self) -> bool:
        return bool(self.info.required)

    def get_default(self) -> Any:
        default, factory = self.info.default, self.info.default_factory
        return factory() if factory is not msgspec.NODEFAULT else default


def _fields(kind: Any) -> list[_Field]:
    return [_Field(field.name, field.type, field) for field in msgspec.structs.fields(kind)]


def _choices(kind: Any) -> tuple[str, ...]:
    """The values of a choice, or of a tuple of such."""
    if typing.get_origin(kind) is tuple:
        return _choices(typing.get_args(kind)[0])
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _groups(event: ev.AnyEvent, book: Any) -> tuple[str, ...]:
    """The groups whose phase an event is about."""
    if isinstance(event, ev.BatchSampled):
        return event.group_ids
    if isinstance(event, ev.BatchCommitted | ev.BatchReturned):
        return tuple(book.batches[event.batch].group_ids)
    if isinstance(event, ev.RunRewound):
        return tuple(group_id for at, group_id in book.committed_at if at > event.mark_seq)
    return (event.group_id,) if hasattr(event, "group_id") else ()
