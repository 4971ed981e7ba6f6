"""What somebody may have meant: the nearest names, not too many of them, and none that is nothing like it."""

import pytest

from groupstate.core import near as near_module
from groupstate.core.near import meant, near, nearest

NAMES = ["name2", "name3", "name4", "name5", "other"]


def test_one_name_is_the_nearest_unless_more_are_asked_for() -> None:
    assert len(nearest("name1", NAMES)) == 1
    assert sorted(nearest("name1", NAMES, 4)) == NAMES[:4]
    assert nearest("zzz", NAMES) == []


def test_capital_letters_make_no_difference() -> None:
    assert nearest("ADAPTER", ["adapter", "Adapter"], 2) == ["adapter", "Adapter"]


def test_three_names_at_most_are_told() -> None:
    assert near("name1", NAMES).count(" or ") == 2


@pytest.mark.parametrize(("known", "told"), [("abcdefghijklm", True), ("abcdefghijklmn", False)])
def test_a_name_that_is_more_than_three_letters_longer_is_not_told(known: str, told: bool) -> None:
    assert near("abcdefghij", [known]) == (f"did you mean {known!r}?" if told else "")


def test_of_very_many_names_only_the_first_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_module, "NAMES_COMPARED_MAX", 2)

    assert near("name1", ["aaaaa", "name2", "name3"]) == "did you mean 'name2'?"


def test_what_was_meant_stands_behind_the_words_that_there_are() -> None:
    assert meant("meen", ["mean", "sum"]) == " (did you mean 'mean'?)"
    assert meant("zzz", ["mean", "sum"]) == meant(5, ["mean", "sum"]) == ""
