"""What every rule that evicts promises: short stories of groups that it keeps and of groups that it doesn't.

    class TestInBand(EvictionContract):
        selection = in_band
        good = ("reward=0", "reward=1")          # how the sessions of a group end that it keeps
        bad = ("reward=1", "reward=1")           # and of one that it evicts

A rule of the library's own is given by its settings: `rules = Rules(filter_metric="reward")`.
"""

from collections.abc import Sequence
from typing import ClassVar

from groupstate.core import events as ev
from groupstate.testing.contracts.selection import RuleContract
from groupstate.testing.notation import Story


class EvictionContract(RuleContract):
    """The tests of a rule that evicts groups which are whole. They hold for one of a selection of your own, and for
    one of the settings."""

    bad: ClassVar[Sequence[str]] = ("reward=1", "reward=1")
    """How the sessions of a group end that the rule evicts, one after the other, in the notation."""

    def bad_group(self, name: str, *, options: str = "") -> list[str]:
        return self.group(name, self.bad, options=options)

    @staticmethod
    def evictions(story: Story) -> list[str]:
        return [event.group_id for event in story.events(ev.GroupEvicted)]

    def test_a_bad_group_is_evicted_and_a_good_one_is_trained_on(self) -> None:
        story = self.play(*self.bad_group("bad"), *self.group("good"), "sample 1")

        self.check(story)
        assert (self.evictions(story), self.taken(story)) == (["bad"], ["good"])

    def test_a_good_group_stays_however_long_it_waits(self) -> None:
        story = self.play(*self.group("a"), "sample 2", *self.bad_group("bad"), *self.bad_group("worse"), "wait 3600")

        self.check(story)
        assert story.ready() == ["a"]
        assert sorted(self.evictions(story)) == ["bad", "worse"]

    def test_it_makes_no_difference_which_came_first(self) -> None:
        groups = {"bad": self.bad_group("bad"), "a": self.group("a"), "b": self.group("b")}

        for order in (("bad", "a", "b"), ("a", "bad", "b"), ("b", "a", "bad")):
            story = self.play(*(line for name in order for line in groups[name]), "sample 2")
            self.check(story)
            assert self.evictions(story) == ["bad"]
            assert sorted(self.taken(story)) == ["a", "b"]

    def test_each_eviction_has_a_reason_and_earns_what_the_matrix_says(self) -> None:
        story = self.play(*self.bad_group("bad"), "sample 1", source=5)
        events = story.events(ev.GroupEvicted)

        self.check(story)
        assert all(event.reasons for event in events)
        earned = sum(event.credit for event in events)
        assert len(story.refills()) == earned > 0

    def test_a_group_in_flight_is_never_evicted(self) -> None:
        *almost, last = self.bad_group("bad")
        story = self.play(*almost, *self.group("good"), "sample 2")
        before = (self.evictions(story), story.phase("bad"))
        story.tell(last)

        self.check(story)
        assert before == ([], "running")
        assert self.evictions(story) == ["bad"]

    def test_a_group_that_is_with_the_trainer_is_never_evicted(self) -> None:
        story = self.play(*self.group("a"), "sample 1", "publish 1", "sample 1", *self.bad_group("bad"))
        story.tell(*self.group("b"), "commit 1")

        self.check(story)
        assert story.phase("a") == "committed"
        assert self.evictions(story) == ["bad"]

    def test_validation_is_never_evicted(self) -> None:
        validation = self.bad_group("v", options="partition=val")
        story = self.play(*validation, *self.group("a"), "sample 1", "sample 1 partition=val")

        self.check(story)
        assert self.evictions(story) == []
        assert story.batches() == [("a",), ("v",)]

    def test_what_was_evicted_does_not_come_back(self) -> None:
        story = self.play(*self.bad_group("bad"), *self.group("a"), "sample 1", "recover", "sample 1", "recover")

        self.check(story)
        assert self.evictions(story) == ["bad"]
        assert story.phase("bad") == "evicted"

    def test_after_a_crash_it_decides_as_before(self) -> None:
        story = self.play(*self.bad_group("bad"), *self.group("a"), "recover", "sample 1")

        self.check(story)
        assert (self.evictions(story), self.taken(story)) == (["bad"], ["a"])

    def test_a_late_result_revives_nothing(self) -> None:
        story = self.play(*self.bad_group("bad"), "sample 1", "finish bad.0 reward=1 attempt=1")

        self.check(story)
        assert story.fenced[-1] == "gone"
        assert story.phase("bad") == "evicted"

    def test_if_everything_is_bad_the_sampler_is_told(self) -> None:
        story = self.play("sample 1", source=200)
        for _ in range(100):
            for group in [group for group in story.book.groups.values() if group.in_flight]:
                story.tell(*self.bad_group(group.group_id)[1:])

        self.check(story)
        assert story.waiters[0].error is not None
