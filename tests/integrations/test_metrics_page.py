"""The table of metrics in the docs is what the code has."""

from tools.metrics_table import PAGE, PART


def test_the_table_of_metrics_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert PART.rewritten(text) == text, "run `make docs`"
