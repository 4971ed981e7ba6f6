"""The loop whose clock jumps."""

import asyncio
import os
import re
import signal
import socket

import anyio
import pytest

from groupstate.simulate.loop import EPOCH_NS, Deadlock, VirtualLoop, run_virtual


def test_hours_pass_in_no_time_and_in_order():
    async def main(loop: VirtualLoop) -> list[tuple[str, float]]:
        seen = []

        async def sleeper(name: str, seconds: float) -> None:
            await anyio.sleep(seconds)
            seen.append((name, loop.time()))

        async with anyio.create_task_group() as tasks:
            for name, seconds in [("late", 7200.0), ("early", 1.5), ("middle", 60.0)]:
                tasks.start_soon(sleeper, name, seconds)
        return seen

    assert run_virtual(main) == [("early", 1.5), ("middle", 60.0), ("late", 7200.0)]


@pytest.mark.parametrize("seconds", [31_536_000.0, 1e9 + 0.1])
def test_years_pass_too_though_a_float_is_coarse_out_there(seconds: float):
    async def main(loop: VirtualLoop) -> float:
        await asyncio.sleep(seconds)
        await asyncio.sleep(1.0)
        return loop.time()

    assert run_virtual(main) == pytest.approx(seconds + 1.0, rel=1e-15, abs=1e-6)


def test_the_wall_clock_goes_with_the_loops():
    async def main(loop: VirtualLoop) -> tuple[int, int]:
        before = loop.clock_ns()
        await asyncio.sleep(2.5)
        return before, loop.clock_ns()

    assert run_virtual(main) == (EPOCH_NS, EPOCH_NS + 2_500_000_000)


def test_a_deadlock_is_an_error_at_once():
    async def main(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(Deadlock, match="every task is blocked"):
        run_virtual(main)


def notes_of(main):
    with pytest.raises(Deadlock) as raised:
        run_virtual(main)
    return raised.value.__notes__


def test_a_deadlock_says_which_tasks_wait_and_at_which_line_of_whose_code():
    async def waiting(event):
        await event.wait()

    async def main(loop: VirtualLoop) -> None:
        loop.explainers.append(lambda: "nobody sets the event")
        asyncio.current_task().set_name("main")
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(waiting, anyio.Event(), name=f"session {number}")

    main_waits, sessions_wait, told = notes_of(main)

    assert re.fullmatch(
        rf"session 0, session 1, session 2 and 2 more: each waits at {__file__}:\d+ in waiting: await event.wait\(\)",
        main_waits,
    )
    assert re.fullmatch(rf"main waits at {__file__}:\d+ in main: async with anyio.create_task_group.*", sessions_wait)
    assert told == "nobody sets the event"


def test_a_deadlock_of_many_lines_names_the_first_and_counts_the_others():
    async def main(loop: VirtualLoop) -> None:
        names = {}
        for number in range(25):
            exec(f"async def waits_{number}(future):\n    await future", names)
        await asyncio.gather(*(names[f"waits_{number}"](loop.create_future()) for number in range(25)))

    notes = notes_of(main)

    assert len(notes) == 21
    assert notes[-1] == "and at 6 places more"


def test_a_deadlock_among_the_libraries_alone_says_where_in_them():
    (note,) = notes_of(lambda loop: anyio.Event().wait())

    assert re.search(r" waits at \S+asyncio\S*:\d+ in wait: ", note)


def test_a_time_out_works_on_virtual_time():
    async def main(loop: VirtualLoop) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await loop.create_future()
        return loop.time()

    assert run_virtual(main) == 3600


def test_what_main_returns_or_raises_comes_back():
    async def raising(loop: VirtualLoop) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(raising)


def test_timers_without_an_end_are_found_out_where_a_limit_is_set():
    async def main() -> None:
        for _ in range(1_000):
            await asyncio.sleep(10)

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(50.0, until_s=100.0)) as runner:
        with pytest.raises(Deadlock, match="past 100 s"):
            runner.run(main())
        runner.get_loop().until_s = 1000.0


def test_timers_that_are_due_together_go_in_the_order_in_which_they_were_set():
    async def main(loop: VirtualLoop) -> list[int]:
        seen: list[int] = []
        for number in range(50):
            loop.call_later(5.0 if number % 3 else 9.0, seen.append, number)
        await asyncio.sleep(10)
        return seen

    seen = run_virtual(main)

    assert seen == [n for n in range(50) if n % 3] + [n for n in range(50) if not n % 3]


def test_timers_that_were_cancelled_do_not_heap_up():
    async def main(loop: VirtualLoop) -> tuple[int, list[int]]:
        seen: list[int] = []
        for number in range(1_000):
            loop.call_later(1_000.0 + number, seen.append, number).cancel()
        loop.call_later(2_000.0, seen.append, -1)
        await asyncio.sleep(1)
        kept = len(loop._timers)
        await asyncio.sleep(3_000)
        return kept, seen

    kept, seen = run_virtual(main)

    assert kept < 10
    assert seen == [-1]


def test_what_a_callback_raises_is_told_to_the_loop_s_handler_and_stops_nobody():
    async def main(loop: VirtualLoop) -> list[str]:
        heard: list[str] = []
        loop.set_exception_handler(lambda _, context: heard.append(f"{context['message']}: {context['exception']!r}"))
        loop.call_later(1.0, {}.pop, "nothing")
        await asyncio.sleep(2.0)
        return heard

    (heard,) = run_virtual(main)

    assert heard.startswith("Exception in callback _Handle(")
    assert heard.endswith("KeyError('nothing')")


def test_a_socket_is_heard_before_the_clock_jumps():
    async def main(loop: VirtualLoop) -> tuple[bytes, float]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            theirs.send(b"hello")
            got = await loop.sock_recv(ours, 5)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(loop.sock_recv(ours, 5), 3.0)
        return got, loop.now_s

    assert run_virtual(main) == (b"hello", 3.0)


def test_a_signal_is_heard_while_timers_go_on():
    async def main(loop: VirtualLoop) -> bool:
        heard = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, heard.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(200):
            await asyncio.sleep(1)
        return heard.is_set()

    assert run_virtual(main)


def test_a_closed_loop_takes_no_more():
    loop = VirtualLoop()
    loop.close()

    for call in (lambda: loop.call_soon(print), lambda: loop.call_later(1, print)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
