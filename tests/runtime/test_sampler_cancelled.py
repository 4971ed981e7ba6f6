"""Samples that are cancelled while they wait, or in the turn of their answer: they take nothing along."""

import asyncio
import itertools
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import anyio

from groupstate import Batch, Rules, open_run
from groupstate.core import events as ev
from tests.runtime.scenes import check, ended, events, finish, opened, quiet, ready, started, virtual


@virtual
async def test_a_cancelled_waiter_takes_nothing(loop):
    async with opened(loop) as run:
        ready(run, "a")
        waiting = started(run.sample(2))
        await quiet()

        await ended(waiting)
        ready(run, "b")

        assert run.sampleable_count() == 2
        assert events(run, ev.BatchSampled) == []
        assert [event.reason for event in events(run, ev.BatchRequestCancelled)] == ["cancelled"]


@virtual
async def test_the_waiter_behind_one_that_is_cancelled_as_its_group_comes_gets_the_group(loop):
    async with opened(loop) as run:
        first, second = started(run.sample(1)), started(run.sample(1))
        await quiet()

        ready(run, "a")
        first.cancel()

        assert (await second).group_ids == ["a"]
        assert first.cancelled()


@virtual
async def test_a_waiter_cancelled_in_the_turn_of_its_answer_gives_its_groups_back(loop):
    async with opened(loop) as run:
        waiting = started(run.sample(2))
        await quiet()

        ready(run, "a", "b")
        await ended(waiting)

        assert [event.reason for event in events(run, ev.BatchReturned)] == ["cancelled"]
        assert (await run.sample(2)).group_ids == ["a", "b"]


@virtual
async def test_a_scope_that_is_cancelled_in_the_turn_of_the_answer_gives_its_groups_back(loop):
    async with opened(loop) as run:
        with anyio.CancelScope() as scope:
            loop.call_soon(ready, run, "a")
            loop.call_soon(scope.cancel)
            await run.sample(1)

        assert scope.cancelled_caught
        assert run.sampleable_count() == 1


@virtual
async def test_a_batch_that_was_released_by_its_number_is_not_given_back_again(loop):
    async with opened(loop) as run:
        waiting = started(run.sample(1))
        await quiet()
        ready(run, "a")
        await run.release(1)

        await ended(waiting)

        assert [event.reason for event in events(run, ev.BatchReturned)] == ["released"]
        assert run.sampleable_count() == 1


class CancelledAt:
    """Awaits a coroutine and has the task cancelled at its n-th suspension."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int) -> None:
        self._coroutine = coroutine
        self._at = at
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        resume = self._coroutine.send, None
        while True:
            try:
                future = resume[0](resume[1])
            except StopIteration as stop:
                return stop.value
            self.suspensions += 1
            if self.suspensions == self._at:
                task = asyncio.current_task()
                assert task is not None
                task.get_loop().call_soon(task.cancel)
            try:
                yield future
                resume = self._coroutine.send, None
            except BaseException as error:
                resume = self._coroutine.throw, error


async def sampled_but_cancelled(run, at: int) -> tuple[bool, Batch | None]:
    """Wait for two groups, cancelled at the n-th suspension. Was it, and what came of it?"""
    call = CancelledAt(run.sample(2), at)
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    ready(run, "b")
    await asyncio.wait({task})
    reached = call.suspensions >= at
    return reached, None if task.cancelled() else task.result()


@virtual
async def test_cancelled_at_whatever_await_nothing_is_lost(loop):
    for at in itertools.count(1):
        async with opened(loop, rules=Rules(stall_s=0)) as run:
            ready(run, "a")

            reached, batch = await sampled_but_cancelled(run, at)

            left = run.sampleable_count()
            assert (left, batch is None) == ((2, True) if batch is None else (0, False))
            check(run)
        if not reached:
            break

    assert at > 1


async def test_cancelled_at_whatever_await_nothing_is_lost_with_threads_and_a_disk(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("groupstate.log.payloads.RECENT_BYTES_MAX", 0)
    delivered = []
    for at in itertools.count(1):
        async with open_run(tmp_path / str(at), group_size=1) as run:
            finish(run.submit("text", group_id="a"), 1.0)

            reached, batch = await sampled_but_cancelled(run, at)

            delivered.append(batch is not None)
            assert run.sampleable_count() == (0 if batch else 2)
            check(run)
            if batch is None:
                assert (await run.sample(2)).group_ids == ["a", "b"]
        if not reached:
            break

    assert at > 3, "the answer, its durability and the payloads are waited for"
    assert delivered[-1]
