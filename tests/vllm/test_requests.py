"""What real vLLM is asked, what it refuses, and how its answers come out."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from groupstate.engines.port import InFlight, Request, SamplingParams
from groupstate.engines.vllm import VllmEngine
from groupstate.engines.vllm_params import KEPT_MAX, ParamsMaker
from groupstate.errors import EngineDied, EngineError, EngineUnavailable, RequestRefused
from tests.vllm.engines import requests_left, start, wait_tokens
from tests.vllm.tiny_model import CONTEXT, SPECIAL, VOCABULARY

END = SPECIAL.index("</s>")


@pytest_asyncio.fixture(loop_scope="session")
async def engine(llm: AsyncLLM) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(llm)
    yield engine
    await engine.aclose()


def ask(prompt_ids: tuple[int, ...] = (3, 10, 17), **params: Any) -> Request:
    return Request(prompt_ids, SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}))


async def test_parameters_of_vllms_own_go_there_by_their_names(engine: VllmEngine) -> None:
    generation = await engine.generate(ask(temperature=1.0, extra={"allowed_token_ids": [40, 41], "top_k": 5}))

    assert set(generation.token_ids) <= {40, 41}


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"tempratur": 1}, "tempratur"),
        ({"top_k": -7}, "top_k must be"),
        ({"min_p": "much"}, "min_p|'>' not supported|not supported between"),
        ({"n": 4}, "'n' in extra"),
        ({"output_kind": 0, "logprobs": 5}, "'logprobs', 'output_kind' in extra"),
        ({"max_tokens": 9}, "'max_tokens' in extra"),
        ({"_eos_token_id": 5}, "'_eos_token_id' in extra"),
        ({"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids"),
        ({"stop": "end"}, "'stop' in extra, which needs a vLLM with a tokenizer"),
        ({"bad_words": ["end"]}, "'bad_words' in extra, which needs a vLLM with a tokenizer"),
    ],
)
async def test_a_parameter_that_vllm_or_the_contract_does_not_allow_is_refused_by_name(
    extra: dict[str, Any], complaint: str, engine: VllmEngine
) -> None:
    request = ask(extra=extra)
    with pytest.raises(RequestRefused, match=complaint):
        await engine.generate(request)

    assert not request.used
    assert await requests_left(engine) == 0


async def test_a_token_outside_the_vocabulary_is_refused_before_it_ends_vllm(engine: VllmEngine) -> None:
    with pytest.raises(RequestRefused, match=f"has token {VOCABULARY}; the vocabulary has 0 to {VOCABULARY - 1}"):
        await engine.generate(ask((3, VOCABULARY)))

    assert (await engine.generate(ask((3, VOCABULARY - 1)))).finish_reason == "length"


async def test_a_stop_token_outside_the_vocabulary_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(RequestRefused, match="stop_token_ids"):
        await engine.generate(ask(stop_token_ids=(VOCABULARY,)))


@pytest.mark.parametrize("extra", [{"ignore_eos": "no"}, {"min_tokens": 1.0}, {"skip_special_tokens": 3}])
async def test_a_value_that_vllms_process_cannot_read_is_refused_before_it_reads_no_more(
    engine: VllmEngine, extra: dict[str, Any]
) -> None:
    with anyio.fail_after(10):
        with pytest.raises(RequestRefused, match=r"Expected `(bool|int)`, got"):
            await engine.generate(ask(extra=extra))

        assert (await engine.generate(ask(extra={"ignore_eos": True, "min_tokens": 1}))).finish_reason == "length"


async def test_a_value_is_looked_at_though_an_equal_one_of_another_type_was_taken(engine: VllmEngine) -> None:
    await engine.generate(ask(extra={"min_tokens": 1}))
    for wrong in (1.0, True):
        with pytest.raises(RequestRefused, match="Expected `int`, got"):
            await engine.generate(ask(extra={"min_tokens": wrong}))


async def test_a_parameter_that_was_changed_where_it_stands_is_asked_for_as_it_is_then(engine: VllmEngine) -> None:
    params = SamplingParams(max_tokens=8, extra={"allowed_token_ids": [40]})
    first = await engine.generate(Request((3, 10, 17), params))
    params.extra["allowed_token_ids"][0] = 41
    second = await engine.generate(Request((3, 10, 17), params))
    params.extra["allowed_token_ids"][0] = 40

    assert (first.token_ids, second.token_ids) == ((40,) * 8, (41,) * 8)
    assert (await engine.generate(Request((3, 10, 17), params))).token_ids == (40,) * 8


async def test_what_was_made_for_one_request_is_made_once_and_shared_with_none(llm: AsyncLLM) -> None:
    maker = ParamsMaker(llm)
    first, second = (maker.made(ask(max_tokens=CONTEXT, extra={"top_k": 5}), 3) for _ in range(2))
    first.max_tokens = 1

    assert second == maker.made(ask(max_tokens=CONTEXT, extra={"top_k": 5}), 3)
    assert maker.made(ask(max_tokens=CONTEXT, extra={"top_k": 5}), 103).max_tokens == second.max_tokens - 100
    assert len(maker._kept) == 2


async def test_of_many_parameters_those_asked_for_last_stay(llm: AsyncLLM) -> None:
    maker = ParamsMaker(llm)
    for seed in range(KEPT_MAX + 3):
        maker.made(ask(), 3)
        assert maker.made(ask(seed=seed), 3).seed == seed

    assert len(maker._kept) == KEPT_MAX
    assert len([params for params in maker._kept.values() if params.seed is None]) == 1


async def test_the_models_own_end_ends_an_answer_and_is_part_of_it(engine: VllmEngine) -> None:
    ends = {"allowed_token_ids": [END]}
    ended = await engine.generate(ask(extra=ends))
    ignored = await engine.generate(ask(extra={**ends, "ignore_eos": True}))

    assert (ended.token_ids, ended.finish_reason) == ((END,), "stop")
    assert (len(ignored.token_ids), ignored.finish_reason) == (8, "length")


@pytest.mark.parametrize("seed", [-1, 2**63, 2**70 + 5])
async def test_any_integer_is_a_seed(seed: int, engine: VllmEngine) -> None:
    generations = [await engine.generate(ask(temperature=1.0, seed=seed)) for _ in range(2)]

    assert generations[0].token_ids == generations[1].token_ids


async def test_log_probabilities_are_those_before_temperature_and_top_p(engine: VllmEngine) -> None:
    greedy = await engine.generate(ask(max_tokens=1))
    cold = await engine.generate(ask(max_tokens=1, temperature=0.02, top_p=0.5, seed=1))

    assert cold.token_ids == greedy.token_ids
    assert cold.log_probs == pytest.approx(greedy.log_probs, abs=1e-5)
    assert cold.log_probs[0] < -0.1


async def test_seeds_are_refused_where_they_would_end_vllm(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.llm.vllm_config.scheduler_config, "max_num_batched_tokens", 2048)
    with pytest.raises(RequestRefused, match="start it with max_num_batched_tokens=128000"):
        await engine.generate(ask(seed=1))

    assert (await engine.generate(ask())).finish_reason == "length"


async def test_an_error_of_vllm_is_that_requests_and_not_for_good(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*args: Any, **options: Any) -> None:
        raise EngineGenerateError("its queue is full")

    with monkeypatch.context() as patched:
        patched.setattr(engine.llm, "add_request", failing)
        with pytest.raises(EngineUnavailable, match="its queue is full"):
            await engine.generate(ask())

    assert (await engine.generate(ask())).finish_reason == "length"


async def test_a_request_that_is_cancelled_while_vllm_takes_it_is_gone_from_there(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, add_request = asyncio.Event(), engine.llm.add_request

    async def slow(*args: Any, **options: Any) -> Any:
        await add_request(*args, **options)
        taken.set()
        await asyncio.sleep(30)

    monkeypatch.setattr(engine.llm, "add_request", slow)
    under_way = asyncio.create_task(engine.generate(ask(max_tokens=400)))
    await taken.wait()
    assert engine.llm.get_num_unfinished_requests() == 1
    under_way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under_way

    assert await requests_left(engine) == 0


async def test_a_request_that_is_aborted_while_vllm_takes_it_ends_at_once(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, add_request = ask(max_tokens=400), engine.llm.add_request

    async def slow(*args: Any, **options: Any) -> Any:
        sent = await add_request(*args, **options)
        engine.abort(request)
        return sent

    monkeypatch.setattr(engine.llm, "add_request", slow)

    assert (await engine.generate(request)).finish_reason == "abort"
    assert await requests_left(engine) == 0


async def test_an_abort_that_vllm_fails_is_told_to_who_waits(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*args: Any, **options: Any) -> None:
        raise RuntimeError("its socket is full")

    request = ask(max_tokens=400)
    under_way = asyncio.create_task(engine.generate(request))
    await wait_tokens(engine, request.id)
    with monkeypatch.context() as patched:
        patched.setattr(engine.llm, "abort", failing)
        engine.abort(request)
        with anyio.fail_after(10), pytest.raises(EngineUnavailable, match="its socket is full"):
            await under_way
    await engine.llm.abort(request.id)

    assert await requests_left(engine) == 0


async def test_versions_that_somebody_else_named_are_no_versions(engine: VllmEngine) -> None:
    await engine.generate(ask())
    await engine.llm.update_weight_version("mine")
    with pytest.raises(EngineError, match="weights 'mine' made a token, which nobody published here"):
        await engine.generate(ask())


@pytest.mark.parametrize("in_flight", ["continue", "restart"])
async def test_a_request_aborted_outside_ends_as_aborted(in_flight: InFlight, llm: AsyncLLM) -> None:
    engine, request = VllmEngine(llm, in_flight=in_flight), ask(max_tokens=400)
    under_way = asyncio.create_task(engine.generate(request))
    await wait_tokens(engine, request.id)
    await engine.llm.abort(request.id)

    assert (await under_way).finish_reason == "abort"
    await engine.aclose()


async def test_closing_an_engine_around_a_vllm_of_the_users_leaves_that_running(llm: AsyncLLM) -> None:
    engine = VllmEngine(llm)
    under_way = asyncio.create_task(engine.generate(ask(max_tokens=400)))
    await anyio.sleep(0.05)
    await engine.aclose()
    with pytest.raises(EngineDied, match="closed"):
        await under_way

    other = VllmEngine(llm, weight_version=3)
    assert await requests_left(other) == 0
    assert [span.weight_version for span in (await other.generate(ask())).spans] == [3]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"sleep_level": 3}, "sleep_level is 3; it must be 1 or 2"), ({"in_flight": "drop"}, "in_flight is 'drop'")],
)
async def test_settings_that_can_not_be_are_refused(options: dict[str, Any], complaint: str, llm: AsyncLLM) -> None:
    with pytest.raises(EngineError, match=complaint):
        VllmEngine(llm, **options)
    with pytest.raises(EngineError, match=complaint):
        await VllmEngine.start("a model that nobody looks for", **options)


async def test_a_vllm_whose_log_probabilities_are_others_is_refused(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.model_config, "logprobs_mode", "processed_logits")
    with pytest.raises(EngineError, match=r"logprobs_mode 'processed_logits'; .* must be 'raw_logprobs'"):
        VllmEngine(llm)


# Starting --------------------------------------------------------------------------------------------


def children() -> set[str]:
    """Processes that this one has started and that run."""
    found: set[str] = set()
    for path in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # A thread that has ended since it was listed.
            found |= set((path / "children").read_text().split())
    commands = {child: Path(f"/proc/{child}/cmdline").read_text() for child in found}
    # One that was killed and that nobody has asked for yet has no command any more.
    return {child for child, command in commands.items() if command and "resource_tracker" not in command}


@pytest.mark.parametrize(
    ("model", "options", "complaint"),
    [
        ("v0", {"max_model_length": 7}, "no engine argument 'max_model_length'; did you mean 'max_model_len'"),
        ("nowhere", {}, "could not start with the model .*nowhere"),
        ("v0", {"max_model_len": 1 << 30}, "(?s)could not start with the model .*v0.*max_model_len"),
        ("v0", {"kv_cache_memory_bytes": 1 << 12}, "could not start with the model .*v0.*Engine core init"),
    ],
    ids=["unknown argument", "no model", "context too long", "no memory"],
)
async def test_a_vllm_that_does_not_start_says_why_and_leaves_nothing_running(
    model: str, options: dict[str, Any], complaint: str, models: Path
) -> None:
    before = children()
    with pytest.raises(EngineError, match=complaint):
        await start(models / model, **options)

    assert children() == before


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def own(models: Path) -> AsyncIterator[VllmEngine]:
    """A vLLM with a tokenizer."""
    engine = await start(models / "v0", weight_version=2)
    yield engine
    await engine.aclose()


async def test_answers_come_as_text_where_vllm_has_a_tokenizer(own: VllmEngine) -> None:
    assert own.tokenizer is not None
    prompt_ids = own.tokenizer.encode("1 + 1 = ")
    generation = await own.generate(ask(tuple(prompt_ids), extra={"allowed_token_ids": own.tokenizer.encode("2 ")}))

    assert own.tokenizer.decode(prompt_ids) == "1 + 1 = "
    assert len(generation.text) == 8
    assert set(generation.text) <= {"2", " "}
    assert [span.weight_version for span in generation.spans] == [2]


async def test_another_event_loop_is_refused(own: VllmEngine) -> None:
    for call in (own.generate(ask()), own.pause(), own.publish_weights("nowhere", 3)):
        with pytest.raises(EngineError, match="the engine 'vllm' is used from two event loops at once"):
            await asyncio.to_thread(asyncio.run, call)

    assert (await own.generate(ask())).finish_reason == "length"


async def test_a_stop_text_ends_an_answer_and_its_tokens_are_there(own: VllmEngine) -> None:
    letters = own.tokenizer.encode("abc")
    request = ask(max_tokens=400, temperature=1.0, extra={"allowed_token_ids": letters, "stop": "ca"})
    generation = await own.generate(request)

    assert generation.finish_reason == "stop"
    assert generation.text.endswith("ca")
    assert "ca" not in generation.text[:-1]
    assert len(generation.token_ids) == len(generation.log_probs) == len(generation.text)


async def test_a_tokenizer_of_the_users_stands_in_for_vllms(own: VllmEngine) -> None:
    class Counting:
        def encode(self, text: str) -> list[int]:
            return [3] * len(text)

        def decode(self, token_ids: Any) -> str:
            return f"{len(token_ids)} tokens"

    engine = VllmEngine(own.llm, tokenizer=Counting())

    assert (await engine.generate(ask())).text == "8 tokens"


async def test_an_engine_that_started_vllm_ends_it_and_no_error_is_logged(
    own: VllmEngine, caplog: pytest.LogCaptureFixture
) -> None:
    before = children()
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)  # vLLM's own doesn't pass on what it gets.
    try:
        await own.aclose()
        await own.aclose()
    finally:
        logger.removeHandler(caplog.handler)

    # vLLM kills a process that takes too long to end, and doesn't wait for that.
    with anyio.fail_after(30):
        while len(before - children()) < 1:  # noqa: ASYNC110
            await anyio.sleep(0.05)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    with pytest.raises(EngineDied, match="the engine is closed"):
        await own.generate(ask())
