"""A class of the kit that says something which nothing reads is refused: it would be green and test nothing."""

import re
from typing import Any

import pytest

from groupstate import Rules
from groupstate.errors import BadSettings
from groupstate.testing import EvictionContract, GroupMachine, LogContract, SelectionContract

from .broken_rules import in_band


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
