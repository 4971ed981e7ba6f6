"""Whether a source is the one that a log's positions count in.

Rule 1: a source says itself what its order depends on (`describe`); one that says nothing is trusted.
Rule 2: only a difference by which prompts would be skipped or repeated is refused, and nothing is written then.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.errors import BadSettings
from groupstate.runtime.sources import MixedSource, Source, description

MIXED = MixedSource.__name__

PLAIN: Mapping[str, Any] = {"size": None, "epochs": 1, "shuffle_seed": None}
"""What holds where a description doesn't say."""


def identity(source: Source) -> ev.SourceOpened:
    """What is recorded of a source.

    Raises:
        BadSettings: its description isn't plain data.
    """
    name, kind, details = description(source)
    try:
        # As it reads back from a log, so that the two can be compared.
        details = msgspec.msgpack.decode(msgspec.msgpack.encode(details), type=dict[str, Any])
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadSettings(f"describe() of source {name!r} must give a dict of plain values: {error}") from error
    return ev.SourceOpened(name, kind, details)


def check_same(book: Book, source: Source) -> None:
    """Make sure that going on behind the last prompt neither skips nor repeats one.

    Raises:
        BadSettings: it would; the text says what differs.
    """
    before, now = book.source, identity(source)
    if before is None or not book.source_position or before == now:
        return
    differences = _differences(book, before, now)
    if differences:
        raise BadSettings(
            f"source {now.name!r} isn't the one that {book.source_position} prompts were drawn from: "
            f"{'; '.join(differences)}. Going on in it would skip some prompts and repeat others. Give the run the "
            "source that it had, or open_run(source_changed=True) to go on with this one behind the last position"
        )


def _differences(book: Book, before: ev.SourceOpened, now: ev.SourceOpened) -> list[str]:
    if MIXED not in (before.kind, now.kind):
        return _changed(before.details, now.details, "")
    if before.kind != now.kind:
        return [f"it is a {now.kind} and was a {before.kind}, and positions count per dataset in one of them only"]
    return [
        text
        for dataset in sorted(before.details.keys() & now.details.keys())
        if book.source_positions.get(dataset)
        for text in _changed(before.details[dataset], now.details[dataset], f"dataset {dataset!r}: ")
    ]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> list[str]:
    """What differs and matters. A size matters to an order that is shuffled or goes round more than once."""
    before, now = {**PLAIN, **before}, {**PLAIN, **now}
    ordered = all(said["epochs"] == 1 and said["shuffle_seed"] is None for said in (before, now))
    return [
        f"{where}{key} is {now.get(key)!r} and was {before.get(key)!r}"
        for key in sorted((before.keys() | now.keys()) - {"name", "kind"})
        if before.get(key) != now.get(key) and not (key == "size" and ordered)
    ]
