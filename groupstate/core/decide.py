"""What follows from the book under the rules: pure decisions, each a function from state to intents.

Rule 1: one decision sees one state of the book; nothing is recorded here.
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
from groupstate.core.held import OpenRequest
from groupstate.core.phases import TERMINAL, Phase
from groupstate.core.rules import Capacity, PerBatch, Rules, Slots


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


# Eviction --------------------------------------------------------------------------------------------


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
    found, missing, kept = [], [], []
    for group in candidates:
        if group.phase not in TERMINAL or group.partition != TRAIN:
            continue
        verdict = reasons_of(group, book.lag(group), rules, damaged=group.group_id in damaged)
        if isinstance(verdict, Missing):
            missing.append(verdict)
        elif verdict:
            found.append((group, verdict))
        else:
            kept.append(group.group_id)
    leaving = sum(1 for group, _ in found if group.trajectory_count)
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
    return Judgement(evictions, tuple(missing), tuple(kept))


def newly_stale(book: Book, rules: Rules) -> list[Group]:
    """Sampleable training groups above the lag bound, oldest first; looks no further than the first below it."""
    if not rules.drops_stale:
        return []
    assert rules.lag_max is not None
    stale = []
    for group in book.by_age():
        if book.lag(group) <= rules.lag_max:
            break
        stale.append(group)
    return stale


def reasons_of(group: Group, lag: int, rules: Rules, *, damaged: bool = False) -> tuple[EvictReason, ...] | Missing:
    """Why a terminal training group is evicted, alphabetically; empty if it is kept."""
    reasons: list[EvictReason] = []
    ended = _ended_reason(group, rules, damaged)
    if ended is not None:
        reasons.append(ended)
    if rules.drops_stale and rules.lag_max is not None and lag > rules.lag_max:
        reasons.append("stale")
    if rules.filter_metric is not None and group.phase is Phase.FINISHED and group.trajectory_count:
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
    if not rows:
        return "empty"
    if group.phase is Phase.FAILURE and rules.evicts_failed():
        return "failed"
    return None


def is_flat(group: Group, rules: Rules) -> bool | Missing:
    """Zero variance: at least two values and max - min <= tolerance. A range, not a standard deviation,
    because six times 0.7 has a floating-point deviation above zero."""
    assert rules.filter_metric is not None
    expected = (
        group.trajectory_count
        if rules.per == "trajectory"
        else sum(1 for session in group.sessions if session.trajectories)
    )
    low, high, count = _range(group, rules) or (0.0, 0.0, 0)
    if count < expected:
        if rules.on_missing == "error":
            return _missing(group, rules)
        return rules.on_missing == "evict"
    if count == 1:
        return rules.on_singleton == "evict"
    return high - low <= rules.tolerance


def _range(group: Group, rules: Rules) -> Range | None:
    assert rules.filter_metric is not None
    ranges = group.trajectory_ranges if rules.per == "trajectory" else group.session_ranges
    return ranges.get(rules.filter_metric)


def _shared_value(group: Group, rules: Rules) -> float | None:
    """The value that all have; None where they don't (a metric that is missing can evict too)."""
    low, high, _ = _range(group, rules) or (0.0, math.inf, 0)
    return low if high - low <= rules.tolerance else None


def _missing(group: Group, rules: Rules) -> Missing:
    """The first session that lacks the metric. There is one: a value for each was expected, and fewer came."""
    metric = rules.filter_metric
    assert metric is not None
    last = None if rules.per == "trajectory" else -1
    return next(
        Missing(group.group_id, number, metric, tuple(sorted(trajectory.metrics)))
        for number, session in enumerate(group.sessions)
        for trajectory in session.trajectories[last:]
        if metric not in trajectory.metrics
    )


def credit_of(reasons: tuple[EvictReason, ...], rules: Rules, *, unmet: bool) -> int:
    """Refills that an eviction earns: one credit per group, however many reasons, by the matrix."""
    if rules.mode == "async":
        return 1
    if not unmet:
        return 0
    if "zero_variance" in reasons:
        return 2
    if reasons == ("empty",) and rules.empty == "drop":
        return 0
    return 1


# Refill and admission --------------------------------------------------------------------------------


def draining(book: Book, rules: Rules) -> bool:
    """Sync mode with a filter: the demand is met, so nothing more is dispatched."""
    waiting = book.waiting()
    return rules.drains and bool(waiting) and book.ready_count() >= waiting[0].size


def forfeits(book: Book, rules: Rules) -> tuple[int, str] | None:
    """Credit that can't be spent any more, and why."""
    if not book.credits:
        return None
    if draining(book, rules):
        return len(book.credits), "batch full"
    if book.source_exhausted:
        return len(book.credits), "source exhausted"
    rule = rules.admission_rule
    if isinstance(rule, Capacity):
        free = _capacity(book, rules, rule) - book.ready_count() - book.in_flight_count()
        beyond = len(book.credits) - max(0, free)
        if beyond > 0:
            return beyond, "admission"
    return None


def refills_now(book: Book, rules: Rules) -> int:
    """How many refills to submit now; what is owed beyond that waits for a place."""
    if rules.mode == "sync" and rules.drains and (not book.waiting() or draining(book, rules)):
        return 0
    return max(0, min(len(book.credits), refill_room(book, rules)))


def refill_room(book: Book, rules: Rules) -> int:
    """Places for refills: what the rules bound in flight by, less what is there."""
    in_flight, ready, owed = book.in_flight_count(), book.ready_count(), len(book.credits)
    rule = rules.admission_rule
    room = owed
    if rules.drains:
        assert rules.batch_size is not None
        room = min(room, rules.in_flight_batches_max * rules.batch_size - in_flight)
    if isinstance(rule, Slots):
        # What waiting samplers need has a place beside what is ready, or they would wait for ever.
        wanted = sum(request.size for request in book.waiting())
        room = min(room, rule.n - in_flight, max(rule.n + rule.ready_max, wanted) - ready - in_flight)
    elif isinstance(rule, Capacity):
        room = min(room, _capacity(book, rules, rule) - ready - in_flight)
    return max(0, room)


def _capacity(book: Book, rules: Rules, rule: Capacity) -> int:
    """Groups that may be sampleable or in flight at the current version."""
    assert rules.batch_size is not None
    consumed = book.count(Phase.SAMPLED, partition=TRAIN) + book.totals["committed/train"]
    return (rule.lag_max + book.weight_version + 1) * rules.batch_size - consumed


def shortage(book: Book, rules: Rules) -> int:
    """Groups to draw because waiting samplers need them beyond what is sampleable, in flight or owed.

    It goes past what admission would let start, or they would wait for ever, but never past free slots."""
    wanted = sum(request.size for request in book.waiting())
    short = wanted - book.ready_count() - book.in_flight_count() - len(book.credits)
    rule = rules.admission_rule
    if isinstance(rule, Slots):
        short = min(short, rule.n - book.in_flight_count())
    return max(0, short)


def admissible(book: Book, rules: Rules) -> int:
    """How many new prompts the rollout may start now."""
    if draining(book, rules) or held_by_stale(book, rules):
        return 0
    rule = rules.admission_rule
    under_way = book.in_flight_count() + len(book.credits) + unjudged_count(book)
    ready = book.ready_count()
    if isinstance(rule, PerBatch):
        wanted = sum(request.size for request in book.waiting())
        ahead = rule.warmup * (rules.batch_size or max([request.size for request in book.waiting()], default=1))
        return max(0, wanted + ahead - ready - under_way)
    if isinstance(rule, Capacity):
        return max(0, _capacity(book, rules, rule) - ready - under_way)
    return max(0, min(rule.n - under_way, rule.n + rule.ready_max - ready - under_way))


def unjudged_count(book: Book) -> int:
    """Terminal training groups without a trajectory. In sync mode they wait for a `sample()` to be evicted, and
    take up their places until then, or a source of failing prompts would be drawn without end."""
    terminal = book.count(*TERMINAL, partition=TRAIN)
    return terminal - book.ready_count()


# Selection -------------------------------------------------------------------------------------------


def held_by_stale(book: Book, rules: Rules) -> bool:
    """`wait`: a training group in flight has reached the bound, so a waiting sampler is held."""
    oldest = book.oldest_in_flight()
    if not rules.waits_for_stale or oldest is None or not book.waiting():
        return False
    assert rules.lag_max is not None
    return book.lag(oldest) >= rules.lag_max


def why_not(book: Book, rules: Rules, request: OpenRequest) -> str | None:
    """What keeps the oldest waiting `sample()` of a partition from being served; None if nothing does."""
    ready = book.ready_count(request.partition)
    if ready < request.size:
        return f"{ready} of {request.size} groups are sampleable"
    if request.partition != TRAIN:
        return None
    if held_by_stale(book, rules):
        oldest = book.oldest_in_flight()
        assert oldest is not None
        return f"group {oldest.group_id!r} in flight has lag {book.lag(oldest)}, the bound is {rules.lag_max}"
    if rules.drains and book.in_flight_count():
        return f"{book.in_flight_count()} groups in flight are being drained"
    return None


def selected(
    book: Book,
    request: OpenRequest,
    *,
    wanted: frozenset[str] | None = None,
    reserved: frozenset[str] = frozenset(),
) -> list[Group]:
    """The oldest groups by (version, submission order); fewer than the request's size if there are no more.

    Args:
        wanted: the very groups to take; None for any that are not `reserved` for somebody else.
    """
    ready = book.ready(request.partition)
    if wanted is not None:
        ready = (group for group in ready if group.group_id in wanted)
    elif reserved:
        ready = (group for group in ready if group.group_id not in reserved)
    return list(itertools.islice(ready, request.size))


def surplus(book: Book, rules: Rules, request: OpenRequest, chosen: Iterable[Group]) -> list[Evict]:
    """Sync mode with a filter: what is sampleable beyond a full batch is discarded."""
    if not rules.drains or request.partition != TRAIN or book.source_exhausted:
        return []
    if rules.batch_size is None or request.size < rules.batch_size:
        return []
    taken = {group.group_id for group in chosen}
    return [Evict(g.group_id, ("surplus",), book.lag(g), 0) for g in book.ready() if g.group_id not in taken]


def unservable(book: Book, *, no_more: bool = False) -> OpenRequest | None:
    """With no more prompts to come: the first waiting training sampler that what is left can't serve.

    Args:
        no_more: the source gives nothing any more, exhausted or not.
    """
    if not (book.source_exhausted or no_more) or book.credits:
        return None
    left = book.ready_count() + book.in_flight_count()
    for request in book.waiting():
        if request.size > left:
            return request
        left -= request.size
    return None
