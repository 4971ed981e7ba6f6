"""What a session is given, and what it generates with it: by which parameters, under which weights, and until when."""

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from groupstate import Prompt, SamplingParams, SessionContext, Trajectory, session_from_reward
from groupstate.core import events as ev
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import BadSettings, EngineError, SessionStateError
from groupstate.simulate.loop import VirtualLoop
from tests.runtime.scenes import events, half_right, opened, virtual


@virtual
async def test_a_session_knows_its_place_its_prompt_and_the_weight_version(loop):
    seen = []

    async def session(ctx):
        seen.append((ctx.key, ctx.group_id, ctx.session, ctx.attempt, ctx.size, ctx.prompt.content, ctx.weight_version))
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, weight_version=4) as run:
        run.submit(Prompt("what", extra={"answer": 4}), group_id="a_1", n=2)
        await run.sample(1)

    assert seen == [("a_1_0", "a_1", 0, 1, 2, "what", 4), ("a_1_1", "a_1", 1, 1, 2, "what", 4)]


class Letters:
    """A tokenizer of one token per letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids) -> str:
        return "".join(map(chr, token_ids))


def shouting(**options: Any) -> ScriptedEngine:
    """An engine that answers with the prompt in capitals, a token a second."""
    script = lambda ids: [ord(chr(token).upper()) for token in ids]  # noqa: E731
    return ScriptedEngine(script, tokenizer=Letters(), token_s=1, **options)


@virtual
async def test_the_usual_session_generates_from_the_prompt_and_scores_the_answer(loop):
    def reward(prompt: Prompt, text: str) -> float:
        return float(text == prompt.extra["answer"])

    async with opened(loop, session=session_from_reward(reward), engine=shouting()) as run:
        run.submit(Prompt("hey", extra={"answer": "HEY"}))
        batch = await run.sample(1)

    (row,) = batch.rows
    assert (row.trajectory.text, row.trajectory.metrics) == ("HEY", {"reward": 1.0})
    assert list(row.trajectory.prompt_ids) == [104, 101, 121]
    assert list(row.trajectory.log_probs) == [-0.5] * 3
    assert row.trajectory.info == {"finish_reason": "stop"}


@virtual
async def test_a_reward_may_be_async_and_give_several_metrics(loop):
    async def reward(prompt: Prompt, text: str) -> dict[str, float]:
        await anyio.sleep(1)
        return {"reward": 0.5, "acc": 1.0}

    async with opened(loop, session=session_from_reward(reward), engine=shouting()) as run:
        run.submit("hey")
        batch = await run.sample(1)

    assert batch.rows[0].trajectory.metrics == {"reward": 0.5, "acc": 1.0}


@virtual
async def test_a_trajectory_records_which_version_made_which_tokens(loop):
    async with opened(loop, session=session_from_reward(lambda prompt, text: 1.0), engine=shouting()) as run:
        run.submit("four")
        await anyio.sleep(2.5)
        await run.publish_weights(1, {"w": 1})
        batch = await run.sample(1)

    spans = [(span.start, span.stop, span.weight_version) for span in batch.rows[0].trajectory.spans]
    assert spans == [(0, 2, 0), (2, 4, 1)]


@virtual
async def test_a_session_starts_under_the_engines_weight_version(loop):
    async with opened(loop, session=half_right, engine=shouting(weight_version=7), weight_version=7) as run:
        run.submit("p")
        await run.sample(1)

        assert [event.weight_version for event in events(run, ev.SessionStarted)] == [7]


@virtual
async def test_sampling_parameters_of_the_run_can_be_changed_for_one_call(loop):
    lengths = []

    async def session(ctx):
        for changes in ({}, {"max_tokens": 1}):
            lengths.append(len((await ctx.generate("abcd", **changes)).token_ids))
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, engine=shouting(), params=SamplingParams(max_tokens=3)) as run:
        run.submit("p")
        await run.sample(1)

    assert lengths == [3, 1]


async def refused(loop: VirtualLoop, call: Callable[[SessionContext], Any], engine: Any) -> Exception:
    """What a call on the context raises."""
    raised: list[Exception] = []

    async def session(ctx: SessionContext) -> Trajectory:
        try:
            await call(ctx)
        except Exception as error:
            raised.append(error)
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, engine=engine) as run:
        run.submit("p")
        await run.sample(1)
    return raised[0]


@virtual
async def test_an_unknown_sampling_parameter_is_named(loop):
    error = await refused(loop, lambda ctx: ctx.generate([1], temprature=0.0), shouting())

    assert isinstance(error, EngineError)
    assert "temprature" in str(error)
    assert "temperature" in str(error)


@virtual
async def test_a_text_needs_an_engine_with_a_tokenizer(loop):
    error = await refused(loop, lambda ctx: ctx.generate("text"), ScriptedEngine([[1]]))

    assert isinstance(error, EngineError)
    assert "no tokenizer" in str(error)


@virtual
async def test_generating_without_an_engine_says_what_is_missing(loop):
    error = await refused(loop, lambda ctx: ctx.generate([1]), None)

    assert isinstance(error, BadSettings)
    assert "open_run(engine=...)" in str(error)


@virtual
async def test_what_goes_on_in_the_name_of_a_session_that_has_ended_generates_nothing(loop):
    left_behind = []

    async def session(ctx):
        async def go_on():
            while True:
                await ctx.generate("abcd")

        left_behind.append(asyncio.ensure_future(go_on()))
        await anyio.sleep(10)
        return Trajectory(reward=1.0)

    engine = shouting()
    async with opened(loop, session=session, engine=engine) as run:
        run.submit("p", group_id="g")
        await run.sample(1)
        with pytest.raises(SessionStateError, match="session 0 of group 'g' can't generate: its attempt 1 has ended"):
            await left_behind[0]
        await asyncio.wait(left_behind)

        assert engine.in_flight_count == 0
        assert {type(task.exception()) for task in left_behind} == {SessionStateError}


@virtual
async def test_a_session_that_was_given_up_generates_no_more(loop):
    async def deaf(ctx):
        while True:
            try:
                await ctx.generate("abcd")
            except asyncio.CancelledError:
                pass

    engine = shouting()
    async with opened(loop, session=deaf, engine=engine, cancel_grace_s=2.0) as run:
        run.submit("p", group_id="g")
        await anyio.sleep(1)
        run.cancel("g")
        await anyio.sleep(20)

        assert engine.in_flight_count == 0


@virtual
async def test_token_ids_need_no_tokenizer(loop):
    async def session(ctx):
        generation = await ctx.generate((1, 2))
        return ctx.trajectory((1, 2), generation, reward=1.0, metrics={"acc": 0.0}, info={"turn": 1})

    async with opened(loop, session=session, engine=ScriptedEngine([[3, 4]])) as run:
        run.submit("p")
        (row,) = (await run.sample(1)).rows

    assert (list(row.trajectory.prompt_ids), list(row.trajectory.response_ids)) == ([1, 2], [3, 4])
    assert row.trajectory.metrics == {"reward": 1.0, "acc": 0.0}
    assert row.trajectory.info == {"finish_reason": "stop", "turn": 1}


@virtual
async def test_a_request_that_the_engine_refuses_is_the_sessions_failure(loop):
    async with opened(
        loop,
        session=session_from_reward(lambda prompt, text: 1.0),
        engine=ScriptedEngine([EngineError("too long")] * 9),
    ) as run:
        run.submit([1, 2])
        await anyio.sleep(1)

        assert events(run, ev.SessionFailed)[0].message == "EngineError: too long"
