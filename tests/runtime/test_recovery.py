"""Opening a run again: after a kill at any moment, at any byte, and at a checkpoint's mark."""

import asyncio
import gc
import itertools
from pathlib import Path

import anyio
import pytest

from groupstate import CheckpointMark, Prompt, Rules, Select, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.core.rules import recorded_rules
from groupstate.errors import BadMark, BadSettings, DamagedPayload, DuplicateGroup, NotEnoughGroups
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.runtime.sources import IteratorSource, ListSource
from groupstate.simulate.faults import FaultyDisk
from groupstate.simulate.loop import run_virtual
from tests.runtime.scenes import (
    cut,
    endless,
    events,
    finish,
    half_right,
    killed,
    last_segment,
    opened,
    quiet,
    ready,
    virtual,
)


def recovery(run) -> list[str]:
    """Names of what the last recovery recorded."""
    names = [type(event).__name__ for event in events(run)]
    return names[len(names) - 1 - names[::-1].index("RunRecovered") :]


@pytest.fixture
def collector():
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
@virtual
async def test_opening_leaves_the_collector_as_it_was(loop, collector, enabled):
    (gc.enable if enabled else gc.disable)()
    async with opened(loop):
        assert gc.isenabled() is enabled


# Kills -----------------------------------------------------------------------------------------------


@virtual
async def test_an_uncommitted_batch_comes_back_once_and_a_committed_one_never(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "a", "b", "c")
        await run.commit(await run.sample(1))
        assert (await run.sample(1)).group_ids == ["b"]
        path = killed(tmp_path / "run")

    async with opened(loop, path) as run:
        assert run.book.totals["committed"] == 1
        assert (await run.sample(2)).group_ids == ["b", "c"]
        assert run.sampleable_count() == 0


@virtual
async def test_groups_in_flight_run_again_with_their_prompt_their_stamp_and_a_new_attempt(loop, tmp_path):
    async with opened(loop, tmp_path / "run", session=endless, weight_version=3) as run:
        run.submit(Prompt("what", "sums", extra={"answer": 4}), group_id="g", n=2)
        await quiet()
        await run.publish_weights(5)
        path = killed(tmp_path / "run")

    seen = []

    async def session(ctx):
        seen.append((ctx.prompt.content, ctx.prompt.extra, ctx.prompt.dataset, ctx.session, ctx.attempt))
        return Trajectory(reward=1.0)

    async with opened(loop, path, session=session) as run:
        batch = await run.sample(1)

    assert seen == [("what", {"answer": 4}, "sums", 0, 2), ("what", {"answer": 4}, "sums", 1, 2)]
    assert (batch.groups[0].weight_version, batch.groups[0].lag) == (3, 2)


@virtual
async def test_what_had_finished_is_sampled_without_being_generated_again(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        group = run.submit("p", group_id="g")
        group.start(0).finish(Trajectory(text="kept", response_ids=(1, 2), log_probs=(-1.0, -2.0), reward=1.0))
        path = killed(tmp_path / "run")

    async with opened(loop, path, session=endless) as run:
        (row,) = (await run.sample(1)).rows

    assert (row.trajectory.text, list(row.trajectory.response_ids)) == ("kept", [1, 2])


@virtual
async def test_a_late_result_of_the_killed_process_is_fenced(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        run.submit("p", group_id="g").start(0)
        path = killed(tmp_path / "run")

    async with opened(loop, path) as run:
        reason = run.ledger.finish("g", 0, 1, Trajectory(reward=1.0))

        assert reason == "attempt"
        assert [group.id for group in run.pending()] == ["g"]


@virtual
async def test_a_sampler_that_waited_in_the_killed_process_waits_no_more(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        waiting = asyncio.ensure_future(run.sample(2))
        await quiet()
        path = killed(tmp_path / "run")
        waiting.cancel()
        await asyncio.wait({waiting})

    async with opened(loop, path) as run:
        assert run.explain().needed == 0
        ready(run, "a")
        assert (await run.sample(1)).group_ids == ["a"]


@virtual
async def test_a_second_recovery_changes_nothing_more(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "a", "b")
        await run.sample(1)
        run.submit("p", group_id="g").start(0)
        first = killed(tmp_path / "run")

    async with opened(loop, first) as run:
        assert recovery(run) == ["RunRecovered", "BatchReturned", "GroupRequeued"]
        second = killed(first)

    async with opened(loop, second) as run:
        assert recovery(run) == ["RunRecovered"]
        assert run.book.groups["g"].sessions[0].attempt == 2
        assert run.sampleable_count() == 2


@virtual
async def test_every_opening_begins_a_new_lineage_at_the_last_version(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        await run.publish_weights(4)

    async with opened(loop, tmp_path / "run") as run:
        assert (run.weight_version, run.book.lineage) == (4, 2)
    async with opened(loop, tmp_path / "run", weight_version=3) as run:
        assert (run.weight_version, run.book.lineage) == (3, 3)


@virtual
async def test_a_returned_group_keeps_the_lag_it_was_sampled_with(loop, tmp_path):
    async with opened(loop, tmp_path / "run", rules=Rules(lag_max=0)) as run:
        ready(run, "a")
        await run.sample(1)
        await run.publish_weights(7)

    async with opened(loop, tmp_path / "run", rules=Rules(lag_max=0)) as run:
        batch = await run.sample(1)

    assert [(group.group_id, group.lag) for group in batch.groups] == [("a", 0)]


@virtual
async def test_groups_keep_their_own_size_when_the_runs_changes(loop, tmp_path):
    async with opened(loop, tmp_path / "run", session=half_right, group_size=4) as run:
        run.submit("done", group_id="done")
        await run.wait_sampleable(1)
        run.submit("under way", group_id="under way")
        await quiet()
        path = killed(tmp_path / "run")

    async with opened(loop, path, session=half_right, group_size=8) as run:
        run.submit("new", group_id="new")
        batch = await run.sample(3)

    assert {group.group_id: group.size for group in batch.groups} == {"done": 4, "under way": 4, "new": 8}


@virtual
async def test_ids_of_groups_that_have_left_stay_taken(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "a")
        await run.commit(await run.sample(1))

    async with opened(loop, tmp_path / "run") as run:
        with pytest.raises(DuplicateGroup):
            run.submit("p", group_id="a")


# Rules -----------------------------------------------------------------------------------------------


@virtual
async def test_without_rules_a_run_goes_on_under_those_of_its_log(loop, tmp_path):
    rules = Rules(mode="sync", batch_size=4, filter_metric="acc")
    async with opened(loop, tmp_path / "run", rules=rules):
        pass

    async with opened(loop, tmp_path / "run") as run:
        assert run.rules == rules


@virtual
async def test_new_rules_hold_for_new_decisions_and_the_past_stays(loop, tmp_path):
    async with opened(loop, tmp_path / "run", rules=Rules(lag_max=5)) as run:
        ready(run, "old")
        await run.publish_weights(4)
        await run.commit(await run.sample(1))
        ready(run, "flat", n=2)
        finish(run.submit("p", n=2, group_id="uniform"), 1.0, 1.0)
        await run.publish_weights(6)

    async with opened(loop, tmp_path / "run", rules=Rules(lag_max=5, filter_metric="reward")) as run:
        assert run.book.totals["committed"] == 1
        assert [event.group_id for event in events(run, ev.GroupEvicted)] == ["uniform"]


# The source ------------------------------------------------------------------------------------------


async def drained(loop, path: Path, source) -> list:
    """Contents of all that is still to come, committed one by one."""
    contents = []
    async with opened(loop, path, source=source, session=half_right) as run:
        with pytest.raises(NotEnoughGroups):
            while True:
                batch = await run.sample(1)
                contents.extend(group.prompt.content for group in batch.groups)
                await run.commit(batch)
    return contents


@pytest.mark.parametrize("kind", ["list", "shuffled epochs", "iterator", "file"])
@virtual
async def test_each_prompt_is_committed_once_over_a_kill(loop, tmp_path, kind):
    jsonl = tmp_path / "prompts.jsonl"
    jsonl.write_text("".join(f'{{"prompt": {number}}}\n' for number in range(12)))

    def make():
        return {
            "list": lambda: list(range(12)),
            "shuffled epochs": lambda: ListSource(range(6), epochs=2, shuffle_seed=5),
            "iterator": lambda: IteratorSource(iter(range(12))),
            "file": lambda: str(jsonl),
        }[kind]()

    whole = await drained(loop, tmp_path / "whole", make())
    committed = []

    async with opened(loop, tmp_path / "run", source=make(), session=half_right, rules=Rules(batch_size=2)) as run:
        for _ in range(2):
            batch = await run.sample(2)
            committed += [group.prompt.content for group in batch.groups]
            await run.commit(batch)
        await run.sample(1)
        await anyio.sleep(0.5)
        path = killed(tmp_path / "run")

    after = await drained(loop, path, make())

    assert len(whole) == 12
    assert sorted(committed + after) == sorted(whole)


@virtual
async def test_an_evicted_prompt_does_not_hold_the_source_back(loop, tmp_path):
    async def third_is_uniform(ctx):
        return Trajectory(reward=1.0 if ctx.prompt.content == 2 else float(ctx.session))

    rules = Rules(filter_metric="reward")
    async with opened(
        loop, tmp_path / "run", source=range(9), session=third_is_uniform, group_size=2, rules=rules
    ) as run:
        for _ in range(5):
            await run.commit(await run.sample(1))

    async with opened(loop, tmp_path / "run", source=range(9), session=half_right, group_size=2, rules=rules) as run:
        contents = [(await run.sample(1)).groups[0].prompt.content for _ in range(3)]

    assert contents == [6, 7, 8]


@virtual
async def test_a_source_that_has_grown_is_drawn_from_again(loop, tmp_path):
    assert await drained(loop, tmp_path / "run", ["a", "b"]) == ["a", "b"]

    assert await drained(loop, tmp_path / "run", ["a", "b", "c"]) == ["c"]


# Kill at every byte ----------------------------------------------------------------------------------


def handle_phase(run, group_id: str) -> str:
    group = run.book.groups.get(group_id)
    return group.phase if group is not None else run.book.departed[group_id]


RUN = "/runs/one"
SEGMENT = f"{RUN}/log/{1:020d}.seg"


def test_cut_at_whatever_byte_what_was_acknowledged_is_there():
    disk = FaultyDisk()
    acknowledged: list[tuple[int, str]] = []
    """(Bytes of the segment when it was told, what was told)."""

    async def live(loop):
        def told(what: str) -> None:
            acknowledged.append((len(disk.read(SEGMENT)), what))

        async with opened(loop, log=FileLog.create(RUN, disk=disk, inline=True)) as run:
            groups = {name: run.submit(name, group_id=name) for name in "abc"}
            for name in "ab":
                groups[name].start(0).finish(Trajectory(reward=1.0, text=name))
            batch = await run.sample(1)
            told("sampled a")
            await run.commit(batch)
            told("committed a")
            await run.checkpoint()
            told("marked")
            await run.sample(1)
            told("sampled b")
            groups["c"].start(0)
            return disk.copy(), events(run)

    async def reopened(loop, size: int) -> str:
        """Cut the log after `size` bytes and go on with it."""
        torn = end.copy()
        torn.replace(SEGMENT, torn.read(SEGMENT)[:size])
        # The watermark isn't flushed, so after a kill it may be behind, never ahead.
        torn.remove(f"{RUN}/log/head")
        async with open_run(log=FileLog.open(RUN, disk=torn, inline=True), clock_ns=loop.clock_ns) as run:
            kept = list(itertools.takewhile(lambda event: not isinstance(event, ev.RunRecovered), events(run)))
            if any(isinstance(event, ev.RunRecovered) for event in events(run)):
                assert kept == whole[: len(kept)]
            promised = {what for at, what in acknowledged if at <= size}
            if "sampled a" in promised:
                assert handle_phase(run, "a") in {"finished", "committed"}
            if "committed a" in promised:
                assert handle_phase(run, "a") == "committed"
            if "marked" in promised:
                assert run.book.last_mark == 1
            if "sampled b" in promised:
                assert handle_phase(run, "b") == "finished"
            assert not run.book.batches
            assert not list(run.book.in_phase("running"))
            return run.book.digest()

    end, whole = run_virtual(live)

    digests = [run_virtual(lambda loop, size=size: reopened(loop, size)) for size in range(len(end.read(SEGMENT)) + 1)]
    assert len(set(digests)) > 10, "the cuts fall between different events"


def test_killed_at_whatever_byte_of_a_recovery_the_next_one_gets_as_far():
    disk = FaultyDisk()

    async def live(loop):
        async with open_run(log=FileLog.create(RUN, disk=disk, inline=True), clock_ns=loop.clock_ns) as run:
            ready(run, "a", "b")
            mark = await run.checkpoint()
            await run.commit(await run.sample(1))
            await run.sample(1)
            run.submit("c", group_id="c", n=1).start(0)
            return disk.copy(), mark

    async def recovered(loop, on: FaultyDisk, mark: CheckpointMark):
        async with opened(loop, log=FileLog.open(RUN, disk=on, inline=True), resume_at=mark) as run:
            assert {group_id: group.phase for group_id, group in run.book.groups.items()} == {
                "a": "finished",
                "b": "finished",
                "c": "pending",
            }
            assert run.book.groups["c"].sessions[0].attempt >= 2
            return on.copy()

    end, mark = run_virtual(live)
    before = len(end.read(SEGMENT))
    after = run_virtual(lambda loop: recovered(loop, end.copy(), mark)).read(SEGMENT)

    for size in range(before, len(after) + 1):
        torn = end.copy()
        torn.replace(SEGMENT, after[:size])
        torn.remove(f"{RUN}/log/head")
        run_virtual(lambda loop, torn=torn: recovered(loop, torn, mark))


@virtual
async def test_a_torn_tail_is_reported(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "a")
        path = killed(tmp_path / "run")
    torn = cut(path, last_segment(path).stat().st_size - 1)

    async with opened(loop, torn) as run:
        (event,) = events(run, ev.RunRecovered)
        assert event.torn_bytes > 0


# Checkpoints -----------------------------------------------------------------------------------------


async def trained(loop, path: Path, steps: int, marks: list[CheckpointMark], prefix: str = "g") -> None:
    """Batches of one group, each committed and marked before the next version is published."""
    async with opened(loop, path) as run:
        for step in range(run.weight_version + 1, run.weight_version + 1 + steps):
            ready(run, f"{prefix}{step}")
            await run.commit(await run.sample(1))
            await run.publish_weights(step)
            marks.append(await run.checkpoint(f"step {step}"))


@virtual
async def test_going_back_to_a_mark_undoes_the_commits_behind_it(loop, tmp_path):
    marks: list[CheckpointMark] = []
    await trained(loop, tmp_path / "run", 3, marks)

    async with opened(loop, tmp_path / "run", resume_at=marks[1]) as run:
        assert (run.weight_version, run.book.totals["committed"]) == (2, 2)
        batch = await run.sample(1)

    assert [(group.group_id, group.lag, group.prompt.content) for group in batch.groups] == [("g3", 0, "g3")]


@virtual
async def test_going_back_keeps_what_was_generated_since(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        ready(run, "before")
        mark = await run.checkpoint()
        ready(run, "after")
        run.submit("p", group_id="under way").start(0)
        await run.publish_weights(1)

    async with opened(loop, tmp_path / "run", resume_at=mark) as run:
        assert (await run.sample(2)).group_ids == ["before", "after"]
        assert [group.id for group in run.pending()] == ["under way"]


@virtual
async def test_an_eviction_behind_the_mark_is_not_undone(loop, tmp_path):
    rules = Rules(filter_metric="reward")
    async with opened(loop, tmp_path / "run", rules=rules) as run:
        mark = await run.checkpoint()
        finish(run.submit("p", n=2, group_id="flat"), 1.0, 1.0)

    async with opened(loop, tmp_path / "run", rules=rules, resume_at=mark) as run:
        assert run.book.departed == {"flat": "evicted"}


@virtual
async def test_going_back_begins_a_new_lineage_and_versions_may_be_used_again(loop, tmp_path):
    marks: list[CheckpointMark] = []
    await trained(loop, tmp_path / "run", 3, marks)

    async with opened(loop, tmp_path / "run", resume_at=marks[1]) as run:
        assert run.book.lineage > marks[1].lineage
        await run.publish_weights(3)
        assert [(event.weight_version, event.lineage) for event in events(run, ev.WeightsPublished)][-1] == (3, 2)


@virtual
async def test_work_of_the_abandoned_line_counts_its_lag_from_the_mark(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        mark = await run.checkpoint()
        await run.publish_weights(5)
        ready(run, "newer")

    async with opened(loop, tmp_path / "run", resume_at=mark) as run:
        await run.publish_weights(2)

        assert (await run.sample(1)).groups[0].lag == 2


@virtual
async def test_one_can_go_back_to_the_same_mark_again(loop, tmp_path):
    marks: list[CheckpointMark] = []
    await trained(loop, tmp_path / "run", 2, marks)

    for _ in range(2):
        async with opened(loop, tmp_path / "run", resume_at=marks[0]) as run:
            batch = await run.sample(1)
            assert batch.group_ids == ["g2"]
            await run.commit(batch)


@virtual
async def test_nothing_committed_before_the_mark_comes_back(loop, tmp_path):
    marks: list[CheckpointMark] = []
    await trained(loop, tmp_path / "run", 4, marks)

    async with opened(loop, tmp_path / "run", resume_at=marks[-1]) as run:
        assert run.sampleable_count() == 0


@virtual
async def test_a_mark_says_where_it_stands_and_survives_json(loop, tmp_path):
    async with opened(loop, tmp_path / "run", weight_version=2) as run:
        mark = await run.checkpoint("best")

        assert (mark.run_id, mark.mark, mark.weight_version, mark.lineage, mark.name) == (run.id, 1, 2, 1, "best")
        assert events(run)[mark.seq - 1] == ev.CheckpointMarked(1, 2, 1, "best")
    assert CheckpointMark.from_json(mark.to_json()) == mark


@virtual
async def test_a_mark_names_the_lineage_that_it_was_made_in(loop, tmp_path):
    async with opened(loop, tmp_path / "run"):
        pass
    async with opened(loop, tmp_path / "run") as run:
        mark = await run.checkpoint()

        assert mark.lineage == run.book.lineage == 2
        assert events(run)[mark.seq - 1].lineage == 2


@pytest.mark.parametrize("text", ["", "{}", '{"mark": "one"}', b"\xff", '{"run_id": "x", "extra": 1}'])
def test_what_is_no_mark_is_refused(text):
    with pytest.raises(BadMark, match="not a checkpoint mark"):
        CheckpointMark.from_json(text)


async def test_a_mark_carries_the_version_that_its_event_has(tmp_path):
    async with open_run(tmp_path / "run") as run:
        marking = asyncio.ensure_future(run.checkpoint())
        await asyncio.sleep(0)
        await run.publish_weights(5)
        mark = await marking

        assert mark.weight_version == 0


@virtual
async def test_a_mark_of_another_run_is_refused(loop, tmp_path):
    async with opened(loop, tmp_path / "one") as run:
        mark = await run.checkpoint()
    async with opened(loop, tmp_path / "two"):
        pass

    with pytest.raises(BadMark, match="is of run"):
        await opened(loop, tmp_path / "two", resume_at=mark).__aenter__()


@virtual
async def test_a_mark_of_a_later_log_is_refused(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        older = killed(tmp_path / "run")
        ready(run, *"abcdef")
        mark = await run.checkpoint()

    with pytest.raises(BadMark, match="the log is older than the checkpoint"):
        await opened(loop, older, resume_at=mark).__aenter__()


@virtual
async def test_a_mark_that_is_too_old_is_refused_with_those_that_are_kept(loop, tmp_path):
    marks: list[CheckpointMark] = []
    await trained(loop, tmp_path / "run", 4, marks)

    with pytest.raises(BadMark, match=r"mark 2 can't be gone back to any more; marks that are kept: 3, 4"):
        await opened(loop, tmp_path / "run", resume_at=marks[1]).__aenter__()


@virtual
async def test_a_mark_where_none_is_kept_says_so(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        mark = CheckpointMark(run_id=run.id, mark=1, seq=1, weight_version=0, lineage=1)

    with pytest.raises(BadMark, match="kept: none"):
        await opened(loop, tmp_path / "run", resume_at=mark).__aenter__()


@virtual
async def test_a_new_run_has_no_mark_to_go_back_to(loop, tmp_path):
    mark = CheckpointMark(run_id="x", mark=1, seq=1, weight_version=0, lineage=1)

    with pytest.raises(BadSettings, match="this one is new"):
        await opened(loop, tmp_path / "run", resume_at=mark).__aenter__()


@virtual
async def test_a_weight_version_that_differs_from_the_marks_is_refused(loop, tmp_path):
    async with opened(loop, tmp_path / "run", weight_version=2) as run:
        mark = await run.checkpoint()

    with pytest.raises(BadSettings, match="weight_version is 3 and the mark says 2"):
        await opened(loop, tmp_path / "run", resume_at=mark, weight_version=3).__aenter__()
    async with opened(loop, tmp_path / "run", resume_at=mark, weight_version=2) as run:
        assert run.weight_version == 2


@virtual
async def test_a_refused_opening_changes_nothing_and_lets_go_of_the_lock(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        last = run.book.last_seq + 1
    mark = CheckpointMark(run_id="another", mark=1, seq=1, weight_version=0, lineage=1)

    with pytest.raises(BadMark):
        await opened(loop, tmp_path / "run", resume_at=mark).__aenter__()

    async with opened(loop, tmp_path / "run") as run:
        assert events(run)[last - 1] == ev.RunClosed("closed")
        assert isinstance(events(run)[last], ev.RunRecovered)


# Payloads --------------------------------------------------------------------------------------------


def held(run) -> set[int]:
    """Keys of the payloads that can be read."""
    store = run.ledger.log.payloads
    found = set()
    for event in events(run):
        for ref in (getattr(event, "prompt", None), getattr(event, "payload", None)):
            if ref is not None:
                try:
                    store.get(ref)
                    found.add(ref.key)
                except DamagedPayload:
                    pass
    return found


def with_text(run, name: str) -> None:
    run.submit(name, group_id=name).start(0).finish(Trajectory(text=name, reward=1.0))


@pytest.mark.parametrize("kind", ["memory", "file"])
@virtual
async def test_payloads_go_with_a_commit_when_there_is_no_mark(loop, tmp_path, kind):
    async with opened(loop, tmp_path / "run" if kind == "file" else None) as run:
        with_text(run, "a")
        batch = await run.sample(1)
        assert len(held(run)) == 2

        await run.commit(batch)

        assert held(run) == set()


@virtual
async def test_payloads_go_with_an_eviction(loop):
    async with opened(loop, rules=Rules(lag_max=0)) as run:
        with_text(run, "a")
        await run.publish_weights(1)

        assert held(run) == set()


@virtual
async def test_payloads_that_a_kept_mark_needs_are_kept_until_it_is_pruned(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        await run.checkpoint()
        with_text(run, "a")
        await run.commit(await run.sample(1))
        assert len(held(run)) == 2

    async with opened(loop, tmp_path / "run") as run:
        assert len(held(run)) == 2
        await run.checkpoint()
        assert len(held(run)) == 2

        await run.checkpoint()

        assert held(run) == set()


@virtual
async def test_what_an_undone_commit_had_generated_can_still_be_read(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        mark = await run.checkpoint()
        with_text(run, "a")
        await run.commit(await run.sample(1))

    async with opened(loop, tmp_path / "run", resume_at=mark) as run:
        assert (await run.sample(1)).rows[0].trajectory.text == "a"


@virtual
async def test_payloads_that_nothing_refers_to_are_swept_at_the_opening(loop, tmp_path):
    async with opened(loop, tmp_path / "run") as run:
        with_text(run, "a")
        orphan = run.ledger.log.payloads.put(b"of an event that was never written")
        with_text(run, "b")

    async with opened(loop, tmp_path / "run") as run:
        with pytest.raises(DamagedPayload):
            run.ledger.log.payloads.get(orphan)
        assert len(held(run)) == 4


@virtual
async def test_a_log_without_a_sweep_is_left_as_it_is(loop):
    class Plain:
        """A payload store of somebody else's, without `keep_only`."""

        blocks = False

        def __init__(self, inner):
            self.put, self.get, self.free, self.in_memory = inner.put, inner.get, inner.free, inner.in_memory

    log = MemoryLog()
    async with opened(loop, log=log) as run:
        ready(run, "a")
    records = list(log.read())
    again = MemoryLog()
    again.post(records)
    again.payloads = Plain(log.payloads)

    async with opened(loop, log=again) as run:
        assert (await run.sample(1)).group_ids == ["a"]


# The frontier ----------------------------------------------------------------------------------------


@virtual
async def test_any_prefix_of_the_log_replays_to_the_book_the_run_had_there(loop, tmp_path):
    digests = {}
    rules = Rules(filter_metric="reward", lag_max=1)
    async with opened(loop, tmp_path / "run", source=range(20), session=half_right, group_size=2, rules=rules) as run:
        run.ledger.observers.append(lambda record: digests.setdefault(record.seq, run.book.digest()))
        for step in range(1, 5):
            await run.commit(await run.sample(2))
            await run.publish_weights(step)
            await run.checkpoint()
    records = list(run.ledger.log.read())

    for seq, digest in digests.items():
        if seq + 1 in digests:
            assert replayed(records[:seq]).digest() == digest


# Rules of another time -------------------------------------------------------------------------------


def newest(book, rules, request):
    """What became sampleable last."""
    yield Select([group.group_id for group in book.ready()][-request.size :])


@virtual
async def test_a_run_whose_rules_nobody_may_write_any_more_is_opened_and_goes_on(loop, tmp_path):
    taken_then = recorded_rules({"mode": "sync", "lag_max": 0, "on_stale": "wait"})
    async with opened(loop, tmp_path / "run", rules=taken_then) as run:
        ready(run, "a", "b", "c")
    async with opened(loop, tmp_path / "run", weight_version=5) as run:
        assert run.rules == taken_then
        assert (await run.sample(1)).group_ids == ["a"]
    async with opened(loop, tmp_path / "run", selection=newest) as run:
        assert (await run.sample(1)).group_ids == ["c"]


# Where a run is kept ---------------------------------------------------------------------------------


async def test_durability_memory_keeps_nothing_on_disk(tmp_path):
    async with open_run(tmp_path / "run", durability="memory") as run:
        run.submit("p")

    assert not (tmp_path / "run").exists()


async def test_durability_os_leaves_a_run_that_goes_on(tmp_path):
    async with open_run(tmp_path / "run", durability="os") as run:
        run.submit("p", group_id="a")
    async with open_run(tmp_path / "run", durability="os", take_over=True) as run:
        assert [group.id for group in run.pending()] == ["a"]


async def test_an_unknown_durability_is_refused_with_the_right_ones(tmp_path):
    with pytest.raises(BadSettings, match="'disk'; it is one of fsync, os, memory"):
        async with open_run(tmp_path / "run", durability="disk"):
            pass


async def test_durability_memory_passes_over_no_run_that_is_there(tmp_path):
    async with open_run(tmp_path / "run"):
        pass
    with pytest.raises(BadSettings, match="holds a run on disk"):
        async with open_run(tmp_path / "run", durability="memory"):
            pass
