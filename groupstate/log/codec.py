"""Records as bytes and back, and the schema that lets a log be read without this code.

Rule 1: a record that could not be read back is refused when it is posted, not when the run is opened again.
Rule 2: an event kind that isn't known is an error: skipping it would replay to another state.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from groupstate.core.events import EVENT_TYPES, PayloadRef, Record, TrajectoryRecord, VersionSpan
from groupstate.errors import LogError, UnsupportedLog
from groupstate.log.upcasts import FORMAT, UPCASTS, Upcasts

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Record])
_SINGLE_DECODER = msgspec.msgpack.Decoder(Record)
_LOOSE_DECODER = msgspec.msgpack.Decoder()
_UNUSABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
_KNOWN_TAGS = frozenset(kind.__struct_config__.tag for kind in EVENT_TYPES)


def encode_items(records: Sequence[Record]) -> bytes:
    """The records as msgpack without the array around them, which can be read back.

    Items of several posts are joined to one array by `join_items`, so that a frame is decoded in one call.

    Raises:
        LogError: they can't be encoded, or not be read back.
    """
    try:
        if len(records) == 1:
            data = _ENCODER.encode(records[0])
            _SINGLE_DECODER.decode(data)
            return data
        data = _ENCODER.encode(records)
        _DECODER.decode(data)
    except _UNUSABLE as error:
        raise _refusal(records, error) from error
    return data[_array_header_bytes(len(records)) :]


def read_back(records: Sequence[Record]) -> list[Record]:
    """The records as a file would give them back.

    Raises:
        LogError: as of `encode_items`.
    """
    try:
        return _DECODER.decode(_ENCODER.encode(records))
    except _UNUSABLE as error:
        raise _refusal(records, error) from error


def _refusal(records: Sequence[Record], error: Exception) -> LogError:
    kinds = ", ".join(sorted({type(record.event).__name__ for record in records}))
    return LogError(
        f"a post of {kinds} could not be read back from a log: {error}. Nothing was posted; "
        "check the types of the event's fields where it is made"
    )


def _array_header_bytes(count: int) -> int:
    return 1 if count < 16 else 3 if count < 1 << 16 else 5


def join_items(parts: Iterable[bytes], count: int) -> bytes:
    """A msgpack array of `count` records."""
    return b"\xdd" + count.to_bytes(4, "big") + b"".join(parts)


def decode(body: bytes | memoryview, where: str, form: int = FORMAT, *, upcasts: Upcasts = UPCASTS) -> list[Record]:
    """The records of one frame, whose checksum was found good.

    Args:
        form: the format of its segment.

    Raises:
        UnsupportedLog: an event kind, or a value in it, that this version doesn't know.
    """
    if form != FORMAT:
        body = _raised(body, where, form, upcasts)
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        tag = _unknown_tag(body)
        known = f"event kind {tag}, which" if tag is not None else f"an event ({error}) that"
        raise UnsupportedLog(
            f"{where} has {known} this version of groupstate doesn't know: a newer one wrote it. "
            "Open it with that version, or a later one"
        ) from error


def _raised(body: bytes | memoryview, where: str, form: int, upcasts: Upcasts) -> bytes | memoryview:
    try:
        return upcasts.raised(body, form)
    except (msgspec.MsgspecError, TypeError, LookupError, ValueError, AttributeError) as error:
        raise UnsupportedLog(
            f"{where} has an event ({error}) that isn't one of format {form}, which its segment says it is of"
        ) from error


def _unknown_tag(body: bytes | memoryview) -> int | None:
    try:
        tags = [record[2][0] for record in _LOOSE_DECODER.decode(body)]
    except (msgspec.MsgspecError, TypeError, LookupError):
        return None
    return next((tag for tag in tags if tag not in _KNOWN_TAGS), None)


def schema() -> dict[str, Any]:
    """Names per tag, in the order of the arrays in the log."""
    parts = (Record, PayloadRef, TrajectoryRecord, VersionSpan)
    return {
        "encoding": "msgpack: a frame is an array of Record; an event is [tag, field, ...]",
        "parts": {part.__name__: list(part.__struct_fields__) for part in parts},
        "events": {
            str(kind.__struct_config__.tag): {"name": kind.__name__, "fields": list(kind.__struct_fields__)}
            for kind in EVENT_TYPES
        },
    }


@functools.cache
def schema_json() -> bytes:
    return json.dumps(schema(), indent=2).encode() + b"\n"


@functools.cache
def fingerprint() -> int:
    """Tells schemas apart. Only for people and the file's name: what can be read is decided tag by tag."""
    return int.from_bytes(hashlib.sha256(schema_json()).digest()[:8], "big")


def schema_name() -> str:
    return f"schema-{fingerprint():016x}.json"
