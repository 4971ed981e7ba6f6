"""The table of groups on the page: found, sorted, walked by keys, and one of them told."""

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page

from groupstate.core import events as ev
from tests.page.seen import column, go_to, phases_at, settle, text


def test_search_looks_into_ids_prompts_and_errors(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    run, kept = made
    page = show_run(run)

    def found(query: str) -> str:
        page.fill("#search", query)
        settle(page)
        return text(page, "#groups-count")

    lost = {r.event.group_id for r in kept if isinstance(r.event, ev.SessionFailed) and "CUDA" in r.event.message}
    apples = sum(number % 89 + 11 == 57 for number in range(600))
    assert found("g123") == "1 of 600"
    assert page.locator("#rows .row:not([hidden])").all_inner_texts()[0].startswith("g123")
    assert page.locator("#rows .row:not([hidden])").count() == 1
    assert found('"57 apples"') == f"{apples} of 600"
    assert found("cuda memory") == f"{len(lost)} of 600"
    assert found("no such thing") == "0 of 600"
    assert text(page, "#none") == "No group matches."
    assert found("") == "600"


def test_a_phase_can_be_picked_and_follows_the_slider(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    run, kept = made
    page = show_run(run)
    page.select_option("#phase-filter", label="running")
    for seq in (2_000, 4_000):
        go_to(page, seq)
        expected = phases_at(kept, seq)

        assert text(page, "#groups-count").split(" of ")[0] == str(expected["running"])
        assert set(column(page, "Phase")) == {"running"}


def test_a_click_on_a_column_sorts_by_it_and_another_turns_it_round(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    page = show_run(made[0])
    head = page.locator("#columns > div", has_text="reward")
    head.locator("button").click()
    settle(page)
    falling = [float(value) for value in column(page, "reward")]
    ways = [head.get_attribute("aria-sort")]
    head.locator("button").click()
    settle(page)
    rising = [float(value) for value in column(page, "reward")]
    ways.append(head.get_attribute("aria-sort"))
    page.locator("#columns > div", has_text="Group").locator("button").click()
    settle(page)

    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 1.0
    assert rising == sorted(rising)
    assert rising[0] == 0.0
    assert ways == ["descending", "ascending"]
    assert column(page, "Group") == sorted(column(page, "Group"))


def test_a_group_is_told_as_the_log_has_it(made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]) -> None:
    run, kept = made
    page = show_run(run)
    group = next(r.event.group_id for r in kept if isinstance(r.event, ev.SessionFailed) and r.event.retry_in_s)
    page.fill("#search", group)
    settle(page)
    page.locator("#rows .row:not([hidden])").first.click()
    settle(page)
    about = [r for r in kept if getattr(r.event, "group_id", None) == group]
    numbers = [int(number) for number in page.locator("#group .events .seq").all_inner_texts()]
    events = page.locator("#group .events").inner_text()
    page.locator("#group .events .seq").nth(3).click()
    settle(page)

    assert {r.seq for r in about} <= set(numbers)
    assert numbers == sorted(numbers)
    assert "it will be tried again" in events
    assert "attempt 2" in events
    assert text(page, "#group-title") == f"Group {group}"
    assert page.evaluate("document.groupstate.seq") == numbers[3]
    assert page.locator("#group .events li.is-later").count() == len(numbers) - 4
    ends = sum(isinstance(r.event, ev.SessionFinished | ev.SessionFailed) for r in about)
    assert page.evaluate("document.groupstate.group.boxes.filter((box) => box.attempt).length") == ends


def test_the_table_is_walked_by_keys(made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]) -> None:
    page = show_run(made[0])
    page.focus("#table")
    seen = []
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "End", "Home", "PageDown"):
        page.keyboard.press(key)
        settle(page)
        seen.append(page.evaluate("document.groupstate.chosen"))
    visible = page.locator("#rows .row.chosen").bounding_box()
    body = page.locator("#rows").bounding_box()

    assert seen[:5] == [0, 1, 0, 599, 0]
    assert seen[5] > 5
    assert visible is not None
    assert body is not None
    assert body["y"] <= visible["y"] <= body["y"] + body["height"] - 30


def test_everything_can_be_reached_by_the_tabulator(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    page = show_run(made[0])
    go_to(page, 500)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))

    assert {"theme", "first", "back", "forth", "last", "slider", "key", "by-time", "by-version"} <= reached
    assert {"metric", "search", "phase-filter", "table", "span-life"} <= reached
