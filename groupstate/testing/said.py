"""What the kit is told: a name that doesn't exist is refused, since it would say nothing, and a rule that can't be
found is refused as by `open_run`.

Rule: a test that is green because nothing was tested is the worst that this kit could give.
"""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Final

from groupstate.core.custom import CustomRule
from groupstate.core.rules import Rules
from groupstate.errors import BadSettings
from groupstate.runtime.functions import is_async
from groupstate.runtime.opening import own_selection
from groupstate.runtime.options import check_rules, check_selection

NEAR: Final = 0.8
"""How like a known name an unknown one is taken for a slip of the pen; names of one's own are less like it."""


def check_names(cls: type, base: type, others: Mapping[str, str]) -> None:
    """
    Args:
        base: the class of the kit that `cls` is made from.
        others: names that one may have in mind, and what is right in their place.

    Raises:
        BadSettings: `cls` has an attribute that nothing reads, and that is nearly one of `base`.
    """
    known = [name for name in dir(base) if not name.startswith("_")]
    for name, value in vars(cls).items():
        if name in others:
            raise BadSettings(f"{cls.__qualname__}.{name} is read by nothing; say it as {others[name]}")
        is_own = name.startswith("_") or any(mark.startswith("hypothesis_stateful") for mark in dir(value))
        left_out = name.startswith("test_") and value is None
        if is_own or name in known or (name.startswith("test_") and not left_out):
            continue
        near = difflib.get_close_matches(name, known, 1, NEAR)
        if near or left_out:
            hint = f"; did you mean {near[0]!r}?" if near else f"; {base.__qualname__} has no such test to be left out"
            raise BadSettings(f"{cls.__qualname__}.{name} is read by nothing{hint}")


def path_of(selection: CustomRule) -> str:
    """What the log calls a function that was given."""
    return f"{selection.__module__}:{getattr(selection, '__qualname__', type(selection).__qualname__)}"


def rule_of(rules: Rules, selection: CustomRule | None) -> CustomRule | None:
    """The user's own function, as in a run that is opened so: the one that was given, or the one that the rules name.

    Raises:
        BadSettings: it can't be found, or can't be called as a selection; or the rules are none.
    """
    check_rules(rules)
    if selection is None:
        return own_selection(rules)
    check_selection(selection)
    return selection


def rules_in_force(rules: Rules, selection: CustomRule | None) -> Rules:
    """The rules, which name a function that was given."""
    return rules if selection is None else rules.changed(selection=path_of(selection))


def tested_rule(cls: type, attribute: str) -> CustomRule | None:
    """The function that a class is about: its `selection`, or the one that its rules name.

    Args:
        attribute: where the class has its rules.

    Raises:
        BadSettings: it can't be found, it is no function to be called as a selection, or there are two.
    """
    rules: Rules = getattr(cls, attribute) or Rules()
    given = given_selection(cls)
    if given is None:
        return own_selection(rules)
    if rules.selection not in (path_of(given), Rules().selection):
        raise BadSettings(
            f"{cls.__qualname__}.selection is {path_of(given)}, and {cls.__qualname__}.{attribute} has selection "
            f"{rules.selection!r}: give one of the two"
        )
    return given


def given_selection(cls: type) -> CustomRule | None:
    """The function in the attribute `selection`, which isn't a method although it stands in a class.

    Raises:
        BadSettings: it is something else, or has to be awaited.
    """
    found = inspect.getattr_static(cls, "selection")
    rule: Any = found.__func__ if isinstance(found, staticmethod) else found
    where = f"{cls.__qualname__}.selection"
    if rule is not None and not callable(rule):
        raise BadSettings(
            f"{where} is {rule!r:.80}; it must be the function itself. A selection of the library is named in the "
            "rules: Rules(selection=...)"
        )
    if rule is not None and (is_async(rule) or inspect.isasyncgenfunction(rule)):
        raise BadSettings(f"{where} is async; a rule is a plain function of the book, and nothing is awaited in it")
    function: CustomRule | None = rule
    return function
