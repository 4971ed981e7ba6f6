"""How the page looks: contrast, light and dark, widths, axes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from groupstate.core import events as ev
from tests.page.seen import settle


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def colours(page: Page) -> dict[str, str]:
    return page.evaluate(
        """Object.fromEntries(['--page', '--card', '--text', '--muted', '--accent', '--good', '--bad', '--good-soft',
            '--bad-soft', '--odd'].map((name) => [name, getComputedStyle(document.documentElement)
            .getPropertyValue(name).trim()]))"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_are_readable_in_both_schemes(
    scheme: str, made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    page = show_run(made[0], color_scheme=scheme)
    found = colours(page)

    assert (_luminance(found["--page"]) > 0.5) == (scheme == "light")
    for words in ("--text", "--muted", "--accent"):
        assert _contrast(found[words], found["--card"]) >= 4.5, words
        assert _contrast(found[words], found["--odd"]) >= 4.5, words
    assert _contrast(found["--good"], found["--good-soft"]) >= 4.5
    assert _contrast(found["--bad"], found["--bad-soft"]) >= 4.5


def test_the_button_goes_from_the_systems_scheme_to_light_to_dark(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    page = show_run(made[0], color_scheme="dark")
    seen = [_luminance(colours(page)["--page"]) > 0.5]
    for _ in range(3):
        page.click("#theme")
        seen.append(_luminance(colours(page)["--page"]) > 0.5)

    assert seen == [False, True, False, False]


@pytest.mark.parametrize("width", [390, 1024, 1440, 2200])
def test_the_page_is_no_wider_than_its_window(
    width: int, made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]
) -> None:
    page = show_run(made[0], size=(width, 900))
    page.evaluate("document.groupstate.choose(3)")
    settle(page)

    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_charts_have_axes_with_units(made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page]) -> None:
    page = show_run(made[0])
    labels: Any = page.evaluate(
        """['timeline', 'lag', 'metric'].map((name) => {
            const view = document.groupstate, part = name === 'timeline' ? view.timeline : view.histograms[name];
            const chart = part.chart;
            return chart.plot.axes.map((axis) => axis.label); })"""
    )

    assert labels == [
        ["time since the beginning (h:mm:ss)", "groups"],
        ["lag (weight versions)", "groups"],
        ["reward", "sessions"],
    ]
