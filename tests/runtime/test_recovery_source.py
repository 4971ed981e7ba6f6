"""Where a source goes on when a run is opened again: behind what is done with, and each prompt once."""

from pathlib import Path

import anyio
import pytest

from groupstate import Rules, Trajectory
from groupstate.errors import NotEnoughGroups
from groupstate.runtime.sources import IteratorSource, ListSource
from tests.runtime.scenes import half_right, killed, opened, virtual


async def drained(loop, path: Path, source) -> list:
    """Contents of all that is still to come, committed one by one."""
    contents = []
    async with opened(loop, path, source=source, session=half_right) as run:
        with pytest.raises(NotEnoughGroups):
            while True:
                batch = await run.sample(1)
                contents.extend(group.prompt.content for group in batch.groups)
                await run.commit(batch)
    return contents


@pytest.mark.parametrize("kind", ["list", "shuffled epochs", "iterator", "file"])
@virtual
async def test_each_prompt_is_committed_once_over_a_kill(loop, tmp_path, kind):
    jsonl = tmp_path / "prompts.jsonl"
    jsonl.write_text("".join(f'{{"prompt": {number}}}\n' for number in range(12)))

    def make():
        return {
            "list": lambda: list(range(12)),
            "shuffled epochs": lambda: ListSource(range(6), epochs=2, shuffle_seed=5),
            "iterator": lambda: IteratorSource(iter(range(12))),
            "file": lambda: str(jsonl),
        }[kind]()

    whole = await drained(loop, tmp_path / "whole", make())
    committed = []

    async with opened(loop, tmp_path / "run", source=make(), session=half_right, rules=Rules(batch_size=2)) as run:
        for _ in range(2):
            batch = await run.sample(2)
            committed += [group.prompt.content for group in batch.groups]
            await run.commit(batch)
        await run.sample(1)
        await anyio.sleep(0.5)
        path = killed(tmp_path / "run")

    after = await drained(loop, path, make())

    assert len(whole) == 12
    assert sorted(committed + after) == sorted(whole)


@virtual
async def test_an_evicted_prompt_does_not_hold_the_source_back(loop, tmp_path):
    async def third_is_uniform(ctx):
        return Trajectory(reward=1.0 if ctx.prompt.content == 2 else float(ctx.session))

    rules = Rules(filter_metric="reward")
    async with opened(
        loop, tmp_path / "run", source=range(9), session=third_is_uniform, group_size=2, rules=rules
    ) as run:
        for _ in range(5):
            await run.commit(await run.sample(1))

    async with opened(loop, tmp_path / "run", source=range(9), session=half_right, group_size=2, rules=rules) as run:
        contents = [(await run.sample(1)).groups[0].prompt.content for _ in range(3)]

    assert contents == [6, 7, 8]


@virtual
async def test_a_source_that_has_grown_is_drawn_from_again(loop, tmp_path):
    assert await drained(loop, tmp_path / "run", ["a", "b"]) == ["a", "b"]

    assert await drained(loop, tmp_path / "run", ["a", "b", "c"]) == ["c"]
