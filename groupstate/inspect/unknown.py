"""What was asked for and can't be told: a group that was never submitted or is gone, a metric that no session has."""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from groupstate.core.near import meant, near
from groupstate.errors import BadInput, UnknownGroup
from groupstate.inspect.words import counted, joined

METRICS_NAMED_MAX: Final = 20


def unknown_group(
    group_id: str, tried: str, submitted: dict[str, None], *, left: str | None = None, start: int = 1
) -> UnknownGroup:
    """The error for it, with the ids that are near.

    Args:
        tried: what can't be done, as in "cannot ...".
        submitted: ids of all groups that are known of, in order.
        left: how it left before the first event that is there.
        start: the number of that event.
    """
    if left is not None:
        return UnknownGroup(group_id, tried, f"it was {left} before event {start}, and the events up to there are gone")
    hint = near(group_id, reversed(submitted)) or f"it submitted {counted(len(submitted), 'group')}{_some(submitted)}"
    return UnknownGroup(group_id, tried, f"this log never submitted it; {hint}")


def _some(submitted: dict[str, None]) -> str:
    first = [repr(group_id) for group_id in submitted][:3]
    return f", such as {joined(first)}" if first else ""


def unknown_metric(metric: str, known: Iterable[str]) -> BadInput:
    """The error for it, with the metrics that there are."""
    names = sorted(known)
    if not names:
        return BadInput(f"no session ended with a metric {metric!r}, or with any other")
    named = [repr(name) for name in islice(names, METRICS_NAMED_MAX)]
    more = [f"{len(names) - len(named)} more"] if len(names) > len(named) else []
    there = f"there {'is' if len(names) == 1 else 'are'} {joined([*named, *more])}"
    return BadInput(f"no session ended with a metric {metric!r}; {there}{meant(metric, names)}")
