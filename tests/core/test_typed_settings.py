"""Settings with types: what is checked, and what a refusal says would be right."""

from typing import Any, ClassVar

import numpy as np
import pytest

from groupstate.core.typed_settings import Settings, typed
from groupstate.errors import BadSettings


class Part(Settings, tag_field="kind", tag="part", frozen=True, kw_only=True):
    first: int
    second: int


class Other(Settings, tag_field="kind", tag="other", frozen=True, kw_only=True):
    pass


class Given(Settings, frozen=True, kw_only=True):
    AS_GIVEN: ClassVar[frozenset[str]] = frozenset({"anything"})
    anything: Any
    number: int


def test_what_is_kept_as_given_leaves_the_rest_checked() -> None:
    thing = object()

    assert Given(anything=thing, number=np.int64(3)).anything is thing
    with pytest.raises(BadSettings, match="number is 'x'; it must be an integer"):
        Given(anything=thing, number="x")  # type: ignore[arg-type]


def test_numbers_of_other_libraries_are_taken_in_lists_too() -> None:
    found = typed("sizes", tuple[int, ...], [np.int64(1), 2])

    assert (found, [type(size) for size in found]) == ((1, 2), [int, int])


def test_a_type_without_words_of_its_own_is_called_by_its_name() -> None:
    with pytest.raises(BadSettings, match="data is 5; it must be bytes"):
        typed("data", bytes, 5)


def test_settings_that_are_missing_are_told_as_a_table_and_as_a_call() -> None:
    with pytest.raises(BadSettings) as refused:
        typed("part", Part | Other, 5)

    assert str(refused.value) == (
        'part is 5; it must be a table, { kind = "part", first = ..., second = ... } or { kind = "other" }; '
        "in Python Part(first=..., second=...) or Other()"
    )
