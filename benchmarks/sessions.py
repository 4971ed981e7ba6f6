"""What groupstate adds to a session, beside calling the engine directly with `asyncio.gather`.

The same prompts go to the same engine, in turn: bare, and as sessions of a run with its log in files, from `submit`
until the batch is committed. What is compared is processor time, all threads of a process together: wall time would
hide whatever the engine's computing leaves idle. The embedded engine computes in this process; vLLM computes in one of
its own. Its bound is read both ways, with the time of vLLM's process and of this process alone, and the larger counts.

What was there before, torch and vLLM with all their modules, is kept from Python's garbage collector, as vLLM's own
server does. One pass over it takes as long as 500 sessions of groupstate, and comes in either variant as it happens.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from benchmarks.measure import Measurement, Result, Spread, children_s, frozen_heap, interleaved, ratio_of_pairs
from groupstate import Run, SessionContext, Trajectory, open_run
from groupstate.engines.port import Engine, Request, SamplingParams

ADDED_MAX = 1.05
SIZE = 8
"""Sessions of a group."""
TOKENS = 128
"""Of an answer."""
PROMPT_TOKENS = 32
VOCABULARY = 128
REPETITIONS_VLLM: Mapping[int, int] = {64: 243, 512: 63}
"""Per number of sessions at once. The ratio within a pair lies between 0.8 and 1.3 on a shared machine: 81 pairs of 64
and 21 of 512 tell its median to 0.02 only, so that a figure of 1.04 lay above 1.05 in one run of six."""

Direct = Callable[[list[int], SamplingParams], Awaitable[object]]
"""Generate one answer without groupstate's session."""


async def measure(
    folder: Path, *, at_once: tuple[int, ...] = (64, 512), tokens: int = TOKENS, width: int = 128, repetitions: int = 7
) -> list[Result]:
    """With the embedded engine: the default model, some 0.8 million parameters."""
    from groupstate.engines.torch import TorchEngine
    from groupstate.engines.transformer import TransformerConfig

    config = TransformerConfig(vocabulary_size=VOCABULARY, context=PROMPT_TOKENS + tokens, width=width)
    engine = TorchEngine(config, slots_max=max(at_once))

    async def direct(prompt_ids: list[int], params: SamplingParams) -> object:
        return await engine.generate(Request(prompt_ids, params))

    try:
        return await _measured(folder, "torch", engine, direct, dict.fromkeys(at_once, repetitions), tokens)
    finally:
        await engine.aclose()


async def measure_vllm(
    folder: Path, *, repetitions: Mapping[int, int] = REPETITIONS_VLLM, tokens: int = TOKENS
) -> list[Result]:
    """With vLLM on the CPU and the demo's tiny Qwen2: beside vLLM's own `generate` with the same settings.

    Args:
        repetitions: per number of sessions at once.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    from groupstate.demo.qwen import QwenPolicy, vllm_engine
    from groupstate.demo.settings import Settings

    settings = Settings(engine="vllm", slots_max=max(repetitions))
    with TemporaryDirectory(dir=folder) as place:
        engine = await vllm_engine(
            QwenPolicy(settings, VOCABULARY, context=PROMPT_TOKENS + tokens), settings, Path(place), 0
        )
        numbers = itertools.count()

        async def direct(prompt_ids: list[int], params: SamplingParams) -> object:
            own = VllmParams(
                temperature=params.temperature,
                max_tokens=params.max_tokens,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            return [part async for part in engine.llm.generate(tokens_input(prompt_ids), own, f"alone{next(numbers)}")]

        try:
            return await _measured(folder, "vllm", engine, direct, repetitions, tokens, extra={"ignore_eos": True})
        finally:
            await engine.aclose()


async def _measured(
    folder: Path,
    name: str,
    engine: Engine,
    direct: Direct,
    repetitions: Mapping[int, int],
    tokens: int,
    extra: Mapping[str, Any] | None = None,
) -> list[Result]:
    params = SamplingParams(max_tokens=tokens, extra=extra or {})
    results = []
    with TemporaryDirectory(dir=folder) as place:
        async with open_run(
            Path(place) / "run", session=_session, engine=engine, params=params, group_size=SIZE
        ) as run:
            for count, times in repetitions.items():
                prompts = [
                    [(group * 7 + at) % VOCABULARY for at in range(PROMPT_TOKENS)] for group in range(count // SIZE)
                ]
                clocks = _Clock(), _Clock()
                variants = {
                    "engine alone": _alone(clocks[0], direct, params, prompts),
                    "groupstate": _sessions(clocks[1], run, prompts),
                }
                for warm_up in variants.values():
                    await warm_up()
                with frozen_heap():
                    spreads = await interleaved(variants, times)
                own = [Spread(tuple(clock.own_s[-times:])) for clock in clocks]
                figures = [ratio_of_pairs(spreads["engine alone"], spreads["groupstate"]), ratio_of_pairs(*own)]
                added_s = (spreads["groupstate"].median - spreads["engine alone"].median) / count
                title = f"processor time of {count} sessions of {tokens} tokens at once, engine {name}"
                bare_s, whole_s = (spread.median / count for spread in own)
                notes = [
                    f"engine and library together, {figures[0][1]}; added: {added_s * 1e3:.2f} ms a session",
                    f"this process alone, {figures[1][1]}; {bare_s * 1e3:.2f} ms a session, {whole_s * 1e3:.2f} with "
                    "groupstate",
                ]
                figure = max(median for median, _ in figures)
                results.append(Result(title, spreads, figure, ADDED_MAX, "times, the larger of the two", notes))
    return results


async def _session(ctx: SessionContext) -> Trajectory:
    prompt_ids = ctx.prompt.content
    generation = await ctx.generate(prompt_ids)
    return ctx.trajectory(prompt_ids, generation, reward=1.0)


@attrs.define
class _Clock:
    """Processor time, with what this process alone took kept aside."""

    own_s: list[float] = attrs.field(factory=list)

    async def of(self, work: Callable[[], Awaitable[object]]) -> float:
        begin, others = time.process_time(), children_s()
        await work()
        self.own_s.append(time.process_time() - begin)
        return self.own_s[-1] + children_s() - others


def _alone(clock: _Clock, direct: Direct, params: SamplingParams, prompts: list[list[int]]) -> Measurement:
    async def work() -> None:
        await asyncio.gather(*(direct(prompt, params) for prompt in prompts for _ in range(SIZE)))

    return lambda: clock.of(work)


def _sessions(clock: _Clock, run: Run, prompts: list[list[int]]) -> Measurement:
    async def work() -> None:
        for prompt in prompts:
            run.submit(prompt)
        await run.commit(await run.sample(len(prompts)))

    return lambda: clock.of(work)
