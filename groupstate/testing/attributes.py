"""What the attributes of a class of the kit may be: refused where the class is made, and not in the middle of a story.

Rule: an error names the class and the attribute, what it is, and what it must be.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Final

from groupstate.core.arguments import as_integer, boolean, shown
from groupstate.core.rules import Rules
from groupstate.errors import BadSettings
from groupstate.runtime.functions import is_async
from groupstate.testing.notation import rows_of

NOT_METRICS: Final = ("attempt", "tokens", "versions")
"""What `name=value` means something else for, in the notation."""


def check_rules(where: str, value: Any) -> None:
    """None stands for no rules in particular."""
    if value is not None and not isinstance(value, Rules):
        raise BadSettings(f"{where} is {shown(value)}; it must be Rules, such as Rules(lag_max=1)")


def check_numbers(where: str, value: Any) -> None:
    _check_each(where, value, _is_number, "finite numbers, such as (0.0, 0.5, 1.0)")


def check_lengths(where: str, value: Any) -> None:
    _check_each(where, value, _is_count, "numbers of tokens, such as (1, 8, 4096)", may_be_empty=True)


def check_sources(where: str, value: Any) -> None:
    _check_each(
        where,
        value,
        lambda each: each is None or _is_count(each),
        "numbers of prompts, with None for no source, such as (100, 3, None)",
    )


def check_metrics(where: str, value: Any, metric: str) -> None:
    """
    Args:
        metric: the one that sessions report anyway.
    """
    if not isinstance(value, Mapping):
        raise BadSettings(
            f'{where} is {shown(value)}; it must be a dict of what each metric may be, such as {{"safe": (0, 1)}}'
        )
    for name, values in value.items():
        if (
            not isinstance(name, str)
            or not name
            or name in NOT_METRICS
            or set(name) & set("=|")
            or name.split() != [name]
        ):
            raise BadSettings(
                f"{where} names a metric {shown(name)}; a name is a text without spaces, '=' and '|', and none of "
                f"{', '.join(NOT_METRICS)}"
            )
        if name == metric:
            raise BadSettings(f"{where} names {name!r}, which is the metric that `values` are of; say them there")
        check_numbers(f"{where}[{name!r}]", values)


def check_booleans(where: str, holder: Any, *names: str) -> None:
    for name in names:
        boolean(f"{where}.{name}", getattr(holder, name), error=BadSettings)


def check_ends(where: str, value: Any) -> None:
    """How sessions end, in the notation."""
    right = 'a text for each session, in the notation, such as ("reward=0", "reward=1")'
    check_texts(where, value, right)
    for text in value:
        try:
            rows_of(text.split())
        except (ValueError, AssertionError) as error:
            raise BadSettings(f"{where} has {text!r}, which is no end of a session: {error}") from error


def check_texts(where: str, value: Any, right: str, *, may_be_empty: bool = False) -> None:
    _check_each(where, value, lambda each: isinstance(each, str), right, may_be_empty=may_be_empty)


def check_asserts(where: str, function: Any) -> None:
    """A promise or a check, which can only say something by raising it while it is called."""
    right = "it must be a plain function that asserts what must hold, and returns nothing"
    if not callable(function):
        raise BadSettings(f"{where} is {shown(function)}; {right}")
    check_runs(where, function, right)


def check_runs(where: str, function: Callable[..., Any], right: str) -> None:
    """A function of which a call runs all."""
    if is_async(function) or inspect.isasyncgenfunction(function):
        raise BadSettings(f"{where} is async, and nobody awaits it; {right}")
    if inspect.isgeneratorfunction(function):
        raise BadSettings(f"{where} is a generator, of which a call runs nothing; {right}")


def no_answer(returned: Any) -> str:
    """What is wrong with what a promise or a check returned, as the end of a sentence; empty where nothing is."""
    if returned is None:
        return ""
    if inspect.iscoroutine(returned):
        returned.close()
    return f"returned {shown(returned)}, which nothing reads; it must assert what must hold, and return nothing"


def _check_each(
    where: str, value: Any, is_right: Callable[[Any], bool], right: str, *, may_be_empty: bool = False
) -> None:
    is_list = hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | Mapping)
    if not is_list or not (len(value) or may_be_empty):
        raise BadSettings(f"{where} is {shown(value)}; it must be a tuple or a list of {right}")
    for each in value:
        if not is_right(each):
            raise BadSettings(f"{where} has {shown(each)} in it; it must be a tuple or a list of {right}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    found = as_integer(value)
    return found is not None and found >= 0
