"""What every selection rule promises: short stories that a rule of your own goes through like a built-in one.

    class TestLongestFirst(SelectionContract):
        selection = longest_first

A built-in selection is given as `rules = Rules(selection="freshest_first")`, and one of your own may be named so too.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from groupstate.core.custom import CustomRule
from groupstate.core.folding import replayed
from groupstate.core.invariants import violations
from groupstate.core.rules import Rules
from groupstate.errors import BadSettings, CustomRuleError
from groupstate.testing import attributes
from groupstate.testing.contracts.base import Contract
from groupstate.testing.notation import Story
from groupstate.testing.said import given_selection, rules_in_force, tested_rule
from groupstate.testing.twin import names
from groupstate.testing.watched import Watched


class RuleContract(Contract):
    """What is said of the rule that is tested."""

    rules: ClassVar[Rules] = Rules()
    """The other settings."""
    selection: ClassVar[Any] = None
    """The function; None for the selection that `rules` names."""
    story: Story | None = None
    """The one that was told last."""
    watched: Watched | None = None
    """The function, as it was asked in it."""
    good: ClassVar[Sequence[str]] = ("reward=0", "reward=1")
    """How the sessions of a group end that the rule takes, one after the other, in the notation."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        given_selection(cls)
        attributes.check_rules(f"{cls.__qualname__}.rules", cls.rules)
        for ends in ("good", "bad"):
            if hasattr(cls, ends):
                attributes.check_ends(f"{cls.__qualname__}.{ends}", getattr(cls, ends))
        for name, test in list(vars(cls).items()):
            if name.startswith("test_") and inspect.isfunction(test) and not inspect.iscoroutinefunction(test):
                setattr(cls, name, _with_its_story(test))

    @classmethod
    def own(cls) -> CustomRule | None:
        """
        Raises:
            BadSettings: nothing says which rule is tested, or it can't be found.
        """
        found = tested_rule(cls, "rules")
        if found is None and not any("rules" in vars(each) for each in cls.__mro__ if each is not RuleContract):
            raise BadSettings(
                f"{cls.__qualname__} doesn't say which rule it tests: selection = the function, or rules = Rules(...)"
            )
        return found

    def play(self, *lines: str, source: int | None = None) -> Story:
        """A story under the rule, which is asked twice each time.

        Args:
            source: prompts that refills can have; None for no source.
        """
        own = self.own()
        self.watched = None if own is None else Watched(own)
        self.story = Story(
            rules=rules_in_force(self.rules, given_selection(type(self))),
            source=None if source is None else names(source),
            group_size=len(self.good),
            selection=self.watched,
        )
        return self.story.tell(*lines)

    def group(self, name: str, ends: Iterable[str] = (), *, options: str = "") -> list[str]:
        """The lines of a group that ends so; as `good` says without `ends`."""
        each = list(ends) or list(self.good)
        finishes = [f"finish {name}.{number} {words}" for number, words in enumerate(each)]
        return [f"submit {name}/{len(each)} {options}".strip(), f"start {name}", *finishes]

    @staticmethod
    def taken(story: Story) -> list[str]:
        return [name for batch in story.batches() for name in batch]

    def _in_words(self, story: Story) -> str:
        """The last story, for whoever reads that a test of it has failed."""
        ends = {name: getattr(self, name) for name in ("good", "bad") if hasattr(self, name)}
        meant = " and ".join(f"{name} groups end {', '.join(map(repr, each))}" for name, each in ends.items())
        rule = repr(self.rules) if self.watched is None else self.watched.name
        told = "".join(f"\n    {line}" for line in story.lines)
        batches = [list(batch) for batch in story.batches()]
        # Of the log, since a rule may have changed the book.
        ready = [group.group_id for group in replayed(story.log.read()).ready()]
        return (
            f"The story, in which {meant}, under {rule}:\n{told}\n\n"
            f"Batches: {batches}. Evicted: {list(story.evicted())}. Sampleable: {ready}."
        )

    def check(self, story: Story) -> None:
        """Nobody was told that the rule's answer can't be followed, it only looked, and the log can be true."""
        if self.watched is not None and self.watched.problem is not None:
            raise self.watched.problem
        wrong = [waiter.error for waiter in story.waiters if isinstance(waiter.error, CustomRuleError)]
        assert not wrong, wrong[0]
        found = violations(story.log.read())
        assert not found, "\n".join(map(str, found))


def _with_its_story(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def told(self: RuleContract, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        try:
            test(self, *args, **kwargs)
        except Exception as error:
            problem = None if self.watched is None else self.watched.problem
            if problem is not None and problem is not error:
                # What follows from an answer that is wrong tells less than what is wrong with it.
                error = problem
            if self.story is not None:
                error.add_note(f"\n{self._in_words(self.story)}")
            raise error

    return told


class SelectionContract(RuleContract):
    """The tests of a selection rule."""

    def test_a_sampler_is_served_by_exactly_enough_groups(self) -> None:
        story = self.play(*self.group("a"), *self.group("b"), "sample 2")

        self.check(story)
        assert sorted(self.taken(story)) == ["a", "b"]

    def test_a_sampler_waits_until_there_are_enough(self) -> None:
        story = self.play(*self.group("a"), "sample 2")
        before = story.batches()
        story.tell(*self.group("b"))

        self.check(story)
        assert before == []
        assert sorted(self.taken(story)) == ["a", "b"]

    def test_a_batch_has_as_many_groups_as_were_asked_for(self) -> None:
        story = self.play(*(line for name in "abcde" for line in self.group(name)), "sample 3")

        self.check(story)
        assert [len(batch) for batch in story.batches()] == [3]

    def test_with_nothing_sampleable_nothing_is_taken(self) -> None:
        story = self.play("sample 1", "publish 1", "submit a/2", "start a")

        self.check(story)
        assert story.batches() == []

    def test_no_group_is_in_two_batches(self) -> None:
        story = self.play(*(line for name in "abcd" for line in self.group(name)), "sample 2", "sample 2", "sample 1")

        self.check(story)
        assert sorted(self.taken(story)) == ["a", "b", "c", "d"]

    def test_what_is_committed_is_not_taken_again(self) -> None:
        story = self.play(*self.group("a"), "sample 1", "commit 1", "sample 1", *self.group("b"))

        self.check(story)
        assert story.batches() == [("a",), ("b",)]

    def test_a_batch_that_comes_back_is_taken_again(self) -> None:
        story = self.play(*self.group("a"), *self.group("b"), "sample 2", "release 1", "sample 2")

        self.check(story)
        assert [sorted(batch) for batch in story.batches()] == [["a", "b"]] * 2

    def test_a_group_in_flight_is_left_alone(self) -> None:
        story = self.play("submit slow/2", "start slow.0", *self.group("a"), *self.group("b"), "sample 2")

        self.check(story)
        assert story.phase("slow") == "running"
        assert sorted(self.taken(story)) == ["a", "b"]

    def test_a_group_without_a_trajectory_is_never_taken(self) -> None:
        story = self.play("submit bare/1", "start bare", "fail bare", *self.group("a"), "sample 1")

        self.check(story)
        assert self.taken(story) == ["a"]

    def test_validation_is_neither_counted_nor_taken(self) -> None:
        validation = self.group("v", options="partition=val")
        story = self.play(*validation, *self.group("a"), "sample 2")
        before = story.batches()
        story.tell(*self.group("b"), "sample 1 partition=val")

        self.check(story)
        assert before == []
        assert [sorted(batch) for batch in story.batches()] == [["a", "b"], ["v"]]

    def test_a_sampler_that_has_gone_gets_nothing(self) -> None:
        story = self.play("sample 1", "withdraw", *self.group("a"))

        self.check(story)
        assert story.batches() == []
        assert story.tell("sample 1").batches() == [("a",)]

    def test_a_recovered_run_is_served_as_if_nothing_had_been(self) -> None:
        groups = [line for name in "abc" for line in self.group(name)]
        never_down = self.play(*groups, "sample 2")
        story = self.play(*groups, "sample 2", "recover", "sample 2")

        self.check(story)
        assert story.batches() == never_down.batches() * 2

    def test_the_same_story_has_the_same_batches(self) -> None:
        groups = [line for name in ("z", "a", "m", "b", "y") for line in self.group(name)]

        stories = [self.play(*groups, "sample 2", "publish 1", "sample 2") for _ in range(3)]

        assert stories[0].batches() == stories[1].batches() == stories[2].batches()

    def test_with_a_source_no_sampler_waits_for_ever(self) -> None:
        """Once everything in flight has ended, again and again, whoever waits has a batch or an error."""
        story = self.play("sample 2", source=40)
        for _ in range(20):
            for group in [group for group in story.book.groups.values() if group.in_flight]:
                story.tell(*self.group(group.group_id)[1:])

        self.check(story)
        assert story.batches() or story.waiters[0].error is not None
