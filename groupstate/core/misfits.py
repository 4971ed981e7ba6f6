"""What one event says of a group that can't be: a sentence, and the earlier events beside which it can't be true.

Rule: for the checker of invariants alone, which asks before it moves the group.
"""

from collections.abc import Iterator
from typing import TypeAlias

from groupstate.core import events as ev
from groupstate.core.phases import IN_FLIGHT, Phase
from groupstate.core.tracked import Tracked

Misfit: TypeAlias = tuple[str, tuple[int, ...]]


def wrong_end(
    group: Tracked, event: ev.GroupFinished | ev.GroupFailed, *, survivors_min: int | None, rules_seq: int
) -> Misfit | None:
    """Why the group can't have ended, or not so; None if it can.

    Args:
        rules_seq: the event that `survivors_min` is of.
    """
    unsettled = group.unsettled
    if unsettled:
        first = unsettled[0]
        return f"session {first} has not ended: attempt {group.attempts[first]} is its latest", (group.open_seq,)
    finished = group.outcomes.count("finished")
    if finished > group.needed:
        text = f"{finished} of its sessions finished, and it needs {group.needed}"
        return text, (group.submitted_seq, _last(group, "finished"))
    if isinstance(event, ev.GroupFailed):
        whole = group.size if event.cancelled else group.needed
        return None if finished < whole else ("all its sessions finished", (_last(group, "finished"),))
    if not event.partial:
        text = f"{group.size - finished} of its {group.size} sessions failed"
        return (text, (_last(group, "failed"),)) if finished < group.needed else None
    if survivors_min is None or finished < survivors_min:
        text = f"{finished} sessions finished, and survivors_min is {survivors_min}"
        return text, (rules_seq, _last(group, "failed"))
    return None


def _last(group: Tracked, outcome: str) -> int:
    """The last event in which a session of the group ended so; 0 where none did."""
    ends = zip(group.last_seqs, group.outcomes, strict=True)
    return max((seq for seq, ended in ends if ended == outcome), default=0)


def wrong_taking(group: Tracked, event: ev.BatchSampled) -> Iterator[Misfit]:
    """Why the batch can't hold the group."""
    whom = f"batch {event.batch} takes group {group.group_id!r}"
    if group.phase in IN_FLIGHT:
        yield f"{whom}, which is {group.phase}: sessions {group.unsettled} have not ended", (group.open_seq,)
    elif group.phase is Phase.EVICTED:
        yield f"{whom}, which was evicted at event {group.left_seq}", (group.left_seq,)
    elif group.phase is Phase.SAMPLED:
        yield f"{whom}, which batch {group.batch} holds since event {group.left_seq}", (group.left_seq,)
    elif group.phase is Phase.COMMITTED:
        text = f"{whom}, which was committed with batch {group.batch} at event {group.left_seq}"
        yield text, (group.sampled_seq, group.left_seq)
    elif not group.is_ready:
        yield f"{whom}, which has no trajectory", (group.left_seq,)
    if group.partition != event.partition:
        text = f"{whom} of partition {group.partition!r} for partition {event.partition!r}"
        yield text, (group.submitted_seq,)
