"""What a waiting `sample()` waits for, as a value and as a text."""

import attrs

from groupstate.core.book import Book
from groupstate.core.events import TRAIN
from groupstate.core.group import Group
from groupstate.core.held import DISK_HOLD, OpenRequest
from groupstate.core.rules import Rules
from groupstate.core.select import held_by_stale, in_flight_for, ready_for, why_not

IN_FLIGHT_SHOWN_MAX = 8
"""Groups in flight that an explanation lists, oldest first; the rest is a number."""


@attrs.frozen
class GroupInFlight:
    group_id: str
    phase: str
    lag: int
    age_s: float
    """Seconds since its submission."""
    quiet_s: float
    """Seconds since its last event."""
    open_sessions: tuple[int, ...]
    """Sessions whose attempt is under way."""
    waiting_sessions: tuple[int, ...]
    """Sessions whose attempt is still to begin."""
    last_failure: str = ""
    """How a session of it failed last, where one did."""


@attrs.frozen
class Explanation:
    partition: str
    needed: int
    """Groups that the oldest waiting `sample()` wants; 0 if none waits."""
    sampleable: int
    in_flight_count: int
    in_flight: tuple[GroupInFlight, ...]
    """The oldest ones."""
    refills_owed: int
    source_exhausted: bool
    blocked_by: str
    """What keeps the oldest waiting `sample()` from being served; empty if nothing does."""
    unblocked_by: tuple[str, ...]
    """What would let it go on, and who could do it."""
    evicted: tuple[tuple[str, int], ...] = ()
    """Groups that were evicted since the last batch, by reason; one with two reasons counts under both."""
    last_failure: str = ""
    """The session that failed last, where groups were evicted for that; not told from a log alone."""

    def __str__(self) -> str:
        if not self.needed:
            head = f"no sample() waits in partition {self.partition!r}"
        elif not self.blocked_by:
            head = f"sample({self.needed}) in partition {self.partition!r} can be served"
        else:
            head = f"sample({self.needed}) in partition {self.partition!r} waits: {self.blocked_by}"
        lines = [
            head,
            f"sampleable {self.sampleable}, in flight {self.in_flight_count}, refills owed {self.refills_owed}"
            + (", source exhausted" if self.source_exhausted else ""),
        ]
        lines += [
            f"  {g.group_id!r} is {g.phase}, lag {g.lag}, submitted {g.age_s:.1f} s ago, quiet for {g.quiet_s:.1f} s"
            f", sessions open {list(g.open_sessions)}, to begin {list(g.waiting_sessions)}"
            + (f"; {g.last_failure}" if g.last_failure else "")
            for g in self.in_flight
        ]
        if self.in_flight_count > len(self.in_flight):
            lines.append(f"  and {self.in_flight_count - len(self.in_flight)} more in flight")
        if self.evicted:
            gone = ", ".join(f"{reason} {count}" for reason, count in self.evicted)
            told = f"; the {self.last_failure}" if self.last_failure else ""
            lines.append(f"evicted since the last batch: {gone}{told}")
        lines += [f"to go on: {way}" for way in self.unblocked_by]
        return "\n".join(lines)


def explain(
    book: Book,
    rules: Rules,
    *,
    partition: str = TRAIN,
    now_ns: int,
    has_source: bool,
    dispatches: bool,
    observed: bool = False,
) -> Explanation:
    """What the oldest waiting sampler of `partition` waits for.

    Args:
        now_ns: the clock, for ages.
        has_source: refills can be drawn.
        dispatches: a rollout of this run starts the sessions; else the user does.
        observed: prompts are dispatched and sessions run outside, where nobody has a run to submit to or cancel in.
    """
    waiting = book.waiting(partition)
    request = waiting[0] if waiting else None
    blocked = "" if request is None else why_not(book, rules, request) or ""
    if request is not None and has_source and _no_room(book, rules, request):
        blocked = f"{blocked}, and no more are drawn: {book.held_reason}"
    oldest = sorted(
        (group for phase in ("pending", "running") for group in book.in_phase(phase, partition)),  # type: ignore[arg-type]
        key=lambda group: group.submitted_seq,
    )
    return Explanation(
        partition=partition,
        needed=request.size if request else 0,
        sampleable=ready_for(book, rules, partition),
        in_flight_count=len(oldest),
        in_flight=tuple(_in_flight(book, group, now_ns) for group in oldest[:IN_FLIGHT_SHOWN_MAX]),
        refills_owed=len(book.credits),
        source_exhausted=book.source_exhausted,
        blocked_by=blocked,
        unblocked_by=tuple(_ways(book, rules, request, has_source=has_source, dispatches=dispatches, observed=observed))
        if blocked and request
        else (),
        evicted=tuple(sorted(book.window(partition).evicted.items())),
    )


def _no_room(book: Book, rules: Rules, request: OpenRequest) -> bool:
    """Groups are missing, and none is drawn for want of room on the disk."""
    short = ready_for(book, rules, request.partition) < request.size
    return short and request.partition == TRAIN and book.held_reason.startswith(DISK_HOLD)


def _in_flight(book: Book, group: Group, now_ns: int) -> GroupInFlight:
    return GroupInFlight(
        group_id=group.group_id,
        phase=str(group.phase),
        lag=book.lag(group),
        age_s=max(0.0, (now_ns - group.submitted_at_ns) / 1e9),
        quiet_s=max(0.0, (now_ns - group.last_at_ns) / 1e9),
        open_sessions=tuple(i for i, session in enumerate(group.sessions) if session.state == "open"),
        waiting_sessions=tuple(i for i, session in enumerate(group.sessions) if session.state == "waiting"),
        last_failure=_last_failure(group),
    )


def _last_failure(group: Group) -> str:
    failed = [(session.last_seq, i, session) for i, session in enumerate(group.sessions) if session.failure is not None]
    if not failed:
        return ""
    _, number, session = max(failed)
    again = f", attempt {session.attempt} is due" if session.state == "waiting" else ""
    return f"session {number} failed ({session.failure}){': ' if session.message else ''}{session.message}{again}"


def _ways(
    book: Book, rules: Rules, request: OpenRequest, *, has_source: bool, dispatches: bool, observed: bool
) -> list[str]:
    ways = []
    if in_flight_for(book, rules, request.partition) and observed:
        ways.append("groups in flight must be listed as ended, or not be listed any more, which gives them up")
    elif in_flight_for(book, rules, request.partition):
        runner = "the rollout runs them" if dispatches else "whoever dispatches them must report their end"
        ways.append(f"sessions in flight must end ({runner}); run.cancel(group) gives a group up")
    if held_by_stale(book, rules, request.partition) is not None:
        held = held_by_stale(book, rules, request.partition)
        assert held is not None
        ways.append(f"group {held.group_id!r} at the lag bound must end before anything is sampled (on_stale='wait')")
    if rules.has_own_selection and request.partition == TRAIN and ready_for(book, rules) >= request.size:
        ways.append(
            f"selection {rules.selection!r} must select {request.size}, or drop what it will never take: what is only "
            "passed over keeps its place, so that no other prompt is drawn for it"
        )
    missing = request.size - ready_for(book, rules, request.partition) - in_flight_for(book, rules, request.partition)
    if missing > 0:
        groups = "1 group" if missing == 1 else f"{missing} groups"
        if has_source and _no_room(book, rules, request):
            ways.append("there must be room on the disk: `groupstate disk RUN` says what takes it, and what may go")
        elif observed:
            ways.append(f"only prompts that are dispatched outside can supply the missing {groups}")
        elif request.partition != TRAIN or not has_source:
            ways.append(f"only a submit can supply the missing {groups}: run.submit(...)")
        elif not book.source_exhausted:
            ways.append(f"the source must supply prompts for {groups} more")
        else:
            ways.append(f"the source is exhausted, {groups} short: sample a smaller batch")
    return ways
