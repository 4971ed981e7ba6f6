"""A selection rule of the user's own: what it may say, and that a wrong answer changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from groupstate import Drop, Select
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.custom import CustomRule
from groupstate.core.held import OpenRequest
from groupstate.core.invariants import violations
from groupstate.core.rules import Rules
from groupstate.core.select import why_not
from groupstate.errors import CustomRuleError, EvictionStreak
from groupstate.testing.notation import Story, play

SYNC = Rules(mode="sync")


def done(*names: str) -> list[str]:
    return [line for name in names for line in (f"submit {name}/1", f"start {name}", f"finish {name} acc=1")]


def youngest(book: Book, rules: Rules, request: OpenRequest) -> list[Select]:
    """Those submitted last, the last one first."""
    ready = [group.group_id for group in book.ready()][::-1]
    return [Select(ready[: request.size])] if len(ready) >= request.size else []


def answering(*answers: Any) -> CustomRule:
    """A rule that gives these answers in turn, and then selects the youngest."""
    left = list(answers)

    def rule(book: Book, rules: Rules, request: OpenRequest) -> Any:
        return left.pop(0) if left else youngest(book, rules, request)

    return rule


def reasons(story: Story) -> dict[str, tuple[tuple[str, ...], int, str]]:
    return {e.group_id: (e.reasons, e.credit, e.message) for e in story.events(ev.GroupEvicted)}


# Right answers ---------------------------------------------------------------------------------------


def test_the_batch_is_what_the_rule_selects_in_its_order() -> None:
    story = play(*done("a", "b", "c"), "sample 2", rules=Rules(), selection=youngest)

    assert story.batches() == [("c", "b")]
    assert story.ready() == ["a"]


def test_a_rule_that_says_nothing_is_asked_again_when_something_has_happened() -> None:
    story = play(*done("a"), "sample 2", rules=Rules(), selection=youngest)
    before = (story.batches(), story.waiters[0].error)
    story.tell(*done("b"))

    assert before == ([], None)
    assert story.batches() == [("b", "a")]


@pytest.mark.parametrize("answer", [None, [], (), iter(())], ids=["None", "list", "tuple", "iterator"])
def test_nothing_can_be_said_by_any_empty_list_but_not_by_none(answer: Any) -> None:
    story = play(*done("a"), "sample 1", rules=Rules(), selection=answering(answer))

    assert (story.waiters[0].error is not None) is (answer is None)


@pytest.mark.parametrize("answer", [Select(["a"]), [Select(("a",))], {1: Select({"a": 1})}.values()])
def test_intents_come_alone_or_in_any_iterable(answer: Any) -> None:
    story = play(*done("a", "b"), "sample 1", rules=Rules(), selection=answering(answer))

    assert story.batches() == [("a",)]


def test_a_generator_is_a_rule_too() -> None:
    def rule(book: Book, rules: Rules, request: OpenRequest) -> Any:
        for group in book.ready():
            yield Drop(group.group_id) if group.group_id == "a" else Select([group.group_id])

    story = play(*done("a", "b"), "sample 1", rules=Rules(), selection=rule)

    assert story.batches() == [("b",)]
    assert story.evicted() == {"a": ("custom",)}


def test_it_is_shown_the_request_the_rules_and_the_book() -> None:
    seen = []

    def rule(book: Book, rules: Rules, request: OpenRequest) -> Any:
        seen.append((request.size, request.partition, rules.lag_max, [g.group_id for g in book.ready()]))
        return []

    play(*done("a"), "sample 3", rules=Rules(lag_max=7), selection=rule)

    assert seen == [(3, "train", 7, ["a"])] * len(seen) != []


def test_validation_is_none_of_its_business() -> None:
    def never(book: Book, rules: Rules, request: OpenRequest) -> Any:
        raise AssertionError("it was asked")

    story = play(
        "submit v/1 partition=val", "start v", "finish v acc=1", "sample 1 partition=val",
        rules=Rules(), selection=never,
    )  # fmt: skip

    assert story.batches() == [("v",)]


def test_several_samplers_are_asked_for_in_order_and_none_overtakes() -> None:
    story = play("sample 2", "sample 1", *done("a"), rules=Rules(), selection=youngest)
    before = story.batches()
    story.tell(*done("b", "c"))

    assert before == []
    assert story.batches() == [("b", "a"), ("c",)]


def test_it_is_not_asked_while_wait_holds_or_a_batch_drains() -> None:
    held = play(
        "submit old/1", "publish 1", *done("a"), "sample 1", rules=Rules(on_stale="wait", lag_max=1), selection=youngest
    )  # fmt: skip
    draining = play(
        "submit slow/2", "submit a/2", "start a", "finish a.0 acc=0", "finish a.1 acc=1", "sample 1",
        rules=Rules(mode="sync", batch_size=1, filter_metric="acc"), selection=youngest,
    )  # fmt: skip
    before = (held.batches(), draining.batches())
    held.tell("cancel old")
    draining.tell("cancel slow")

    assert before == ([], [])
    assert (held.batches(), draining.batches()) == ([("a",)], [("a",)])


def test_what_it_withholds_is_explained_as_such() -> None:
    story = play(*done("a"), "sample 1", rules=Rules(selection="pkg.mod:fn"), selection=lambda *_: [])

    assert why_not(story.book, story.rules, story.book.requests[1]) == (
        "selection 'pkg.mod:fn' has taken none of the 1 sampleable groups"
    )


# Drops -----------------------------------------------------------------------------------------------


def test_what_it_drops_is_evicted_with_its_reason_and_message_and_refilled() -> None:
    story = play(
        *done("a", "b"), "sample 1",
        rules=Rules(), source=["r1", "r2"], selection=answering([Drop("a", message="dull")]),
    )  # fmt: skip

    assert reasons(story) == {"a": (("custom",), 1, "dull")}
    assert story.refills() == ["r1"]
    assert story.batches() == [("b",)]


def test_it_may_drop_and_select_in_one_answer() -> None:
    story = play(*done("a", "b", "c"), "sample 1", rules=Rules(), selection=answering([Drop("a"), Select(["c"])]))

    assert (story.batches(), story.ready()) == ([("c",)], ["b"])
    assert story.evicted() == {"a": ("custom",)}


@pytest.mark.parametrize(("answer", "batches"), [([Drop("g"), Select(["a"])], "a"), ([Select(["g"])], "g")])
def test_a_failed_group_that_is_kept_without_rows_may_be_dropped_or_selected(answer: list[Any], batches: str) -> None:
    rules = Rules(mode="sync", empty="keep")
    story = play("submit g/1", "start g", "fail g", *done("a"), "sample 1", rules=rules, selection=answering(answer))

    assert story.batches() == [(batches,)]


@pytest.mark.parametrize(
    ("ready", "answer", "credit"),
    [
        (2, [Drop("a")], 1),
        (3, [Drop("a")], 0),
        (3, [Drop("a"), Drop("b")], 1),
        (3, [Drop("a"), Select(["b", "c"])], 0),
    ],
    ids=["unmet after it", "still met", "unmet after both", "served"],
)
def test_in_sync_mode_a_drop_earns_credit_while_the_demand_is_unmet(ready: int, answer: list[Any], credit: int) -> None:
    story = play(*done(*"abc"[:ready]), "sample 2", rules=SYNC, source=["r1", "r2"], selection=answering(answer))

    assert {earned for _, earned, _ in reasons(story).values()} == {credit}
    assert len(story.refills()) == credit * len(reasons(story))


@pytest.mark.parametrize(
    ("reason", "mode", "credit"),
    [
        ("custom", "async", 1),
        ("zero_variance", "async", 1),
        ("zero_variance", "sync", 2),
        ("surplus", "async", 0),
        ("surplus", "sync", 0),
        ("stale", "async", 1),
    ],
)
def test_a_drop_for_a_reason_of_the_matrix_earns_what_the_matrix_says(reason: Any, mode: Any, credit: int) -> None:
    story = play(
        *done("a"), "sample 1", rules=Rules(mode=mode, selection="pkg.mod:fn"), source=[f"r{n}" for n in range(5)],
        selection=answering([Drop("a", reason)]),
    )  # fmt: skip

    assert reasons(story) == {"a": ((reason,), credit, "")}
    assert violations(story.log.read()) == []


def test_drops_are_a_metric_of_their_own() -> None:
    story = play(*done("a", "b"), "sample 1", rules=Rules(), selection=answering([Drop("a")]))
    claim = story.waiters[0].claim

    assert claim is not None
    assert claim.metrics["training/custom/evicted_samples"] == 1.0
    assert claim.metrics["training/groups/evicted"] == 1.0


def test_many_drops_at_once_are_a_streak() -> None:
    def never(book: Book, rules: Rules, request: OpenRequest) -> Any:
        return [Drop(group.group_id) for group in book.ready()]

    story = play(*done("a", "b"), "sample 1", rules=Rules(eviction_streak_max=2), selection=never)
    error = story.waiters[0].error

    assert isinstance(error, EvictionStreak)
    assert error.reasons == {"custom": 2}


def test_a_message_that_no_log_can_hold_is_made_one_that_it_can() -> None:
    rule = answering([Drop("a", message="half \ud800 " + "x" * 9_999)])
    story = play(*done("a", "b"), "sample 1", rules=Rules(), selection=rule)
    (_, _, message) = reasons(story)["a"]

    assert message.startswith("half \\ud800 x")
    assert len(message) == 2_000


# Wrong answers ---------------------------------------------------------------------------------------


def raising(error: Exception) -> CustomRule:
    first = [error]

    def rule(book: Book, rules: Rules, request: OpenRequest) -> Any:
        if first:
            raise first.pop()
        return youngest(book, rules, request)

    return rule


WRONG: list[tuple[Any, str]] = [
    ([Select(["nobody", "a"])], "it selects group 'nobody', which never was"),
    ([Drop("nobody")], "it drops group 'nobody', which never was"),
    ([Select(["gone", "a"])], "it selects group 'gone', which was evicted"),
    ([Drop("gone")], "it drops group 'gone', which was evicted"),
    ([Select([7, "a"])], "it selects an object of type int; groups are named by their ids, group.group_id"),
    ([Drop(["a"])], "it drops an object of type list; groups are named by their ids, group.group_id"),  # type: ignore[arg-type]
    ([Select(["flying", "a"])], "it selects group 'flying', which is running; only terminal groups can be"),
    ([Drop("flying")], "it drops group 'flying', which is running; only terminal groups can be"),
    ([Select(["out", "a"])], "it selects group 'out', which is sampled; only terminal groups can be"),
    ([Drop("a"), Drop("a")], "it names group 'a' twice; a group is selected or dropped, once"),
    ([Select(["a", "a"])], "it names group 'a' twice; a group is selected or dropped, once"),
    ([Select(["a", "b"]), Drop("a")], "it names group 'a' twice; a group is selected or dropped, once"),
    ([Drop("a"), Select(["a", "b"])], "it names group 'a' twice; a group is selected or dropped, once"),
    ([Select(["val", "a"])], "it selects group 'val' of partition 'val'; it may touch 'train' only"),
    ([Drop("val")], "it drops group 'val' of partition 'val'; it may touch 'train' only"),
    ([Select(["bare", "a"])], "it selects group 'bare', which has no trajectory"),
    ([Select(["a"])], "it selects 1 groups for a batch of 2; select so many, or none to wait on"),
    ([Select(["a", "b", "c"])], "it selects 3 groups for a batch of 2; select so many, or none to wait on"),
    ([Select([])], "it selects 0 groups for a batch of 2; select so many, or none to wait on"),
    ([Select(["a", "b"]), Select(["c"])], "it selects twice; one Select names the whole batch"),
    (["a", "b"], "it returned str 'a' among its intents"),
    ("ab", "it returned str 'ab'; it must be a list of Select and Drop"),
    (b"ab", "it returned bytes b'ab'; it must be a list of Select and Drop"),
    (None, "it returned NoneType None; it must be a list of Select and Drop"),
    (7, "it returned int 7; it must be a list of Select and Drop"),
    (
        [Drop("a", "zero_variant")],  # type: ignore[arg-type]
        "it drops 'a' for 'zero_variant'; a reason is one of cancelled, custom, damaged, empty, failed, stale, "
        "surplus, too_few, zero_variance (did you mean 'zero_variance'?)",
    ),
    (
        [Drop("a", "boring")],  # type: ignore[arg-type]
        "it drops 'a' for 'boring'; a reason is one of cancelled, custom, damaged, empty, failed, stale, surplus, "
        "too_few, zero_variance",
    ),
    ([Drop("a", message=7)], "it drops 'a' with the message 7; a message is a string"),  # type: ignore[arg-type]
]


def scene(selection: CustomRule) -> Story:
    """A sampler of two waits; there is a group of every kind."""
    story = play(
        "submit gone/1", "start gone", "submit bare/1", "start bare", "fail bare", *done("out"),
        "submit flying/1", "start flying", *done("a", "b", "c"),
        "submit val/1 partition=val", "start val", "finish val acc=1", rules=SYNC, controlled=False,
    )  # fmt: skip
    story.tell("sample 1", "fail gone", "evict gone failed")
    story._selection, story._controlled = selection, True
    story._open()
    return story


@pytest.mark.parametrize(("answer", "why"), WRONG, ids=[why for _, why in WRONG])
def test_a_wrong_answer_is_told_and_nothing_of_it_is_done(answer: Any, why: str) -> None:
    story = scene(lambda *_: answer)
    before = dict(story.book.groups)
    story.tell("sample 2")
    error = story.waiters[0].error

    assert isinstance(error, CustomRuleError)
    assert str(error) == f"selection 'oldest_first' can't be followed: {why}; nothing was changed"
    assert story.book.groups == before
    assert (story.book.requests, story.events(ev.RefillForfeited)) == ({}, [])


@pytest.mark.parametrize(
    "make",
    [lambda: answering([Select(["nobody"])]), lambda: raising(KeyError("x"))],
    ids=["wrong", "raising"],
)
def test_the_next_sampler_is_served(make: Callable[[], CustomRule]) -> None:
    story = play(*done("a"), "sample 1", "sample 1", rules=Rules(), selection=make())

    assert isinstance(story.waiters[0].error, CustomRuleError)
    assert story.batches() == [("a",)]


def test_what_it_raises_is_told_with_its_cause() -> None:
    cause = KeyError("score")
    story = play(*done("a"), "sample 1", rules=Rules(), selection=raising(cause))
    error = story.waiters[0].error

    assert isinstance(error, CustomRuleError)
    assert str(error) == "selection 'oldest_first' raised KeyError: 'score'"
    assert error.__cause__ is cause


def test_a_wrong_answer_for_an_older_sampler_is_not_told_to_a_later_one() -> None:
    story = play("sample 1", "sample 1", rules=Rules(), selection=answering([], [Select(["nobody"])]))
    story.tell(*done("a"))

    assert [type(waiter.error).__name__ for waiter in story.waiters].count("CustomRuleError") == 1
    assert story.batches() == [("a",)]


def test_one_id_is_no_list_of_ids() -> None:
    def names_one(book: Book, rules: Rules, request: OpenRequest) -> Select:
        return Select("a1")

    story = play("submit a1/1", "start a1", "finish a1 reward=1", "sample 1", rules=Rules(), selection=names_one)

    assert "Select takes a list of group ids, and not the text 'a1'" in str(story.waiters[0].error)
