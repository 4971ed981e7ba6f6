"""A group and its sessions as values, and what each event makes of them.

Rule 1: nothing is edited; `evolve` gives the group after the event, or raises and nothing has changed.
Rule 2: a group is terminal only after the latest attempt of every session has ended.
Rule 3: most groups that a run holds are terminal and wait, so a terminal group keeps its sessions packed; whoever asks
for them doesn't see that.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from groupstate.core import events as ev
from groupstate.core.phases import TRANSITIONS, Phase, next_phase
from groupstate.errors import SessionStateError

SessionState: TypeAlias = Literal["waiting", "open", "finished", "failed"]
"""`waiting`: the attempt is still to begin (the first, a retry that is due, or after a requeue)."""

Range: TypeAlias = tuple[float, float, int]
"""Lowest value, highest value, how many values."""

SETTLED: frozenset[str] = frozenset({"finished", "failed"})


class Session(msgspec.Struct, array_like=True, frozen=True, gc=False):
    state: SessionState = "waiting"
    attempt: int = 1
    trajectories: tuple[ev.TrajectoryRecord, ...] = ()
    payload: ev.PayloadRef | None = None
    failure: ev.FailureKind | None = None
    message: str = ""
    started_at_ns: int = 0
    ended_at_ns: int = 0
    last_seq: int = 0
    weight_version: int | None = None
    first_attempt: int = 1
    """The attempt that the group's submission or its latest requeue made due."""

    @property
    def tries(self) -> int:
        """Attempts since then, the latest included."""
        return self.attempt - self.first_attempt + 1


class _PayloadOnly(msgspec.Struct, array_like=True, gc=False):
    """The beginning of a `Session`: all that it takes to know its payload."""

    state: SessionState
    attempt: int
    trajectories: msgspec.Raw
    payload: ev.PayloadRef | None


UNPACKED_KEPT = 256
"""Terminal groups whose sessions stay unpacked, those that were asked for last: what looks at a group's sessions
mostly does so several times."""

_ENCODER = msgspec.msgpack.Encoder()
_unpacked = functools.lru_cache(UNPACKED_KEPT)(msgspec.msgpack.Decoder(tuple[Session, ...]).decode)
_payloads_only = msgspec.msgpack.Decoder(tuple[_PayloadOnly, ...]).decode


def forget_unpacked() -> None:
    """Sessions are unpacked anew, after somebody has changed a metric in what is for looking only: groups that ended
    alike share what stays unpacked, those of other runs too."""
    _unpacked.cache_clear()


class Group(msgspec.Struct, array_like=True, frozen=True, gc=False):
    group_id: str
    size: int
    """Sessions, those beyond what the group needs included."""
    phase: Phase
    partition: ev.Partition
    dataset: str
    stamp: int
    """Weight version at submission, or when its prompt was dispatched anew."""
    version: int
    """Weight version that the rules' basis names (the stamp, for `dispatch`): the order of sampling."""
    aged_from: int
    """Weight version that the lag is counted from: `version`, or that of the mark, for work of a line of
    weights that was abandoned."""
    submitted_seq: int
    submitted_at_ns: int
    cause: ev.Cause
    source_position: int
    prompt: ev.PayloadRef | None
    prompt_length: int
    target_version: int | None
    kept: tuple[Session, ...] | bytes
    """The sessions, packed once the group is terminal; read them as `sessions`."""
    settled_count: int = 0
    finished_count: int = 0
    trajectory_count: int = 0
    session_ranges: Mapping[str, Range] = {}
    """Per metric: range over the last trajectory of each finished session."""
    trajectory_ranges: Mapping[str, Range] = {}
    """Per metric: range over all trajectories."""
    terminal: Phase | None = None
    terminal_seq: int = 0
    partial: bool = False
    cancelled: bool = False
    requeue_count: int = 0
    rule_requeue_count: int = 0
    """Requeues by the rules, among them."""
    oversample: int = 0
    """Sessions beyond those that the group needs."""
    kept_empty: bool = False
    """It ended without a trajectory, and the rules keep it sampleable all the same."""
    rewound_to: int | None = None
    """Version of the mark that the run went back to while the group was made for a later one."""
    batch: int = 0
    sampled_lag: int = 0
    kept_lag: int | None = None
    """The lag that the group was sampled with, once its batch came back: it is sampled again with the same."""
    ended_version: int = 0
    """Weight version that was current when the group became terminal; 0 while it isn't."""
    last_seq: int = 0
    last_at_ns: int = 0
    validation_round: bool = False
    """Submitted by `run.validate`, which alone samples it."""

    @property
    def sessions(self) -> tuple[Session, ...]:
        kept = self.kept
        return kept if type(kept) is tuple else _unpacked(kept)

    @property
    def first_version(self) -> int:
        """What the group counts from before any token is known: its target, where it has one, else the stamp."""
        return self.stamp if self.target_version is None else self.target_version

    @property
    def needed(self) -> int:
        """Finished sessions that make the group whole."""
        return self.size - self.oversample

    @property
    def filled(self) -> bool:
        """It has all the finished sessions that it needs."""
        return self.finished_count >= self.needed

    @property
    def settled(self) -> bool:
        return self.settled_count == self.size

    @property
    def failed_count(self) -> int:
        return self.settled_count - self.finished_count

    @property
    def in_flight(self) -> bool:
        return self.phase is Phase.PENDING or self.phase is Phase.RUNNING

    def payloads(self) -> list[ev.PayloadRef]:
        """Everything in the payload store that belongs to this group, the prompt included."""
        kept = self.kept
        sessions = _payloads_only(kept) if isinstance(kept, bytes) else kept
        refs = [session.payload for session in sessions if session.payload is not None]
        return refs if self.prompt is None else [self.prompt, *refs]


def submitted(event: ev.GroupSubmitted, seq: int, at_ns: int) -> Group:
    return Group(
        group_id=event.group_id,
        size=event.size,
        phase=Phase.PENDING,
        partition=event.partition,
        dataset=event.dataset,
        stamp=event.weight_version,
        version=event.weight_version if event.target_version is None else event.target_version,
        aged_from=event.weight_version if event.target_version is None else event.target_version,
        submitted_seq=seq,
        submitted_at_ns=at_ns,
        cause=event.cause,
        source_position=event.source_position,
        prompt=event.prompt,
        prompt_length=event.prompt_length,
        target_version=event.target_version,
        kept=(Session(),) * event.size,
        oversample=event.oversample,
        last_seq=seq,
        last_at_ns=at_ns,
        validation_round=event.validation_round,
    )


def evolve(group: Group, event: ev.Event, seq: int, at_ns: int) -> Group:
    """The group after `event`.

    Raises:
        IllegalTransition: the table has no cell for it.
        SessionStateError: the session can't do that now.
    """
    step = _STEPS[group.phase].get(type(event))
    if step is not None:
        return step[0](group, event, step[1], seq, at_ns)
    phase = next_phase(group.phase, type(event), group.group_id, terminal=group.terminal)
    return replace(group, phase=phase, last_seq=seq, last_at_ns=at_ns)


def without_yield(group: Group) -> Group:
    """A finished group without its sessions' trajectories, payloads and times, which nothing asks for that can still
    happen to it; any other group as it is. What it keeps of them are counts and ranges."""
    if group.terminal is not Phase.FINISHED:
        return group
    return replace(group, kept=_blank_sessions(group.size))


@functools.cache
def _blank_sessions(size: int) -> bytes:
    return _ENCODER.encode((Session("finished"),) * size)


def _session(group: Group, sessions: Sequence[Session], event: Any, allowed: tuple[SessionState, ...]) -> Session:
    number = event.session
    if not 0 <= number < group.size:
        raise SessionStateError(
            f"group {group.group_id!r} has sessions 0 to {group.size - 1}, so there is no session {number}"
        )
    session: Session = sessions[number]
    if session.attempt != event.attempt or session.state not in allowed:
        raise SessionStateError(
            f"session {number} of group {group.group_id!r} is {session.state} in attempt {session.attempt}, so "
            f"{type(event).__name__} of attempt {event.attempt} cannot happen; "
            f"it needs attempt {session.attempt} to be {' or '.join(allowed)}"
        )
    return session


def started(session: Session, event: ev.SessionStarted, seq: int, at_ns: int) -> Session:
    return replace(
        session, state="open", started_at_ns=at_ns, last_seq=seq, weight_version=event.weight_version, failure=None
    )


def finished(session: Session, event: ev.SessionFinished, seq: int, at_ns: int) -> Session:
    return replace(
        session,
        state="finished",
        trajectories=event.trajectories,
        payload=event.payload,
        ended_at_ns=at_ns,
        last_seq=seq,
    )


def shares_ranges(group: Group) -> bool:
    """As long as each session has one trajectory, both ranges are the same, and one object."""
    by_session, by_trajectory = group.session_ranges, group.trajectory_ranges
    return by_session is by_trajectory or by_session == by_trajectory


def _started(group: Group, event: ev.SessionStarted, phase: Phase, seq: int, at_ns: int) -> Group:
    sessions = list(group.sessions)
    sessions[event.session] = started(_session(group, sessions, event, ("waiting",)), event, seq, at_ns)
    return replace(group, kept=tuple(sessions), phase=phase, last_seq=seq, last_at_ns=at_ns)


def _finished(group: Group, event: ev.SessionFinished, phase: Phase, seq: int, at_ns: int) -> Group:
    sessions = list(group.sessions)
    sessions[event.session] = finished(_session(group, sessions, event, ("open",)), event, seq, at_ns)
    rows = event.trajectories
    by_session, by_trajectory = group.session_ranges, group.trajectory_ranges
    if len(rows) == 1 and shares_ranges(group):
        by_session = by_trajectory = widened(by_session, rows)
    else:
        by_session, by_trajectory = widened(by_session, rows[-1:]), widened(by_trajectory, rows)
    return replace(
        group,
        kept=tuple(sessions),
        settled_count=group.settled_count + 1,
        finished_count=group.finished_count + 1,
        trajectory_count=group.trajectory_count + len(rows),
        session_ranges=by_session,
        trajectory_ranges=by_trajectory,
        phase=phase,
        last_seq=seq,
        last_at_ns=at_ns,
    )


def widened(ranges: Mapping[str, Range], trajectories: tuple[ev.TrajectoryRecord, ...]) -> Mapping[str, Range]:
    """`ranges` with the metrics of `trajectories` taken in."""
    if not trajectories:
        return ranges
    wider = dict(ranges)
    for trajectory in trajectories:
        widen(wider, trajectory.metrics)
    return wider


def widen(ranges: dict[str, Range], metrics: Mapping[str, float]) -> None:
    """Take the metrics of a trajectory in."""
    for name, value in metrics.items():
        known = ranges.get(name)
        if known is None:
            ranges[name] = (value, value, 1)
        else:
            low, high, count = known
            ranges[name] = (value if value < low else low, value if value > high else high, count + 1)


def _failed(group: Group, event: ev.SessionFailed, phase: Phase, seq: int, at_ns: int) -> Group:
    sessions = list(group.sessions)
    session = _session(group, sessions, event, ("open", "waiting"))
    ended = replace(session, failure=event.failure, message=event.message, ended_at_ns=at_ns, last_seq=seq)
    if event.retry_in_s is not None:
        sessions[event.session] = replace(ended, state="waiting", attempt=session.attempt + 1)
        return replace(group, kept=tuple(sessions), phase=phase, last_seq=seq, last_at_ns=at_ns)
    sessions[event.session] = replace(ended, state="failed")
    return replace(
        group,
        kept=tuple(sessions),
        settled_count=group.settled_count + 1,
        phase=phase,
        last_seq=seq,
        last_at_ns=at_ns,
    )


def _terminal(group: Group, event: ev.GroupFinished | ev.GroupFailed, phase: Phase, seq: int, at_ns: int) -> Group:
    if not group.settled:
        waiting = [i for i, session in enumerate(group.sessions) if session.state not in SETTLED]
        raise SessionStateError(
            f"group {group.group_id!r} cannot be terminal: sessions {waiting} have not settled; "
            "a terminal event comes after the end of every session's latest attempt"
        )
    finished = isinstance(event, ev.GroupFinished)
    return replace(
        group,
        kept=_ENCODER.encode(group.sessions),
        terminal=Phase.FINISHED if finished else Phase.FAILURE,
        terminal_seq=seq,
        partial=isinstance(event, ev.GroupFinished) and event.partial,
        cancelled=isinstance(event, ev.GroupFailed) and event.cancelled,
        phase=phase,
        last_seq=seq,
        last_at_ns=at_ns,
    )


def _requeued(group: Group, event: ev.GroupRequeued, phase: Phase, seq: int, at_ns: int) -> Group:
    again = tuple(
        Session(attempt=session.attempt + 1, last_seq=seq, first_attempt=session.attempt + 1)
        for session in group.sessions
    )
    if event.weight_version is not None:
        group = replace(group, stamp=event.weight_version, rewound_to=None)
    return replace(
        group,
        kept=again,
        settled_count=0,
        finished_count=0,
        trajectory_count=0,
        session_ranges={},
        trajectory_ranges={},
        terminal=None,
        terminal_seq=0,
        partial=False,
        cancelled=False,
        version=group.first_version,
        aged_from=group.first_version if group.rewound_to is None else min(group.first_version, group.rewound_to),
        kept_lag=None,
        kept_empty=False,
        ended_version=0,
        requeue_count=group.requeue_count + 1,
        rule_requeue_count=group.rule_requeue_count + event.by_rule,
        phase=phase,
        last_seq=seq,
        last_at_ns=at_ns,
    )


_HANDLERS: dict[type[ev.Event], Callable[[Group, Any, Any, int, int], Group]] = {
    ev.SessionStarted: _started,
    ev.SessionFinished: _finished,
    ev.SessionFailed: _failed,
    ev.GroupFinished: _terminal,
    ev.GroupFailed: _terminal,
    ev.GroupRequeued: _requeued,
}

_STEPS = {
    phase: {kind: (_HANDLERS[kind], target) for kind, target in cells.items() if kind in _HANDLERS}
    for phase, cells in TRANSITIONS.items()
}
"""What `next_phase` and `_HANDLERS` say together, since most events ask both: handler and next phase."""


def terminal_event(
    group: Group, *, survivors_min: int | None, cancelled: bool
) -> ev.GroupFinished | ev.GroupFailed | None:
    """What the ledger must write behind the end of a session: None until all siblings have settled.

    A group is finished when as many sessions finished as it needs, or, partially, at least `survivors_min`.
    """
    if not group.settled or group.terminal is not None:
        return None
    if cancelled and group.finished_count < group.size:
        return ev.GroupFailed(group.group_id, cancelled=True)
    if group.filled:
        return ev.GroupFinished(group.group_id)
    if survivors_min is not None and group.finished_count >= survivors_min:
        return ev.GroupFinished(group.group_id, partial=True)
    return ev.GroupFailed(group.group_id)


def fence_reason(
    group: Group, session: int, attempt: int, result: Literal["finished", "failed", "started"]
) -> ev.FenceReason | None:
    """Why a result for (session, attempt) must change nothing; None if it is for the open attempt."""
    current = group.sessions[session]
    if attempt != current.attempt:
        return "attempt"
    if current.state == result:
        return "duplicate"
    if current.state in SETTLED:
        return "settled" if group.in_flight else "terminal"
    if current.state == "open" and result == "started":
        return "duplicate"
    return None


def versions_used(group: Group) -> tuple[int, int, int] | None:
    """First token's version, oldest and newest version of all generated tokens; None where nothing is known.

    A session without spans counts with the version that was known at its start."""
    used = [versions for session in group.sessions if (versions := _session_versions(session))]
    if not used:
        return None
    return min(versions[0] for versions in used), min(map(min, used)), max(map(max, used))


def _session_versions(session: Session) -> list[int]:
    """In the order of the tokens."""
    spans = [span.weight_version for row in session.trajectories for span in row.spans]
    if not spans and session.trajectories and session.weight_version is not None:
        return [session.weight_version]
    return spans
