"""Thousands of sessions, groups and rounds at once: what is done for each is done once, and others get their turn."""

import asyncio
from collections import Counter

import anyio
import pytest

from groupstate import Prompt, SessionContext, Trajectory, session_from_reward
from groupstate.core import select
from groupstate.engines.scripted import ScriptedEngine
from groupstate.runtime import controller, rollout
from tests.runtime.scenes import half_right, opened, virtual


class Counting:
    """A tokenizer of one token per letter that counts what it encodes."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def rewarded() -> object:
    return session_from_reward(lambda prompt, text: 1.0)


@virtual
async def test_the_prompt_of_a_group_is_encoded_once_for_all_its_sessions(loop):
    tokenizer = Counting()
    engine = ScriptedEngine(lambda ids: ids[::-1], tokenizer=tokenizer, token_s=1)
    async with opened(loop, session=rewarded(), engine=engine, group_size=4) as run:
        run.submit("one")
        run.submit("two")
        batch = await run.sample(2)

    assert Counter(tokenizer.encoded) == {"one": 1, "two": 1}
    assert {(row.trajectory.prompt_ids, row.trajectory.text) for row in batch.rows} == {
        (tuple(map(ord, "one")), "eno"),
        (tuple(map(ord, "two")), "owt"),
    }


@virtual
async def test_each_text_of_a_session_is_encoded_as_what_it_is(loop):
    engine = ScriptedEngine(lambda ids: ids, tokenizer=Counting(), token_s=1)

    async def session(ctx: SessionContext) -> Trajectory:
        texts = [f"{ctx.session}", "same", f"{ctx.session}"]
        answers = [(await ctx.generate(text)).text for text in texts]
        assert answers == texts
        ctx.prompt_ids("same").clear()
        assert ctx.prompt_ids("same") == list(map(ord, "same"))
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, engine=engine, group_size=3) as run:
        run.submit("p")
        batch = await run.sample(1)

    assert len(batch.rows) == 3


@pytest.mark.parametrize("way", ["submitted", "validated"])
@virtual
async def test_a_few_groups_begin_in_one_turn_of_the_loop(loop, way):
    count = 3 * rollout.AT_ONCE + 1
    began = [0]
    """By turn, as long as not all have."""

    async def session(ctx: SessionContext) -> Trajectory:
        began[-1] += 1
        await anyio.sleep(1)
        return Trajectory(reward=1.0)

    async def turns() -> None:
        while sum(began) < count and len(began) < 1_000:
            began.append(0)
            await asyncio.sleep(0)

    async with opened(loop, session=session) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(turns)
        if way == "validated":
            await run.validate([f"{number}" for number in range(count)])
        else:
            for number in range(count):
                run.submit(f"{number}")
            await run.commit(await run.sample(count))

    assert sum(began) == count
    assert max(began) <= rollout.AT_ONCE


@virtual
async def test_a_large_round_keeps_its_groups_and_its_version_from_whoever_else_samples_and_publishes(loop):
    count = 10 * rollout.AT_ONCE

    async def session(ctx: SessionContext) -> Trajectory:
        return Trajectory(reward=1.0)

    async with opened(loop, session=session) as run:
        other = asyncio.create_task(run.sample(1, partition="val"))
        await asyncio.sleep(0)
        round_ = asyncio.create_task(run.validate([f"{number}" for number in range(count)]))
        for _ in range(2):
            await asyncio.sleep(0)
        await run.publish_weights(1)
        batch = await round_

        assert not other.done()
        other.cancel()

    assert len(batch) == count
    assert {group.weight_version for group in batch.groups} == {0}


@virtual
async def test_rounds_beside_each_other_are_looked_for_once_each(loop, monkeypatch):
    looks = []

    def counted(*args, **kwargs):
        looks.append(kwargs["wanted"])
        return select.selected(*args, **kwargs)

    monkeypatch.setattr(controller, "selected", counted)
    results = {}

    async def round_of(name: str, prompts: list[Prompt]) -> None:
        results[name] = await run.validate(prompts)

    async with opened(loop, session=half_right) as run, anyio.create_task_group() as tasks:
        for name in ("a", "b"):
            tasks.start_soon(round_of, name, [Prompt(f"{name}{number}") for number in range(30)])

    assert [len(results[name]) for name in ("a", "b")] == [30, 30]
    assert {group.prompt.content[0] for group in results["a"].groups} == {"a"}
    assert len(looks) == 2
