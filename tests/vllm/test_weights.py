"""Weights that real vLLM takes while it generates, and those that it doesn't."""

import asyncio
import math
import shutil
import struct
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio
import vllm
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from groupstate.engines.port import Generation, InFlight, Request, SamplingParams
from groupstate.engines.vllm import VllmEngine
from groupstate.errors import EngineDied, EngineError
from groupstate.testing.contracts.engine_kind import Make, closing
from tests.vllm.engines import requests_left, token_count, wait_tokens
from tests.vllm.tiny_model import state_dict

LONG = 400


@pytest_asyncio.fixture(loop_scope="session")
async def make(llm: AsyncLLM, tmp_path: Path) -> AsyncIterator[Make]:
    async with closing(partial(VllmEngine, llm, scratch=tmp_path)) as make_one:
        yield make_one


@pytest.fixture
def engine(make: Make) -> VllmEngine:
    engine: VllmEngine = make()
    return engine


def ask(prompt_ids: tuple[int, ...] = (3, 10, 17), **params: Any) -> Request:
    return Request(prompt_ids, SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **params}))


async def begun(engine: VllmEngine, request: Request) -> "asyncio.Task[Generation]":
    """The request under way, with some tokens."""
    task = asyncio.create_task(engine.generate(request))
    await wait_tokens(engine, request.id, 5)
    return task


async def forced(llm: AsyncLLM, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> list[float]:
    """The log-probability of each token after those before it, in one pass of the weights in force."""
    params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    final: Any = None
    async for output in llm.generate(tokens_input([*prompt_ids, *token_ids]), params, request_id="forced"):
        final = output
    found = final.prompt_logprobs[len(prompt_ids) :]
    return [place[token].logprob for place, token in zip(found, token_ids, strict=True)]


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_new_weights_say_something_else_and_the_old_ones_the_same_again(engine: VllmEngine) -> None:
    first = (await engine.generate(ask())).token_ids
    await engine.publish_weights(state_dict(seed=1), 1)
    second = (await engine.generate(ask())).token_ids
    await engine.publish_weights(state_dict(seed=0), 2)
    third = (await engine.generate(ask())).token_ids

    assert first == third
    assert first != second


async def test_a_folder_gives_the_same_weights_as_tensors(engine: VllmEngine, models: Path) -> None:
    await engine.publish_weights(state_dict(seed=1), 1)
    by_tensors = await engine.generate(ask())
    await engine.publish_weights(state_dict(seed=0), 2)
    await engine.publish_weights(models / "v1", 3)
    by_folder = await engine.generate(ask())

    assert by_folder.token_ids == by_tensors.token_ids
    assert by_folder.log_probs == pytest.approx(by_tensors.log_probs, abs=1e-6)


async def test_numbers_that_are_not_finite_never_get_into_a_cache(
    engine: VllmEngine, models: Path, tmp_path: Path
) -> None:
    before = await engine.generate(ask())
    folder = tmp_path / "nan"
    shutil.copytree(models / "v1", folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + struct.pack("<f", math.nan))
    with pytest.raises(EngineError, match="has values that are not finite; version 0 stays"):
        await engine.publish_weights(folder, 1)

    assert await engine.generate(ask()) == before


@pytest.mark.parametrize("state", ["generating", "paused", "asleep"])
async def test_what_was_cached_under_the_old_weights_is_forgotten(engine: VllmEngine, state: str) -> None:
    prompt = tuple(range(3, 400))
    await engine.generate(ask(prompt))
    await _go_to(engine, state)
    await engine.publish_weights(state_dict(seed=1), 1)
    await _go_on(engine)
    generation = await engine.generate(ask(prompt))

    expected = await forced(engine.llm, prompt, generation.token_ids)
    assert generation.log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("state", ["generating", "paused", "asleep"])
async def test_a_continued_answer_has_the_log_probabilities_of_the_weights_that_made_each_token(
    engine: VllmEngine, state: str
) -> None:
    prompt = (3, 10, 17, 24)
    under_way = [await begun(engine, ask(prompt, temperature=1.0, seed=seed, max_tokens=LONG)) for seed in range(4)]
    await _go_to(engine, state)
    await engine.publish_weights(state_dict(seed=1), 1)
    await _go_on(engine)
    generations = await asyncio.gather(*under_way)

    new = [await forced(engine.llm, prompt, generation.token_ids) for generation in generations]
    await engine.publish_weights(state_dict(seed=0), 2)
    old = [await forced(engine.llm, prompt, generation.token_ids) for generation in generations]
    for generation, before, after in zip(generations, old, new, strict=True):
        first, second = generation.spans
        assert (first.start, first.stop, second.stop) == (0, second.start, LONG)
        assert (first.weight_version, second.weight_version) == (0, 1)
        expected = before[: first.stop] + after[first.stop :]
        assert generation.log_probs == pytest.approx(expected, abs=1e-4)


async def _go_to(engine: VllmEngine, state: str) -> None:
    if state != "generating":
        await engine.pause()
    if state == "asleep":
        await engine.sleep()


async def _go_on(engine: VllmEngine) -> None:
    if engine.state == "asleep":
        await engine.wake()
    await engine.resume()


async def test_a_seeded_answer_goes_on_as_if_nothing_had_been(engine: VllmEngine) -> None:
    params = {"temperature": 1.0, "seed": 5, "max_tokens": LONG}
    alone = await engine.generate(ask(**params))
    under_way = await begun(engine, ask(**params))
    for version in (1, 2):
        await engine.publish_weights(state_dict(seed=0), version)
        await anyio.sleep(0.05)
    await engine.pause()
    await engine.sleep()
    await _go_on(engine)
    generation = await under_way

    assert generation.token_ids == alone.token_ids
    assert [span.weight_version for span in generation.spans] == [0, 1, 2]


async def test_what_counts_the_tokens_of_an_answer_goes_on_counting(engine: VllmEngine) -> None:
    once = {"allowed_token_ids": list(range(3, 40)), "presence_penalty": 2.0, "frequency_penalty": 2.0}
    alone = await engine.generate(ask(max_tokens=LONG, extra=once))
    under_way = await begun(engine, ask(max_tokens=LONG, extra=once))
    await engine.publish_weights(state_dict(seed=0), 1)

    assert (await under_way).token_ids == alone.token_ids


async def test_answers_cross_many_publications_and_lose_no_token(engine: VllmEngine) -> None:
    requests = [ask((3, 10 + number), temperature=1.0, seed=number, max_tokens=LONG) for number in range(12)]
    under_way = [asyncio.create_task(engine.generate(request)) for request in requests]
    version = 0
    while not all(task.done() for task in under_way):
        version += 1
        await engine.publish_weights(state_dict(seed=version % 2), version)
        await anyio.sleep(0.2)
    generations = await asyncio.gather(*under_way)

    assert version > 2
    for generation in generations:
        assert len(generation.token_ids) == len(generation.log_probs) == LONG
        assert [at for span in generation.spans for at in range(span.start, span.stop)] == list(range(LONG))
        versions = [span.weight_version for span in generation.spans]
        assert versions == sorted(set(versions))
    assert await requests_left(engine) == 0


@pytest.mark.parametrize("in_flight", ["keep", "continue", "restart"])
async def test_requests_that_come_in_during_a_publication_are_answered(in_flight: InFlight, make: Make) -> None:
    engine = make(in_flight=in_flight)
    publishing = asyncio.create_task(engine.publish_weights(state_dict(seed=1), 1))
    coming = []
    while not publishing.done():
        coming.append(asyncio.create_task(engine.generate(ask(max_tokens=4))))
        await anyio.sleep(0.001)
    generations = await asyncio.gather(*coming)

    assert len(generations) > 3
    assert {(generation.finish_reason, len(generation.token_ids)) for generation in generations} == {("length", 4)}
    assert generations[-1].spans[-1].weight_version == 1


async def test_a_publication_while_requests_finish_can_be_given_up(make: Make) -> None:
    engine = make(in_flight="keep")
    under_way = await begun(engine, ask(max_tokens=LONG))
    with anyio.move_on_after(0.05) as scope:
        await engine.publish_weights(state_dict(seed=1), 1)

    assert scope.cancelled_caught
    assert engine.weight_version == 0
    late = await engine.generate(ask())
    assert [span.weight_version for span in (*(await under_way).spans, *late.spans)] == [0, 0]


async def test_a_publication_that_is_cancelled_at_any_moment_happened_or_did_not(engine: VllmEngine) -> None:
    answers = {seed: await _greedy(engine, seed) for seed in (0, 1)}
    await engine.publish_weights(state_dict(seed=0), 0)
    for at in range(10):
        seed = 1 - engine.weight_version % 2
        under_way = await begun(engine, ask(max_tokens=100))
        with anyio.move_on_after(at * 0.01):
            await engine.publish_weights(state_dict(seed=seed), engine.weight_version + 1)

        assert (await engine.generate(ask())).token_ids == answers[engine.weight_version % 2]
        assert len((await under_way).token_ids) == 100


async def _greedy(engine: VllmEngine, seed: int) -> tuple[int, ...]:
    await engine.publish_weights(state_dict(seed=seed), seed)
    return (await engine.generate(ask())).token_ids


# Bad weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model.norm.weight": state_dict()["lm_head.weight"]}, "'model.norm.weight' of the weights of version 5 has"),
        ({"model.norm.weight": state_dict()["model.norm.weight"] / 0}, "has values that are not finite"),
        ({"value_head.weight": state_dict()["lm_head.weight"].clone()}, "has 'value_head.weight', which the model"),
    ],
    ids=["shape", "infinite", "unknown"],
)
async def test_misfit_tensors_touch_nothing(
    changes: dict[str, Any], complaint: str, engine: VllmEngine, tmp_path: Path
) -> None:
    before = await engine.generate(ask())
    with pytest.raises(EngineError, match=rf"{complaint}.*; version 0 stays"):
        await engine.publish_weights({**state_dict(seed=1), **changes}, 5)

    assert await engine.generate(ask()) == before
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [("nowhere", "nowhere is no folder"), (17, "are int; give tensors by name"), ("", r"has no \*.safetensors")],
)
async def test_what_is_no_checkpoint_is_refused(
    weights: Any, complaint: str, engine: VllmEngine, tmp_path: Path
) -> None:
    given = str(tmp_path / weights) if isinstance(weights, str) else weights
    with pytest.raises(EngineError, match=rf"{complaint}.*; version 0 stays"):
        await engine.publish_weights(given, 1)


class Failing:
    """vLLM's calls into its workers, of which some fail after they have done their work."""

    def __init__(self, llm: AsyncLLM, *failing: int) -> None:
        self.llm = llm
        self.failing = failing
        self.count = 0

    async def __call__(self, method: str, **arguments: Any) -> Any:
        self.count += 1
        result = await type(self.llm).collective_rpc(self.llm, method, **arguments)
        if self.count in self.failing:
            raise RuntimeError(f"no space on device {self.count}")
        return result


async def test_weights_that_vllm_fails_to_load_leave_the_old_ones(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = await engine.generate(ask())
    under_way = await begun(engine, ask(max_tokens=LONG))
    monkeypatch.setattr(engine.llm, "collective_rpc", Failing(engine.llm, 1))
    with pytest.raises(EngineError, match=r"version 3 can't be loaded; version 0 stays: .*no space on device 1"):
        await engine.publish_weights(state_dict(seed=1), 3)

    assert await engine.generate(ask()) == before
    assert {span.weight_version for span in (await under_way).spans} == {0}
    assert files(tmp_path) == []


async def test_an_engine_that_has_neither_weights_is_dead(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = await begun(engine, ask(max_tokens=LONG))
    monkeypatch.setattr(engine.llm, "collective_rpc", Failing(engine.llm, 1, 2))
    with pytest.raises(EngineDied, match="could load neither the weights of version 3"):
        await engine.publish_weights(state_dict(seed=1), 3)

    for call in (under_way, engine.generate(ask()), engine.pause()):
        with pytest.raises(EngineDied, match="no space on device 2"):
            await call
    assert await requests_left(engine) == 0


async def test_an_engine_with_weights_from_nowhere_takes_none(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.llm.vllm_config.load_config, "load_format", "dummy")
    with pytest.raises(EngineError, match="load_format 'dummy', and then it can't load weights; version 0 stays"):
        await engine.publish_weights(state_dict(seed=1), 1)


# Files -----------------------------------------------------------------------------------------------


async def test_written_weights_are_kept_while_they_are_in_force(engine: VllmEngine, tmp_path: Path) -> None:
    folders = []
    for version in (1, 2):
        await engine.publish_weights(state_dict(seed=version % 2), version)
        folders.append(files(tmp_path))
    await engine.aclose()

    assert [len(found) for found in folders] == [1, 1]
    assert folders[0] != folders[1]
    assert files(tmp_path) == []


async def test_a_folder_of_the_users_stays(engine: VllmEngine, models: Path) -> None:
    await engine.publish_weights(models / "v1", 1)
    await engine.publish_weights(str(models / "v0"), 2)
    await engine.aclose()

    assert (models / "v1" / "model.safetensors").exists()


# Sleep -----------------------------------------------------------------------------------------------


async def test_dropped_weights_must_be_published_before_it_generates(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(sleep_level=2)
    monkeypatch.setattr("groupstate.engines.vllm.current_platform", _WithSleepMode())
    monkeypatch.setattr(engine.llm.model_config, "enable_sleep_mode", True)
    under_way = await begun(engine, ask(max_tokens=LONG))
    await engine.pause()
    await engine.sleep()
    await engine.wake()
    with pytest.raises(EngineError, match=r"the weights were dropped in the engine's sleep .*publish weights first"):
        await engine.resume()

    assert engine.state == "paused"
    await engine.publish_weights(state_dict(seed=1), 1)
    await engine.resume()
    assert [span.weight_version for span in (await under_way).spans] == [0, 1]


class _WithSleepMode:
    """A platform that has it. CPUs don't, and there vLLM's sleep only stands still."""

    def is_sleep_mode_available(self) -> bool:
        return True


async def test_sleep_without_vllms_sleep_mode_is_refused_where_there_is_one(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupstate.engines.vllm.current_platform", _WithSleepMode())
    await engine.pause()
    with pytest.raises(EngineError, match="start it with enable_sleep_mode=True"):
        await engine.sleep()

    assert engine.state == "paused"


async def test_nothing_is_generated_between_wake_and_resume(engine: VllmEngine) -> None:
    request = ask(max_tokens=LONG)
    under_way = await begun(engine, request)
    await engine.pause()
    await engine.sleep()
    before = token_count(engine, request.id)
    await engine.wake()
    await anyio.sleep(0.2)

    assert token_count(engine, request.id) == before
    await engine.sleep()
    await _go_on(engine)
    assert len((await under_way).token_ids) == LONG
