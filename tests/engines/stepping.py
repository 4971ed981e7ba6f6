"""Requests to servers whose answers tell which weights made them, stopped where a test wants them."""

import asyncio
from typing import Any

import anyio

from groupstate.engines.openai import OpenAIEngine
from groupstate.engines.port import Generation, Request, SamplingParams
from tests.engines.http_server import HttpServer


def check_steps(generation: Generation, last_of_prompt: int) -> None:
    """Every token was made by the weights that its span says."""
    tokens = (last_of_prompt, *generation.token_ids)
    covered = []
    for span in generation.spans:
        for at in range(span.start, span.stop):
            assert (tokens[at + 1] - tokens[at]) % 97 == span.weight_version
            covered.append(at)
    assert covered == list(range(len(generation.token_ids)))
    assert len(generation.log_probs) == len(generation.token_ids)


def urls(servers: list[HttpServer]) -> list[str]:
    return [server.url for server in servers]


def ask(prompt_ids: tuple[int, ...] = (5,), **params: Any) -> Request:
    return Request(prompt_ids, SamplingParams(**{"max_tokens": 60, **params}))


HELD = 20
"""Tokens after which servers stand still, so that what a test does next comes in the middle of an answer."""


async def begun(engine: OpenAIEngine, request: Request, *servers: HttpServer) -> "asyncio.Task[Generation]":
    """A request in the middle of its answer, which goes on with `let_go`."""
    for server in servers:
        server.hold(HELD)
    under_way = asyncio.create_task(engine.generate(request))
    await tokens_of(engine, request, HELD)
    return under_way


async def tokens_of(engine: OpenAIEngine, request: Request, count: int) -> None:
    """Until a request has so many tokens."""
    with anyio.fail_after(5):
        while True:
            row = engine._rows.get(request.id)
            if row is not None and row.piece is not None and len(row.piece.token_ids) >= count:
                return
            await anyio.sleep(0.001)


async def wait_for(condition: Any) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)
