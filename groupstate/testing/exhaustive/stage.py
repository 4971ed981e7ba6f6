"""A run of a world that can be copied, that knows what may happen next, and that is checked at every step.

Rule 1: each thing that may happen is a line of the notation, so that a history of them can be told again anywhere.
Rule 2: the checks look at the log and the book from outside; none of them is what the run itself decides by.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.custom import CustomRule
from groupstate.core.explain import explain
from groupstate.core.folding import replayed
from groupstate.core.group import SETTLED, Group, fence_reason, forget_unpacked
from groupstate.core.held import OpenRequest, Window
from groupstate.core.invariants import Checker, Violation
from groupstate.core.phases import TERMINAL, TRANSITIONS, Phase, Restored
from groupstate.core.rules import Rules
from groupstate.core.snapshot import capture, decoded, encoded, restore
from groupstate.errors import CustomRuleError
from groupstate.runtime.controller import Waiter
from groupstate.testing.exhaustive.forking import forked
from groupstate.testing.exhaustive.world import World
from groupstate.testing.notation import Story
from groupstate.testing.watched import listed

Cell: TypeAlias = tuple[Phase | None, type[ev.Event]]
"""A cell of the table of transitions: the phase before, and the kind of the event."""


@attrs.frozen
class Wrong:
    """One thing that a check found."""

    rule: str
    """Which rule is broken, in a few words that are the same wherever it is."""
    text: str
    """What can't be true, in one sentence."""


class Watching(Checker):
    """Compares its counts with the run's own book, which is one event ahead, instead of driving one beside it."""

    def __init__(self) -> None:
        super().__init__(replays=False)
        self.book: Book | None = None
        """None while the log is ahead of the book."""

    def feed(self, record: ev.Record) -> list[Violation]:
        before = len(self.found)
        super().feed(record)
        if self.book is not None and (problem := self._difference(self.book, self.counts.keys())) is not None:
            self.wrong(*problem)
        return self.found[before:]

    def booked_window(self, partition: ev.Partition) -> Window | None:
        return None if self.book is None else self.book.windows_out[self.book.last_batch]


class Looking:
    """A selection of the user's own, and whether it only looked."""

    def __init__(self, rule: CustomRule) -> None:
        self.rule = rule
        self.changed = False
        """It changed the book, from which nothing can go on."""

    def __call__(self, book: Book, rules: Rules, request: OpenRequest) -> Any:
        before = book.digest()
        try:
            return listed(self.rule(book, rules, request))
        finally:
            if book.digest() != before:
                forget_unpacked()
                self.changed = True


class Stage(Story):
    """A run in memory that goes through a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.checker = Watching()
        self.phases: dict[str, Phase] = {}
        """Phase of every group that was ever submitted."""
        self.spent: Counter[str] = Counter()
        """How often each verb has occurred, of those that are bounded."""
        self.submitted = 0
        """Groups that the user has submitted."""
        self.cells: list[Cell] = []
        """Cells that the last line went through."""
        self.wrong: list[Wrong] = []
        self.key: tuple[Any, ...] = ()
        """What makes this state another than others, once somebody has looked."""
        self.began = 0
        """The last event before the last line."""
        self.commits: list[int] = []
        """The last event of each commit of the last line: between them the process may die."""
        super().__init__(
            rules=world.rules_in_force,
            source=world.prompts(),
            group_size=world.sessions,
            admits=world.admits,
            selection=None if world.own_rule is None else Looking(world.own_rule),
            runs=world.runs,
        )

    def _open(self) -> None:
        super()._open()
        self.checker.book = self.book
        self.phases = {name: self._phase_now(name) for name in [*self.book.groups, *self.book.departed]}
        self._batches = {number: batch.group_ids for number, batch in self.book.batches.items()}
        self.ledger.after_step = self._committed_step

    def _committed_step(self) -> None:
        self.commits.append(self.book.last_seq)

    def fork(self) -> "Stage":
        return forked(self)

    # Telling -----------------------------------------------------------------------------------------

    def go(self, line: str) -> None:
        """Let one thing happen; what is wrong with it is in `wrong` afterwards."""
        verb = line.partition(" ")[0]
        self.cells, self.wrong, self.commits, self.began = [], [], [], self.book.last_seq
        if self.world.bound(verb) is not None and "attempt=" not in line:
            self.spent[verb] += 1
        self.submitted += verb == "submit"
        try:
            self.tell(line)
            self._check_settled()
        except Exception as error:
            # Whatever it is: nothing that is told here may raise.
            if self._is_meddled_with():
                return
            self.wrong.append(Wrong("error", f"{type(error).__name__}: {error}"))
            return
        if self._is_meddled_with():
            return
        self.wrong += [*self._wrong_waits(), *self._wrong_groups()]
        self.wrong += [
            Wrong("selection", str(waiter.error))
            for waiter in self.waiters
            if isinstance(waiter.error, CustomRuleError)
        ]
        if verb == "recover":
            self.wrong += self._wrong_recovery()

    def _is_meddled_with(self) -> bool:
        """A rule has changed the book, so that nothing which is seen there says anything."""
        meddled = isinstance(self._selection, Looking) and self._selection.changed
        if meddled:
            text = f"the rule {self.rules.selection!r} changed the book; a rule only looks at it"
            self.wrong = [Wrong("selection", text)]
        return meddled

    def take(self, whole: "Stage", keep: int) -> None:
        """Take in what a run that is one line ahead recorded up to `keep`, as its log has it and not its book: that is
        what is there after it died."""
        records = list(whole.log.read(self.log.last_seq + 1, keep + 1))
        self.log.post(records)
        self.checker.book = None
        for record in records:
            self._note(record)
        self.spent, self.submitted = whole.spent.copy(), whole.submitted

    def _check_replay(self, record: ev.Record) -> None:
        """In place of a replay after each event: one replay per state is as good, and takes a fortieth of the time."""
        self._note(record)
        for group_id in self._about(record.event):
            before, after = self.phases.get(group_id), self._phase_now(group_id)
            if before is after and isinstance(record.event, ev.RunRewound):
                continue
            self._walk(before, type(record.event), after, group_id)
            self.phases[group_id] = after

    def _note(self, record: ev.Record) -> None:
        for violation in self.checker.feed(record):
            self.wrong.append(Wrong(f"invariant {violation.invariant}", str(violation)))

    def _about(self, event: ev.AnyEvent) -> list[str]:
        """The groups that an event is about."""
        if isinstance(event, ev.BatchSampled):
            self._batches[event.batch] = event.group_ids
            return list(event.group_ids)
        if isinstance(event, ev.BatchReturned | ev.BatchCommitted):
            return list(self._batches[event.batch])
        if isinstance(event, ev.RunRewound):
            return [name for name, phase in self.phases.items() if phase is Phase.COMMITTED]
        group_id = getattr(event, "group_id", None)
        return [] if group_id is None else [group_id]

    def _phase_now(self, group_id: str) -> Phase:
        group = self.book.groups.get(group_id)
        return self.book.departed[group_id] if group is None else group.phase

    def _walk(self, before: Phase | None, kind: type[ev.Event], after: Phase, group_id: str) -> None:
        self.cells.append((before, kind))
        told = TRANSITIONS[before].get(kind)
        if after is not told and not (told is Restored.TERMINAL and after in TERMINAL):
            text = f"{kind.__name__} takes group {group_id!r} from {before} to {after}, and the table says {told}"
            self.wrong.append(Wrong("table", text))

    # Checking ----------------------------------------------------------------------------------------

    def _check_settled(self) -> None:
        """The rules have done all that follows: asked again they want nothing more."""
        before = self.book.last_seq
        self.ledger.settle()
        if self.book.last_seq > before:
            more = [type(record.event).__name__ for record in self.log.read(before + 1)]
            self.wrong.append(
                Wrong("unsettled", f"the rules had not done all that follows; asked again they did {more}")
            )

    def _wrong_waits(self) -> Iterator[Wrong]:
        """Invariant 12: nobody waits for what can't come."""
        book, world = self.book, self.world
        for partition in sorted({request.partition for request in book.requests.values()}):
            if partition == ev.TRAIN and world.source is not None and world.own_rule is None:
                if not book.in_flight_count():
                    waiting = [request.size for request in book.waiting()]
                    yield Wrong("invariant 12", f"sample() of {waiting} waits with a source, and nothing is under way")
                continue
            told = explain(
                book, self.rules, partition=partition, now_ns=0, has_source=world.source is not None, dispatches=False
            )
            if not told.blocked_by or not told.unblocked_by:
                yield Wrong("invariant 12", f"a sample() of {partition!r} waits, and nothing says why: {told}")
            elif partition == ev.TRAIN and world.own_rule is not None and not world.patient:
                yield from self._wrong_patience()

    def _wrong_patience(self) -> Iterator[Wrong]:
        """A rule of the user's own lets somebody wait beside enough groups, when nothing more comes to choose from: no
        session is in flight, the user has submitted all that he does, and beside so many a source gives none."""
        book, request = self.book, self.book.waiting()[0]
        if book.in_flight_count() or self._submissions() or book.ready_count() < request.size:
            return
        ready = ", ".join(group.group_id for group in book.ready())
        no_more = "no more are submitted" if self.world.source is None else "no prompt is drawn while there are so many"
        yield Wrong(
            "for ever",
            f"the rule {self.rules.selection!r} lets a sample of {request.size} wait for ever: sampleable are {ready}, "
            f"nothing is in flight, and {no_more}. It must select from them, or drop what it will never take; one that "
            "waits for something else is patient: World(patient=True), or --patient",
        )

    def _wrong_groups(self) -> Iterator[Wrong]:
        """What a group keeps count of is what its sessions say, and one of which all sessions have ended has ended."""
        for group in self.book.groups.values():
            finished = sum(session.state == "finished" for session in group.sessions)
            settled = sum(session.state in SETTLED for session in group.sessions)
            rows = sum(len(session.trajectories) for session in group.sessions)
            if (group.finished_count, group.settled_count, group.trajectory_count) != (finished, settled, rows):
                text = (
                    f"group {group.group_id!r} counts {group.settled_count} sessions ended, {group.finished_count} "
                    f"finished and {group.trajectory_count} trajectories; its sessions make it {settled}, {finished} "
                    f"and {rows}"
                )
                yield Wrong("counts", text)
            for metric, (low, high, count) in group.session_ranges.items():
                last = [session.trajectories[-1].metrics for session in group.sessions if session.trajectories]
                values = [metrics[metric] for metrics in last if metric in metrics]
                if (low, high, count) != (min(values, default=low), max(values, default=high), len(values)):
                    text = (
                        f"group {group.group_id!r} has {metric} from {low} to {high} ({count}), its sessions {values}"
                    )
                    yield Wrong("counts", text)
            if group.in_flight and settled == group.size:
                yield Wrong("counts", f"all sessions of group {group.group_id!r} have ended, and it is {group.phase}")

    def wrong_replay(self) -> Iterator[Wrong]:
        """Invariant 9: the log from its start, and a snapshot, give the book that the run has."""
        book, state = self.book, self.book.state()
        if replayed(self.log.read()).state() != state:
            yield Wrong("replay", "a replay of the log from its start gives another book than the run has")
        if restore(decoded(encoded(capture(book)))).state() != state:
            yield Wrong("snapshot", "a snapshot of the book gives another book than the run has")

    def _wrong_recovery(self) -> Iterator[Wrong]:
        """Invariant 10: of what the log held nothing is lost, and nothing committed comes back unless it was undone."""
        recovered = next(seq for seq in range(self.log.last_seq, 0, -1) if self._is_recovery(seq))
        was, now = replayed(self.log.read(stop=recovered)), self.book
        undone = any(isinstance(record.event, ev.RunRewound) for record in self.log.read(recovered))
        for name, group in was.groups.items():
            if name not in now.groups and now.departed.get(name) is not Phase.EVICTED:
                yield Wrong("invariant 10", f"group {name!r} was {group.phase}, and after the crash it is gone")
        for name, phase in was.departed.items():
            if name in now.groups and not (undone and phase is Phase.COMMITTED):
                yield Wrong("invariant 10", f"group {name!r} had left as {phase}, and after the crash it is back")
        if now.batches or now.requests or now.count(Phase.RUNNING) or now.count(Phase.SAMPLED):
            yield Wrong("invariant 10", "after the crash something is still under way that nobody runs or holds")

    def _is_recovery(self, seq: int) -> bool:
        return isinstance(next(self.log.read(seq)).event, ev.RunRecovered)

    # What may happen next ----------------------------------------------------------------------------

    def moves(self) -> list[str]:
        """Every thing that may happen now, as lines; of things that are the same but for a name, one."""
        lines = self._submissions() + self._of_sessions() + self._of_groups() + self._of_the_run() + self._of_batches()
        return [line for line in lines if self.may(line.partition(" ")[0])]

    def late_moves(self) -> list[str]:
        """Results that come when they change nothing any more: one for each reason for which they are fenced."""
        if not self.world.late:
            return []
        return [line for group in self.book.groups.values() for line in self._late(group)] + self._late_and_gone()

    def may(self, verb: str) -> bool:
        bound = self.world.bound(verb)
        return bound is None or self.spent[verb] < bound

    def _submissions(self) -> list[str]:
        return self.world.submissions()[self.submitted : self.submitted + 1]

    def _of_sessions(self) -> list[str]:
        world, lines = self.world, []
        for group in self.book.groups.values():
            seen = set()
            for number, session in enumerate(group.sessions):
                same = (session.state, session.attempt > 1, session.tries, session.weight_version)
                if not group.in_flight or session.state in SETTLED or same in seen:
                    continue
                seen.add(same)
                where = f"{group.group_id}.{number}"
                if session.state == "waiting":
                    lines.append(f"start {where}")
                else:
                    lines += [f"finish {where} {outcome}" for outcome in world.outcomes]
                lines += [f"fail {where} {failure}" for failure in world.failures]
        return lines

    def _late(self, group: Group) -> list[str]:
        found: dict[str, str] = {}
        for number, session in enumerate(group.sessions):
            for attempt in {session.attempt, session.attempt - 1} - {0}:
                reason = fence_reason(group, number, attempt, "finished")
                if reason is not None:
                    line = f"finish {group.group_id}.{number} {self.world.outcomes[0]} attempt={attempt}"
                    found.setdefault(reason, line)
        return list(found.values())

    def _late_and_gone(self) -> list[str]:
        """A result for a group that was evicted, and for one that was committed."""
        first: dict[Phase, str] = {}
        for name, phase in self.book.departed.items():
            first.setdefault(phase, f"finish {name}.0 {self.world.outcomes[0]} attempt=1")
        return list(first.values())

    def _of_groups(self) -> list[str]:
        lines = []
        for group in self.book.groups.values():
            if group.in_flight:
                lines.append(f"cancel {group.group_id}")
            if group.in_flight or group.phase is Phase.FAILURE:
                lines.append(f"requeue {group.group_id}")
            if group.phase in TERMINAL and group.partition == ev.TRAIN:
                lines.append(f"damage {group.group_id}")
            if group.group_id in self.ledger.endings:
                lines.append(f"ended {group.group_id}")
        return lines

    def _of_the_run(self) -> list[str]:
        lines = [f"publish {self.book.weight_version + 1}", "mark", "recover"]
        for mark in self.book.marks:
            lines += [f"recover at={mark.mark}{' evict' if how == 'evict' else ''}" for how in self.world.rewinds]
        return lines

    def _of_batches(self) -> list[str]:
        world, book = self.world, self.book
        lines = []
        for partition, size in ((ev.TRAIN, world.batch), (ev.VALIDATION, 1)):
            if partition == ev.VALIDATION and not world.validation:
                continue
            if len(book.waiting(partition)) < world.waiting_max:
                lines.append(f"sample {size}" + ("" if partition == ev.TRAIN else f" partition={partition}"))
        for number in book.batches:
            lines += [f"commit {number}", f"release {number}"]
        if world.withdraws:
            lines += [f"withdraw {place}" for place, waiter in enumerate(self.waiters, 1) if self._holds(waiter)]
        return lines

    def _holds(self, waiter: Waiter) -> bool:
        """Whether a `sample()` waits, or has a batch of which nobody has heard the end."""
        if waiter.claim is None:
            return waiter.error is None and waiter.request in self.book.requests
        return waiter.claim.batch in self.book.batches
