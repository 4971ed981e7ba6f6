"""Where a group can be, and the one table that says how it gets from phase to phase.

Rule 1: no phase is assigned anywhere else. Rule 2: a missing cell is an error (`IllegalTransition`).
"""

import enum
from collections.abc import Mapping
from typing import Any, Final

from groupstate.core import events as ev
from groupstate.errors import IllegalTransition


class Phase(enum.StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILURE = "failure"
    SAMPLED = "sampled"
    EVICTED = "evicted"
    COMMITTED = "committed"


class Restored(enum.Enum):
    """A cell whose next phase is the terminal phase that the group had before it was sampled."""

    TERMINAL = "back to finished or failure"


LEGAL = dict[type[ev.Event], "Phase | Restored"]

TRANSITIONS: Final[dict[Phase | None, LEGAL]] = {
    None: {
        ev.GroupSubmitted: Phase.PENDING,
    },
    Phase.PENDING: {
        ev.SessionStarted: Phase.RUNNING,
        ev.SessionFailed: Phase.PENDING,
        ev.GroupFailed: Phase.FAILURE,
        ev.GroupRequeued: Phase.PENDING,
        ev.ResultFenced: Phase.PENDING,
    },
    Phase.RUNNING: {
        ev.SessionStarted: Phase.RUNNING,
        ev.SessionFinished: Phase.RUNNING,
        ev.SessionFailed: Phase.RUNNING,
        ev.GroupFinished: Phase.FINISHED,
        ev.GroupFailed: Phase.FAILURE,
        ev.GroupRequeued: Phase.PENDING,
        ev.ResultFenced: Phase.RUNNING,
    },
    Phase.FINISHED: {
        ev.GroupEvicted: Phase.EVICTED,
        ev.BatchSampled: Phase.SAMPLED,
        ev.ResultFenced: Phase.FINISHED,
    },
    Phase.FAILURE: {
        ev.GroupEvicted: Phase.EVICTED,
        ev.BatchSampled: Phase.SAMPLED,
        ev.GroupRequeued: Phase.PENDING,
        ev.ResultFenced: Phase.FAILURE,
    },
    Phase.SAMPLED: {
        ev.BatchReturned: Restored.TERMINAL,
        ev.BatchCommitted: Phase.COMMITTED,
        ev.ResultFenced: Phase.SAMPLED,
    },
    Phase.EVICTED: {
        ev.ResultFenced: Phase.EVICTED,
    },
    Phase.COMMITTED: {
        ev.RunRewound: Restored.TERMINAL,
        ev.ResultFenced: Phase.COMMITTED,
    },
}

TERMINAL: Final = frozenset({Phase.FINISHED, Phase.FAILURE})
_RESTORED: Final = Restored.TERMINAL
"""By a name of its own: looking up an enum's member takes longer than all else that `next_phase` does."""
IN_FLIGHT: Final = frozenset({Phase.PENDING, Phase.RUNNING})

_KEPT_EMPTY: Final = {
    ("sync", "keep"): frozenset({Phase.FAILURE}),
    ("sync", "keep_finished"): frozenset({Phase.FINISHED}),
    ("sync", "keep_all"): TERMINAL,
    ("async", "keep_finished"): frozenset({Phase.FINISHED}),
}
"""By mode and `empty`. What isn't here has never kept any, in the logs of earlier versions either."""


def kept_empty(rules: Mapping[str, Any]) -> frozenset[Phase]:
    """The terminal phases in which a training group without a trajectory stays sampleable, by the rules of a log."""
    return _KEPT_EMPTY.get((rules.get("mode"), rules.get("empty")), frozenset())  # type: ignore[arg-type]


def next_phase(phase: Phase | None, kind: type[ev.Event], group_id: str, *, terminal: Phase | None = None) -> Phase:
    """The phase that `kind` leads to.

    Args:
        phase: the group's phase now; None if no such group was ever submitted.
        kind: type of the event.
        group_id: for the error.
        terminal: the terminal phase that the group reached, for the cells that lead back to it.

    Raises:
        IllegalTransition: the table has no such cell.
    """
    target = TRANSITIONS[phase].get(kind)
    if target is None:
        legal = sorted(kind.__name__ for kind in TRANSITIONS[phase] if kind is not ev.ResultFenced)
        raise IllegalTransition(group_id, None if phase is None else str(phase), kind.__name__, legal)
    if target is _RESTORED:
        assert terminal in TERMINAL
        return terminal
    return target
