"""Damage in the payload files of a run directory costs the groups that it hits: no crash, and no wrong bytes."""

import itertools
import logging
import shutil

import pytest

from groupstate import Trajectory
from groupstate.core import events as ev
from groupstate.errors import DamagedPayload, SampleError
from groupstate.log.file import FileLog
from groupstate.log.payload_files import FILE_HEADER_BYTES
from groupstate.simulate.loop import run_virtual
from tests.runtime.scenes import events, killed, opened, virtual

WAITING = ["a", "b", "c"]
"""Sampleable."""
OUT = ["d", "e"]
"""Of a batch that was out."""
UNDONE = ["f", "g"]
"""Committed behind the mark."""
PENDING = ["h", "i"]
TRAIN = [*WAITING, *OUT, *UNDONE, *PENDING]
VALIDATION = ["v", "w"]
"""One is finished, and one is pending."""
PAYLOAD_FILE_BYTES = 300


def text(name):
    return f"{name} " * 40


async def answer(ctx):
    return Trajectory(text=text(ctx.prompt.content), reward=1.0)


def done(run, name, **options):
    run.submit(name, group_id=name, **options).start(0).finish(Trajectory(text=text(name), reward=1.0))


def log_at(path, *, create=False):
    make = FileLog.create if create else FileLog.open
    return make(path, durability="os", inline=True, payload_file_bytes=PAYLOAD_FILE_BYTES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run directory as a kill leaves it, with a mark."""
    path = tmp_path_factory.mktemp("damage") / "run"
    kept = []

    async def write(loop):
        async with opened(loop, log=log_at(path, create=True)) as run:
            mark = await run.checkpoint()
            for name in UNDONE:
                done(run, name)
            await run.commit(await run.sample(2))
            for name in OUT:
                done(run, name)
            await run.sample(2)
            for name in WAITING:
                done(run, name)
            done(run, "v", partition="val")
            for name in PENDING:
                run.submit(name, group_id=name)
            run.submit("w", group_id="w", partition="val")
            kept.extend([killed(path), mark])

    run_virtual(write)
    return tuple(kept)


def files_of(path):
    return sorted((path / "payloads").glob("*.pay"))


async def lived_through(loop, path, mark=None, **options):
    """Sample all that a damaged run has, and hold every row against what was put. Returns who was evicted."""
    expected = {name for name in TRAIN if mark or name not in UNDONE}
    refills = (f"refill {number}" for number in itertools.count())
    settings = {"source": refills, "session": answer, "resume_at": mark, **options}
    async with opened(loop, log=log_at(path), **settings) as run:
        seen = set()
        while not expected <= seen | gone(run):
            batch = await run.sample(2, timeout_s=100)
            for group in batch.groups:
                assert group.prompt.content == group.group_id or group.prompt.content.startswith("refill ")
                assert [row.text for _, rows in group.sessions for row in rows] == [text(group.prompt.content)]
                seen.add(group.group_id)
            await run.commit(batch)
        evicted = gone(run)
        assert not evicted & seen
        assert {event.reasons for event in events(run, ev.GroupEvicted)} <= {("damaged",)}
        refilled = [event for event in events(run, ev.GroupSubmitted) if event.cause == "refill"]
        assert len(refilled) == len(evicted)
        return evicted | await unvalidated(run)


def gone(run):
    return {event.group_id for event in events(run, ev.GroupEvicted)}


async def unvalidated(run):
    """Validation groups that are an error."""
    try:
        batch = await run.sample(2, partition="val", timeout_s=100)
    except DamagedPayload as error:
        return {name for name in VALIDATION if f"'{name}'" in str(error)}
    assert {group.group_id for group in batch.groups} == set(VALIDATION)
    for group in batch.groups:
        assert [row.text for _, rows in group.sessions for row in rows] == [text(group.group_id)]
    return set()


def damaged(whole, damage):
    copy = whole.with_name(f"{whole.name}-damaged")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    damage(files_of(copy))
    return copy


def hit(whole, mark, damage):
    """Who is lost, without the mark and with it."""
    return [lost(whole, to, damage) for to in (None, mark)]


def lost(whole, mark, damage):
    found = []

    async def run(loop):
        found.append(await lived_through(loop, damaged(whole, damage), mark))

    run_virtual(run)
    return found[0]


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x41
    path.write_bytes(bytes(data))


def test_a_run_without_damage_loses_nobody(whole):
    assert len(files_of(whole[0])) >= 6
    assert hit(*whole, lambda files: None) == [set(), set()]


def test_a_payload_file_that_is_gone_costs_its_groups(whole):
    path, mark = whole
    every = set()
    for number in range(len(files_of(path))):
        without, rewound = hit(path, mark, lambda files, number=number: files[number].unlink())
        assert len(rewound) <= 4
        every |= without | rewound
    assert every >= set(TRAIN)
    assert hit(path, mark, lambda files: [file.unlink() for file in files])[1] >= set(TRAIN)


@pytest.mark.slow
def test_a_payload_file_that_is_cut_costs_its_groups(whole):
    path, mark = whole
    for number, file in enumerate(files_of(path)):
        size = file.stat().st_size
        for length in [0, 30, *range(FILE_HEADER_BYTES, size, 131), size - 1]:

            def cut(files, number=number, length=length):
                files[number].write_bytes(files[number].read_bytes()[:length])

            assert len(hit(path, mark, cut)[1]) <= 4


@pytest.mark.slow
def test_a_flipped_byte_costs_one_group_at_most(whole):
    path, mark = whole
    for number, file in enumerate(files_of(path)):
        for at in range(0, file.stat().st_size, 53):
            without, rewound = hit(path, mark, lambda files, n=number, at=at: flip(files[n], at))
            assert len(without) <= 1
            assert len(rewound) <= 1
            assert at >= FILE_HEADER_BYTES or not rewound


def test_files_under_each_others_names_cost_nobody(whole):
    path, mark = whole
    last = len(files_of(path)) - 1
    for one, other in [(0, 1), (1, 2), (0, last), (last - 1, last)]:

        def swap(files, one=one, other=other):
            kept = files[one].read_bytes()
            files[one].write_bytes(files[other].read_bytes())
            files[other].write_bytes(kept)

        assert hit(path, mark, swap) == [set(), set()]


@pytest.mark.slow
def test_an_older_copy_or_another_files_bytes_cost_what_they_lack(whole):
    path, mark = whole
    last = len(files_of(path)) - 1
    for number in range(last + 1):
        for other in {0, last} - {number}:

            def replace(files, number=number, other=other):
                files[number].write_bytes(files[other].read_bytes())

            assert len(hit(path, mark, replace)[1]) <= 4


def test_files_of_another_run_cost_what_they_replace(whole, tmp_path):
    other = tmp_path / "other"

    async def write(loop):
        async with opened(loop, log=log_at(other, create=True)) as run:
            for name in "zyxwvutsrq":
                done(run, name)

    run_virtual(write)
    path, mark = whole

    def mixed_up(files):
        for mine, theirs in zip(files, files_of(other), strict=False):
            shutil.copy(theirs, mine)

    assert hit(path, mark, mixed_up)[1] >= {"f", "g"}


@virtual
async def test_what_is_damaged_is_told_in_a_warning_each(loop, whole, caplog):
    path = damaged(whole[0], lambda files: files[0].unlink())
    with caplog.at_level(logging.INFO):
        evicted = await lived_through(loop, path, whole[1])

    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert evicted
    assert all(any(f"group='{name}'" in text for text in told) for name in evicted)


@virtual
async def test_pending_groups_whose_prompt_cannot_be_read_are_passed_over_and_evicted(loop, whole):
    path = damaged(whole[0], lambda files: [file.unlink() for file in files])
    async with opened(loop, log=log_at(path), source=["next"]) as run:
        assert [handle.id for handle in run.pending()] == []
        assert gone(run) == {"h", "i"}
        with pytest.raises(SampleError):
            await run.sample(1, timeout_s=1)


@virtual
async def test_many_damaged_groups_are_no_streak(loop, tmp_path):
    path = tmp_path / "run"
    async with opened(loop, log=log_at(path, create=True)) as run:
        for number in range(40):
            done(run, f"group {number}")
    for file in files_of(path):
        file.unlink()

    async with opened(loop, log=log_at(path), source=["a", "b"], session=answer) as run:
        assert [group.prompt.content for group in (await run.sample(2, timeout_s=100)).groups] == ["a", "b"]
        assert len(gone(run)) == 40


@virtual
async def test_swept_payloads_are_counted_in_a_line(loop, tmp_path, caplog):
    path = tmp_path / "run"
    async with opened(loop, log=log_at(path, create=True)) as run:
        done(run, "a")
        for _ in range(3):
            run.ledger.log.payloads.put(b"of an event that was never written")
        done(run, "b")
    with caplog.at_level(logging.INFO):
        async with opened(loop, log=log_at(path)):
            pass

    lines = [record.getMessage() for record in caplog.records if "swept" in record.getMessage()]
    assert lines == ["event='payloads of no group were swept' count=3 level='info'"]


@virtual
async def test_what_the_store_finds_damaged_while_rewriting_is_told(loop, tmp_path, caplog):
    path = tmp_path / "run"
    async with opened(loop, log=log_at(path, create=True)) as run:
        run.submit("kept", group_id="kept")
        for name in ("x", "y"):
            done(run, name)
        flip(files_of(path)[0], FILE_HEADER_BYTES + 26)
        run.ledger.log.payloads._recent.clear()
        await run.commit(await run.sample(2))
        await run.publish_weights(1)

    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in told if "payloads are damaged, so they were not kept" in text]) == 1
