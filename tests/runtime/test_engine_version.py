"""An engine whose weights aren't the run's current ones: its tokens would be labelled as another version's."""

import logging

from groupstate.engines.scripted import ScriptedEngine
from tests.runtime.scenes import opened, virtual

OTHER = "the engine generates under another weight version than the run's"


def told(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if OTHER in record.getMessage()]


@virtual
async def test_a_run_that_is_opened_with_an_engine_of_another_version_says_so(loop, caplog):
    async with opened(loop, weight_version=3, engine=ScriptedEngine([])):
        pass

    (text,) = told(caplog)
    assert "engine_version=0 run_version=3" in text
    assert "publish_weights(3, weights)" in text


@virtual
async def test_an_engine_of_the_runs_version_is_nothing_to_talk_about(loop, caplog):
    with caplog.at_level(logging.INFO):
        async with opened(loop, weight_version=3, engine=ScriptedEngine([], weight_version=3)) as run:
            await run.publish_weights(4, {})

    assert told(caplog) == []


@virtual
async def test_versions_that_are_published_without_weights_leave_the_engine_behind_which_is_said_once(loop, caplog):
    async with opened(loop, engine=ScriptedEngine([])) as run:
        for version in (1, 2):
            await run.publish_weights(version)

    assert len(told(caplog)) == 1


@virtual
async def test_it_is_said_again_once_the_engine_had_caught_up(loop, caplog):
    async with opened(loop, engine=ScriptedEngine([])) as run:
        await run.publish_weights(1)
        await run.publish_weights(2, {})
        await run.publish_weights(3)

    assert len(told(caplog)) == 2
