"""Publications of weights: run and engine agree on the version, whoever is cancelled meanwhile; what runs goes on."""

import asyncio
from typing import Any

import anyio
import pytest

from groupstate import Rules, open_run
from groupstate.core import events as ev
from groupstate.engines.port import Weights
from groupstate.engines.scripted import ScriptedEngine
from groupstate.engines.tasks import carried
from groupstate.errors import BadSettings, EngineError, LogFailed, WeightVersionError
from groupstate.log.file import FileLog
from groupstate.simulate.faults import Fault, FaultyDisk
from tests.runtime.scenes import events, half_right, opened, quiet, started, virtual


class Thorough(ScriptedEngine):
    """Carries a publication to its end, which takes a second, whoever is cancelled."""

    async def publish_weights(self, weights: Weights, weight_version: int) -> None:
        await carried(self._publish(weights, weight_version))

    async def _publish(self, weights: Weights, weight_version: int) -> None:
        await asyncio.sleep(1.0)
        await super().publish_weights(weights, weight_version)


async def cancelled(publishing: "asyncio.Task[Any]") -> bool:
    await quiet()
    publishing.cancel()
    await asyncio.wait({publishing})
    return publishing.cancelled()


@virtual
async def test_versions_may_begin_below_zero_since_only_their_differences_count(loop, tmp_path):
    options = {"session": half_right, "group_size": 2, "rules": Rules(lag_max=1)}
    async with opened(loop, tmp_path / "run", weight_version=-1, **options) as run:
        run.submit("a")
        run.submit("b")
        batch = await run.sample(1)
        assert (batch.weight_version, batch.groups[0].lag) == (-1, 0)
        await run.commit(batch)
        assert (await run.sample(1, weight_version=0)).groups[0].lag == 1

    async with opened(loop, tmp_path / "run", weight_version=-1, **options) as run:
        assert (run.weight_version, (await run.sample(1)).groups[0].weight_version) == (-1, -1)


@virtual
async def test_weights_that_the_engine_has_are_published_though_nobody_waits(loop):
    engine = Thorough([])
    async with open_run(engine=engine, clock_ns=loop.clock_ns) as run:
        assert await cancelled(started(run.publish_weights(3, {})))

        assert engine.weight_version == run.weight_version == 3


@virtual
async def test_weights_that_the_engine_does_not_have_are_not_published(loop):
    engine = ScriptedEngine([], in_flight="keep", token_s=1.0)
    async with open_run(engine=engine, clock_ns=loop.clock_ns) as run:
        publishing = started(run.publish_weights(3, {}))
        await asyncio.sleep(0)
        publishing.cancel()
        await asyncio.wait({publishing})

        assert publishing.cancelled()
        assert engine.weight_version == run.weight_version == 0


@virtual
async def test_a_version_that_the_engine_had_before_says_nothing_of_new_weights(loop):
    engine = Thorough([], weight_version=3)
    async with open_run(engine=engine, clock_ns=loop.clock_ns) as run:
        assert await cancelled(started(run.publish_weights(3, {})))

        assert run.weight_version == 0


@virtual
async def test_a_cancellation_of_a_publication_is_not_replaced_by_a_broken_log(loop):
    disk = FaultyDisk()
    log = FileLog.create("/runs/one", disk=disk, inline=True)
    with pytest.raises(LogFailed):
        async with open_run(log=log, engine=Thorough([]), clock_ns=loop.clock_ns) as run:
            publishing = started(run.publish_weights(3, {}))
            await quiet()
            disk.fault = Fault(disk.operation_count + 1, once=False)
            with pytest.raises(LogFailed):
                run.submit("p")
                run.submit("p")

            assert await cancelled(publishing)


# The engine and the run -------------------------------------------------------------------------------


@virtual
async def test_weights_reach_the_engine_before_their_version_is_current(loop):
    engine = ScriptedEngine([])
    async with opened(loop, session=half_right, engine=engine) as run:
        await run.publish_weights(1, {"w": 1.0})

        assert engine.published == [(1, {"w": 1.0})]
        assert run.weight_version == 1


@virtual
async def test_weights_that_the_engine_refuses_are_not_published(loop):
    engine = ScriptedEngine([], fits=lambda weights: False)
    async with opened(loop, session=half_right, engine=engine) as run:
        with pytest.raises(EngineError, match="don't fit"):
            await run.publish_weights(1, {"w": 1.0})

        assert run.weight_version == 0


@virtual
async def test_a_lower_version_is_refused_before_the_engine_sees_it(loop):
    engine = ScriptedEngine([])
    async with opened(loop, session=half_right, engine=engine, weight_version=3) as run:
        with pytest.raises(WeightVersionError):
            await run.publish_weights(2, {"w": 1.0})

        assert engine.published == []


@virtual
async def test_of_two_publications_at_once_the_engine_and_the_run_end_with_the_same(loop):
    class Slow(ScriptedEngine):
        async def publish_weights(self, weights, weight_version):
            await anyio.sleep(10 if weight_version == 1 else 1)
            await super().publish_weights(weights, weight_version)

    engine = Slow([])
    async with opened(loop, session=half_right, engine=engine) as run:
        await asyncio.gather(run.publish_weights(1, {"w": 1}), run.publish_weights(2, {"w": 2}), return_exceptions=True)

        assert engine.published[-1] == (2, {"w": 2})
        assert run.weight_version == engine.weight_version == 2


@virtual
async def test_weights_without_an_engine_are_refused(loop):
    async with opened(loop) as run:
        with pytest.raises(BadSettings, match="no engine"):
            await run.publish_weights(1, {"w": 1.0})


# What runs meanwhile ----------------------------------------------------------------------------------


@virtual
async def test_a_running_group_is_not_evicted_however_stale_it_gets(loop):
    async with opened(loop, rules=Rules(lag_max=2), session=half_right) as run:
        group = run.submit("p")
        await quiet()
        await run.publish_weights(9)
        assert (group.phase, run.book.totals["evicted"]) == ("running", 0)

        await anyio.sleep(2)

        assert [event.reasons for event in events(run, ev.GroupEvicted)] == [("stale",)]


@virtual
async def test_sessions_go_on_when_weights_are_published(loop):
    async with opened(loop, session=half_right, group_size=16) as run:
        run.submit("p")
        await quiet()
        await run.publish_weights(1)

        batch = await run.sample(1)

        assert len(batch.rows) == 16
        assert batch.groups[0].weight_version == 0
