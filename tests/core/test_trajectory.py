"""The door: what a session may return, what is refused there and with which words, and what is kept of it."""

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupstate.core import events as ev
from groupstate.core.trajectory import (
    SHOWN_CHARS_MAX,
    TOKEN_ID_MAX,
    WEIGHT_VERSION_MAX,
    Admitted,
    Trajectory,
    broadcast_reward,
    checked,
    metrics_of,
    payload_of,
    record_of,
    record_without_tokens,
    restored,
    yielded,
)
from groupstate.errors import UnusableResult
from groupstate.testing.notation import Story, play

SPAN = ev.VersionSpan
WHO = "session 3 of group 'g7'"


def admitted(result: Any) -> tuple[Admitted, ...]:
    return checked(result, session=3, group_id="g7")


def admit(result: Any) -> tuple[Trajectory, ...]:
    """What is kept of it, as trajectories again."""
    rows = admitted(result)
    records = [record_of(index, row) for index, row in enumerate(rows)]
    return tuple(attrs.evolve(row, reward=None) for row in restored(records, payload_of(rows, WHO)))


def refusal(result: Any) -> str:
    with pytest.raises(UnusableResult) as refused:
        admit(result)
    return str(refused.value)


def ended_with(result: Any) -> Story:
    """A story whose one session returned `result`, refused or not."""
    story = play("submit g/1", "start g")
    try:
        story.ledger.finish("g", 0, 1, result)
    except UnusableResult:
        pass
    return story


# What may be returned --------------------------------------------------------------------------------


def test_none_and_an_empty_list_are_no_trajectories() -> None:
    assert admit(None) == ()
    assert admit([]) == ()
    assert admit(()) == ()


def test_one_trajectory_a_list_and_a_tuple_of_them_are_taken_in_order() -> None:
    first, second = Trajectory(metrics={"reward": 1.0}), Trajectory(metrics={"reward": 2.0})

    assert admit(first) == (first,)
    assert admit([first, second]) == (first, second)
    assert admit((second, first)) == (second, first)


@pytest.mark.parametrize(
    "result", [0.75, "text", {"reward": 1.0}, {1}, object, iter([])], ids=lambda value: type(value).__name__
)
def test_anything_else_is_refused_with_its_type(result: Any) -> None:
    text = refusal(result)

    assert text == f"{WHO} returned {type(result).__name__}; it must return a Trajectory, a list of them, or None"


@pytest.mark.parametrize(
    "wrong", [None, 1.0, "text", [Trajectory()], ev.TrajectoryRecord(0)], ids=lambda value: type(value).__name__
)
def test_a_list_that_holds_something_else_is_refused_at_its_index(wrong: Any) -> None:
    text = refusal([Trajectory(), wrong])

    assert text == f"{WHO} returned {type(wrong).__name__} at index 1; it must be a Trajectory"


# Metrics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")])
def test_a_reward_that_is_not_finite_is_refused(value: Any) -> None:
    text = refusal([Trajectory(reward=1.0), Trajectory(reward=value)])

    assert text == f"trajectory 1 of {WHO} has reward = {value!r}; it must be finite"


def test_a_metric_that_is_not_finite_is_refused_by_its_name() -> None:
    assert refusal(Trajectory(reward=1.0, metrics={"acc": math.nan})) == (
        f"trajectory 0 of {WHO} has acc = nan; it must be finite"
    )


@pytest.mark.parametrize("value", [None, "good", [1.0], {}, 1 + 2j], ids=repr)
def test_a_metric_that_is_no_number_is_refused(value: Any) -> None:
    assert refusal(Trajectory(metrics={"acc": value})) == (
        f"trajectory 0 of {WHO} has acc = {value!r}; it must be a number"
    )


@pytest.mark.parametrize("name", [1, None, ("a",)], ids=repr)
def test_a_metric_is_named_by_a_string(name: Any) -> None:
    assert refusal(Trajectory(metrics={name: 1.0})) == (
        f"trajectory 0 of {WHO} has a metric named {name!r}; names are strings"
    )


@pytest.mark.parametrize("metrics", [None, [("acc", 1.0)], 3], ids=repr)
def test_metrics_are_a_dict(metrics: Any) -> None:
    assert refusal(Trajectory(metrics=metrics)) == (
        f"trajectory 0 of {WHO} has metrics of type {type(metrics).__name__}; it must be a dict of numbers"
    )


def test_metrics_may_be_any_mapping() -> None:
    (row,) = admit(Trajectory(metrics=MappingProxyType({"acc": 1})))

    assert row.metrics == {"acc": 1.0}


@pytest.mark.parametrize(
    "value",
    [1, True, Fraction(1, 2), np.float32(0.5), np.float64(0.5), np.int64(3), np.bool_(True), np.array(0.5)],
    ids=repr,
)
def test_whatever_is_a_finite_number_becomes_a_plain_float(value: Any) -> None:
    (row,) = admit(Trajectory(reward=value, metrics={"acc": value}))
    metrics = metrics_of(row)

    assert metrics == {"acc": float(value), "reward": float(value)}
    assert {type(number) for number in metrics.values()} == {float}


def test_the_reward_is_a_metric_and_goes_before_one_of_that_name() -> None:
    assert metrics_of(Trajectory(reward=0.0, metrics={"reward": 1.0, "acc": 2})) == {"reward": 0.0, "acc": 2.0}
    assert metrics_of(Trajectory(metrics={"reward": 1.0})) == {"reward": 1.0}
    assert metrics_of(Trajectory()) == {}


def test_an_integer_too_large_for_a_float_is_refused() -> None:
    assert refusal(Trajectory(reward=10**400)) == (
        f"trajectory 0 of {WHO} has reward = an integer of 1329 bits; it must be finite"
    )


def test_a_text_is_no_number_even_if_it_reads_like_one() -> None:
    assert "it must be a number" in refusal(Trajectory(metrics={"acc": "0.5"}))  # type: ignore[dict-item]


# Tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize("token", [-1, TOKEN_ID_MAX + 1, 1.0, "a", None], ids=repr)
def test_a_token_that_is_no_id_is_refused_at_its_place(field: str, token: Any) -> None:
    text = refusal(Trajectory(**{field: [5, token]}))

    assert text == f"trajectory 0 of {WHO} has {token!r} at {field}[1]; token ids are integers from 0"


@pytest.mark.parametrize("field", ["prompt_ids", "response_ids", "log_probs"])
@pytest.mark.parametrize("value", ["12", b"12", bytearray(b"12"), None, 5], ids=repr)
def test_a_text_or_a_single_value_is_no_sequence_of_numbers(field: str, value: Any) -> None:
    text = refusal(Trajectory(**{field: value}))

    assert text.startswith(f"trajectory 0 of {WHO} has {field} ")


def test_the_lowest_and_the_highest_token_id_are_taken() -> None:
    row = Trajectory(prompt_ids=(0,), response_ids=(TOKEN_ID_MAX,))

    assert admit(row) == (row,)


@pytest.mark.parametrize("token", [0, TOKEN_ID_MAX])
def test_what_is_refused_is_not_the_good_token_before_it(token: int) -> None:
    assert "has -1 at response_ids[1]; " in refusal(Trajectory(response_ids=[token, -1]))


def test_token_ids_may_be_numpy_integers() -> None:
    row = Trajectory(prompt_ids=[np.int64(1)], response_ids=np.array([2, 3]))  # type: ignore[arg-type]

    assert len(admit(row)) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_log_probs_are_one_for_each_response_token(count: int) -> None:
    text = refusal(Trajectory(response_ids=[1, 2], log_probs=[-0.5] * count))

    assert text == f"trajectory 0 of {WHO} has {count} log_probs for 2 response tokens; give one for each, or none"


@pytest.mark.parametrize("log_probs", [[], [-0.5, -0.25], [-3.4028234663852886e38, 3.4028234663852886e38]])
def test_log_probs_for_all_or_for_none_are_taken(log_probs: list[float]) -> None:
    assert admit(Trajectory(response_ids=[1, 2], log_probs=log_probs))


def test_what_only_says_that_it_makes_numbers_is_none() -> None:
    class Scalar:
        def tolist(self) -> list[int]:
            return [5]

    assert "it must be a sequence of token ids" in refusal(Trajectory(response_ids=Scalar()))  # type: ignore[arg-type]


def test_a_mask_is_no_sequence_of_tokens() -> None:
    assert "at response_ids[0]; token ids are integers" in refusal(Trajectory(response_ids=np.array([True, False])))


def test_rows_are_compared_whatever_stands_in_place_of_numbers() -> None:
    row = Trajectory(prompt_ids=None)  # type: ignore[arg-type]

    assert row == Trajectory(prompt_ids=None)  # type: ignore[arg-type]
    assert row != Trajectory()


def test_what_can_make_all_its_numbers_at_once_is_asked_for_them_at_once() -> None:
    class Array:
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("it is taken apart one by one")

        def tolist(self) -> list[int]:
            return [5, 6]

    (row,) = admit(Trajectory(response_ids=Array()))  # type: ignore[arg-type]

    assert row.response_ids == (5, 6)


@pytest.mark.parametrize("value", [math.nan, math.copysign(math.nan, -1.0), math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_refused_at_its_place(value: float) -> None:
    text = refusal(Trajectory(response_ids=[1, 2], log_probs=[-0.5, value]))

    assert text == f"trajectory 0 of {WHO} has {value!r} at log_probs[1]; it must be finite"


def test_a_log_prob_that_32_bits_cannot_hold_is_refused() -> None:
    assert "log_probs[0]" in refusal(Trajectory(response_ids=[1], log_probs=[-1e300]))


def test_a_log_prob_of_an_iterator_is_shown_where_it_is_not_finite() -> None:
    values = iter([-0.5, float("nan")])

    assert "has nan at log_probs[1]" in refusal(Trajectory(response_ids=[1, 2], log_probs=values))  # type: ignore[arg-type]


def test_log_probs_that_are_no_numbers_are_shown() -> None:
    assert refusal(Trajectory(response_ids=[1], log_probs=["a"])) == (  # type: ignore[list-item]
        f"trajectory 0 of {WHO} has log_probs ['a']; they must be finite numbers"
    )


RANGES = [
    ([(0, 0)], "[0, 0)"),
    ([(2, 1)], "[2, 1)"),
    ([(-1, 2)], "[-1, 2)"),
    ([(0, 4)], "[0, 4)"),
    ([(0, 2), (1, 3)], "[1, 3)"),
    ([(2, 3), (0, 1)], "[0, 1)"),
]


@pytest.mark.parametrize(("ranges", "named"), RANGES)
def test_ranges_of_the_environment_are_in_order_and_within_the_response(
    ranges: list[tuple[int, int]], named: str
) -> None:
    text = refusal(Trajectory(response_ids=[1, 2, 3], environment=ranges))

    assert text == (
        f"trajectory 0 of {WHO}: environment holds {named}; ranges are in order, not empty, "
        "and within 3 response tokens"
    )


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(("ranges", "named"), RANGES)
def test_spans_are_in_order_and_within_the_response(
    ranges: list[tuple[int, int]], named: str, kind: type[list[Any]]
) -> None:
    text = refusal(Trajectory(response_ids=[1, 2, 3], spans=kind(SPAN(start, stop, 5) for start, stop in ranges)))

    assert text.startswith(f"trajectory 0 of {WHO}: spans holds {named};")


def test_numbers_of_spans_may_be_numpys_and_become_pythons() -> None:
    (row,) = admit(Trajectory(response_ids=(1, 2), spans=(SPAN(np.int64(0), np.int64(2), 5),)))

    assert row.spans == (SPAN(0, 2, 5),)
    assert {type(row.spans[0].start), type(row.spans[0].stop)} == {int}


def test_ranges_may_touch_and_reach_to_the_end() -> None:
    row = Trajectory(response_ids=(1, 2, 3), spans=(SPAN(0, 1, 5), SPAN(1, 2, 6)), environment=((2, 3),))

    assert admit(row) == (row,)


@pytest.mark.parametrize("version", [-WEIGHT_VERSION_MAX, WEIGHT_VERSION_MAX])
def test_the_lowest_and_the_highest_weight_version_are_taken(version: int) -> None:
    row = Trajectory(response_ids=(1,), spans=(SPAN(0, 1, version),))

    assert admit(row) == (row,)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt_ids": 5}, " has prompt_ids = 5; it must be a sequence of token ids"),
        ({"environment": 5}, ": environment is 5; it must be a sequence"),
        ({"environment": [7]}, ": environment holds 7; it must be a pair of integers"),
        ({"spans": 5}, ": spans is 5; it must be a sequence"),
        ({"text": 5}, " has text = 5; it must be a string"),
        ({"info": 5}, " has info = 5; it must be a dict whose keys are strings"),
        ({"reward": Fraction}, f" has reward = {Fraction!r}; it must be a number"),
    ],
    ids=str,
)
def test_a_refusal_shows_what_was_given(fields: dict[str, Any], text: str) -> None:
    assert refusal(Trajectory(**fields)) == f"trajectory 0 of {WHO}{text}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"a" * (SHOWN_CHARS_MAX - 3), repr(b"a" * (SHOWN_CHARS_MAX - 3))),
        (b"a" * (SHOWN_CHARS_MAX - 2), repr(b"a" * SHOWN_CHARS_MAX)[:SHOWN_CHARS_MAX] + "..."),
        (2**511, str(2**511)[:SHOWN_CHARS_MAX] + "..."),
        (2**512, "an integer of 513 bits"),
    ],
    ids=["all of it", "its beginning", "512 bits", "513 bits"],
)
def test_a_long_value_is_cut_in_what_is_said_of_it(value: Any, shown: str) -> None:
    assert refusal(Trajectory(text=value)) == f"trajectory 0 of {WHO} has text = {shown}; it must be a string"


ESCAPES: list[tuple[str, dict[str, Any]]] = [
    ("prompt_ids", {"prompt_ids": None}),
    ("response_ids", {"response_ids": 5}),
    ("log_probs", {"log_probs": None}),
    ("log_probs", {"response_ids": [1], "log_probs": [None]}),
    ("spans", {"spans": None}),
    ("spans", {"response_ids": [1], "spans": [(0, 1, 7)]}),
    ("spans", {"response_ids": [1], "spans": [SPAN(0, 1, "seven")]}),  # type: ignore[arg-type]
    ("environment", {"response_ids": [1], "environment": [0]}),
    ("environment", {"response_ids": [1], "environment": [(0, 1.0)]}),
    ("info", {"response_ids": [1], "info": None}),
    ("text", {"response_ids": [1], "text": None}),
    ("text", {"text": 5}),
    ("info", {"info": {1: "a key that is no string"}}),
    ("metric", {"metrics": {"\ud800": 1.0}}),
]


@pytest.mark.parametrize(("field", "fields"), ESCAPES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(ESCAPES)])
def test_a_field_of_a_wrong_type_fails_its_session_and_nothing_else(field: str, fields: dict[str, Any]) -> None:
    story = play("submit g/1", "start g")
    with pytest.raises(UnusableResult) as refused:
        story.ledger.finish("g", 0, 1, Trajectory(**fields))

    assert "session 0 of group 'g'" in str(refused.value)
    assert field in str(refused.value)
    assert story.phase("g") == "failure"


class Foreign:
    """A number of another library that can't be made a float, and says so in its own way."""

    def __float__(self) -> float:
        raise RuntimeError("more than one element")


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": Foreign()},
        {"response_ids": [1], "log_probs": [Foreign()]},
        {"response_ids": [1], "log_probs": {"a": math.nan}.values()},
        {"response_ids": [1], "spans": [SPAN(0, 1, 2**70)]},
    ],
    ids=["reward", "log_probs", "a view", "version"],
)
def test_whatever_foreign_values_raise_fails_their_session_alone(fields: dict[str, Any]) -> None:
    assert ended_with(Trajectory(**fields)).phase("g") == "failure"


def test_what_foreign_values_raise_is_said() -> None:
    assert refusal(Trajectory(reward=Foreign())) == (  # type: ignore[arg-type]
        f"trajectory 0 of {WHO} can't be read: RuntimeError: more than one element"
    )


def test_a_failure_is_recorded_whatever_its_text() -> None:
    story = play("submit g/1", "start g")
    story.ledger.fail("g", 0, 1, "error", "FileNotFoundError: 'caf\udce9.txt'")

    assert story.phase("g") == "failure"


def test_what_can_not_be_recorded_is_the_sessions_failure() -> None:
    story = ended_with(Trajectory(reward=math.nan))
    session = story.group("g").sessions[0]

    assert (session.state, session.failure) == ("failed", "refused")
    assert session.message == "trajectory 0 of session 0 of group 'g' has reward = nan; it must be finite"


@pytest.mark.parametrize("info", [{"a": object()}, {"a": 2**70}, {"a": "\ud800"}], ids=["object", "long", "half"])
def test_info_that_can_not_be_stored_is_refused_with_the_session(info: dict[str, Any]) -> None:
    with pytest.raises(UnusableResult, match=f"{WHO} has info or text that can't be stored: "):
        payload_of(admitted(Trajectory(info=info)), WHO)

    assert ended_with(Trajectory(info=info)).group("g").sessions[0].failure == "refused"


# Record and payload ----------------------------------------------------------------------------------


def test_the_record_counts_what_the_payload_holds() -> None:
    given = Trajectory(
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        log_probs=[-1.0, 0.0, -2.0],
        spans=[SPAN(0, 1, 7), SPAN(2, 3, 8)],
        environment=[[1, 2]],  # type: ignore[list-item]
        reward=0.5,
    )
    (row,) = admitted(given)

    assert record_of(4, row) == ev.TrajectoryRecord(4, {"reward": 0.5}, 2, 3, (SPAN(0, 1, 7), SPAN(2, 3, 8)), ((1, 2),))


def test_rewards_alone_need_no_payload() -> None:
    rows = [Trajectory(reward=1.0), Trajectory(metrics={"acc": 0.0})]

    assert payload_of(admitted(rows), WHO) is None
    assert payload_of([], WHO) is None


@pytest.mark.parametrize(
    "fields", [{"prompt_ids": [1]}, {"response_ids": [1]}, {"text": "a"}, {"info": {"a": 1}}], ids=str
)
def test_one_row_with_something_to_keep_makes_a_payload(fields: dict[str, Any]) -> None:
    again = admit([Trajectory(reward=1.0), Trajectory(**fields)])

    assert [len(row.prompt_ids) + len(row.response_ids) + len(row.text) + len(row.info) for row in again] == [0, 1]


def test_without_a_payload_the_metrics_and_versions_come_back() -> None:
    record = ev.TrajectoryRecord(0, {"reward": 1.0}, 0, 3, (SPAN(0, 2, 7),), ((2, 3),))

    assert restored([record], None) == (
        Trajectory(reward=1.0, metrics={"reward": 1.0}, spans=(SPAN(0, 2, 7),), environment=((2, 3),)),
    )


def test_with_a_payload_the_reward_comes_back_under_its_own_name_too() -> None:
    rows = admitted(Trajectory(text="a", reward=0.5))

    assert restored([record_of(0, rows[0])], payload_of(rows, WHO))[0].reward == 0.5


def test_a_payload_of_another_number_of_rows_is_an_error() -> None:
    payload = payload_of(admitted(Trajectory(text="a")), WHO)
    with pytest.raises(ValueError, match="zip"):
        restored([ev.TrajectoryRecord(0), ev.TrajectoryRecord(1)], payload)


# Rows whose tokens lie elsewhere ---------------------------------------------------------------------


def counted(**fields: Any) -> ev.TrajectoryRecord:
    given = {"metrics": {}, "prompt_tokens": 0, "response_tokens": 0, "spans": (), **fields}
    return record_without_tokens(5, **given, who=WHO)


def test_a_record_without_tokens_has_what_was_counted_elsewhere() -> None:
    record = counted(metrics={"reward": 1}, prompt_tokens=2, response_tokens=3, spans=[SPAN(0, 3, 7)])

    assert record == ev.TrajectoryRecord(5, {"reward": 1.0}, 2, 3, (SPAN(0, 3, 7),))


def test_a_record_without_tokens_may_have_none() -> None:
    assert counted() == ev.TrajectoryRecord(5)


@pytest.mark.parametrize("field", ["prompt_tokens", "response_tokens"])
@pytest.mark.parametrize("count", [-1, 1.0, True, None, "3"], ids=repr)
def test_a_count_of_tokens_is_an_integer_from_0(field: str, count: Any) -> None:
    with pytest.raises(UnusableResult) as refused:
        counted(**{field: count})

    assert str(refused.value) == f"{WHO} has {field} = {count!r}; it must be an integer from 0"


@pytest.mark.parametrize("spans", [(), (SPAN(0, 1, 7),), (SPAN(0, 2, 7), SPAN(2, 3, 8))], ids=["none", "one", "two"])
def test_spans_that_are_as_they_are_kept_are_not_made_again(spans: tuple[ev.VersionSpan, ...]) -> None:
    assert counted(response_tokens=3, spans=spans).spans is spans


def test_a_record_without_tokens_names_what_is_no_number() -> None:
    assert counted(not_finite=("acc", "reward")) == ev.TrajectoryRecord(5, not_finite=("acc", "reward"))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"metrics": {"acc": math.nan}}, "has acc = nan; it must be finite"),
        ({"spans": [(0, 1)]}, ": spans holds (0, 1); it must be a VersionSpan of integers"),
        (
            {"response_tokens": 2, "spans": [SPAN(0, 3, 7)]},
            ": spans holds [0, 3); ranges are in order, not empty, and within 2 response tokens",
        ),
        ({"metrics": {"acc": Foreign()}}, "can't be read: RuntimeError: more than one element"),
    ],
    ids=["metric", "span", "range", "foreign"],
)
def test_a_record_without_tokens_is_checked_as_a_trajectory_is(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UnusableResult) as refused:
        counted(**fields)

    assert str(refused.value) == WHO + (text if text.startswith(":") else f" {text}")


# One reward for all rows of a session ----------------------------------------------------------------


def test_the_last_reward_goes_to_every_row_and_nothing_else_does() -> None:
    rows = [Trajectory(text="a", reward=1.0), Trajectory(metrics={"acc": 1.0, "reward": 3.0}), Trajectory(reward=2)]

    assert broadcast_reward(rows) == [
        Trajectory(text="a", reward=2.0),
        Trajectory(metrics={"acc": 1.0, "reward": 3.0}, reward=2.0),
        Trajectory(reward=2.0),
    ]


def test_no_rows_need_no_reward() -> None:
    assert broadcast_reward([]) == []


@pytest.mark.parametrize(
    ("metrics", "present"), [({"b": 1.0, "a": 1.0}, "'a', 'b'"), ({}, "none at all")], ids=["others", "none"]
)
def test_rows_whose_last_has_no_reward_are_refused(metrics: dict[str, float], present: str) -> None:
    with pytest.raises(UnusableResult) as refused:
        broadcast_reward([Trajectory(reward=1.0), Trajectory(metrics=metrics)])

    assert str(refused.value) == (f"the last of 2 trajectories has no metric 'reward' for the others; it has {present}")


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5)
)
JSON_LIKE = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=3)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    tokens = st.integers(0, TOKEN_ID_MAX)
    response = draw(st.lists(tokens, max_size=6))
    bounds = sorted(draw(st.sets(st.integers(0, len(response)), max_size=4)))
    ranges = list(pairwise(bounds))
    finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
    return Trajectory(
        prompt_ids=draw(st.lists(tokens, max_size=4)),
        response_ids=response,
        log_probs=draw(st.lists(finite, min_size=len(response), max_size=len(response)) | st.just([])),
        spans=[SPAN(start, stop, draw(st.integers(0, 9))) for start, stop in ranges[::2]],
        environment=ranges[1::2],
        metrics=draw(st.dictionaries(st.text(max_size=4), finite, max_size=3)),
        reward=draw(st.none() | finite),
        text=draw(st.text(max_size=8)),
        info=draw(st.dictionaries(st.text(max_size=3), JSON_LIKE, max_size=2)),
    )


@settings(deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=3))
def test_what_is_taken_at_the_door_comes_back_from_record_and_payload(rows: list[Trajectory]) -> None:
    taken = admitted(rows)
    records = [record_of(index, row) for index, row in enumerate(taken)]
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(records), type=list[ev.TrajectoryRecord])
    again = restored(kept, payload_of(taken, WHO))

    for before, after in zip(rows, again, strict=True):
        assert list(after.prompt_ids) == list(before.prompt_ids)
        assert list(after.response_ids) == list(before.response_ids)
        assert list(after.log_probs) == list(before.log_probs)
        assert list(after.spans) == list(before.spans)
        assert list(after.environment) == list(before.environment)
        assert after.metrics == metrics_of(before)
        assert (after.text, after.info) == (before.text, before.info)


def test_what_a_session_returned_comes_with_both_of_its_halves() -> None:
    row = Trajectory(prompt_ids=[1], response_ids=[2, 3], reward=0.5)

    made = yielded([row, row], session=0, group_id="g")

    assert made.error == ""
    assert [(record.index, record.response_tokens, record.metrics) for record in made.records] == [
        (0, 2, {"reward": 0.5}),
        (1, 2, {"reward": 0.5}),
    ]
    assert [list(again.response_ids) for again in restored(made.records, made.payload)] == [[2, 3], [2, 3]]


def test_what_cannot_be_stored_is_told_with_its_session() -> None:
    with pytest.raises(UnusableResult, match=r"^session 3 of group 'g' has info or text that can't be stored: "):
        yielded(Trajectory(reward=0.5, info={"a": object()}), session=3, group_id="g")
