"""Whoever waits for a number is woken when it is reached, in order, in his own loop."""

import asyncio
import collections
import gc
import threading
import weakref

from groupstate.log.waiters import FAR, Waiters


async def wait(waiters: Waiters, number: float, woken: list[float]) -> None:
    await waiters.add(number)
    woken.append(number)


async def waiting(waiters: Waiters, numbers: list[float], woken: list[float]) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(wait(waiters, number, woken)) for number in numbers]
    await asyncio.sleep(0)
    return tasks


async def test_those_who_came_out_of_order_are_woken_by_their_numbers():
    waiters, woken = Waiters(), []
    tasks = await waiting(waiters, [3, 7, 5, 5.5, 7, 1, 9], woken)
    waiters.wake(7)
    await asyncio.wait(tasks[:6])

    assert woken == [1, 3, 5, 5.5, 7, 7]
    waiters.wake(9)
    await tasks[6]


async def test_whoever_waits_for_the_end_of_all_numbers_holds_up_nobody():
    waiters, woken = Waiters(), []
    tasks = await waiting(waiters, [FAR, 1, 2], woken)
    (line,) = waiters._lines.values()
    assert [number for number, _ in line.in_order] == [1, 2]
    waiters.wake(2)
    await asyncio.wait(tasks[1:])

    assert woken == [1, 2]
    waiters.wake(float("inf"))
    await tasks[0]


async def test_a_number_that_nobody_waits_for_wakes_nobody():
    waiters, woken = Waiters(), []
    tasks = await waiting(waiters, [4, 2], woken)
    waiters.wake(1)
    await asyncio.sleep(0.01)
    assert woken == []
    waiters.wake(4)
    await asyncio.wait(tasks)

    assert woken == [2, 4]


async def test_a_line_that_empties_while_another_thread_looks_at_it_has_nobody_due():
    class Emptied(collections.deque):
        """As it looks to a thread between whose two steps the last one leaves."""

        def __bool__(self):
            return True

    waiters, woken = Waiters(), []
    (task,) = await waiting(waiters, [FAR], woken)
    (line,) = waiters._lines.values()
    line.in_order = Emptied()

    assert not line.is_due(5)
    assert line.is_due(FAR)
    task.cancel()


async def test_a_cancelled_waiter_is_passed_over():
    waiters, woken = Waiters(), []
    tasks = await waiting(waiters, [1, 1, 1], woken)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    waiters.wake(1)
    await asyncio.wait(tasks)

    assert woken == [1, 1]


def test_tasks_of_two_loops_are_woken_from_a_third_thread():
    waiters, woken, ready = Waiters(), [], threading.Barrier(3)

    async def one(number: int) -> None:
        future = waiters.add(number)
        ready.wait(5)
        await future
        woken.append(number)

    threads = [threading.Thread(target=lambda number=number: asyncio.run(one(number))) for number in (1, 2)]
    for thread in threads:
        thread.start()
    ready.wait(5)
    waiters.wake(2)
    for thread in threads:
        thread.join(5)

    assert sorted(woken) == [1, 2]


def test_a_closed_loop_is_let_go_of_when_the_next_one_comes():
    waiters = Waiters()

    async def leave() -> "weakref.ref[asyncio.AbstractEventLoop]":
        waiters.add(1)
        return weakref.ref(asyncio.get_running_loop())

    first = asyncio.run(leave())
    waiters.wake(1)
    assert first() is not None
    asyncio.run(leave())
    gc.collect()

    assert first() is None
