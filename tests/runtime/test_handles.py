"""Users who dispatch sessions themselves, from whatever thread."""

import asyncio
import json
import threading

import anyio
import anyio.to_thread
import pytest

from groupstate import Batch, Prompt, RetryableError, Rules, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.errors import (
    BadInput,
    BadSettings,
    DuplicateGroup,
    LogInUse,
    RunIsClosed,
    SampleError,
    SessionStateError,
    UnknownBatch,
    UnknownGroup,
    UnusableResult,
)
from groupstate.log.file import FileLog
from groupstate.simulate.loop import VirtualLoop
from tests.runtime.scenes import check, events, finish, killed, opened, quiet, ready, virtual

GOOD = Trajectory(reward=1.0)

# Attempts --------------------------------------------------------------------------------------------


@virtual
async def test_a_group_is_started_finished_and_sampled_by_hand(loop):
    async with opened(loop) as run:
        group = run.submit("p", n=2, group_id="g")
        assert (group.phase, group.size, group.prompt.content) == ("pending", 2, "p")

        attempts = [group.start(session, worker=f"w{session}") for session in (0, 1)]
        assert group.phase == "running"
        assert [attempt.finish(GOOD) for attempt in attempts] == [True, True]

        assert group.phase == "finished"
        assert [event.worker for event in events(run, ev.SessionStarted)] == ["w0", "w1"]
        await run.commit(await run.sample(1))
        assert group.phase == "committed"


@virtual
async def test_an_attempt_that_is_ended_twice_by_its_handle_is_misuse(loop):
    async with opened(loop) as run:
        attempt = run.submit("p", n=2).start(0)
        attempt.finish(GOOD)

        with pytest.raises(
            SessionStateError, match=r"was ended by finish\(\) on this handle, so fail\(\) cannot follow"
        ):
            attempt.fail("late")
        with pytest.raises(SessionStateError, match="one call ends an attempt"):
            attempt.finish(GOOD)

        assert run.book.totals["fenced"] == 0


@virtual
async def test_a_failed_attempt_is_recorded_with_its_kind_and_error(loop):
    async with opened(loop) as run:
        group = run.submit("p", n=3)
        group.start(0).fail(ValueError("no"))
        group.start(1).fail("the worker is gone", kind="lost")
        group.start(2).fail(TimeoutError(), kind="timeout")

        assert [(event.failure, event.message) for event in events(run, ev.SessionFailed)] == [
            ("error", "ValueError: no"),
            ("lost", "the worker is gone"),
            ("timeout", "TimeoutError: "),
        ]


@virtual
async def test_a_retryable_failure_leaves_the_session_to_be_started_again(loop):
    async with opened(loop, rules=Rules(attempts_max=3, retry_delay_s=2)) as run:
        group = run.submit("p")
        group.start(0).fail(RetryableError("busy"))
        assert group.phase == "running"
        second = group.start(0)
        second.fail("again", retryable=True)
        third = group.start(0)
        third.fail(RetryableError("busy"))

        assert (second.number, third.number, group.phase) == (2, 3, "evicted")
        assert [event.retry_in_s for event in events(run, ev.SessionFailed)] == [2, 4, None]


@virtual
async def test_a_retryable_error_can_be_declared_final(loop):
    async with opened(loop, rules=Rules(attempts_max=3)) as run:
        group = run.submit("p")
        group.start(0).fail(RetryableError("busy"), retryable=False)

        assert group.phase == "evicted"


@virtual
async def test_a_result_that_cannot_be_recorded_is_raised_and_is_the_sessions_failure(loop):
    async with opened(loop) as run:
        group = run.submit("p", n=2)
        attempt = group.start(0)

        with pytest.raises(UnusableResult, match="must be finite"):
            attempt.finish(Trajectory(reward=float("nan")))

        assert [event.failure for event in events(run, ev.SessionFailed)] == ["refused"]
        assert group.phase == "running"


@virtual
async def test_a_finish_that_comes_after_a_requeue_is_fenced(loop):
    async with opened(loop) as run:
        group = run.submit("p")
        old = group.start(0)
        run.requeue(group.id)
        assert old.cancelled

        new = group.start(0)
        assert (old.cancelled, new.cancelled) == (True, False)
        assert (old.finish(GOOD), new.finish(GOOD)) == (False, True)

        assert [(event.attempt, event.reason) for event in events(run, ev.ResultFenced)] == [(1, "attempt")]


@virtual
async def test_a_finish_that_comes_after_a_cancellation_is_fenced(loop):
    async with opened(loop) as run:
        group = run.submit("p", n=2)
        attempts = [group.start(0), group.start(1)]
        run.cancel(group.id)

        assert [attempt.cancelled for attempt in attempts] == [True, True]
        assert [attempts[0].finish(GOOD), attempts[1].fail("late")] == [False, False]
        assert [event.reason for event in events(run, ev.ResultFenced)] == ["gone", "gone"]


@virtual
async def test_a_result_for_a_finished_group_is_fenced(loop):
    async with opened(loop) as run:
        group = run.submit("p")
        group.start(0).finish(GOOD)

        assert run.ledger.finish(group.id, 0, 1, GOOD) == "duplicate"
        assert run.ledger.fail(group.id, 0, 1, "error") == "terminal"
        assert run.ledger.start(group.id, 0, 1) is None


@virtual
async def test_a_result_for_a_group_that_has_left_is_fenced_as_gone(loop):
    async with opened(loop) as run:
        group = run.submit("p")
        group.start(0).finish(GOOD)
        await run.commit(await run.sample(1))

        assert run.ledger.finish(group.id, 0, None, GOOD) == "gone"
        assert run.ledger.start(group.id, 0) is None
        assert run.ledger.fail(group.id, 0, None, "error") == "gone"


@virtual
async def test_an_attempt_that_is_open_is_not_cancelled(loop):
    async with opened(loop) as run:
        group = run.submit("p", n=2)
        first = group.start(0)
        assert not first.cancelled

        first.finish(GOOD)

        assert first.cancelled


@virtual
async def test_a_session_that_is_under_way_cannot_be_started(loop):
    async with opened(loop) as run:
        group = run.submit("p", n=2)
        group.start(0)

        with pytest.raises(SessionStateError, match="is open in attempt 1, so it cannot start"):
            group.start(0)

        assert run.book.totals["fenced"] == 0


@pytest.mark.parametrize("session", [2, -1])
@virtual
async def test_a_session_that_does_not_exist_cannot_be_started(loop, session):
    async with opened(loop) as run:
        with pytest.raises(SessionStateError, match=f"sessions 0 to 1, so there is no session {session}"):
            run.submit("p", n=2).start(session)


@virtual
async def test_a_group_that_has_left_cannot_be_started(loop):
    async with opened(loop) as run:
        group = run.submit("p")
        run.cancel(group.id)

        with pytest.raises(UnknownGroup, match="it was evicted and has left"):
            group.start(0)


@virtual
async def test_results_for_a_group_nobody_submitted_are_misuse(loop):
    async with opened(loop) as run:
        with pytest.raises(UnknownGroup, match="never submitted"):
            run.ledger.finish("nobody", 0, 1, GOOD)


@virtual
async def test_a_result_of_a_session_that_was_never_started_is_misuse(loop):
    async with opened(loop) as run:
        run.submit("p", group_id="g")

        with pytest.raises(SessionStateError, match="is waiting, so it cannot finish; start it first"):
            run.ledger.finish("g", 0, 1, GOOD)


@virtual
async def test_a_cancelled_group_can_be_cancelled_before_anything_started(loop):
    async with opened(loop) as run:
        group = run.submit("p", n=3)
        run.cancel(group.id)

        assert [event.failure for event in events(run, ev.SessionFailed)] == ["cancelled"] * 3
        assert group.phase == "evicted"


# Groups ----------------------------------------------------------------------------------------------


@virtual
async def test_pending_lists_what_nobody_has_started_oldest_first(loop):
    async with opened(loop) as run:
        for name in "abc":
            run.submit(name, group_id=name)
        run.requeue("a")
        run.pending()[1].start(0)

        assert [(group.id, group.prompt.content) for group in run.pending()] == [("a", "a"), ("c", "c")]


@virtual
async def test_pending_gives_as_many_as_are_asked_for_the_oldest_of_them(loop):
    async with opened(loop, group_size=1) as run:
        for name in "abc":
            run.submit(name, group_id=name)
        run.pending()[0].start(0)
        run.requeue("a")

        assert [group.id for group in run.pending(limit=2)] == ["a", "b"]
        assert [group.id for group in run.pending(limit=9)] == ["a", "b", "c"]
        with pytest.raises(BadInput, match="limit is 0"):
            run.pending(limit=0)


@virtual
async def test_pending_reads_prompts_back_after_reopening(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        run.submit({"q": 1}, group_id="a", n=2, dataset="sums")
        run.submit(None, group_id="b", dataset="none")

    async with opened(loop, tmp_path / "run") as run:
        groups = {group.id: group for group in run.pending()}
        assert (groups["a"].prompt.content, groups["a"].prompt.dataset, groups["a"].size) == ({"q": 1}, "sums", 2)
        assert (groups["b"].prompt.content, groups["b"].prompt.dataset) == (None, "none")


@virtual
async def test_refills_come_from_the_source_without_a_session_function(loop):
    async with opened(loop, rules=Rules(filter_metric="reward"), source=["r1", "r2"]) as run:
        finish(run.submit("p", n=2), 1.0, 1.0)

        (refill,) = run.pending()
        assert (refill.prompt.content, refill.size) == ("r1", 2)
        finish(refill, 0.0, 1.0)
        assert (await run.sample(1)).group_ids == [refill.id]


@virtual
async def test_a_shortage_is_drawn_from_the_source_without_a_session_function(loop):
    async with opened(loop, source=range(9)) as run:
        run.submit("mine")
        assert len(run.pending()) == 1, "nobody waits, so nothing is drawn"

        waiting = asyncio.ensure_future(run.sample(3))
        await quiet()

        assert [group.prompt.content for group in run.pending()] == ["mine", 0, 1]
        for group in run.pending():
            finish(group, 1.0)
        assert len(await waiting) == 3


@virtual
async def test_the_prompts_own_settings_count_before_the_runs_and_after_the_calls(loop):
    async with opened(loop, group_size=3) as run:
        sizes = [
            run.submit("p").size,
            run.submit(Prompt("p", n=5)).size,
            run.submit(Prompt("p", n=5), n=2).size,
        ]
        named = run.submit(Prompt("p", dataset="own", group_id="own"), dataset="given", group_id="given")

    assert sizes == [3, 5, 2]
    assert (named.id, named.prompt.dataset) == ("given", "given")


@pytest.mark.parametrize("group_id", ["math_12", "a/b", "a:b", "zwei\nzeilen", "käse", "g_0_1", " "])
@virtual
async def test_ids_come_back_byte_for_byte(loop, tmp_path, group_id):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, group_id, n=2)

    async with opened(loop, tmp_path / "run") as run:
        batch = await run.sample(1)

    assert batch.group_ids == [group_id]
    assert [row.key.rsplit("_", 2)[0] for row in batch.rows] == [group_id] * 2


@pytest.mark.parametrize(("options", "shown"), [({"group_id": ""}, "not empty"), ({"n": 0}, "n = 0"), ({"n": -1}, "n")])
@virtual
async def test_a_group_that_makes_no_sense_is_refused(loop, options, shown):
    async with opened(loop) as run:
        with pytest.raises(BadInput, match=shown):
            run.submit("p", **options)
        assert len(events(run)) == 1


@virtual
async def test_a_prompt_that_cannot_be_stored_is_refused(loop):
    async with opened(loop) as run:
        with pytest.raises(BadInput, match="JSON-like"):
            run.submit(object())


@virtual
async def test_an_id_that_is_taken_is_refused(loop):
    async with opened(loop) as run:
        run.submit("p", group_id="a")

        with pytest.raises(DuplicateGroup, match="it is pending"):
            run.submit("q", group_id="a")


# Batches ---------------------------------------------------------------------------------------------


@virtual
async def test_a_released_batch_is_sampled_again_with_the_lag_it_had(loop):
    async with opened(loop, rules=Rules(lag_max=0)) as run:
        ready(run, "a")
        batch = await run.sample(1)
        await run.publish_weights(5)

        await run.release(batch)

        again = await run.sample(1)
        assert (again.group_ids, again.groups[0].lag, again.number) == (["a"], 0, 2)


@pytest.mark.parametrize("by", ["batch", "number"])
@virtual
async def test_a_batch_is_committed_once(loop, by):
    async with opened(loop) as run:
        ready(run, "a")
        batch = await run.sample(1)
        named = batch if by == "batch" else batch.number
        await run.commit(named)

        for call in (run.commit, run.release):
            with pytest.raises(UnknownBatch, match="committed or returned already"):
                await call(named)
        with pytest.raises(UnknownBatch, match="never sampled"):
            await run.commit(99)


@pytest.mark.parametrize("call", ["commit", "release"])
@virtual
async def test_a_batch_of_another_run_is_refused_and_nothing_changes(loop, tmp_path, call):
    places = {"memory and memory": (None, None), "disk and memory": (tmp_path / "a", None)}
    places["disk and disk"] = (tmp_path / "b", tmp_path / "c")
    for one, other in places.values():
        async with opened(loop, one) as first, opened(loop, other) as second:
            for run in (first, second):
                ready(run, "a", "b")
            mine, theirs = await first.sample(1), await second.sample(2)
            assert mine.number == theirs.number
            before = second.book.last_seq

            told = f"^cannot {call} batch 1: it is of run '{mine.run_id}', and this is run '{theirs.run_id}'"
            with pytest.raises(UnknownBatch, match=told):
                await getattr(second, call)(mine)
            with pytest.raises(UnknownBatch, match=told):
                await getattr(second, call)(Batch.from_bytes(mine.to_bytes()))

            assert second.book.last_seq == before
            await getattr(second, call)(Batch.from_bytes(theirs.to_bytes()))
            await getattr(first, call)(mine.number)


@virtual
async def test_a_batch_knows_its_run_on_a_disk_by_the_runs_own_id(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "a")

        assert (await run.sample(1)).run_id == run.id


@virtual
async def test_a_batch_from_before_a_reopening_came_back_and_is_another_one_now(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "a")
        kept = await run.sample(1)

    async with opened(loop, tmp_path / "run") as run:
        again = await run.sample(1)
        assert (again.run_id, again.group_ids, again.number) == (kept.run_id, kept.group_ids, kept.number + 1)
        with pytest.raises(UnknownBatch, match="batch 1: it was committed or returned already"):
            await run.commit(kept)
        await run.commit(again)


# Threads ---------------------------------------------------------------------------------------------


async def test_handles_work_from_other_threads(tmp_path):
    async with open_run(tmp_path / "run", group_size=4) as run:

        def worker() -> list[bool]:
            group = run.submit("p", group_id="g")
            assert run.pending()[0].id == "g"
            attempts = [group.start(session) for session in range(4)]
            run.cancel(run.submit("q").id)
            return [attempt.finish(Trajectory(reward=float(i), text="t")) for i, attempt in enumerate(attempts)]

        assert await anyio.to_thread.run_sync(worker) == [True] * 4
        batch = await run.sample(1)

        assert [row.trajectory.metrics["reward"] for row in batch.rows] == [0.0, 1.0, 2.0, 3.0]
        check(run)


async def test_many_threads_finish_each_session_once():
    async with open_run(group_size=8) as run:
        groups = [run.submit("p") for _ in range(10)]

        def worker(session: int) -> None:
            for group in groups:
                group.start(session).finish(Trajectory(reward=float(session)))

        async with anyio.create_task_group() as tasks:
            for session in range(8):
                tasks.start_soon(anyio.to_thread.run_sync, worker, session)
        batch = await run.sample(10)

        assert len(batch.rows) == 80
        check(run)


async def test_a_closed_run_cannot_be_reached_from_other_threads():
    async with open_run(group_size=1) as run:
        group = run.submit("p")

    raised = []

    def worker() -> None:
        try:
            group.start(0)
        except RunIsClosed as error:
            raised.append(error)

    thread = threading.Thread(target=worker)
    thread.start()
    await anyio.to_thread.run_sync(thread.join)

    assert len(raised) == 1


# A log with its writer's thread, on a real loop -------------------------------------------------------


async def test_a_run_on_a_disk_with_real_threads_from_end_to_end(tmp_path):
    async def session(ctx):
        await asyncio.sleep(0)
        return Trajectory(reward=float(ctx.session), text=f"answer to {ctx.prompt.content}")

    async with open_run(tmp_path / "run", source=range(8), session=session, group_size=2) as run:
        first = await run.sample(2, weight_version=1)
        await run.commit(first)
        mark = await run.checkpoint("one")
        second = await run.sample(2, weight_version=2)
        assert not isinstance(asyncio.get_running_loop(), VirtualLoop)

    async with open_run(tmp_path / "run", source=range(8), session=session, group_size=2, resume_at=mark) as run:
        rest = await run.sample(6)
        check(run)

    assert second.group_ids == rest.group_ids[:2]
    assert sorted(group.prompt.content for group in first.groups + rest.groups) == list(range(8))
    assert rest.rows[0].trajectory.text == "answer to 2"


async def test_what_was_told_is_durable(tmp_path):
    async with open_run(tmp_path / "run", group_size=1) as run:
        log = run.ledger.log
        for number in range(20):
            ready(run, f"a{number}")
            batch = await run.sample(1)
            sampled = run.book.last_seq
            assert log.durable_seq >= sampled
            await (run.commit(batch) if number % 2 else run.release(batch))
            assert log.durable_seq > sampled
            mark = await run.checkpoint()
            assert log.durable_seq >= mark.seq


async def test_a_run_that_has_been_left_can_be_opened_at_once_though_another_task_closed_it(tmp_path):
    async with open_run(tmp_path / "run", group_size=1) as run:
        ready(run, "a")
        closing = asyncio.ensure_future(run.close())
        await asyncio.sleep(0)

    async with open_run(tmp_path / "run") as again:
        assert again.sampleable_count() == 1
    await closing


@pytest.mark.parametrize("durability", ["fsync", "os"])
async def test_what_a_run_wrote_is_there_when_it_is_opened_again(tmp_path, durability):
    async with open_run(tmp_path / "run", group_size=1, durability=durability) as run:
        ready(run, "a")

    async with open_run(tmp_path / "run", durability=durability) as run:
        assert (await run.sample(1)).group_ids == ["a"]


async def test_a_run_in_memory_leaves_no_files(tmp_path):
    async with open_run(tmp_path / "run", group_size=1, durability="memory") as run:
        ready(run, "a")

    assert list(tmp_path.iterdir()) == []


async def test_an_unknown_durability_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(BadSettings, match=r"durability is 'disk'; it is one of .*fsync"):
        await open_run(tmp_path / "run", durability="disk").__aenter__()

    assert list(tmp_path.iterdir()) == []


async def test_a_run_of_another_host_is_taken_over_only_when_asked(tmp_path):
    async with open_run(tmp_path / "run", group_size=1) as run:
        ready(run, "a")
        await run.checkpoint()
        lock = json.loads((tmp_path / "run" / "log" / "lock").read_text())
        path = killed(tmp_path / "run")
    (path / "log" / "lock").write_text(json.dumps({**lock, "host": "elsewhere", "boot": "another"}))

    with pytest.raises(LogInUse, match="elsewhere"):
        await open_run(path).__aenter__()
    async with open_run(path, take_over=True) as run:
        assert run.sampleable_count() == 1


async def test_a_run_is_written_by_one_at_a_time(tmp_path):
    async with open_run(tmp_path / "run"):
        with pytest.raises(LogInUse):
            FileLog.open(tmp_path / "run")


@virtual
async def test_a_failure_of_an_unknown_kind_leaves_the_attempt_open(loop):
    async with opened(loop, group_size=1) as run:
        attempt = run.submit("p").start(0)
        with pytest.raises(SessionStateError, match="error, timeout, cancelled, lost, empty, refused, not 'bogus'"):
            attempt.fail("x", kind="bogus")

        assert attempt.fail("x") is True


@virtual
async def test_a_failure_may_be_told_by_anything_that_has_a_text(loop):
    async with opened(loop, group_size=1) as run:
        assert run.submit("p").start(0).fail(5) is True


@virtual
async def test_what_the_log_refuses_is_the_sessions_failure_alone(loop, monkeypatch):
    async with opened(loop, group_size=1) as run:
        attempt = run.submit("p", n=2, group_id="a").start(0)
        monkeypatch.setattr(
            "groupstate.core.trajectory.record_of", lambda index, row: ev.TrajectoryRecord(index, prompt_tokens="many")
        )
        with pytest.raises(UnusableResult, match="session 0 of group 'a' can't be recorded: a post of"):
            attempt.finish(Trajectory(reward=1.0))

        assert run.book.groups["a"].sessions[0].failure == "refused"


@virtual
async def test_an_endless_structure_is_refused_with_its_session(loop):
    endless: dict = {}
    endless["self"] = endless
    async with opened(loop, group_size=1) as run:
        attempt = run.submit("p").start(0)
        with pytest.raises(UnusableResult, match="can't be stored"):
            attempt.finish(Trajectory(reward=1.0, info=endless))
        with pytest.raises(BadInput, match="can't be stored"):
            run.submit(endless)


@virtual
async def test_a_validation_with_a_prompt_that_cannot_be_stored_submits_none(loop):
    async with opened(loop) as run:
        with pytest.raises(BadInput):
            await run.validate(["a", object()])

        assert run.book.totals["submitted"] == 0


@virtual
@pytest.mark.parametrize("size", [0, "2", None])
async def test_a_batch_size_is_a_positive_integer(loop, size):
    async with opened(loop) as run:
        with pytest.raises(SampleError, match="an integer of at least 1"):
            await run.sample(size)
