"""A run is awaited in the event loop that it was opened in; threads with loops of their own are told so at once."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import groupstate.sync
from groupstate import Run, open_run
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import RunIsClosed, SampleTimeout, WrongEventLoop

from .scenes import half_right, ready

WAIT_S = 30
"""Of a call that would hang without its check."""


async def elsewhere(call: Callable[[], Awaitable[Any]]) -> Any:
    """What comes of it in an event loop of another thread."""

    async def there() -> Any:
        return await call()

    return await asyncio.to_thread(asyncio.run, there())


async def turn(run: Run) -> None:
    async with run.trainer_turn():
        pass


AWAITED: dict[str, Callable[[Run], Awaitable[Any]]] = {
    "sample": lambda run: run.sample(1, timeout_s=WAIT_S),
    "commit": lambda run: run.commit(1),
    "release": lambda run: run.release(1),
    "publish weights": lambda run: run.publish_weights(1),
    "validate": lambda run: run.validate(["a"], timeout_s=WAIT_S),
    "mark a checkpoint": lambda run: run.checkpoint(),
    "wait for a change": lambda run: asyncio.wait_for(run.wait_changed(), WAIT_S),
    "wait for groups": lambda run: run.wait_sampleable(1, timeout_s=WAIT_S),
    "begin a trainer's turn": turn,
    "close": lambda run: run.close(),
}


@pytest.mark.parametrize("tried", AWAITED)
def test_what_is_awaited_in_another_event_loop_is_refused_at_once(tried):
    async def main() -> None:
        async with open_run(engine=ScriptedEngine([])) as run:
            ready(run, "a")
            await run.sample(1)
            before = run.book.last_seq
            with pytest.raises(WrongEventLoop, match=f"^cannot {tried} in this event loop: .* await it there"):
                await elsewhere(lambda: AWAITED[tried](run))
            assert run.book.last_seq == before
            await run.commit(1)

    asyncio.run(main())


@pytest.mark.parametrize("tried", AWAITED)
def test_of_a_closed_run_another_event_loop_hears_that_it_is_closed(tried):
    async def main() -> Run:
        async with open_run(engine=ScriptedEngine([])) as run:
            return run

    run = asyncio.run(main())

    if tried == "close":
        asyncio.run(run.close())
    else:
        with pytest.raises(RunIsClosed, match=f"cannot {tried}"):
            asyncio.run(AWAITED[tried](run))  # type: ignore[arg-type]


def test_the_runs_own_loop_answers_a_thread_that_asks_it():
    async def main() -> list[str]:
        async with open_run() as run:
            ready(run, "a")
            loop = asyncio.get_running_loop()
            asked = asyncio.run_coroutine_threadsafe
            batch = await asyncio.to_thread(lambda: asked(run.sample(1), loop).result(WAIT_S))
            return batch.group_ids

    assert asyncio.run(main()) == ["a"]


def test_a_run_is_opened_again_in_another_event_loop(tmp_path):
    async def once(name: str) -> str:
        async with open_run(tmp_path / "run") as run:
            ready(run, name)
            batch = await run.sample(1, timeout_s=WAIT_S)
            await run.commit(batch)
            await run.close()
            return batch.group_ids[0]

    assert [asyncio.run(once(name)) for name in ("a", "b")] == ["a", "b"]


def test_the_blocking_twin_is_called_from_any_thread():
    came: list[object] = []

    def worker() -> None:
        batch = run.sample(1, timeout_s=WAIT_S)
        run.commit(batch)
        came.extend([*batch.group_ids, run.checkpoint().mark, run.sampleable_count(), run.explain().sampleable])

    with groupstate.sync.open_run(source=["p"], session=half_right, group_size=2) as run:
        thread = threading.Thread(target=worker)
        thread.start()
        thread.join(WAIT_S)

    assert came == ["g1", 1, 0, 0]


def test_looking_waits_for_nobody_and_the_loop_looks_when_asked_to():
    async def main() -> None:
        async with open_run() as run:
            ready(run, "a")
            done: list[int] = []
            looking = threading.Thread(target=lambda: done.append(run.sampleable_count()))
            looking.start()
            looking.join(WAIT_S)  # The loop's own thread stands still meanwhile.
            assert done == [1]
            explained = await asyncio.to_thread(run.in_loop, run.explain)
            assert explained.sampleable == 1

    asyncio.run(main())


def test_a_time_out_in_the_runs_own_loop_is_what_it_was():
    async def main() -> None:
        async with open_run() as run:
            with pytest.raises(SampleTimeout):
                await run.sample(1, timeout_s=0)

    asyncio.run(main())
