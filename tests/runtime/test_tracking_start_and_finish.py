"""How trackers are started and finished, with which exit code, and that each is of one run at a time."""

import asyncio
import os
import threading
from typing import Any

import anyio
import pytest

from groupstate import open_run
from groupstate.errors import BadSettings, MissingExtra, RolloutDied, RunIsClosed, TrackerFailed
from groupstate.runtime import tracking as tracking_module
from groupstate.runtime.tracking import Tracking, exit_code_of
from tests.runtime.trackers import Broken, Held, Kept

# Beginning --------------------------------------------------------------------------------------------


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


# The end ----------------------------------------------------------------------------------------------


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


# One tracker, two runs --------------------------------------------------------------------------------


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
