"""What callers give: the text names the argument, the value and what would be right."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from groupstate.core.arguments import INTEGER_MAX, boolean, integer, integer_or_none, seconds, shown, string
from groupstate.errors import BadInput, BadSettings


class Index:
    """An integer of a library that Python knows nothing of."""

    def __repr__(self) -> str:
        return "Index()"

    def __index__(self) -> int:
        return 7


class Dumb:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [7, np.int64(7), np.uint8(7), np.array(7), Index()], ids=repr)
def test_an_integer_of_whatever_library_becomes_pythons_own(value: Any) -> None:
    found = integer("weight_version", value)

    assert (found, type(found)) == (7, int)


@pytest.mark.parametrize(
    "value", [True, np.bool_(True), 1.0, np.float64(1), "9", None, [1], math.nan, np.array([1])], ids=repr
)
def test_what_is_no_integer_is_refused_with_its_name_and_value(value: Any) -> None:
    with pytest.raises(BadInput) as refused:
        integer("weight_version", value)

    assert str(refused.value) == f"weight_version is {value!r}; it must be an integer"


@pytest.mark.parametrize(
    ("value", "bounds", "right"),
    [
        (0, {"least": 1}, "an integer of at least 1"),
        ("x", {"least": 1, "most": 9}, "an integer from 1 to 9"),
        (10, {"least": 1, "most": 9}, "an integer from 1 to 9"),
        (INTEGER_MAX + 1, {}, "an integer of at most 64 bits"),
        (-INTEGER_MAX - 1, {}, "an integer of at most 64 bits"),
        ("x", {"wanted": "a Batch or its number"}, "a Batch or its number"),
    ],
)
def test_the_bounds_are_told(value: Any, bounds: dict[str, Any], right: str) -> None:
    with pytest.raises(BadSettings) as refused:
        integer("n", value, error=BadSettings, **bounds)

    assert str(refused.value) == f"n is {value!r}; it must be {right}"


def test_none_stays_none_where_it_may_be() -> None:
    assert integer_or_none("n", None) is None
    assert integer_or_none("n", Index(), least=1) == 7
    with pytest.raises(BadInput, match="n is 0; it must be an integer of at least 1"):
        integer_or_none("n", 0, least=1)


@pytest.mark.parametrize(
    ("value", "found"),
    [(0, 0), (2.5, 2.5), (np.float32(2.5), 2.5), (np.int64(2), 2), (np.float64(2), 2), (Fraction(1, 2), 0.5)],
    ids=repr,
)
def test_a_duration_is_any_real_number(value: Any, found: float) -> None:
    assert seconds("grace_s", value) == found
    assert type(seconds("grace_s", value)) in (int, float)


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, "5", None, True, 1j], ids=repr)
@pytest.mark.parametrize("endless", [True, False])
def test_what_is_no_duration_is_refused(value: Any, endless: bool) -> None:
    with pytest.raises(BadInput) as refused:
        seconds("timeout_s", value, endless=endless)

    assert str(refused.value).startswith(f"timeout_s is {value!r}; it must be a number of seconds, ")


def test_infinity_is_a_duration_only_where_something_may_last_for_ever() -> None:
    assert seconds("timeout_s", math.inf, endless=True) == math.inf
    with pytest.raises(BadInput, match="grace_s is inf; it must be a number of seconds, finite and at least 0"):
        seconds("grace_s", math.inf)


def test_a_string_is_one_that_a_log_can_hold() -> None:
    assert string("name", "é🙂\0") == "é🙂\0"
    with pytest.raises(BadInput) as refused:
        string("name", 3)
    assert str(refused.value) == "name is 3; it must be a string"
    with pytest.raises(BadInput) as refused:
        string("name", "\ud800")
    assert str(refused.value) == "name is '\\ud800'; it must be a string that UTF-8 can hold"


def test_a_truth_value_is_no_other_value() -> None:
    assert boolean("mark", False) is False
    with pytest.raises(BadInput, match="mark is 1; it must be True or False"):
        boolean("mark", 1)


def test_a_value_is_shown_on_one_line_that_ends() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert shown(np.zeros((2, 2))) == "array([[0., 0.], [0., 0.]])"
    assert shown("\ud800") == r"'\ud800'"
    assert shown("x" * 100) == "'" + "x" * 75 + " ..."
    assert len(shown("x" * 100)) == 80
    assert shown(Dumb()) == "Dumb (its repr can't be had: RuntimeError)"


def test_the_bounds_themselves_are_within() -> None:
    assert [integer("n", value, least=1, most=9) for value in (1, 9)] == [1, 9]
    with pytest.raises(BadInput, match=r"wait_s is -1; it must be a number of seconds, at least 0$"):
        seconds("wait_s", -1, endless=True)


@pytest.mark.parametrize(("value", "kind"), [(3, int), (np.int64(3), int), (3.0, float), (np.float32(3), float)])
def test_whole_seconds_stay_whole(value: Any, kind: type) -> None:
    found = seconds("wait_s", value)

    assert (found, type(found)) == (3, kind)


def test_what_fits_is_shown_whole_and_what_utf8_can_not_hold_is_escaped() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "\ud800"

    assert shown("x" * 78) == repr("x" * 78)
    assert shown(Odd()) == r"\ud800"
