"""The page at a place in the log: what it shows there, and how one gets there."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION
from tests.page.made_runs import write
from tests.page.seen import column, go_to, legend, phases_at, settle, text, tile

PHASES = ("pending", "running", "finished", "failure", "sampled", "evicted", "committed")


def test_the_page_shows_the_run_as_it_was_at_the_slider(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    run, kept = made
    page = show_run(run)
    for seq in (1, 2, 500, len(kept) // 2, len(kept) - 7, len(kept)):
        go_to(page, seq)
        expected = phases_at(kept, seq)
        evicted = [r.event.reasons for r in kept[:seq] if isinstance(r.event, ev.GroupEvicted)]

        assert legend(page) == expected, seq
        assert tile(page, "Submitted") == sum(expected.values())
        assert tile(page, "Trained on") == expected["committed"]
        for row in page.locator("#evictions .bar-row").all():
            reason = row.locator("b").inner_text()
            shown = int(row.locator(".value").inner_text().split()[0].replace(",", ""))
            assert shown == sum(reason in reasons for reasons in evicted), (seq, reason)
        assert text(page, "#groups-count") == str(sum(expected.values()))


def test_validation_is_told_apart_from_what_was_trained_on(tmp_path: Path, show_run: Callable[..., Page]) -> None:
    events: list[ev.AnyEvent] = [ev.RunStarted("r", {}, RULES_VERSION, 0)]
    for number, (name, partition) in enumerate([("a", ev.TRAIN), ("b", ev.VALIDATION), ("c", ev.VALIDATION)], 1):
        events += [
            ev.GroupSubmitted(name, 1, partition, 0, 1, "submit"),
            ev.SessionStarted(name, 0, 1),
            ev.SessionFinished(name, 0, 1, (ev.TrajectoryRecord(0, {"reward": 1.0}),)),
            ev.GroupFinished(name),
            ev.BatchRequested(number, partition, 1, 0),
            ev.BatchSampled(number, number, partition, (name,), 0, (0,)),
            ev.BatchCommitted(number),
        ]
    kept = [ev.Record(seq, seq * 1_000_000, event) for seq, event in enumerate(events, 1)]
    page = show_run(write(tmp_path / "run", kept, prompts=None))

    assert [tile(page, title) for title in ("Submitted", "Trained on", "Validation")] == [3, 1, 2]
    assert "100 % of training" in page.locator("#tiles").inner_text()
    page.select_option("#partition", label=ev.VALIDATION)
    settle(page)
    assert [tile(page, title) for title in ("Submitted", "Validation")] == [2, 2]
    assert "Trained on" not in page.locator("#tiles").inner_text()
    page.select_option("#partition", label=ev.TRAIN)
    settle(page)
    assert [tile(page, title) for title in ("Submitted", "Trained on")] == [1, 1]
    assert "Validation" not in page.locator("#tiles").inner_text()
    for group, words in enumerate(["it is trained on", "it ended as validation"]):
        page.evaluate("(group) => document.groupstate.choose(group)", group)
        settle(page)
        assert words in page.locator(".events").first.inner_text()


def test_histograms_count_what_the_log_holds_at_the_slider(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    run, kept = made
    page = show_run(run)
    for seq in (3, 5_000, len(kept)):
        go_to(page, seq)
        events = [record.event for record in kept[:seq]]
        sampled = Counter(lag for event in events if isinstance(event, ev.BatchSampled) for lag in event.lags)
        evicted = Counter(event.lag for event in events if isinstance(event, ev.GroupEvicted))
        rewards = Counter(e.trajectories[-1].metrics["reward"] for e in events if isinstance(e, ev.SessionFinished))
        lags: Any = page.evaluate("document.groupstate.histograms.lag.stacks")
        values: Any = page.evaluate("document.groupstate.histograms.metric.stacks")

        assert lags == [[counts[lag] for lag in range(len(lags[0]))] for counts in (sampled, evicted)]
        assert max([*sampled, *evicted], default=0) < len(lags[0])
        assert values == [[rewards[0.0], rewards[1.0]]]


def test_rows_say_what_their_sessions_had_come_to_at_the_slider(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    run, kept = made
    page = show_run(run)
    for seq in (900, 2_500, len(kept)):
        go_to(page, seq)
        finished: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for record in kept[:seq]:
            if isinstance(event := record.event, ev.SessionFinished):
                finished[event.group_id] += 1
                tokens[event.group_id] += event.trajectories[0].response_tokens
            elif isinstance(event, ev.SessionFailed) and event.retry_in_s is None:
                failed[event.group_id] += 1
        names = column(page, "Group")
        lost = [f" ({failed[name]})" if failed[name] else "" for name in names]

        assert column(page, "Sessions") == [f"{finished[n]}/8{more}" for n, more in zip(names, lost, strict=True)]
        assert column(page, "Tokens") == [f"{tokens[name]:,}" if tokens[name] else "" for name in names]


def test_the_slider_moves_by_keys_and_by_a_click_into_the_timeline(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    run, kept = made
    page = show_run(run)
    at = "document.groupstate.seq"
    page.focus("#slider")
    page.keyboard.press("Home")
    settle(page)
    first = page.evaluate(at)
    page.keyboard.press("PageUp")
    settle(page)
    later = page.evaluate(at)
    page.keyboard.press("End")
    settle(page)
    end = page.evaluate(at)
    box = page.locator("#timeline-plot .u-over").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 30)
    settle(page)
    middle = page.evaluate(at)
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 30)
    settle(page)

    assert first < later < end == len(kept)
    time_of = kept[middle - 1].at_ns - kept[0].at_ns
    assert time_of / (kept[-1].at_ns - kept[0].at_ns) == pytest.approx(0.5, abs=0.02)
    assert 450 < int(page.input_value("#slider")) < 550
    assert "running" in text(page, "#tip")


def test_the_buttons_go_event_by_event(made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]) -> None:
    page = show_run(made[0])
    go_to(page, 100)
    seen = []
    for button in ("#forth", "#forth", "#back", "#first", "#last"):
        page.click(button)
        settle(page)
        seen.append(page.evaluate("document.groupstate.seq"))

    assert seen == [101, 102, 101, 1, len(made[1])]
    assert page.is_disabled("#forth")


def test_the_timeline_by_weight_version_gives_every_version_the_same_room(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    run, kept = made
    page = show_run(run)
    page.click("#by-version")
    published = [r.seq for r in kept if isinstance(r.event, ev.WeightsPublished)]
    places = []
    for seq in published:
        go_to(page, seq)
        places.append(int(page.input_value("#slider")))
    turns = len(published) + 1

    assert places == pytest.approx([1000 * (at + 1) / turns for at in range(len(published))], abs=2)
    assert page.get_attribute("#by-version", "aria-pressed") == "true"


def test_a_phase_is_hidden_and_shown_by_its_key(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    page = show_run(made[0])
    series = "document.groupstate.timeline.chart.plot.series.length - 1"
    before = page.evaluate(series)
    page.locator("#legend .key", has_text="committed").press("Enter")
    settle(page)

    assert (before, page.evaluate(series)) == (5, 6)


def test_nothing_moves_about_as_the_slider_does(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    run, kept = made
    page = show_run(run)
    boxes = """[...document.querySelectorAll('main section, .plot, .tile, .events, .gantt')].map((node) => {
        const { x, y, width, height } = node.getBoundingClientRect();
        return [x, y, width, height].map(Math.round); })"""
    found = []
    for seq, group in ((1, 100), (len(kept) // 3, 100), (len(kept), 100), (len(kept), 1), (900, 450)):
        page.evaluate("(group) => document.groupstate.choose(group)", group)
        go_to(page, seq)
        found.append(page.evaluate(boxes))

    assert all(each == found[0] for each in found)
