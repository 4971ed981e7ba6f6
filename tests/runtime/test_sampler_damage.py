"""Groups whose payload can't be read when they are sampled or started."""

import anyio
import pytest

from groupstate import Rules
from groupstate.core import events as ev
from groupstate.errors import DamagedPayload, SampleTimeout
from tests.runtime.scenes import events, finish, half_right, opened, quiet, ready, started, virtual


def damage(run, ref) -> None:
    run.ledger.log.payloads._data[ref.key] = b"?"


@virtual
async def test_a_group_whose_payload_cannot_be_read_is_evicted_as_damaged_and_the_wait_goes_on(loop):
    async with opened(loop) as run:
        ready(run, "a", "b")
        damage(run, run.book.group("a").prompt)

        batch = await run.sample(1)

        assert batch.group_ids == ["b"]
        assert [(event.group_id, event.reasons) for event in events(run, ev.GroupEvicted)] == [("a", ("damaged",))]


@virtual
async def test_a_time_out_is_told_as_it_was_given_though_the_wait_began_anew_for_a_damaged_group(loop):
    async with opened(loop, rules=Rules(stall_s=0)) as run:
        ready(run, "a")
        damage(run, run.book.group("a").prompt)
        waiting = started(run.sample(2, timeout_s=1234567.5))
        await anyio.sleep(1000)
        ready(run, "b")
        await quiet()
        assert [event.group_id for event in events(run, ev.GroupEvicted)] == ["a"]

        with pytest.raises(SampleTimeout, match=r"^no batch within 1234567\.5 s"):
            await waiting
        assert loop.time() == pytest.approx(1234567.5)


@virtual
async def test_a_damaged_validation_group_is_an_error_and_stays(loop):
    async with opened(loop) as run:
        finish(run.submit("v", partition="val", group_id="v"), 1.0)
        damage(run, run.book.group("v").prompt)

        with pytest.raises(DamagedPayload, match="'v'"):
            await run.sample(1, partition="val")

        assert run.sampleable_count("val") == 1


@virtual
async def test_a_damaged_prompt_fails_its_group_before_any_session_starts(loop):
    async with opened(loop, session=half_right) as run:
        run.submit("p", group_id="a")
        run._controller.prompts.clear()
        damage(run, run.book.group("a").prompt)
        await anyio.sleep(5)

        assert [event.reasons for event in events(run, ev.GroupEvicted)] == [("damaged",)]
        assert events(run, ev.SessionStarted) == []


@virtual
async def test_a_group_that_starts_over_has_nothing_of_what_was_damaged(loop):
    async with opened(loop, rules=Rules(mode="sync", failure="keep")) as run:
        failed = run.submit("p", n=2, group_id="a")
        for session in range(2):
            failed.start(session).fail("no luck")
        # Nobody samples, so that the rules of a sync trainer don't look yet.
        run._controller.mark_damaged({"a": "told so"})

        run.requeue("a")
        finish(failed, 0.0, 1.0)

        assert (await run.sample(1, timeout_s=1)).group_ids == ["a"]
        assert events(run, ev.GroupEvicted) == []
