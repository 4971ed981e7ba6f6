"""The sessions of one group: they begin together, end together, and a cancellation reaches each once."""

import asyncio
import gc
import weakref

import anyio
import pytest

from groupstate import RetryableError, Rules, SessionContext, Trajectory, open_run
from groupstate.runtime.siblings import Siblings
from groupstate.simulate.loop import VirtualLoop, run_virtual
from tests.runtime.scenes import endless


class Sleeper:
    """A session that says what happens to it, and takes a while to go when it is cancelled."""

    def __init__(self, siblings: Siblings, said: list[str], name: str, seconds: float = 100.0) -> None:
        self._siblings = siblings
        self._said = said
        self._name = name
        self._seconds = seconds
        self._waits: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._say("begins")
        self._wait(self._seconds, "ends")

    def cancel(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._say("is cancelled")
            self._wait(5.0, "is gone")

    def _wait(self, seconds: float, then: str) -> None:
        self._waits = asyncio.get_running_loop().call_later(seconds, self._end, then)

    def _end(self, how: str) -> None:
        self._waits = None
        self._say(how)
        self._siblings.over()

    def _say(self, what: str) -> None:
        self._said.append(f"{self._name} {what}")


class Broken(Sleeper):
    """It can't go on from the start."""

    def begin(self) -> None:
        self._siblings.over(KeyError(self._name))


def test_all_of_them_are_awaited():
    async def main(loop: VirtualLoop) -> list[str]:
        siblings, said = Siblings(), []
        await siblings.run([Sleeper(siblings, said, "a", 3.0), Sleeper(siblings, said, "b", 1.0)])
        return said

    assert run_virtual(main) == ["a begins", "b begins", "b ends", "a ends"]


def test_a_cancellation_reaches_each_once_and_who_waits_for_them_is_not_cancelled():
    async def main(loop: VirtualLoop) -> tuple[list[str], float]:
        siblings, said = Siblings(), []
        for at_s in (2.0, 3.0):
            loop.call_later(at_s, siblings.cancel)
        await siblings.run(Sleeper(siblings, said, name) for name in "ab")
        return said, loop.now_s

    said, at_s = run_virtual(main)

    assert said == ["a begins", "b begins", "a is cancelled", "b is cancelled", "a is gone", "b is gone"]
    assert at_s == 7.0


def test_who_has_not_begun_never_begins():
    async def main(loop: VirtualLoop) -> list[str]:
        siblings, said = Siblings(), []
        siblings.cancel()
        await siblings.run(Sleeper(siblings, said, name) for name in "ab")
        return said

    assert run_virtual(main) == []


def test_whoever_waits_is_cancelled_only_after_they_are_gone():
    async def main(loop: VirtualLoop) -> tuple[list[str], float]:
        siblings, said = Siblings(), []
        waiting = loop.create_task(siblings.run(Sleeper(siblings, said, name) for name in "ab"))
        for at_s in (2.0, 3.0):
            loop.call_later(at_s, waiting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return said[2:], loop.now_s

    assert run_virtual(main) == (["a is cancelled", "b is cancelled", "a is gone", "b is gone"], 7.0)


@pytest.mark.parametrize("before", [False, True])
def test_whoever_waits_is_cancelled_in_the_moment_in_which_the_last_one_ends(before):
    async def main(loop: VirtualLoop) -> tuple[list[str], float]:
        siblings, said = Siblings(), []
        loop.set_exception_handler(lambda loop, context: said.append(context["message"]))
        waiting = loop.create_task(siblings.run([Sleeper(siblings, said, "a", 2.0)]))
        if not before:
            await asyncio.sleep(0)
        # Of two timers of the same time the first that was set is the first.
        loop.call_at(2.0, waiting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return said, loop.now_s

    assert run_virtual(main) == (["a begins", "a ends"], 2.0)


def test_what_one_can_not_go_on_from_ends_the_others_and_is_raised():
    async def main(loop: VirtualLoop) -> list[str]:
        siblings, said = Siblings(), []
        with pytest.raises(BaseExceptionGroup) as caught:
            await siblings.run(
                kind(siblings, said, name) for kind, name in [(Sleeper, "a"), (Broken, "b"), (Sleeper, "c")]
            )
        assert [repr(error) for error in caught.value.exceptions] == ["KeyError('b')"]
        return said

    assert run_virtual(main) == ["a begins", "a is cancelled", "a is gone"]


class Dropped(Exception):
    pass


async def answers(ctx: SessionContext) -> Trajectory:
    await asyncio.sleep(1)
    return Trajectory(reward=1.0)


async def raises(ctx: SessionContext) -> Trajectory:
    raise Dropped


async def drops_the_first(ctx: SessionContext) -> Trajectory:
    if ctx.attempt == 1:
        raise RetryableError
    return Trajectory(reward=1.0)


@pytest.mark.parametrize(
    ("session", "cancels"),
    [(answers, False), (raises, False), (drops_the_first, False), (endless, False), (answers, True), (endless, True)],
)
def test_what_a_group_held_is_freed_without_the_garbage_collector(session, cancels):
    held: list[weakref.ref[SessionContext]] = []

    async def noted(ctx: SessionContext) -> Trajectory:
        held.append(weakref.ref(ctx))
        return await session(ctx)

    async def main(loop: VirtualLoop) -> None:
        rules = Rules(attempts_max=2, retry_delay_s=0, session_deadline_s=10)
        async with open_run(session=noted, rules=rules, group_size=3, clock_ns=loop.clock_ns) as run:
            group = run.submit("p")
            await anyio.sleep(0.5)
            if cancels:
                run.cancel(group.id)
            await anyio.sleep(100)
            assert not run.book.in_flight_count()
            assert len(held) >= 3
            assert [ref() for ref in held] == [None] * len(held)

    gc.collect()
    gc.disable()
    try:
        run_virtual(main)
    finally:
        gc.enable()
