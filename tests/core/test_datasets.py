"""Datasets: bounds of their own, shares of what is kept, and the signal that one is starved."""

from collections import Counter
from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.evict import newly_stale
from groupstate.core.held import DatasetUse
from groupstate.core.rules import PerDataset, Rules
from groupstate.core.select import held_by_stale, why_held
from groupstate.core.supply import next_dataset, shares_of
from groupstate.errors import NotEnoughGroups
from groupstate.runtime.controller import Controller
from groupstate.runtime.sources import MixedSource
from groupstate.testing.notation import Story, play


def done(name: str, dataset: str, stamp: int = 0) -> list[str]:
    return [f"submit {name}/1 dataset={dataset} stamp={stamp}", f"start {name}", f"finish {name} acc=1"]


# Bounds of their own ---------------------------------------------------------------------------------

BOUNDS: dict[str, Any] = {
    "lag_max": 2,
    "datasets": {"math": PerDataset(lag_max=0), "code": PerDataset(lag_max=4)},
}
GROUPS = [
    line
    for stamp in range(6)
    for dataset in ("math", "code", "other")
    for line in done(f"{dataset}{stamp}", dataset, stamp)
]


def test_a_new_version_makes_stale_what_is_above_the_bound_of_its_dataset() -> None:
    by_dataset = Rules(**BOUNDS)
    story = play("publish 5", *GROUPS, rules=by_dataset, controlled=False)

    assert [group.group_id for group in newly_stale(story.book, by_dataset)] == [
        "other0", "other1", "other2", "code0", "math0", "math1", "math2", "math3", "math4",
    ]  # fmt: skip


def test_what_is_stale_by_then_is_dropped_at_each_publication() -> None:
    story = play(*done("m", "math"), *done("c", "code"), *done("o", "other"), rules=Rules(**BOUNDS))
    gone = []
    for version in range(1, 6):
        story.tell(f"publish {version}")
        gone.append(sorted(story.evicted()))

    assert gone == [["m"], ["m"], ["m", "o"], ["m", "o"], ["c", "m", "o"]]
    assert [event.lag for event in story.events(ev.GroupEvicted)] == [1, 3, 5]


def test_one_dataset_alone_may_have_a_bound() -> None:
    rules = Rules(datasets={"math": PerDataset(lag_max=0)})
    story = play(*done("m", "math"), *done("o", "other"), "publish 9", rules=rules)

    assert story.evicted() == {"m": ("stale",)}


@pytest.mark.parametrize(
    ("flying", "version", "held"),
    [
        ("math", 0, "group 'g' in flight has lag 0, the bound is 0"),
        ("other", 1, None),
        ("other", 2, "group 'g' in flight has lag 2, the bound is 2"),
        ("code", 3, None),
        ("code", 4, "group 'g' in flight has lag 4, the bound is 4"),
    ],
)
def test_wait_holds_at_the_bound_of_the_dataset(flying: str, version: int, held: str | None) -> None:
    rules = Rules(**BOUNDS, on_stale="wait")
    story = play(f"submit g/1 dataset={flying}", f"publish {version}", "sample 1", rules=rules)

    assert why_held(story.book, rules) == held


def test_wait_goes_by_the_dataset_that_is_held_whichever_is_older() -> None:
    rules = Rules(**BOUNDS, on_stale="wait")
    story = play("submit c/1 dataset=code", "publish 1", "submit m/1 dataset=math", "sample 1", rules=rules)
    held = held_by_stale(story.book, rules)

    assert held is not None
    assert held.group_id == "m"


def test_a_dataset_without_any_bound_holds_nobody() -> None:
    rules = Rules(on_stale="wait", datasets={"math": PerDataset(lag_max=0)})
    story = play("submit o/1 dataset=other", "publish 9", "sample 1", rules=rules)

    assert held_by_stale(story.book, rules) is None


def test_the_groups_are_apart_by_the_bounds_that_a_run_is_opened_with() -> None:
    story = play(
        "publish 5", "submit f/1 dataset=math stamp=1", *done("m", "math", 4), *done("o", "other", 4),
        "submit v/1 partition=val", "submit bad/1", "start bad", "fail bad", rules=Rules(), controlled=False,
    )  # fmt: skip
    story.tell("sample 1", "release 1")
    story.rules = Rules(**BOUNDS)
    story.tell("recover")

    assert story.batches() == [("m",)]  # It came back, so its lag stays as it was.
    assert [[group.group_id for group in groups] for groups in story.book.by_age()] == [["o"]]
    assert [[group.group_id for group in groups] for groups in story.book.in_flight_by_age()] == [["f"]]
    assert [group.group_id for group in newly_stale(story.book, Rules(lag_max=0))] == ["o"]


def test_each_dataset_is_filtered_by_its_own_tolerance() -> None:
    rules = Rules(filter_metric="acc", tolerance=0.1, datasets={"math": PerDataset(tolerance=0.5)})
    story = play(rules=rules)
    for name, dataset in (("m", "math"), ("o", "other")):
        story.tell(
            f"submit {name}/2 dataset={dataset}", f"start {name}", f"finish {name}.0 acc=0", f"finish {name}.1 acc=0.4"
        )

    assert story.evicted() == {"m": ("zero_variance",)}


# Shares ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "names", "shares"),
    [
        ({}, "ab", {"a": 0.5, "b": 0.5}),
        ({"a": 0.75}, "ab", {"a": 0.75, "b": 0.25}),
        ({"a": 0.5}, "abc", {"a": 0.5, "b": 0.25, "c": 0.25}),
        ({"a": 0.5, "b": 0.25}, "ab", {"a": 2 / 3, "b": 1 / 3}),
        ({"a": 0.0}, "ab", {"b": 1.0}),
        ({"a": 0.75, "b": 0.25}, "b", {"b": 1.0}),
        ({"a": 1.0}, "ab", {"a": 1.0}),
        ({"a": 0.0}, "a", {}),
        ({}, "", {}),
    ],
    ids=str,
)
def test_shares_are_made_to_add_up_over_the_datasets_that_are_left(
    given: dict[str, float], names: str, shares: dict[str, float]
) -> None:
    rules = Rules(datasets={name: PerDataset(share=share) for name, share in given.items()})

    assert shares_of(rules, list(names)) == pytest.approx(shares)


class Mixed(Story):
    """A story whose source has several datasets."""

    def __init__(self, source: Any, **options: Any) -> None:
        self.mixed = MixedSource(source)
        super().__init__(**options)

    def _open(self) -> None:
        super()._open()
        self.controller = Controller(self.ledger, self.mixed, group_size=1)
        self.controller.admits = self._admits


def endless(*names: str) -> dict[str, Any]:
    return {name: (f"{name}{number}" for number in range(10**6)) for name in names}


def drawn(story: Story) -> list[str]:
    return [event.dataset for event in story.events(ev.GroupSubmitted)]


def test_prompts_are_drawn_by_share_from_the_first_one_on() -> None:
    rules = Rules(datasets={"a": PerDataset(share=0.5), "b": PerDataset(share=0.25)})
    story = Mixed(endless("a", "b", "c"), rules=rules).tell("sample 8")

    assert Counter(drawn(story)) == {"a": 4, "b": 2, "c": 2}
    assert Counter(drawn(story)[:4]) == {"a": 2, "b": 1, "c": 1}


def test_a_share_of_zero_is_never_drawn() -> None:
    rules = Rules(datasets={"a": PerDataset(share=0.0)})
    story = Mixed(endless("a", "b"), rules=rules).tell("sample 9")

    assert set(drawn(story)) == {"b"}


def test_of_equals_the_first_named_comes_first() -> None:
    assert drawn(Mixed(endless("z", "a"), rules=Rules()).tell("sample 4")) == ["z", "a", "z", "a"]


def test_each_dataset_has_positions_of_its_own() -> None:
    story = Mixed(endless("a", "b"), rules=Rules()).tell("sample 4")
    submitted = story.events(ev.GroupSubmitted)

    assert [(event.dataset, event.source_position) for event in submitted] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert story.book.source_positions == {"a": 2, "b": 2}


def test_when_a_dataset_has_no_more_the_others_take_its_share() -> None:
    story = Mixed({"a": ["x"], **endless("b", "c")}, rules=Rules()).tell("sample 9")

    assert Counter(drawn(story)) == {"a": 1, "b": 4, "c": 4}
    assert story.events(ev.SourceExhausted) == []


def test_once_all_have_no_more_the_source_is_exhausted() -> None:
    story = Mixed({"a": ["x"], "b": ["y", "z"]}, rules=Rules()).tell("sample 4")

    assert Counter(drawn(story)) == {"a": 1, "b": 2}
    assert [(event.source, event.position) for event in story.events(ev.SourceExhausted)] == [("mixed", 3)]
    assert isinstance(story.waiters[0].error, NotEnoughGroups)


def test_datasets_whose_share_is_zero_do_not_keep_the_source_going() -> None:
    rules = Rules(datasets={"a": PerDataset(share=0.0)})
    story = Mixed({"b": ["x"], **endless("a")}, rules=rules).tell("sample 2")

    assert drawn(story) == ["b"]
    assert len(story.events(ev.SourceExhausted)) == 1


@pytest.mark.parametrize(
    ("tolerance", "submitted", "kept"),
    [(0.0, 0.5, 1 / 3), (0.1, 0.6, 0.6 * 0.5 / 0.7), (0.5, 2 / 3, 0.5)],
    ids=str,
)
def test_evictions_of_one_dataset_are_made_up_for_within_the_tolerance(
    tolerance: float, submitted: float, kept: float
) -> None:
    """Half of `a` is evicted. To be half of what is kept, two thirds of what is submitted have to be of it."""
    rules = Rules(datasets={"a": PerDataset(share=0.5)}, share_tolerance=tolerance)
    book = Book()
    book.uses = {"a": DatasetUse(), "b": DatasetUse()}
    for _ in range(3_000):
        name = next_dataset(book, rules, ["a", "b"])
        assert name is not None
        use = book.uses[name]
        use.submitted += 1
        use.evicted += name == "a" and use.submitted % 2
    a, b = book.uses["a"], book.uses["b"]

    assert a.submitted / 3_000 == pytest.approx(submitted, abs=0.002)
    assert a.kept / (a.kept + b.kept) == pytest.approx(kept, abs=0.002)


@pytest.mark.parametrize(("tolerance", "drawn"), [(0.1, "a"), (0.04, "b")])
def test_what_may_be_submitted_of_a_dataset_is_its_share_and_the_tolerance(tolerance: float, drawn: str) -> None:
    rules = Rules(datasets={"a": PerDataset(share=0.5)}, share_tolerance=tolerance)
    book = Book()
    book.uses = {"a": DatasetUse(submitted=6, evicted=6), "b": DatasetUse(submitted=4)}

    assert next_dataset(book, rules, ["a", "b"]) == drawn


@pytest.mark.parametrize(("a", "b", "drawn"), [(1, 0, "b"), (3, 1, "a"), (4, 1, "b"), (3, 0, "b")])
def test_the_next_prompt_is_of_what_is_furthest_below_its_share_of_one_more(a: int, b: int, drawn: str) -> None:
    rules = Rules(datasets={"a": PerDataset(share=0.75)}, share_tolerance=1.0)
    book = Book()
    book.uses = {"a": DatasetUse(submitted=a), "b": DatasetUse(submitted=b)}

    assert next_dataset(book, rules, ["b", "a"]) == drawn


def test_without_datasets_that_may_be_drawn_there_is_no_next_one() -> None:
    assert next_dataset(play().book, Rules(), []) is None


def test_a_refill_is_drawn_by_share_whatever_it_replaces() -> None:
    rules = Rules(datasets={"a": PerDataset(share=0.5)}, share_tolerance=0.0)
    story = Mixed(endless("a", "b"), rules=rules).tell("sample 3")
    story.tell("start g1", "fail g1")

    assert drawn(story) == ["a", "b", "a", "b"]
    assert story.refills() == ["g4"]


# Starved datasets ------------------------------------------------------------------------------------

STARVING = Rules(starvation_versions=2)


def starved(story: Story) -> list[tuple[str, int, int, int]]:
    return [(e.dataset, e.versions, e.open_groups, e.evicted) for e in story.events(ev.DatasetStarved)]


def test_a_dataset_of_which_none_was_sampled_is_said_to_starve_once_per_so_many_versions() -> None:
    story = play("submit g/1 dataset=math", rules=STARVING)
    told = []
    for version in range(1, 6):
        story.tell(f"publish {version}")
        told.append(len(starved(story)))

    assert told == [0, 1, 1, 2, 2]
    assert starved(story) == [("math", 2, 1, 0), ("math", 4, 1, 0)]


def test_one_version_that_leaps_over_several_bounds_is_one_signal() -> None:
    assert starved(play("submit g/1 dataset=math", "publish 9", rules=STARVING)) == [("math", 9, 1, 0)]


def test_a_sample_of_it_begins_the_count_anew() -> None:
    story = play(*done("a", "math"), *done("b", "math"), "publish 1", "sample 1", "publish 2", rules=STARVING)
    before = starved(story)
    story.tell("publish 3")

    assert (before, starved(story)) == ([], [("math", 2, 1, 0)])


def test_another_dataset_that_is_sampled_does_not_feed_it() -> None:
    story = play(*done("a", "math"), "submit b/1 dataset=code", "publish 1", "sample 1", "publish 2", rules=STARVING)

    assert starved(story) == [("code", 2, 1, 0)]


def test_a_dataset_that_is_evicted_entirely_starves_once_and_again_when_it_is_submitted_again() -> None:
    story = play("submit a/1 dataset=math", "start a", "fail a", "publish 2", "publish 4", rules=STARVING)
    first = starved(story)
    story.tell("submit b/1 dataset=math", "publish 5", "publish 6")

    assert first == [("math", 2, 0, 1)]
    assert starved(story)[1:] == [("math", 2, 1, 1)]


@pytest.mark.parametrize(
    "lines",
    [
        ["publish 9"],
        [*done("a", "math"), "sample 1", "publish 9"],
        [*done("a", "math"), "sample 1", "commit 1", "publish 9"],
        ["submit v/1 partition=val dataset=math", "publish 9"],
    ],
    ids=["never submitted", "all sampled", "all committed", "validation"],
)
def test_a_dataset_without_groups_that_wait_does_not_starve(lines: list[str]) -> None:
    assert starved(play(*lines, rules=STARVING)) == []


def test_nothing_starves_unless_the_rules_say_after_how_long() -> None:
    assert starved(play("submit a/1 dataset=math", "publish 99", rules=Rules())) == []


def test_a_batch_that_comes_back_starves_from_when_it_was_sampled() -> None:
    story = play(*done("a", "math"), "publish 1", "sample 1", "publish 2", "release 1", "publish 3", rules=STARVING)

    assert starved(story) == [("math", 2, 1, 0)]


def test_signals_are_counted_by_dataset_in_the_metrics() -> None:
    story = play("submit a/1 dataset=math", *done("b", "code"), "publish 2", "sample 1", rules=STARVING)
    claim = story.waiters[0].claim

    assert claim is not None
    assert claim.metrics["training/datasets/math/starved"] == 1.0
    assert claim.metrics["training/datasets/code/starved"] == 1.0


def test_after_going_back_it_counts_from_the_mark() -> None:
    story = play("publish 1", "mark", "submit a/1 dataset=math", "publish 5", rules=STARVING)
    story.tell("recover at=1", "publish 2")
    before = len(starved(story))
    story.tell("publish 3")

    assert (before, len(starved(story))) == (1, 2)
    assert starved(story)[-1] == ("math", 2, 1, 0)


def test_a_run_that_is_opened_at_a_lower_version_counts_from_there() -> None:
    story = play("submit a/1 dataset=math", "publish 5", rules=STARVING).tell("recover version=1", "publish 2")
    before = len(starved(story))
    story.tell("publish 3")

    assert (before, starved(story)[-1]) == (1, ("math", 3, 1, 0))
