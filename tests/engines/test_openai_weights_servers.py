"""How servers get new weights over HTTP, also one that was down or started anew: none serves under a wrong version."""

import asyncio
from typing import Any

import anyio
import pytest

from groupstate.engines.openai import OpenAIEngine
from groupstate.errors import EngineDied, EngineError
from tests.engines.http_server import BASE, Fault, HttpServer
from tests.engines.stepping import ask, begun, check_steps, urls, wait_for


async def test_a_publication_pauses_loads_clears_names_and_resumes(server: HttpServer) -> None:
    async with OpenAIEngine(server.url) as engine:
        server.calls.clear()
        await engine.publish_weights("/weights/v2", 2)

    assert server.calls == [
        "POST /pause?mode=abort",
        "POST /collective_rpc",
        "POST /reset_prefix_cache",
        "POST /update_weight_version",
        "POST /resume",
        "GET /weight_info",
    ]
    assert (server.weights, server.label) == ("/weights/v2", "2")


async def test_sglang_is_given_weights_its_own_way(server: HttpServer) -> None:
    server.incremental = True
    async with OpenAIEngine(server.url, dialect="sglang", weight_version=1) as engine:
        request = ask()
        under_way = await begun(engine, request, server)
        server.calls.clear()
        await engine.publish_weights("/weights/v2", 2)
        server.let_go()
        check_steps(await under_way, 5)

    assert server.calls == [
        "POST /pause_generation",
        "POST /update_weights_from_disk",
        "POST /continue_generation",
        "GET /get_model_info",
    ]
    assert (server.weights, server.label) == ("/weights/v2", "2")


async def test_a_server_that_does_not_take_weights_is_out_until_it_does(servers: list[HttpServer]) -> None:
    good, bad = servers
    bad.takes = lambda folder: False
    async with OpenAIEngine(urls(servers), weight_version=1) as engine:
        await engine.publish_weights("/weights/v2", 2)
        for _ in range(4):
            check_steps(await engine.generate(ask(max_tokens=4)), 5)
        assert (engine.weight_version, len(good.asked), len(bad.asked)) == (2, 4, 0)
        (view,) = [view for view in engine.replicas if not view.in_rotation]
        assert (view.url, view.weight_version) == (bad.url, None)
        assert "/weights/v2 doesn't fit" in view.problem
        bad.takes = lambda folder: True
        await wait_for(lambda: all(view.in_rotation for view in engine.replicas))

        for _ in range(4):
            check_steps(await engine.generate(ask(max_tokens=4)), 5)
    assert bad.weights == "/weights/v2"


async def test_where_no_server_takes_them_the_version_stays_and_so_do_the_weights(servers: list[HttpServer]) -> None:
    for server in servers:
        server.takes = lambda folder: folder != "/weights/v3"
    async with OpenAIEngine(urls(servers), weight_version=1) as engine:
        await engine.publish_weights("/weights/v2", 2)
        with pytest.raises(
            EngineError,
            match=r"no server took .* version 3: .*v3 doesn't fit.*folder /weights/v3 under .*; version 2 stays",
        ) as caught:
            await engine.publish_weights("/weights/v3", 3)
        assert not isinstance(caught.value, EngineDied)
        assert {server.weights for server in servers} == {"broken"}

        generation = await engine.generate(ask(max_tokens=4))
    check_steps(generation, 5)
    assert [span.weight_version for span in generation.spans] == [2]


async def test_weights_of_the_start_come_back_the_same_way(server: HttpServer) -> None:
    server.takes = lambda folder: folder != "/weights/v3"
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        with pytest.raises(EngineError, match="version 1 stays"):
            await engine.publish_weights("/weights/v3", 3)

        check_steps(await engine.generate(ask(max_tokens=4)), 5)
    assert server.weights == BASE


async def test_requests_under_way_survive_weights_that_nobody_took(server: HttpServer) -> None:
    server.takes = lambda folder: folder != "/weights/v3"
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        request = ask()
        under_way = await begun(engine, request, server)
        with pytest.raises(EngineError, match="version 1 stays"):
            await engine.publish_weights("/weights/v3", 3)

        server.let_go()
        check_steps(await under_way, 5)
    assert [span.weight_version for span in under_way.result().spans] == [1]


async def test_a_server_that_was_started_anew_gets_the_current_weights_first(servers: list[HttpServer]) -> None:
    async with OpenAIEngine(urls(servers), weight_version=1) as engine:
        await engine.publish_weights("/weights/v2", 2)
        await servers[0].stop()
        check_steps(await engine.generate(ask(max_tokens=4)), 5)
        await servers[0].start()
        assert servers[0].weights == BASE
        await wait_for(lambda: all(view.in_rotation for view in engine.replicas))

        assert servers[0].weights == "/weights/v2"
        assert {view.weight_version for view in engine.replicas} == {2}


async def test_a_restart_that_nobody_noticed_is_found_out(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupstate.engines.http.fleet.QUIET_S", 0.05)
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        await engine.publish_weights("/weights/v2", 2)
        await engine.generate(ask(max_tokens=4))
        await server.stop()
        await server.start()
        await anyio.sleep(0.1)

        generation = await engine.generate(ask(max_tokens=4))
    check_steps(generation, 5)
    assert [span.weight_version for span in generation.spans] == [2]


async def test_an_engine_that_is_resumed_while_a_server_gets_its_weights_back_goes_on_there(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        await engine.publish_weights("/weights/v2", 2)
        await engine.pause()
        await server.stop()
        await server.start()
        monkeypatch.setattr("groupstate.engines.http.fleet.QUIET_S", -1.0)
        began, goes_on, load = asyncio.Event(), asyncio.Event(), engine._dialect.load

        async def slow(*arguments: Any, **options: Any) -> None:
            began.set()
            await goes_on.wait()
            await load(*arguments, **options)

        monkeypatch.setattr(engine._dialect, "load", slow)
        under_way = asyncio.create_task(engine.generate(ask(max_tokens=4)))
        with anyio.fail_after(5):
            await began.wait()
            await engine.resume()
            goes_on.set()
            check_steps(await under_way, 5)
        assert not server.paused


async def test_a_server_whose_first_weights_changed_is_not_asked(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, weight_version=1, reconnect_s=0.5) as engine:
        server.faults.append(Fault(500))
        with pytest.raises(EngineError):
            await engine.generate(ask())
        server.label, server.weights = "7", "/weights/v7"

        generation = await engine.generate(ask(max_tokens=4))
    check_steps(generation, 5)
    assert server.weights == BASE


async def test_streams_of_a_server_whose_weights_changed_are_closed_before_it_gets_others(server: HttpServer) -> None:
    open_streams: list[int] = []

    def take(folder: str) -> bool:
        open_streams.append(sum(row.replica is not None for row in engine._rows.values()))
        return True

    server.takes = take
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        under_way = await begun(engine, ask(), server)
        server.label, server.weights = "7", "/weights/v7"
        server.faults.append(Fault(500))
        with pytest.raises(EngineError):
            await engine.generate(ask())
        await wait_for(lambda: open_streams)
        server.let_go()

        check_steps(await under_way, 5)
    assert open_streams == [0]


async def test_weights_that_came_by_a_way_of_the_users_own_come_by_it_again(server: HttpServer) -> None:
    given_: list[tuple[str, Any, int]] = []

    async def publish(url: str, weights: Any, weight_version: int) -> None:
        given_.append((url, weights, weight_version))
        server.weights = f"v{weight_version}"

    async with OpenAIEngine(server.url, publish=publish, weight_version=1) as engine:
        await engine.publish_weights("run 7", 2)
        await server.stop()
        waiting = asyncio.create_task(engine.generate(ask(max_tokens=4)))
        await anyio.sleep(0.2)
        await server.start()

        check_steps(await waiting, 5)
    assert given_ == [(server.url, "run 7", 2)] * 2


async def test_live_weights_are_given_only_while_they_are_published(server: HttpServer) -> None:
    async def publish(url: str, weights: Any, weight_version: int) -> None:
        server.weights = f"v{weight_version}"

    async with OpenAIEngine(server.url, publish=publish, weight_version=1, reconnect_s=0.3) as engine:
        await engine.publish_weights({"w": 1}, 2)
        await server.stop()
        await server.start()
        server.faults.append(Fault(cut_before=True))
        with pytest.raises(EngineError, match="it may have other weights than those of version 2"):
            await engine.generate(ask(max_tokens=4))

        await engine.publish_weights({"w": 1}, 3)
        check_steps(await engine.generate(ask(max_tokens=4)), 5)


@pytest.mark.parametrize(
    ("error", "serves"), [(EngineError("no room"), True), (RuntimeError("no room"), False)], ids=["refused", "failed"]
)
async def test_what_a_way_of_the_users_own_may_raise(server: HttpServer, error: Exception, serves: bool) -> None:
    async def publish(url: str, weights: Any, weight_version: int) -> None:
        raise error

    async with OpenAIEngine(server.url, publish=publish, weight_version=1, reconnect_s=0.2) as engine:
        with pytest.raises(EngineError, match=r"no room.*; version 1 stays"):
            await engine.publish_weights({}, 2)

        if serves:
            assert len((await engine.generate(ask(max_tokens=4))).token_ids) == 4
        else:
            with pytest.raises(EngineError, match="may have other weights than those of version 1"):
                await engine.generate(ask(max_tokens=4))


@pytest.mark.parametrize(
    ("lacks", "options", "complaint"),
    [
        (("/collective_rpc",), {}, "it takes no weights: .*VLLM_SERVER_DEV_MODE=1, or give the engine publish="),
        (("/update_weights_from_disk",), {"dialect": "sglang"}, "/update_weights_from_disk is not there"),
        ((), {"dialect": "text"}, "the dialect 'text' can't give a server weights; give the engine publish="),
    ],
)
async def test_a_server_without_a_way_for_weights_says_so_and_serves_on(
    server: HttpServer, lacks: tuple[str, ...], options: dict[str, Any], complaint: str
) -> None:
    server.lacks = frozenset(lacks)
    async with OpenAIEngine(server.url, weight_version=1, **options) as engine:
        with pytest.raises(EngineError, match=f"{complaint}.*; version 1 stays"):
            await engine.publish_weights("/weights/v2", 2)

        assert all(view.in_rotation for view in engine.replicas)
        assert not server.paused


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/pause", (500, "busy")),
        ("/reset_prefix_cache", (200, '{"success": false}')),
        ("/update_weight_version", (500, "busy")),
        ("/resume", (500, "busy")),
    ],
)
async def test_a_publication_that_fails_half_way_is_undone(
    server: HttpServer, path: str, answer: tuple[int, str]
) -> None:
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        server.refuses[path] = answer
        with pytest.raises(EngineError, match=f"{path}.*; version 1 stays"):
            await engine.publish_weights("/weights/v2", 2)
        del server.refuses[path]

        check_steps(await engine.generate(ask(max_tokens=4)), 5)


async def test_a_server_that_is_gone_while_weights_come_gets_them_later(servers: list[HttpServer]) -> None:
    async with OpenAIEngine(urls(servers), weight_version=1) as engine:
        await servers[1].stop()
        await engine.publish_weights("/weights/v2", 2)
        await servers[1].start()
        await wait_for(lambda: all(view.in_rotation for view in engine.replicas))

    assert servers[1].weights == "/weights/v2"


async def test_where_all_servers_are_gone_the_version_stays(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, weight_version=1, reconnect_s=30.0) as engine:
        await server.stop()
        with pytest.raises(EngineError, match="version 1 stays"):
            await engine.publish_weights("/weights/v2", 2)
        await server.start()

        check_steps(await engine.generate(ask(max_tokens=4)), 5)
