"""Signals that come while trackers are open: they are finished all the same, and handlers are back in place."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import anyio
import pytest

from groupstate import open_run
from groupstate import sync as blocking
from groupstate.runtime import tracking as tracking_module
from groupstate.runtime.tracked_signals import SignalWatch
from groupstate.runtime.tracking import Tracker, Tracking
from tests.runtime.trackers import Held, Kept


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
