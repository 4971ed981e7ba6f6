"""A run that finds no room on the disk draws nothing, says so, and goes on by itself once there is room."""

import anyio
import pytest

from groupstate import Rules, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.core.rules import Slots
from groupstate.errors import BadSettings, SampleTimeout
from groupstate.inspect.overview import overview
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.simulate.faults import FaultyDisk
from tests.runtime.scenes import ended, events, opened, quiet, started, virtual

RUN = "/runs/one"


def log_on(disk, loop, **bounds):
    make = FileLog.open if disk.exists(f"{RUN}/run.json") else FileLog.create
    return make(RUN, disk=disk, inline=True, now_ns=loop.clock_ns, **{"payload_file_bytes": 2_000, **bounds})


async def talkative(ctx):
    await anyio.sleep(0.5)
    return Trajectory(text="long " * 100, reward=float(ctx.session))


def options(**more):
    return {
        "source": range(10_000),
        "session": talkative,
        "group_size": 2,
        "rules": Rules(admission=Slots(n=2)),
        **more,
    }


@virtual
async def test_a_full_quota_holds_admission_before_the_disk_does_and_ends_by_itself(loop, caplog):
    disk = FaultyDisk()
    log = log_on(disk, loop, disk_bytes_max=30_000)
    async with opened(loop, log=log, **options()) as run:
        waiting = started(run.sample(2_000))
        await anyio.sleep(300)
        submitted = run.book.totals["submitted"]
        held = events(run, ev.AdmissionHeld)
        assert [event.reason.partition(",")[0].split()[:2] for event in held] == [["disk:", "the"]]
        assert held[0].reason.endswith("above disk_bytes_max 30000")
        assert run.book.in_flight_count() == 0
        assert sum(disk.sizes(RUN).values()) < 60_000
        told = run.explain()
        assert f"groups are sampleable, and no more are drawn: {held[0].reason}" in told.blocked_by
        assert any("`groupstate disk RUN`" in way for way in told.unblocked_by)
        seen = overview(run.ledger.log.read())
        assert held[0].reason in seen.waits[0].blocked_by
        # Somebody removes what is not the run's own; here, a part of the log's room is given back.
        log.space._bytes_max = 90_000
        await anyio.sleep(3)
        assert run.book.totals["submitted"] > submitted
        assert events(run, ev.AdmissionHeld)[1].reason == ""
        await anyio.sleep(300)
        assert len(events(run, ev.AdmissionHeld)) == 3
        await ended(waiting)
    warned = [record for record in caplog.records if "for want of room" in record.getMessage()]
    assert len(warned) == 2


@virtual
async def test_too_little_left_on_the_file_system_holds_refills_and_shortages_too(loop):
    disk = FaultyDisk(space_bytes=200_000)

    async def flat(ctx):
        await anyio.sleep(0.5)
        return Trajectory(text="long " * 100, reward=1.0, metrics={"flat": 1.0})

    log = log_on(disk, loop, disk_free_min_bytes=150_000, payload_file_bytes=1 << 30)
    rules = Rules(filter_metric="flat", eviction_streak_max=10**9)
    async with opened(loop, log=log, **options(session=flat, rules=rules)) as run:
        waiting = started(run.sample(4))
        await anyio.sleep(200)
        (held,) = events(run, ev.AdmissionHeld)
        assert "bytes are free beside the run, below disk_free_min_bytes 150000" in held.reason
        assert run.book.credits
        assert not waiting.done()
        before = run.book.totals["refills"]
        disk.space_bytes = 10_000_000
        await anyio.sleep(2)
        assert run.book.totals["refills"] > before
        await ended(waiting)


@virtual
async def test_what_is_in_flight_is_sampled_and_committed_while_nothing_is_drawn(loop):
    disk = FaultyDisk()
    log = log_on(disk, loop, disk_bytes_max=9_000)
    async with opened(loop, log=log, **options(rules=Rules(admission=Slots(n=2, ready_max=100)))) as run:
        await run.wait_sampleable(2)
        await anyio.sleep(60)
        assert events(run, ev.AdmissionHeld)
        await run.commit(await run.sample(run.sampleable_count()))
        with pytest.raises(SampleTimeout, match="no more are drawn: disk: the run takes"):
            while True:
                await run.commit(await run.sample(1, timeout_s=30))

    async with opened(loop, log=log_on(disk, loop), **options()) as run:
        assert (await run.sample(1)).groups


@virtual
async def test_a_run_that_is_opened_without_room_draws_nothing_and_says_so(loop):
    disk = FaultyDisk()
    async with opened(loop, log=log_on(disk, loop), **options()) as run:
        await run.commit(await run.sample(1))

    async with opened(loop, log=log_on(disk, loop, disk_bytes_max=100), **options()) as run:
        before = run.book.totals["submitted"]
        await anyio.sleep(5)
        assert run.book.totals["submitted"] == before
        run.submit("mine", group_id="mine")  # what a user submits himself isn't held
        assert events(run, ev.AdmissionHeld)[-1].reason.startswith("disk: ")
    async with opened(loop, log=log_on(disk, loop)) as run:
        # Nobody draws here, so it is nobody's hold.
        waiting = started(run.sample(5_000))
        await quiet()
        assert "disk" not in run.explain().blocked_by
        await ended(waiting)


async def test_on_a_real_disk_the_walk_is_in_a_thread(tmp_path):
    async with open_run(tmp_path / "run", disk_bytes_max=1, disk_free_min_bytes=1, **options()) as run:
        await anyio.sleep(0.1)
        assert run.book.totals["submitted"] == 0
        # From here on nothing is written, so nobody looks at the disk behind a commit.
        await run.ledger.log.durable(run.book.last_seq)
        run.ledger.log.space._bytes_max = None
        batch = await run.sample(1, timeout_s=20)
        assert batch.groups
    async with open_run(tmp_path / "run", disk_free_min_bytes=1) as run:
        assert run.ledger.log.space.problem == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"disk_bytes_max": 5}, "this run is kept in memory"),
        ({"path": "x", "durability": "memory", "disk_free_min_bytes": 5}, "this run is kept in memory"),
        ({"log": MemoryLog(), "disk_bytes_max": 5}, "give them to the log that you made"),
        ({"path": "x", "disk_bytes_max": 0}, "disk_bytes_max is 0"),
    ],
)
async def test_a_bound_where_there_is_no_directory_is_refused(tmp_path, monkeypatch, options, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadSettings, match=text):
        async with open_run(**options):
            pass
    assert list(tmp_path.iterdir()) == []
