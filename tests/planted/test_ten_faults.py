"""Ten faults against three tools: each is found by every tool that can see it, and each by one at least.

The table on the page on testing is made by `python -m tests.planted`.
"""

import re
from pathlib import Path

import pytest

from tests.planted.__main__ import told
from tests.planted.faults import TEN
from tests.planted.tools import NOT_SEEN, TOOLS, by_machine, by_search

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"

WORLDS_THAT_SHOW = {
    "terminal published early": "drop",
    "credit twice": "drop",
    "snapshot off by one": "drop",
    "requeue keeps old trajectories": "retries",
    "boundary off by one": "drop",
    "fence ignored": "cancel",
}
"""One of those that do, so that the others needn't be gone through."""

SEEN = [(name, tool) for name in TEN for tool in TOOLS if (name, tool) not in NOT_SEEN]


@pytest.mark.parametrize("name", [name for name, tool in SEEN if tool == "machine"])
def test_the_machine_finds_a_planted_fault(name):
    found = by_machine(TEN[name])

    assert found is not None
    assert found.after >= 1


@pytest.mark.parametrize("name", [name for name, tool in SEEN if tool == "search"])
def test_the_search_finds_a_planted_fault(name):
    assert by_search(TEN[name], worlds=[WORLDS_THAT_SHOW[name]]) is not None


def test_the_page_has_each_fault_once_and_says_of_each_tool_what_it_can_t_see():
    rows = table()

    assert list(rows) == list(TEN)
    for name, cells in rows.items():
        unseen = {tool: text for tool, text in cells.items() if re.match(r"(story|state|seed) [\d,]+", text) is None}
        assert unseen == {tool: why for (fault, tool), why in NOT_SEEN.items() if fault == name}
        assert len(unseen) < len(TOOLS), "a fault that nothing finds"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "tool"), SEEN)
def test_the_page_says_where_a_fault_is_found_first(name, tool):
    found = TOOLS[tool](TEN[name])

    assert table()[name][tool].rpartition(", ")[0] == told(tool, found).rpartition(", ")[0]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "tool"), NOT_SEEN)
def test_what_a_tool_is_said_not_to_see_it_does_not_find(name, tool):
    assert TOOLS[tool](TEN[name]) is None


def table() -> dict[str, dict[str, str]]:
    """The cells on the page, by fault and tool."""
    lines = PAGE.read_text(encoding="utf-8").split("python -m tests.planted", 1)[1].split("\n\n")
    body = next(part for part in lines if part.startswith("| fault | machine"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]
    return {name: dict(zip(TOOLS, cells, strict=True)) for name, *cells in rows}
