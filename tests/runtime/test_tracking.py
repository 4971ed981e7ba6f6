"""Trackers of a run: what they are sent, from which thread, and how they are finished."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from groupstate import Rules, Run, Trajectory, open_run
from groupstate import sync as blocking
from groupstate.errors import BadInput, BadSettings, MissingExtra, RolloutDied, RunIsClosed, TrackerFailed
from groupstate.runtime import tracking as tracking_module
from groupstate.runtime.tracked_signals import SignalWatch
from groupstate.runtime.tracking import Tracker, TrackerState, Tracking, exit_code_of


class Kept:
    """A tracker that keeps what it is sent."""

    name = "kept"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.came = threading.Semaphore(0)

    def start(self) -> None:
        self.calls.append(("start",))

    def log(self, metrics: Any, step: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(("log", dict(metrics), step))
        self.came.release()

    def log_table(self, name: str, columns: Any, rows: Any, step: int) -> None:
        self.calls.append(("table", name, tuple(columns), [tuple(row) for row in rows], step))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]

    @property
    def logged(self) -> list[tuple[dict[str, float], int]]:
        return self.of("log")  # type: ignore[return-value]

    @property
    def codes(self) -> list[int]:
        return [code for (code,) in self.of("finish")]


class Broken(Kept):
    """Raises wherever it is told to."""

    name = "broken"

    def __init__(self, *where: str, error: BaseException | None = None) -> None:
        super().__init__()
        self._where = where
        self._error = error or ConnectionError("no route")

    def _raise(self, where: str) -> None:
        if where in self._where:
            raise self._error

    def start(self) -> None:
        super().start()
        self._raise("start")

    def log(self, metrics: Any, step: int) -> None:
        super().log(metrics, step)
        self._raise("log")

    def log_table(self, name: str, columns: Any, rows: Any, step: int) -> None:
        super().log_table(name, columns, rows, step)
        self._raise("table")

    def finish(self, exit_code: int) -> None:
        super().finish(exit_code)
        self._raise("finish")


class Held(Kept):
    """Its calls take until it is let go."""

    name = "held"

    def __init__(self, *where: str) -> None:
        super().__init__()
        self._where = where
        self.go = threading.Event()
        self.reached = threading.Event()

    def _wait(self, where: str) -> None:
        if where in self._where:
            self.reached.set()
            assert self.go.wait(60)

    def start(self) -> None:
        self._wait("start")
        super().start()

    def log(self, metrics: Any, step: int) -> None:
        self._wait("log")
        super().log(metrics, step)

    def finish(self, exit_code: int) -> None:
        self._wait("finish")
        super().finish(exit_code)


async def alternating(ctx: Any) -> Trajectory:
    """Each third prompt's sessions end alike, at 0 or at 1."""
    number = ctx.prompt.content
    return Trajectory(response_ids=[1], reward=float(ctx.session if number % 3 else number % 2))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "groupstate.tracking")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "groupstate.tracking"]


def filtering(*trackers: Tracker, **options: Any) -> contextlib.AbstractAsyncContextManager[Run]:
    rules = Rules(filter_metric="reward", batch_size=2)
    return open_run(rules=rules, source=range(60), session=alternating, group_size=2, trackers=trackers, **options)


# What is sent ----------------------------------------------------------------------------------------


async def test_a_batch_is_sent_with_its_metrics_and_how_the_run_stands():
    kept = Kept()
    async with filtering(kept) as run:
        batch = await run.sample(2, weight_version=3)

    (logged, step), *_ = kept.logged
    assert step == 3
    assert batch.metrics.items() <= logged.items()
    assert logged["training/batch"] == batch.number
    assert logged["status/sampled"] == 2
    assert logged["status/weight_version"] == 3
    assert {type(value) for value in logged.values()} == {float}


async def test_the_values_of_filtered_groups_are_rows_of_a_table_of_each_step():
    kept = Kept()
    async with filtering(kept) as run:
        for version in range(6):
            await run.commit(await run.sample(2, weight_version=version))
        total = run.book.totals["evicted/zero_variance"]

    tables = kept.of("table")
    assert {(name, columns) for name, columns, _, _ in tables} == {
        ("training/filter_groups/filtered_values", ("step", "value", "groups"))
    }
    assert all(row[0] == step for _, _, rows, step in tables for row in rows)
    assert {row[1] for _, _, rows, _ in tables for row in rows} == {0.0, 1.0}
    assert sum(row[2] for _, _, rows, _ in tables for row in rows) <= total
    # No row is sent twice: what a step sends doesn't grow with the steps before it.
    assert max(len(rows) for _, _, rows, _ in tables) <= 2


async def test_a_step_without_filtered_groups_sends_no_table():
    kept = Kept()
    async with open_run(source=range(4), session=alternating, group_size=2, trackers=[kept]) as run:
        await run.sample(2)

    assert kept.of("table") == []


async def test_a_validation_round_is_sent_without_the_gauges_of_training():
    kept = Kept()
    async with filtering(kept) as run:
        await run.validate([1, 2])

    ((logged, _),) = kept.logged
    assert logged["validation/reward/mean"] == 0.5
    assert not [name for name in logged if name.startswith("status/")]


async def test_steps_can_be_the_numbers_of_batches():
    kept = Kept()
    async with filtering(kept, track_by="batch") as run:
        for _ in range(3):
            await run.commit(await run.sample(2))

    assert [step for _, step in kept.logged] == [1, 2, 3]


async def test_numbers_of_the_caller_are_sent_at_the_current_version_or_the_step_given():
    kept = Kept()
    async with open_run(trackers=[kept], weight_version=5) as run:
        run.track({"loss": 1, "is_best": True})
        run.track({"loss": math.nan}, step=9)

    (first, fifth), (second, ninth) = kept.logged
    assert (first, fifth) == ({"loss": 1.0, "is_best": 1.0}, 5)
    assert math.isnan(second["loss"])
    assert ninth == 9


@pytest.mark.parametrize(
    ("metrics", "step", "text"),
    [
        ([1], None, "metrics is [1]; it must be a dict of names and numbers"),
        ({3: 1.0}, None, "the name of a metric is 3; it must be a string"),
        ({"": 1.0}, None, "the name of a metric is ''; it must not be empty"),
        ({"loss": "1.0"}, None, "metric 'loss' is '1.0'; it must be one number"),
        ({"loss": bytearray(b"1")}, None, "metric 'loss' is bytearray(b'1'); it must be one number"),
        ({"loss": [1.0, 2.0]}, None, "metric 'loss' is [1.0, 2.0]; it must be one number"),
        ({"loss": 1.0}, 1.5, "step is 1.5; it must be an integer"),
    ],
)
async def test_what_is_no_number_is_refused_and_nothing_is_sent(metrics: Any, step: Any, text: str):
    kept = Kept()
    async with open_run(trackers=[kept]) as run:
        with pytest.raises(BadInput, match="must") as caught:
            run.track({**metrics, "other": 1.0} if isinstance(metrics, dict) else metrics, step=step)

    assert str(caught.value) == text
    assert kept.logged == []


async def test_a_run_without_trackers_takes_numbers_and_sends_nothing():
    async with filtering() as run:
        run.track({"loss": 1.0})
        await run.sample(2)

        assert run.trackers == ()


async def test_calls_to_a_tracker_come_in_order_from_one_thread_that_is_not_the_loops():
    kept = Kept()
    async with open_run(trackers=[kept]) as run:
        for step in range(50):
            run.track({"step": step}, step=step)

    assert [step for _, step in kept.logged] == list(range(50))
    assert kept.threads == {"tracker kept"}
    assert (kept.calls[0], kept.calls[-1]) == (("start",), ("finish", 0))


def test_a_blocking_run_sends_the_same():
    kept = Kept()
    with blocking.open_run(source=range(4), session=alternating, group_size=2, trackers=[kept]) as run:
        batch = run.sample(2)
        run.track({"loss": 0.5})
        assert run.trackers[0].name == "kept"

    assert kept.logged[0][0]["training/batch"] == batch.number
    assert kept.logged[1] == ({"loss": 0.5}, 0)
    assert kept.codes == [0]


# A tracker that fails, or is slow ---------------------------------------------------------------------


async def test_a_tracker_that_fails_is_warned_of_once_and_told_in_the_end(warnings: Any):
    kept, broken = Kept(), Broken("log")
    async with open_run(trackers=[broken, kept]) as run:
        for step in range(3):
            run.track({"loss": 1.0}, step=step)

    assert len(kept.logged) == len(broken.logged) == 3
    assert (kept.codes, broken.codes) == ([0], [0])
    assert run.trackers == (
        TrackerState("broken", 0, 3, 0, "ConnectionError: no route", True),
        TrackerState("kept", 3, 0, 0, "", True),
    )
    assert [state.is_whole for state in run.trackers] == [False, True]
    first, last = warnings()
    assert "a tracker failed; the run goes on" in first
    assert "did not get everything" in last
    assert "failed_count=3" in last


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)], ids=["error", "exit"])
async def test_a_tracker_that_fails_to_finish_keeps_no_other_from_it(error: BaseException, warnings: Any):
    kept, broken = Kept(), Broken("finish", error=error)
    async with open_run(trackers=[broken, kept]) as run:
        run.track({"loss": 1.0})

    assert (kept.codes, broken.codes) == ([0], [0])
    assert [state.finished for state in run.trackers] == [False, True]
    assert len(warnings()) == 2


async def test_a_tracker_that_changes_what_it_is_given_changes_it_for_itself_alone():
    class Greedy(Kept):
        def log(self, metrics: Any, step: int) -> None:
            super().log(metrics, step)
            metrics.clear()

        def log_table(self, name: str, columns: Any, rows: Any, step: int) -> None:
            super().log_table(name, columns, rows, step)
            rows.clear()

    greedy, beside = Greedy(), Held("log")
    async with filtering(greedy, beside) as run:
        await run.sample(2)
        run.track({"loss": 1.0})
        await anyio.to_thread.run_sync(lambda: [greedy.came.acquire(timeout=60) for _ in range(2)])
        beside.go.set()

    assert greedy.of("table")
    assert beside.calls == greedy.calls


async def test_a_slow_tracker_does_not_hold_the_run_up_and_what_it_misses_is_counted(
    monkeypatch: pytest.MonkeyPatch, warnings: Any
):
    monkeypatch.setattr(tracking_module, "QUEUED_CALLS_MAX", 5)
    held, kept = Held("log"), Kept()
    async with open_run(trackers=[held, kept]) as run:
        run.track({"n": 0}, step=0)
        await anyio.to_thread.run_sync(held.reached.wait)
        await anyio.to_thread.run_sync(kept.came.acquire)
        for step in range(1, 9):
            run.track({"n": step}, step=step)
            await anyio.to_thread.run_sync(kept.came.acquire)
        assert run.trackers[0].dropped_count == 3
        held.go.set()

    # The oldest are kept, in order: what came while the queue was full is lost.
    assert [step for _, step in held.logged] == [0, 1, 2, 3, 4, 5]
    assert [step for _, step in kept.logged] == list(range(9))
    assert held.codes == [0]
    slow, told = warnings()
    assert "slower than the run" in slow
    assert "dropped_count=3" in told


async def test_one_that_never_finishes_is_given_up(monkeypatch: pytest.MonkeyPatch, warnings: Any):
    monkeypatch.setattr(tracking_module, "FINISH_S", 0.05)
    held, kept = Held("finish"), Kept()
    async with open_run(trackers=[held, kept]) as run:
        pass

    assert [state.finished for state in run.trackers] == [False, True]
    (told,) = warnings()
    assert "did not get everything" in told
    assert "tracker='held'" in told
    held.go.set()


# Beginning -------------------------------------------------------------------------------------------


async def test_a_tracker_that_cannot_start_keeps_the_run_from_opening_and_the_others_are_finished(tmp_path: Any):
    before, broken, after = Kept(), Broken("start"), Kept()

    text = "the tracker 'broken' could not be opened: ConnectionError: no route. The run was not opened either"
    with pytest.raises(TrackerFailed, match=text) as failed:
        async with open_run(tmp_path / "run", trackers=[before, broken, after]):
            pass
    assert (failed.value.tracker, type(failed.value.__cause__)) == ("broken", ConnectionError)
    assert (before.codes, broken.codes, after.codes) == ([1], [], [1])
    assert not (tmp_path / "run").exists()


class CannotStart(Kept):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def start(self) -> None:
        raise self.error


async def test_one_that_ends_the_program_where_it_starts_ends_the_opening_alone():
    with pytest.raises(TrackerFailed, match="SystemExit: 3"):
        async with open_run(trackers=[CannotStart(SystemExit(3))]):
            pass


async def test_an_error_of_groupstates_own_where_a_tracker_starts_is_told_as_it_is():
    with pytest.raises(MissingExtra, match=r"^here needs a package; install the extra 'x'"):
        async with open_run(trackers=[CannotStart(MissingExtra("here", "a package", "x"))]):
            pass


async def test_one_that_is_still_starting_when_the_opening_is_cancelled_is_finished_once_it_has():
    held = Held("start")
    with anyio.move_on_after(0.02):
        threading.Timer(0.1, held.go.set).start()
        async with open_run(trackers=[held]):
            pytest.fail("it opened")

    assert held.calls == [("start",), ("finish", 1)]


async def test_trackers_are_finished_where_the_run_cannot_be_opened(tmp_path: Any):
    kept = Kept()
    (tmp_path / "file").touch()

    with pytest.raises(Exception, match="file"):
        async with open_run(tmp_path / "file", trackers=[kept]):
            pass
    assert kept.calls == [("start",), ("finish", 1)]


class NoStart:
    def log(self, metrics: Any, step: int) -> None: ...

    def log_table(self, name: str, columns: Any, rows: Any, step: int) -> None: ...

    def finish(self, exit_code: int) -> None: ...


async def test_a_start_and_a_name_are_optional():
    async with open_run(trackers=[NoStart()]) as run:
        assert run.trackers[0].name == "NoStart"
    assert run.trackers[0].is_whole


TWICE = NoStart()


@pytest.mark.parametrize(
    ("trackers", "text"),
    [
        (TWICE, "must be a list of trackers"),
        ("wandb", "must be a list of trackers"),
        (7, "must be a list of trackers"),
        (["wandb"], r"trackers has 'wandb', which is no tracker: one has log\(metrics, step\)"),
        ([NoStart], "trackers has the class NoStart; it must be an object of it"),
        ([TWICE, TWICE], "one tracker twice"),
    ],
    ids=["one", "text", "number", "no tracker", "class", "twice"],
)
async def test_what_is_no_list_of_trackers_is_refused(trackers: Any, text: str):
    with pytest.raises(BadSettings, match=text):
        async with open_run(trackers=trackers):
            pass


async def test_steps_by_something_else_are_refused():
    with pytest.raises(BadSettings, match="track_by is 'step'; it is one of weight_version, batch"):
        async with open_run(track_by="step"):  # type: ignore[arg-type]
            pass


# The end ---------------------------------------------------------------------------------------------


async def test_the_trackers_are_finished_after_the_run_has_closed():
    kept = Kept()
    async with open_run(trackers=[kept]) as run:
        await run.close()
        assert kept.codes == []
        with pytest.raises(RunIsClosed):
            run.track({"loss": 1.0})

    assert kept.codes == [0]


async def test_an_error_in_the_block_is_their_exit_code_too():
    kept = Kept()
    with pytest.raises(KeyError):
        async with open_run(trackers=[kept]):
            raise KeyError("mine")

    assert kept.codes == [1]


async def test_an_error_that_comes_with_the_closing_is_their_exit_code_too():
    kept = Kept()

    with pytest.raises(RolloutDied):
        async with open_run(trackers=[kept]) as run:
            run._controller.dead = SystemError("planted")

    assert kept.codes == [1]


async def test_a_run_closed_with_a_mark_ended_well_for_them():
    kept = Kept()
    with pytest.raises(RunIsClosed):
        async with open_run(trackers=[kept]) as run:
            await run.close("SIGTERM", mark=True)
            await run.sample(1)

    assert kept.codes == [0]


async def test_a_cancellation_waits_until_they_are_finished():
    held = Held("finish")
    entered = asyncio.Event()

    async def training() -> None:
        async with open_run(trackers=[held]):
            entered.set()

    task = asyncio.ensure_future(training())
    await anyio.to_thread.run_sync(held.reached.wait)
    task.cancel()
    await asyncio.sleep(0.02)
    assert not task.done()
    held.go.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.codes == [0]


@pytest.mark.parametrize(
    ("error", "number", "on_purpose", "code"),
    [
        (ValueError(), None, False, 1),
        (ValueError(), 15, True, 1),
        (SystemExit(), None, False, 0),
        (SystemExit(4), None, False, 4),
        (SystemExit("text"), None, False, 1),
        (KeyboardInterrupt(), None, False, 130),
        (asyncio.CancelledError(), None, False, 1),
        (asyncio.CancelledError(), 2, False, 130),
        (RunIsClosed("it is closed"), None, False, 1),
        (RunIsClosed("it is closed"), 15, False, 143),
        (RunIsClosed("it is closed"), 15, True, 0),
        (ExceptionGroup("both", [RunIsClosed("it is closed"), ValueError()]), None, True, 1),
        (BaseExceptionGroup("all", [ExceptionGroup("in", [RunIsClosed("closed")])]), None, True, 0),
    ],
    ids=str,
)
def test_the_exit_code_says_how_it_ended(error: BaseException, number: int | None, on_purpose: bool, code: int):
    assert exit_code_of(error, number, closed_on_purpose=on_purpose) == code


@pytest.mark.usefixtures("handlers")
async def test_finishing_twice_finishes_once(warnings: Any):
    broken = Broken("log")
    tracking = Tracking([broken])
    await tracking.start()
    tracking.track({"loss": 1.0}, None)
    tracking.finish_now(143)
    await tracking.finish(0)

    assert broken.logged == [({"loss": 1.0}, 0)]
    assert broken.codes == [143]
    # That it failed, and once what it lacks.
    assert len(warnings()) == 2
    with pytest.raises(RunIsClosed, match="trackers are finished"):
        tracking.track({"loss": 1.0}, None)


# Signals ---------------------------------------------------------------------------------------------


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_signal_handlers_are_back_in_place_once_the_run_is_closed():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with open_run(trackers=[Kept()]):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("trackers", [[], [Kept()]], ids=["none", "one"])
def test_a_blocking_run_watches_signals_on_the_thread_that_opened_it_if_it_has_trackers(trackers: list[Tracker]):
    before = signal.getsignal(signal.SIGTERM)
    with blocking.open_run(trackers=trackers):
        assert bool(trackers) is (signal.getsignal(signal.SIGTERM) is not before)

    assert signal.getsignal(signal.SIGTERM) is before


async def test_a_run_without_trackers_touches_no_signal_handler():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with open_run():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.usefixtures("handlers")
async def test_a_handler_that_was_there_goes_on_getting_its_signal():
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    kept = Kept()
    with pytest.raises(asyncio.CancelledError):
        async with open_run(trackers=[kept]):
            os.kill(os.getpid(), signal.SIGTERM)
            raise asyncio.CancelledError

    assert came == [signal.SIGTERM]
    assert kept.codes == [143]


async def test_signals_are_watched_again_while_trackers_finish_after_the_runs_own_handlers_went():
    seen: list[Any] = []

    def look() -> None:
        assert held.reached.wait(60)
        seen.append(signal.getsignal(signal.SIGTERM))
        held.go.set()

    held = Held("finish")
    looking = threading.Thread(target=look)
    looking.start()
    before = signal.getsignal(signal.SIGTERM)
    async with open_run(trackers=[held], close_on=["SIGTERM"]):
        pass
    looking.join()

    assert before is signal.SIG_DFL
    assert callable(seen[0])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("handlers")
async def test_a_handler_that_comes_later_is_left_alone():
    async def mine(number: int, frame: Any) -> None: ...

    async with open_run(trackers=[Kept()]) as run:
        signal.signal(signal.SIGTERM, mine)  # type: ignore[arg-type]
        run._tracking._threads = []  # Nothing is installed anew at the end.
        run._tracking._watch.remove()

        assert signal.getsignal(signal.SIGTERM) is mine


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_is_ignored_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch = SignalWatch(lambda number: None, lambda number: None)
    watch.install()

    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    watch.remove()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("forked", [False, True])
def test_a_signal_that_nobody_handles_kills_after_the_last_words(monkeypatch: pytest.MonkeyPatch, forked: bool):
    said: list[Any] = []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watch = SignalWatch(lambda number: said.append(("note", number)), lambda number: said.append(("last", number)))
    watch.install()
    watch.install()
    handler: Any = signal.getsignal(signal.SIGTERM)
    killed: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append((number, signal.getsignal(number))))
    if forked:
        # A child has the parent's handlers and none of its threads.
        monkeypatch.setattr(watch, "_process", os.getpid() + 1)
    handler(signal.SIGTERM, None)

    assert said == ([] if forked else [("note", signal.SIGTERM), ("last", signal.SIGTERM)])
    assert killed == [(signal.SIGTERM, signal.SIG_DFL)]
    watch.remove()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("first", [0, 1, 2], ids=["oldest", "middle", "latest"])
def test_watches_of_several_runs_are_all_told_and_removed_in_any_order(monkeypatch: pytest.MonkeyPatch, first: int):
    said: list[Any] = []

    def watch_of(run: int) -> SignalWatch:
        return SignalWatch(
            lambda number: said.append(("note", run)),
            lambda number: said.append(("last", run)),
            lambda: said.append(("wait", run)),
        )

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    before = signal.getsignal(signal.SIGINT)
    watches = [watch_of(run) for run in range(3)]
    for watch in watches:
        watch.install()
    watches[0].install()
    watches.pop(first).remove()
    handler: Any = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "kill", lambda process, number: said.append("killed"))
    handler(signal.SIGTERM, None)

    left = [run for run in (2, 1, 0) if run != first]
    assert said == [*[(what, run) for what in ("note", "last", "wait") for run in left], "killed"]
    signal.signal(signal.SIGTERM, handler)
    for watch in watches:
        watch.remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("handlers")
async def test_a_signal_that_nobody_handles_finishes_the_trackers_of_every_open_run(monkeypatch: pytest.MonkeyPatch):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    killed: list[int] = []
    earlier, later = Kept(), Kept()
    async with open_run(trackers=[earlier]), open_run(trackers=[later]):
        handler: Any = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(os, "kill", lambda process, number: killed.append(number))
        handler(signal.SIGTERM, None)

        assert (earlier.codes, later.codes) == ([143], [143])
    assert killed == [signal.SIGTERM]


@pytest.mark.usefixtures("handlers")
async def test_a_signal_before_all_trackers_are_started_finishes_those_that_are(monkeypatch: pytest.MonkeyPatch):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append(number))
    kept, never = Kept(), Kept()
    tracking = Tracking([kept, never])

    def signalled() -> None:
        handler: Any = signal.getsignal(signal.SIGTERM)
        handler(signal.SIGTERM, None)

    monkeypatch.setattr(tracking._threads[1], "start", signalled)
    starting = asyncio.create_task(tracking.start())
    await asyncio.sleep(0)

    assert (kept.codes, never.calls, killed) == ([143], [], [signal.SIGTERM])
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_a_further_signal_does_not_prolong_the_wait_for_trackers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking_module, "FINISH_S", 0.05)
    held = Held("finish")
    tracking = Tracking([held])
    await tracking.start()
    tracking.finish_now(143)
    monkeypatch.setattr(tracking_module, "FINISH_S", 60.0)
    with anyio.fail_after(5):
        await anyio.to_thread.run_sync(tracking.finish_now, 143, abandon_on_cancel=True)

    assert not tracking.states()[0].finished
    held.go.set()
    tracking._watch.remove()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("before", [0, 1], ids=["none before", "one before"])
async def test_a_second_signal_ends_the_wait_for_trackers_and_says_which_were_left(before: int, warnings: Any):
    signal.signal(signal.SIGINT, lambda number, frame: None)
    held, kept = Held("finish"), Kept()
    tracking = Tracking([held, kept])
    await tracking.start()
    for _ in range(before):
        signal.raise_signal(signal.SIGINT)
    finishing = asyncio.create_task(tracking.finish(0))
    await asyncio.to_thread(held.reached.wait)
    for _ in range(1 - before):
        signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(0.02)
    waited = not finishing.done()
    signal.raise_signal(signal.SIGINT)
    with anyio.fail_after(5):
        await finishing

    assert waited
    assert [state.finished for state in tracking.states()] == [False, True]
    left = [text for text in warnings() if "left unclosed, since a second signal came" in text]
    assert len(left) == 1
    assert "tracker='held'" in left[0]
    signal.raise_signal(signal.SIGINT)
    held.go.set()


@pytest.mark.usefixtures("handlers")
def test_it_ends_the_wait_of_a_process_that_dies_too(monkeypatch: pytest.MonkeyPatch, warnings: Any):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append(number))
    held = Held("finish")

    async def signalled() -> None:
        tracking = Tracking([held])
        await tracking.start()
        again = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.start()
        handler: Any = signal.getsignal(signal.SIGTERM)
        handler(signal.SIGTERM, None)
        again.join()
        tracking._watch.remove()

    began = time.monotonic()
    asyncio.run(signalled())
    held.go.set()

    assert time.monotonic() - began < 10
    assert killed == [signal.SIGTERM]
    assert any("left unclosed" in text for text in warnings())


HUNG = """
    import asyncio, sys, time
    from groupstate import open_run, sync

    class Hung:
        name = "hung"
        def log(self, metrics, step): pass
        def log_table(self, name, columns, rows, step): pass
        def finish(self, exit_code):
            print("finishing", flush=True)
            time.sleep(600)

    async def run():
        async with open_run(trackers=[Hung()]):
            print("open", flush=True)
            await asyncio.sleep(600)

    if sys.argv[1] == "async":
        asyncio.run(run())
    else:
        with sync.open_run(trackers=[Hung()]):
            print("open", flush=True)
            time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["async", "blocking"])
def test_ctrl_c_twice_ends_a_program_whose_tracker_hangs(kind: str):
    command = [sys.executable, "-c", textwrap.dedent(HUNG), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for said in ("open", "finishing"):
            assert program.stdout.readline().strip() == said
            program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=30)

    assert program.returncode != 0
    assert "left unclosed" in errors
    assert "hung" in errors


# One tracker, two runs -------------------------------------------------------------------------------


async def test_a_tracker_of_a_run_that_is_open_is_refused_and_nothing_is_started():
    mine, other = Kept(), Kept()
    async with open_run(trackers=[mine]):
        with pytest.raises(BadSettings, match="the tracker 'kept' is in use: another run has it that is still open"):
            async with open_run(trackers=[other, mine]):
                pass

    assert (mine.codes, other.calls) == ([0], [])


async def test_once_that_run_has_closed_it_can_be_used_again():
    kept = Kept()
    for _ in range(2):
        async with open_run(trackers=[kept]):
            pass

    assert kept.codes == [0, 0]


async def test_so_it_can_where_it_did_not_start():
    broken = Broken("start")
    for _ in range(2):
        with pytest.raises(TrackerFailed):
            async with open_run(trackers=[broken]):
                pass

    assert broken.calls == [("start",), ("start",)]


async def test_one_that_was_given_up_stays_in_use_until_it_has_finished(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking_module, "FINISH_S", 0.05)
    held = Held("finish")
    async with open_run(trackers=[held]) as run:
        pass
    with pytest.raises(BadSettings, match="in use"):
        async with open_run(trackers=[held]):
            pass
    held.go.set()
    run._tracking._threads[0].join(10)
    async with open_run(trackers=[held]):
        pass

    assert held.codes == [0, 0]


async def test_a_process_that_was_forked_off_has_none_of_them(monkeypatch: pytest.MonkeyPatch):
    kept = Kept()
    process = os.getpid()
    async with open_run(trackers=[kept]):
        monkeypatch.setattr(os, "getpid", lambda: process + 1)
        forked = Tracking([kept])
        await forked.start()
        monkeypatch.setattr(os, "getpid", lambda: process)
        await forked.finish(0)

    assert kept.codes == [0, 0]


def test_off_the_main_thread_no_handler_is_touched():
    before = signal.getsignal(signal.SIGTERM)
    watch = SignalWatch(lambda number: None, lambda number: None)

    def elsewhere() -> None:
        watch.install()
        watch.remove()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()

    assert signal.getsignal(signal.SIGTERM) is before
