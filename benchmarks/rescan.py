"""The obvious way to decide, as a reference: at each decision look at every group anew.

It reads the same book as the rules, but nothing that the book keeps in order (no index, no count), only the groups
themselves. A group's own counts and ranges are taken as they are, so what it costs is the looking alone. It must come
to the decisions of `groupstate.core`'s `evict`, `supply` and `select`.
"""

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

from groupstate.core.book import Book
from groupstate.core.events import TRAIN, EvictReason
from groupstate.core.evict import Evict, Missing
from groupstate.core.group import Group, Range
from groupstate.core.held import OpenRequest
from groupstate.core.phases import Phase
from groupstate.core.rules import Capacity, PerBatch, Rules, Slots

NO_DAMAGE: Final[Mapping[str, str]] = MappingProxyType({})


@attrs.frozen
class Decision:
    """What follows from one state of a book."""

    evictions: frozenset[Evict]
    missing: frozenset[Missing]
    kept: frozenset[str]
    """Terminal training groups that stay."""
    stale: tuple[str, ...]
    """Sampleable training groups above the lag bound whose lag grows, oldest first."""
    forfeits: tuple[int, str] | None
    """Refills that can't be spent any more, and why."""
    refills: int
    """Refills to submit now."""
    drawn: int
    """New prompts that may be started beside the refills."""
    picks: tuple[tuple[int, tuple[str, ...], frozenset[str]], ...]
    """For the oldest `sample()` of each partition that can be served: its number, the groups it gets, and those
    that are discarded because of it."""


def rescan(book: Book, rules: Rules, *, damaged: Mapping[str, str] = NO_DAMAGE) -> Decision:
    """What follows from the book.

    Args:
        damaged: groups of which a payload can't be read, with what is wrong.
    """
    return _Scan(book, rules, damaged).decision()


class _Scan:
    def __init__(self, book: Book, rules: Rules, damaged: Mapping[str, str]) -> None:
        self.book = book
        self.rules = rules
        self.damaged = damaged
        self.by_phase: dict[tuple[str, Phase], list[Group]] = defaultdict(list)
        for group in book.groups.values():
            self.by_phase[group.partition, group.phase].append(group)
        self.terminal = [*self.by_phase[TRAIN, Phase.FINISHED], *self.by_phase[TRAIN, Phase.FAILURE]]
        self.ready = [group for group in self.terminal if group.trajectory_count]
        self.in_flight = [*self.by_phase[TRAIN, Phase.PENDING], *self.by_phase[TRAIN, Phase.RUNNING]]
        self.waiting = [request for request in book.requests.values() if request.partition == TRAIN]
        self.wanted = sum(request.size for request in self.waiting)
        self.owed = len(book.credits)

    def decision(self) -> Decision:
        evictions, missing, kept = self.judged()
        return Decision(
            evictions, missing, kept, self.stale(), self.forfeits(), self.refills(), self.drawn(), self.picks()
        )

    # Eviction

    def lag(self, group: Group) -> int:
        if group.kept_lag is not None:
            return group.kept_lag
        return max(0, self.book.weight_version - group.aged_from)

    def judged(self) -> tuple[frozenset[Evict], frozenset[Missing], frozenset[str]]:
        found, missing, kept = [], [], []
        for group in self.terminal:
            verdict = self.verdict(group)
            if isinstance(verdict, Missing):
                missing.append(verdict)
            elif verdict:
                found.append((group, verdict))
            else:
                kept.append(group.group_id)
        stay = len(self.ready) - sum(group.trajectory_count > 0 for group, _ in found)
        unmet = bool(self.waiting) and stay < self.waiting[0].size
        evictions = frozenset(self.evicted(group, reasons, unmet) for group, reasons in found)
        return evictions, frozenset(missing), frozenset(kept)

    def verdict(self, group: Group) -> tuple[EvictReason, ...] | Missing:
        """Why a group goes, alphabetically; empty if it stays."""
        rules = self.rules
        reasons: set[EvictReason] = set()
        few = group.finished_count < (rules.survivors_min or 0)
        if group.cancelled:
            reasons.add("cancelled")
        elif group.group_id in self.damaged:
            reasons.add("damaged")
        elif not group.trajectory_count:
            reasons.add("empty")
        elif group.phase is Phase.FAILURE and few:
            reasons.add("too_few")
        elif group.phase is Phase.FAILURE and (rules.mode == "async" or rules.failure == "refill"):
            reasons.add("failed")
        drops = rules.mode == "async" and rules.on_stale == "drop"
        if drops and rules.lag_max is not None and self.lag(group) > rules.lag_max:
            reasons.add("stale")
        if rules.filter_metric is not None and group.phase is Phase.FINISHED and group.trajectory_count:
            lacking = self.lacking(group, rules.filter_metric)
            if lacking is not None and rules.on_missing == "error":
                return tuple(sorted(reasons)) or lacking
            if rules.on_missing == "evict" if lacking is not None else self.shared(group)[0]:
                reasons.add("zero_variance")
        return tuple(sorted(reasons))

    def lacking(self, group: Group, metric: str) -> Missing | None:
        """The first session without the filter's metric."""
        whole = group.trajectory_count if self.rules.per == "trajectory" else group.finished_count
        if metric in (ranges := self.ranges(group)) and ranges[metric][2] == whole:
            return None
        for number, session in enumerate(group.sessions):
            for row in session.trajectories if self.rules.per == "trajectory" else session.trajectories[-1:]:
                if metric not in row.metrics:
                    return Missing(group.group_id, number, metric, tuple(sorted(row.metrics)))
        return None

    def ranges(self, group: Group) -> Mapping[str, Range]:
        return group.trajectory_ranges if self.rules.per == "trajectory" else group.session_ranges

    def shared(self, group: Group) -> tuple[bool, float | None]:
        """Whether the values of the filter's metric carry no signal, and the one that all have, if they do."""
        ranges, metric = self.ranges(group), self.rules.filter_metric
        if metric is None or metric not in ranges:
            return False, None
        low, high, count = ranges[metric]
        equal = high - low <= self.rules.tolerance
        return (equal if count > 1 else self.rules.on_singleton == "evict"), (low if equal else None)

    def evicted(self, group: Group, reasons: tuple[EvictReason, ...], unmet: bool) -> Evict:
        metric = self.rules.filter_metric
        flat = "zero_variance" in reasons and metric is not None and self.lacking(group, metric) is None
        value = self.shared(group)[1] if flat else None
        text = self.damaged.get(group.group_id, "")
        return Evict(group.group_id, reasons, self.lag(group), self.credit(reasons, unmet), value, text)

    def credit(self, reasons: tuple[EvictReason, ...], unmet: bool) -> int:
        if self.rules.mode == "async":
            return 1
        if not unmet or (reasons == ("empty",) and self.rules.empty == "drop"):
            return 0
        return 2 if "zero_variance" in reasons else 1

    def stale(self) -> tuple[str, ...]:
        rules = self.rules
        if rules.lag_max is None or rules.mode == "sync" or rules.on_stale == "wait":
            return ()
        found = [group for group in self.ready if group.kept_lag is None and self.lag(group) > rules.lag_max]
        return tuple(group.group_id for group in sorted(found, key=_age))

    # Refill and admission

    def full(self) -> bool:
        """Sync mode with a filter: the oldest `sample()` has enough, and what is in flight is awaited."""
        return self.drains() and bool(self.waiting) and len(self.ready) >= self.waiting[0].size

    def drains(self) -> bool:
        return self.rules.mode == "sync" and self.rules.filter_metric is not None

    def places(self) -> int | None:
        """`capacity`: groups that may be sampleable or in flight; None under another admission."""
        rule, book = self.rules.admission_rule, self.book
        if not isinstance(rule, Capacity) or self.rules.batch_size is None:
            return None
        consumed = len(self.by_phase[TRAIN, Phase.SAMPLED]) + book.totals["committed/train"]
        return (rule.lag_max + book.weight_version + 1) * self.rules.batch_size - consumed

    def forfeits(self) -> tuple[int, str] | None:
        if not self.owed:
            return None
        if self.full():
            return self.owed, "batch full"
        if self.book.source_exhausted:
            return self.owed, "source exhausted"
        places = self.places()
        if places is not None:
            beyond = self.owed - max(0, places - len(self.ready) - len(self.in_flight))
            return (beyond, "admission") if beyond > 0 else None
        return None

    def refills(self) -> int:
        if self.drains() and (not self.waiting or self.full()):
            return 0
        rule, flying, ready = self.rules.admission_rule, len(self.in_flight), len(self.ready)
        bounds = [self.owed]
        if self.drains():
            bounds.append(self.rules.in_flight_batches_max * (self.rules.batch_size or 0) - flying)
        if isinstance(rule, Slots):
            bounds += [rule.n - flying, max(rule.n + rule.ready_max, self.wanted) - ready - flying]
        places = self.places()
        if places is not None:
            bounds.append(places - ready - flying)
        return max(0, min(bounds))

    def drawn(self) -> int:
        """New prompts: what admission lets start, and what waits beyond it; none while a group holds them."""
        if self.held():
            return 0
        rule, flying, ready = self.rules.admission_rule, len(self.in_flight), len(self.ready)
        short = self.wanted - ready - flying - self.owed
        if isinstance(rule, Slots):
            short = min(short, rule.n - flying)
        if self.full():
            return max(0, short)
        under_way = flying + self.owed + len(self.terminal) - ready
        places = self.places()
        if isinstance(rule, PerBatch):
            size = self.rules.batch_size or max([request.size for request in self.waiting], default=1)
            admitted = self.wanted + rule.warmup * size - ready - under_way
        elif isinstance(rule, Slots):
            admitted = min(rule.n - under_way, rule.n + rule.ready_max - ready - under_way)
        else:
            assert places is not None
            admitted = places - ready - under_way
        return max(0, short, admitted)

    def held(self) -> bool:
        """`wait`: something waits, and a group in flight has come to the lag bound."""
        rules = self.rules
        if rules.mode == "sync" or rules.on_stale == "drop" or rules.lag_max is None or not self.waiting:
            return False
        return any(self.lag(group) >= rules.lag_max for group in self.in_flight)

    # Selection

    def picks(self) -> tuple[tuple[int, tuple[str, ...], frozenset[str]], ...]:
        oldest: dict[str, OpenRequest] = {}
        for request in self.book.requests.values():
            oldest.setdefault(request.partition, request)
        found = (self.pick(request) for _, request in sorted(oldest.items()))
        return tuple(pick for pick in found if pick is not None)

    def pick(self, request: OpenRequest) -> tuple[int, tuple[str, ...], frozenset[str]] | None:
        partition, rules = request.partition, self.rules
        ready = self.ready
        if partition != TRAIN:
            ready = [*self.by_phase[partition, Phase.FINISHED], *self.by_phase[partition, Phase.FAILURE]]
        if len(ready) < request.size:
            return None
        if partition == TRAIN and (self.held() or (self.drains() and self.in_flight)):
            return None
        names = [group.group_id for group in sorted(ready, key=_order)]
        whole = rules.batch_size is not None and request.size >= rules.batch_size
        discards = partition == TRAIN and self.drains() and whole and not self.book.source_exhausted
        rest = frozenset(names[request.size :]) if discards else frozenset()
        return request.request, tuple(names[: request.size]), rest


def _order(group: Group) -> tuple[int, int]:
    return group.version, group.submitted_seq


def _age(group: Group) -> tuple[int, int]:
    return group.aged_from, group.submitted_seq
