"""What callers give, checked where it comes in: a text names the argument, what was given and what would be right.

Rule 1: nothing is changed before every argument is found good.
Rule 2: a log holds Python's own integers, so those of other libraries become such; a truth value is no number.
"""

import math
import numbers
import operator
from typing import Any

from groupstate.errors import BadInput, GroupstateError

INTEGER_MAX = 2**63 - 1
"""What a log is sure to give back."""

SHOWN_CHARS_MAX = 80


def integer(
    name: str,
    value: Any,
    *,
    least: int = -INTEGER_MAX,
    most: int = INTEGER_MAX,
    wanted: str = "an integer",
    error: type[GroupstateError] = BadInput,
) -> int:
    """The value as a Python `int`.

    Args:
        wanted: in words, with what it stands for if that is more than a number.
    """
    found = as_integer(value)
    if found is not None and least <= found <= most:
        return found
    raise error(f"{name} is {shown(value)}; it must be {wanted}{_bounds(least, most, found)}")


def integer_or_none(name: str, value: Any, **bounds: Any) -> int | None:
    return None if value is None else integer(name, value, **bounds)


def as_integer(value: Any) -> int | None:
    """An integer, whichever library's, as Python's own; None if it is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _bounds(least: int, most: int, found: int | None) -> str:
    if most < INTEGER_MAX:
        return f" from {least} to {most}"
    if least > -INTEGER_MAX:
        return f" of at least {least}"
    return "" if found is None else " of at most 64 bits"


def seconds(name: str, value: Any, *, endless: bool = False, error: type[GroupstateError] = BadInput) -> float:
    """A duration as a Python number.

    Args:
        endless: infinity is one too.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        whole = as_integer(value)
        found = float(value) if whole is None else whole
        if 0 <= found < math.inf or (endless and found == math.inf):
            return found
    bound = "at least 0" if endless else "finite and at least 0"
    raise error(f"{name} is {shown(value)}; it must be a number of seconds, {bound}")


def string(name: str, value: Any, *, wanted: str = "a string", error: type[GroupstateError] = BadInput) -> str:
    """A text that a log can hold: no half of a surrogate pair."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            wanted = f"{wanted} that UTF-8 can hold"
        else:
            return value
    raise error(f"{name} is {shown(value)}; it must be {wanted}")


def boolean(name: str, value: Any, *, error: type[GroupstateError] = BadInput) -> bool:
    if not isinstance(value, bool):
        raise error(f"{name} is {shown(value)}; it must be True or False")
    return value


def shown(value: Any) -> str:
    """A value as a text's part: on one line, and not endless."""
    try:
        whole = " ".join(repr(value).split()).encode(errors="backslashreplace").decode()
    except Exception as broken:
        # What can't say what it is must not hide what was wrong with it.
        whole = f"{type(value).__name__} (its repr can't be had: {type(broken).__name__})"
    return whole if len(whole) <= SHOWN_CHARS_MAX else f"{whole[: SHOWN_CHARS_MAX - 4]} ..."
