"""Connections that this machine can't make, which say nothing of the server."""

import errno
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpcore
import httpx
import pytest

from groupstate.engines.http.client import OWN_LIMITS, Broken, NoPlace, NotReached, _named
from groupstate.engines.openai import OpenAIEngine
from groupstate.engines.port import Request, SamplingParams
from groupstate.errors import EngineUnavailable
from tests.engines.http_server import HttpServer


def ask() -> Request:
    return Request((1, 5, 7), SamplingParams(max_tokens=4))


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with HttpServer() as server:
        yield server


async def forget_connections(engine: OpenAIEngine) -> None:
    """The next request needs one of its own."""
    client = engine._fleet.replicas[0].client
    await client._http.aclose()
    client._http = client._unconnected()


class Full:
    """Connections fail so many times as they do when a process has no file descriptor left."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.connect = anyio.connect_tcp

    async def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            raise OSError("All connection attempts failed") from OSError(errno.EMFILE, "Too many open files")
        return await self.connect(*args, **options)


async def test_a_request_waits_for_a_connection_and_its_server_stays_in_use(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    async def publish(url: str, weights: object, weight_version: int) -> None:
        given.append(weight_version)

    async with OpenAIEngine(server.url, publish=publish) as engine:
        await engine.publish_weights({"w": 1}, 1)
        await forget_connections(engine)
        full = Full(2)
        monkeypatch.setattr(anyio, "connect_tcp", full)
        generation = await engine.generate(ask())

        assert len(generation.token_ids) == 4
        assert full.left == 0
        assert [(view.problem, view.weight_version) for view in engine.replicas] == [("", 1)]
        assert given == [1]


async def test_a_request_that_gets_no_connection_in_time_is_told_what_to_raise(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with OpenAIEngine(server.url, reconnect_s=0.15) as engine:
        await forget_connections(engine)
        monkeypatch.setattr(anyio, "connect_tcp", Full(1_000))
        with pytest.raises(EngineUnavailable, match=r"Too many open files.*ulimit -n.*slots_max.* for 0\.15 s now"):
            await engine.generate(ask())


def raised(cause: BaseException) -> None:
    with _named():
        try:
            raise httpcore.ConnectError("failed") from cause
        except httpcore.ConnectError as error:
            raise httpx.ConnectError("failed") from error


@pytest.mark.parametrize("number", sorted(OWN_LIMITS))
@pytest.mark.parametrize("addresses", [1, 2])
def test_what_the_machine_lacks_is_found_among_the_causes(number: int, addresses: int) -> None:
    lacks = OSError(number, "no more")
    with pytest.raises(NoPlace, match="no more"):
        raised(lacks if addresses == 1 else ExceptionGroup("at each address", [lacks, lacks]))


@pytest.mark.parametrize(
    "cause",
    [
        OSError(errno.ECONNREFUSED, "refused"),
        ExceptionGroup("", [OSError(errno.EADDRNOTAVAIL, "no IPv6 here"), OSError(errno.ECONNREFUSED, "refused")]),
        ExceptionGroup("", [OSError(errno.EMFILE, "no more"), OSError(errno.ECONNREFUSED, "refused")]),
    ],
    ids=["refused", "refused where it could be asked", "refused at one address"],
)
def test_a_server_that_refuses_is_not_taken_for_a_lack_of_this_machine(cause: BaseException) -> None:
    with pytest.raises(NotReached) as told:
        raised(cause)

    assert not isinstance(told.value, NoPlace)


async def test_what_is_no_stream_waits_for_a_connection_too_as_long_as_it_may(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with OpenAIEngine(server.url) as engine:
        await forget_connections(engine)
        client = engine._fleet.replicas[0].client
        monkeypatch.setattr(anyio, "connect_tcp", Full(2))
        answer = await client.get("/v1/models", timeout_s=5.0)
        await forget_connections(engine)
        monkeypatch.setattr(anyio, "connect_tcp", Full(1_000))
        with pytest.raises(Broken, match=r"no answer to /v1/models within 0\.15 s"):
            await client.get("/v1/models", timeout_s=0.15)

        assert answer.status == 200
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("event='requests wait for a connection' problem=")
