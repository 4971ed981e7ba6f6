"""One simulated run: its lives one after the other, first with faults, then without, and what came of it."""

import asyncio
import contextlib
import gc
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.followed import Followed
from groupstate.core.invariants import Checker
from groupstate.core.phases import IN_FLIGHT
from groupstate.log.reading import first_event, read_log
from groupstate.simulate.faults import FaultyDisk
from groupstate.simulate.life import ENDLESS_S, RUN, History, Life
from groupstate.simulate.loop import Deadlock, VirtualLoop
from groupstate.simulate.lots import Lots
from groupstate.simulate.plan import Plan
from groupstate.simulate.witness import Breach

LIVES_MAX = 200
"""A plan whose processes end faster than this has no end: what it asks for is a mistake, and no test."""

_LIFE = 901


@attrs.frozen
class Outcome:
    plan: Plan
    lifetimes: int
    """Groups that were submitted."""
    sessions: int
    """Attempts that were started."""
    events: int
    lives: int
    virtual_s: float
    ends: dict[str, int]
    """How the lives ended."""
    told: dict[str, int]
    """What happened, counted."""
    digest: str
    """SHA-256 of the bytes of the log."""
    breach: Breach | None
    records: tuple[ev.Record, ...] = attrs.field(repr=False)


def simulate(plan: Plan) -> Outcome:
    """Run a plan to its end.

    Raises:
        BadSettings: settings that can't be.
    """
    plan.check()
    with _undisturbed():
        return _Simulation(plan).run()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Without the warnings of a run in which everything goes wrong, and without looking for garbage all the time."""
    logger, collecting = logging.getLogger("groupstate"), gc.isenabled()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logger.setLevel(level)
        if collecting:
            gc.enable()
            # What a run leaves refers to itself, and would stay until somebody looks. All of it is young.
            gc.collect(0)


class _Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.history = History()
        self.disk = FaultyDisk()
        self.now_s = 0.0
        self.lives = 0
        self.ends: dict[str, int] = {}
        self.breach: Breach | None = None

    def run(self) -> Outcome:
        calm_at_s = self.plan.hours * 3600.0
        while self.breach is None:
            self.lives += 1
            life = self._lived(calm_at_s)
            self.ends[str(life.how)] = self.ends.get(str(life.how), 0) + 1
            self.breach = life.breach
            if life.how == "done":
                break
            self.disk = life.after_failure()
            if self.lives >= LIVES_MAX and self.breach is None:
                self.breach = Breach("stuck", f"{LIVES_MAX} processes ended, and the run is still not done")
        if self.breach is None:
            try:
                self._check_end(life)
            except Breach as breach:
                self.breach = breach
        return self._outcome()

    def _lived(self, calm_at_s: float) -> Life:
        loop = VirtualLoop(self.now_s, until_s=max(self.now_s, calm_at_s) + ENDLESS_S)
        plan, lots = self.plan, Lots(self.plan.seed, self.lives, _LIFE)
        kill_at_s = self.now_s + lots.waiting_s(plan.crash.every_s) if plan.crash.every_s else None
        how: Literal["killed", "power", "closed"] = "killed"
        if lots.chance(plan.crash.closes):
            how = "closed"
        elif lots.chance(plan.crash.power):
            how = "power"
        calm = self.now_s >= calm_at_s or self.history.has_enough(plan)

        def made() -> Life:
            return Life(plan, self.lives, self.disk, self.history, loop, calm_at_s, kill_at_s, how, calm=calm)

        life = _run_on(loop, made)
        self.now_s = max(self.now_s, loop.now_s if life.left is None else (kill_at_s or 0.0))
        return life

    # The end ----------------------------------------------------------------------------------------------

    def _check_end(self, life: Life) -> None:
        """
        Raises:
            Breach: the log on the disk, replayed and checked in full, isn't what the run and the witness know.
        """
        kept, witness = self.history.kept, self.history.witness
        witness.ends()
        book = life.run.book
        if open_groups := [group.group_id for phase in sorted(IN_FLIGHT) for group in book.in_phase(phase)]:
            raise Breach("stuck", f"groups are still in flight: {open_groups}")
        first = first_event(RUN, disk=self.disk)
        on_disk = list(read_log(RUN, first, disk=self.disk))
        if on_disk != kept[first - 1 :]:
            raise Breach("lost", f"the disk has {len(on_disk)} events from {first} on, not those that were kept")
        # The checker took these very events one by one as they became durable; here their replay is held against it.
        followed = Followed(Book())
        try:
            for record in on_disk if first == 1 else kept:
                followed.take(record)
        except Exception as error:
            # Whatever it is, a replay ends here.
            why = f"a replay of the log stops at event {record.seq}: {type(error).__name__}: {error}"
            raise self._explained(Breach("invariant 9", why, record.seq)) from error
        if followed.standing.number != self.history.standing.number:
            why = "somewhere a replay of the log counts otherwise than the events do"
            raise self._explained(Breach("invariant 3", why))
        if followed.settle().digest() != book.digest():
            raise Breach("invariant 9", "a replay of the log gives another book than the run had")

    def _explained(self, breach: Breach) -> Breach:
        """The same, with the event and its group where the checks of every event find them."""
        checker = Checker()
        for record in self.history.kept:
            if found := checker.feed(record):
                return Breach(f"invariant {found[0].invariant}", str(found[0]), found[0].seq)
        return breach

    def _outcome(self) -> Outcome:
        kept = self.history.kept
        kinds = Counter([type(record.event) for record in kept])
        return Outcome(
            plan=self.plan,
            lifetimes=kinds[ev.GroupSubmitted],
            sessions=kinds[ev.SessionStarted],
            events=len(kept),
            lives=self.lives,
            virtual_s=self.now_s,
            ends=self.ends,
            told=dict(sorted(self.history.told.items())),
            digest=self._digest(),
            breach=self.breach,
            records=tuple(kept),
        )

    def _digest(self) -> str:
        found = hashlib.sha256()
        for path in sorted(self.disk.sizes(f"{RUN}/log")):
            if ".seg" in path:
                found.update(path.encode() + self.disk.read(path))
        return found.hexdigest()


def _run_on(loop: VirtualLoop, make: Callable[[], Life]) -> Life:
    """Run a life on its loop, and take down what is left of it."""
    lives: list[Life] = []

    async def main() -> None:
        lives.append(make())
        await lives[0].live()

    runner = asyncio.Runner(loop_factory=lambda: loop)
    try:
        runner.run(main())
    except Deadlock as deadlock:
        lives[0].breached(Breach("stuck", f"{deadlock}; {_stuck(lives[0])}"))
    finally:
        lives[0].over = True
        loop.until_s = math.inf
        with contextlib.suppress(Deadlock):
            runner.close()
    return lives[0]


def _stuck(life: Life) -> str:
    if life._run is None:
        return "the run was being opened"
    book = life.run.book
    open_groups = {str(phase): [group.group_id for group in book.in_phase(phase)] for phase in sorted(IN_FLIGHT)}
    waits = [f"sample({request.size}) of {request.partition!r}" for request in book.requests.values()]
    return f"in flight {open_groups}; waiting {waits or 'nobody that the log knows'}; {life.run.explain()}"
