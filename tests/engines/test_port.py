"""What goes into every engine: settings and token ids that can't be are named before an engine sees them."""

import asyncio
import copy
import pickle
from array import array
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from groupstate import Request, SamplingParams
from groupstate.engines.given import token_ids_of
from groupstate.engines.port import Home
from groupstate.errors import BadInput, BadSettings, EngineError


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("temperature", "1", "temperature is '1'; it must be a number"),
        ("temperature", True, "temperature is True; it must be a number"),
        ("top_p", None, "top_p is None; it must be a number"),
        ("max_tokens", 2.5, "max_tokens is 2.5; it must be an integer"),
        ("max_tokens", 0, "max_tokens is 0; it must be at least 1"),
        ("stop_token_ids", 2, "stop_token_ids is 2; it must be a list of integers"),
        ("stop_token_ids", "ab", "stop_token_ids is 'ab'; it must be a list of integers"),
        ("stop_token_ids", ["]"], "stop_token_ids is [']']; it must be a list of integers"),
        ("seed", "a", "seed is 'a'; it must be an integer or None"),
    ],
)
def test_a_sampling_parameter_of_another_kind_is_named(field: str, value: Any, text: str) -> None:
    with pytest.raises(BadSettings, match="must be") as refused:
        SamplingParams(**{field: value})

    assert str(refused.value) == text


def test_stop_tokens_may_be_any_collection_of_integers() -> None:
    assert SamplingParams(stop_token_ids=[2, 3]).stop_token_ids == (2, 3)  # type: ignore[arg-type]


CHAT = [{"role": "user", "content": "1 + 1 = ?"}]
TEMPLATE = "your tokenizer's apply_chat_template(messages, add_generation_prompt=True, return_dict=False)"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("1+1", "the prompt is the text '1+1'; it must be token ids, such as tokenizer.encode(text)"),
        (b"ab", "the prompt is bytes b'ab'; it must be token ids"),
        (None, "the prompt is NoneType None; it must be token ids"),
        ([1, 2.5], "the prompt is list [1, 2.5]; it must be token ids"),
        ({"input_ids": [1]}, "the prompt is dict {'input_ids': [1]}; it must be token ids; give its 'input_ids'"),
        (CHAT, f"the prompt is a list of messages; it must be token ids, such as {TEMPLATE}"),
    ],
)
def test_what_is_no_token_ids_is_refused_with_a_way_to_them(given: Any, text: str) -> None:
    with pytest.raises(BadInput) as refused:
        token_ids_of(given, "the prompt")

    assert str(refused.value) == text


def test_token_ids_may_come_in_whatever_holds_integers() -> None:
    assert token_ids_of(array("i", [3, 1]), "the prompt") == [3, 1]


def test_the_error_is_the_one_that_is_asked_for() -> None:
    with pytest.raises(EngineError, match="an answer is NoneType None"):
        token_ids_of(None, "an answer", EngineError)


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, attrs.evolve, lambda request: pickle.loads(pickle.dumps(request))],
    ids=["copy", "deepcopy", "evolve", "pickle"],
)
def test_a_copy_of_a_request_is_another_one(again: Callable[[Request], Request]) -> None:
    request = Request([1, 2], SamplingParams(seed=3, extra={"top_k": 5}), affinity="g1_0")
    request.used = True
    other = again(request)

    assert (other.prompt_ids, other.params, other.affinity, other.text) == ([1, 2], request.params, "g1_0", "")
    assert other.id != request.id
    assert not other.used


def test_the_id_of_a_request_is_its_own() -> None:
    request = Request([1])
    with pytest.raises(attrs.exceptions.FrozenAttributeError):
        request.id = "mine"


def test_an_engine_of_one_loop_alone_says_so_in_another_once_that_has_ended() -> None:
    async def use() -> None:
        home.need("vllm")

    home = Home(moves=False)
    asyncio.run(use())
    with pytest.raises(
        EngineError, match=r"the engine 'vllm' can't go on in another event loop .* within one asyncio\.run"
    ):
        asyncio.run(use())
