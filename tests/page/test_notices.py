"""What the page says of a log that is sound, breaks an invariant, or isn't whole."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION
from groupstate.log.file import FileLog
from tests.histories import make
from tests.page.made_runs import MadeRun, records, write
from tests.page.seen import settle, text


def test_a_sound_log_is_called_sound(made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]) -> None:
    page = show_run(made[0])

    assert text(page, "#verdict-chip") == "\u2713 log is sound"
    assert "nothing is wrong" in text(page, "#verdict-text")
    assert page.locator("#invariants li").count() >= 10


def test_a_breach_is_named_and_leads_to_its_event(tmp_path: Path, show_run: Callable[..., Page]) -> None:
    events = [
        ev.RunStarted("r", {}, RULES_VERSION, 0),
        ev.GroupSubmitted("a", 1, ev.TRAIN, 0, 1, "submit"),
        ev.GroupFinished("a"),
        ev.WeightsPublished(1),
    ]
    kept = [ev.Record(seq, seq * 1_000_000, event) for seq, event in enumerate(events, 1)]
    page = show_run(write(tmp_path / "run", kept, prompts=None))
    page.locator("#violations .seq").first.click()
    settle(page)

    assert "wrong" in (page.get_attribute("#verdict-chip", "class") or "")
    assert text(page, "#verdict-text").startswith("\u2717 No.")
    assert page.evaluate("document.groupstate.seq") == 3


def _damaged(folder: Path) -> Path:
    run = write(folder / "run", records(MadeRun(100)), prompts=None)
    segment = next((run / "log").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    return run


def _empty(folder: Path) -> Path:
    FileLog.create(folder / "run", inline=True, durability="os")
    return folder / "run"


def _compacted(folder: Path) -> Path:
    return next(path for path in make.golden_logs() if path.name == "compacted")


def _open(folder: Path) -> Path:
    return write(folder / "run", records(MadeRun(100, closed=False)), prompts=None)


@pytest.mark.parametrize(
    ("run", "notice", "state"),
    [
        (_damaged, "The log is damaged.", "open"),
        (_empty, "Nothing yet.", "no event yet"),
        (_compacted, "The beginning is gone.", None),
        (_open, "", "open"),
    ],
    ids=["damaged", "empty", "compacted", "open"],
)
def test_a_run_that_is_not_whole_says_so(
    run: Callable[[Path], Path], notice: str, state: str | None, tmp_path: Path, show_run: Callable[..., Page]
) -> None:
    page = show_run(run(tmp_path))
    page.evaluate("document.groupstate.run.n && document.groupstate.choose(0)")
    page.click("#by-version")
    settle(page)

    assert notice in page.locator("#notices").inner_text()
    assert state in (None, text(page, "#state"))
