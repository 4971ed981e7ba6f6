"""What becomes of a session, whatever its function does: one recorded end, and its siblings go on."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from groupstate import (
    Prompt,
    RetryableError,
    Rules,
    SamplingParams,
    Select,
    SessionContext,
    Trajectory,
    session_from_reward,
)
from groupstate.core import events as ev
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import BadSettings, EngineError, EngineUnavailable, RolloutDied, SessionStateError
from groupstate.simulate.loop import VirtualLoop, run_virtual
from tests.runtime.scenes import endless, events, half_right, opened, quiet, returning, virtual

Session = Callable[[SessionContext], Awaitable[Any]]


async def outcome(loop: VirtualLoop, session: Session, **options: Any) -> list[ev.SessionFinished | ev.SessionFailed]:
    """Ends of the sessions of one group, in the order of the log."""
    async with opened(loop, session=session, rules=Rules(), **options) as run:
        run.submit("p", group_id="g")
        await anyio.sleep(600)
        return events(run, ev.SessionFinished, ev.SessionFailed)


def raising(error: Exception) -> Session:
    async def session(ctx: SessionContext) -> None:
        raise error

    return session


@virtual
async def test_what_a_session_returns_is_recorded_as_its_end(loop):
    (end,) = await outcome(loop, half_right)

    assert isinstance(end, ev.SessionFinished)
    assert end.trajectories[0].metrics == {"reward": 0.0}


@virtual
async def test_a_session_that_raises_has_failed_with_what_it_raised(loop):
    (end,) = await outcome(loop, raising(KeyError("answer")))

    assert (end.failure, end.message) == ("error", "KeyError: 'answer'")


@virtual
async def test_a_failure_names_its_cause(loop):
    async def session(ctx):
        try:
            raise ConnectionError("refused")
        except ConnectionError as error:
            raise RuntimeError("no judge") from error

    (end,) = await outcome(loop, session)

    assert end.message == "RuntimeError: no judge (from ConnectionError: refused)"


@virtual
async def test_a_cause_that_the_failure_repeats_is_not_said_twice(loop):
    async def session(ctx):
        cause = ConnectionError("refused")
        raise RuntimeError(f"no judge: {type(cause).__name__}: {cause}") from cause

    (end,) = await outcome(loop, session)

    assert end.message == "RuntimeError: no judge: ConnectionError: refused"


@virtual
async def test_an_endless_message_is_cut(loop):
    (end,) = await outcome(loop, raising(ValueError("x" * 1_000_000)))

    assert len(end.message) <= 2_000
    assert end.message.endswith("... (cut)")


@virtual
async def test_a_group_of_errors_is_one_failure(loop):
    (end,) = await outcome(loop, raising(ExceptionGroup("tools", [ValueError("a"), ValueError("b")])))

    assert end.failure == "error"


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_a_session_that_returns_nothing_has_failed_as_empty(nothing):
    (end,) = run_virtual(lambda loop: outcome(loop, returning(nothing)))

    assert (end.failure, end.message) == ("empty", "it returned no trajectory")


@virtual
async def test_a_session_may_return_nothing_where_the_rules_allow_it(loop):
    async with opened(loop, session=returning(None), rules=Rules(empty_session="allow"), group_size=2) as run:
        run.submit("p")
        await anyio.sleep(2)

        assert [event.trajectories for event in events(run, ev.SessionFinished)] == [(), ()]
        assert [event.reasons for event in events(run, ev.GroupEvicted)] == [("empty",)]


@pytest.mark.parametrize(
    "result",
    [
        "text",
        {"reward": 1.0},
        1.0,
        [Trajectory(reward=1.0), "text"],
        Trajectory(reward=math.nan),
        Trajectory(reward=math.inf),
        Trajectory(reward=-math.inf),
        Trajectory(metrics={"acc": math.nan}),
        Trajectory(metrics={"acc": "high"}),
        Trajectory(response_ids=(1, 2), log_probs=(-0.5,)),
        Trajectory(response_ids=(1,), log_probs=(math.nan,)),
        Trajectory(info={"tool": object()}),
    ],
    ids=lambda result: str(result)[:40],
)
def test_a_result_that_cannot_be_recorded_is_the_sessions_failure(result):
    (end,) = run_virtual(lambda loop: outcome(loop, returning(result)))

    assert end.failure == "refused"
    assert "session 0 of group 'g'" in end.message


@virtual
async def test_a_session_that_cancels_itself_has_failed_as_cancelled(loop):
    async def session(ctx):
        asyncio.current_task().cancel()
        await anyio.sleep(1)

    (end,) = await outcome(loop, session)

    assert (end.failure, end.message) == ("cancelled", "the session cancelled itself")


@virtual
async def test_a_session_that_raises_a_cancellation_by_hand_ends_alone(loop):
    async def session(ctx):
        if ctx.session == 0:
            raise asyncio.CancelledError
        await anyio.sleep(1)
        return Trajectory(reward=1.0)

    ends = await outcome(loop, session, group_size=2)

    assert [(type(end).__name__, end.session) for end in ends] == [("SessionFailed", 0), ("SessionFinished", 1)]


@virtual
async def test_a_failed_session_does_not_end_its_siblings_or_the_group(loop):
    async def session(ctx):
        await anyio.sleep(1 + ctx.session)
        if ctx.session == 0:
            raise ValueError("no")
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, group_size=3) as run:
        group = run.submit("p")
        await anyio.sleep(1.5)
        assert group.phase == "running"
        await anyio.sleep(2)

        names = [type(event).__name__ for event in events(run)][-6:-1]
        assert names == ["SessionFailed", "SessionFinished", "SessionFinished", "GroupFailed", "GroupEvicted"]
        assert group.phase == "evicted"


@virtual
async def test_survivors_make_a_partial_group(loop):
    async def session(ctx):
        if ctx.session == 0:
            raise ValueError("no")
        return Trajectory(reward=float(ctx.session))

    async with opened(loop, session=session, rules=Rules(survivors_min=2), group_size=3) as run:
        run.submit("p")
        batch = await run.sample(1)

    assert [(group.partial, group.size, len(group.sessions)) for group in batch.groups] == [(True, 3, 2)]


class Harsh(BaseException):
    """Not an `Exception`: what libraries use to get past every handler."""


@virtual
async def test_an_exception_that_is_no_exception_is_recorded_and_is_the_rollouts_death(loop):
    async def session(ctx):
        await anyio.sleep(1)
        raise Harsh("stop everything")

    async with opened(loop, session=session) as run:
        run.submit("p")
        with pytest.raises(RolloutDied) as caught:
            await run.sample(1)

        assert isinstance(caught.value.__cause__, Harsh)
        assert [event.message for event in events(run, ev.SessionFailed)] == ["Harsh: stop everything"]


def test_ctrl_c_in_a_session_ends_the_run_and_leaves_a_log_to_go_on_from(tmp_path):
    async def interrupted(ctx):
        await anyio.sleep(1)
        raise KeyboardInterrupt

    async def first(loop):
        async with opened(loop, tmp_path / "run", session=interrupted) as run:
            run.submit("p", group_id="g")
            await run.sample(1)

    async def second(loop):
        async with opened(loop, tmp_path / "run", session=half_right) as run:
            return (await run.sample(1)).group_ids

    with pytest.raises(KeyboardInterrupt):
        run_virtual(first)

    assert run_virtual(second) == ["g"]


def test_ctrl_c_in_a_rule_ends_the_run_and_leaves_a_log_to_go_on_from(tmp_path):
    interrupts = [KeyboardInterrupt()]

    def interrupted(book, rules, request):
        ready = [group.group_id for group in book.ready()]
        if ready and interrupts:
            raise interrupts.pop()
        if ready:
            yield Select(ready)

    async def first(loop):
        async with opened(loop, tmp_path / "run", session=half_right, selection=interrupted) as run:
            run.submit("p", group_id="g")
            await run.sample(1)

    async def second(loop):
        async with opened(loop, tmp_path / "run", session=half_right, selection=interrupted) as run:
            return (await run.sample(1)).group_ids

    with pytest.raises(KeyboardInterrupt):
        run_virtual(first)

    assert run_virtual(second) == ["g"]


# Cancellation that is ignored ------------------------------------------------------------------------


def deaf(seconds: float) -> Session:
    """A session that works on for `seconds`, however often it is cancelled."""

    async def session(ctx: SessionContext) -> Trajectory:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            try:
                await asyncio.sleep(end - loop.time())
            except asyncio.CancelledError:
                pass
        return Trajectory(reward=1.0)

    return session


@virtual
async def test_a_session_that_ignores_its_cancellation_is_lost_after_the_grace(loop, caplog):
    async with opened(loop, session=deaf(100), cancel_grace_s=3) as run:
        group = run.submit("p")
        await anyio.sleep(1)

        run.cancel(group.id)
        await anyio.sleep(2.9)
        assert group.phase == "running"
        await anyio.sleep(0.2)

        (end,) = events(run, ev.SessionFailed)
        assert (end.failure, end.message) == ("lost", "it ignored its cancellation for 3 s")
        assert group.phase == "evicted"
        assert "ignores its cancellation" in caplog.text
        await anyio.sleep(100)


@virtual
async def test_without_any_grace_a_session_that_ends_at_once_is_not_lost(loop):
    async with opened(loop, session=endless, cancel_grace_s=0) as run:
        group = run.submit("p")
        await anyio.sleep(1)
        run.cancel(group.id)
        await quiet()

        assert [event.failure for event in events(run, ev.SessionFailed)] == ["cancelled"]


@virtual
async def test_what_a_lost_session_returns_in_the_end_is_fenced(loop):
    async with opened(loop, session=deaf(100), cancel_grace_s=3) as run:
        run.submit("p")
        await anyio.sleep(1)
        run.cancel("g1")
        await anyio.sleep(200)

        assert [event.result for event in events(run, ev.ResultFenced)] == ["finished"]
        assert run.book.totals["fenced"] == 1


@virtual
async def test_a_deaf_session_does_not_keep_the_run_from_closing(loop):
    async with opened(loop, session=deaf(1_000), cancel_grace_s=3, grace_s=2) as run:
        run.submit("p")
        await anyio.sleep(1)
        await run.close()

        assert loop.time() == pytest.approx(6)
        assert [event.reason for event in events(run, ev.GroupRequeued)] == ["the run closed: closed"]
    await anyio.sleep(1_000)


@virtual
async def test_a_session_that_ends_within_the_grace_of_its_cancellation_keeps_its_result(loop):
    async def finishes_up(ctx):
        try:
            await anyio.sleep(100)
        except asyncio.CancelledError:
            await anyio.sleep(1)
        return Trajectory(reward=1.0)

    async with opened(loop, session=finishes_up, cancel_grace_s=3) as run:
        group = run.submit("p")
        await anyio.sleep(1)
        run.cancel(group.id)
        await anyio.sleep(2)

        assert group.phase == "finished"


@virtual
async def test_a_session_that_answers_its_cancellation_with_an_error_was_cancelled(loop):
    async def clumsy(ctx):
        try:
            await anyio.sleep(100)
        finally:
            raise ValueError("in the cleanup")

    async with opened(loop, session=clumsy) as run:
        run.submit("p")
        await anyio.sleep(1)
        run.cancel("g1")
        await anyio.sleep(1)

        assert [event.failure for event in events(run, ev.SessionFailed)] == ["cancelled"]


# Retries ---------------------------------------------------------------------------------------------


class Overloaded(RetryableError):
    pass


@virtual
async def test_a_retryable_failure_is_tried_again_with_doubling_delays(loop):
    began = []

    async def session(ctx):
        began.append((ctx.attempt, loop.time()))
        if ctx.attempt < 4:
            raise Overloaded("busy")
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, rules=Rules(attempts_max=4, retry_delay_s=3)) as run:
        run.submit("p")
        await run.sample(1)

        assert began == [(1, 0), (2, 3), (3, 9), (4, 21)]
        assert [event.retry_in_s for event in events(run, ev.SessionFailed)] == [3, 6, 12]


@virtual
async def test_retries_end_at_attempts_max(loop):
    async with opened(loop, session=raising(Overloaded("busy")), rules=Rules(attempts_max=3)) as run:
        group = run.submit("p")
        await anyio.sleep(100)

        assert [(e.attempt, e.retry_in_s) for e in events(run, ev.SessionFailed)] == [(1, 1), (2, 2), (3, None)]
        assert group.phase == "evicted"


@virtual
async def test_an_error_that_is_not_retryable_is_not_tried_again(loop):
    async with opened(loop, session=raising(ValueError("wrong")), rules=Rules(attempts_max=3)) as run:
        run.submit("p")
        await anyio.sleep(100)

        assert [event.attempt for event in events(run, ev.SessionFailed)] == [1]


@virtual
async def test_a_group_does_not_end_while_a_retry_of_one_session_is_due(loop):
    async def session(ctx):
        if ctx.session == 0 and ctx.attempt == 1:
            raise Overloaded("busy")
        return Trajectory(reward=1.0)

    async with opened(loop, session=session, rules=Rules(attempts_max=2, retry_delay_s=50), group_size=2) as run:
        group = run.submit("p")
        await anyio.sleep(40)
        assert (group.phase, run.sampleable_count()) == ("running", 0)

        await anyio.sleep(20)

        assert group.phase == "finished"


# What a session is given ------------------------------------------------------------------------------


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


@virtual
async def test_a_request_that_can_never_be_served_is_recorded_as_refused_and_not_tried_again(loop):
    async with opened(
        loop,
        session=session_from_reward(lambda prompt, text: 1.0),
        engine=ScriptedEngine([[1]], context=2),
        rules=Rules(attempts_max=3),
    ) as run:
        run.submit([1, 2, 3])
        await anyio.sleep(1)

        (failure,) = events(run, ev.SessionFailed)
        assert failure.failure == "refused"
        assert "the prompt of request" in failure.message
        assert "context of 2" in failure.message


@virtual
async def test_a_request_that_failed_on_its_way_is_tried_again(loop):
    async with opened(
        loop,
        session=session_from_reward(lambda prompt, text: 1.0),
        engine=ScriptedEngine([EngineUnavailable("connection lost"), [1]]),
        rules=Rules(attempts_max=2),
    ) as run:
        run.submit([1, 2])
        await run.sample(1)

        (failure,) = events(run, ev.SessionFailed)
        assert (failure.failure, failure.message) == ("error", "EngineUnavailable: connection lost")


@virtual
async def test_a_lambda_that_hands_on_to_an_async_function_is_a_session(loop):
    async with opened(loop, session=lambda ctx: half_right(ctx), rules=Rules()) as run:
        run.submit("p")

        assert len(await run.sample(1)) == 1


@virtual
async def test_a_function_that_gives_nothing_to_await_ends_the_rollout_before_it_burns_prompts(loop):
    told = "BadSettings: the session function returned Trajectory and nothing to await; write: async def session"
    with pytest.raises(RolloutDied, match=f"will not come: {told}") as died:
        async with opened(loop, session=lambda ctx: Trajectory(reward=1.0), source=range(1000)) as run:
            await run.sample(4)
    assert type(died.value.__cause__) is BadSettings
    assert events(run, ev.SessionFailed) == []


@virtual
async def test_an_exception_that_cannot_say_what_it_is_fails_its_session_alone(loop):
    class Mute(Exception):
        def __str__(self):
            return None

    async def session(ctx):
        await anyio.sleep(1)
        if ctx.session == 0:
            raise Mute
        return Trajectory(reward=1.0)

    async with opened(loop, session=session) as run:
        run.submit("p", n=2)
        await anyio.sleep(2)

        assert [event.message for event in events(run, ev.SessionFailed)] == [
            "Mute: (its text can't be had: TypeError)"
        ]
