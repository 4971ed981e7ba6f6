"""Prompts: what is kept of them and what is refused."""

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from groupstate.core.prompt import (
    GROUP_SIZE_MAX,
    Prompt,
    as_prompt,
    check_prompt,
    decoded_prompt,
    encoded_prompt,
    prompt_length,
    row_prompt,
)
from groupstate.errors import BadInput
from groupstate.runtime.controller import Controller
from groupstate.testing.notation import Story


def round_trip(prompt: Prompt) -> Prompt:
    return decoded_prompt(encoded_prompt(prompt, "g7"), dataset="math", n=4, group_id="g7")


@pytest.mark.parametrize(
    "content",
    [
        "2 + 2 = ?",
        "",
        "é中🙂\n",
        [1, 2, 3],
        [{"role": "user", "content": "hi"}],
        {"a": [1, None, 0.5]},
        None,
        7,
        b"raw",
    ],
    ids=repr,
)
def test_a_prompt_comes_back_as_it_was(content: Any) -> None:
    prompt = Prompt(content, extra={"answer": "4", "cases": [1, 2]})

    assert round_trip(prompt) == Prompt(content, "math", 4, "g7", {"answer": "4", "cases": [1, 2]})


@pytest.mark.parametrize("group_id", ["", None, 7, b"g"], ids=repr)
def test_a_group_id_is_a_string_that_is_not_empty(group_id: Any) -> None:
    with pytest.raises(BadInput) as refused:
        encoded_prompt(Prompt("x"), group_id)

    assert str(refused.value) == f"a group id is a string that is not empty, not {group_id!r}"


@pytest.mark.parametrize("n", [0, -1, GROUP_SIZE_MAX + 1])
def test_a_group_has_from_one_session_to_the_bound(n: int) -> None:
    with pytest.raises(BadInput) as refused:
        encoded_prompt(Prompt("x", n=n), "g7")

    assert str(refused.value) == (f"group 'g7' has n = {n} sessions; it must be an integer from 1 to {GROUP_SIZE_MAX}")


@pytest.mark.parametrize("n", [None, 1, GROUP_SIZE_MAX])
def test_the_bounds_themselves_are_taken(n: int | None) -> None:
    assert encoded_prompt(Prompt("x", n=n), "g7")


@pytest.mark.parametrize("n", [2.5, "4", True], ids=repr)
def test_a_number_of_sessions_is_an_integer(n: Any) -> None:
    with pytest.raises(BadInput, match="group 'g7' has n = "):
        encoded_prompt(Prompt("x", n=n), "g7")


@pytest.mark.parametrize("content", [object(), 2**70, "\ud800", {"a": {1j}}], ids=["object", "long", "half", "set"])
def test_what_can_not_be_stored_is_refused_with_the_group(content: Any) -> None:
    with pytest.raises(BadInput, match=r"the prompt of group 'g7' can't be stored: .*; use JSON-like values"):
        encoded_prompt(Prompt(content), "g7")


def test_extra_that_can_not_be_stored_is_refused_as_well() -> None:
    with pytest.raises(BadInput, match="the prompt of group 'g7' can't be stored"):
        encoded_prompt(Prompt("x", extra={"a": object()}), "g7")


@pytest.mark.parametrize("extra", [None, 5, ["x"]], ids=repr)
def test_extra_is_a_mapping(extra: Any) -> None:
    with pytest.raises(BadInput) as refused:
        encoded_prompt(Prompt("x", extra=extra), "g7")

    assert str(refused.value) == f"the extra of group 'g7' is {extra!r}; it must be a mapping of names"


@pytest.mark.parametrize("dataset", [None, 3, ["math"]], ids=repr)
def test_a_dataset_is_a_string(dataset: Any) -> None:
    with pytest.raises(BadInput) as refused:
        encoded_prompt(Prompt("x", dataset=dataset), "g7")

    assert str(refused.value) == f"the dataset of group 'g7' is {dataset!r}; it must be a string"


def test_a_prompt_without_a_group_is_called_what_it_is_said_to_be() -> None:
    with pytest.raises(BadInput, match=r"^prompt 3 has n = 0 sessions; it must be an integer from 1 to"):
        check_prompt(Prompt("x", n=0), "prompt 3")
    with pytest.raises(BadInput, match=r"^prompt 3 can't be stored: .*; use JSON-like values$"):
        check_prompt(Prompt({1j}), "prompt 3")
    check_prompt(Prompt("x", group_id="g", n=1), "prompt 3")


def test_extra_that_could_not_be_read_again_is_refused() -> None:
    with pytest.raises(BadInput, match="the prompt of group 'g7' can't be stored"):
        encoded_prompt(Prompt("x", extra={1: "answer"}), "g7")  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("content", "length"), [("abc", 3), ("", 0), ([1, 2], 2), ((1, 2), 2), ({"a": 1}, 0), (None, 0), (7, 0)]
)
def test_length_is_that_of_a_text_or_a_list(content: Any, length: int) -> None:
    assert prompt_length(Prompt(content)) == length


def test_a_bare_content_is_a_prompt_and_a_prompt_stays_what_it_is() -> None:
    prompt = Prompt("x", "math", 4)

    assert as_prompt(prompt) is prompt
    assert as_prompt("x") == Prompt("x")
    assert as_prompt(None) == Prompt(None)


def test_the_prompts_of_a_group_are_kept_beside_the_log() -> None:
    story = Story()
    controller = Controller(story.ledger, None, group_size=3)
    group_id = controller.drawing.submit(Prompt("2 + 2", "math", extra={"answer": "4"}))
    ref = story.group(group_id).prompt

    assert ref is not None
    assert decoded_prompt(story.log.payloads.get(ref), dataset="math", n=3, group_id=group_id).extra == {"answer": "4"}


def test_a_prompt_that_is_all_extra_is_kept_too() -> None:
    story = Story()
    controller = Controller(story.ledger, None, group_size=3)
    group_id = controller.drawing.submit(Prompt(None, extra={"answer": "4"}))

    assert story.group(group_id).prompt is not None


def test_a_ground_truth_of_its_own_counts_before_that_of_the_reward_model() -> None:
    row = {"prompt": "p", "ground_truth": "mine", "reward_model": {"ground_truth": "theirs"}}

    assert row_prompt(row, "here").extra["ground_truth"] == "mine"


@pytest.mark.parametrize("reward_model", [None, "rule", {"style": "rule"}])
def test_a_reward_model_without_ground_truth_adds_nothing(reward_model: Any) -> None:
    assert "ground_truth" not in row_prompt({"prompt": "p", "reward_model": reward_model}, "here").extra


def test_a_data_set_may_be_missing_or_no_string() -> None:
    assert row_prompt({"prompt": "p", "data_source": None}, "here").dataset == ""
    assert row_prompt({"prompt": "p", "data_source": 7}, "here").dataset == "7"


def test_a_mapping_with_a_prompt_is_a_row_and_any_other_is_content() -> None:
    row = MappingProxyType({"prompt": "p", "n": np.int64(2), 3: "odd"})

    assert as_prompt(row) == Prompt("p", "", 2, None, {3: "odd"})  # type: ignore[dict-item]
    assert as_prompt({"promt": "p"}) == Prompt({"promt": "p"})


def test_a_row_without_its_prompt_says_what_it_has() -> None:
    with pytest.raises(BadInput) as refused:
        row_prompt({"promt": "p", 3: 4}, "line 2")

    assert str(refused.value) == "line 2 has no 'prompt'; it has 'promt', 3"


# Rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "p"}, Prompt("p")),
        ({"prompt": "p", "n": 1, "group_id": "g", "data_source": "d"}, Prompt("p", "d", 1, "g")),
        ({"prompt": "p", "n": GROUP_SIZE_MAX, "dataset": "d"}, Prompt("p", "d", GROUP_SIZE_MAX)),
        ({"prompt": "p", "data_source": "d", "dataset": "e"}, Prompt("p", "d")),
        ({"prompt": "p", "data_source": None, "n": None}, Prompt("p")),
        ({"prompt": "p", "data_source": 7}, Prompt("p", "7")),
        ({"prompt": "p", "reward_model": "none"}, Prompt("p", extra={"reward_model": "none"})),
        ({"prompt": "p", "reward_model": {}}, Prompt("p", extra={"reward_model": {}})),
        (
            {"prompt": "p", "reward_model": {"ground_truth": 4}},
            Prompt("p", extra={"reward_model": {"ground_truth": 4}, "ground_truth": 4}),
        ),
        (
            {"prompt": "p", "reward_model": {"ground_truth": 4}, "ground_truth": 5},
            Prompt("p", extra={"reward_model": {"ground_truth": 4}, "ground_truth": 5}),
        ),
    ],
    ids=repr,
)
def test_a_row_becomes_a_prompt_by_its_columns(row: dict[str, Any], prompt: Prompt) -> None:
    assert row_prompt(row, "line 3") == prompt
    assert as_prompt(row) == prompt


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("p", "line 3 is str; it must be an object with a 'prompt'"),
        ({}, "line 3 has no 'prompt'; it has nothing"),
        ({"b": 1, "a": 2}, "line 3 has no 'prompt'; it has 'a', 'b'"),
        ({"prompt": None, "a": 2}, "line 3 has no 'prompt': it is null"),
        ({"prompt": "p", "n": 0}, "line 3 has n = 0; it must be an integer from 1 to 4096"),
        ({"prompt": "p", "n": 4097}, "line 3 has n = 4097; it must be an integer from 1 to 4096"),
        ({"prompt": "p", "n": "4"}, "line 3 has n = '4'; it must be an integer from 1 to 4096"),
        ({"prompt": "p", "group_id": ""}, "line 3 has group_id = ''; it must be a string that is not empty"),
        ({"prompt": "p", "group_id": 7}, "line 3 has group_id = 7; it must be a string that is not empty"),
    ],
    ids=repr,
)
def test_a_row_that_can_not_be_used_says_why_and_where(row: Any, problem: str) -> None:
    with pytest.raises(BadInput) as refused:
        row_prompt(row, "line 3")

    assert str(refused.value) == problem


def test_a_row_that_was_given_alone_is_called_the_row() -> None:
    with pytest.raises(BadInput, match=r"^the row has no 'prompt': it is null"):
        as_prompt({"prompt": None})
