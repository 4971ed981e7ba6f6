"""Logs that earlier versions wrote lead to what they led to then, and can be gone on with."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from groupstate import Run, open_run
from groupstate.core.book import Book
from groupstate.core.folding import replayed
from groupstate.core.snapshot import capture, decoded, encoded, restore
from groupstate.inspect.checking import checked
from groupstate.log.disk import OsDisk
from groupstate.log.file import FileLog
from groupstate.log.reading import beginning, read_book, read_log
from groupstate.log.rundir import RunDir
from groupstate.log.snapshots import list_snapshots
from groupstate.log.upcasts import FORMAT
from groupstate.simulate.loop import VirtualLoop, run_virtual
from tests.histories import make
from tests.histories.covered import covered, everything
from tests.histories.stories import STORIES, picky, row

GOLDEN = make.golden_logs()
CURRENT = [path for path in GOLDEN if path.parent.name == f"v{FORMAT}"]
AGAIN = f"after a change of the format or of its events, add a story and run `python -m {make.__name__}`"


def named(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


golden = pytest.mark.parametrize("path", GOLDEN, ids=named)


@pytest.fixture
def copy(path: Path, tmp_path: Path) -> Path:
    """Golden files are never written to."""
    return Path(shutil.copytree(path, tmp_path / "copy"))


def expected(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / make.EXPECTED).read_text(encoding="utf-8")))


def folded(path: Path, base: Book | None = None, start: int = 1) -> Book:
    """A book with all events from `start` on."""
    book = base or Book()
    for record in read_log(path, start):
        book.apply(record)
        book.released.clear()
    return book


# What is kept ---------------------------------------------------------------------------------------


def test_no_golden_file_was_changed_or_came_or_went() -> None:
    assert make.sums() == make.SUMS.read_text(encoding="utf-8"), "golden files stay as they are"


def test_every_kind_field_choice_and_transition_has_a_golden_log_of_this_format() -> None:
    found: set[str] = set()
    for path in CURRENT:
        base, start = beginning(path)
        found |= covered(read_log(path, start), base or Book())

    assert everything() - found == set(), AGAIN


def test_a_log_of_which_only_snapshots_tell_the_beginning_is_among_them() -> None:
    assert [path for path in CURRENT if beginning(path)[1] > 1]
    assert [path for path in CURRENT if list((path / "log").glob("*.seg.gz"))]


@pytest.mark.parametrize("name", STORIES)
def test_the_stories_can_still_be_told(name: str, tmp_path: Path) -> None:
    make.make(name, tmp_path / name)

    assert checked(tmp_path / name).events > 0


# What it leads to -----------------------------------------------------------------------------------


@golden
def test_it_leads_to_what_it_always_led_to(path: Path) -> None:
    was = expected(path)
    now = json.loads(json.dumps(make.facts(path, was["projection"])))
    first = next((n for n, (a, b) in enumerate(zip(now["digests"], was["digests"], strict=False)) if a != b), None)

    assert first is None, f"the books differ from event {was['first_seq'] + (first or 0)} on"
    assert {name: now[name] for name in was} == was


@golden
def test_nothing_is_wrong_with_it(path: Path) -> None:
    seen = checked(path)
    if expected(path)["invariants"] == "hold":
        assert seen.violations == ()
    else:
        assert 9 not in {violation.invariant for violation in seen.violations}, "it replays all the same"


@golden
def test_each_snapshot_and_the_events_behind_it_lead_to_the_same(path: Path) -> None:
    base, start = beginning(path)
    whole = folded(path, base, start)
    for seq in list_snapshots(OsDisk(), RunDir.at(path)):
        kept = read_book(path, seq)
        assert kept is not None
        assert kept.last_seq == seq
        assert folded(path, kept, seq + 1).digest() == whole.digest()


@golden
def test_it_is_opened_and_gone_on_with(path: Path, copy: Path) -> None:
    was = expected(path)

    async def story(loop: VirtualLoop) -> None:
        log = FileLog.open(copy, inline=True, now_ns=loop.clock_ns)
        async with open_run(log=log, clock_ns=loop.clock_ns, selection=_selection(path), group_size=2) as run:
            assert run.book.openings >= 2
            await _go_on(run)

    run_virtual(story)
    seen = checked(copy)
    assert seen.first_seq == was["first_seq"]
    if was["invariants"] == "hold":
        assert seen.violations == ()
    ids = {record.seq for record in read_log(copy, was["first_seq"])}
    assert min(ids) == was["first_seq"]
    assert max(ids) > was["last_seq"]


def _selection(path: Path) -> Any:
    return picky if path.name == "own_rule" else None


async def _go_on(run: Run) -> None:
    """A validation group, since those are sampled under all rules."""
    group = run.submit("one more", n=1, group_id="one more", partition="val")
    group.start(0).finish(row(1.0))
    batch = await run.sample(run.sampleable_count("val"), partition="val", timeout_s=5)
    assert "one more" in batch.group_ids
    await run.commit(batch)
    await run.publish_weights(run.weight_version + 1)
    mark = await run.checkpoint("further")
    assert mark.seq == run.book.last_seq


@golden
def test_its_book_survives_a_snapshot_of_this_version(path: Path) -> None:
    base, start = beginning(path)
    book = folded(path, base, start)

    assert restore(decoded(encoded(capture(book)))).digest() == book.digest()


@golden
def test_opened_with_its_snapshot_or_without_the_payloads_are_those_that_were_put(path: Path, copy: Path) -> None:
    was = expected(path)
    base, start = beginning(copy)

    assert make.payloads(copy, folded(copy, base, start)) == was["payloads"]
    if start == 1:
        for snapshot in (copy / "log").glob("*.snap"):
            snapshot.unlink()
        assert make.payloads(copy, replayed(read_log(copy))) == was["payloads"]
