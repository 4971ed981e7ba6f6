"""vLLM's process is killed while everybody waits for something.

One engine dies once, and what each waiter saw is kept: starting another takes ten seconds.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
import pytest_asyncio
from vllm.v1.engine.async_llm import AsyncLLM

from groupstate import Request, Rules, SamplingParams, SessionContext, Trajectory, open_run
from groupstate.engines.vllm import VllmEngine
from groupstate.errors import EngineDied, RolloutDied
from tests.vllm.engines import start, wait_tokens
from tests.vllm.tiny_model import state_dict

RULES = Rules(mode="async", batch_size=2)

AT_ONCE_S = 5.0
"""On a busy machine; half a second otherwise."""


@attrs.frozen
class Death:
    """What the waiters saw."""

    run: Path
    generates: list[Any]
    publishes: Any
    samples: Any
    samples_beside_tools: Any
    """In a run none of whose sessions asks the engine anything."""
    closes: Any
    later: list[Any]
    took_s: float


async def answer(ctx: SessionContext) -> Trajectory:
    generation = await ctx.generate([3, 10, ctx.session + 17])
    return ctx.trajectory([3, 10, ctx.session + 17], generation, reward=float(ctx.session))


async def use_a_tool(ctx: SessionContext) -> Trajectory:
    await anyio.sleep(600)
    return Trajectory(reward=0.0)


async def seen(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except Exception as error:
        return error


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def death(models: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Death]:
    path = tmp_path_factory.mktemp("death") / "run"
    engine = await start(models / "v0", skip_tokenizer_init=True, in_flight="keep")
    outcomes: dict[str, Any] = {}

    async def rollout() -> None:
        params = SamplingParams(max_tokens=1900)
        async with open_run(
            path, rules=RULES, source=range(9), session=answer, engine=engine, params=params, group_size=2
        ) as run:
            outcomes["samples"] = await seen(run.sample(2))

    async def tools() -> None:
        async with open_run(session=use_a_tool, engine=engine) as run:
            run.submit("p")
            outcomes["samples beside tools"] = await seen(run.sample(1))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tools())
        request = Request([3, 10], SamplingParams(max_tokens=1900))
        running = tasks.create_task(seen(rollout()))
        generating = [
            tasks.create_task(seen(engine.generate(given)))
            for given in (request, *(Request([3, 20 + number], SamplingParams(max_tokens=1900)) for number in range(3)))
        ]
        await wait_tokens(engine, request.id)
        publishing = tasks.create_task(seen(engine.publish_weights(state_dict(seed=1), 1)))
        await anyio.sleep(0.2)
        began = asyncio.get_running_loop().time()
        for process in engine.llm.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
    yield Death(
        run=path,
        generates=[task.result() for task in generating],
        publishes=publishing.result(),
        samples=outcomes["samples"],
        samples_beside_tools=outcomes["samples beside tools"],
        closes=running.result(),
        later=[await seen(call) for call in (engine.generate(Request([3])), engine.pause(), engine.resume())],
        took_s=asyncio.get_running_loop().time() - began,
    )
    await engine.aclose()


def test_every_request_is_told(death: Death) -> None:
    assert [type(outcome) for outcome in death.generates] == [EngineDied] * 4


def test_a_publication_that_waits_for_requests_is_told(death: Death) -> None:
    assert isinstance(death.publishes, EngineDied)


def test_what_comes_later_is_told(death: Death) -> None:
    assert [type(outcome) for outcome in death.later] == [EngineDied] * 3


def test_they_are_told_how_the_process_ended(death: Death) -> None:
    for error in (death.later[0], death.generates[-1], death.publishes):
        assert "its process EngineCore ended with code -9" in str(error)


def test_the_waiting_sampler_is_told(death: Death) -> None:
    assert isinstance(death.samples, RolloutDied)
    assert isinstance(death.samples.__cause__, EngineDied)
    assert death.closes is None


def test_a_sampler_is_told_whose_sessions_all_use_tools(death: Death) -> None:
    assert isinstance(death.samples_beside_tools, RolloutDied)
    assert "its process EngineCore ended with code -9" in str(death.samples_beside_tools.__cause__)


def test_all_are_told_at_once(death: Death) -> None:
    assert death.took_s < AT_ONCE_S


async def test_the_run_goes_on_with_another_engine(death: Death, llm: AsyncLLM) -> None:
    engine = VllmEngine(llm)
    async with open_run(
        death.run, source=range(9), session=answer, engine=engine, params=SamplingParams(max_tokens=8), group_size=2
    ) as run:
        with anyio.fail_after(60):
            batch = await run.sample(2)

        assert [len(group.sessions) for group in batch.groups] == [2, 2]
        assert {len(row.trajectory.response_ids) for row in batch.rows} == {8}
    await engine.aclose()
