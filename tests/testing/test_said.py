"""A class of the kit that says something which nothing reads is refused: it would be green and test nothing."""

import functools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from groupstate import Rules
from groupstate.errors import BadSettings
from groupstate.testing import EvictionContract, GroupMachine, LogContract, SelectionContract, Twin, play
from groupstate.testing.exhaustive import World, explore, shortest_story

from .broken_rules import in_band
from .test_machine import broken


async def awaits(book: Any, rules: Any, request: Any) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("base", "attributes", "what"),
    [
        (GroupMachine, {"selction": in_band}, "Mine.selction is read by nothing; did you mean 'selection'?"),
        (GroupMachine, {"promises": in_band}, "Mine.promises is read by nothing; did you mean 'promise'?"),
        (GroupMachine, {"rules": Rules()}, "Mine.rules is read by nothing; say it as run_rules = Rules(...)"),
        (GroupMachine, {"eviction": in_band}, "say it as selection = the function; it yields Drop too"),
        (GroupMachine, {"selection": "in_band"}, "Mine.selection is 'in_band'; it must be the function itself"),
        (GroupMachine, {"selection": awaits}, "Mine.selection is async; a rule is a plain function of the book"),
        (EvictionContract, {"run_rules": Rules()}, "Mine.run_rules is read by nothing; say it as rules = Rules(...)"),
        (SelectionContract, {"rule": in_band}, "Mine.rule is read by nothing; say it as selection = the function"),
        (SelectionContract, {"selection": awaits}, "Mine.selection is async"),
        (LogContract, {"reopen": in_band}, "Mine.reopen is read by nothing; did you mean 'reopened'?"),
        (LogContract, {"test_a_new_log_is_emty": None}, "did you mean 'test_a_new_log_is_empty'?"),
        (LogContract, {"test_speed": None}, "Mine.test_speed is read by nothing; LogContract has no such test"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else getattr(value, "__name__", ""),
)
def test_what_nothing_reads_is_refused(base: type, attributes: dict[str, Any], what: str) -> None:
    with pytest.raises(BadSettings, match=re.escape(what)):
        type("Mine", (base,), attributes)


def test_what_is_ones_own_is_left_alone() -> None:
    class Mine(GroupMachine):
        selection = in_band
        bounds = (0.25, 0.75)

        def mean_of(self, group: Any) -> float:
            return 0.0

    class Log(LogContract):
        test_a_new_log_is_empty = None  # type: ignore[assignment]

        async def test_it_is_fast(self) -> None:
            pass

    assert Mine.bounds
    assert Log.test_it_is_fast


def test_a_promise_that_no_rule_could_keep_is_refused() -> None:
    class Mine(GroupMachine):
        def promise(self, asked: Any) -> None:
            raise AssertionError("never asked")

    with pytest.raises(BadSettings, match="has a promise, and no selection that could keep it"):
        Mine._selection()


def test_a_contract_of_no_rule_in_particular_is_refused() -> None:
    class Mine(EvictionContract):
        good = ("reward=0", "reward=1")

    class Ours(Mine):
        rules = Rules(filter_metric="reward")

    with pytest.raises(BadSettings, match="Mine doesn't say which rule it tests: selection = the function, or rules ="):
        Mine().test_validation_is_never_evicted()
    Ours().test_validation_is_never_evicted()


# Values ----------------------------------------------------------------------------------------------

NUMBERS = "must be a tuple or a list of finite numbers, such as (0.0, 0.5, 1.0)"
LENGTHS = "must be a tuple or a list of numbers of tokens, such as (1, 8, 4096)"
SOURCES = "must be a tuple or a list of numbers of prompts, with None for no source, such as (100, 3, None)"
ENDS = 'must be a tuple or a list of a text for each session, in the notation, such as ("reward=0", "reward=1")'
NAME = "a name is a text without spaces, '=' and '|', and none of attempt, tokens, versions"


@pytest.mark.parametrize(
    ("base", "attribute", "value", "what"),
    [
        (GroupMachine, "run_rules", {"lag_max": 1}, "is {'lag_max': 1}; it must be Rules, such as Rules(lag_max=1)"),
        (GroupMachine, "values", 0.5, f"is 0.5; it {NUMBERS}"),
        (GroupMachine, "values", (), f"is (); it {NUMBERS}"),
        (GroupMachine, "values", ("a", "b"), f"has 'a' in it; it {NUMBERS}"),
        (GroupMachine, "values", "ab", f"is 'ab'; it {NUMBERS}"),
        (GroupMachine, "values", (1.0, float("nan")), f"has nan in it; it {NUMBERS}"),
        (GroupMachine, "metrics", ["safe"], "is ['safe']; it must be a dict of what each metric may be"),
        (GroupMachine, "metrics", {"safe": 1}, f"['safe'] is 1; it {NUMBERS}"),
        (GroupMachine, "metrics", {"is safe": (0, 1)}, f"names a metric 'is safe'; {NAME}"),
        (GroupMachine, "metrics", {"tokens": (0, 1)}, f"names a metric 'tokens'; {NAME}"),
        (GroupMachine, "metrics", {"reward": (0, 1)}, "names 'reward', which is the metric that `values` are of"),
        (GroupMachine, "lengths", 8, f"is 8; it {LENGTHS}"),
        (GroupMachine, "lengths", (1, -1), f"has -1 in it; it {LENGTHS}"),
        (GroupMachine, "lengths", (1.5,), f"has 1.5 in it; it {LENGTHS}"),
        (GroupMachine, "sources", 5, f"is 5; it {SOURCES}"),
        (GroupMachine, "sources", (3, "x"), f"has 'x' in it; it {SOURCES}"),
        (GroupMachine, "patient", "yes", "is 'yes'; it must be True or False"),
        (GroupMachine, "deaths", 0, "is 0; it must be True or False"),
        (SelectionContract, "rules", "freshest_first", "is 'freshest_first'; it must be Rules"),
        (SelectionContract, "good", "reward=1", f"is 'reward=1'; it {ENDS}"),
        (SelectionContract, "good", (1, 0), f"has 1 in it; it {ENDS}"),
        (SelectionContract, "good", (), f"is (); it {ENDS}"),
        (
            SelectionContract,
            "good",
            ("reward 1",),
            "has 'reward 1', which is no end of a session: 'reward' says nothing",
        ),
        (SelectionContract, "good", ("reward=high",), "which is no end of a session: could not convert string"),
        (EvictionContract, "bad", "reward=1", f"is 'reward=1'; it {ENDS}"),
        (LogContract, "patience_s", "long", "is 'long'; it must be a number of seconds"),
        (LogContract, "patience_s", 0, "is 0, within which nothing comes"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_value_that_no_story_can_be_made_of_is_refused(base: type, attribute: str, value: Any, what: str) -> None:
    with pytest.raises(BadSettings, match=re.escape(f"Mine.{attribute}") + r".*" + re.escape(what)):
        type("Mine", (base,), {attribute: value})


def test_values_may_come_in_any_list() -> None:
    class Mine(GroupMachine):
        values = range(3)
        metrics = {"safe": [False, True]}  # noqa: RUF012
        lengths = [1, 2]  # noqa: RUF012
        sources = [0, None]  # noqa: RUF012

    assert Mine.values


def test_a_word_of_a_result_that_says_nothing_is_refused_in_any_story() -> None:
    with pytest.raises(ValueError, match=r"'0\.75' says nothing; a metric is name=value, such as reward=0\.75"):
        play("submit a/1", "start a", "finish a.0 0.75")


# What can't fail -------------------------------------------------------------------------------------


async def later(self: Any, seen: Any) -> None:
    raise AssertionError("never reached")


def yields(self: Any, seen: Any) -> Iterator[None]:
    yield
    raise AssertionError("never reached")


async def yields_later(self: Any, seen: Any) -> AsyncIterator[None]:
    yield
    raise AssertionError("never reached")


RIGHT = "it must be a plain function that asserts what must hold, and returns nothing"


@pytest.mark.parametrize("name", ["promise", "check"])
@pytest.mark.parametrize(
    ("function", "what"),
    [
        (later, f"is async, and nobody awaits it; {RIGHT}"),
        (yields_later, f"is async, and nobody awaits it; {RIGHT}"),
        (yields, f"is a generator, of which a call runs nothing; {RIGHT}"),
        (True, f"is True; {RIGHT}"),
    ],
    ids=["async", "async_generator", "generator", "no_function"],
)
def test_what_could_never_fail_is_refused(name: str, function: Any, what: str) -> None:
    with pytest.raises(BadSettings, match=re.escape(f"Mine.{name} {what}")):
        type("Mine", (GroupMachine,), {"selection": in_band, name: function})
    given = functools.partial(function, None) if callable(function) else function
    with pytest.raises(BadSettings, match=re.escape(f"{name} {what}")):
        Twin(selection=in_band, **{name: given})


def hidden(self: Any, seen: Any) -> Any:
    return later(self, seen)


RETURNS: dict[str, tuple[Callable[..., Any], str]] = {
    "false": (lambda self, seen: False, "returned False, which nothing reads; it must assert what must hold"),
    "text": (lambda self, seen: "it is wrong", "returned 'it is wrong', which nothing reads"),
    "coroutine": (hidden, "returned <coroutine object later"),
}


@pytest.mark.parametrize("name", ["promise", "check"])
@pytest.mark.parametrize("returned", RETURNS)
def test_what_is_returned_in_place_of_a_failure_is_told(name: str, returned: str) -> None:
    function, what = RETURNS[returned]
    error = broken(type("Mine", (GroupMachine,), {"selection": in_band, name: function}))

    begin = "The rule in_band has a promise that" if name == "promise" else "The check"
    assert error.what.startswith(f"{begin} {what}")


ONE = World(groups=1, sessions=1)


@pytest.mark.parametrize(
    ("check", "what"),
    [
        (
            functools.partial(later, None),
            "is async, and nobody awaits it; it must be a plain function that returns what",
        ),
        (lambda stage: False, "returned False; it must return what is wrong as a text, or None"),
        (lambda stage: True, "returned True; it must return what is wrong as a text, or None"),
    ],
    ids=["async", "false", "true"],
)
def test_a_check_of_a_search_returns_a_text_or_none(check: Any, what: str) -> None:
    with pytest.raises(BadSettings, match=re.escape(what)):
        explore(ONE, checks=[check])


def test_a_state_that_is_asked_for_by_what_is_awaited_is_refused() -> None:
    with pytest.raises(BadSettings, match="where is async, and nobody awaits it"):
        shortest_story(ONE, functools.partial(later, None))  # type: ignore[arg-type]
