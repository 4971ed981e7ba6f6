"""Functions that users give: one that can't be called as it will be is refused before a prompt is drawn."""

import functools
from typing import Any

import pytest

from groupstate import Rules, Trajectory, open_run, session_from_reward
from groupstate.core import events as ev
from groupstate.errors import BadSettings, RolloutDied
from groupstate.log.memory import MemoryLog
from groupstate.runtime.functions import call_problem, is_async, named, session_problem
from tests.runtime.scenes import events, half_right, opened, virtual


async def session(ctx: Any) -> Trajectory:
    return Trajectory(reward=1.0)


async def with_tools(tools: Any, ctx: Any, *, limit: int = 3) -> Trajectory:
    return Trajectory(reward=float(limit))


def plain(ctx: Any) -> Trajectory:
    return Trajectory(reward=1.0)


async def yielding(ctx: Any) -> Any:
    yield Trajectory(reward=1.0)


async def without_context() -> Trajectory:
    return Trajectory(reward=1.0)


async def with_keyword(ctx: Any, *, tools: Any) -> Trajectory:
    return Trajectory(reward=1.0)


class Agent:
    """An object that is called."""

    async def __call__(self, ctx: Any) -> Trajectory:
        return await session(ctx)

    async def solve(self, ctx: Any) -> Trajectory:
        return await session(ctx)

    def plain(self, ctx: Any) -> Trajectory:
        return Trajectory(reward=1.0)


class Stepper:
    def __call__(self, ctx: Any) -> Trajectory:
        return plain(ctx)


class Streamer:
    async def __call__(self, ctx: Any) -> Any:
        yield Trajectory(reward=1.0)


FIT = [session, Agent(), Agent().solve, functools.partial(with_tools, []), functools.partial(Agent()),
       functools.partial(functools.partial(with_tools, limit=5), [])]  # fmt: skip


@pytest.mark.parametrize("function", FIT, ids=["function", "object", "method", "partial", "of-object", "of-partial"])
@virtual
async def test_whatever_can_be_awaited_runs_as_a_session(loop, function):
    async with opened(loop, source=["a"], session=function) as run:
        assert len((await run.sample(1)).rows) == 1


UNFIT = [
    ("x", "session 'x' is no function; write: async def session(ctx): ..."),
    (3, "session 3 is no function; write: async def session(ctx): ..."),
    (plain, "session 'plain' is not async; write: async def plain(ctx): ..."),
    (functools.partial(plain), "session 'plain' is not async; write: async def plain(ctx): ..."),
    (Agent().plain, "session 'plain' is not async; write: async def plain(ctx): ..."),
    (Agent, "session 'Agent' is a class; give an object of it that has an async __call__(ctx)"),
    (yielding, "session 'yielding' yields, and a session returns its trajectories, all at once; write: async def "
               "yielding(ctx): ..."),
    (without_context, "session 'without_context' can't be called with (ctx), since it takes () -> "
                      "groupstate.core.trajectory.Trajectory: too many positional arguments; write: async def "
                      "without_context(ctx): ..."),
]  # fmt: skip


@pytest.mark.parametrize(("function", "text"), UNFIT)
@virtual
async def test_what_cannot_run_as_a_session_is_refused_before_a_prompt_is_drawn(loop, function, text):
    log, source = MemoryLog(), iter(["a", "b"])
    with pytest.raises(BadSettings) as refused:
        async with open_run(log=log, source=source, session=function):
            pass

    assert str(refused.value) == text
    assert (log.last_seq, next(source)) == (0, "a")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (Stepper(), "is not async; write: async def session(ctx): ..."),
        (Streamer(), "yields, and a session returns its trajectories"),
        (with_tools, "can't be called with (ctx), since it takes (tools"),
        (with_keyword, ": missing a required "),
        (functools.partial(with_keyword), ": missing a required "),
        (functools.partial(with_keyword, tools=1), ""),
    ],
)
def test_what_is_wrong_with_a_session_function_is_told(function, text):
    problem = session_problem(function)

    assert text in problem
    assert bool(text) == bool(problem)


def test_an_object_with_an_async_call_is_async():
    assert is_async(Agent())
    assert not is_async(Stepper())
    assert not is_async(plain)


def test_a_function_that_hides_what_it_takes_is_trusted():
    assert call_problem(max, "ctx") == ""


def test_a_function_is_named_by_its_name_if_it_has_one():
    assert named(functools.partial(plain)) == "'plain'"
    assert named(lambda: 1) == "'<lambda>'"
    assert named(3) == "3"


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        ("x", "reward 'x' is no function; write: def reward(prompt, text): ..."),
        (plain, "reward 'plain' can't be called with (prompt, text), since it takes (ctx"),
    ],
)
def test_a_reward_that_cannot_be_called_with_prompt_and_text_is_refused(reward, text):
    with pytest.raises(BadSettings) as refused:
        session_from_reward(reward)

    assert str(refused.value).startswith(text)
    assert str(refused.value).endswith("write: def reward(prompt, text): ...")


@virtual
async def test_a_selection_that_takes_something_else_is_refused(loop):
    log = MemoryLog()
    with pytest.raises(BadSettings, match=r"selection 'plain' can't be called with \(book, rules, request\)"):
        async with open_run(log=log, selection=plain, rules=Rules()):
            pass

    assert events(log, ev.RunStarted) == []


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
