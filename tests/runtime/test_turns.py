"""Trainer and engine by turns: nothing is generated meanwhile, and the engine goes on however the turn ends."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import pytest

import groupstate.sync
from groupstate import Rules, Run, SessionContext, Trajectory
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import (
    BadSettings,
    EngineDied,
    EngineError,
    RolloutDied,
    RunIsClosed,
    SampleTimeout,
    WeightVersionError,
)
from groupstate.simulate.loop import VirtualLoop
from tests.runtime.scenes import ended, opened, quiet, started, virtual

TOKENS = 20
"""Of each answer, one every 0.1 s."""


class Clocked(Sequence[int]):
    """An answer that notes when each of its tokens is taken."""

    def __init__(self, taken: list[float]) -> None:
        self.taken = taken

    def __len__(self) -> int:
        return TOKENS

    def __getitem__(self, index: Any) -> Any:
        self.taken.append(asyncio.get_running_loop().time())
        return index


class SlowEngine(ScriptedEngine):
    """Takes a second to change its state: half before it is changed, half after. Notes all that happens."""

    def __init__(self, **options: Any) -> None:
        self.token_times: list[float] = []
        self.calls: list[str] = []
        super().__init__(lambda prompt_ids: Clocked(self.token_times), token_s=0.1, **options)

    async def _enter(self, call: str) -> None:
        await anyio.sleep(0.5)
        await super()._enter(call)
        self.calls.append(call)
        await anyio.sleep(0.5)

    async def publish_weights(self, weights: Any, weight_version: int) -> None:
        await super().publish_weights(weights, weight_version)
        self.calls.append(f"publish {weight_version} {self.state}")

    def tokens_between(self, start: float, stop: float) -> int:
        return sum(start < time < stop for time in self.token_times)


async def session(ctx: SessionContext) -> Trajectory:
    return ctx.trajectory([1], await ctx.generate([1]), reward=float(ctx.session % 2))


def colocated(loop: VirtualLoop, engine: ScriptedEngine, **options: Any) -> Any:
    settings = {"session": session, "group_size": 2, "source": range(100), **options}
    return opened(loop, engine=engine, **settings)


async def generates(engine: SlowEngine, run: Run) -> None:
    """The engine is where it was before, and goes on."""
    assert engine.state == "generating"
    assert run._controller.turn is None
    before = len(engine.token_times)
    run.submit("more")
    await anyio.sleep(1)
    assert len(engine.token_times) > before


# A turn ----------------------------------------------------------------------------------------------


@virtual
async def test_a_turn_pauses_sleeps_trains_publishes_wakes_and_resumes(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        await run.sample(1)
        async with run.trainer_turn() as turn:
            assert engine.state == "asleep"
            await turn.publish(1, {"w": 1})
        await generates(engine, run)

    assert engine.calls == ["pause", "sleep", "publish 1 asleep", "wake", "resume"]
    assert engine.published == [(1, {"w": 1})]
    assert run.weight_version == 1


@virtual
async def test_a_turn_without_sleep_only_pauses(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        async with run.trainer_turn(sleep=False) as turn:
            assert engine.state == "paused"
            await turn.publish(1, {})
        await generates(engine, run)

    assert engine.calls == ["pause", "publish 1 paused", "resume"]


@pytest.mark.parametrize("mode", ["sync", "async"])
@virtual
async def test_nothing_is_generated_from_the_pause_to_the_resume_in_a_whole_run(loop, mode):
    engine = SlowEngine()
    rules = Rules(mode=mode, batch_size=2, lag_max=None if mode == "sync" else 3)
    still: list[tuple[float, float]] = []
    async with colocated(loop, engine, rules=rules, group_size=4) as run:
        for version in range(1, 6):
            batch = await run.sample(2)
            async with run.trainer_turn() as turn:
                start = loop.time()
                await anyio.sleep(30)
                await turn.publish(version, {})
                still.append((start, loop.time()))
            await run.commit(batch)

    assert [engine.tokens_between(start, stop) for start, stop in still] == [0] * 5
    assert all(stop - start >= 30 for start, stop in still)
    assert engine.token_times
    assert engine.calls == [
        call for v in range(1, 6) for call in ("pause", "sleep", f"publish {v} asleep", "wake", "resume")
    ]


@virtual
async def test_requests_under_way_keep_their_tokens_and_go_on_under_the_new_weights(loop):
    engine = SlowEngine()
    async with colocated(loop, engine, source=None, group_size=1) as run:
        run.submit("p")
        await anyio.sleep(1.0)
        async with run.trainer_turn() as turn:
            await turn.publish(1, {})
        (row,) = (await run.sample(1)).rows

    spans = row.trajectory.spans
    assert [span.weight_version for span in spans] == [0, 1]
    assert list(row.trajectory.response_ids) == list(range(TOKENS))
    assert engine.tokens_between(2.0, 4.4) == 0


@virtual
async def test_turn_after_turn(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        for version in range(1, 4):
            async with run.trainer_turn() as turn:
                await turn.publish(version, {})
        await generates(engine, run)


@virtual
async def test_weights_may_be_published_by_the_run_as_ever(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        async with run.trainer_turn():
            await run.publish_weights(1, {})
        await run.publish_weights(2, {})

    assert [version for version, _ in engine.published] == [1, 2]


# What the states forbid ------------------------------------------------------------------------------


@virtual
async def test_a_second_turn_at_once_is_refused_from_the_first_moment_on(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        first = run.trainer_turn()
        entering = started(first.__aenter__())
        await quiet()
        second = run.trainer_turn()
        for _ in range(2):
            with pytest.raises(EngineError, match="a trainer's turn is on already"):
                await second.__aenter__()
            if not entering.done():
                with pytest.raises(EngineError, match="this turn is beginning"):
                    await first.__aenter__()
            await entering
        await first.__aexit__(None, None, None)
        async with second:
            pass
        await generates(engine, run)


@virtual
async def test_a_turn_is_used_once_and_left_once(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        turn = run.trainer_turn()
        with pytest.raises(EngineError, match="cannot leave this turn: it has not begun"):
            await turn.__aexit__(None, None, None)
        async with turn:
            pass
        with pytest.raises(EngineError, match="cannot leave this turn: it is over"):
            await turn.__aexit__(None, None, None)
        with pytest.raises(EngineError, match="this turn is over; take another"):
            await turn.__aenter__()
        await generates(engine, run)

    assert engine.calls == ["pause", "sleep", "wake", "resume"]


@virtual
async def test_a_turn_publishes_only_in_its_block(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        turn = run.trainer_turn()
        with pytest.raises(EngineError, match=r"cannot publish version 1 in this turn: it has not begun"):
            await turn.publish(1, {})
        async with turn:
            pass
        with pytest.raises(EngineError, match=r"it is over; publish in its block, or by run\.publish_weights"):
            await turn.publish(1, {})

    assert engine.published == []


@virtual
async def test_a_run_without_an_engine_has_no_turns(loop):
    async with opened(loop) as run:
        with pytest.raises(BadSettings, match=r"this run has none; open_run\(engine=\.\.\.\)"):
            async with run.trainer_turn():
                raise AssertionError("unreachable")


@virtual
async def test_an_engine_that_somebody_paused_is_left_to_him(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        await engine.pause()
        with pytest.raises(EngineError, match="the engine is paused already, by a call from outside"):
            async with run.trainer_turn():
                raise AssertionError("unreachable")

        assert engine.state == "paused"


@virtual
async def test_an_engine_that_somebody_resumed_in_the_middle_is_told(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        with pytest.raises(EngineError, match="generates in the middle of a trainer's turn"):
            async with run.trainer_turn():
                await engine.wake()
                await engine.resume()
        await generates(engine, run)
        with pytest.raises(EngineError, match="generates in the middle of a trainer's turn"):
            async with run.trainer_turn(sleep=False) as turn:
                await engine.resume()
                await turn.publish(1, {})
        await generates(engine, run)

    assert engine.published == []


@virtual
async def test_an_engine_that_the_block_woke_itself_is_only_resumed(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        async with run.trainer_turn() as turn:
            await engine.wake()
            await turn.publish(1, {})
        await generates(engine, run)

    assert engine.calls == ["pause", "sleep", "wake", "publish 1 paused", "resume"]


# However it ends -------------------------------------------------------------------------------------


class Boom(Exception):
    pass


@virtual
async def test_what_the_block_raises_goes_on_and_so_does_the_engine(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        with pytest.raises(Boom):
            async with run.trainer_turn():
                raise Boom
        await generates(engine, run)


@virtual
async def test_weights_that_are_refused_leave_the_old_version_and_the_engine_goes_on(loop):
    engine = SlowEngine(fits=lambda weights: weights != "bad")
    async with colocated(loop, engine) as run:
        with pytest.raises(EngineError, match="don't fit"):
            async with run.trainer_turn() as turn:
                await turn.publish(1, "bad")
        with pytest.raises(WeightVersionError):
            async with run.trainer_turn() as turn:
                await turn.publish(-1, {})
        await generates(engine, run)

        assert run.weight_version == 0


@virtual
async def test_an_engine_that_cannot_sleep_goes_on(loop):
    class Sleepless(SlowEngine):
        async def sleep(self) -> None:
            raise EngineError("this engine can't sleep")

    engine = Sleepless()
    async with colocated(loop, engine) as run:
        with pytest.raises(EngineError, match="can't sleep"):
            async with run.trainer_turn():
                raise AssertionError("unreachable")
        await generates(engine, run)
        async with run.trainer_turn(sleep=False):
            pass
        await generates(engine, run)


def moments() -> Iterator[float]:
    """In the middle of each wait of a turn: pause and sleep take a second each, then the block, wake and resume."""
    for step in range(5):
        yield step + 0.25  # before the engine's state has changed
        yield step + 0.75  # after it


@pytest.mark.parametrize("way", ["task", "scope", "timeout"])
@pytest.mark.parametrize("moment", list(moments()))
@virtual
async def test_a_turn_that_is_cancelled_at_any_wait_leaves_the_engine_generating(loop, moment, way):
    engine = SlowEngine()
    reached: list[str] = []

    async def turn() -> None:
        async with run.trainer_turn():
            reached.append("block")
            await anyio.sleep(1)
        reached.append("end")
        # A cancellation that came while the turn was being left is not lost.
        await anyio.sleep(10)
        reached.append("too late")

    async def within() -> None:
        if way == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(moment):
                    await turn()
        elif way == "scope":
            with anyio.move_on_after(moment) as scope:
                await turn()
            assert scope.cancelled_caught
        else:
            task = started(turn())
            await anyio.sleep(moment)
            await ended(task)
            assert task.cancelled()

    async with colocated(loop, engine) as run:
        begin = loop.time()
        await within()

        assert loop.time() - begin < 5.01
        assert ("block" in reached) == (moment > 2)
        assert "too late" not in reached
        await generates(engine, run)
        async with run.trainer_turn() as again:
            await again.publish(1, {})
        await generates(engine, run)


@virtual
async def test_being_cancelled_again_and_again_while_leaving_changes_nothing(loop):
    engine = SlowEngine()

    async def turn() -> None:
        async with run.trainer_turn():
            await anyio.sleep(1)

    async with colocated(loop, engine) as run:
        task = started(turn())
        await anyio.sleep(2.5)
        while not task.done():
            task.cancel()
            await anyio.sleep(0.7)

        assert task.cancelled()
        await generates(engine, run)


@virtual
async def test_an_engine_that_dies_in_the_block_is_told_by_the_end_of_the_turn(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        with pytest.raises(EngineDied, match="boom"):
            async with run.trainer_turn():
                engine.die(RuntimeError("boom"))
        with pytest.raises(RolloutDied):
            await run.sample(1)

        assert run._controller.turn is None


@virtual
async def test_what_the_block_raises_is_not_lost_over_an_engine_that_died(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        with pytest.raises(Boom) as caught:
            async with run.trainer_turn():
                engine.die(RuntimeError("boom"))
                raise Boom
        with pytest.raises(RolloutDied):
            await run.sample(1)

    (note,) = caught.value.__notes__
    assert "can't go on after the trainer's turn: EngineDied: the engine died: RuntimeError: boom" in note


@virtual
async def test_an_engine_that_dies_while_it_is_paused_is_told_by_the_beginning(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        entering = started(run.trainer_turn().__aenter__())
        await anyio.sleep(0.2)
        engine.die(RuntimeError("boom"))
        with pytest.raises(EngineDied, match="boom"):
            await entering
        with pytest.raises(RolloutDied):
            await run.sample(1)

        assert run._controller.turn is None


@virtual
async def test_a_cancellation_is_not_lost_over_an_engine_that_dies_meanwhile(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        entering = started(run.trainer_turn().__aenter__())
        await anyio.sleep(0.2)
        entering.cancel()
        engine.die(RuntimeError("boom"))
        with pytest.raises(asyncio.CancelledError) as caught:
            await entering
        with pytest.raises(RolloutDied):
            await run.sample(1)

    assert "meanwhile the engine failed: EngineDied" in caught.value.__notes__[0]


@virtual
async def test_a_run_that_closes_during_a_turn_lets_the_engine_go(loop):
    engine = SlowEngine()
    async with colocated(loop, engine, grace_s=1.0) as run:
        with pytest.raises(RunIsClosed, match="publish weights"):
            async with run.trainer_turn() as turn:
                await run.close()
                await turn.publish(1, {})

        assert engine.state == "generating"
        assert engine.in_flight_count == 0


@virtual
async def test_leaving_the_run_from_within_a_turn_lets_the_engine_go(loop):
    engine = SlowEngine()
    with pytest.raises(Boom):
        async with colocated(loop, engine) as run, run.trainer_turn():
            raise Boom

    assert engine.state == "generating"


# Who waits meanwhile ---------------------------------------------------------------------------------


@virtual
async def test_a_sample_that_waits_for_the_engine_is_told_of_the_turn(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        with pytest.raises(SampleTimeout, match="the trainer's turn must end"):
            async with run.trainer_turn():
                await run.sample(1, timeout_s=60)
        assert "turn" not in str(run.explain())
        assert len(await run.sample(1)) == 1


@virtual
async def test_a_sample_that_waits_for_an_engine_that_somebody_stopped_is_told_so(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        await engine.pause()
        with pytest.raises(SampleTimeout, match="the engine is paused, by a call from outside: until it is resumed"):
            await run.sample(1, timeout_s=60)
        await engine.sleep()
        with pytest.raises(SampleTimeout, match="the engine is asleep, by a call from outside"):
            await run.sample(1, timeout_s=60)
        await engine.wake()
        await engine.resume()
        assert "engine" not in str(run.explain())
        assert len(await run.sample(1)) == 1


@virtual
async def test_what_is_sampleable_can_be_sampled_in_a_turn(loop):
    engine = SlowEngine()
    async with colocated(loop, engine) as run:
        await run.wait_sampleable(1)
        async with run.trainer_turn():
            assert len(await run.sample(1)) == 1
            assert "turn" not in str(run.explain())


# Blocking --------------------------------------------------------------------------------------------


def test_a_trainer_without_async_takes_turns_too():
    engine = ScriptedEngine(lambda prompt_ids: [5, 6], token_s=0.001)
    with groupstate.sync.open_run(session=session, engine=engine, source=range(100), group_size=2) as run:
        for version in range(1, 4):
            batch = run.sample(1, timeout_s=30)
            with run.trainer_turn() as turn:
                assert engine.state == "asleep"
                turn.publish(version, {})
            assert engine.state == "generating"
            run.commit(batch)
        with pytest.raises(Boom), run.trainer_turn(sleep=False):
            assert engine.state == "paused"
            raise Boom
        assert engine.state == "generating"
        with run.trainer_turn(), pytest.raises(EngineError, match="on already"), run.trainer_turn():
            raise AssertionError("unreachable")
        with pytest.raises(EngineError, match="it is over"):
            turn.publish(4, {})

        assert run.weight_version == 3
    with pytest.raises(RunIsClosed), run.trainer_turn():
        raise AssertionError("unreachable")
    assert engine.state == "generating"
