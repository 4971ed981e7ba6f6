"""The contract of engines, kept over HTTP: with servers that can freeze their streams, and with one that can't."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from groupstate.engines.openai import OpenAIEngine
from groupstate.engines.port import Generation, Request
from groupstate.errors import EngineDied, EngineError, EngineUnavailable
from groupstate.testing.contracts import EngineContract, EngineKind
from groupstate.testing.contracts.engine_kind import CONTEXT, ask, slots, wait_first_token
from tests.engines.http_server import HttpServer

GONE_S = 1.0
"""How long a server may take to notice that nobody reads."""


class OverHttp:
    long = 1500
    death = "no server was reachable"
    sets_slots = True

    def __init__(self, server: HttpServer, dialect: str) -> None:
        self.server = server
        self.dialect: Any = dialect
        self.weights_of = {server.url: "as started"}

    def make(self, **options: Any) -> OpenAIEngine:
        return OpenAIEngine(
            self.server.url, dialect=self.dialect, publish=self.publish, reconnect_s=5.0, context=CONTEXT, **options
        )

    async def make_mortal(self, **options: Any) -> OpenAIEngine:
        self.server.token_s = 0.01
        return OpenAIEngine(self.server.url, dialect=self.dialect, reconnect_s=0.0, **options)

    async def publish(self, url: str, weights: Any, weight_version: int) -> None:
        if "nonsense" in weights:
            raise EngineError("they don't fit")

    def weights(self) -> dict[str, Any]:
        return {}

    def kill(self, engine: Any) -> None:
        self.server.die()

    def token_count(self, engine: Any, request: Request) -> int:
        row = engine._rows.get(request.id)
        return 0 if row is None else len(row.token_ids) + (0 if row.piece is None else len(row.piece.token_ids))

    def is_publishing(self, engine: Any) -> bool:
        return bool(engine._publishing_count)

    async def requests_left(self, engine: Any) -> int:
        with anyio.move_on_after(GONE_S):
            # Nothing tells when a server has noticed.
            while self.server.running:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        return self.server.running


@pytest.fixture(params=["vllm", "vllm, no freezing", "sglang"])
async def kind(request: pytest.FixtureRequest) -> AsyncIterator[EngineKind]:
    dialect, _, how = request.param.partition(", ")
    lacks = ("/pause", "/resume") if how == "no freezing" else ()
    async with HttpServer(token_s=0.0002, tokens_per_event=6, lacks=lacks) as server:
        server.incremental = True
        yield OverHttp(server, dialect)


async def outcome(engine: OpenAIEngine, request: Request) -> Generation | Exception:
    try:
        return await engine.generate(request)
    except Exception as error:
        return error


class TestOverHttp(EngineContract):
    async def test_an_engine_that_dies_fails_everything_at_once_and_for_good(self, kind: EngineKind) -> None:
        """What is under way fails with its connection; the engine is dead once no server is reached."""
        engine = await kind.make_mortal(**slots(kind, 2))
        async with asyncio.TaskGroup() as tasks:
            requests = [ask(max_tokens=kind.long) for _ in range(5)]
            under_way = [tasks.create_task(outcome(engine, request)) for request in requests]
            for request in requests[:2]:
                await wait_first_token(kind, engine, request)
            kind.kill(engine)

        failures = [task.result() for task in under_way]
        assert [type(failure) for failure in failures] == [EngineUnavailable] * 2 + [EngineDied] * 3
        for attempt in (engine.generate(ask()), engine.publish_weights(kind.weights(), 1), engine.pause()):
            with pytest.raises(EngineDied, match=kind.death):
                await attempt
        assert engine.in_flight_count == 0
        await engine.aclose()
