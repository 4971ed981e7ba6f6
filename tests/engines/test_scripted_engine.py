"""What only the scripted engine promises."""

import asyncio

import anyio
import pytest

from groupstate.engines.port import Request, SamplingParams
from groupstate.engines.scripted import ScriptedEngine
from groupstate.engines.tokenizer import CharTokenizer
from groupstate.errors import EngineError


async def test_answers_are_given_in_the_order_of_the_calls() -> None:
    engine = ScriptedEngine([[3, 4], [5], ValueError("third")], tokenizer=CharTokenizer("abc"), log_prob=-1.5)

    first = await engine.generate(Request([1]))
    assert (first.token_ids, first.log_probs, first.text, first.finish_reason) == ((3, 4), (-1.5, -1.5), "ab", "stop")
    assert (await engine.generate(Request([1]))).text == "c"
    with pytest.raises(ValueError, match="third"):
        await engine.generate(Request([1]))
    with pytest.raises(EngineError, match="3 answers"):
        await engine.generate(Request([1]))


async def test_a_function_may_raise_in_place_of_an_answer() -> None:
    def script(prompt_ids: object) -> list[int]:
        raise KeyError("no such prompt")

    engine = ScriptedEngine(script)
    with pytest.raises(KeyError, match="no such prompt"):
        await engine.generate(Request([1]))

    assert engine.in_flight_count == 0


async def test_delays_add_up() -> None:
    engine = ScriptedEngine(lambda prompt_ids: [3] * 5, start_s=0.05, token_s=0.01)
    started = anyio.current_time()
    await engine.generate(Request([1], SamplingParams(max_tokens=3)))

    assert anyio.current_time() - started >= 0.08


async def test_published_weights_can_be_looked_at() -> None:
    engine = ScriptedEngine([[3]])
    await engine.publish_weights({"w": 1}, 7)

    assert engine.published == [(7, {"w": 1})]


async def test_an_answer_that_is_a_text_is_refused_by_name() -> None:
    engine = ScriptedEngine(lambda prompt_ids: "ab", tokenizer=CharTokenizer("abc"))  # type: ignore[arg-type,return-value]

    with pytest.raises(EngineError, match=r"the script's answer to request r\d+ is the text 'ab'; .*encode"):
        await engine.generate(Request([1]))


async def test_an_engine_is_not_used_from_two_loops_at_once() -> None:
    engine = ScriptedEngine(lambda prompt_ids: [1])
    await engine.generate(Request([1]))

    with pytest.raises(EngineError, match="the engine 'scripted' is used from two event loops at once"):
        await asyncio.to_thread(asyncio.run, engine.generate(Request([1])))
    assert engine.in_flight_count == 0


def test_an_engine_goes_on_in_another_loop_once_its_own_has_ended() -> None:
    engine = ScriptedEngine(lambda prompt_ids: [1])
    for _ in range(2):
        assert asyncio.run(engine.generate(Request([1]))).token_ids == (1,)
