"""A group that nothing can be told of: never submitted, or what is told of it is gone."""

from groupstate.core.near import near
from groupstate.errors import UnknownGroup
from groupstate.inspect.words import counted, joined


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
