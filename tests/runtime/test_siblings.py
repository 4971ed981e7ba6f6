"""The tasks of one group: they begin together, end together, and a cancellation reaches each once."""

import asyncio

import pytest

from groupstate.runtime.siblings import Siblings
from groupstate.simulate.loop import VirtualLoop, run_virtual


class Diary:
    """Works that say what happens to them."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def sleeps(self, name: str, seconds: float = 100.0) -> None:
        self.said.append(f"{name} begins")
        try:
            await asyncio.sleep(seconds)
            self.said.append(f"{name} ends")
        except asyncio.CancelledError:
            self.said.append(f"{name} is cancelled")
            raise

    async def lingers(self, name: str) -> None:
        """Takes a while to go."""
        try:
            await self.sleeps(name)
        except asyncio.CancelledError:
            await asyncio.sleep(5.0)
            self.said.append(f"{name} is gone")
            raise

    async def breaks(self, name: str, error: BaseException) -> None:
        await asyncio.sleep(1.0)
        raise error


def test_all_of_them_are_awaited():
    async def main(loop: VirtualLoop) -> list[str]:
        diary = Diary()
        await Siblings().run((name, diary.sleeps(name, seconds)) for name, seconds in [("a", 3.0), ("b", 1.0)])
        return diary.said

    assert run_virtual(main) == ["a begins", "b begins", "b ends", "a ends"]


def test_a_cancellation_reaches_each_once_and_who_waits_for_them_is_not_cancelled():
    async def main(loop: VirtualLoop) -> tuple[list[str], float]:
        diary, siblings = Diary(), Siblings()
        for at_s in (2.0, 3.0):
            loop.call_later(at_s, siblings.cancel)
        await siblings.run((name, diary.lingers(name)) for name in "ab")
        return diary.said, loop.now_s

    said, at_s = run_virtual(main)

    assert said == ["a begins", "b begins", "a is cancelled", "b is cancelled", "a is gone", "b is gone"]
    assert at_s == 7.0


def test_who_has_not_begun_begins_and_is_cancelled_where_it_first_waits():
    async def main(loop: VirtualLoop) -> list[str]:
        diary, siblings = Diary(), Siblings()
        siblings.cancel()
        await siblings.run((name, diary.sleeps(name)) for name in "ab")
        return diary.said

    assert run_virtual(main) == ["a begins", "b begins", "a is cancelled", "b is cancelled"]


def test_who_has_what_it_waited_for_goes_on():
    async def main(loop: VirtualLoop) -> list[str]:
        diary, siblings = Diary(), Siblings()

        async def cancels() -> None:
            await asyncio.sleep(1.0)
            siblings.cancel()
            diary.said.append("cancelled")

        await siblings.run([("c", cancels()), ("a", diary.sleeps("a", 1.0)), ("b", diary.sleeps("b", 2.0))])
        return diary.said

    # Both of the first two were woken in the same moment.
    assert run_virtual(main) == ["a begins", "b begins", "cancelled", "a ends", "b is cancelled"]


def test_whoever_waits_is_cancelled_only_after_they_are_gone():
    async def main(loop: VirtualLoop) -> tuple[list[str], float]:
        diary = Diary()
        waiting = loop.create_task(Siblings().run((name, diary.lingers(name)) for name in "ab"))
        loop.call_later(2.0, waiting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return diary.said[2:], loop.now_s

    assert run_virtual(main) == (["a is cancelled", "b is cancelled", "a is gone", "b is gone"], 7.0)


def test_what_one_raises_ends_the_others_and_is_raised():
    async def main(loop: VirtualLoop) -> list[str]:
        diary, broken = Diary(), KeyError("b")
        with pytest.raises(BaseExceptionGroup) as caught:
            await Siblings().run([("a", diary.lingers("a")), ("b", diary.breaks("b", broken))])
        assert caught.value.exceptions == (broken,)
        return diary.said

    assert run_virtual(main) == ["a begins", "a is cancelled", "a is gone"]
