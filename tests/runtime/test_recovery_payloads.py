"""Payloads of a run and of its kills and marks: kept while they are needed, freed and swept when they aren't."""

import pytest

from groupstate import Rules, Trajectory
from groupstate.errors import DamagedPayload
from groupstate.log.memory import MemoryLog
from tests.runtime.scenes import events, opened, ready, virtual


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
