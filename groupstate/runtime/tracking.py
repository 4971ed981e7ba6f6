"""Sends a run's numbers to experiment trackers, such as W&B, TensorBoard or a file.

Rule 1: the run never waits for a tracker. Each has a thread and a bounded queue of its own; what doesn't fit is dropped
and counted.
Rule 2: a tracker's fault is that tracker's alone: it is warned of once, counted, and told in the end.
Rule 3: every tracker that was started is finished exactly once, with a code that says how the run ended.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, get_args, runtime_checkable

import anyio
import attrs

from groupstate.batch import Batch
from groupstate.core.arguments import integer, shown, string
from groupstate.core.book import Book
from groupstate.core.events import TRAIN
from groupstate.core.metrics import prefix
from groupstate.core.near import meant
from groupstate.core.phases import Phase
from groupstate.errors import BadInput, BadSettings, GroupstateError, RunIsClosed, TrackerFailed
from groupstate.logs import Logger
from groupstate.runtime.session import describe
from groupstate.runtime.tracked_signals import SignalWatch

log = Logger("groupstate.tracking")

QUEUED_CALLS_MAX: Final = 1_000
"""Calls that wait for one tracker. A step makes two or three, so a tracker may be hundreds of steps behind."""

FINISH_S: Final = 60.0
"""Seconds that trackers get together to finish, since some send the last of what they have only then."""

SLICE_S: Final = 0.1
"""Seconds that are waited for trackers at a time. Python handles a signal only once its main thread wakes, and one that
came to another thread doesn't wake it."""

FAILED: Final = 1
SIGNAL_CODE: Final = 128
"""What a shell adds to the number of the signal that ended a program."""

TrackBy = Literal["weight_version", "batch"]

FILTERED_VALUES: Final = "filter_groups/filtered_values"
FILTERED_COLUMNS: Final = ("step", "value", "groups")

STATUS_PHASES: Final = (Phase.PENDING, Phase.RUNNING, Phase.FINISHED, Phase.FAILURE, Phase.SAMPLED)


@runtime_checkable
class Tracker(Protocol):
    """Where numbers go. All calls of one tracker come from one thread, in order; they may block and may raise.

    A tracker may also have `start()`, which is called first: what it raises keeps the run from being opened, as the
    cause of a `TrackerFailed`. A `name` is what warnings call it by; without one it is that of its class.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers of one step. Several calls may have the same step, and a run that went back goes through steps
        again."""
        ...

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Rows that are new in a table that only grows; its columns are always the same."""
        ...

    def finish(self, exit_code: int) -> None:
        """The last call. 0 is success, 128 + n an end by signal n, anything else an error."""
        ...


@attrs.frozen
class TrackerState:
    """What became of the calls to one tracker."""

    name: str
    logged_count: int
    """Calls that it took."""
    failed_count: int
    """Calls that raised."""
    dropped_count: int
    """Calls that found its queue full and were never made."""
    first_error: str
    """What it raised first; empty if it never did."""
    finished: bool
    """`finish` was called and returned."""

    @property
    def is_whole(self) -> bool:
        """It was given everything, and is closed."""
        return self.finished and not self.failed_count and not self.dropped_count


Call = Callable[[Tracker], None]


class TrackerThread:
    """One tracker, its queue, and the thread that makes its calls."""

    def __init__(self, tracker: Tracker) -> None:
        self.name = str(getattr(tracker, "name", type(tracker).__name__))
        self._tracker = tracker
        # Its put() may be called by a signal handler that interrupted another put().
        self._calls: queue.SimpleQueue[Call | int] = queue.SimpleQueue()
        self._logged = self._failed = self._dropped = 0
        self._first_error = ""
        self._finished = False
        self.started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        # A daemon: one that hangs for good must not keep the program from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)

    @property
    def tracker(self) -> Tracker:
        return self._tracker

    def start(self) -> None:
        self._thread.start()

    def offer(self, call: Call) -> None:
        """Have a call made in its turn; dropped and counted if too many wait already."""
        if self._calls.qsize() < QUEUED_CALLS_MAX:
            self._calls.put(call)
            return
        self._dropped += 1
        if self._dropped == 1:
            log.warning(
                "a tracker is slower than the run; what doesn't fit into its queue is dropped",
                tracker=self.name,
                queued=QUEUED_CALLS_MAX,
            )

    def end(self, exit_code: int) -> None:
        """Finish once everything before is done. The first of several codes counts."""
        self._calls.put(exit_code)

    def is_alive(self) -> bool:
        """It runs; a signal may come while only some have been started."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def state(self) -> TrackerState:
        return TrackerState(self.name, self._logged, self._failed, self._dropped, self._first_error, self._finished)

    def _work(self) -> None:
        self._make_calls()
        _IN_USE.pop(id(self._tracker), None)
        self.ended.set_result(None)

    def _make_calls(self) -> None:
        try:
            getattr(self._tracker, "start", _nothing)()
        except BaseException as error:
            self._failed += 1
            self._first_error = describe(error)
            self.started.set_exception(self._cannot_start(error))
            return
        self.started.set_result(None)
        while not isinstance(call := self._calls.get(), int):
            if self._made(call):
                self._logged += 1
        exit_code = call
        self._finished = self._made(lambda tracker: tracker.finish(exit_code))

    def _cannot_start(self, error: BaseException) -> GroupstateError:
        """What a tracker raised, as an error of groupstate's; one that is such says by itself what would be right."""
        if isinstance(error, GroupstateError):
            return error
        failed = TrackerFailed(self.name, self._first_error)
        failed.__cause__ = error
        return failed

    def _made(self, call: Call) -> bool:
        """Make a call; whether it went well."""
        try:
            call(self._tracker)
        except BaseException as error:
            # It is foreign code: whatever it raises, the calls to come and the end must still be made.
            self._failed += 1
            if not self._first_error:
                self._first_error = describe(error)
                log.warning("a tracker failed; the run goes on", tracker=self.name, error=self._first_error)
            return False
        return True


def _nothing() -> None:
    pass


_IN_USE: Final[dict[int, tuple[Tracker, int]]] = {}
"""By its id: trackers whose threads haven't ended, and the process that they run in. A fork has none of the threads."""
_CLAIMING: Final = threading.Lock()


def _claim(threads: Sequence[TrackerThread]) -> None:
    """Nobody else may use these trackers until their threads have ended.

    Raises:
        BadSettings: somebody does.
    """
    process = os.getpid()
    with _CLAIMING:
        for thread in threads:
            if _IN_USE.get(id(thread.tracker), (None, 0))[1] == process:
                raise BadSettings(
                    f"the tracker {thread.name!r} is in use: another run has it that is still open, or that gave it up "
                    "while it was finishing. Numbers of two runs would be mixed, and it would be finished twice; give "
                    "each run a tracker of its own"
                )
        _IN_USE.update({id(thread.tracker): (thread.tracker, process) for thread in threads})


class Tracking:
    """All trackers of one run."""

    def __init__(self, trackers: Sequence[Tracker] = (), *, by: TrackBy = "weight_version") -> None:
        """
        Raises:
            BadSettings: something that is no tracker, one that is given twice, or no such `by`.
        """
        if by not in get_args(TrackBy):
            known = get_args(TrackBy)
            raise BadSettings(f"track_by is {shown(by)}; it is one of {', '.join(known)}{meant(by, known)}")
        self._by = by
        self._threads = [TrackerThread(tracker) for tracker in _checked(trackers)]
        self._book: Book | None = None
        self._begun = False
        self._over = False
        self._until: float | None = None
        """When whoever hasn't finished is given up."""
        self._given_up = False
        """A second signal came while they finish: nobody waits for them any more."""
        self._watch = SignalWatch(self._note, lambda number: self._end(SIGNAL_CODE + number), self._wait_now)
        self.signal: int | None = None
        """The last signal that came to end the program."""

    def states(self) -> tuple[TrackerState, ...]:
        return tuple(thread.state() for thread in self._threads)

    # Beginning and end -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every tracker.

        Raises:
            BadSettings: one of them is in use by another run; none was started.
            TrackerFailed: of the first one that couldn't start; `finish` is due all the same, for those that could.
        """
        if not self._threads:
            return
        _claim(self._threads)
        self._begun = True
        self._watch.install()
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            await asyncio.shield(asyncio.wrap_future(thread.started))

    def follow(self, book: Book) -> None:
        """Whose status is sent along with batches."""
        self._book = book

    async def finish(self, exit_code: int) -> None:
        """Finish every tracker and wait for it, whoever is cancelled meanwhile, but not after a second signal; only the
        first call does anything.

        Raises:
            CancelledError: the caller was cancelled while it waited.
        """
        if self._over or not self._begun:
            return
        # Who handled signals while the run was open may be gone.
        self._watch.install()
        until = self._end(exit_code)
        cancelled: asyncio.CancelledError | None = None
        pending = {asyncio.wrap_future(thread.ended) for thread in self._threads}
        try:
            with anyio.CancelScope(shield=True):
                while pending and not self._given_up and (left_s := until - time.monotonic()) > 0:
                    try:
                        _, pending = await asyncio.wait(pending, timeout=min(left_s, SLICE_S))
                    except asyncio.CancelledError as error:
                        cancelled = error
        finally:
            self._watch.remove()
            self._tell()
        if cancelled is not None:
            raise cancelled

    def finish_now(self, exit_code: int) -> None:
        """The same without an event loop, for a signal handler: the program ends after it. It may interrupt anything,
        `finish` included."""
        self._end(exit_code)
        self._wait_now()

    def _wait_now(self) -> None:
        assert self._until is not None
        for thread in self._threads:
            while not self._given_up and thread.is_alive() and (left_s := self._until - time.monotonic()) > 0:
                thread.join(min(left_s, SLICE_S))
        self._tell()

    @contextlib.contextmanager
    def on_main_thread(self) -> Iterator[None]:
        """Watch signals from here, for a run whose event loop is in another thread, which can't."""
        if self._begun:
            self._watch.install()
        try:
            yield
        finally:
            self._watch.remove()

    def _note(self, number: int) -> None:
        """A signal came. A second one while trackers finish says that whoever sent it won't wait for them."""
        if self.signal is not None and self._over:
            self._given_up = True
        self.signal = number

    def _end(self, exit_code: int) -> float:
        """Have every tracker finish; until when it is waited for them, however often they are told."""
        self._over = True
        if self._until is None:
            self._until = time.monotonic() + FINISH_S
        for thread in self._threads:
            thread.end(exit_code)
        return self._until

    def _tell(self) -> None:
        """Say which trackers lack something."""
        for state in self.states():
            if self._given_up and not state.finished:
                log.warning("a tracker was left unclosed, since a second signal came", tracker=state.name)
            if not state.is_whole:
                log.warning(
                    "a tracker did not get everything",
                    tracker=state.name,
                    logged_count=state.logged_count,
                    failed_count=state.failed_count,
                    dropped_count=state.dropped_count,
                    finished=state.finished,
                    error=state.first_error,
                )

    # What is sent ------------------------------------------------------------------------------------

    def sampled(self, batch: Batch) -> None:
        """Send what a batch tells, and how the run stands."""
        if not self._threads:
            return
        step = batch.weight_version if self._by == "weight_version" else batch.number
        start = prefix(batch.partition)
        metrics = {**batch.metrics, f"{start}batch": float(batch.number)}
        if self._book is not None and batch.partition == TRAIN:
            metrics |= status(self._book)
        self._offer(lambda tracker: tracker.log(dict(metrics), step))  # Its own: it may change it.
        rows = [
            (step, value, count) for value, count in sorted(batch.tally.histograms.get(FILTERED_VALUES, {}).items())
        ]
        if rows:
            self._offer(
                lambda tracker: tracker.log_table(f"{start}{FILTERED_VALUES}", FILTERED_COLUMNS, list(rows), step)
            )

    def track(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """Send the caller's own numbers.

        Raises:
            BadInput: a name or a value that can't be sent; nothing was.
            RunIsClosed: the trackers are finished.
        """
        if not isinstance(metrics, Mapping):
            raise BadInput(f"metrics is {shown(metrics)}; it must be a dict of names and numbers")
        if "" in metrics:
            raise BadInput("the name of a metric is ''; it must not be empty")
        numbers = {string("the name of a metric", name): _number(name, value) for name, value in metrics.items()}
        if step is None:
            step = 0 if self._book is None else self._book.weight_version
        whole_step = integer("step", step)
        if self._over:
            raise RunIsClosed("cannot track: the run's trackers are finished")
        self._offer(lambda tracker: tracker.log(dict(numbers), whole_step))

    def _offer(self, call: Call) -> None:
        if self._begun and not self._over:
            for thread in self._threads:
                thread.offer(call)


def status(book: Book) -> dict[str, float]:
    """How a run stands, as gauges. Its cost doesn't grow with the run."""
    gauges = {f"status/{phase}": book.count(phase, partition=TRAIN) for phase in STATUS_PHASES}
    gauges |= {
        "status/in_flight": book.in_flight_count(),
        "status/sampleable": book.ready_count(),
        "status/refills_owed": len(book.credits),
        "status/admission_held": bool(book.held_reason),
        "status/batches_out": len(book.batches),
        "status/weight_version": book.weight_version,
        "status/lineage": book.lineage,
        "status/events": book.last_seq,
    }
    return {name: float(value) for name, value in gauges.items()}


def exit_code_of(error: BaseException, signal: int | None, *, closed_on_purpose: bool = False) -> int:
    """What a run's end by an error means to a tracker.

    Args:
        signal: one that came, and may be behind the error.
        closed_on_purpose: the run was closed with a mark, to be gone on with; that waiters were told is no error.
    """
    return max(_code(leaf, signal, closed_on_purpose) for leaf in _leaves(error))


def _code(error: BaseException, signal: int | None, closed_on_purpose: bool) -> int:
    if isinstance(error, RunIsClosed) and closed_on_purpose:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return SIGNAL_CODE + 2
    if isinstance(error, asyncio.CancelledError | RunIsClosed) and signal is not None:
        return SIGNAL_CODE + signal
    return FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _checked(trackers: Any) -> list[Tracker]:
    if isinstance(trackers, Tracker) or not isinstance(trackers, Sequence) or isinstance(trackers, str):
        raise BadSettings(
            f"trackers is {shown(trackers)}; it must be a list of trackers, such as [JsonLines('m.jsonl')]"
        )
    for tracker in trackers:
        if isinstance(tracker, type):
            raise BadSettings(f"trackers has the class {tracker.__name__}; it must be an object of it")
        if not isinstance(tracker, Tracker):
            raise BadSettings(
                f"trackers has {shown(tracker)}, which is no tracker: one has log(metrics, step), "
                "log_table(name, columns, rows, step) and finish(exit_code)"
            )
    if len({id(tracker) for tracker in trackers}) < len(trackers):
        raise BadSettings("trackers has one tracker twice, which would get everything twice; give each once")
    return list(trackers)


def _number(name: str, value: Any) -> float:
    """A number of whatever library; one that is not finite is sent too, since it says that something went wrong."""
    if not isinstance(value, str | bytes | bytearray | memoryview):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise BadInput(f"metric {shown(name)} is {shown(value)}; it must be one number")
