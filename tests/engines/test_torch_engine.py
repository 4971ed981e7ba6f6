"""What only the embedded engine promises: its arithmetic."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from groupstate import SessionContext, Trajectory, open_run
from groupstate.engines.port import Generation, Request, SamplingParams
from groupstate.engines.slots import draw
from groupstate.engines.tokenizer import CharTokenizer
from groupstate.engines.torch import TorchEngine
from groupstate.engines.transformer import Transformer, TransformerConfig
from groupstate.errors import BadInput, BadSettings, EngineError

CONFIG = TransformerConfig(vocabulary_size=20, context=1000, width=32, layers=2, heads=4)


def model(seed: int = 0) -> Transformer:
    return Transformer(CONFIG, seed=seed).double()


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(model(), slots_max=7, seed=3)
    yield engine
    await engine.aclose()


def ask(prompt_ids: Sequence[int], **params: Any) -> Request:
    return Request(prompt_ids, SamplingParams(**{"max_tokens": 20, **params}))


@torch.no_grad()
def full_forward(model: Transformer, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of the answer from one plain forward pass over the whole text."""
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    log_probs = model(ids).log_softmax(-1)[0, len(prompt_ids) - 1 : -1]
    return [float(row[token]) for row, token in zip(log_probs, token_ids, strict=True)]


async def test_log_probabilities_equal_those_of_a_full_forward_pass(engine: TorchEngine) -> None:
    prompts = [[1, *range(3, 3 + number)] for number in range(1, 16)]
    requests = [ask(prompt, temperature=0.5 + 0.1 * number, top_p=0.9) for number, prompt in enumerate(prompts)]

    generations = await asyncio.gather(*map(engine.generate, requests))

    for prompt, generation in zip(prompts, generations, strict=True):
        expected = full_forward(model(), prompt, generation.token_ids)
        assert generation.log_probs == pytest.approx(expected, abs=1e-9)


async def test_single_precision_is_as_near_as_it_can_be() -> None:
    single = Transformer(CONFIG)
    engine = TorchEngine(single)
    generation = await engine.generate(ask([1, 4, 5]))
    await engine.aclose()

    assert generation.log_probs == pytest.approx(full_forward(single, [1, 4, 5], generation.token_ids), abs=1e-4)


async def test_greedy_answers_equal_those_without_a_cache(engine: TorchEngine) -> None:
    prompts = [[1, 5], [1, 6, 7, 8], [2, 2, 2]]
    generations = await asyncio.gather(*(engine.generate(ask(prompt, temperature=0.0)) for prompt in prompts))

    for prompt, generation in zip(prompts, generations, strict=True):
        ids = list(prompt)
        for _ in range(20):
            ids.append(int(model()(torch.tensor([ids]))[0, -1].argmax()))
        assert list(generation.token_ids) == ids[len(prompt) :]


async def test_tokens_after_a_publication_come_from_the_new_weights_alone(engine: TorchEngine) -> None:
    new_weights = model(seed=9).state_dict()
    requests = [ask([1, number], max_tokens=900) for number in range(3, 8)]
    async with asyncio.TaskGroup() as tasks:
        under_way = [tasks.create_task(engine.generate(request)) for request in requests]
        await anyio.lowlevel.checkpoint()
        while not all(row.token_ids for row in engine._rows.values()):  # noqa: ASYNC110
            await anyio.sleep(0.0005)
        await engine.publish_weights(new_weights, 1)

    for number, task in zip(range(3, 8), under_way, strict=True):
        _check_spans([1, number], task.result(), {0: model(), 1: model(seed=9)})


def _check_spans(prompt: list[int], generation: Generation, models: dict[int, Transformer]) -> None:
    assert [span.weight_version for span in generation.spans] == [0, 1]
    for span in generation.spans:
        expected = full_forward(models[span.weight_version], prompt, generation.token_ids)
        assert generation.log_probs[span.start : span.stop] == pytest.approx(expected[span.start : span.stop], abs=1e-9)


async def test_a_conversation_across_publications_has_the_log_probabilities_of_the_weights_that_made_each_token(
    engine: TorchEngine,
) -> None:
    """Four answers with observations in between, in each of which new weights come: they hang on all tokens before,
    those that other weights made too."""
    in_answer = [asyncio.Event() for _ in range(4)]

    async def session(ctx: SessionContext) -> Trajectory:
        t = ctx.transcript([1, 4])
        for turn in range(4):
            in_answer[turn].set()
            await t.generate(max_tokens=150)
            t.observe([5, 6, 7])
        return t.trajectory(reward=1.0)

    async with open_run(session=session, engine=engine, group_size=1) as run:
        run.submit("p")
        for version, begun in enumerate(in_answer, start=1):
            await begun.wait()
            while not any(row.token_ids for row in engine._rows.values()):  # noqa: ASYNC110
                await anyio.sleep(0.0005)
            await run.publish_weights(version, model(seed=version).state_dict())
        row = (await run.sample(1)).rows[0].trajectory

    made = {version: full_forward(model(version), [1, 4], row.response_ids) for version in range(5)}
    expected = [0.0] * len(row.response_ids)
    for span in row.spans:
        expected[span.start : span.stop] = made[span.weight_version][span.start : span.stop]
    assert {span.weight_version for span in row.spans} == {0, 1, 2, 3, 4}
    assert row.environment == ((150, 153), (303, 306), (456, 459), (609, 612))
    # The log keeps them in single precision.
    assert row.log_probs == pytest.approx(expected, abs=1e-6)


async def test_a_publication_that_is_cancelled_while_it_waits_is_withdrawn() -> None:
    engine = TorchEngine(CONFIG, in_flight="keep")
    request = ask((1, 2), max_tokens=300)
    under_way = asyncio.create_task(engine.generate(request))
    while request.id not in engine._rows or not engine._rows[request.id].token_ids:  # noqa: ASYNC110
        await asyncio.sleep(0.0005)
    publishing = asyncio.create_task(engine.publish_weights(Transformer(CONFIG, seed=5).state_dict(), 1))
    await asyncio.sleep(0)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    await under_way

    assert (await engine.generate(ask((1, 2), max_tokens=2))).spans[0].weight_version == 0
    await engine.aclose()


async def test_rows_that_leave_early_do_not_disturb_those_that_stay(engine: TorchEngine) -> None:
    requests = [ask([1, 3 + number % 9], max_tokens=1 + 13 * number % 40) for number in range(40)]
    async with asyncio.TaskGroup() as tasks:
        under_way = [tasks.create_task(engine.generate(request)) for request in requests]
        for request in requests[::3]:
            await anyio.sleep(0.002)
            engine.abort(request)

    for request, task in zip(requests, under_way, strict=True):
        expected = full_forward(model(), request.prompt_ids, task.result().token_ids) if task.result().token_ids else []
        assert task.result().log_probs == pytest.approx(expected, abs=1e-9)


async def test_a_change_to_the_callers_model_does_not_reach_the_engine() -> None:
    own = model()
    engine = TorchEngine(own)
    published = model(seed=5)
    await engine.publish_weights(published.state_dict(), 1)
    with torch.no_grad():
        own.head.weight.zero_()
        published.head.weight.zero_()
    generation = await engine.generate(ask([1, 5]))
    await engine.aclose()

    assert generation.log_probs == pytest.approx(full_forward(model(seed=5), [1, 5], generation.token_ids), abs=1e-9)


async def test_other_seeds_give_other_tokens(engine: TorchEngine) -> None:
    generations = [await engine.generate(ask([1, 5], seed=seed)) for seed in range(5)]

    assert len({generation.token_ids for generation in generations}) == 5


async def test_two_engines_with_one_seed_say_the_same() -> None:
    texts = []
    for _ in range(2):
        engine = TorchEngine(CONFIG, seed=4)
        texts.append((await engine.generate(ask([1, 5]))).token_ids)
        await engine.aclose()

    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weights: weights.pop("head.weight"),
        lambda weights: weights.update({"head.weight": torch.zeros(3, 3)}),
        lambda weights: weights.update({"head.weight": None}),
        lambda weights: weights.update({"head.weight": torch.full((20, 32), float("nan"))}),
        lambda weights: weights.update({"head.weight": torch.zeros(20, 32, dtype=torch.int64)}),
        lambda weights: weights.update({"head.weight": torch.zeros(20, 32, dtype=torch.complex64)}),
        lambda weights: weights.update({"head.weight": torch.zeros(20, 32).to_sparse()}),
        lambda weights: weights.update({"head.weight": torch.zeros(20, 32, device="meta")}),
        lambda weights: weights.update({"head.weight2": torch.zeros(3), 3: None, None: None}),
    ],
    ids=["missing", "shape", "no tensor", "not finite", "integers", "complex", "sparse", "meta", "unknown"],
)
async def test_each_kind_of_misfit_names_the_weight(engine: TorchEngine, spoil: Any) -> None:
    weights = model().state_dict()
    spoil(weights)

    with pytest.raises(EngineError, match=r"head\.weight"):
        await engine.publish_weights(weights, 1)


async def test_weights_too_large_for_the_models_type_are_refused() -> None:
    engine = TorchEngine(CONFIG)
    weights = Transformer(CONFIG).double().state_dict()
    weights["head.weight"][0, 0] = 1e300
    with pytest.raises(EngineError, match=r"head\.weight.* too large for float32.*; version 0 stays"):
        await engine.publish_weights(weights, 1)


async def test_a_token_beyond_the_vocabulary_is_refused(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match="token 20; the vocabulary has 0 to 19"):
        await engine.generate(ask([1, 20]))


async def test_an_engine_with_a_tokenizer_gives_the_text() -> None:
    tokenizer = CharTokenizer("0123456789+-= abc")
    engine = TorchEngine(CONFIG, tokenizer)
    generation = await engine.generate(ask(tokenizer.encode("1+2=")))
    await engine.aclose()

    assert generation.text == tokenizer.decode(generation.token_ids)


async def test_closing_joins_the_worker_thread() -> None:
    engine = TorchEngine(CONFIG)
    await engine.generate(ask([1]))
    await engine.aclose()

    assert "groupstate-torch-engine" not in {thread.name for thread in threading.enumerate()}


async def test_64_requests_at_once_cost_far_less_than_64_in_a_row() -> None:
    engine = TorchEngine(TransformerConfig(vocabulary_size=20, context=64), slots_max=64)
    await engine.generate(ask([1]))

    started = time.process_time()
    for number in range(64):
        await engine.generate(ask([1, 3 + number % 16]))
    sequential_s = time.process_time() - started
    started = time.process_time()
    await asyncio.gather(*(engine.generate(ask([1, 3 + number % 16])) for number in range(64)))
    concurrent_s = time.process_time() - started
    await engine.aclose()

    assert sequential_s > 4 * concurrent_s


def test_a_draw_follows_the_distribution() -> None:
    rows = 20_000
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(rows, -1)
    uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(0))
    tokens, _ = draw(logits, torch.full((rows,), 2.0), torch.ones(rows), uniforms)

    shares = torch.bincount(tokens, minlength=4) / rows
    assert torch.allclose(shares, (logits[0] / 2).softmax(-1), atol=0.015)


def test_top_p_leaves_the_fewest_tokens_that_hold_it() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).expand(1000, -1)
    uniforms = torch.linspace(0, 1, 1001)[:1000]
    tokens, log_probs = draw(probabilities.log(), torch.ones(1000), torch.full((1000,), 0.7), uniforms)

    assert set(tokens.tolist()) == {0, 1}
    assert torch.allclose(log_probs.exp(), probabilities.gather(1, tokens[:, None]).squeeze(1), atol=1e-5)


def test_a_temperature_next_to_zero_is_greedy() -> None:
    tokens, _ = draw(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([1e-300]), torch.ones(1), torch.tensor([0.99]))

    assert tokens.tolist() == [1]


def test_padding_on_both_sides_changes_no_log_probability_and_gradients_are_finite() -> None:
    texts = [[1, 5, 6, 7, 2], [1, 9, 2]]
    input_ids = torch.tensor([[1, 5, 6, 7, 2, 0], [0, 0, 1, 9, 2, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]])
    own = model()
    log_probs = own.token_log_probs(input_ids, mask, positions)
    (log_probs[:, 3]).sum().backward()

    assert log_probs[0, :4].tolist() == pytest.approx(full_forward(model(), texts[0][:1], texts[0][1:]), abs=1e-9)
    assert log_probs[1, 2:4].tolist() == pytest.approx(full_forward(model(), texts[1][:1], texts[1][1:]), abs=1e-9)
    assert all(torch.isfinite(weight.grad).all() for weight in own.parameters() if weight.grad is not None)
    last_two = own.token_log_probs(input_ids, mask, positions, 2)
    assert torch.allclose(last_two, log_probs[:, -2:], atol=1e-9)


def test_a_config_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(BadSettings, match="heads"):
        TransformerConfig(vocabulary_size=4, width=10, heads=4)


def test_an_unknown_character_is_named_with_its_place() -> None:
    with pytest.raises(BadInput, match="character 'x' at index 1 of '1x2'"):
        CharTokenizer("123").encode("1x2")


def test_text_survives_the_tokenizer() -> None:
    tokenizer = CharTokenizer("123+")

    assert tokenizer.decode([1, *tokenizer.encode("1+32"), 2, 0]) == "1+32"
    with pytest.raises(BadInput, match="token 7"):
        tokenizer.decode([7])
    with pytest.raises(BadInput, match="more than once"):
        CharTokenizer("11")
