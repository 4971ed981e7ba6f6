"""Two servers whose answers tell which weights made them. Files that need others have fixtures of these names."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.engines.http_server import HttpServer, stepping


@pytest.fixture
async def servers() -> AsyncIterator[list[HttpServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(HttpServer(stepping, token_s=0.002)) for _ in range(2)]


@pytest.fixture
def server(servers: list[HttpServer]) -> HttpServer:
    return servers[0]
