"""GroupMachine as a user runs it: right rules pass, broken ones are found, and the story says how.

Rule: the stories are chosen by fixed seeds, so that what is found once is found always.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from groupstate import Rules
from groupstate.errors import CustomRuleError
from groupstate.testing import Asked, BrokenStory, GroupMachine, Story, assert_invariants
from groupstate.testing.notation import play

from . import broken_rules
from .broken_rules import in_band, mean

EXAMPLES_MAX = 200
"""Stories within which each broken rule must be found."""

LINES_MAX = 15
"""Lines of the story that is told of it then."""


def run(machine: type[GroupMachine], examples: int = EXAMPLES_MAX, *, shrinks: bool = False) -> None:
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    usual = settings(machine.TestCase.settings, max_examples=examples, stateful_step_count=30, phases=phases)
    run_state_machine_as_test(machine, settings=settings(usual, derandomize=True, database=None))


def broken(machine: type[GroupMachine], *, shrinks: bool = False) -> BrokenStory:
    """What a machine finds; shrunk to a story that can be read, which takes some ten times as long."""
    with pytest.raises(BrokenStory) as caught:
        run(machine, shrinks=shrinks)
    return caught.value


def machine_of(rule: Any, **attributes: Any) -> type[GroupMachine]:
    return type("Machine", (GroupMachine,), {"selection": staticmethod(rule), **attributes})


class InBand(GroupMachine):
    selection = in_band

    def promise(self, asked: Asked) -> None:
        for group in asked.selected:
            assert 0.25 <= mean(group) <= 0.75
        for group in asked.dropped:
            assert not 0.25 <= mean(group) <= 0.75, f"{group.group_id} has a mean of {mean(group)} and is dropped"


# What is right ---------------------------------------------------------------------------------------


class Any_(GroupMachine):
    """The library's own rules, others in each story."""


TestAnyRules = Any_.TestCase


class Sync(GroupMachine):
    run_rules = Rules(mode="sync", batch_size=2, filter_metric="acc", attempts_max=2, failure="refill")


TestSyncRules = Sync.TestCase

TestInBand = InBand.TestCase


class InBandInSyncMode(InBand):
    run_rules = Rules(mode="sync", batch_size=2)


TestInBandInSyncMode = InBandInSyncMode.TestCase


class ShortAndSafe(GroupMachine):
    metrics: ClassVar[Mapping[str, Sequence[float]]] = {"safe": (0.0, 1.0)}
    lengths: ClassVar[Sequence[int]] = (1, 8, 9, 4096)
    selection = broken_rules.short_and_safe

    def promise(self, asked: Asked) -> None:
        for group in asked.selected:
            assert all(row.response_tokens <= 8 for row in broken_rules.rows(group))
        for group in asked.dropped:
            assert any(row.response_tokens > 8 or not row.metrics["safe"] for row in broken_rules.rows(group))


TestShortAndSafe = ShortAndSafe.TestCase


# What is broken --------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[Any, str]] = {
    "evicts_what_was_sampled": (
        broken_rules.evicts_what_was_sampled,
        r"drops group '\w+', which is sampled; only terminal groups can be",
    ),
    "selects_twice": (broken_rules.selects_twice, r"names group '\w+' twice; a group is selected or dropped, once"),
    "takes_validation": (broken_rules.takes_validation, r"selects group '\w+' of partition 'val'"),
    "counts_validation": (broken_rules.counts_validation, r"selects \d groups for a batch of \d; select so many"),
    "needs_one_more": (
        broken_rules.needs_one_more,
        r"lets a sample of \d wait for ever: sampleable are [\w, ]+, nothing is in flight",
    ),
    "forgetful": (broken_rules.Forgetful(), "gave two answers to one question"),
    "gives_up_by_hand": (broken_rules.gives_up_by_hand, "changed the book; a rule only looks at it"),
    "hides_rewards": (broken_rules.hides_rewards, "changed the book; a rule only looks at it"),
    "coroutine": (broken_rules.Later(), "is async; a rule is a plain function of the book"),
    "names_one": (broken_rules.names_one, r"raised BadInput: Select takes a list of group ids, and not the text '\w+'"),
    "wants_each_reward": (broken_rules.wants_each_reward, "raised IndexError: tuple index out of range"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name: str) -> None:
    rule, what = BROKEN[name]

    error = broken(machine_of(rule, run_rules=Rules(survivors_min=1)))

    assert re.match(f"The rule \\w+ .*{what}", error.what)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name != "selects_twice" else ()) for name in BROKEN]
)
def test_the_story_of_a_broken_rule_can_be_read(name: str) -> None:
    error = broken(machine_of(BROKEN[name][0], run_rules=Rules(survivors_min=1)), shrinks=True)

    assert len(error.lines) <= LINES_MAX
    assert any(line.startswith("sample") for line in error.lines)


def test_a_bound_that_is_off_by_one_is_found_by_the_promise() -> None:
    class OffByOne(InBand):
        selection = broken_rules.above_the_lower_bound

    error = broken(OffByOne)

    assert error.what.startswith("The rule above_the_lower_bound broke its promise: ")
    assert "has a mean of 0.25 and is dropped" in error.what.partition("\n")[0]
    assert isinstance(error.__cause__, AssertionError)


def test_a_broken_promise_is_told_with_the_question_and_the_answer() -> None:
    class NeverHalf(InBand):
        def promise(self, asked: Asked) -> None:
            assert all(mean(group) != 0.5 for group in asked.selected)

    error = broken(NeverHalf)

    told = re.search(r"It was asked for (\d) of these groups:\n\n((?:    .*\n)+)\nand answered (.*)", error.what)
    assert told
    assert re.fullmatch(r"(    \w+, lag \d: reward=[\d.]+[^\n]*\n)+", told[2])
    assert re.search(r"Select\(\['\w+'", told[3])


def test_a_rule_about_lengths_is_held_against_answers_of_these_lengths() -> None:
    class ShortIfAllAre(ShortAndSafe):
        selection = broken_rules.short_if_all_are

    error = broken(ShortIfAllAre)

    assert error.what.startswith("The rule short_if_all_are broke its promise: ")
    assert any(re.search(r"finish \w+\.\d reward=[\d.]+ safe=[01] tokens=(9|4096)", line) for line in error.lines)
    assert any(re.search(r"tokens=[18]\b", line) for line in error.lines)


def test_the_story_can_be_pasted_as_a_test() -> None:
    error = broken(machine_of(broken_rules.takes_validation))
    text = str(error)
    call = text[text.index("play(") :]

    story: Story = eval(call, {"play": play, "Rules": Rules, "takes_validation": broken_rules.takes_validation})

    assert isinstance(story.waiters[-1].error, CustomRuleError)
    assert_invariants(story.log)


def test_what_must_hold_after_each_step_is_held_beside_the_story() -> None:
    class NeverThree(GroupMachine):
        run_rules = Rules()

        def check(self, story: Story) -> None:
            assert len(story.ready()) < 3, "there are three"

    error = broken(NeverThree)

    assert error.what.startswith("The check doesn't hold: there are three")


def test_a_patient_rule_may_keep_a_sampler_waiting() -> None:
    run(machine_of(broken_rules.needs_one_more, patient=True), examples=20)


def test_a_machine_has_hypothesis_neither_shrink_nor_explain() -> None:
    assert not {Phase.explain, Phase.shrink} & set(InBand.TestCase.settings.phases)


# What pytest is told -----------------------------------------------------------------------------------


def told(machine: type[GroupMachine]) -> BrokenStory:
    """What the test of a machine fails with."""
    machine.TestCase.settings = settings(machine.TestCase.settings, derandomize=True, database=None)
    with pytest.raises(BrokenStory) as caught:
        machine.TestCase("runTest").runTest()
    return caught.value


def test_a_failure_is_told_in_as_few_lines_as_show_it() -> None:
    class OffByOne(InBand):
        selection = broken_rules.above_the_lower_bound

    error = told(OffByOne)

    verbs = [line.split()[0] for line in error.lines]
    assert verbs == ["submit", "start", *["finish"] * (len(verbs) - 3), "sample"]
    assert "source=" not in str(error)
    assert isinstance(error.__cause__, AssertionError)


def test_a_story_is_made_shorter_only_while_it_shows_the_same() -> None:
    error = told(machine_of(broken_rules.wants_each_reward, run_rules=Rules(survivors_min=1)))

    assert error.what == "The rule wants_each_reward raised IndexError: tuple index out of range"
    assert any(line.startswith(("fail", "finish g1.0 nothing", "finish r1.0 nothing")) for line in error.lines)
    assert len(error.lines) <= 12


def test_what_only_the_end_of_a_story_shows_is_told_whole() -> None:
    class Blind(GroupMachine):
        run_rules = Rules()
        sources = (3,)

        def check(self, story: Story) -> None:
            if len(story.evicted()) > 2:
                raise KeyError("more than two")

    error = told(Blind)

    assert error.what.startswith("The check doesn't hold: 'more than two'")
    assert len(error.lines) <= 12


class Turns:
    """Answers by its own count, so that the same story goes otherwise the next time."""

    asked = 0

    def __call__(self, book: Any, rules: Any, request: Any) -> Any:
        Turns.asked += 1
        assert Turns.asked != 40, "the fortieth"
        return in_band(book, rules, request)


def test_a_story_that_cannot_be_told_again_says_what_that_means() -> None:
    error = told(machine_of(Turns()))

    assert error.what.startswith("The rule Turns raised AssertionError: the fortieth")
    assert "Told again, the same story went otherwise: the rule looks at something beside the book" in error.what


# A library that is broken ----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    logging.getLogger("groupstate").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("groupstate").setLevel(logging.NOTSET)


class LagOfOne(GroupMachine):
    run_rules: ClassVar[Rules | None] = Rules(lag_max=1)


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        ("groupstate.core.evict", "is_stale", lambda group, lag, rules: lag >= 1),
        ("groupstate.core.evict", "credit_of", lambda reasons, rules, *, unmet: len(reasons)),
        ("groupstate.runtime.ledger", "fence_reason", lambda *_: "gone"),
        ("groupstate.runtime.admission", "forfeits", lambda book, rules: None),
    ],
    ids=["bound off by one", "a credit per reason", "fences wrongly", "never forfeits"],
)
def test_a_fault_in_the_rules_is_found(monkeypatch: pytest.MonkeyPatch, where: str, name: str, fault: Any) -> None:
    monkeypatch.setattr(f"{where}.{name}", fault)

    assert broken(LagOfOne).lines
