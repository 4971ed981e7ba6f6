"""What is asked of a server, and which answers are taken: a wrong one is an error that names it, never a row."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from groupstate.engines.openai import OpenAIEngine
from groupstate.engines.port import Request, SamplingParams
from groupstate.engines.tokenizer import CharTokenizer
from groupstate.errors import EngineError, EngineUnavailable, RequestRefused
from tests.engines.http_server import Fault, HttpServer

Make = Callable[..., OpenAIEngine]


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with HttpServer() as server:
        yield server


@pytest.fixture
async def make(server: HttpServer) -> AsyncIterator[Make]:
    engines: list[OpenAIEngine] = []

    def make_one(**options: Any) -> OpenAIEngine:
        engines.append(OpenAIEngine(server.url, **{"stall_s": 5.0, "reconnect_s": 5.0, **options}))
        return engines[-1]

    yield make_one
    for engine in engines:
        await engine.aclose()


def ask(prompt_ids: tuple[int, ...] = (1, 5, 7), **params: Any) -> Request:
    return Request(prompt_ids, SamplingParams(**{"max_tokens": 4, **params}))


def text(prompt: str = "abc", **params: Any) -> Request:
    return Request((), SamplingParams(**{"max_tokens": 4, **params}), text=prompt)


# What is asked -----------------------------------------------------------------------------------------


async def test_what_the_request_leaves_out_is_sent_as_off(server: HttpServer, make: Make) -> None:
    await make().generate(ask(temperature=0.7, top_p=0.9, stop_token_ids=(15,), seed=3))

    (asked,) = server.asked
    assert {name: asked[name] for name in ("top_k", "min_p", "repetition_penalty")} == {
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"], asked["seed"]) == (0.7, 0.9, 4, 3)
    assert (asked["prompt"], asked["stop_token_ids"], asked["model"]) == ([1, 5, 7], [15], "tiny")


async def test_parameters_of_the_servers_own_are_passed_on(server: HttpServer, make: Make) -> None:
    await make().generate(ask(extra={"top_k": 20, "ignore_eos": True, "min_tokens": 2}))

    assert (server.asked[0]["top_k"], server.asked[0]["ignore_eos"], server.asked[0]["min_tokens"]) == (20, True, 2)


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"topk": 20}, "'vllm' has no setting 'topk'; did you mean 'top_k'?"),
        ({"n": 2}, "'n' among its extra parameters; the engine sets it"),
        ({"vllm_xargs": {"x": object()}}, "can't be written as JSON"),
    ],
)
async def test_parameters_that_cannot_be_are_refused_unsent(
    server: HttpServer, make: Make, extra: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestRefused, match=complaint):
        await make().generate(ask(extra=extra))

    assert server.asked == []


async def test_the_key_goes_along(server: HttpServer, make: Make) -> None:
    server.key = "secret"
    assert (await make(api_key="secret").generate(ask())).finish_reason == "length"

    with pytest.raises(EngineError, match="refuses the API key: 401 wrong key") as caught:
        await make(api_key="wrong one").start()
    assert "wrong one" not in str(caught.value)


async def test_a_token_outside_the_vocabulary_is_refused_unsent(server: HttpServer, make: Make) -> None:
    with pytest.raises(RequestRefused, match="token 16; the vocabulary has 0 to 15"):
        await make(vocabulary_size=16).generate(ask((1, 16)))

    assert server.asked == []


async def test_the_context_is_the_servers_own(server: HttpServer, make: Make) -> None:
    server.context = 10
    engine, request = make(), ask((1,) * 10)
    with pytest.raises(RequestRefused, match="the context of 10"):
        await engine.generate(request)

    assert not request.used
    assert len((await engine.generate(ask((1,) * 7, max_tokens=9))).token_ids) == 3


async def test_without_a_context_the_server_decides(server: HttpServer, make: Make) -> None:
    server.context = None
    engine = make()
    server.faults.append(Fault(400, json.dumps({"error": {"message": "2000 tokens are too many"}})))

    with pytest.raises(RequestRefused, match=r"http://127.0.0.1:\d+ answers request r\d+ with 400 2000 tokens are too"):
        await engine.generate(ask((1,) * 2000))
    assert engine.context is None


# What comes back ---------------------------------------------------------------------------------------


async def test_an_answer_has_its_tokens_log_probabilities_and_text(make: Make) -> None:
    generation = await make().generate(ask((1, 2)))

    assert generation.token_ids == (3, 4, 5, 6)
    assert generation.log_probs == (-0.5,) * 4
    assert generation.text == "defg"


async def test_a_tokenizer_makes_the_text(make: Make) -> None:
    tokenizer = CharTokenizer("0123456789")
    generation = await make(tokenizer=tokenizer).generate(ask(tuple(tokenizer.encode("12"))))

    assert generation.text == "3456"


async def test_log_probabilities_may_be_left_out(server: HttpServer, make: Make) -> None:
    generation = await make(log_probs=False).generate(ask((1, 2)))

    assert (generation.token_ids, generation.log_probs) == ((3, 4, 5, 6), ())
    assert "logprobs" not in server.asked[0]


async def test_a_certain_token_may_be_a_little_above_zero(server: HttpServer, make: Make) -> None:
    server.faults.append(Fault(spoil=with_log_prob(1.2e-7)))

    assert (await make().generate(ask(max_tokens=2))).log_probs == (0.0, 0.0)


@pytest.mark.parametrize("incremental", [False, True])
async def test_sglang_repeats_itself_or_does_not(server: HttpServer, make: Make, incremental: bool) -> None:
    server.incremental = incremental
    generation = await make(dialect="sglang").generate(ask((1, 2), max_tokens=6, seed=9, extra={"min_new_tokens": 3}))

    assert (generation.token_ids, generation.text) == ((3, 4, 5, 6, 7, 8), "defghi")
    assert generation.log_probs == (-0.5,) * 6
    sampling = server.asked[0]["sampling_params"]
    assert (sampling["sampling_seed"], sampling["top_k"], sampling["min_new_tokens"]) == (9, -1, 3)


@pytest.mark.parametrize("incremental", [False, True])
async def test_long_answers_that_are_repeated_in_each_event_are_warned_of_once(
    server: HttpServer,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    incremental: bool,
) -> None:
    monkeypatch.setattr("groupstate.engines.http.dialects.REPEATED_MAX", 2)
    server.incremental = incremental
    engine = make(dialect="sglang")
    for _ in range(2):
        await engine.generate(ask((1, 2), max_tokens=6, seed=9))

    expected = "event='SGLang repeats long answers; start it with --incremental-streaming-output' count=3"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (0 if incremental else 1)
    assert all(line.startswith(expected) for line in said)


@pytest.mark.parametrize("dialect", ["text", "chat"])
async def test_any_server_answers_texts(server: HttpServer, make: Make, dialect: str) -> None:
    engine = make(dialect=dialect)
    generation = await engine.generate(text(extra={"stop": ["\n"]}))

    assert engine.takes_text
    assert (generation.text, generation.token_ids, generation.log_probs, generation.spans) == ("efgh", (), (), ())
    assert server.asked[0]["stop"] == ["\n"]


async def test_a_chat_may_count_tokens_by_their_other_name(server: HttpServer, make: Make) -> None:
    await make(dialect="chat").generate(text(extra={"max_completion_tokens": 3}))

    assert "max_tokens" not in server.asked[0]
    assert server.asked[0]["messages"] == [{"role": "user", "content": "abc"}]


@pytest.mark.parametrize(
    ("dialect", "request_", "complaint"),
    [
        ("text", ask(), "has token ids; the dialect 'text' takes texts"),
        ("chat", text(""), "has an empty prompt; the dialect 'chat' takes texts"),
        ("text", text(stop_token_ids=(2,)), "has stop_token_ids, and the dialect 'text' knows no tokens; use stop"),
        ("vllm", text(), "has a text; give token ids, or a tokenizer to the engine"),
        ("sglang", ask(extra={"min_tokens": 1}), "'sglang' has no setting 'min_tokens'; did you mean 'min_new_tokens'"),
    ],
)
async def test_prompts_of_another_kind_are_refused(make: Make, dialect: str, request_: Request, complaint: str) -> None:
    with pytest.raises(RequestRefused, match=complaint):
        await make(dialect=dialect).generate(Request(request_.prompt_ids, request_.params, text=request_.text))


# What is wrong with it ---------------------------------------------------------------------------------


def with_log_prob(value: float | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def spoil(event: dict[str, Any]) -> dict[str, Any]:
        for choice in event["choices"]:
            choice["logprobs"]["token_logprobs"] = [value] * len(choice["token_ids"])
        return event

    return spoil


def with_choice(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def spoil(event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "choices": [{**choice, **changes} for choice in event["choices"]]}

    return spoil


def at_the_end(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def spoil(event: dict[str, Any]) -> dict[str, Any]:
        ends = any(choice["finish_reason"] for choice in event["choices"])
        return with_choice(**changes)(event) if ends else event

    return spoil


def said(event: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda _: event


SPOILED = {
    "no JSON": (said(b'data: {"choices": [\n\n'), "an event that can't be read"),
    "nested without end": (said(b'data: {"error": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n\n"), "can't be read"),
    "another type": (with_choice(token_ids=["a"]), "an event that can't be read"),
    "a fraction of a token": (with_choice(token_ids=[1.5]), "an event that can't be read"),
    "a page": (said(b"<html>Bad gateway</html>\n"), "a line that is no event: b'<html>Bad gateway"),
    "nothing": (said(None), "a stream that ended before the answer did"),
    "no end": (at_the_end(finish_reason=None), "a stream that ended before the answer did"),
    "an end of its own": (at_the_end(finish_reason="content_filter"), "the answer ended by 'content_filter'"),
    "aborted by others": (at_the_end(finish_reason="abort"), "the answer ended by 'abort'"),
    "one log-probability too few": (with_choice(logprobs={"token_logprobs": []}), "1 tokens with 0 log-prob"),
    "a token without one": (with_log_prob(None), "a token without a log-probability"),
    "above zero": (with_log_prob(0.1), "a log-probability of 0.1"),
    "not finite": (said(b'data: {"choices": [{"logprobs": {"token_logprobs": [NaN]}}]}\n\n'), "can't be read"),
    "below zero": (with_choice(token_ids=[-1]), "a token -1"),
    "outside the vocabulary": (with_choice(token_ids=[16]), "a token 16 of a vocabulary of 16"),
    "too many": (with_choice(token_ids=[1] * 5, logprobs={"token_logprobs": [-1.0] * 5}), "5 tokens, and 4 were asked"),
    "another count": (lambda event: {**event, "usage": {"completion_tokens": 7}}, "4 tokens, and the server counted 7"),
    "a second answer": (with_choice(index=1), "more than one answer"),
    "more after the end": (
        lambda event: {
            "choices": [{"finish_reason": "stop", "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}]
        },
        "more after the end of the answer",
    ),
    "its own failure": (said({"error": {"message": "out of memory", "code": 500}}), "out of memory"),
    "a failure that is no text": (said({"error": {"message": {"of": ["x" * 900]}}}), r"\{'of': \['x+.{0,90}$"),
    "a failure in a word": (said({"error": "out of memory"}), "out of memory"),
}


@pytest.mark.parametrize("name", SPOILED)
async def test_a_wrong_answer_is_the_failure_of_that_session_alone(server: HttpServer, make: Make, name: str) -> None:
    spoil, complaint = SPOILED[name]
    server.faults.append(Fault(spoil=spoil))
    engine = make(vocabulary_size=16)
    with pytest.raises(EngineUnavailable, match=complaint) as caught:
        await engine.generate(ask())

    assert server.url in str(caught.value)
    assert engine.in_flight_count == 0
    with anyio.fail_after(5):
        assert len((await engine.generate(ask())).token_ids) == 4
    assert server.running == 0


SGLANG_SPOILED = {
    "no counts": (said({"text": "a"}), "an event without meta_info.completion_tokens"),
    "other counts": (
        said({"meta_info": {"completion_tokens": 7, "output_token_logprobs": [[-1.0, 1, None]]}}),
        "1 tokens after 0, and the server counted 7",
    ),
    "no pairs": (said({"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[None, 1]]}}), "of \\[\\[None"),
}


@pytest.mark.parametrize("name", SGLANG_SPOILED)
async def test_a_wrong_answer_of_sglang_is_too(server: HttpServer, make: Make, name: str) -> None:
    spoil, complaint = SGLANG_SPOILED[name]
    server.faults.append(Fault(spoil=spoil))
    with pytest.raises(EngineUnavailable, match=complaint):
        await make(dialect="sglang").generate(ask())


LACKING = {
    "ids": ("vllm", with_choice(token_ids=None, text="a"), "gives no token ids; the dialect 'vllm' needs a vLLM"),
    "log-probabilities": ("vllm", with_choice(logprobs=None), "gives no log-probabilities; .*log_probs=False"),
    "the prompt": ("vllm", with_choice(prompt_token_ids=[1]), "changed the prompt"),
    "SGLang's": ("sglang", said({"meta_info": {"completion_tokens": 1}}), "gives no output_token_logprobs"),
}


@pytest.mark.parametrize("name", LACKING)
async def test_what_a_server_lacks_is_said_with_what_would_give_it(server: HttpServer, make: Make, name: str) -> None:
    dialect, spoil, complaint = LACKING[name]
    server.faults.append(Fault(spoil=spoil))
    with pytest.raises(EngineError, match=f"{server.url}: it {complaint}") as caught:
        await make(dialect=dialect).generate(ask())

    assert not isinstance(caught.value, EngineUnavailable | RequestRefused)


async def test_a_refusal_in_the_stream_is_one(server: HttpServer, make: Make) -> None:
    server.faults.append(Fault(spoil=said({"error": {"message": "Token id 600 is out of vocabulary", "code": 400}})))

    with pytest.raises(RequestRefused, match=r"refuses request r.*: Token id 600 is out of vocabulary"):
        await make().generate(ask())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestRefused),
        (422, RequestRefused),
        (408, EngineUnavailable),
        (425, EngineUnavailable),
        (500, EngineUnavailable),
        (502, EngineUnavailable),
        (401, EngineError),
        (404, EngineError),
        (307, EngineError),
    ],
)
async def test_what_a_status_means(server: HttpServer, make: Make, status: int, kind: type[EngineError]) -> None:
    server.faults.append(Fault(status))
    with pytest.raises(EngineError, match=f"{server.url} answers request r.* with {status} a fault") as caught:
        await make().generate(ask())

    assert type(caught.value) is kind


@pytest.mark.parametrize("dialect", ["vllm", "text"])
async def test_a_stream_that_breaks_is_a_failure_that_may_be_retried(
    server: HttpServer, make: Make, dialect: Any
) -> None:
    server.faults.append(Fault(cut_after=2))
    request = ask() if dialect == "vllm" else text()
    with pytest.raises(EngineUnavailable, match=f"the connection to {server.url} failed: .* of request {request.id}"):
        await make(dialect=dialect).generate(request)


async def test_a_stream_that_falls_silent_is_a_failure_too(server: HttpServer, make: Make) -> None:
    server.faults.append(Fault(silent_after=2))
    engine = make(stall_s=0.2)
    with anyio.fail_after(3), pytest.raises(EngineUnavailable, match=r"silent for 0.2 s, after 2 tokens of request r"):
        await engine.generate(ask())

    with anyio.fail_after(1):
        while server.running:  # noqa: ASYNC110
            await anyio.sleep(0.005)


@pytest.mark.parametrize("fault", [Fault(cut_after=4), Fault(lingers=True)], ids=["cut", "lingering"])
async def test_an_answer_is_taken_where_only_its_epilogue_is_missing(
    server: HttpServer, make: Make, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupstate.engines.openai.TAIL_S", 0.1)
    server.faults.append(fault)

    with anyio.fail_after(3):
        assert (await make().generate(ask((1, 2)))).token_ids == (3, 4, 5, 6)
