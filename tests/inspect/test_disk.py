"""What a run takes on the disk: by kind, per payload file, and what may go."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import groupstate as gs
from groupstate.cli import main
from groupstate.errors import NotARun
from groupstate.inspect.disk import size_of, usage
from groupstate.log.file import FileLog
from groupstate.log.reading import read_log
from groupstate.simulate.faults import FaultyDisk
from groupstate.simulate.loop import run_virtual
from tests.runtime.scenes import opened

RUN = "/runs/one"


def with_text(run, name: str) -> None:
    run.submit(name, group_id=name).start(0).finish(gs.Trajectory(text=name * 300, reward=1.0))


def told_on_disk(tell) -> FaultyDisk:
    disk = FaultyDisk()

    async def live(loop):
        log = FileLog.create(RUN, disk=disk, inline=True, payload_file_bytes=700)
        async with opened(loop, log=log) as run:
            await tell(run)
            return disk.copy()

    return run_virtual(live)


def used(disk: FaultyDisk):
    return usage(RUN, read_log(RUN, disk=disk), disk=disk)


def test_a_run_is_told_by_kind_and_the_sum_is_the_directory() -> None:
    async def tell(run):
        with_text(run, "a")

    disk = told_on_disk(tell)
    for name in (
        "log/x.seg.tmp",
        "log/snapshot.snap",
        "payloads/0000000099.archive",
        "summary.json",
        "payloads/odd.pay",
    ):
        disk.replace(f"{RUN}/{name}", b"12345")
    found = used(disk)
    kinds = {kind.heading: (kind.files, kind.size_bytes) for kind in found.kinds}

    assert found.size_bytes == sum(size for _, size in kinds.values()) == sum(disk.sizes(RUN).values())
    assert kinds["left over"] == kinds["snapshots"] == kinds["archive files"] == kinds["other files"] == (1, 5)
    assert kinds["log segments"][0] == 1
    assert kinds["head, lock, names"][0] == 4
    assert found.seq == len(list(read_log(RUN, disk=disk)))
    assert [file.name for file in found.payload_files] == [
        f"{n:010d}.pay" for n in range(1, len(found.payload_files) + 1)
    ]
    assert any("left over from interrupted writes" in way for way in found.advice)
    assert any("other files aren't groupstate's" in way for way in found.advice)


def test_payloads_are_live_marked_or_freed() -> None:
    async def tell(run):
        with_text(run, "a")
        await run.commit(await run.sample(1))
        await run.checkpoint()
        with_text(run, "b")
        await run.commit(await run.sample(1))
        with_text(run, "c")

    disk = told_on_disk(tell)
    found = used(disk)
    files = found.payload_files

    assert sum(file.live_bytes for file in files) > 300
    assert sum(file.marked_bytes for file in files) > 300
    assert all(file.freed_bytes >= 0 for file in files)
    assert sum(file.size_bytes for file in files) == sum(f.live_bytes + f.marked_bytes + f.freed_bytes for f in files)
    assert any("are of live groups" in way for way in found.advice)
    assert any("two new marks free them" in way for way in found.advice)
    assert any("go with the last of these" in way for way in found.advice)


def test_what_nothing_needs_goes_by_itself() -> None:
    async def tell(run):
        with_text(run, "a")
        for number in range(4):
            run.ledger.log.payloads.put(b"orphan" * 200)
            run.submit(gs.Prompt(None), group_id=str(number))

    assert "go when the run is opened or goes on" in used(told_on_disk(tell)).advice[0]


def test_a_payload_file_that_goes_meanwhile_is_left_out() -> None:
    class Going(FaultyDisk):
        def open_to_read(self, path):
            if path.endswith(".pay"):
                raise FileNotFoundError(2, "No such file", path)
            return super().open_to_read(path)

    async def tell(run):
        with_text(run, "a")

    whole, disk = told_on_disk(tell), Going()
    disk._names = whole._names
    disk._directories = whole._directories

    found = used(disk)
    assert found.payload_files == ()
    assert found.advice == ()


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        usage(tmp_path, [])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 50, "3072.0 TiB")],
)
def test_sizes_in_words(count: int, text: str) -> None:
    assert size_of(count) == text


def test_the_command(driven: Path) -> None:
    told = CliRunner().invoke(main, ["disk", str(driven)])

    assert told.exit_code == 0
    assert {line.split("\t")[0] for line in told.output.splitlines()} >= {"disk", "files", "payload files"}
    seen = json.loads(CliRunner().invoke(main, ["disk", str(driven), "--json"]).output)
    assert seen["size_bytes"] == sum(path.stat().st_size for path in driven.rglob("*") if path.is_file())
    assert seen["free_bytes"] > 0
    assert CliRunner().invoke(main, ["disk", str(driven / "none")]).exit_code == 2
