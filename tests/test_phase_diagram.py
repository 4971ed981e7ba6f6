"""docs/state-machine.md shows the table that the code has."""

import pytest

from groupstate.core.phases import TRANSITIONS
from tools.phase_diagram import BEGIN, END, PAGE, PART, generated


def test_the_page_is_not_behind_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert PART.rewritten(page) == page, "docs/state-machine.md is behind the code: run `make docs`"


def test_every_event_of_the_table_is_in_picture_and_table() -> None:
    text = generated()

    for kind in {kind for cells in TRANSITIONS.values() for kind in cells}:
        assert f"`{kind.__name__}`" in text


def test_only_what_is_between_the_markers_is_rewritten() -> None:
    assert PART.rewritten(f"before\n{BEGIN}\nold\n{END}\nafter\n") == f"before\n{generated()}\nafter\n"


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lost one of its two markers"):
        PART.rewritten(f"before\n{BEGIN}\nafter\n")
