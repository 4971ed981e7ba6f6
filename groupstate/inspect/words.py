"""Events as words on one line, and as plain objects.

Rule 1: what comes out of a log is data: nothing in it may start a new line or drive a terminal.
"""

import datetime
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from groupstate.core import events as ev
from groupstate.core.near import near
from groupstate.errors import BadInput

MESSAGE_SHOWN_MAX = 300
"""Characters of a failure's text in a line; `as_object` has it all."""

STRETCHES_SHOWN_MAX = 6
"""Stretches of tokens of one version that a line names, the first ones and the last; `as_object` has them all."""

FENCED: Final[Mapping[ev.FenceReason, str]] = {
    "duplicate": "the same result is recorded already",
    "attempt": "another attempt is the session's latest",
    "settled": "the session has ended another way",
    "terminal": "the group has ended",
    "gone": "the group has left the book",
}
"""Why a result changed nothing."""

_HUMP = re.compile(r"(?<!^)(?=[A-Z])")


def kind_of(event: ev.Event) -> str:
    """`GroupSubmitted` is `group_submitted`."""
    return kind_of_type(type(event))


def kind_of_type(kind: type[ev.Event]) -> str:
    return _HUMP.sub("_", kind.__name__).lower()


KINDS: Final[dict[str, type[ev.Event]]] = {kind_of_type(kind): kind for kind in ev.EVENT_TYPES}


def kind_named(name: str) -> type[ev.Event]:
    """The kind that `name` means, in snake case or as in the code.

    Raises:
        BadInput: there is none.
    """
    found = KINDS.get(name.lower().replace("-", "_")) or KINDS.get(_HUMP.sub("_", name).lower())
    if found is None:
        raise BadInput(f"there is no event kind {name!r}; {near(name.lower(), KINDS) or 'known: ' + ', '.join(KINDS)}")
    return found


def one_line(text: str, length: int = MESSAGE_SHOWN_MAX) -> str:
    """`text` without anything that a terminal or a table would act on."""
    flat = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return flat if len(flat) <= length else flat[: length - 3] + "..."


def name_of(group_id: str) -> str:
    """The id as it is, or quoted where it would be torn apart or misread."""
    plain = group_id.isprintable() and " " not in group_id
    return group_id if plain else ascii(group_id)


def time_of(at_ns: int) -> str:
    """UTC, to the millisecond."""
    seconds, rest = divmod(at_ns, 1_000_000_000)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"


def span_of(seconds: float) -> str:
    """A length of time, short."""
    if seconds < 60:
        return f"{seconds:.3f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def counted(count: int, thing: str, things: str = "") -> str:
    """`1 group`, `2 groups`."""
    return f"{count} {thing if count == 1 else things or thing + 's'}"


def joined(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def values_of(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in metrics.items())


# An event's fields in words ------------------------------------------------------------------------------


def in_words(event: ev.AnyEvent) -> str:
    """The fields of an event, on one line."""
    return one_line(_WORDS[type(event)](event), 2 * MESSAGE_SHOWN_MAX)


def _submitted(event: ev.GroupSubmitted) -> str:
    parts = [counted(event.size, "session"), event.partition, f"version {event.weight_version}", f"by {event.cause}"]
    if event.source_position >= 0:
        parts.append(f"prompt {event.source_position} of the source")
    if event.dataset:
        parts.append(f"dataset {event.dataset}")
    if event.target_version is not None:
        parts.append(f"for version {event.target_version}")
    if event.oversample:
        parts.append(f"{event.oversample} more than it needs")
    if event.validation_round:
        parts.append("for a validation round")
    return f"{name_of(event.group_id)}: {', '.join(parts)}"


def _evicted(event: ev.GroupEvicted) -> str:
    shared = "" if event.shared_value is None else f", {event.metric} {event.shared_value:g} throughout"
    message = f": {event.message}" if event.message else ""
    why = joined(event.reasons)
    return f"{name_of(event.group_id)}: {why}, lag {event.lag}{shared}, {counted(event.credit, 'refill')}{message}"


def _attempt(event: ev.SessionStarted | ev.SessionFinished | ev.SessionFailed | ev.ResultFenced) -> str:
    return f"{name_of(event.group_id)}/{event.session}: attempt {event.attempt}"


def how_known(event: ev.SessionStarted | ev.SessionFinished | ev.SessionFailed) -> str:
    """Nothing for what groupstate saw itself, else how it was learned."""
    return ", observed" if event.observed else ""


def _started(event: ev.SessionStarted) -> str:
    worker = f", worker {event.worker}" if event.worker else ""
    version = "" if event.weight_version is None else f", version {event.weight_version}"
    return _attempt(event) + worker + version + how_known(event)


def rows_in_words(rows: tuple[ev.TrajectoryRecord, ...], *, stretches: bool = False) -> str:
    """What a session yielded: how many rows, how many tokens by which versions, the last one's metrics.

    Args:
        stretches: of several versions, say which tokens each of them generated.
    """
    parts = [counted(len(rows), "trajectory", "trajectories")]
    tokens = sum(row.response_tokens for row in rows)
    if tokens:
        parts.append(counted(tokens, "token"))
    versions = sorted({span.weight_version for row in rows for span in row.spans})
    if len(versions) > 1 and stretches:
        parts.append(_stretches(rows))
    elif versions:
        parts.append(f"of version {joined(map(str, versions))}")
    if rows and rows[-1].metrics:
        parts.append(values_of(rows[-1].metrics))
    if rows and rows[-1].not_finite:
        parts.append(f"no number: {joined(rows[-1].not_finite)}")
    return ", ".join(parts)


def _stretches(rows: tuple[ev.TrajectoryRecord, ...]) -> str:
    """Which version generated which tokens. What the environment wrote between two stretches of one version goes with
    them, and is counted."""
    found: list[str] = []
    for row in rows:
        whose = f"of trajectory {row.index} " if len(rows) > 1 else ""
        for version, run in itertools.groupby(row.spans, key=lambda span: span.weight_version):
            spans = list(run)
            first, last = spans[0].start, spans[-1].stop - 1
            which = f"token {first}" if first == last else f"tokens {first}-{last}"
            found.append(f"{whose}{which} by version {version}")
    if len(found) > STRETCHES_SHOWN_MAX:
        left_out = len(found) - STRETCHES_SHOWN_MAX
        found[STRETCHES_SHOWN_MAX - 1 : -1] = [f"{counted(left_out, 'stretch', 'stretches')} more"]
    written = sum(stop - start for row in rows for start, stop in row.environment)
    return ", ".join([*found, f"{written} of them the environment's"] if written else found)


def _finished(event: ev.SessionFinished) -> str:
    return f"{_attempt(event)}{how_known(event)}, {rows_in_words(event.trajectories)}"


def _failed(event: ev.SessionFailed) -> str:
    retry = "" if event.retry_in_s is None else f", again in {event.retry_in_s:g} s"
    message = f": {one_line(event.message)}" if event.message else ""
    return f"{_attempt(event)}{how_known(event)}, {event.failure}{retry}{message}"


def _sampled(event: ev.BatchSampled) -> str:
    groups = " ".join(map(name_of, event.group_ids))
    lags = " ".join(map(str, event.lags))
    return (
        f"batch {event.batch} for request {event.request}, {event.partition}, version {event.weight_version}: "
        f"{groups} (lag {lags})"
    )


def _marked(event: ev.CheckpointMarked) -> str:
    name = f" {event.name!r}" if event.name else ""
    return f"mark {event.mark}{name}, version {event.weight_version}, lineage {event.lineage}"


def _source(event: ev.SourceOpened) -> str:
    details = joined(f"{name} {value}" for name, value in event.details.items())
    return f"{event.name}{f', a {event.kind}' if event.kind else ''}{f': {details}' if details else ''}"


def _recovered(event: ev.RunRecovered) -> str:
    torn = f", {event.torn_bytes} bytes of an interrupted commit cut" if event.torn_bytes else ""
    return f"version {event.weight_version}, lineage {event.lineage}{torn}"


def _group_failed(event: ev.GroupFailed) -> str:
    return f"{name_of(event.group_id)}{': cancelled' if event.cancelled else ''}"


_WORDS: Final[dict[type[ev.Event], Callable[[Any], str]]] = {
    ev.RunStarted: lambda e: f"run {e.run_id}, version {e.weight_version}, seed {e.seed}, groupstate {e.library}",
    ev.WeightsPublished: lambda e: f"version {e.weight_version}, lineage {e.lineage}",
    ev.SourceExhausted: lambda e: f"{e.source or 'the source'} gave {counted(e.position, 'prompt')}",
    ev.AdmissionHeld: lambda e: e.reason or "no longer",
    ev.DatasetStarved: lambda e: (
        f"{name_of(e.dataset)}: none sampled for {counted(e.versions, 'version')}, "
        f"{counted(e.open_groups, 'group')} open, {e.evicted} evicted"
    ),
    ev.SourceOpened: _source,
    ev.CheckpointMarked: _marked,
    ev.RunRecovered: _recovered,
    ev.RunRewound: lambda e: (
        f"to mark {e.mark} at event {e.mark_seq}, version {e.weight_version}, lineage {e.lineage}"
        f"{', groups that ended since are evicted' if e.evicts else ''}"
    ),
    ev.RunClosed: lambda e: e.reason,
    ev.GroupSubmitted: _submitted,
    ev.GroupFinished: lambda e: f"{name_of(e.group_id)}{': partial' if e.partial else ''}",
    ev.GroupFailed: _group_failed,
    ev.GroupEvicted: _evicted,
    ev.GroupRequeued: lambda e: (
        f"{name_of(e.group_id)}: {e.reason or 'no reason given'}"
        f"{'' if e.weight_version is None else f', stamp {e.weight_version}'}"
    ),
    ev.RefillForfeited: lambda e: f"{counted(e.count, 'refill')}: {e.reason}",
    ev.SessionStarted: _started,
    ev.SessionFinished: _finished,
    ev.SessionFailed: _failed,
    ev.ResultFenced: lambda e: f"{_attempt(e)}, {e.result}, changed nothing: {FENCED[e.reason]}",
    ev.BatchRequested: lambda e: (
        f"request {e.request}: {counted(e.size, 'group')} of {e.partition}, version {e.weight_version}"
    ),
    ev.BatchRequestCancelled: lambda e: f"request {e.request}: {e.reason}",
    ev.BatchSampled: _sampled,
    ev.BatchCommitted: lambda e: f"batch {e.batch}",
    ev.BatchReturned: lambda e: f"batch {e.batch}: {e.reason or 'no reason given'}",
}


# An event as an object -----------------------------------------------------------------------------------


def as_object(record: ev.Record) -> dict[str, Any]:
    """A record with every field by its name, for JSON."""
    return {"seq": record.seq, "at_ns": record.at_ns, "kind": kind_of(record.event), **_fields(record.event)}


def _fields(value: msgspec.Struct) -> dict[str, Any]:
    return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _fields(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
