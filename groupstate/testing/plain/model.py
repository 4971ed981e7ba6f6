"""The rules as a reader of docs/rules.md would carry them out by hand: slow, and on all groups at every decision.

Rule 1: no code of groupstate decides anything here; of `Rules` only the settings are read.
Rule 2: the model is told only what comes from outside, and says what must be written into the log for it. What a
selection of the user's own answers comes from outside too.
"""

import statistics
from collections import deque
from collections.abc import Sequence

import attrs

from groupstate.core.rules import Capacity, PerBatch, Slots
from groupstate.testing.plain.run import ENDED, IN_FLIGHT, Group, Owed, Prompts, Request, Run, Use


@attrs.frozen
class Said:
    """What a selection of the user's own answered, when it was asked."""

    request: int
    selected: Sequence[str] = ()
    """Group ids."""
    dropped: Sequence[tuple[str, str]] = ()
    """Group ids, and the reason of each."""


class Model(Run):
    answers: deque[Said] | None = None
    """Of the user's own selection, in the order in which it was asked; None where the rules select."""

    # What follows ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Each time, these follow one another until nothing more happens."""
        again = True
        while again:
            before = len(self.out), self.broken
            self.end_early()
            self.evict()
            self.forfeit()
            self.refill()
            self.serve()
            self.draw_new()
            self.refuse()
            self.starve()
            again = (len(self.out), self.broken) != before

    def end_early(self) -> None:
        for g in self.in_flight("train"):
            if g.filled:
                self.end(g, "spare", cancels=False)
        if self.rules.cancel_doomed:
            doomed = [g for g in self.in_flight() if self._is_doomed(g)]
            for g in sorted(doomed, key=lambda g: (g.counts_from, g.number)):
                self.end(g, "cancelled", cancels=True)

    def _is_doomed(self, g: Group) -> bool:
        """Whatever it yet yields, it will be evicted. By its lag only if that won't be counted from its tokens."""
        if self.rules.basis in ("dispatch", "target_version") and self.is_stale(g):
            return True
        evicted_if_failed = self.rules.mode == "async" or self.rules.failure == "refill"
        least = self.rules.survivors_min
        if (not evicted_if_failed and least is None) or g.requeues_by_rule < self.rules.requeues_max:
            return False
        can_finish = len(g.sessions) - g.count("failed")
        return can_finish < (g.needed if least is None else min(least, g.needed))

    # Eviction

    def evict(self) -> None:
        if self.rules.mode == "sync" and self.demand is None:
            return
        ended = self.of("train", *ENDED)
        new = sorted((g for g in ended if not g.looked_at), key=lambda g: g.came)
        old = self.by_age([g for g in ended if g.looked_at])
        leaving: list[tuple[Group, list[str]]] = []
        again = []
        for g in [*new, *old]:
            if self._starts_over(g):
                again.append(g)
            elif reasons := self.reasons(g):
                leaving.append((g, reasons))
            elif self._lacks_metric(g):
                self.missing.add(g.name)
            elif not g.looked_at and self.answers is None:
                self.streak = 0  # It has become sampleable.
            g.looked_at = True
        gone = {g.name for g, _ in leaving} | {g.name for g in again}
        staying = sum(g.name not in gone for g in self.ready())
        unmet = self.demand is not None and staying < self.demand
        for g, reasons in leaving:
            self._evict(g, reasons, self._credit(reasons, unmet=unmet))
            self.streak += "damaged" not in reasons
        for g in again:
            self.start_over(g, by_rule=True)

    def _evict(self, g: Group, reasons: list[str], credit: int, *, by_rules: bool = True) -> None:
        lag = self.lag(g)
        shared = self._shared_value(g) if by_rules and "zero_variance" in reasons else None
        self.come(g, "evicted")
        self.uses[g.dataset].evicted += 1
        self.missing.discard(g.name)
        self.owed.extend([Owed(g.needed, g.target)] * credit)
        self.say("GroupEvicted", g.name, tuple(sorted(reasons)), lag, credit, shared)

    def _starts_over(self, g: Group) -> bool:
        if g.phase != "failure" or g.cancelled or g.damaged or self.is_stale(g):
            return False
        return g.requeues_by_rule < self.rules.requeues_max

    def reasons(self, g: Group) -> list[str]:
        found = [reason for reason in [self._end_reason(g)] if reason]
        if self.is_stale(g):
            found.append("stale")
        if self._is_flat(g):
            found.append("zero_variance")
        return found

    def _end_reason(self, g: Group) -> str:
        rules = self.rules
        failed = g.phase == "failure"
        if g.cancelled:
            return "cancelled"
        if g.damaged:
            return "damaged"
        if failed and g.rows and rules.survivors_min is not None and g.count("finished") < rules.survivors_min:
            return "too_few"
        if not g.rows and not self.is_sampleable(g):
            return "empty"
        if failed and (rules.mode == "async" or rules.failure == "refill"):
            return "failed"
        return ""

    def _values(self, g: Group) -> list[float | None]:
        """What the filter looks at; None where the metric is missing, as in a group that is kept without a row."""
        metric = self.rules.filter_metric
        if metric is None or g.phase != "finished" or not self.is_sampleable(g):
            return []
        if not g.rows:
            return [None]
        if self.rules.per == "trajectory":
            return [row.metrics.get(metric) for row in g.rows]
        return [session.rows[-1].metrics.get(metric) for session in g.sessions if session.rows]

    def _lacks_metric(self, g: Group) -> bool:
        return self.rules.on_missing == "error" and None in self._values(g)

    def _tolerance(self, g: Group) -> float:
        own = self.own(g.dataset).tolerance
        return self.rules.tolerance if own is None else own

    def _is_flat(self, g: Group) -> bool:
        given = self._values(g)
        values = [value for value in given if value is not None]
        if len(values) < len(given):
            return self.rules.on_missing == "evict"
        if len(values) < 2:
            return len(values) == 1 and self.rules.on_singleton == "evict"
        spread = statistics.pstdev(values) if self.rules.spread == "std" else max(values) - min(values)
        return spread <= self._tolerance(g)

    def _shared_value(self, g: Group) -> float | None:
        """The one value that all have; one that lacks the metric shares none."""
        values = [value for value in self._values(g) if value is not None]
        if len(values) < len(self._values(g)) or max(values) - min(values) > self._tolerance(g):
            return None
        return min(values)

    def _credit(self, reasons: list[str], *, unmet: bool) -> int:
        """The matrix."""
        if "surplus" in reasons:
            return 0
        if self.rules.mode == "async":
            return 1
        if not unmet:
            return 0
        if "zero_variance" in reasons:
            return 2
        return 0 if reasons == ["empty"] and self.rules.empty == "drop" else 1

    # Refills

    @property
    def can_draw(self) -> bool:
        return self.prompts is not None and not self.exhausted and not self.broken

    def forfeit(self) -> None:
        if not self.owed:
            return
        rule = self.rules.admission
        if self.draining:
            self._forfeit(len(self.owed), "batch full")
        elif self.exhausted:
            self._forfeit(len(self.owed), "source exhausted")
        elif isinstance(rule, Capacity) and len(self.owed) > self._free_capacity(rule):
            self._forfeit(len(self.owed) - self._free_capacity(rule), "admission")
        elif not self.can_draw:
            self._forfeit(len(self.owed), "no source" if self.prompts is None else "source failed")

    def _forfeit(self, count: int, reason: str) -> None:
        for _ in range(count):
            self.owed.pop()  # The oldest are spent first, so the newest go.
        self.say("RefillForfeited", count, reason)

    def _free_capacity(self, rule: Capacity) -> int:
        """max(0, (lag_max + version + 1) * batch_size - (sampled + committed + sampleable + in flight))"""
        taken = len(self.of("train", "sampled", "committed", *IN_FLIGHT)) + len(self.ready())
        return max(0, (rule.lag_max + self.version + 1) * (self.rules.batch_size or 0) - taken)

    def _streak_bound(self, demand: int) -> int:
        return self.rules.eviction_streak_max or 8 * (self.rules.batch_size or demand)

    def may_draw(self) -> bool:
        return self.can_draw and self.streak < self._streak_bound(self.demand or 1)

    def refills_now(self) -> int:
        if self.filters_in_sync and (self.demand is None or self.draining):
            return 0
        in_flight, ready, rule = len(self.in_flight()), len(self.ready()), self.rules.admission
        room = len(self.owed)
        if self.filters_in_sync:
            room = min(room, self.rules.in_flight_batches_max * (self.rules.batch_size or 0) - in_flight)
        if isinstance(rule, Slots):
            room = min(room, rule.n - in_flight, max(rule.n + rule.ready_max, self.wanted) - ready - in_flight)
        if isinstance(rule, Capacity):
            room = min(room, self._free_capacity(rule))
            if rule.in_flight_max is not None:
                room = min(room, rule.in_flight_max - in_flight)
        return self._whole(max(0, min(room, self._may_generate())))

    def _may_generate(self) -> int:
        """Groups that may yet be submitted for this batch."""
        limit = self.rules.generated_groups_max
        return 1_000_000 if limit is None else limit - self.submitted_since["train"]

    def _whole(self, count: int) -> int:
        return count // self.rules.refill_multiple * self.rules.refill_multiple

    def refill(self) -> None:
        if not self.may_draw():
            return
        for _ in range(self.refills_now()):
            credit = self.owed[0]
            target = self._refill_target(credit) if self.rules.selection == "exact_version" else None
            if not self.draw("refill", credit.size, target):
                return

    # The source

    def draw(self, cause: str, n: int | None = None, target: int | None = None) -> bool:
        prompts = self.prompts
        assert prompts is not None
        name: str | None = ""
        if prompts.mixed:
            while (name := self._whose_turn(prompts)) is not None and self._is_dry(prompts, name):
                prompts.dry.add(name)
        elif prompts.breaks_at == prompts.next[""]:
            self.broken = True
            return False
        elif self._is_dry(prompts, ""):
            name = None
        if name is None:
            self.exhausted = True
            self.say("SourceExhausted")
            return False
        position = prompts.next[name]
        prompts.next[name] += 1
        if cause == "refill":
            self.owed.popleft()
        self.new_group(
            cause,
            n or prompts.lists[name][position],
            dataset=name,
            target=target,
            position=position,
            name=prompts.names[position] if prompts.names is not None else None,
        )
        return True

    @staticmethod
    def _is_dry(prompts: Prompts, name: str) -> bool:
        return prompts.next[name] >= len(prompts.lists[name])

    def _whose_turn(self, prompts: Prompts) -> str | None:
        names = [name for name in prompts.lists if name not in prompts.dry]
        given = {name: own.share for name, own in self.rules.datasets.items() if own.share is not None}
        rest = max(0.0, 1.0 - sum(given.values()))
        others = sum(name not in given for name in names)
        shares = {name: given[name] if name in given else rest / others for name in names}
        total = sum(shares.values())
        shares = {name: share / total for name, share in shares.items() if share > 0}
        uses = {name: self.uses.get(name, Use()) for name in shares}
        submitted = sum(use.submitted for use in uses.values())
        kept = sum(use.submitted - use.evicted for use in uses.values())
        below = [n for n in shares if uses[n].submitted < (shares[n] + self.rules.share_tolerance) * (submitted + 1)]
        best: str | None = None
        most = 0.0
        for name in below or list(shares):
            behind = shares[name] * (kept + 1) - (uses[name].submitted - uses[name].evicted)
            if best is None or behind > most:
                best, most = name, behind
        return best

    # Weight versions to come

    def _made(self, version: int, *, owed: bool = True) -> int:
        """Groups made for a version that weren't evicted, and those owed for it: a version that is over gives
        its refills to the current one."""
        live = sum(g.target == version and g.phase != "evicted" for g in self.groups.values())
        return live + (sum(max(self.version, credit.target or 0) == version for credit in self.owed) if owed else 0)

    def next_target(self) -> int:
        version = self.version
        while self._made(version) >= (self.rules.batch_size or 0):
            version += 1
        return version

    def _refill_target(self, credit: Owed) -> int:
        if credit.target is not None and credit.target >= self.version:
            return credit.target
        version = self.version
        while self._made(version, owed=False) >= (self.rules.batch_size or 0):
            version += 1
        return version

    # Samplers

    def serve(self) -> None:
        for partition in sorted(self.partitions):
            for request in self.waiting(partition):
                if self.answers is not None and partition == "train":
                    served = self._serve_as_answered(request, self.answers)
                elif served := self._may_serve(request):
                    self._serve(request)
                if not served:
                    break  # A later one doesn't overtake.

    def _serve_as_answered(self, request: Request, answers: deque[Said]) -> bool:
        if self.missing or self.is_held() or (self.filters_in_sync and self.in_flight()):
            return False
        assert answers, f"the rule must be asked for request {request.number} here, and wasn't"
        said = answers.popleft()
        assert said.request == request.number, f"the rule was asked for request {said.request}, not {request.number}"
        dropped = [(self.groups[name], reason) for name, reason in said.dropped]
        staying = len(self.ready()) - sum(self.is_sampleable(g) for g, _ in dropped)
        for g, reason in dropped:
            self._evict(g, [reason], self._credit([reason], unmet=staying < request.size), by_rules=False)
            self.streak += 1
        if said.selected:
            self.streak = 0
            self._claim(request, [self.groups[name] for name in said.selected])
        return bool(said.selected)

    def _may_serve(self, request: Request) -> bool:
        if len(self.ready(request.partition, servable=True)) < request.size:
            return False
        if request.partition != "train":
            return not (self.rules.on_stale == "wait" and self.rules.wait_gates == "each" and self.any_at_bound("val"))
        return not (self.missing or self.is_held() or (self.filters_in_sync and self.in_flight()))

    def _serve(self, request: Request) -> None:
        trains = request.partition == "train"
        groups = self.ready(request.partition, servable=True)
        if trains and self.rules.selection == "freshest_first":
            groups.sort(key=lambda g: (-g.counts_from, g.number))
        chosen, rest = groups[: request.size], groups[request.size :]
        if trains and self.filters_in_sync and not self.exhausted and request.size >= (self.rules.batch_size or 0):
            for g in sorted(rest, key=lambda g: (g.counts_from, g.number)):
                self._evict(g, ["surplus"], 0)
        self._claim(request, chosen)

    def _claim(self, request: Request, chosen: list[Group]) -> None:
        trains = request.partition == "train"
        self.batch_count += 1
        lags = tuple(self.lag(g) for g in chosen)
        names = [g.name for g in chosen]
        for g, lag in zip(chosen, lags, strict=True):
            g.sampled_lag = lag
            self.come(g, "sampled")
            if trains:
                use = self.uses[g.dataset]
                use.new, use.since, use.told = 0, self.version, self.version
        self.batches[self.batch_count] = (request.partition, names, self.submitted_since.pop(request.partition, 0))
        self.requests.remove(request)
        self.say("BatchSampled", self.batch_count, request.number, request.partition, tuple(names), lags)

    def refuse(self) -> None:
        for request in list(self.requests):
            error = self._refusal(request) if request.partition == "train" else None
            if error is not None:
                self.requests.remove(request)
                self.say("BatchRequestCancelled", request.number, error)
                if error == "EvictionStreak":
                    self.streak = 0  # It was told: whoever samples again means to go on.

    def _refusal(self, request: Request) -> str | None:
        if self.missing:
            return "MissingMetric"
        if self.streak >= self._streak_bound(request.size):
            return "EvictionStreak"
        left = len(self.ready(servable=True)) + len(self.in_flight(servable=True))
        limit, took = self.rules.generated_groups_max, self.submitted_since["train"]
        if limit is not None:
            oldest = self.waiting()[0] is request
            if took > limit or (oldest and left + limit - took < request.size):
                return "RefillLimitExceeded"
        if self.prompts is None or self.owed or not (self.exhausted or self.broken):
            return None
        older = sum(other.size for other in self.waiting() if other.number < request.number)
        if request.size <= left - older:
            return None
        return "SourceFailed" if self.broken else "NotEnoughGroups"

    # Admission

    def draw_new(self) -> None:
        held = self.is_held() and self.admits and self.can_draw
        if held != self.held:
            self.held = held
            self.say("AdmissionHeld", held)
        if not self.may_draw() or self.is_held():
            return
        short = self._shortage()
        for number in range(max(short, self._admissible() if self.admits else 0)):
            exact = self.rules.selection == "exact_version"
            if not self.draw("admission", target=self.version if exact and number < short else None):
                return

    def _shortage(self) -> int:
        """max(0, wanted - sampleable - in flight - owed), past the rule of admission but never past free slots."""
        owed = [credit for credit in self.owed if max(self.version, credit.target or 0) == self.version]
        coming = len(owed if self.rules.selection == "exact_version" else self.owed)
        have = len(self.ready(servable=True)) + len(self.in_flight(servable=True))
        if not self.in_flight():
            coming = min(coming, self.refills_now())  # Nothing is under way that could make a place for more.
        short, rule = self.wanted - have - coming, self.rules.admission
        if isinstance(rule, Slots):
            short = min(short, rule.n - len(self.in_flight()))
        if isinstance(rule, Capacity) and rule.in_flight_max is not None:
            short = min(short, rule.in_flight_max - len(self.in_flight()))
        return max(0, min(short, self._may_generate()))

    def _admissible(self) -> int:
        return max(0, min(self._admitted(), self._may_generate()))

    def _admitted(self) -> int:
        if self.draining:
            return 0
        size, rule = self.rules.batch_size, self.rules.admission
        ready = len(self.ready())
        empty = len(self.of("train", *ENDED)) - ready  # Sync mode: they wait for a `sample()` to be evicted.
        owed = len(self.owed) + empty
        under_way = len(self.in_flight()) + owed
        if isinstance(rule, Slots):
            return max(0, min(rule.n - under_way, rule.n + rule.ready_max - ready - under_way))
        if isinstance(rule, Capacity):
            free = self._free_capacity(rule)
            if rule.in_flight_max is not None:
                free = min(free, rule.in_flight_max - len(self.in_flight()))
            return max(0, free - owed)
        if rule is None:
            rule = PerBatch(warmup=1 if self.rules.mode == "async" else 0)
        if self.rules.selection == "exact_version":
            versions = range(self.version, self.version + rule.warmup + 1)
            return sum(max(0, (size or 0) - self._made(version)) for version in versions)
        ahead = rule.warmup * (size or max((request.size for request in self.waiting()), default=1))
        return max(0, self.wanted + ahead - ready - under_way)

    # Datasets

    def starve(self) -> None:
        bound, due, self.starvation_due = self.rules.starvation_versions, self.starvation_due, False
        if bound is None or not due:
            return
        for name, use in sorted(self.uses.items()):
            opened = self.open_of(name)
            if (opened or use.new) and self.version - use.told >= bound:
                use.told, use.new = self.version, 0
                self.say("DatasetStarved", name, self.version - use.since, opened, use.evicted)
