"""The contract of engines, kept by vLLM in this process."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from vllm.v1.engine.async_llm import AsyncLLM

from groupstate.engines.port import Request
from groupstate.engines.vllm import VllmEngine
from groupstate.testing.contracts import EngineContract
from groupstate.testing.contracts.engine_kind import Make, closing
from tests.vllm import engines, tiny_model


class Vllm:
    """vLLM takes ten seconds to start: engines of one AsyncLLM, but for those that are killed."""

    long = 700
    death = "EngineCore"
    sets_slots = False

    def __init__(self, llm: AsyncLLM, model: Path) -> None:
        self.llm = llm
        self.model = model

    def make(self, **options: Any) -> VllmEngine:
        return VllmEngine(self.llm, **options)

    async def make_mortal(self, **options: Any) -> VllmEngine:
        return await engines.start(self.model, skip_tokenizer_init=True, **options)

    def weights(self) -> dict[str, Any]:
        return dict(tiny_model.state_dict(seed=1))

    def kill(self, engine: VllmEngine) -> None:
        for process in engine.llm.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)

    def token_count(self, engine: VllmEngine, request: Request) -> int:
        return engines.token_count(engine, request.id)

    def is_publishing(self, engine: VllmEngine) -> bool:
        return engine._publishing

    async def requests_left(self, engine: VllmEngine) -> int:
        return await engines.requests_left(engine)


@pytest.fixture
def kind(llm: AsyncLLM, models: Path) -> Vllm:
    return Vllm(llm, models / "v0")


class TestVllm(EngineContract):
    patience_s = 600.0

    @pytest_asyncio.fixture(loop_scope="session")
    async def make(self, kind: Vllm) -> AsyncIterator[Make]:
        async with closing(kind.make) as make_one:
            yield make_one
