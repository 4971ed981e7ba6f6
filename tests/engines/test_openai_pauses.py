"""Servers that are paused or put to sleep: what becomes of their streams, their weights and their rotation."""

import asyncio

import anyio
import pytest

from groupstate.engines.openai import OpenAIEngine
from groupstate.errors import EngineError
from tests.engines.http_server import HttpServer
from tests.engines.stepping import ask, begun, check_steps, urls, wait_for


async def test_a_pause_freezes_the_streams_where_the_server_can(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, weight_version=1, stall_s=0.2) as engine:
        request = ask(seed=3)
        under_way = await begun(engine, request, server)
        await engine.pause()
        await anyio.sleep(0.5)
        assert (server.paused, server.running) == (True, 1)
        server.let_go()
        await anyio.sleep(0.1)
        assert not under_way.done()
        await engine.resume()

        assert len((await under_way).token_ids) == 60
    assert len(server.asked) == 1


async def test_a_pause_closes_the_streams_where_it_cannot(server: HttpServer) -> None:
    server.lacks = frozenset({"/pause"})
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        request = ask()
        under_way = await begun(engine, request, server)
        await engine.pause()
        await wait_for(lambda: not server.running)
        server.let_go()
        await engine.resume()

        check_steps(await under_way, 5)
        assert len(under_way.result().token_ids) == 60
    assert len(server.asked) == 2


async def test_weights_come_to_a_sleeping_server_before_its_cache_does(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        await engine.pause()
        await engine.sleep()
        server.calls.clear()
        await engine.publish_weights("/weights/v2", 2)
        assert server.paused
        await engine.wake()
        await engine.resume()

        check_steps(await engine.generate(ask(max_tokens=4)), 5)
    wanted = ["POST /wake_up?tags=weights", "POST /collective_rpc", "POST /wake_up?tags=kv_cache", "POST /resume"]
    assert [call for call in server.calls if call in wanted] == wanted


async def test_servers_that_cannot_sleep_stay_awake_all(servers: list[HttpServer]) -> None:
    servers[1].lacks = frozenset({"/sleep"})
    async with OpenAIEngine(urls(servers)) as engine:
        await engine.pause()
        with pytest.raises(EngineError, match=f"{servers[1].url}: it can't sleep: .*--enable-sleep-mode"):
            await engine.sleep()

        assert engine.state == "paused"
        assert not servers[0].asleep


async def test_a_server_that_does_not_wake_is_an_error(server: HttpServer) -> None:
    async with OpenAIEngine(server.url) as engine:
        await engine.pause()
        await engine.sleep()
        server.refuses["/wake_up"] = (500, "out of memory")
        with pytest.raises(EngineError, match=f"{server.url}: /wake_up: 500 out of memory"):
            await engine.wake()

        assert engine.state == "asleep"


async def test_a_server_that_does_not_resume_is_left_out(servers: list[HttpServer]) -> None:
    async with OpenAIEngine(urls(servers), weight_version=1) as engine:
        under_way = [await begun(engine, ask(), *servers) for _ in range(2)]
        await engine.pause()
        servers[0].refuses["/resume"] = (500, "no")
        for server in servers:
            server.let_go()
        await engine.resume()

        for task in under_way:
            check_steps(await task, 5)
            assert len(task.result().token_ids) == 60
        await anyio.sleep(0.5)
        with anyio.fail_after(5):
            await asyncio.gather(*(engine.generate(ask(max_tokens=4)) for _ in range(4)))
        assert not any(view.in_rotation for view in engine.replicas if view.url == servers[0].url)
        del servers[0].refuses["/resume"]
        await wait_for(lambda: all(view.in_rotation for view in engine.replicas))


async def test_a_server_that_dies_while_paused_is_no_hindrance(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        await engine.pause()
        await server.stop()
        await engine.resume()
        waiting = asyncio.create_task(engine.generate(ask(max_tokens=4)))
        await anyio.sleep(0.1)
        await server.start()

        check_steps(await waiting, 5)
