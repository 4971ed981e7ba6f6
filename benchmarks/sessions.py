"""What groupstate adds to a session, beside calling the engine directly with `asyncio.gather`.

The same prompts go to the same engine, in turn: bare, and as sessions of a run with its log in files, from `submit`
until the batch is committed. What is compared is processor time of this process, all its threads together (and of
vLLM's own process where one generates): wall time would hide whatever the engine's computing leaves idle.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import Measurement, Result, interleaved, ratio_of_pairs
from groupstate import Run, SessionContext, Trajectory, open_run
from groupstate.engines.port import Engine, Request, SamplingParams

ADDED_MAX = 1.05
SIZE = 8
"""Sessions of a group."""
TOKENS = 128
"""Of an answer."""
PROMPT_TOKENS = 32
VOCABULARY = 128

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
        return await _measured(folder, "torch", engine, direct, at_once, tokens, repetitions)
    finally:
        await engine.aclose()


async def _measured(
    folder: Path,
    name: str,
    engine: Engine,
    direct: Direct,
    at_once: tuple[int, ...],
    tokens: int,
    repetitions: int,
    pids: tuple[int, ...] = (),
) -> list[Result]:
    """
    Args:
        pids: of the engine's own processes, whose time is told too.
    """
    params = SamplingParams(max_tokens=tokens)
    results = []
    with TemporaryDirectory(dir=folder) as place:
        async with open_run(
            Path(place) / "run", session=_session, engine=engine, params=params, group_size=SIZE
        ) as run:
            for count in at_once:
                prompts = [
                    [(group * 7 + at) % VOCABULARY for at in range(PROMPT_TOKENS)] for group in range(count // SIZE)
                ]
                variants = {
                    "engine alone": _alone(direct, params, prompts, pids),
                    "groupstate": _sessions(run, prompts, pids),
                }
                for warm_up in variants.values():
                    await warm_up()
                spreads = await interleaved(variants, repetitions)
                figure, text = ratio_of_pairs(spreads["engine alone"], spreads["groupstate"])
                added_s = (spreads["groupstate"].median - spreads["engine alone"].median) / count
                title = f"processor time of {count} sessions of {tokens} tokens at once, engine {name}"
                notes = [text, f"added: {added_s * 1e3:.2f} ms a session"]
                results.append(Result(title, spreads, figure, ADDED_MAX, "times", notes))
    return results


async def _session(ctx: SessionContext) -> Trajectory:
    prompt_ids = ctx.prompt.content
    generation = await ctx.generate(prompt_ids)
    return ctx.trajectory(prompt_ids, generation, reward=1.0)


def _alone(direct: Direct, params: SamplingParams, prompts: list[list[int]], pids: tuple[int, ...]) -> Measurement:
    async def measured() -> float:
        begin = _spent(pids)
        await asyncio.gather(*(direct(prompt, params) for prompt in prompts for _ in range(SIZE)))
        return _spent(pids) - begin

    return measured


def _sessions(run: Run, prompts: list[list[int]], pids: tuple[int, ...]) -> Measurement:
    async def measured() -> float:
        begin = _spent(pids)
        for prompt in prompts:
            run.submit(prompt)
        await run.commit(await run.sample(len(prompts)))
        return _spent(pids) - begin

    return measured


def _spent(pids: tuple[int, ...]) -> float:
    """Processor time in seconds: of this process, and of others."""
    return time.process_time() + sum(map(_spent_by, pids))


def _spent_by(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
