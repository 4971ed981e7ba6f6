"""Runs whose engine is a server: it dies and comes back, it stays away, it can't serve a prompt."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from groupstate import Prompt, Rules, SessionContext, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.engines.openai import OpenAIEngine
from groupstate.errors import RolloutDied
from groupstate.runtime.sources import as_source
from tests.engines.http_server import HttpServer


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with HttpServer(token_s=0.005) as server:
        yield server


async def session(ctx: SessionContext) -> Trajectory:
    generation = await ctx.generate([1, ctx.session], max_tokens=40)
    return ctx.trajectory([1, ctx.session], generation, reward=float(ctx.session))


def source(*prompts: str) -> Any:
    return as_source([Prompt(prompt, group_id=prompt) for prompt in prompts])


async def wait_for(condition: Any) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)


async def test_sessions_under_a_server_that_dies_are_tried_again_when_it_is_back(
    server: HttpServer, tmp_path: Path
) -> None:
    async with (
        OpenAIEngine(server.url, reconnect_s=20.0) as engine,
        open_run(
            tmp_path / "run",
            rules=Rules(attempts_max=3, retry_delay_s=0.05),
            source=source("a", "b"),
            session=session,
            engine=engine,
            group_size=4,
        ) as run,
    ):
        sampling = asyncio.create_task(run.sample(2))
        await wait_for(lambda: server.running == 8)
        server.die()
        await wait_for(lambda: run.book.totals["session_failed/error"] == 8)
        assert not sampling.done()
        await server.start()
        batch = await sampling
        records = list(run.ledger.log.read())

    rows = [row for group in batch.groups for row in group.rows()]
    assert [len(row.trajectory.response_ids) for row in rows] == [40] * 8
    failures = [record.event for record in records if isinstance(record.event, ev.SessionFailed)]
    assert len(failures) == 8
    assert all("EngineUnavailable" in failure.message and failure.retry_in_s is not None for failure in failures)
    assert not violations(records)


async def test_a_server_that_stays_away_ends_the_rollout_and_the_run_goes_on_when_it_is_back(
    server: HttpServer, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"rules": Rules(attempts_max=3, retry_delay_s=0.05), "session": session, "group_size": 4}
    async with OpenAIEngine(server.url, reconnect_s=0.4) as engine:
        with pytest.raises(RolloutDied, match=r"no server was reachable for 0.4 s"):
            async with open_run(tmp_path / "run", source=source("a", "b"), engine=engine, **options) as run:
                sampling = asyncio.create_task(run.sample(2))
                await wait_for(lambda: server.running == 8)
                server.die()
                with anyio.fail_after(5):
                    await sampling
    await server.start()
    async with (
        OpenAIEngine(server.url) as engine,
        open_run(tmp_path / "run", source=source("a", "b"), engine=engine, **options) as run,
    ):
        batch = await run.sample(2)

    assert {group.group_id for group in batch.groups} == {"a", "b"}


async def test_a_prompt_that_the_server_refuses_ends_its_group_alone(server: HttpServer) -> None:
    server.context = 50

    async def session(ctx: SessionContext) -> Trajectory:
        prompt = [1] * (100 if ctx.prompt.content == "long" else 2)
        return ctx.trajectory(prompt, await ctx.generate(prompt, max_tokens=3), reward=0.0)

    async with (
        OpenAIEngine(server.url) as engine,
        open_run(source=source("long", "short"), session=session, engine=engine, group_size=2) as run,
    ):
        batch = await run.sample(1)
        refused = run.book.totals["session_failed/refused"]

    assert [group.group_id for group in batch.groups] == ["short"]
    assert refused == 2
    assert all(len(asked["prompt"]) == 2 for asked in server.asked)


async def test_a_run_publishes_through_the_engine(server: HttpServer) -> None:
    async with (
        OpenAIEngine(server.url) as engine,
        open_run(source=source("a"), session=session, engine=engine, group_size=2) as run,
    ):
        server.hold(5)
        sampling = asyncio.create_task(run.sample(1))
        await wait_for(lambda: [bool(row.piece and row.piece.token_ids) for row in engine._rows.values()] == [True] * 2)
        await run.publish_weights(1, "/weights/v1")
        server.let_go()
        batch = await sampling

    spans = [[span.weight_version for span in row.trajectory.spans] for row in batch.groups[0].rows()]
    assert spans == [[0, 1], [0, 1]]


async def test_a_run_takes_texts_from_a_server_of_any_kind(server: HttpServer) -> None:
    async def session(ctx: SessionContext) -> Trajectory:
        generation = await ctx.generate(ctx.prompt.content, max_tokens=4)
        return ctx.trajectory(ctx.prompt.content, generation, reward=float(len(generation.text)))

    async with (
        OpenAIEngine(server.url, dialect="chat") as engine,
        open_run(source=source("a"), session=session, engine=engine, group_size=2) as run,
    ):
        batch = await run.sample(1)

    (first, _) = batch.groups[0].rows()
    assert (first.trajectory.text, first.trajectory.response_ids, first.trajectory.log_probs) == ("cdef", (), ())
