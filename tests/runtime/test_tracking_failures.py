"""Trackers that fail, are slow or never finish: the run goes on, and says so."""

from typing import Any

import anyio
import pytest

from groupstate import open_run
from groupstate.runtime import tracking as tracking_module
from groupstate.runtime.tracking import TrackerState
from tests.runtime.trackers import Broken, Held, Kept, filtering


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
