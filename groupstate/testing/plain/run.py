"""A run as somebody keeps it who writes everything down and looks nothing up: for the plain model of the rules.

Rule 1: no code of groupstate decides anything here; of `Rules` only the settings are read.
Rule 2: what is remembered is what happened, never what follows from it; every question looks at all groups anew.
Rule 3: what an event does is done before it is written, so that a run that dies right after a write is one that can be
recovered.
"""

from collections import Counter, deque
from typing import Any

import attrs

from groupstate.core.rules import PerDataset, Rules

Told = tuple[Any, ...]
"""An event as the model tells it: its kind and what matters of its fields."""

IN_FLIGHT = ("pending", "running")
ENDED = ("finished", "failure")

NOTHING_OF_ITS_OWN = PerDataset()


class Died(Exception):
    """The process was to die after so many writes, and that was the last of them."""


@attrs.define
class Row:
    """A trajectory: its metrics, and the weight version of each token."""

    metrics: dict[str, float]
    versions: list[int] = attrs.field(factory=list)
    tokens: int | None = None
    """Of the answer, the last version being that of the rest; None for as many as there are versions."""


@attrs.define
class Session:
    state: str = "waiting"
    attempt: int = 1
    tries: int = 1
    """Attempts since the group was submitted or requeued, the one that is due included."""
    rows: list[Row] = attrs.field(factory=list)
    version: int | None = None
    """That of its first token, where it was known at the start."""


@attrs.define(eq=False)
class Group:
    name: str
    partition: str
    dataset: str
    needed: int
    stamp: int
    target: int | None
    number: int
    sessions: list[Session]
    counts_from: int
    """The version that the basis names."""
    phase: str = "pending"
    came: int = 0
    """When it came to its phase; for what is listed in that order."""
    ended_as: str = ""
    cancelled: bool = False
    requeues: int = 0
    requeues_by_rule: int = 0
    sampled_lag: int = 0
    kept_lag: int | None = None
    looked_at: bool = False
    """It was before the rules since it ended."""
    damaged: bool = False

    @property
    def rows(self) -> list[Row]:
        return [row for session in self.sessions for row in session.rows]

    def count(self, state: str) -> int:
        return sum(session.state == state for session in self.sessions)

    @property
    def filled(self) -> bool:
        return self.count("finished") >= self.needed

    @property
    def in_flight(self) -> bool:
        return self.phase in IN_FLIGHT


@attrs.define
class Request:
    number: int
    partition: str
    size: int


@attrs.define
class Owed:
    """One refill that is owed."""

    size: int
    target: int | None


@attrs.define
class Use:
    """What the signal of starvation goes by, of one dataset."""

    since: int = 0
    told: int = 0
    new: int = 0
    submitted: int = 0
    evicted: int = 0


@attrs.define
class Prompts:
    """A source: sizes of its groups by dataset, in one list (of the dataset ""), or in several."""

    lists: dict[str, list[int | None]]
    mixed: bool = False
    breaks_at: int | None = None
    """Index of the prompt at which it raises, for ever."""
    names: list[str] | None = None
    """Ids of the groups of its one list; None for ids that the run makes."""
    next: Counter[str] = attrs.field(factory=Counter)
    dry: set[str] = attrs.field(factory=set)
    """Datasets that gave none when they were asked."""


class Run:
    """Each method for something from outside does it, and has `settle` do what follows."""

    def __init__(self, rules: Rules, prompts: Prompts | None, *, group_size: int) -> None:
        self.rules = rules
        self.prompts = prompts
        self.group_size = group_size
        self.admits = False
        self.version = 0
        self.now = 0.0
        self.groups: dict[str, Group] = {}
        self.requests: list[Request] = []
        self.batches: dict[int, tuple[str, list[str], int]] = {}
        """Partition, groups and what it took to make it, by batch."""
        self.owed: deque[Owed] = deque()
        self.uses: dict[str, Use] = {}
        self.missing: set[str] = set()
        self.streak = 0
        self.submitted_since: Counter[str] = Counter()
        """Groups submitted since the previous batch, by partition."""
        self.exhausted = self.broken = self.held = False
        self.request_count = self.batch_count = self.clock = 0
        self.partitions: list[str] = []
        """In the order in which they were heard of."""
        self.deadlines: list[tuple[float, int, str, int | None, int]] = []
        self.starvation_due = False
        self.writes_left: int | None = None
        """Writes until the process dies; None while it doesn't."""
        self.out: list[Told] = []

    def said(self) -> list[Told]:
        out, self.out = self.out, []
        return out

    def say(self, *told: Any) -> None:
        self.out.append(told)
        self.written()

    def written(self) -> None:
        """All that was told is in the log. Of a session's end and its group's it is both or none."""
        if self.writes_left is not None:
            self.writes_left -= 1
            if not self.writes_left:
                raise Died

    def settle(self) -> None:
        raise NotImplementedError

    def next_target(self) -> int:
        raise NotImplementedError

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    # Looking: always at all groups -------------------------------------------------------------------

    def of(self, partition: str, *phases: str) -> list[Group]:
        return [g for g in self.groups.values() if g.partition == partition and g.phase in phases]

    def in_flight(self, partition: str = "train", *, servable: bool = False) -> list[Group]:
        found = self.of(partition, *IN_FLIGHT)
        return [g for g in found if self._at_this_version(g)] if servable else found

    def ready(self, partition: str = "train", *, servable: bool = False) -> list[Group]:
        """Sampleable groups, oldest first.

        Args:
            servable: only those that a `sample()` could be given at this version.
        """
        found = [g for g in self.of(partition, *ENDED) if self.is_sampleable(g)]
        if servable:
            found = [g for g in found if self._at_this_version(g)]
        return sorted(found, key=lambda g: (g.counts_from, g.number))

    def is_sampleable(self, g: Group) -> bool:
        if g.partition == "val" or g.rows:
            return True
        kept = {"finished": ["keep_finished", "keep_all"], "failure": ["keep", "keep_all"]}[g.phase]
        known = self.rules.mode == "sync" or self.rules.empty == "keep_finished"
        return known and self.rules.empty in kept

    def _at_this_version(self, g: Group) -> bool:
        exact = self.rules.selection == "exact_version" and g.partition == "train"
        return not exact or g.target == self.version

    def lag(self, g: Group) -> int:
        return max(0, self.version - g.counts_from) if g.kept_lag is None else g.kept_lag

    def waiting(self, partition: str = "train") -> list[Request]:
        return [request for request in self.requests if request.partition == partition]

    @property
    def demand(self) -> int | None:
        waiting = self.waiting()
        return waiting[0].size if waiting else None

    @property
    def wanted(self) -> int:
        return sum(request.size for request in self.waiting())

    @property
    def filters_in_sync(self) -> bool:
        return self.rules.mode == "sync" and self.rules.filter_metric is not None

    @property
    def draining(self) -> bool:
        return self.filters_in_sync and self.demand is not None and len(self.ready()) >= self.demand

    def own(self, dataset: str) -> PerDataset:
        return self.rules.datasets.get(dataset, NOTHING_OF_ITS_OWN)

    def lag_bound(self, g: Group) -> int | None:
        if self.rules.mode == "sync":
            return None
        own = self.own(g.dataset).lag_max
        return self.rules.lag_max if own is None else own

    def is_stale(self, g: Group) -> bool:
        bound = self.lag_bound(g)
        return self.rules.on_stale == "drop" and bound is not None and self.lag(g) > bound

    def is_held(self) -> bool:
        """`wait`: a training group in flight is at the bound while a `sample()` waits."""
        if self.rules.on_stale != "wait" or not self.waiting():
            return False
        return self.any_at_bound("train")

    def any_at_bound(self, partition: str) -> bool:
        return any((bound := self.lag_bound(g)) is not None and self.lag(g) >= bound for g in self.in_flight(partition))

    def by_age(self, groups: list[Group]) -> list[Group]:
        """Highest lag first, datasets with a bound of their own apart."""

        def key(g: Group) -> tuple[str, int, int]:
            return (g.dataset if self.own(g.dataset).lag_max is not None else "", g.counts_from, g.number)

        return sorted(groups, key=key)

    # From outside: groups and sessions ---------------------------------------------------------------

    def submit(
        self,
        n: int | None,
        *,
        partition: str = "train",
        dataset: str = "",
        stamp: int | None = None,
        target: int | None = None,
        name: str | None = None,
    ) -> None:
        self.new_group("submit", n, partition=partition, dataset=dataset, stamp=stamp, target=target, name=name)
        self.settle()

    def new_group(
        self,
        cause: str,
        n: int | None,
        *,
        partition: str = "train",
        dataset: str = "",
        stamp: int | None = None,
        target: int | None = None,
        position: int = -1,
        name: str | None = None,
    ) -> None:
        trains = partition == "train"
        if trains and self.rules.selection == "exact_version" and target is None:
            target = self.next_target()
        needed = n or self.group_size
        spare = self.rules.oversample if trains else 0
        stamp = self.version if stamp is None else stamp
        name = f"g{len(self.groups) + 1}" if name is None else name
        self._hear_of(partition)
        if trains:
            self._count_use(dataset)
        self.groups[name] = Group(
            name, partition, dataset, needed, stamp, target, len(self.groups),
            [Session() for _ in range(needed + spare)], stamp if target is None else target, came=self.tick(),
        )  # fmt: skip
        self.submitted_since[partition] += 1
        self._watch_group(self.groups[name])
        self.say("GroupSubmitted", name, needed + spare, partition, stamp, cause, dataset, position, target, spare)

    def _hear_of(self, partition: str) -> None:
        if partition not in self.partitions:
            self.partitions.append(partition)

    def _count_use(self, dataset: str) -> None:
        use = self.uses.setdefault(dataset, Use())
        if not use.new and not self.open_of(dataset):
            use.since = use.told = self.version
        use.new += 1
        use.submitted += 1

    def open_of(self, dataset: str) -> int:
        return sum(g.dataset == dataset for g in self.of("train", *IN_FLIGHT, *ENDED))

    def start(self, name: str, number: int, version: int | None) -> None:
        g = self.groups[name]
        session = g.sessions[number]
        session.state, session.version = "open", version
        self.come(g, "running")
        self.say("SessionStarted", name, number, session.attempt)
        if self.rules.session_deadline_s is not None:
            self._watch(self.rules.session_deadline_s, name, number, session.attempt)
        self.settle()

    def finish(self, name: str, number: int, rows: list[Row]) -> None:
        g = self.groups[name]
        session = g.sessions[number]
        if not rows and self.rules.empty_session == "fail":
            self._fail_session(g, number, "empty")
        else:
            session.state, session.rows = "finished", rows
            self.out.append(("SessionFinished", name, number, session.attempt))
            self._end_if_settled(g)
        self.settle()

    def fail(self, name: str, number: int, kind: str, *, retryable: bool) -> None:
        self._fail_session(self.groups[name], number, kind, retryable=retryable)
        self.settle()

    def _fail_session(
        self, g: Group, number: int, kind: str, *, retryable: bool = False, cancels: bool = False
    ) -> None:
        session = g.sessions[number]
        again = retryable and session.tries < self.rules.attempts_max and not g.filled
        delay = self.rules.retry_delay_s * 2 ** (session.tries - 1) if again else None
        self.out.append(("SessionFailed", g.name, number, session.attempt, kind, delay))
        if again:
            session.state, session.attempt, session.tries = "waiting", session.attempt + 1, session.tries + 1
            self.written()
            return
        session.state = "failed"
        self._end_if_settled(g, cancels=cancels)

    def _end_if_settled(self, g: Group, *, cancels: bool = False) -> None:
        if g.count("finished") + g.count("failed") < len(g.sessions):
            self.written()
            return
        least = self.rules.survivors_min
        cancels = cancels and g.count("finished") < len(g.sessions)
        partial = not g.filled and not cancels and least is not None and g.count("finished") >= least
        g.ended_as = "finished" if (g.filled and not cancels) or partial else "failure"
        g.cancelled = cancels
        g.looked_at = False
        g.counts_from = self._version_by_basis(g)
        self.come(g, g.ended_as)
        if g.ended_as == "finished":
            self.say("GroupFinished", g.name, partial)
        else:
            self.say("GroupFailed", g.name, g.cancelled)

    def come(self, g: Group, phase: str) -> None:
        if g.phase != phase:
            g.phase, g.came = phase, self.tick()

    def late(self, name: str, number: int, attempt: int, result: str) -> None:
        """A result that comes too late, or once more. It changes nothing, so nothing follows."""
        self.say("ResultFenced", name, number, attempt, result, self.why_late(name, number, attempt, result))

    def why_late(self, name: str, number: int, attempt: int, result: str) -> str:
        """Empty for one that is in time."""
        g = self.groups[name]
        session = g.sessions[number]
        if g.phase in ("evicted", "committed"):
            return "gone"
        if attempt != session.attempt:
            return "attempt"
        if session.state in (result, "open" if result == "started" else result):
            return "duplicate"
        if session.state in ("finished", "failed"):
            return "settled" if g.in_flight else "terminal"
        return ""

    def _version_by_basis(self, g: Group) -> int:
        per_session = []
        for session in g.sessions:
            tokens = [version for row in session.rows for version in row.versions]
            if not tokens and session.rows and session.version is not None:
                tokens = [session.version]
            if tokens:
                per_session.append(tokens)
        if self.rules.basis in ("dispatch", "target_version") or not per_session:
            return g.counts_from
        if self.rules.basis == "first_token":
            return min(tokens[0] for tokens in per_session)
        if self.rules.basis == "oldest_token":
            return min(min(tokens) for tokens in per_session)
        return max(max(tokens) for tokens in per_session)

    def cancel(self, name: str) -> None:
        self.end(self.groups[name], "cancelled", cancels=True)
        self.settle()

    def end(self, g: Group, kind: str, *, cancels: bool) -> None:
        """All sessions that haven't settled end."""
        for number, session in enumerate(g.sessions):
            if session.state in ("waiting", "open"):
                self._fail_session(g, number, kind, cancels=cancels)

    def requeue(self, name: str) -> None:
        self.start_over(self.groups[name], by_rule=False)
        self.settle()

    def start_over(self, g: Group, *, by_rule: bool) -> None:
        g.sessions = [Session(attempt=session.attempt + 1) for session in g.sessions]
        g.counts_from = g.stamp if g.target is None else g.target
        g.cancelled, g.damaged, g.kept_lag, g.ended_as = False, False, None, ""
        g.requeues += 1
        g.requeues_by_rule += by_rule
        self.come(g, "pending")
        self._watch_group(g)
        self.say("GroupRequeued", g.name, by_rule)

    # From outside: weights, time, batches ------------------------------------------------------------

    def publish(self, version: int) -> None:
        if version > self.version:
            self.version = version
            self.starvation_due = True
            self.say("WeightsPublished", version)
        self.settle()

    def admit(self, admits: bool) -> None:
        self.admits = admits
        self.settle()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        while due := sorted(deadline for deadline in self.deadlines if deadline[0] <= self.now):
            self.deadlines.remove(due[0])
            _, _, name, number, attempt = due[0]
            g = self.groups[name]
            if not g.in_flight:
                continue
            if number is None:
                if g.requeues != attempt:
                    continue
                self.end(g, "timeout", cancels=False)
            elif (g.sessions[number].state, g.sessions[number].attempt) == ("open", attempt):
                self._fail_session(g, number, "timeout", retryable=True)
            else:
                continue
            self.settle()

    def _watch(self, seconds: float, name: str, number: int | None, attempt: int) -> None:
        self.deadlines.append((self.now + seconds, self.tick(), name, number, attempt))

    def _watch_group(self, g: Group) -> None:
        if self.rules.group_deadline_s is not None:
            self._watch(self.rules.group_deadline_s, g.name, None, g.requeues)

    def sample(self, size: int, partition: str) -> None:
        self.request_count += 1
        self._hear_of(partition)
        self.requests.append(Request(self.request_count, partition, size))
        self.say("BatchRequested", self.request_count, partition, size)
        self.settle()

    def withdraw(self, request: int) -> None:
        """A `sample()` that waits doesn't any more."""
        self.requests = [r for r in self.requests if r.number != request]
        self.say("BatchRequestCancelled", request, "told so")
        self.settle()

    def commit(self, batch: int) -> None:
        for name in self.batches.pop(batch)[1]:
            self.come(self.groups[name], "committed")
        self.say("BatchCommitted", batch)
        self.settle()

    def give_back(self, batch: int, reason: str, damaged: tuple[str, ...] = ()) -> None:
        for name in damaged:
            self.groups[name].damaged = True
            self.groups[name].looked_at = False
        self._give_back(batch, reason)
        self.settle()

    def _give_back(self, batch: int, reason: str) -> None:
        partition, names, took = self.batches.pop(batch)
        if reason in ("cancelled", "damaged"):  # Nobody was given what it reported, so that counts again.
            self.submitted_since[partition] += took
        for name in names:
            g = self.groups[name]
            g.kept_lag = None if self.rules.selection == "exact_version" else g.sampled_lag
            self.come(g, g.ended_as)
        self.say("BatchReturned", batch, reason)

    def recover(self, version: int) -> None:
        """The process dies, and its log is opened again."""
        self.requests.clear()
        self.missing.clear()
        self.deadlines.clear()
        self.streak, self.exhausted, self.broken, self.starvation_due = 0, False, False, False
        for g in self._in_phase("pending"):
            self._watch_group(g)
        self.version = version
        for use in self.uses.values():
            use.since, use.told = min(use.since, version), min(use.told, version)
        self.say("RunRecovered", version)
        for batch in sorted(self.batches):
            self._give_back(batch, "recovery")
        for g in self._in_phase("running"):
            self.start_over(g, by_rule=False)
        for g in [*self._in_phase("failure"), *self._in_phase("finished")]:
            g.looked_at, g.damaged, g.came = False, False, self.tick()
        if self.prompts is not None:
            self.prompts.dry.clear()
        self.settle()

    def _in_phase(self, phase: str) -> list[Group]:
        return [g for p in self.partitions for g in sorted(self.of(p, phase), key=lambda g: g.came)]
