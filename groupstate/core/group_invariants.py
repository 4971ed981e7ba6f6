"""What the events of groups and their sessions say that can't be, and what they count.

Rule: for the checker of invariants alone. What a group says of itself is asked before it is moved (`misfits`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from groupstate.core import events as ev
from groupstate.core.misfits import wrong_end
from groupstate.core.phases import IN_FLIGHT, TERMINAL, Phase
from groupstate.core.rules import Capacity, Slots
from groupstate.core.tracked import Tracked

if TYPE_CHECKING:
    from groupstate.core.invariants import Checker

_RUNNING: Final = Phase.RUNNING
"""Looked up once: an event of a session asks for it, and a lookup in an enumeration takes longer than the question."""

# Groups --------------------------------------------------------------------------------------------


def _submitted(checker: "Checker", event: ev.GroupSubmitted) -> None:
    known = checker.groups.get(event.group_id)
    if known is not None:
        text = f"group {event.group_id!r} is submitted again; the first time was event {known.submitted_seq}"
        checker.wrong(3, text, event.group_id, known.submitted_seq)
        return
    group = Tracked(
        event.group_id,
        event.size,
        event.partition,
        event.weight_version,
        checker.seq,
        event.weight_version if event.target_version is None else event.target_version,
        event.dataset,
        event.oversample,
        event.target_version,
    )
    group.begin([1] * event.size, checker.seq)
    group.aged_seq = group.stamped_seq = checker.seq
    checker.groups[event.group_id] = group
    checker.place(group, Phase.PENDING)
    window = checker.windows[event.partition]
    window["submitted"] += 1
    if event.cause == "refill":
        window["refills"] += 1
        _check_refill(checker, event)
    if event.cause != "submit":
        _check_bounds(checker, event)


def _check_refill(checker: "Checker", event: ev.GroupSubmitted) -> None:
    name = event.group_id
    if event.partition != ev.TRAIN:
        checker.wrong(8, f"group {name!r} of partition {event.partition!r} is submitted as a refill", name)
    if not checker.owed:
        checker.wrong(5, f"group {name!r} is submitted as a refill, and no credit is left", name, *checker.spent)
        return
    evicted, size, earned = checker.owed.popleft()
    checker.spent = (earned, checker.seq)
    needed = event.size - event.oversample
    if size != needed:
        text = f"refill {name!r} needs {needed} sessions, and group {evicted!r}, which it replaces, needed {size}"
        checker.wrong(5, text, name, checker.groups[evicted].submitted_seq, earned)


def _check_bounds(checker: "Checker", event: ev.GroupSubmitted) -> None:
    """The groups that the user did not submit obey the bounds."""
    rules, flying, ready = checker.rules, checker.in_flight(ev.TRAIN), checker.ready[ev.TRAIN]
    who, name = f"{event.cause} {event.group_id!r}", event.group_id
    if event.cause == "refill" and rules.drains:
        bound = rules.in_flight_batches_max * (rules.batch_size or 0)
        if flying > bound:
            text = f"{who} takes the training groups in flight to {flying}, past {bound}"
            checker.wrong(7, text, name, *_filling(checker, name, IN_FLIGHT))
    most = getattr(rules.admission, "in_flight_max", None)
    if most is not None and flying > most:
        text = f"{who} takes the training groups in flight to {flying}, past {most}"
        checker.wrong(7, text, name, *_filling(checker, name, IN_FLIGHT))
    wanted = sum(request.size for request in checker.requests.values() if request.partition == ev.TRAIN)
    awaited = rules.targets_versions and event.target_version == checker.version and wanted > 0
    if wanted >= ready + flying or awaited:
        # A waiting sample() needs this very group, whatever admission would rather keep ahead.
        return
    rule = rules.admission
    if isinstance(rule, Slots) and (flying > rule.n or flying + ready > rule.n + rule.ready_max):
        text = (
            f"{who} takes the training groups to {flying} in flight and {ready} sampleable, "
            f"past slots of n {rule.n} and ready_max {rule.ready_max}"
        )
        checker.wrong(7, text, name, *_filling(checker, name, IN_FLIGHT | TERMINAL))
    elif isinstance(rule, Capacity):
        bound = (rule.lag_max + checker.version + 1) * (rules.batch_size or 0)
        used = flying + ready + checker.counts[ev.TRAIN, Phase.SAMPLED] + checker.counts[ev.TRAIN, Phase.COMMITTED]
        if used > bound:
            text = f"{who} makes {used} training groups, past the capacity of {bound}"
            counted = IN_FLIGHT | TERMINAL | {Phase.SAMPLED, Phase.COMMITTED}
            checker.wrong(7, text, name, *_filling(checker, name, counted))


def _filling(checker: "Checker", name: str, phases: frozenset[Phase]) -> tuple[int, ...]:
    """The event that the rules are of, and the one that took the last place before the group at hand."""
    taken = (
        group.begun_seq
        for group in reversed(checker.groups.values())
        if group.group_id != name and group.partition == ev.TRAIN and group.phase in phases
        if group.is_ready or group.phase not in TERMINAL
    )
    return checker.rules_seq, next(taken, 0)


def _ended(checker: "Checker", event: ev.GroupFinished | ev.GroupFailed) -> None:
    group = checker.known(event.group_id)
    if group is None:
        return
    if group.phase not in IN_FLIGHT:
        checker.wrong(2, _too_late(group, type_name(event)), group.group_id, group.left_seq)
        return
    phase = Phase.FINISHED if isinstance(event, ev.GroupFinished) else Phase.FAILURE
    misfit = wrong_end(group, event, survivors_min=checker.rules.survivors_min, rules_seq=checker.rules_seq)
    if misfit is not None:
        text, seqs = misfit
        checker.wrong(1, f"group {group.group_id!r} becomes {phase} although {text}", group.group_id, *seqs)
    checker.lift(group)
    group.ending, group.left_seq = phase, checker.seq
    group.age(checker.rules.basis)
    group.kept_empty = phase in checker.rules.kept_empty and not group.rows and group.partition == ev.TRAIN
    checker.place(group, phase)


def _too_late(group: Tracked, what: str) -> str:
    return f"{what} comes after group {group.group_id!r} was {_past(group.phase)} at event {group.left_seq}"


def _evicted(checker: "Checker", event: ev.GroupEvicted) -> None:
    group = checker.known(event.group_id)
    if group is None:
        return
    name = group.group_id
    if group.phase is Phase.EVICTED:
        checker.wrong(
            5, f"group {name!r} is evicted again; the first time was event {group.left_seq}", name, group.left_seq
        )
        return
    if group.phase in IN_FLIGHT:
        checker.wrong(1, f"group {name!r} is evicted while it is {group.phase}", name, group.open_seq)
    elif group.phase not in TERMINAL:
        text = f"group {name!r} is evicted although it was {_past(group.phase)} with batch {group.batch}"
        checker.wrong(4, text, name, group.sampled_seq, group.left_seq)
    if group.partition != ev.TRAIN:
        checker.wrong(8, f"group {name!r} of partition {group.partition!r} is evicted", name, group.submitted_seq)
    _check_credit(checker, event)
    _check_eviction_lag(checker, group, event)
    window = checker.windows[group.partition]
    window["evicted_groups"] += 1
    window.update(f"evicted/{reason}" for reason in event.reasons)
    if "stale" in event.reasons:
        window[f"evicted/stale with lag {event.lag}"] += 1
    if event.shared_value is not None:
        window[filtered(event.shared_value)] += 1
    checker.owed.extend([(name, group.needed, checker.seq)] * event.credit)
    checker.lift(group)
    group.left_seq = checker.seq
    group.attempts, group.outcomes = [], []
    checker.place(group, Phase.EVICTED)


def _check_credit(checker: "Checker", event: ev.GroupEvicted) -> None:
    name, reasons = event.group_id, event.reasons
    if not reasons or len(set(reasons)) < len(reasons):
        text = f"group {name!r} is evicted for {list(reasons)}; a reason is needed, and each counts once"
        checker.wrong(5, text, name)
    most = 2 if checker.rules.mode == "sync" and "zero_variance" in reasons else 0 if "surplus" in reasons else 1
    if not 0 <= event.credit <= most:
        why = " and ".join(reasons)
        text = f"evicting group {name!r} earns {event.credit} refills; {why} in {checker.rules.mode} mode earns {most}"
        # In the other mode a group without variance would have earned this.
        mode_decides = "zero_variance" in reasons and event.credit == 2
        checker.wrong(5, text, name, checker.rules_seq if mode_decides else 0)


def _check_eviction_lag(checker: "Checker", group: Tracked, event: ev.GroupEvicted) -> None:
    name, lag = group.group_id, checker.lag(group)
    if event.lag != lag:
        text = f"group {name!r} is evicted with lag {event.lag}, and its lag is {lag}"
        checker.wrong(11, text, name, *checker.lag_seqs(group))
    abandoned = name in checker.abandoned
    checker.abandoned.discard(name)
    if "stale" not in event.reasons or abandoned or checker.rules.has_own_selection:
        # A rule of the user's own says by itself what is stale.
        return
    bound = checker.rules.lag_bound(group.dataset) if checker.rules.drops_stale else None
    if bound is None:
        text = f"group {name!r} is evicted as stale under rules that drop nothing for its lag"
        checker.wrong(6, text, name, checker.rules_seq)
    elif lag <= bound:
        text = f"group {name!r} is evicted as stale with lag {lag}, and lag_max {bound} is kept"
        checker.wrong(6, text, name, checker.rules_seq)


def _requeued(checker: "Checker", event: ev.GroupRequeued) -> None:
    group = checker.known(event.group_id)
    if group is None:
        return
    if group.phase not in IN_FLIGHT and group.phase not in TERMINAL:
        checker.wrong(2, _too_late(group, type_name(event)), group.group_id, group.left_seq)
        return
    if event.by_rule:
        _check_requeue(checker, group)
    checker.lift(group)
    group.begin([attempt + 1 for attempt in group.attempts], checker.seq)
    if event.weight_version is not None:
        group.stamp, group.stamped_seq, group.rewound_to = event.weight_version, checker.seq, None
    group.aged_from, group.aged_seq = group.counts_from, group.stamped_seq
    if group.rewound_to is not None and group.rewound_to < group.aged_from:
        group.aged_from, group.aged_seq = group.rewound_to, group.rewound_seq
    checker.place(group, Phase.PENDING)


def _check_requeue(checker: "Checker", group: Tracked) -> None:
    """The rules start only failed groups over, and not without end."""
    name = group.group_id
    group.rule_requeues += 1
    checker.windows[group.partition]["requeued"] += 1
    if group.phase is not Phase.FAILURE:
        seq = group.open_seq if group.phase in IN_FLIGHT else group.left_seq
        checker.wrong(2, f"the rules start group {name!r} over while it is {group.phase}", name, seq)
    if group.rule_requeues > checker.rules.requeues_max:
        text = f"the rules start group {name!r} over {group.rule_requeues} times, and requeues_max is "
        checker.wrong(2, f"{text}{checker.rules.requeues_max}", name, checker.rules_seq, group.started_over_seq)
    group.started_over_seq = checker.seq


def _starved(checker: "Checker", event: ev.DatasetStarved) -> None:
    checker.windows[ev.TRAIN][f"starved/{event.dataset}"] += 1


def _forfeited(checker: "Checker", event: ev.RefillForfeited) -> None:
    checker.windows[ev.TRAIN]["forfeited"] += event.count
    if event.count > len(checker.owed):
        earned = (checker.owed[-1][2],) if checker.owed else checker.spent
        checker.wrong(5, f"{event.count} refills are forfeited, and {len(checker.owed)} are owed", "", *earned)
    for _ in range(min(event.count, len(checker.owed))):
        checker.spent = (checker.owed.pop()[2], checker.seq)


# Sessions ------------------------------------------------------------------------------------------


def _in_session(checker: "Checker", event: ev.SessionStarted | ev.SessionFinished | ev.SessionFailed) -> Tracked | None:
    """The group, if its session can have an event now."""
    group = checker.groups.get(event.group_id) or checker.known(event.group_id)
    if group is None:
        return None
    session, seqs = event.session, group.last_seqs
    if group.phase not in IN_FLIGHT:
        text = _too_late(group, f"{type_name(event)} of session {session}")
        checker.wrong(2, text, group.group_id, group.left_seq)
        return None
    if not 0 <= session < group.size:
        # The replay stops at it, and says so.
        checker.builds_on = (group.submitted_seq,)
        return None
    checker.builds_on = (seqs[session],)
    seqs[session] = checker.seq
    return group


def _session_started(checker: "Checker", event: ev.SessionStarted) -> None:
    group = _in_session(checker, event)
    if group is not None:
        session = event.session
        if event.attempt > group.attempts[session]:
            group.attempts[session] = event.attempt
        group.outcomes[session] = ""
        group.starts[session] = event.weight_version
        if group.phase is not _RUNNING:
            checker.lift(group)
            checker.place(group, _RUNNING)


def _session_finished(checker: "Checker", event: ev.SessionFinished) -> None:
    group = _in_session(checker, event)
    if group is not None:
        group.take_rows(event.session, event.trajectories, checker.seq)
        _settle(checker, group, event, "finished")


def _session_failed(checker: "Checker", event: ev.SessionFailed) -> None:
    group = _in_session(checker, event)
    if group is None:
        return
    checker.windows[group.partition][f"failed/{event.failure}"] += 1
    if event.retry_in_s is not None:
        group.attempts[event.session] = event.attempt + 1
    else:
        _settle(checker, group, event, "failed")


def _settle(checker: "Checker", group: Tracked, event: ev.SessionFinished | ev.SessionFailed, outcome: str) -> None:
    if event.attempt != group.attempts[event.session]:
        # An attempt that is over already can't end the latest one.
        return
    group.outcomes[event.session] = outcome
    if "" not in group.outcomes:
        checker.must_end = group.group_id


def _fenced(checker: "Checker", event: ev.ResultFenced) -> None:
    group = checker.known(event.group_id)
    if group is not None and group.phase not in (Phase.EVICTED, Phase.COMMITTED):
        checker.windows[group.partition]["fenced"] += 1


def type_name(event: ev.AnyEvent) -> str:
    return type(event).__name__


def _past(phase: Phase) -> str:
    return "failed" if phase is Phase.FAILURE else str(phase)


def filtered(value: float) -> str:
    return f"evicted/zero_variance at {value + 0.0!r}"  # -0.0 is 0.0, here as in a Counter


Handler = Callable[["Checker", Any], None]
HANDLERS: Final[dict[type[ev.Event], Handler]] = {
    ev.DatasetStarved: _starved,
    ev.GroupSubmitted: _submitted,
    ev.GroupFinished: _ended,
    ev.GroupFailed: _ended,
    ev.GroupEvicted: _evicted,
    ev.GroupRequeued: _requeued,
    ev.RefillForfeited: _forfeited,
    ev.SessionStarted: _session_started,
    ev.SessionFinished: _session_finished,
    ev.SessionFailed: _session_failed,
    ev.ResultFenced: _fenced,
}
