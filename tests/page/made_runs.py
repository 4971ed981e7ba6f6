"""Runs for the page: made as a log has them, without running anything, and quickly enough for 50,000 groups.

Groups come from admission and refills; sessions take a time that is drawn from a seed, some fail and are tried again;
groups without variance, failed ones and stale ones are evicted and replaced; batches are sampled, trained on and
committed, and each publishes a weight version. The invariants hold.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import attrs
from msgspec.structs import replace

from groupstate.core import events as ev
from groupstate.core.prompt import Prompt, encoded_prompt
from groupstate.core.rules import RULES_VERSION, Rules
from groupstate.log.file import FileLog

BEGIN_NS = 1_760_000_000_000_000_000
SESSIONS = 8
COMMIT = 256

Timed = tuple[int, ev.AnyEvent]


@attrs.define
class _Live:
    name: str
    stamp: int
    left: int = SESSIONS
    finished: int = 0
    total: float = 0.0
    easy: float = 0.5


class MadeRun:
    """The events of a run of so many groups, with their times."""

    def __init__(self, groups: int, *, seed: int = 1, batch_size: int = 64, in_flight: int = 192, closed: bool = True):
        self.rules = Rules(batch_size=batch_size, lag_max=2, filter_metric="reward")
        self._groups = groups
        self._rng = random.Random(seed)
        self._in_flight_max = in_flight
        self._closed = closed
        self._now_ns = 0
        self._version = 0
        self._submitted = 0
        self._owed = 0
        self._in_flight = 0
        self._batches = 0
        self._due: list[tuple[int, int, int, int, int]] = []
        self._live: dict[int, _Live] = {}
        self._ready: deque[int] = deque()

    def events(self) -> Iterator[Timed]:
        yield 0, ev.RunStarted("made-run", self.rules.to_dict(), RULES_VERSION, 0, library="0.1.0", seed=7)
        yield 0, ev.BatchRequested(1, ev.TRAIN, self.rules.batch_size, 0)
        yield from self._fill()
        while self._due:
            at_ns, number, session, attempt, begun = heapq.heappop(self._due)
            self._now_ns = max(self._now_ns, at_ns)
            yield from self._begins(number, session, attempt) if not begun else self._ends(number, session, attempt)
            if len(self._ready) >= self.rules.batch_size:
                yield from self._train()
            yield from self._fill()
        if self._closed:
            yield self._now_ns + 1_000_000, ev.RunClosed("done")

    def _at(self, event: ev.AnyEvent) -> Timed:
        self._now_ns += 20_000
        return self._now_ns, event

    def _fill(self) -> Iterator[Timed]:
        while self._submitted < self._groups and self._in_flight < self._in_flight_max:
            number = self._submitted
            self._submitted += 1
            self._in_flight += 1
            refill = self._owed > 0
            self._owed -= refill
            name = f"g{number + 1}"
            dataset = "math" if self._rng.random() < 0.7 else "code"
            self._live[number] = _Live(name, self._version, easy=self._rng.betavariate(0.8, 0.8))
            yield self._at(
                ev.GroupSubmitted(
                    name, SESSIONS, ev.TRAIN, self._version, 1, "refill" if refill else "admission", dataset, number
                )
            )
            for session in range(SESSIONS):
                wait_ns = int(self._rng.expovariate(1 / 0.3) * 1e9)
                heapq.heappush(self._due, (self._now_ns + wait_ns, number, session, 1, 0))

    def _begins(self, number: int, session: int, attempt: int) -> Iterator[Timed]:
        worker = f"worker-{(number * 7 + session) % 4}"
        yield self._at(ev.SessionStarted(self._live[number].name, session, attempt, worker, self._version))
        took_ns = int(self._rng.lognormvariate(1.0, 0.6) * 1e9)
        heapq.heappush(self._due, (self._now_ns + took_ns, number, session, attempt, 1))

    def _ends(self, number: int, session: int, attempt: int) -> Iterator[Timed]:
        group = self._live[number]
        drawn = self._rng.random()
        if drawn < 0.02 and attempt == 1:
            message = self._rng.choice(["connection reset by peer", "CUDA out of memory: tried to allocate 2.1 GiB"])
            yield self._at(ev.SessionFailed(group.name, session, attempt, "error", message, 0.5))
            heapq.heappush(self._due, (self._now_ns + 500_000_000, number, session, attempt + 1, 0))
            return
        group.left -= 1
        if drawn < 0.024:
            yield self._at(ev.SessionFailed(group.name, session, attempt, "timeout", "no answer after 60 s"))
        else:
            reward = float(self._rng.random() < group.easy)
            length = self._rng.randrange(80, 1_600)
            metrics = {"reward": reward, "length_penalty": round(-length / 1_600, 3)}
            row = ev.TrajectoryRecord(0, metrics, 90, length, (ev.VersionSpan(0, length, self._version),))
            group.finished += 1
            group.total += reward
            yield self._at(ev.SessionFinished(group.name, session, attempt, (row,)))
        if not group.left:
            yield from self._settled(number, group)

    def _settled(self, number: int, group: _Live) -> Iterator[Timed]:
        self._in_flight -= 1
        whole = group.finished == SESSIONS
        yield self._at(ev.GroupFinished(group.name) if whole else ev.GroupFailed(group.name))
        lag = self._version - group.stamp
        reasons: list[ev.EvictReason] = [] if whole else ["failed"]
        if whole and lag > 2:
            reasons.append("stale")
        shared = group.total / SESSIONS if whole and group.total in (0.0, SESSIONS) else None
        if shared is not None:
            reasons.append("zero_variance")
        if not reasons:
            self._ready.append(number)
            return
        yield self._at(
            ev.GroupEvicted(group.name, tuple(reasons), lag, 1, shared, "reward" if shared is not None else "")
        )
        self._owed += 1
        del self._live[number]

    def _train(self) -> Iterator[Timed]:
        """A batch from the request to the next one, and what is too old for the version after it."""
        self._batches += 1
        numbers = [self._ready.popleft() for _ in range(self.rules.batch_size)]
        names = tuple(self._live[number].name for number in numbers)
        lags = tuple(self._version - self._live[number].stamp for number in numbers)
        yield self._at(ev.BatchSampled(self._batches, self._batches, ev.TRAIN, names, self._version, lags))
        self._now_ns += 400_000_000
        yield self._at(ev.BatchCommitted(self._batches))
        for number in numbers:
            del self._live[number]
        self._version += 1
        yield self._at(ev.WeightsPublished(self._version))
        for number in [number for number in self._ready if self._version - self._live[number].stamp > 2]:
            self._ready.remove(number)
            group = self._live.pop(number)
            yield self._at(ev.GroupEvicted(group.name, ("stale",), self._version - group.stamp, 1))
            self._owed += 1
        yield self._at(ev.BatchRequested(self._batches + 1, ev.TRAIN, self.rules.batch_size, self._version))


def records(made: MadeRun) -> list[ev.Record]:
    return [ev.Record(seq, BEGIN_NS + at_ns, event) for seq, (at_ns, event) in enumerate(made.events(), 1)]


def prompt_of(number: int) -> str:
    """What the prompt of a group asks."""
    apples, each_day = number % 89 + 11, number % 7 + 2
    return f"Mara has {apples} apples and gives away {each_day} each day. After how many days has she none left?"


def new_log(path: Path) -> FileLog:
    return FileLog.create(path, inline=True, durability="os", now_ns=lambda: BEGIN_NS)


def with_prompt(log: FileLog, record: ev.Record, text: str) -> ev.Record:
    """A submission with its prompt in the log's payload store."""
    assert isinstance(record.event, ev.GroupSubmitted)
    ref = log.payloads.put(encoded_prompt(Prompt(text), record.event.group_id))
    return replace(record, event=replace(record.event, prompt=ref, prompt_length=len(text)))


def write(path: Path, kept: list[ev.Record], prompts: Callable[[int], str] | None = prompt_of) -> Path:
    """A run directory with these records, and a prompt for each group."""

    async def post() -> None:
        log = new_log(path)
        submitted = 0
        for begin in range(0, len(kept), COMMIT):
            some = kept[begin : begin + COMMIT]
            for at, record in enumerate(some):
                if prompts is not None and isinstance(record.event, ev.GroupSubmitted):
                    some[at] = with_prompt(log, record, prompts(submitted))
                    submitted += 1
            log.post(some)
        await log.aclose()

    with ThreadPoolExecutor(1) as thread:  # a browser that is driven has an event loop in this one
        thread.submit(anyio.run, post).result()
    return path
