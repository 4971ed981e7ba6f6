"""What engines and requests are given, refused by name before anything is done with it."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from groupstate.engines.given import token_ids_of
from groupstate.engines.port import Request, SamplingParams
from groupstate.engines.scripted import ScriptedEngine
from groupstate.engines.tokenizer import CharTokenizer
from groupstate.engines.torch import TorchEngine
from groupstate.engines.transformer import Transformer, TransformerConfig
from groupstate.errors import BadInput, BadSettings, EngineError, RequestRefused

CONFIG = TransformerConfig(vocabulary_size=16, context=8, width=8, layers=1, heads=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in ("x", None, True, math.nan, math.inf, -0.1, {1})),
        *(("top_p", value) for value in ("x", None, True, math.nan, 0.0, 1.1)),
        *(("max_tokens", value) for value in ("x", None, True, math.nan, math.inf, 1.5, 0, -1)),
        *(("stop_token_ids", value) for value in ("12", None, 3, True, [1.5], ["a"], [True], {"a": 1})),
        *(("seed", value) for value in ("x", 1.5, True, math.nan, [1])),
        *(("extra", value) for value in ("x", None, 3, [("top_k", 1)])),
    ],
)
def test_a_sampling_parameter_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadSettings, match=f"^{name} is "):
        SamplingParams(**{name: value})


def test_names_that_are_no_sampling_parameters_are_refused() -> None:
    with pytest.raises(BadSettings, match="has no setting 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(BadSettings, match="extra has 1; the names of parameters are strings"):
        SamplingParams(extra={1: 2})  # type: ignore[dict-item]


def test_numbers_of_numpy_are_taken_for_pythons_own() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        max_tokens=np.int64(7),  # type: ignore[arg-type]
        stop_token_ids=[np.int32(3), 4],  # type: ignore[arg-type]
        seed=np.uint8(9),  # type: ignore[arg-type]
    )

    assert params == SamplingParams(temperature=0.5, max_tokens=7, stop_token_ids=(3, 4), seed=9)
    assert [type(value) for value in (params.max_tokens, params.seed, *params.stop_token_ids)] == [int] * 4


def test_parameters_of_an_engines_own_are_kept_as_they_are() -> None:
    own = object()

    assert SamplingParams(extra={"own": own}).extra["own"] is own


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**70 + 5, -(2**80)])
async def test_any_integer_is_a_seed(seed: int) -> None:
    engine = TorchEngine(CONFIG)
    answers = [await engine.generate(Request([1], SamplingParams(seed=seed, max_tokens=5))) for _ in range(2)]
    await engine.aclose()

    assert answers[0] == answers[1]


# Requests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [None, 3, "12", b"12", [1.7], ["1"], [None], [True], [[1, 2]], {1, 2}, {1: 2}, np.array([1.5]), torch.ones(2, 2)],
)
async def test_what_is_no_list_of_token_ids_is_no_prompt(value: Any) -> None:
    for engine in (ScriptedEngine([[1]]), TorchEngine(CONFIG)):
        with pytest.raises(RequestRefused, match="it must be token ids"):
            await engine.generate(Request(value))


@pytest.mark.parametrize("value", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2])])
def test_token_ids_may_come_in_whatever_has_an_order(value: Any) -> None:
    found = token_ids_of(value, "the prompt")

    assert found == [1, 2]
    assert {type(token) for token in found} == {int}


@pytest.mark.parametrize(
    ("name", "value"),
    [("params", None), ("params", {"max_tokens": 3}), ("text", 3), ("text", "\ud800"), ("affinity", None)],
)
def test_the_rest_of_a_request_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"^{name} is "):
        Request((1,), **{name: value})


@pytest.mark.parametrize("value", [None, (1, 2), "x"])
async def test_what_is_no_request_is_not_answered(value: Any) -> None:
    for engine in (ScriptedEngine([[1]]), TorchEngine(CONFIG)):
        with pytest.raises(BadInput, match="it must be a Request"):
            await engine.generate(value)


# Engines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("script", value) for value in (None, 3, "abc", {1})),
        *(("start_s", value) for value in ("x", None, -1.0, math.nan, True)),
        *(("token_s", value) for value in ("x", math.inf)),
        *(("slots_max", value) for value in (0, "x", 1.5, True)),
        *(("context", value) for value in (0, "x")),
        *(("in_flight", value) for value in ("drop", None, [])),
        *(("weight_version", value) for value in ("1", None, 1.5, True, 2**70)),
        *(("tokenizer", value) for value in (3, "x", object())),
        ("fits", 3),
    ],
)
def test_a_scripted_engine_refuses_what_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(EngineError, match=f"^{name} is "):
        ScriptedEngine(**{"script": [[1]], name: value})


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        *(("model", value, "model is ") for value in (None, "x", torch.nn.Linear(1, 1))),
        *(("slots_max", value, "slots_max is ") for value in (0, "x", None, 1.5)),
        *(("threads", value, "threads is ") for value in (0, "x", 1.5, True)),
        *(("seed", value, "seed is ") for value in ("x", None, 1.5, 2**70)),
        *(("weight_version", value, "weight_version is ") for value in ("1", None, True)),
        *(("tokenizer", value, "tokenizer is ") for value in (3, object())),
        *(("device", value, "the model can't be put on device ") for value in ("x", object(), "cuda:77")),
    ],
)
def test_an_embedded_engine_refuses_what_cannot_be(name: str, value: Any, complaint: str) -> None:
    with pytest.raises(EngineError, match=f"^{complaint}"):
        TorchEngine(**{"model": CONFIG, name: value})


@pytest.mark.parametrize("name", ["vocabulary_size", "context", "width", "layers", "heads"])
def test_a_model_has_whole_sizes(name: str) -> None:
    for value in ("x", None, 0, 1.5, True, math.nan):
        with pytest.raises(BadSettings, match=f"^{name} is "):
            TransformerConfig(**{"vocabulary_size": 16, name: value})
    wrong: Any = {"vocabulary_size": 16}
    with pytest.raises(BadSettings, match="it must be a TransformerConfig"):
        Transformer(wrong)


def test_an_alphabet_is_a_string() -> None:
    for value in (None, 3, ["a", "b"], "\ud800"):
        alphabet: Any = value
        with pytest.raises(BadInput, match=r"^alphabet is "):
            CharTokenizer(alphabet)


@pytest.mark.parametrize("version", ["1", None, 1.5, True, math.nan, 2**70])
async def test_a_version_that_is_no_integer_is_not_published(version: Any) -> None:
    weights = Transformer(CONFIG).state_dict()
    for engine in (ScriptedEngine([[1]]), TorchEngine(CONFIG)):
        with pytest.raises(EngineError, match=r"^weight_version is "):
            await engine.publish_weights(weights, version)
        assert engine.weight_version == 0
