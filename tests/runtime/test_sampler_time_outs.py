"""How long a sample waits: time-outs, stalls that are told, and what it is said to wait for."""

import logging

import anyio
import pytest

from groupstate import Rules, Trajectory
from groupstate.core import events as ev
from groupstate.errors import BadInput, SampleTimeout
from tests.runtime.scenes import ended, endless, events, finish, opened, quiet, ready, started, virtual

# Time-outs -------------------------------------------------------------------------------------------


@virtual
async def test_a_time_out_says_what_was_waited_for(loop):
    async with opened(loop) as run:
        run.submit("slow", group_id="slow").start(0)

        with pytest.raises(SampleTimeout, match=r"(?s)within 5 s.*0 of 2 groups.*'slow' is running.*submit") as caught:
            await run.sample(2, timeout_s=5)

        assert isinstance(caught.value, TimeoutError)
        assert caught.value.timeout_s == 5
        assert caught.value.explanation.in_flight[0].group_id == "slow"
        assert str(caught.value) == f"no batch within 5 s\n{caught.value.explanation}"
        assert loop.time() == pytest.approx(5)
        assert [event.reason for event in events(run, ev.BatchRequestCancelled)] == ["timeout"]


@pytest.mark.parametrize("timeout_s", [float("nan"), -1, -0.5, "5", True], ids=repr)
@pytest.mark.parametrize("call", ["sample", "validate"])
@virtual
async def test_a_time_out_that_is_no_duration_is_refused_before_anything_is_changed(loop, call, timeout_s):
    async with opened(loop) as run:
        before = run.book.last_seq
        with pytest.raises(BadInput) as refused:
            if call == "sample":
                await run.sample(1, weight_version=3, timeout_s=timeout_s)
            else:
                await run.validate(["p"], timeout_s=timeout_s)

        assert str(refused.value) == f"timeout_s is {timeout_s!r}; it must be a number of seconds, at least 0"
        assert run.book.last_seq == before


@virtual
async def test_a_time_out_without_end_is_none(loop):
    async with opened(loop, rules=Rules(stall_s=0)) as run:
        waiting = started(run.sample(1, timeout_s=float("inf")))
        await anyio.sleep(10**9)
        ready(run, "a")

        assert (await waiting).group_ids == ["a"]


@virtual
async def test_a_time_out_of_zero_takes_what_is_there(loop):
    async with opened(loop) as run:
        ready(run, "a")

        assert (await run.sample(1, timeout_s=0)).group_ids == ["a"]
        with pytest.raises(SampleTimeout):
            await run.sample(1, timeout_s=0)


@virtual
async def test_an_answer_in_time_beats_the_deadline(loop):
    async with opened(loop) as run:
        group = run.submit("a")
        loop.call_later(4, finish, group, 1.0)

        assert len(await run.sample(1, timeout_s=5)) == 1


@virtual
async def test_groups_that_come_in_the_last_moment_are_no_time_out(loop):
    async with opened(loop) as run:
        attempt = run.submit("p", n=1).start(0)
        loop.call_later(5, attempt.finish, Trajectory(reward=1.0))

        assert await run.wait_sampleable(1, timeout_s=5) == 1


@virtual
async def test_explain_says_what_the_oldest_waiter_lacks(loop):
    async with opened(loop, source=range(9), session=endless) as run:
        assert run.explain().needed == 0
        waiting = started(run.sample(2))
        await quiet()

        explanation = run.explain()

        assert (explanation.needed, explanation.sampleable, explanation.in_flight_count) == (2, 0, 4)
        assert explanation.blocked_by == "0 of 2 groups are sampleable"
        await ended(waiting)


# Stalls ----------------------------------------------------------------------------------------------


def stalls(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "stalled" in record.getMessage()]


@virtual
async def test_a_stall_is_told_each_time_that_nothing_has_happened_for_stall_s(loop, caplog):
    async with opened(loop, rules=Rules(stall_s=10)) as run:
        run.submit("slow", group_id="slow").start(0)

        with pytest.raises(SampleTimeout):
            await run.sample(1, timeout_s=35)

    assert len(stalls(caplog)) == 3
    assert "'slow' is running" in stalls(caplog)[0].getMessage()


@virtual
async def test_nothing_is_told_while_progress_goes_on(loop, caplog):
    async with opened(loop, rules=Rules(stall_s=10)) as run:
        for second in range(0, 40, 5):
            loop.call_later(second, run.submit, f"p{second}")

        with pytest.raises(SampleTimeout):
            await run.sample(1, timeout_s=39)

    assert stalls(caplog) == []


@virtual
async def test_a_stall_is_told_stall_s_after_the_last_progress(loop, caplog):
    async with opened(loop, rules=Rules(stall_s=10)) as run:
        loop.call_later(1, run.submit, "p")

        with pytest.raises(SampleTimeout):
            await run.sample(1, timeout_s=11.5)

    assert len(stalls(caplog)) == 1


@virtual
async def test_no_stall_is_told_with_stall_s_zero(loop, caplog):
    async with opened(loop, rules=Rules(stall_s=0)) as run:
        with pytest.raises(SampleTimeout):
            await run.sample(1, timeout_s=3600)

    assert stalls(caplog) == []


@virtual
async def test_looking_out_for_groups_tells_of_a_stall_and_ends_in_time(loop, caplog):
    async with opened(loop, rules=Rules(stall_s=10)) as run:
        run.submit("slow", group_id="slow").start(0)

        with pytest.raises(SampleTimeout, match="0 of 2 groups are sampleable") as out:
            await run.wait_sampleable(2, timeout_s=35)

    assert anyio.current_time() == pytest.approx(35)
    assert (out.value.timeout_s, out.value.explanation.needed) == (35, 2)
    assert len(stalls(caplog)) == 3
    assert "call='wait_sampleable()'" in stalls(caplog)[0].getMessage()
    assert "'slow' is running" in stalls(caplog)[0].getMessage()
