"""When two runs are the same for all that can happen from here on.

A run's key leaves out what no decision reads: numbers and times of events, names of groups, which of a group's sessions
is which, counts for metrics, and what has left. A group stands for its place in the order of submission.

Rule: whatever a decision reads is in here. Where something is missing, two runs with one key have successors with
different keys, and `explore(check_keys=True)` finds it.
"""

from typing import Any, TypeAlias

import attrs

from groupstate.core import events as ev
from groupstate.core.group import Group, Session
from groupstate.core.phases import Phase
from groupstate.core.rules import Capacity
from groupstate.testing.exhaustive.stage import Stage

Key: TypeAlias = tuple[Any, ...]


def key_of(stage: Stage) -> Key:
    book = stage.book
    groups = sorted([*book.groups.values(), *book.aside.values()], key=_submitted)
    places = {group.group_id: place for place, group in enumerate(groups)}
    return (
        tuple([_group(stage, group, places) for group in groups]),
        _run(stage),
        _batches(stage, places),
        _rules(stage, places),
        tuple(sorted(stage.spent.items())),
        stage.submitted,
    )


def _submitted(group: Group) -> int:
    return group.submitted_seq


def _group(stage: Stage, group: Group, places: dict[str, int]) -> Key:
    marks = stage.book.marks
    ending = stage.ledger.endings.get(group.group_id)
    return (
        group.phase,
        group.partition,
        group.dataset,
        (group.size, group.oversample),
        (group.stamp, group.version, group.aged_from, group.target_version, group.rewound_to),
        (group.kept_lag, group.sampled_lag if group.phase is Phase.SAMPLED or group.phase is Phase.COMMITTED else 0),
        (group.terminal, group.partial, group.cancelled, group.kept_empty),
        group.rule_requeue_count,
        tuple(sorted([_session(group, session) for session in group.sessions])),
        ending and (ending.failure, ending.cancels),
        tuple([group.submitted_seq > mark.seq for mark in marks]),
        tuple([group.last_seq > mark.seq for mark in marks]) if group.phase is Phase.COMMITTED else (),
    )


def _session(group: Group, session: Session) -> Key:
    rows = tuple([(tuple(sorted(row.metrics.items())), row.spans) for row in session.trajectories])
    if not group.in_flight:
        return (session.state, rows)
    version = -1 if session.weight_version is None else session.weight_version
    return (session.state, session.tries, session.attempt > 1, version, rows)


def _run(stage: Stage) -> Key:
    book = stage.book
    left = set(book.departed.values())
    return (
        book.weight_version,
        book.source_position,
        book.source_exhausted,
        book.held_reason,
        tuple([mark.weight_version for mark in book.marks]),
        Phase.EVICTED in left,
        Phase.COMMITTED in left,
        tuple([(credit.size, credit.dataset, credit.target_version) for credit in book.credits]),
        tuple(sorted(book.targets.items())) if stage.rules.targets_versions else (),
        book.totals["committed/train"] if isinstance(stage.rules.admission_rule, Capacity) else 0,
        book.window(ev.TRAIN).submitted if stage.rules.generated_groups_max is not None else 0,
        tuple(sorted((name, attrs.astuple(use)) for name, use in book.uses.items()))
        if stage.rules.starvation_versions is not None or stage.rules.datasets
        else (),
    )


def _batches(stage: Stage, places: dict[str, int]) -> Key:
    """Who waits and what is out. A claimed batch can be withdrawn by its sampler, another only released."""
    claimed = {waiter.claim.batch for waiter in stage.waiters if waiter.claim is not None}
    return (
        tuple([(request.partition, request.size) for request in stage.book.requests.values()]),
        tuple(
            [
                (batch.partition, tuple([places[name] for name in batch.group_ids]), batch.batch in claimed)
                for batch in stage.book.batches.values()
            ]
        ),
    )


def _rules(stage: Stage, places: dict[str, int]) -> Key:
    """What the controller remembers between two decisions."""
    controller = stage.controller
    if controller is None:
        return ()
    noted = (controller._unjudged, controller._filled, controller._suspects, controller.missing, controller.damaged)
    return (
        tuple([tuple(sorted([places[name] for name in names if name in places])) for names in noted]),
        (controller._aged, controller._aged_in_flight, controller._published),
        min(controller.streak, controller.rules.streak_bound(stage.world.batch)),
        controller.drawing.error is not None,
    )
