"""Many sessions that end in every way, over vLLM whose weights change all the while: nothing may be left behind.

The long form is `make test-vllm-long`; `make test-vllm` does the small one.
"""

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import anyio
import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from groupstate.engines.port import InFlight, Request, SamplingParams
from groupstate.engines.vllm import VllmEngine
from tests.vllm.engines import requests_left, start
from tests.vllm.tiny_model import state_dict

AT_ONCE = 48
"""Sessions under way; vLLM generates 64 at once."""

GROWTH_MAX_BYTES = 30 << 20
"""What memory may grow by from the first half to the second, of some 1,100 MiB: it goes up and down by 20."""


class Soak:
    """Sessions one after the other, each with an end drawn for it, and a trainer beside them."""

    def __init__(self, engine: VllmEngine, seed: int) -> None:
        self.engine = engine
        self.chance = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.publications = 0
        self.some_ended = anyio.Event()
        """Since the last publication."""

    async def run(self, sessions: int) -> None:
        places = anyio.Semaphore(AT_ONCE)
        async with anyio.create_task_group() as trainer:
            trainer.start_soon(self._train)
            async with anyio.create_task_group() as tasks:
                for _ in range(sessions):
                    await places.acquire()
                    tasks.start_soon(self._session, places)
            trainer.cancel_scope.cancel()

    async def _session(self, places: anyio.Semaphore) -> None:
        end = self.chance.choice(["finish", "finish", "abort", "cancel", "time out"])
        length = self.chance.randint(1, 160)
        prompt_ids = [self.chance.randint(3, 500) for _ in range(self.chance.randint(1, 60))]
        request = Request(prompt_ids, SamplingParams(max_tokens=length, seed=self.chance.choice([None, 7])))
        after_s = self.chance.uniform(0.0, 0.6)
        try:
            if end == "time out":
                with anyio.move_on_after(after_s):
                    await self._answer(request, end)
            else:
                await self._ended(request, end, after_s)
        finally:
            places.release()
            self.ends[end] += 1
            self.some_ended.set()

    async def _ended(self, request: Request, end: str, after_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(self._answer(request, end))
            if end == "finish":
                return
            await anyio.sleep(after_s)
            if end == "abort":
                self.engine.abort(request)
            else:
                answering.cancel()

    async def _answer(self, request: Request, end: str) -> None:
        generation = await self.engine.generate(request)
        assert generation.finish_reason == "length" or (end == "abort" and generation.finish_reason == "abort")
        assert len(generation.log_probs) == len(generation.token_ids) <= request.params.max_tokens
        covered = [at for span in generation.spans for at in range(span.start, span.stop)]
        assert covered == list(range(len(generation.token_ids)))

    async def _train(self) -> None:
        """Publish, in whatever state the engine then is."""
        while True:
            await anyio.sleep(self.chance.uniform(0.2, 0.8))
            # Else, on a machine too busy for an answer between two publications, `restart` would let none end.
            await self.some_ended.wait()
            self.some_ended = anyio.Event()
            state = self.chance.choice(["generating", "generating", "paused", "asleep"])
            with anyio.CancelScope(shield=True):
                await self._publish(state)

    async def _publish(self, state: str) -> None:
        engine = self.engine
        if state != "generating":
            await engine.pause()
        if state == "asleep":
            await engine.sleep()
        self.publications += 1
        await engine.publish_weights(state_dict(seed=self.publications % 2), self.publications)
        if state == "asleep":
            await engine.wake()
        await engine.resume()


def memory_bytes() -> int:
    """Of this process and those it started, each page that they share counted in parts.

    Without the pages of files, such as torch's: they count for less while other processes have them too.
    """
    pids = [str(os.getpid())]
    for path in Path("/proc/self/task").iterdir():
        pids += (path / "children").read_text().split()
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total * 1024


@pytest.mark.parametrize("in_flight", ["keep", "continue", "restart"])
async def test_a_hundred_sessions_leave_nothing_in_vllm(in_flight: InFlight, llm: AsyncLLM, tmp_path: Path) -> None:
    engine = VllmEngine(llm, in_flight=in_flight, scratch=tmp_path)
    soak = Soak(engine, seed=1)
    with anyio.fail_after(120):
        await soak.run(100)

    assert sum(soak.ends.values()) == 100
    assert soak.publications > 0
    assert engine.in_flight_count == 0
    assert await requests_left(engine) == 0
    await engine.aclose()
    assert os.listdir(tmp_path) == []


@pytest.mark.long
async def test_two_thousand_sessions_leave_nothing_and_memory_is_flat(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A small cache, all of whose pages are soon in use.
    engine = await start(models / "v0", skip_tokenizer_init=True, scratch=tmp_path, kv_cache_memory_bytes=24 << 20)
    soak = Soak(engine, seed=2)
    memory = []
    for _ in range(10):
        await soak.run(200)
        memory.append(memory_bytes())

        assert engine.in_flight_count == 0
        assert await requests_left(engine) == 0
    await engine.aclose()
    with capsys.disabled():
        print(f"\n{dict(soak.ends)}, {soak.publications} publications, memory {[size >> 20 for size in memory]} MiB")

    assert sum(soak.ends.values()) == 2000
    assert max(memory[5:]) - max(memory[:5]) < GROWTH_MAX_BYTES
    assert os.listdir(tmp_path) == []
