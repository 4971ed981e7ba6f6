"""An engine for servers, from the `[engine]` table of a settings file."""

import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from groupstate.engines.openai_options import engine_from_options
from groupstate.engines.port import Request, SamplingParams
from groupstate.errors import BadSettings, EngineError
from tests.engines.http_server import HttpServer


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with HttpServer() as server:
        yield server


async def test_options_of_a_file_make_an_engine(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "secret"
    monkeypatch.setenv("THE_KEY", "secret")
    options = {"url": server.url, "model": "tiny", "api_key_env": "THE_KEY", "slots_max": 3, "stall_s": 9}
    engine = await engine_from_options(options, "[engine]")

    assert len((await engine.generate(Request((1,), SamplingParams(max_tokens=4)))).token_ids) == 4
    await engine.aclose()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "the engine 'openai' needs its servers: url = "),
        ({"url": "http://a:1", "urls": ["http://b:1"]}, "needs its servers"),
        ({"ulr": "http://a:1"}, r"\[engine\] has no setting 'ulr'; did you mean 'url'"),
        ({"url": "http://a:1", "slots_max": "many"}, "slots_max is 'many'; it must be an integer or None"),
        ({"url": "http://a:1", "dialect": "vlm"}, "dialect is 'vlm'; it must be 'vllm' or 'sglang' or"),
        ({"url": "http://a:1", "api_key_env": "NO_SUCH_VARIABLE"}, "names NO_SUCH_VARIABLE, which isn't set"),
        (
            {"url": "http://a:1", "tokenizer": "/no/such"},
            "tokenizer '/no/such' can't be loaded|needs the package trans",
        ),
    ],
)
async def test_options_that_cannot_be_are_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadSettings, match=complaint):
        await engine_from_options(options, "[engine]")


async def test_options_of_a_server_that_is_not_up(server: HttpServer) -> None:
    await server.stop()
    with pytest.raises(EngineError, match=f"no server answers at {server.url}"):
        await engine_from_options({"url": server.url}, "[engine]")


def test_without_httpx_the_extra_is_named() -> None:
    code = "import sys; sys.modules['httpx'] = None; import groupstate.engines.openai"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert "MissingExtra: the engine 'openai' needs httpx; install the extra 'openai'" in done.stderr
