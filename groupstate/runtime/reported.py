"""What a system outside says of its groups: a status and trajectories for each.

Rule: whatever was read outside may be put in; `malformed` says what is wrong with it, before any of it is used.
"""

from collections.abc import Mapping
from typing import Any, Final

import attrs

from groupstate.core import events as ev
from groupstate.core.trajectory import WEIGHT_VERSION_MAX, record_without_tokens
from groupstate.errors import BadInput, UnusableResult

STATUSES: Final = ("pending", "running", "finished", "failure")
ENDED: Final = ("finished", "failure")

SIZE_MAX: Final = 65_536
"""Sessions of a group; a larger size is a tag that was misread."""


@attrs.frozen(order=True)
class RowKey:
    """Names one trajectory; `str()` of it is the text form."""

    group_id: str
    session: int
    index: int

    def __str__(self) -> str:
        return f"{self.group_id}_{self.session}_{self.index}"


def split_key(text: str) -> RowKey:
    """Read `{group_id}_{session}_{index}` from the right, since a group id may hold underscores.

    Whether a key is that of a trajectory at all can't be seen from its text: only its tags say so.

    Raises:
        BadInput: it doesn't end in two numbers.
    """
    group_id, *numbers = text.rsplit("_", 2)
    if not group_id or len(numbers) != 2 or not all(map(_is_number, numbers)):
        raise BadInput(f"key {text!r} is none of a trajectory; it must be '<group id>_<session>_<index>'")
    return RowKey(group_id, int(numbers[0]), int(numbers[1]))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


@attrs.frozen(kw_only=True)
class ReportedRow:
    """What is known of one trajectory; its tokens stay outside."""

    metrics: Mapping[str, float] = attrs.field(factory=dict)
    not_finite: tuple[str, ...] = ()
    """Metrics that are left out of these, since their value is no number; in `metrics` it costs the session."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    spans: tuple[ev.VersionSpan, ...] = ()
    versions: tuple[int, int] | None = None
    """Oldest and newest weight version of its tokens, in place of spans where that is all that is known. Which
    tokens were the newest version's is not known then; the last one stands for them."""


@attrs.frozen(kw_only=True)
class Reported:
    """One group of a listing. Nothing is checked here: whatever was read outside may be put in."""

    status: str
    """`pending`, `running`, `finished` or `failure`."""
    stamp: int
    """Weight version at dispatch."""
    size: int | None = None
    """Sessions; None where it isn't known."""
    partition: str = ev.TRAIN
    rows: Mapping[tuple[int, int], ReportedRow] = attrs.field(factory=dict)
    """Trajectories by (session, index)."""


Listing = Mapping[str, Reported]
"""By group id: every group that the system outside holds."""


Mark = tuple[str, int, int]
"""What of a report may change: status, number of trajectories, stamp."""


def mark_of(report: Any) -> Mark | None:
    if not isinstance(report, Reported) or not _has_rows(report):
        return None
    return report.status, len(report.rows), report.stamp


def _has_rows(report: Reported) -> bool:
    return isinstance(report.rows, Mapping)


def malformed(group_id: Any, report: Any) -> str:
    """What is wrong with the form of a report, as text."""
    if not isinstance(group_id, str) or not group_id:
        return "its id must be a string that is not empty"
    if not isinstance(report, Reported) or not _has_rows(report):
        return f"its report is {type(report).__name__}; it must be a Reported, whose rows are a mapping"
    if report.status not in STATUSES:
        return f"its status is {report.status!r}; it must be one of {', '.join(STATUSES)}"
    if not _is_int(report.stamp, -WEIGHT_VERSION_MAX, WEIGHT_VERSION_MAX):
        return f"its stamp is {report.stamp!r}; it must be a weight version"
    if report.size is not None and not _is_int(report.size, 1, SIZE_MAX):
        return f"its size is {report.size!r}; it must be from 1 to {SIZE_MAX}, or None"
    if report.partition not in (ev.TRAIN, ev.VALIDATION):
        return f"its partition is {report.partition!r}; it must be {ev.TRAIN!r} or {ev.VALIDATION!r}"
    strange = [key for key in report.rows if not _is_place(key)]
    return f"it has a trajectory {strange[0]!r}; it must be (session, index)" if strange else ""


def _is_place(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and all(_is_int(number, 0, WEIGHT_VERSION_MAX) for number in key)


def _is_int(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def record_of_row(index: int, row: Any, who: str) -> ev.TrajectoryRecord:
    if not isinstance(row, ReportedRow):
        raise UnusableResult(f"{who} is {type(row).__name__}; it must be a ReportedRow")
    return record_without_tokens(
        index,
        metrics=row.metrics,
        prompt_tokens=row.prompt_tokens,
        response_tokens=row.response_tokens,
        not_finite=row.not_finite,
        spans=row.spans if row.versions is None else _spans(row.versions, row.response_tokens, who),
        who=who,
    )


def _spans(versions: Any, count: Any, who: str) -> tuple[ev.VersionSpan, ...]:
    """The spans that stand for the oldest and the newest version."""
    try:
        oldest, newest = versions
        if oldest > newest:
            raise ValueError
        if oldest == newest or count < 2:
            return (ev.VersionSpan(0, count, oldest),) if count else ()
    except (TypeError, ValueError):
        raise UnusableResult(f"{who} has versions = {versions!r}; it must be (oldest, newest)") from None
    return ev.VersionSpan(0, count - 1, oldest), ev.VersionSpan(count - 1, count, newest)
