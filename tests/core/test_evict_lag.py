"""Groups that are too old: at which lag, once which version is published, and how they are found."""

import pytest

from groupstate.core.book import Book
from groupstate.core.evict import newly_stale, reasons_of
from groupstate.core.group import Group
from groupstate.core.rules import Rules, recorded_rules
from groupstate.testing.notation import play


@pytest.mark.parametrize(
    ("lag_max", "lag", "reasons"),
    [(0, 0, ()), (0, 1, ("stale",)), (2, 1, ()), (2, 2, ()), (2, 3, ("stale",)), (None, 99, ())],
)
def test_a_lag_of_exactly_the_bound_is_kept(lag_max: int | None, lag: int, reasons: tuple[str, ...]) -> None:
    rules = Rules(lag_max=lag_max)
    story = play("submit g/1", "start g", "finish g acc=1", f"publish {lag}", rules=rules, controlled=False)
    group = story.group("g")

    assert reasons_of(group, story.book.lag(group), rules) == reasons
    assert [g.group_id for g in newly_stale(story.book, rules)] == (["g"] if reasons else [])


def test_a_new_version_looks_at_the_oldest_and_stops_at_the_first_that_is_fresh() -> None:
    lines = [f"submit g{v}/1 stamp={v}" for v in (3, 1, 2, 0)]
    story = play(*lines, *(f"start g{v}" for v in range(4)), *(f"finish g{v} acc=1" for v in range(4)), "publish 3")

    assert [g.group_id for g in newly_stale(story.book, Rules(lag_max=1))] == ["g0", "g1"]
    assert [g.group_id for g in newly_stale(story.book, Rules(lag_max=0))] == ["g0", "g1", "g2"]
    assert newly_stale(story.book, Rules(lag_max=3)) == []


class Counted(Book):
    """A book that counts how often it is asked for a lag."""

    asked = 0

    def lag(self, group: Group) -> int:
        self.asked += 1
        return super().lag(group)


def test_a_new_version_costs_what_it_makes_stale_and_not_what_is_held() -> None:
    story = play("submit old/1", "start old", "finish old acc=1")
    for number in range(20):
        story.tell(f"submit g{number}/1 stamp=1", f"start g{number}", f"finish g{number} acc=1")
    story.tell("publish 1")
    book = Counted()
    for record in story.log.read():
        book.apply(record)
    stale = newly_stale(book, Rules(lag_max=0))

    assert [group.group_id for group in stale] == ["old"]
    assert book.asked == 2


@pytest.mark.parametrize(
    "rules",
    [Rules(), Rules(lag_max=0, on_stale="wait"), recorded_rules({"mode": "sync", "lag_max": 0})],
    ids=["off", "wait", "sync"],
)
def test_nothing_becomes_stale_unless_the_rules_drop(rules: Rules) -> None:
    story = play("submit g/1", "start g", "finish g acc=1", "publish 9")

    assert newly_stale(story.book, rules) == []


def test_a_group_newer_than_the_trainer_has_lag_zero() -> None:
    story = play("submit g/1 stamp=7", "start g", "finish g acc=1", rules=Rules(lag_max=0))

    assert story.book.lag(story.group("g")) == 0
    assert story.evicted() == {}


def test_publishing_the_current_version_again_changes_nothing() -> None:
    story = play("submit g/1", "start g", "publish 2", "finish g acc=1", "publish 2", rules=Rules(lag_max=2))
    seq = story.book.last_seq
    story.tell("publish 2")

    assert story.book.last_seq == seq
    assert story.phase("g") == "finished"


def test_a_stale_group_in_flight_is_evicted_when_it_is_terminal_and_not_before() -> None:
    story = play("submit g/1", "start g", "publish 9", rules=Rules(lag_max=2), source=["r1"])
    running = story.phase("g")
    story.tell("finish g acc=1")

    assert running == "running"
    assert story.evicted() == {"g": ("stale",)}
