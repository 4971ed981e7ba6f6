"""What a class of the kit is told in its attributes: a name that doesn't exist is refused, since it would say nothing.

Rule: a test that is green because nothing was tested is the worst that this kit could give.
"""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Final

from groupstate.core.custom import CustomRule
from groupstate.errors import BadSettings

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


def own_selection(cls: type) -> CustomRule | None:
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
    if inspect.iscoroutinefunction(rule) or inspect.isasyncgenfunction(rule):
        raise BadSettings(f"{where} is async; a rule is a plain function of the book, and nothing is awaited in it")
    function: CustomRule | None = rule
    return function
