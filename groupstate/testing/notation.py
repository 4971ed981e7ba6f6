"""Histories in a few short lines, driven through the real ledger and replayed after every event.

    story = play("submit g7/2", "start g7", "finish g7.0 reward=0.75", "fail g7.1 error", "publish 3", "sample 1")

A line is a verb, what it is about, and `name=value` options. A group with its size is `g7/2`, one of its
sessions `g7.0`; where a session belongs, the bare group id means all of them in turn.

    submit ID/N     stamp= partition= dataset= cause= position= content=
    start ID[.S]    attempt= version=
    finish ID[.S]   metrics as name=value, `versions=3,3,4` (one per token), `tokens=8` for the length of the answer
                    (where versions are fewer, the last is that of the rest), `|` between trajectories, `nothing` for
                    none at all; attempt=
    fail ID[.S]     a kind of failure (default error), `retryable`; attempt=
    cancel ID, requeue ID   (requeue: stamp= where its prompt is dispatched anew under that version)
    publish V, exhausted, mark [NAME], wait SECONDS, close
    sample N        partition= version=; served at once if it can be, else it waits
    withdraw [N]    the N-th sample(), from 1, stops waiting; without N the latest
    commit B, release B
    recover         at=MARK version=V keep=EVENTS: the process dies, with `keep` all behind the first so many events is
                    lost with it, and the log is opened again; dies=N, as the next; `evict` gives up what ended behind
                    the mark
    dies N          after N more writes to the log, be it in the middle of a line; the line after that is `recover`
    damage ID       a payload of the group can't be read any more
    ended ID        the runner is done with a group that was given up (stories with `runs`)
    evict ID REASON[,REASON]    credit= lag=        (what rules do by themselves, for stories without rules)
    forfeit COUNT

Rule 1: without rules nothing follows from anything; with rules the real controller does what follows.
Rule 2: after every event the log is replayed from its start, and the two books must be equal. So each test
that is written in this notation is a test of replay as well.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.custom import CustomRule
from groupstate.core.folding import replayed
from groupstate.core.group import Group
from groupstate.core.held import OpenRequest
from groupstate.core.prompt import Prompt
from groupstate.core.rules import Rules
from groupstate.core.select import selected
from groupstate.core.supply import next_target
from groupstate.core.trajectory import Trajectory
from groupstate.errors import LogFailed
from groupstate.log.memory import MemoryLog
from groupstate.runtime import recovery
from groupstate.runtime.controller import Controller, Waiter
from groupstate.runtime.deadlines import Deadlines
from groupstate.runtime.ledger import Ending, Ledger
from groupstate.runtime.recovery import CheckpointMark
from groupstate.runtime.sources import ListSource
from groupstate.testing.said import rule_of

E = TypeVar("E", bound=ev.Event)

START_NS: Final = 1_000_000_000_000
"""When every story begins; `wait` moves the clock and nothing else does."""


class MortalLog(MemoryLog):
    """A log whose process may die after some writes: what was to follow them isn't written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes_left: int | None = None
        """Until it dies; None while it isn't going to."""

    def post(self, records: Sequence[ev.Record]) -> None:
        if self.writes_left == 0:
            raise LogFailed("the process died here, as the story says")
        super().post(records)
        if self.writes_left is not None:
            self.writes_left -= 1


class Story:
    """A run in memory that lines of the notation drive."""

    def __init__(
        self,
        *,
        rules: Rules | None = None,
        source: Iterable[str] | None = None,
        group_size: int = 2,
        admits: bool = False,
        weight_version: int = 0,
        controlled: bool | None = None,
        selection: CustomRule | None = None,
        replays: bool = True,
        runs: bool = False,
    ) -> None:
        """
        Args:
            rules: None runs no rules, and evictions are written down by hand.
            source: ids of the groups that refills and admission take; None for no source.
            group_size: sessions of the groups that admission starts.
            admits: a rollout would be running, so that admission starts new prompts.
            controlled: False keeps the controller out although there are rules (the ledger reads some).
            selection: a function in place of the rules' own selection. Without it one that the rules name is loaded.
            replays: False leaves the replay after each event out, for long stories that are replayed at their end.
            runs: sessions run as tasks, so that a group that is given up ends only later, by `ended`.

        Raises:
            BadSettings: the selection can't be found, or can't be called as one.
        """
        self.rules = rules or Rules()
        self.log = MortalLog()
        self.now_ns = START_NS
        self.lines: list[str] = []
        """What was told until now."""
        self.waiters: list[Waiter] = []
        self.fenced: list[ev.FenceReason | None] = []
        """For each result in turn: why it was fenced, None if it was taken."""
        self._controlled = rules is not None if controlled is None else controlled
        self._selection = rule_of(self.rules, selection) if self._controlled else selection
        self._source = None if source is None else [Prompt(group_id=name) for name in source]
        self._group_size = group_size
        self._admits = admits
        self._replays = replays
        self._runs = runs
        self._open()
        recovery.start(self.ledger, run_id="story", weight_version=weight_version, seed=0)

    def _open(self) -> None:
        self.ledger = Ledger(self.log, self.rules, clock_ns=self._clock_ns)
        recovery.load(self.ledger)
        if self._replays:
            self.ledger.observers.append(self._check_replay)
        self.controller: Controller | None = None
        if self._controlled:
            source = None if self._source is None else ListSource(self._source)
            self.controller = Controller(self.ledger, source, group_size=self._group_size, custom=self._selection)
            self.controller.admits = self._admits
            self.controller.runner = self if self._runs else None
            self._deadlines = Deadlines(self.controller, now=self._now_s)

    def _clock_ns(self) -> int:
        return self.now_ns

    def _now_s(self) -> float:
        return self.now_ns / 1e9

    def end(self, group_id: str, ending: Ending) -> bool:
        """What the controller asks of whoever runs the sessions."""
        self.ledger.mark_ending(group_id, ending)
        return True

    def _check_replay(self, record: ev.Record) -> None:
        again = replayed(self.log.read(stop=record.seq + 1))
        assert again.state() == self.book.state(), f"the replay differs after {record}"

    # Telling -----------------------------------------------------------------------------------------

    def tell(self, *lines: str) -> "Story":
        """Go on with more lines."""
        for line in lines:
            self.lines.append(line)
            verb, *words = line.split()
            handler = _VERBS.get(verb)
            if handler is None:
                raise ValueError(f"line {line!r} begins with {verb!r}; verbs are {', '.join(_VERBS)}")
            if self.died and verb != "recover":
                raise ValueError(f"line {line!r} comes after the process died; the next line is 'recover'")
            try:
                handler(self, words)
            except LogFailed:
                if not self.died:
                    raise
        return self

    @property
    def died(self) -> bool:
        """`dies` has come true; only `recover` can follow."""
        return self.log.writes_left == 0

    def record(self, event: ev.AnyEvent) -> None:
        """An event that the notation has no verb for; the rules run after it."""
        self.ledger.record(event)
        self.ledger.settle()

    # Looking -----------------------------------------------------------------------------------------

    @property
    def book(self) -> Book:
        return self.ledger.book

    def group(self, group_id: str) -> Group:
        return self.book.group(group_id)

    def phase(self, group_id: str) -> str:
        """Where a group is, or was when it left."""
        live = self.book.groups.get(group_id)
        return str(live.phase if live is not None else self.book.departed[group_id])

    def ready(self, partition: str = ev.TRAIN) -> list[str]:
        """Ids of the sampleable groups, in the order of sampling."""
        return [group.group_id for group in self.book.ready(partition)]

    def events(self, kind: type[E]) -> list[E]:
        """All events of a kind, in order."""
        return [record.event for record in self.log.read() if isinstance(record.event, kind)]

    def evicted(self) -> dict[str, tuple[str, ...]]:
        """Reasons by group, of all evictions so far."""
        return {event.group_id: event.reasons for event in self.events(ev.GroupEvicted)}

    def refills(self) -> list[str]:
        return [event.group_id for event in self.events(ev.GroupSubmitted) if event.cause == "refill"]

    def batches(self) -> list[tuple[str, ...]]:
        """Group ids of each batch that was sampled."""
        return [event.group_ids for event in self.events(ev.BatchSampled)]

    # Verbs -------------------------------------------------------------------------------------------

    def _submit(self, words: list[str]) -> None:
        group_id, _, size = words[0].rpartition("/")
        options = _options(words[1:])
        trains = options.get("partition", ev.TRAIN) == ev.TRAIN
        spare = self.rules.oversample if trains else 0
        self.ledger.record(
            ev.GroupSubmitted(
                group_id,
                int(size) + spare,
                options.get("partition", ev.TRAIN),
                int(options.get("stamp", self.book.weight_version)),
                self.book.lineage,
                options.get("cause", "submit"),  # type: ignore[arg-type]
                options.get("dataset", ""),
                int(options.get("position", -1)),
                self.log.payloads.put(options["content"].encode()) if "content" in options else None,
                target_version=self._target(options, trains),
                oversample=spare,
            )
        )
        self.ledger.settle()

    def _target(self, options: dict[str, str], trains: bool) -> int | None:
        if not trains or not self.rules.targets_versions:
            return None
        return int(options["target"]) if "target" in options else next_target(self.book, self.rules)

    def _start(self, words: list[str]) -> None:
        options = _options(words[1:])
        version = int(options["version"]) if "version" in options else None
        for group_id, session in self._sessions(words[0]):
            number = self.ledger.start(group_id, session, _attempt(options), version=version)
            self.fenced.append(None if number is not None else self.events(ev.ResultFenced)[-1].reason)

    def _finish(self, words: list[str]) -> None:
        rows = rows_of(words[1:])
        attempt = next((int(word[8:]) for word in words if word.startswith("attempt=")), None)
        for group_id, session in self._sessions(words[0]):
            self.fenced.append(self.ledger.finish(group_id, session, attempt, rows))

    def _fail(self, words: list[str]) -> None:
        plain = [word for word in words[1:] if "=" not in word]
        retryable = "retryable" in plain
        kinds = [word for word in plain if word != "retryable"] or ["error"]
        for group_id, session in self._sessions(words[0]):
            fenced = self.ledger.fail(
                group_id,
                session,
                _attempt(_options(words[1:])),
                kinds[0],  # type: ignore[arg-type]
                "told so",
                retryable=retryable,
            )
            self.fenced.append(fenced)

    def _sessions(self, word: str) -> Iterator[tuple[str, int]]:
        group_id, dot, session = word.rpartition(".")
        if dot and session.isdigit():
            yield group_id, int(session)
        else:
            yield from ((word, number) for number in range(self.group(word).size))

    def _cancel(self, words: list[str]) -> None:
        ending = Ending("cancelled", "told so", cancels=True)
        if self.controller is None:
            self.ledger.end(words[0], ending)
        else:
            self.controller.end(words[0], ending)

    def _ended(self, words: list[str]) -> None:
        self.ledger.end(words[0], self.ledger.endings[words[0]])

    def _damage(self, words: list[str]) -> None:
        assert self.controller is not None, "damage is found by what runs under rules"
        self.controller.mark_damaged({words[0]: "told so"})
        self.controller.settle()

    def _requeue(self, words: list[str]) -> None:
        stamp = _options(words[1:]).get("stamp")
        self.record(ev.GroupRequeued(words[0], "told so", weight_version=None if stamp is None else int(stamp)))

    def _evict(self, words: list[str]) -> None:
        options = _options(words[2:])
        reasons = tuple(words[1].split(","))
        self.record(
            ev.GroupEvicted(
                words[0],
                reasons,  # type: ignore[arg-type]
                int(options.get("lag", 0)),
                int(options.get("credit", 0)),
            )
        )

    def _forfeit(self, words: list[str]) -> None:
        self.record(ev.RefillForfeited(int(words[0]), "told so"))

    def _publish(self, words: list[str]) -> None:
        self.ledger.publish(int(words[0]))

    def _exhausted(self, words: list[str]) -> None:
        self.record(ev.SourceExhausted("told", 0))

    def _mark(self, words: list[str]) -> None:
        book = self.book
        name = words[0] if words else ""
        self.record(ev.CheckpointMarked(book.last_mark + 1, book.weight_version, book.lineage, name))

    def _wait(self, words: list[str]) -> None:
        self.now_ns += int(float(words[0]) * 1e9)
        if self.controller is not None:
            self._deadlines.expire()

    def _close(self, words: list[str]) -> None:
        self.record(ev.RunClosed("told so"))

    def _sample(self, words: list[str]) -> None:
        options = _options(words[1:])
        size, partition = int(words[0]), options.get("partition", ev.TRAIN)
        if "version" in options:
            self.ledger.publish(int(options["version"]))
        if self.controller is not None:
            try:
                self.waiters.append(self.controller.request(size, partition))
            except LogFailed:
                # Nobody waits in a process that died, but `withdraw` counts every sample.
                self.waiters.append(Waiter(self.book.last_request))
                raise
            return
        number = self.book.last_request + 1
        self.ledger.record(ev.BatchRequested(number, partition, size, self.book.weight_version))
        if self.book.ready_count(partition) >= size:
            self._serve(self.book.requests[number])

    def _serve(self, request: OpenRequest) -> None:
        """What the controller does, for stories without rules."""
        groups = selected(self.book, self.rules, request)
        self.ledger.record(
            ev.BatchSampled(
                self.book.last_batch + 1,
                request.request,
                request.partition,
                tuple(group.group_id for group in groups),
                self.book.weight_version,
                tuple(self.book.lag(group) for group in groups),
            )
        )

    def _withdraw(self, words: list[str]) -> None:
        if self.controller is not None:
            self.controller.withdraw(self.waiters[int(words[0]) - 1 if words else -1], "told so")
            return
        number = int(words[0]) if words else self.book.last_request
        self.ledger.record(ev.BatchRequestCancelled(number, "told so"))

    def _commit(self, words: list[str]) -> None:
        self.record(ev.BatchCommitted(int(words[0])))

    def _release(self, words: list[str]) -> None:
        self.record(ev.BatchReturned(int(words[0]), "told so"))

    def _dies(self, words: list[str]) -> None:
        self.log.writes_left = int(words[0])

    def _recover(self, words: list[str]) -> None:
        options = _options(words)
        if "keep" in options:
            self._lose(int(options["keep"]))
        self.log.writes_left = int(options["dies"]) if "dies" in options else None
        self._open()
        version = int(options["version"]) if "version" in options else None
        resume_at = self._kept_mark(int(options["at"])) if "at" in options else None
        recovery.recover(
            self.ledger,
            torn_bytes=0,
            weight_version=version,
            resume_at=resume_at,
            on_rewind="evict" if "evict" in words else "keep",
        )
        if self.controller is not None:
            self.controller.rejudge()
            self.controller.drawing.seek()
        self.ledger.settle()

    def _lose(self, keep: int) -> None:
        """The log's end never got to the disk; payloads did, which come first."""
        shorter = MortalLog()
        shorter.post(list(self.log.read(stop=keep + 1)))
        shorter.payloads = self.log.payloads
        self.log = shorter

    def _kept_mark(self, number: int) -> CheckpointMark:
        """The mark as its checkpoint would have kept it, pruned from the book or not."""
        for record in self.log.read():
            event = record.event
            if isinstance(event, ev.CheckpointMarked) and event.mark == number:
                return CheckpointMark(
                    run_id=self.book.run_id,
                    mark=number,
                    seq=record.seq,
                    weight_version=event.weight_version,
                    lineage=event.lineage,
                    name=event.name,
                )
        raise ValueError(f"the story has no mark {number}")


_VERBS: Final[dict[str, Callable[[Story, list[str]], None]]] = {
    "submit": Story._submit,
    "start": Story._start,
    "finish": Story._finish,
    "fail": Story._fail,
    "cancel": Story._cancel,
    "requeue": Story._requeue,
    "evict": Story._evict,
    "forfeit": Story._forfeit,
    "publish": Story._publish,
    "exhausted": Story._exhausted,
    "mark": Story._mark,
    "wait": Story._wait,
    "close": Story._close,
    "sample": Story._sample,
    "withdraw": Story._withdraw,
    "commit": Story._commit,
    "release": Story._release,
    "recover": Story._recover,
    "dies": Story._dies,
    "damage": Story._damage,
    "ended": Story._ended,
}


def play(
    *lines: str,
    rules: Rules | None = None,
    source: Iterable[str] | None = None,
    group_size: int = 2,
    admits: bool = False,
    weight_version: int = 0,
    controlled: bool | None = None,
    selection: CustomRule | None = None,
    replays: bool = True,
    runs: bool = False,
) -> Story:
    """A story from its first line; see `Story` for the arguments."""
    return Story(
        rules=rules,
        source=source,
        group_size=group_size,
        admits=admits,
        weight_version=weight_version,
        controlled=controlled,
        selection=selection,
        replays=replays,
        runs=runs,
    ).tell(*lines)


def _options(words: Iterable[str]) -> dict[str, str]:
    return {name: value for name, eq, value in (word.partition("=") for word in words) if eq}


def _attempt(options: dict[str, str]) -> int | None:
    return int(options["attempt"]) if "attempt" in options else None


def rows_of(words: list[str]) -> list[Trajectory] | None:
    """What a session brings that ends in these words.

    Raises:
        ValueError: one of them says nothing.
    """
    for word in words:
        if "=" not in word and word not in ("|", "nothing"):
            raise ValueError(f"{word!r} says nothing; a metric is name=value, such as reward=0.75")
    if "nothing" in words:
        return None
    rows: list[list[str]] = [[]]
    for word in words:
        if word == "|":
            rows.append([])
        else:
            rows[-1].append(word)
    return [_row(_options(row)) for row in rows]


def _row(options: dict[str, str]) -> Trajectory:
    options.pop("attempt", None)
    versions = [int(version) for version in options.pop("versions", "").split(",") if version]
    tokens = int(options.pop("tokens", len(versions)))
    assert tokens >= len(versions), f"{len(versions)} versions for {tokens} tokens; a version is that of a token"
    versions += versions[-1:] * (tokens - len(versions))
    metrics = {name: float(value) for name, value in options.items()}
    return Trajectory(response_ids=[1] * tokens, spans=_spans(versions), metrics=metrics)


def _spans(versions: list[int]) -> list[ev.VersionSpan]:
    """One span for each stretch of tokens of the same version."""
    bounds = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    return [
        ev.VersionSpan(start, stop, versions[start])
        for start, stop in zip(bounds, [*bounds, len(versions)][1:], strict=True)
    ]
