"""docs/export.md lists the tables and columns that the code has."""

import pytest

from groupstate.inspect.columns import TABLES
from tools.table_columns import BEGIN, END, PAGE, PART, generated


def test_the_page_is_not_behind_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert PART.rewritten(page) == page, "docs/export.md is behind the code: run `make docs`"


def test_every_column_is_on_the_page() -> None:
    for name, columns in TABLES.items():
        section = generated().partition(f"### {name}\n")[2].partition("###")[0]

        assert all(f"| `{column.name}` | {column.kind} |" in section for column in columns)


def test_only_what_is_between_the_markers_is_rewritten() -> None:
    assert PART.rewritten(f"before\n{BEGIN}\nold\n{END}\nafter\n") == f"before\n{generated()}\nafter\n"


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lost one of its two markers"):
        PART.rewritten(f"before\n{BEGIN}\nafter\n")
