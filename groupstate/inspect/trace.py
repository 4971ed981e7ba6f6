"""A run as a trace in the Chrome trace event format, to be opened in Perfetto or chrome://tracing.

Times are microseconds since the run began. Process 1 is the run (openings, weights, admission, what else happened, and
the counters), process 2 the trainer (waits and batches); each group has a process with a thread for its phases and one
for each session, or shares a lane's with groups before and behind it.

Rule 1: events are made as the log is read; what is held is what is open.
Rule 2: the spans of a thread lie in one another or apart. All are complete events: of those that begin at one moment
viewers take the longer as the outer one, wherever in the file it stands, while a pair of begin and end would have to
come in the order of time.
"""

import contextlib
import gzip
import heapq
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeAlias

import attrs
import msgspec

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.phases import Phase
from groupstate.errors import BadInput
from groupstate.inspect.lives import Attempt, Draw, Life, Listener, Lives, Version
from groupstate.inspect.words import as_object, counted, in_words, kind_of, one_line, span_of, time_of
from groupstate.inspect.writing import whole_file

Tracks: TypeAlias = Literal["group", "lane"]
"""`group`: every group has tracks of its own. `lane`: it takes those of a group that has left."""

TraceEvent: TypeAlias = dict[str, Any]

RUN: Final = 1
TRAINER: Final = 2
FIRST_GROUP: Final = 10
"""Numbers of processes."""

OPENINGS, WEIGHTS, ADMISSION, EVENTS, LATE = range(1, 6)
"""Threads of the run."""
THREADS: Final = {
    OPENINGS: "openings",
    WEIGHTS: "weight versions",
    ADMISSION: "admission held",
    EVENTS: "other events",
    LATE: "late results of groups that have left",
}

WAITS: Final = 1
BATCHES: Final = 1_001
"""Threads of the trainer: the first of waits, the first of batches; more for those that overlap."""

CLOCK_STEP_NS: Final = 1_000_000
"""A clock that goes back by this much, a millisecond, is told of."""

LEVEL: Final = 3
"""Of gzip: a higher one takes up to twice the time for a tenth of the size."""

GROUP: Final = 1
FIRST_SESSION: Final = 2
"""Threads of a group. Viewers take number 0 for the idle thread of a machine."""

BUFFERED: Final = 512
"""Events that are written at a time."""


@attrs.frozen
class Traced:
    path: str
    first_seq: int
    last_seq: int
    """Events of the log that it tells of."""
    trace_events: int
    open_at_end: int
    """Spans that were cut off where the log ends."""


class _Lanes:
    """The lowest number that is free."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._count = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._count += 1
        return self._count - 1

    def give_back(self, lane: int) -> None:
        heapq.heappush(self._free, lane)


@attrs.define
class _Place:
    """The process of a group."""

    pid: int
    lane: int
    begun_ns: int


class Tracer(Listener):
    """Makes trace events of records, fed one by one; they gather in `out`."""

    def __init__(self, base: Book | None = None, *, tracks: Tracks = "group") -> None:
        self.out: list[TraceEvent] = []
        self.open_at_end = 0
        self._tracks = tracks
        self._origin_ns: int | None = None
        self._shift_ns = 0
        self._last_ns = 0
        self._begin_ns = 0
        self._lanes = _Lanes()
        self._lane_size: dict[int, int] = {}
        """Threads that are named, by process, where groups share them."""
        self._busy: dict[str, list[int]] = {}
        """Until when the threads of waits and of batches are taken."""
        self._counted: dict[str, int] = {}
        self._dirty: set[ev.Partition] = set()
        self._opening_ns: int | None = None
        self._held: tuple[str, int, int] | None = None
        self._flow = 0
        self._lives: Lives
        self._name_run()
        if base is None:
            self._lives = Lives(self)
        else:
            self._origin_ns, self._last_ns, self._begin_ns = base.started_at_ns, base.last_at_ns, base.last_at_ns
            self._opening_ns = None if base.closed else base.last_at_ns
            if base.held_reason:
                self._held = base.held_reason, base.last_at_ns, base.last_seq
            self._lives = Lives(self, base)
            self._dirty.update(base.partitions())

    # Feeding -----------------------------------------------------------------------------------------

    def feed(self, record: ev.Record) -> None:
        """
        Raises:
            LogError: the event can't follow what came before it.
        """
        at_ns = self._taken_at(record)
        event, told = record.event, type(record.event) in _TOLD
        if told and isinstance(event, ev.RunStarted | ev.RunRecovered):
            self._opened(record, at_ns)
        self._lives.feed(record, at_ns)
        if told and isinstance(event, ev.ResultFenced):
            self._late(record, event, at_ns)
        elif told:
            self._tell(record, at_ns)
        if self._dirty:
            self._count(at_ns)

    def close(self) -> None:
        """The log is at its end: what is open ends there, and is marked."""
        self._lives.close()
        if self._held is not None:
            self._hold_ended(self._last_ns, at_end=True)
        if self._opening_ns is not None:
            name = f"opening {self._lives.openings}"
            self._span(RUN, OPENINGS, name, "run", self._opening_ns, None, {})

    def _taken_at(self, record: ev.Record) -> int:
        """The time of a record. The writer's clock may have been set back: then what follows is moved on by as much."""
        if self._origin_ns is None:
            self._origin_ns = self._last_ns = self._begin_ns = record.at_ns
        at_ns = record.at_ns + self._shift_ns
        if at_ns < self._last_ns:
            back_ns = self._last_ns - at_ns
            self._shift_ns += back_ns
            at_ns = self._last_ns
            if back_ns >= CLOCK_STEP_NS:
                name = f"the clock went back by {span_of(back_ns / 1e9)}"
                self._instant(RUN, EVENTS, name, "clock", at_ns, {"seq": record.seq, "seconds": back_ns / 1e9})
        self._last_ns = at_ns
        return at_ns

    # Groups ------------------------------------------------------------------------------------------

    def submitted(self, life: Life) -> None:
        self._open_group(life)
        self._dirty.add(life.partition)

    def came_back(self, life: Life) -> None:
        self._open_group(life, life.phase_ns)

    def _open_group(self, life: Life, at_ns: int | None = None) -> None:
        lane = self._lanes.take() if self._tracks == "lane" else life.number
        life.place = _Place(FIRST_GROUP + lane, lane, life.submitted_ns if at_ns is None else at_ns)
        self._name_group(life, lane)

    def _name_group(self, life: Life, lane: int) -> None:
        pid = FIRST_GROUP + lane
        named = self._lane_size.get(pid, -1)
        if named < 0:
            name = f"groups, lane {lane}" if self._tracks == "lane" else life.group_id
            self._name_process(pid, name)
            self._name_thread(pid, GROUP, "group")
            named = 0
        for session in range(named, life.size):
            self._name_thread(pid, session + FIRST_SESSION, f"session {session}")
        if self._tracks == "lane":
            self._lane_size[pid] = max(named, life.size)

    def phase_ended(self, life: Life, at_ns: int) -> None:
        self._dirty.add(life.partition)
        if life.phase is not Phase.COMMITTED:
            self._phase(life, at_ns)

    def _phase(self, life: Life, ended_ns: int | None) -> None:
        args: dict[str, Any] = {"group": life.group_id, "seq": life.phase_seq}
        if life.phase is Phase.SAMPLED:
            args |= {"batch": life.batch, "lag": life.lag}
        elif life.terminal is life.phase:
            args |= {"trajectories": life.rows, "tokens": life.response_tokens, "sampleable": life.ready}
        self._span(life.place.pid, GROUP, str(life.phase), "phase", life.phase_ns, ended_ns, args)

    def left(self, life: Life) -> None:
        assert life.left_ns is not None
        place = life.place
        args: dict[str, Any] = {"seq": life.left_seq, "lag": life.lag}
        ending = "committed"
        if life.evicted is not None:
            ending = f"evicted: {', '.join(life.evicted.reasons)}"
            args |= {"credit": life.evicted.credit, "message": one_line(life.evicted.message)}
            if life.evicted.shared_value is not None:
                args |= {"metric": life.evicted.metric, "shared_value": life.evicted.shared_value}
        self._instant(place.pid, GROUP, ending, "group", life.left_ns, {"group": life.group_id, **args})
        self._close_group(life, life.left_ns, ending)

    def _close_group(self, life: Life, ended_ns: int | None, ending: str) -> None:
        args = {
            "group": life.group_id,
            "seq": life.submitted_seq,
            "size": life.size,
            "partition": life.partition,
            "dataset": life.dataset,
            "cause": life.cause,
            "stamp": life.stamp,
            "end": ending,
        }
        self._span(life.place.pid, GROUP, life.group_id, "group", life.place.begun_ns, ended_ns, args)
        if self._tracks == "lane":
            self._lanes.give_back(life.place.lane)

    def group_final(self, life: Life) -> None:
        if life.left_ns is not None:
            return
        for session, (since_ns, attempt) in life.retries.items():
            self._retry(life, session, since_ns, attempt, None)
        self._phase(life, None)
        self._close_group(life, None, str(life.phase))

    # Attempts ----------------------------------------------------------------------------------------

    def attempt_ended(self, attempt: Attempt) -> None:
        if attempt.at_ns is None:
            name = f"{attempt.outcome} before it began"
            at_ns = self._last_ns if attempt.ended_ns is None else attempt.ended_ns
            told = {"seq": attempt.ended_seq, "attempt": attempt.attempt, "message": one_line(attempt.message)}
            self._instant(attempt.life.place.pid, attempt.session + FIRST_SESSION, name, "session", at_ns, told)
            return
        name = attempt.outcome or "open"
        if attempt.attempt > 1:
            name = f"{name}, attempt {attempt.attempt}"
        args: dict[str, Any] = {
            "group": attempt.life.group_id,
            "session": attempt.session,
            "attempt": attempt.attempt,
            "seq": attempt.seq,
            "end_seq": attempt.ended_seq,
        }
        if attempt.worker:
            args["worker"] = attempt.worker
        if attempt.started_version is not None:
            args["weight_version"] = attempt.started_version
        if rows := attempt.trajectories:
            args["trajectories"] = len(rows)
            args["tokens"] = rows[0].response_tokens if len(rows) == 1 else sum(row.response_tokens for row in rows)
            args["metrics"] = rows[-1].metrics
        elif attempt.outcome != "finished":
            args |= {"message": one_line(attempt.message), "retry_in_s": attempt.retry_in_s}
        pid, tid = attempt.life.place.pid, attempt.session + FIRST_SESSION
        self._span(pid, tid, name, "session", attempt.at_ns, attempt.ended_ns, args)

    def retried(self, life: Life, session: int, at_ns: int) -> None:
        since_ns, attempt = life.retries[session]
        self._retry(life, session, since_ns, attempt, at_ns)

    def _retry(self, life: Life, session: int, since_ns: int, attempt: int, at_ns: int | None) -> None:
        args = {"group": life.group_id, "session": session, "failed_attempt": attempt}
        self._span(life.place.pid, session + FIRST_SESSION, "waits for a retry", "retry", since_ns, at_ns, args)

    def _late(self, record: ev.Record, event: ev.ResultFenced, at_ns: int) -> None:
        life = self._lives.groups.get(event.group_id)
        pid, tid = (RUN, LATE) if life is None else (life.place.pid, event.session + FIRST_SESSION)
        self._instant(pid, tid, f"fenced: {event.reason}", "session", at_ns, as_object(record))

    # Batches -----------------------------------------------------------------------------------------

    def wait_ended(self, draw: Draw) -> None:
        self._wait(draw, draw.sampled_ns if draw.batch is not None else draw.ended_ns)
        # Where the groups' last spans begin, for the arrows from them to the batch.
        draw.place = [(life.place.pid, life.phase_ns) for life in draw.lives]

    def _wait(self, draw: Draw, ended_ns: int | None) -> None:
        if draw.requested_ns is None:
            return
        lane = self._thread_of("sample() waits", WAITS, draw.requested_ns, ended_ns)
        ended = f"batch {draw.batch}" if draw.batch is not None else draw.outcome
        args = {
            "request": draw.request,
            "seq": draw.requested_seq,
            "groups": draw.size,
            "partition": draw.partition,
            "weight_version": draw.requested_version,
            "end": ended,
            "reason": draw.reason if draw.batch is None else "",
        }
        name = f"waits for {counted(draw.size, 'group')}"
        self._span(TRAINER, lane, name, "wait", draw.requested_ns, ended_ns, args)

    def batch_ended(self, draw: Draw) -> None:
        self._batch(draw, draw.ended_ns)

    def _batch(self, draw: Draw, ended_ns: int | None) -> None:
        begun_ns = self._begin_ns if draw.sampled_ns is None else draw.sampled_ns
        lane = self._thread_of("batches", BATCHES, begun_ns, ended_ns)
        args = {
            "batch": draw.batch,
            "request": draw.request,
            "seq": draw.sampled_seq,
            "end_seq": draw.ended_seq,
            "partition": draw.partition,
            "weight_version": draw.weight_version,
            "groups": [life.group_id for life in draw.lives],
            "lags": list(draw.lags),
            "end": draw.outcome,
            "reason": draw.reason,
        }
        self._span(TRAINER, lane, f"batch {draw.batch}", "batch", begun_ns, ended_ns, args)
        for pid, since_ns in draw.place or ():
            self._flow += 1
            for ph, where, tid, at_ns in (("s", pid, GROUP, since_ns), ("f", TRAINER, lane, begun_ns)):
                arrow = self._event(ph, where, tid, at_ns, "sampled", "flow", None)
                self.out.append(arrow | {"id": self._flow} | ({"bp": "e"} if ph == "f" else {}))

    def draw_final(self, draw: Draw) -> None:
        if draw.outcome:
            return
        if draw.batch is None:
            self._wait(draw, None)
        else:
            self._batch(draw, None)

    def _thread_of(self, name: str, first: int, begun_ns: int, ended_ns: int | None) -> int:
        """A thread on which nothing is after `begun_ns`; spans come in the order in which they end."""
        busy = self._busy.setdefault(name, [])
        place = next((at for at, until_ns in enumerate(busy) if until_ns <= begun_ns), len(busy))
        if place == len(busy):
            busy.append(0)
            self._name_thread(TRAINER, first + place, name if not place else f"{name}, {place + 1}")
        busy[place] = self._last_ns if ended_ns is None else ended_ns
        return first + place

    # The run -----------------------------------------------------------------------------------------

    def version_ended(self, version: Version) -> None:
        begun_ns = self._begin_ns if version.at_ns is None else version.at_ns
        args = {"seq": version.seq, "lineage": version.lineage, "by": version.cause}
        self._span(RUN, WEIGHTS, f"version {version.weight_version}", "weights", begun_ns, version.ended_ns, args)

    def _opened(self, record: ev.Record, at_ns: int) -> None:
        """A process opens the run; the one before it may have ended without a word."""
        name, last_ns = f"opening {self._lives.openings}", self._lives.last_ns
        if self._held is not None:
            self._hold_ended(last_ns)
        if self._opening_ns is not None:
            end = {"end": "its process was gone; this is the last that it wrote"}
            self._span(RUN, OPENINGS, name, "run", self._opening_ns, last_ns, end)
        self._opening_ns = at_ns
        if isinstance(record.event, ev.RunRecovered):
            args = {**as_object(record), "seconds_since_last_event": (at_ns - last_ns) / 1e9}
            self._instant(RUN, OPENINGS, "opened again", "run", at_ns, args)

    def _tell(self, record: ev.Record, at_ns: int) -> None:
        event = record.event
        if isinstance(event, ev.RunStarted | ev.RunRecovered):
            self._counter("weight", "version", event.weight_version, at_ns)
            return
        if isinstance(event, ev.WeightsPublished):
            self._counter("weight", "version", event.weight_version, at_ns)
            name = f"published {event.weight_version}"
            self._instant(RUN, WEIGHTS, name, "weights", at_ns, as_object(record))
            return
        if isinstance(event, ev.AdmissionHeld):
            if self._held is not None:
                self._hold_ended(at_ns)
            self._held = (event.reason, at_ns, record.seq) if event.reason else None
            return
        if isinstance(event, ev.RunClosed):
            if self._opening_ns is not None:
                args = {"end": "closed", "reason": event.reason, "end_seq": record.seq}
                self._span(RUN, OPENINGS, f"opening {self._lives.openings}", "run", self._opening_ns, at_ns, args)
            self._opening_ns = None
        if isinstance(event, ev.RunRewound):
            self._counter("weight", "version", event.weight_version, at_ns)
        name = kind_of(event).replace("_", " ")
        text = in_words(event)
        self._instant(RUN, EVENTS, f"{name}: {text}" if text else name, "run", at_ns, as_object(record))

    def _hold_ended(self, at_ns: int, *, at_end: bool = False) -> None:
        assert self._held is not None
        reason, since_ns, seq = self._held
        self._held = None
        self._span(RUN, ADMISSION, one_line(reason), "run", since_ns, None if at_end else at_ns, {"seq": seq})

    def _count(self, at_ns: int) -> None:
        """The counters that have changed."""
        for partition in sorted(self._dirty):
            self._counter(f"in flight: {partition}", "groups", self._lives.in_flight[partition], at_ns)
            self._counter(f"sampleable: {partition}", "groups", self._lives.sampleable[partition], at_ns)
        self._dirty.clear()

    def _counter(self, name: str, series: str, value: int, at_ns: int) -> None:
        if self._counted.get(name) != value:
            self._counted[name] = value
            self.out.append(self._event("C", RUN, 0, at_ns, name, "counter", {series: value}))

    # Trace events ------------------------------------------------------------------------------------

    def _us(self, at_ns: int) -> float:
        assert self._origin_ns is not None
        return (at_ns - self._origin_ns) / 1000

    def _event(
        self, ph: str, pid: int, tid: int, at_ns: int, name: str, cat: str, args: dict[str, Any] | None
    ) -> TraceEvent:
        event = {"ph": ph, "pid": pid, "tid": tid, "ts": self._us(at_ns), "name": name, "cat": cat}
        if args is not None:
            event["args"] = args
        return event

    def _span(
        self, pid: int, tid: int, name: str, cat: str, begun_ns: int, ended_ns: int | None, args: dict[str, Any]
    ) -> None:
        """A complete event. One that is open at the log's end ends there."""
        if ended_ns is None:
            self.open_at_end += 1
            ended_ns, args["open_at_end"] = self._last_ns, True
        event = self._event("X", pid, tid, begun_ns, name, cat, args)
        event["dur"] = (ended_ns - begun_ns) / 1000
        self.out.append(event)

    def _instant(self, pid: int, tid: int, name: str, cat: str, at_ns: int, args: dict[str, Any]) -> None:
        self.out.append(self._event("i", pid, tid, at_ns, name, cat, args) | {"s": "t"})

    def _name_run(self) -> None:
        self._name_process(RUN, "run")
        for tid, name in THREADS.items():
            self._name_thread(RUN, tid, name)
        self._name_process(TRAINER, "trainer")

    def _name_process(self, pid: int, name: str) -> None:
        self._metadata("process_name", pid, 0, {"name": name})
        self._metadata("process_sort_index", pid, 0, {"sort_index": pid})

    def _name_thread(self, pid: int, tid: int, name: str) -> None:
        self._metadata("thread_name", pid, tid, {"name": name})

    def _metadata(self, name: str, pid: int, tid: int, args: dict[str, Any]) -> None:
        self.out.append({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": name, "args": args})


_TOLD: Final = frozenset(
    {
        ev.RunStarted,
        ev.RunRecovered,
        ev.RunRewound,
        ev.RunClosed,
        ev.WeightsPublished,
        ev.AdmissionHeld,
        ev.CheckpointMarked,
        ev.SourceExhausted,
        ev.SourceOpened,
        ev.DatasetStarved,
        ev.RefillForfeited,
        ev.ResultFenced,
    }
)
"""Kinds that are told of by themselves, not only as the ends of groups, attempts, waits and batches."""


def trace_events(
    records: Iterable[ev.Record], base: Book | None = None, *, tracks: Tracks = "group"
) -> Iterator[TraceEvent]:
    """The trace events of a log, as objects for JSON, made as the records come.

    Args:
        base: the book before the first of the records; None where they are all that there were.

    Raises:
        LogError: the log isn't one that a run wrote.
    """
    tracer = Tracer(base, tracks=tracks)
    for record in records:
        tracer.feed(record)
        yield from tracer.out
        tracer.out.clear()
    tracer.close()
    yield from tracer.out


def write_trace(
    records: Iterable[ev.Record],
    path: str | os.PathLike[str],
    base: Book | None = None,
    *,
    tracks: Tracks = "group",
    overwrite: bool = False,
) -> Traced:
    """Write the trace of a log to a file, packed by gzip where its name ends in `.gz`.

    Args:
        base: the book before the first of the records; None where they are all that there were.
        tracks: `group` gives each group tracks of its own; `lane` lets groups share them one after the other, so that a
            long run has no more than were alive at once.
        overwrite: the file may exist.

    Raises:
        BadInput: no records, or the file can't be written.
        LogError: the log can't be read, or isn't one that a run wrote. No file is left then.
    """
    target = Path(path)
    with whole_file(target, overwrite=overwrite) as beside:
        tracer = Tracer(base, tracks=tracks)
        first = last = None
        with _opened(beside, packed=target.name.endswith(".gz")) as file:
            writer = _Writer(file)
            for record in records:
                tracer.feed(record)
                if len(tracer.out) >= BUFFERED:
                    writer.write(tracer.out)
                first, last = first or record, record
            if first is None or last is None:
                raise BadInput("there are no events to make a trace of")
            tracer.close()
            writer.write(tracer.out)
            writer.finish(
                {
                    "began": time_of(first.at_ns if base is None else base.started_at_ns),
                    "first_seq": first.seq,
                    "last_seq": last.seq,
                    "tracks": tracks,
                }
            )
    return Traced(str(target), first.seq, last.seq, writer.count, tracer.open_at_end)


@contextlib.contextmanager
def _opened(path: Path, *, packed: bool) -> Iterator[IO[bytes]]:
    with path.open("wb") as plain:
        if not packed:
            yield plain
            return
        # Without a name and a time in it, so that the same log always makes the same file.
        with gzip.GzipFile("", "wb", LEVEL, plain, mtime=0) as file:
            yield file  # type: ignore[misc]


class _Writer:
    """A JSON object with an array of trace events, a part at a time."""

    def __init__(self, file: IO[bytes]) -> None:
        self.count = 0
        self._file = file
        self._encode = msgspec.json.Encoder().encode
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')

    def write(self, events: list[TraceEvent]) -> None:
        """Write these, and empty the list."""
        lines = b",\n".join(map(self._encode, events))
        self._file.write(b",\n" + lines if self.count and lines else lines)
        self.count += len(events)
        events.clear()

    def finish(self, told: dict[str, Any]) -> None:
        self._file.write(b'\n],"otherData":' + self._encode(told) + b"}\n")
