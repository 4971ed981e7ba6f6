"""Whatever happens to an engine while sessions generate, each token is told with the weights that made it.

The witness: every token that the scripted engine takes from its answer is a new number, and the answer writes down
which weights were in force when it was taken. So a trajectory's tokens say by themselves when they were made, and its
spans can be held against them; neither the engine nor the transcript can make that up.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import pytest
from hypothesis import HealthCheck, Phase, example, find, given, settings
from hypothesis import strategies as st

from groupstate import Generation, Request, Run, SamplingParams, SessionContext, Trajectory, VersionSpan, open_run
from groupstate.engines.port import IN_FLIGHT, InFlight
from groupstate.engines.scripted import ScriptedEngine
from groupstate.simulate.loop import VirtualLoop, run_virtual

ENVIRONMENT = 7
FIRST_MADE = 1000
"""Tokens from here on were made by the model."""

LENGTH = 12
"""Of the answers of the script, one token a second."""

LOG_PROB = -0.5

# The witness -----------------------------------------------------------------------------------------


@attrs.frozen
class Made:
    call: int
    index: int
    """Place in the answer of that call."""
    version: int
    """Of the weights in force."""


class Answer(Sequence[int]):
    """The answer of one call, of which each token is made when it is taken."""

    def __init__(self, engine: "Witnessed", call: int) -> None:
        self._engine = engine
        self._call = call

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> Any:
        return self._engine.make(self._call, index)


class Witnessed(ScriptedEngine):
    """The engine under test, and what is known of it from outside."""

    def __init__(self, in_flight: InFlight, slots_max: int | None) -> None:
        super().__init__(
            self._answer, token_s=1.0, in_flight=in_flight, slots_max=slots_max, log_prob=LOG_PROB, start_s=0.5
        )
        self.made: list[Made] = []
        self.requests: list[Request] = []
        """Under way."""
        self.still = False
        """`pause` has returned, and `resume` was not called yet."""
        self.was_still = False
        self.asked = self.answered = 0
        """The highest version of which the publication was asked for, and of which it was over."""
        self.answers: dict[str, list[int]] = {}
        """The tokens of all answers that the latest attempt of a session was given, by the affinity of its requests."""
        self.wrong: list[str] = []
        self._calls = itertools.count()

    def _answer(self, prompt_ids: Sequence[int]) -> Answer:
        return Answer(self, next(self._calls))

    def make(self, call: int, index: int) -> int:
        version = self.published[-1][1]["version"] if self.published else 0
        if self.still:
            self.wrong.append(f"token {len(self.made)} was made while the engine stood still")
        if not self.answered <= version <= self.asked:
            self.wrong.append(f"token {len(self.made)} is of {version}, not of {self.answered} to {self.asked}")
        self.made.append(Made(call, index, version))
        return FIRST_MADE + len(self.made) - 1

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        try:
            generation = await super().generate(request)
        finally:
            self.requests.remove(request)
        self._check_policy(generation)
        self.answers[request.affinity] += generation.token_ids
        return generation

    def _check_policy(self, generation: Generation) -> None:
        if self._in_flight == "restart" and len(generation.spans) > 1:
            self.wrong.append(f"began anew, and has {generation.spans}")
        if self._in_flight == "keep" and not self.was_still and len(generation.spans) > 1:
            self.wrong.append(f"was to finish under the old weights, and has {generation.spans}")

    async def pause(self) -> None:
        self.was_still = True
        await super().pause()
        self.still = True

    async def resume(self) -> None:
        self.still = False
        await super().resume()

    def last_pass(self, call: int) -> list[int]:
        """The tokens that a call was left with: made anew, it has only those of the last time."""
        tokens: list[int] = []
        for number, made in enumerate(self.made):
            if made.call == call:
                del tokens[made.index :]
                assert len(tokens) == made.index, "an answer was not taken in order"
                tokens.append(FIRST_MADE + number)
        return tokens


# Schedules -------------------------------------------------------------------------------------------


@attrs.frozen
class Turn:
    tokens_max: int
    observed: int
    """Tokens that the environment says behind the answer."""
    cut_s: float
    """Seconds after which the session gives the answer up."""


@attrs.frozen
class Schedule:
    in_flight: InFlight
    slots_max: int | None
    sessions: tuple[tuple[tuple[Turn, ...], ...], ...]
    """Per group, per session."""
    steps: tuple[tuple[float, str, int], ...]
    """Seconds to wait, what to do then, and to which of several."""


DELAYS_S = [0.0, 0.25, 0.5, 1.0, 1.5, 2.5]
"""Tokens are made at halves of a second, so some steps fall in between and some on the same moment."""

ACTIONS = ["publish", "publish", "publish", "give_up_publishing", "pause", "sleep", "wake", "resume", "trainer_turn"]
ACTIONS += ["resume", "abort", "abort", "cancel", "requeue"]

turns = st.builds(Turn, st.integers(1, LENGTH + 1), st.integers(0, 3), st.sampled_from([math.inf, math.inf, 0.75, 3.0]))
sessions = st.lists(turns, min_size=1, max_size=4).map(tuple)
schedules = st.builds(
    Schedule,
    st.sampled_from(IN_FLIGHT),
    st.sampled_from([None, 1, 3]),
    st.lists(st.lists(sessions, min_size=1, max_size=3).map(tuple), min_size=1, max_size=2).map(tuple),
    st.lists(
        st.tuples(st.sampled_from(DELAYS_S), st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=4, max_size=16
    ).map(tuple),
)


class Driver:
    """Carries a schedule out."""

    def __init__(self, engine: Witnessed, run: Run, tasks: Any) -> None:
        self.engine = engine
        self.run = run
        self.tasks = tasks
        self.versions = itertools.count(1)

    async def carry_out(self, steps: Sequence[tuple[float, str, int]]) -> None:
        for delay_s, action, number in steps:
            await anyio.sleep(delay_s)
            await getattr(self, f"_{action}")(number)
        if self.engine.state == "asleep":
            await self.engine.wake()
        await self.engine.resume()

    async def _publish(self, number: int) -> None:
        self.tasks.start_soon(self.publish, next(self.versions), math.inf)

    async def _give_up_publishing(self, number: int) -> None:
        self.tasks.start_soon(self.publish, next(self.versions), DELAYS_S[number])

    async def publish(self, version: int, within_s: float, turn: Any = None) -> None:
        self.engine.asked = max(self.engine.asked, version)
        with anyio.move_on_after(within_s):
            await (turn.publish if turn else self.run.publish_weights)(version, {"version": version})
            self.engine.answered = version

    async def _pause(self, number: int) -> None:
        if self.engine.state != "asleep":
            await self.engine.pause()

    async def _sleep(self, number: int) -> None:
        if self.engine.state != "generating":
            await self.engine.sleep()

    async def _wake(self, number: int) -> None:
        if self.engine.state != "generating":
            await self.engine.wake()

    async def _resume(self, number: int) -> None:
        if self.engine.state != "asleep":
            await self.engine.resume()

    async def _trainer_turn(self, number: int) -> None:
        if self.engine.state == "generating":
            async with self.run.trainer_turn(sleep=number % 2 == 0) as turn:
                await anyio.sleep(DELAYS_S[number])
                await self.publish(next(self.versions), math.inf, turn)

    async def _abort(self, number: int) -> None:
        if self.engine.requests:
            self.engine.abort(self.engine.requests[number % len(self.engine.requests)])

    async def _cancel(self, number: int) -> None:
        if names := self._in_flight():
            self.run.cancel(names[number % len(names)])

    async def _requeue(self, number: int) -> None:
        if names := self._in_flight():
            self.run.requeue(names[number % len(names)])

    def _in_flight(self) -> list[str]:
        return sorted(name for name, group in self.run.book.groups.items() if group.in_flight)


def outcome(schedule: Schedule, engine: Witnessed) -> list[Trajectory]:
    """What the trainer gets of a schedule."""

    async def session(ctx: SessionContext) -> Trajectory:
        engine.answers[ctx.key] = []
        t = ctx.transcript([1])
        for turn in schedule.sessions[ctx.prompt.content][ctx.session]:
            with anyio.move_on_after(turn.cut_s):
                await t.generate(max_tokens=turn.tokens_max)
            t.observe([ENVIRONMENT] * turn.observed)
        return t.trajectory(reward=float(ctx.session), info={"key": ctx.key})

    async def main(loop: VirtualLoop) -> list[Trajectory]:
        options: dict[str, Any] = {"session": session, "engine": engine, "clock_ns": loop.clock_ns}
        async with open_run(params=SamplingParams(), **options) as run, anyio.create_task_group() as tasks:
            for number, group in enumerate(schedule.sessions):
                run.submit(number, n=len(group))
            await Driver(engine, run, tasks).carry_out(schedule.steps)
            await anyio.sleep(10_000)
            count = run.sampleable_count()
            return [row.trajectory for row in (await run.sample(count)).rows] if count else []

    return run_virtual(main)


# What must hold --------------------------------------------------------------------------------------


def check(engine: Witnessed, rows: Sequence[Trajectory]) -> None:
    assert engine.wrong == []
    assert engine.in_flight_count == 0
    for row in rows:
        check_row(engine, row)


def check_row(engine: Witnessed, row: Trajectory) -> None:
    generated = [at for at, token in enumerate(row.response_ids) if token >= FIRST_MADE]
    said = [at for start, stop in row.environment for at in range(start, stop)]
    covered = [at for span in row.spans for at in range(span.start, span.stop)]
    assert covered == generated, "spans cover each generated token exactly once, in order"
    assert sorted([*covered, *said]) == list(range(len(row.response_ids))), "and the environment has the rest"

    made = [engine.made[row.response_ids[at] - FIRST_MADE] for at in generated]
    told = [span.weight_version for span in row.spans for _ in range(span.start, span.stop)]
    assert told == [token.version for token in made], "with the version that was current when it was made"

    assert len(row.log_probs) == len(row.response_ids)
    assert all(row.log_probs[at] == LOG_PROB for at in generated)
    assert all(row.log_probs[at] == 0.0 for at in said)

    assert [row.response_ids[at] for at in generated] == engine.answers[row.info["key"]], "nothing is lost or added"
    for call, _ in itertools.groupby(made, key=lambda token: token.call):
        kept = [row.response_ids[at] for at, token in zip(generated, made, strict=True) if token.call == call]
        assert kept == engine.last_pass(call), "an answer is what was made since it last began"


TWO_VERSIONS = Schedule(
    "continue", None, (((Turn(4, 2, math.inf), Turn(4, 0, math.inf)),),), ((2.5, "publish", 0), (8.0, "publish", 0))
)


@given(schedule=schedules)
@example(schedule=TWO_VERSIONS)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_schedule_tells_every_token_with_the_version_that_made_it(schedule: Schedule) -> None:
    engine = Witnessed(schedule.in_flight, schedule.slots_max)

    check(engine, outcome(schedule, engine))


# The property can fail, and the schedules reach what they are for ------------------------------------


class Relabelling(Witnessed):
    """Gives all tokens the newest version."""

    def _generation(self, row: Any, finish_reason: Any) -> Generation:
        whole = super()._generation(row, finish_reason)
        return attrs.evolve(
            whole, spans=(VersionSpan(0, len(whole.token_ids), self.weight_version),) if row.versions else ()
        )


class Early(Witnessed):
    """Calls the version current before the weights are in force."""

    async def publish_weights(self, weights: Any, weight_version: int) -> None:
        self._weight_version = weight_version
        await super().publish_weights(weights, weight_version)


class Late(Witnessed):
    """Takes the weights, and goes on with the old version for a while."""

    async def publish_weights(self, weights: Any, weight_version: int) -> None:
        old = self._weight_version
        await super().publish_weights(weights, weight_version)
        self._weight_version = old
        await anyio.sleep(1.0)
        self._weight_version = weight_version


class Restless(Witnessed):
    """Goes on while it sleeps."""

    async def sleep(self) -> None:
        await super().sleep()
        self._state = "generating"
        self._tell()


class Forgetting(Witnessed):
    """Begins anew, and keeps what it had."""

    async def publish_weights(self, weights: Any, weight_version: int) -> None:
        kept = [list(row.token_ids) for row in self._rows.values()]
        await super().publish_weights(weights, weight_version)
        for row, tokens in zip(self._rows.values(), kept, strict=False):
            row.token_ids[:0] = tokens[: len(tokens) - len(row.token_ids)]


def fails(schedule: Schedule, kind: type[Witnessed]) -> bool:
    engine = kind(schedule.in_flight, schedule.slots_max)
    try:
        check(engine, outcome(schedule, engine))
    except AssertionError:
        return True
    except Exception:
        return False  # Found out too, but not by what is looked at here.
    return False


FIND = settings(max_examples=500, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("kind", [Relabelling, Early, Late, Restless, Forgetting])
def test_an_engine_that_is_wrong_is_found_out(kind: type[Witnessed]) -> None:
    find(schedules, lambda schedule: fails(schedule, kind), settings=FIND)


def rows_of(schedule: Schedule) -> list[Trajectory]:
    return outcome(schedule, Witnessed(schedule.in_flight, schedule.slots_max))


@pytest.mark.parametrize(
    "reaches",
    [
        lambda row: len({span.weight_version for span in row.spans}) >= 3,
        lambda row: "abort" in row.info.get("finish_reasons", ()) and len(row.info["finish_reasons"]) >= 3,
        lambda row: any(
            a.weight_version < b.weight_version and a.stop == b.start for a, b in itertools.pairwise(row.spans)
        ),
    ],
    ids=["three versions", "an abort between turns", "versions within an answer"],
)
def test_the_schedules_reach_what_they_are_for(reaches: Any) -> None:
    find(schedules, lambda schedule: any(map(reaches, rows_of(schedule))), settings=FIND)
