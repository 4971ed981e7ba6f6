"""A selection that the rules name, as `module:function`, is loaded and asked wherever the kit takes rules."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from groupstate import Rules
from groupstate.errors import BadSettings
from groupstate.testing import BrokenStory, EvictionContract, GroupMachine, SelectionContract, Twin, play, strategies

from . import broken_rules
from .test_contracts import failed
from .test_machine import broken, run

MODULE = "tests.testing.broken_rules"
GROUP = ("submit a/2", "start a", "finish a.0 reward=0", "finish a.1 reward=1", "sample 1")


def named(function: str) -> Rules:
    return Rules(selection=f"{MODULE}:{function}")


def machine(rules: Rules, **attributes: Any) -> type[GroupMachine]:
    return type("Machine", (GroupMachine,), {"run_rules": rules, **attributes})


def contract(rules: Rules, base: type = SelectionContract) -> Any:
    return type("Mine", (base,), {"rules": rules})


def test_a_story_is_played_under_the_rule_that_its_rules_name() -> None:
    story = play(*GROUP, "submit b/1", "start b", "finish b reward=1", "sample 1", rules=named("in_band"))

    assert story.batches() == [("a",)]
    assert story.evicted() == {"b": ("custom",)}


def test_a_story_without_the_controller_asks_no_rule() -> None:
    assert play("submit a/1", rules=Rules(selection="no_module:rule"), controlled=False).phase("a") == "pending"


def test_a_function_that_is_given_goes_in_the_place_of_the_one_that_the_rules_name() -> None:
    story = play(*GROUP, rules=Rules(selection="no_module:rule"), selection=broken_rules.in_band)

    assert story.batches() == [("a",)]


def test_a_machine_plays_the_rule_that_its_rules_name() -> None:
    run(machine(named("in_band")), 20)

    error = broken(machine(named("needs_one_more")))

    assert "The rule needs_one_more lets a sample of" in error.what
    assert f"    rules=Rules(selection='{MODULE}:needs_one_more'),\n" in str(error), "pasted it finds the rule again"
    assert "    selection=" not in str(error)


def test_a_promise_may_be_that_of_a_rule_which_is_named() -> None:
    def promise(self: Any, asked: Any) -> None:
        assert not asked.dropped

    assert "The rule in_band broke its promise" in broken(machine(named("in_band"), promise=promise)).what


def test_contracts_are_about_the_rule_that_their_rules_name() -> None:
    assert failed(contract(named("in_band"))) == failed(contract(named("in_band"), EvictionContract)) == []
    assert "test_a_sampler_is_served_by_exactly_enough_groups" in failed(contract(named("needs_one_more")))


PLACES: dict[str, Callable[[Rules], Any]] = {
    "play": lambda rules: play(*GROUP, rules=rules),
    "twin": lambda rules: Twin(rules=rules),
    "machine": lambda rules: machine(rules).TestCase("runTest").runTest(),
    "contract": lambda rules: contract(rules)().test_no_group_is_in_two_batches(),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        (f"{MODULE}:in_bnd", "has no 'in_bnd'; did you mean 'in_band'? or give open_run(selection=...) the function"),
        ("no_such_module:rule", "selection: there is no module 'no_such_module'"),
        (f"{MODULE}:Later", f"selection '{MODULE}:Later' is a class, which makes no selection by itself"),
    ],
    ids=["function", "module", "class"],
)
def test_a_name_that_leads_to_no_rule_is_refused_as_by_open_run(place: str, name: str, what: str) -> None:
    with pytest.raises(BadSettings, match=re.escape(what)):
        PLACES[place](Rules(selection=name))


@pytest.mark.parametrize("place", ["machine", "contract"])
def test_two_rules_in_one_class_are_refused(place: str) -> None:
    what = f"selection is {MODULE}:in_band, and Mine.{{}} has selection 'freshest_first': give one of the two"
    attributes: dict[str, Any] = {"selection": staticmethod(broken_rules.in_band)}

    with pytest.raises(BadSettings, match=re.escape(what.format("run_rules" if place == "machine" else "rules"))):
        if place == "machine":
            type("Mine", (GroupMachine,), {**attributes, "run_rules": Rules(selection="freshest_first")})._selection()
        else:
            type("Mine", (SelectionContract,), {**attributes, "rules": Rules(selection="freshest_first")}).own()


def test_a_function_and_its_own_name_are_one_rule() -> None:
    run(machine(named("in_band"), selection=staticmethod(broken_rules.in_band)), 5)


def test_what_can_t_be_called_as_a_rule_is_refused_by_a_story() -> None:
    def rule(book: Any) -> list[Any]:
        return []

    with pytest.raises(BadSettings, match=r"can't be called with \(book, rules, request\)"):
        play(*GROUP, rules=Rules(), selection=rule)  # type: ignore[arg-type]


def test_histories_of_the_model_alone_have_no_rule_of_ones_own() -> None:
    @given(strategies.histories(rules=named("in_band")))
    def plays(history: strategies.History) -> None:
        raise AssertionError("no history is drawn")

    with pytest.raises(BadSettings, match="the plain model can't ask a selection of your own"):
        plays()


# A rule that changes what it looks at ----------------------------------------------------------------


def clears(book: Any, rules: Any, request: Any) -> list[Any]:
    book.groups.clear()
    return []


def test_a_rule_that_throws_groups_away_is_told_of_as_what_changed_the_book() -> None:
    twin = Twin(selection=clears, source=["r1", "r2"])

    with pytest.raises(BrokenStory, match="The rule clears changed the book; a rule only looks at it"):
        for line in ("a", "b"):
            twin.submit(line, 1)
            twin.finish_group(line, [1.0])
            twin.sample(1)

    mine = type("Mine", (SelectionContract,), {"selection": staticmethod(clears)})
    with pytest.raises(AssertionError, match="clears changed the book; a rule only looks at it"):
        mine().test_a_group_in_flight_is_left_alone()


@pytest.mark.parametrize("place", ["play", "twin"])
def test_what_are_no_rules_is_refused_by_a_story(place: str) -> None:
    rules: Any = {"lag_max": 1}

    with pytest.raises(BadSettings, match=r"rules is \{'lag_max': 1\}; it must be Rules, such as"):
        PLACES[place](rules)
