"""Which groups are given up, and why: evicted, started over, or cancelled while they are still in flight.

Rule 1: pure functions from the book to intents; one decision sees one state of the book, nothing is recorded here.
Rule 2: the cost is that of what changed: a group is judged once when it becomes terminal (sync mode: once a
`sample()` waits), and a new weight version looks only at the groups that it makes stale.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from groupstate.core.book import Book
from groupstate.core.events import TRAIN, EvictReason
from groupstate.core.group import Group, Range
from groupstate.core.phases import TERMINAL, Phase
from groupstate.core.rules import Rules
from groupstate.core.shelf import has_rows
from groupstate.core.spread import deviation


@attrs.frozen
class Evict:
    """Intent: take a terminal group out of the book."""

    group_id: str
    reasons: tuple[EvictReason, ...]
    lag: int
    credit: int
    shared_value: float | None = None
    message: str = ""


@attrs.frozen
class Requeue:
    """Intent: start a failed group over with the same prompt."""

    group_id: str
    reason: str


@attrs.frozen
class Missing:
    """A finished session that lacks the metric which the filter reads."""

    group_id: str
    session: int
    metric: str
    present: tuple[str, ...]


@attrs.frozen
class Judgement:
    evictions: tuple[Evict, ...]
    missing: tuple[Missing, ...]
    kept: tuple[str, ...]
    requeues: tuple[Requeue, ...] = ()


def judged(
    book: Book,
    rules: Rules,
    candidates: Iterable[Group],
    *,
    demand: int | None,
    damaged: Mapping[str, str] = MappingProxyType({}),
) -> Judgement:
    """Which of the terminal training groups in `candidates` are evicted, and what that earns.

    Args:
        demand: groups that the oldest waiting `sample()` wants; None if none waits. In sync mode credit is
            earned only while the demand is unmet.
        damaged: groups of which a payload can't be read, with what is wrong.
    """
    found, missing, kept, requeues = [], [], [], []
    leaving = 0
    for group in candidates:
        if group.phase not in TERMINAL or group.partition != TRAIN:
            continue
        if group.group_id not in damaged and may_start_over(group, book.lag(group), rules):
            requeues.append(_requeue(group, rules))
            leaving += has_rows(group)
            continue
        verdict = reasons_of(group, book.lag(group), rules, damaged=group.group_id in damaged)
        if isinstance(verdict, Missing):
            missing.append(verdict)
        elif verdict:
            found.append((group, verdict))
            leaving += has_rows(group)
        else:
            kept.append(group.group_id)
    unmet = demand is not None and book.ready_count() - leaving < demand
    evictions = tuple(
        Evict(
            group.group_id,
            reasons,
            book.lag(group),
            credit_of(reasons, rules, unmet=unmet),
            _shared_value(group, rules) if "zero_variance" in reasons else None,
            damaged.get(group.group_id, ""),
        )
        for group, reasons in found
    )
    return Judgement(evictions, tuple(missing), tuple(kept), tuple(requeues))


def newly_stale(book: Book, rules: Rules) -> list[Group]:
    """Sampleable training groups above their lag bound, oldest first; looks no further than the first below it."""
    if not rules.drops_stale:
        return []
    return list(itertools.chain.from_iterable(_above(book, rules, groups) for groups in book.by_age()))


def _above(book: Book, rules: Rules, oldest_first: Iterable[Group]) -> Iterable[Group]:
    """Those at the front that are above the lag bound. All have the same one."""
    return itertools.takewhile(lambda group: is_stale(group, book.lag(group), rules), oldest_first)


def is_stale(group: Group, lag: int, rules: Rules) -> bool:
    """The rules drop the group for its lag. A lag of exactly the bound is kept."""
    bound = rules.lag_bound(group.dataset) if rules.drops_stale else None
    return bound is not None and lag > bound


def may_start_over(group: Group, lag: int, rules: Rules) -> bool:
    """A failed group gets another try with the same prompt, which makes it no younger."""
    if group.phase is not Phase.FAILURE or group.cancelled or is_stale(group, lag, rules):
        return False
    return group.rule_requeue_count < rules.requeues_max


def _requeue(group: Group, rules: Rules) -> Requeue:
    number = group.rule_requeue_count + 1
    return Requeue(
        group.group_id, f"{group.failed_count} of its sessions failed; requeue {number} of {rules.requeues_max}"
    )


def reasons_of(group: Group, lag: int, rules: Rules, *, damaged: bool = False) -> tuple[EvictReason, ...] | Missing:
    """Why a terminal training group is evicted, alphabetically; empty if it is kept. The filter finds no value in one
    that is kept without a trajectory."""
    reasons: list[EvictReason] = []
    ended = _ended_reason(group, rules, damaged)
    if ended is not None:
        reasons.append(ended)
    if is_stale(group, lag, rules):
        reasons.append("stale")
    if rules.filter_metric is not None and group.phase is Phase.FINISHED and has_rows(group):
        flat = is_flat(group, rules)
        if isinstance(flat, Missing):
            if not reasons:
                return flat
        elif flat:
            reasons.append("zero_variance")
    return tuple(sorted(reasons))


def _ended_reason(group: Group, rules: Rules, damaged: bool) -> EvictReason | None:
    """At most one of these, the first that holds."""
    if group.cancelled:
        return "cancelled"
    if damaged:
        return "damaged"
    rows = group.trajectory_count
    if group.phase is Phase.FAILURE and rows and group.finished_count < (rules.survivors_min or 0):
        return "too_few"
    if not rows and not group.kept_empty:
        return "empty"
    if group.phase is Phase.FAILURE and rules.evicts_failed():
        return "failed"
    return None


def is_flat(group: Group, rules: Rules) -> bool | Missing:
    """Zero variance: at least two values and max - min <= tolerance. A range, unless the rules say otherwise, and
    not a standard deviation, because six times 0.7 has a floating-point deviation above zero."""
    assert rules.filter_metric is not None
    low, high, count = _range(group, rules) or (0.0, 0.0, 0)
    if count < max(1, _expected(group, rules, count)):
        missing = _missing(group, rules)
        if missing is None:
            return False
        return missing if rules.on_missing == "error" else rules.on_missing == "evict"
    if count == 1:
        return rules.on_singleton == "evict"
    if rules.spread == "std":
        return deviation(_values(group, rules)) <= rules.tolerance_for(group.dataset)
    return high - low <= rules.tolerance_for(group.dataset)


def _expected(group: Group, rules: Rules, count: int) -> int:
    """Values that there are if none is missing.

    Args:
        count: values that there are. Where those are enough the sessions, which are packed, need not be looked at.
    """
    if rules.per == "trajectory":
        return group.trajectory_count
    if count >= group.finished_count:
        return group.finished_count
    # A session may have finished without a trajectory.
    return sum(1 for session in group.sessions if session.trajectories)


def _values(group: Group, rules: Rules) -> list[float]:
    """The values that are compared, where none is missing."""
    assert rules.filter_metric is not None
    last = None if rules.per == "trajectory" else -1
    return [row.metrics[rules.filter_metric] for session in group.sessions for row in session.trajectories[last:]]


def _range(group: Group, rules: Rules) -> Range | None:
    assert rules.filter_metric is not None
    ranges = group.trajectory_ranges if rules.per == "trajectory" else group.session_ranges
    return ranges.get(rules.filter_metric)


def _shared_value(group: Group, rules: Rules) -> float | None:
    """The value that all have; None where they don't, or where one lacks it (`on_missing` can evict too)."""
    low, high, count = _range(group, rules) or (0.0, math.inf, 0)
    all_have_it = count == _expected(group, rules, count)
    return low if all_have_it and high - low <= rules.tolerance_for(group.dataset) else None


def _missing(group: Group, rules: Rules) -> Missing | None:
    """The first session that lacks the metric; the first of all where the group is kept without a trajectory. None
    where only values are left out that are no numbers, which are the same as no other."""
    metric = rules.filter_metric
    assert metric is not None
    if not group.trajectory_count:
        return Missing(group.group_id, 0, metric, ())
    last = None if rules.per == "trajectory" else -1
    lacking = (
        Missing(group.group_id, number, metric, tuple(sorted(trajectory.metrics)))
        for number, session in enumerate(group.sessions)
        for trajectory in session.trajectories[last:]
        if metric not in trajectory.metrics and metric not in trajectory.not_finite
    )
    return next(lacking, None)


def credit_of(reasons: tuple[EvictReason, ...], rules: Rules, *, unmet: bool) -> int:
    """Refills that an eviction earns: one credit per group, however many reasons, by the matrix."""
    if "surplus" in reasons:
        return 0
    if rules.mode == "async":
        return 1
    if not unmet:
        return 0
    if "zero_variance" in reasons:
        return 2
    if reasons == ("empty",) and rules.empty == "drop":
        return 0
    return 1


# Groups in flight ------------------------------------------------------------------------------------


def doomed_by_age(book: Book, rules: Rules) -> list[Group]:
    """Training groups in flight that are above their lag bound already, whatever they yet yield."""
    if not _dooms_by_age(rules):
        return []
    return list(itertools.chain.from_iterable(_above(book, rules, groups) for groups in book.in_flight_by_age()))


def is_doomed(group: Group, lag: int, rules: Rules) -> bool:
    """A group in flight will be evicted, for its lag or because so many of its sessions have failed."""
    if not rules.cancel_doomed or not group.in_flight or group.partition != TRAIN:
        return False
    if _dooms_by_age(rules) and is_stale(group, lag, rules):
        return True
    enough = group.needed if rules.survivors_min is None else min(group.needed, rules.survivors_min)
    return group.size - group.failed_count < enough and group.rule_requeue_count >= rules.requeues_max


def _dooms_by_age(rules: Rules) -> bool:
    """Under a basis that is known only from a group's tokens, nobody knows the lag of a group in flight."""
    return rules.cancel_doomed and rules.basis in {"dispatch", "target_version"}
