"""New weights over HTTP: which tokens came from which, and that no server ever serves under a wrong version."""

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from groupstate.engines.http.client import Stream
from groupstate.engines.http.routing import Replica
from groupstate.engines.http.rows import Row
from groupstate.engines.openai import OpenAIEngine
from groupstate.engines.port import Generation, Request, SamplingParams
from groupstate.errors import EngineDied, EngineError
from tests.engines.http_server import BASE, Fault, HttpServer


def stepping(prompt_ids: Sequence[int], weights: str) -> list[int]:
    """Weights of version v count in steps of v, those at the start in steps of 1; broken ones stand still."""
    step = {BASE: 1, "broken": 0}.get(weights) or (0 if weights == "broken" else int(weights.rpartition("v")[2]))
    tokens = [prompt_ids[-1]]
    for _ in range(2000):
        tokens.append((tokens[-1] + step) % 97)
    return tokens[1:]


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


@pytest.fixture
async def servers() -> AsyncIterator[list[HttpServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(HttpServer(stepping, token_s=0.002)) for _ in range(2)]


@pytest.fixture
def server(servers: list[HttpServer]) -> HttpServer:
    return servers[0]


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


def write_checkpoint(folder: Path, **shapes: list[int]) -> Path:
    """A folder of safetensors whose values nobody reads."""
    header, stop = {}, 0
    for name, shape in shapes.items():
        start, stop = stop, stop + 4 * shape[0]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
    data = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(stop))
    return folder


# Requests under way ------------------------------------------------------------------------------------


async def test_requests_under_way_go_on_from_their_tokens(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        request = ask((3, 5), seed=11, extra={"min_tokens": 50})
        under_way = await begun(engine, request, server)
        await engine.publish_weights("/weights/v2", 2)
        server.let_go()
        generation = await under_way

    check_steps(generation, 5)
    assert [span.weight_version for span in generation.spans] == [1, 2]
    assert len(generation.token_ids) == 60
    first, second = server.asked
    had = second["prompt"][2:]
    assert tuple(had) == generation.token_ids[: len(had)]
    assert (second["max_tokens"], second["min_tokens"]) == (60 - len(had), 50 - len(had))
    assert first["seed"] == 11
    assert second["seed"] not in (11, None)


async def test_the_seed_of_what_follows_hangs_on_the_request_alone(server: HttpServer) -> None:
    seeds = set()
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        for version in (2, 3):
            request = ask(seed=7)
            under_way = await begun(engine, request, server)
            await engine.publish_weights(f"/weights/v{version}", version)
            server.let_go()
            await under_way
            seeds.add(server.asked[-1]["seed"])

    assert len(seeds) == 1
    assert 0 <= seeds.pop() < 2**31


@pytest.mark.parametrize(
    ("options", "request_"),
    [({"in_flight": "restart"}, ask(seed=4)), ({}, ask(seed=4, extra={"structured_outputs": {"regex": "a*"}}))],
    ids=["as configured", "with a grammar"],
)
async def test_requests_that_cannot_go_on_begin_anew(
    server: HttpServer, options: dict[str, Any], request_: Request
) -> None:
    request = Request(request_.prompt_ids, request_.params)
    async with OpenAIEngine(server.url, weight_version=1, **options) as engine:
        under_way = await begun(engine, request, server)
        await engine.publish_weights("/weights/v2", 2)
        server.let_go()
        generation = await under_way

    check_steps(generation, 5)
    assert [span.weight_version for span in generation.spans] == [2]
    assert server.asked[0] == server.asked[1]


async def test_an_answer_that_was_whole_is_not_asked_for_again(server: HttpServer) -> None:
    server.faults.append(Fault(lingers=True))
    async with OpenAIEngine(server.url, weight_version=1, in_flight="restart") as engine:
        request = ask(max_tokens=4)
        under_way = asyncio.create_task(engine.generate(request))
        await tokens_of(engine, request, 4)
        await engine.publish_weights("/weights/v2", 2)
        generation = await under_way

    check_steps(generation, 5)
    assert [span.weight_version for span in generation.spans] == [1]
    assert len(server.asked) == 1


@pytest.mark.parametrize("dialect", ["text", "chat"])
async def test_texts_begin_anew(server: HttpServer, dialect: Any) -> None:
    async def publish(url: str, weights: Any, weight_version: int) -> None:
        pass

    server.script = lambda prompt_ids, weights: [1] * 60
    async with OpenAIEngine(server.url, dialect=dialect, publish=publish) as engine:
        request = Request((), SamplingParams(max_tokens=30), text="a")
        under_way = asyncio.create_task(engine.generate(request))
        await wait_for(lambda: server.running)
        await engine.publish_weights({}, 1)

        assert (await under_way).text == "b" * 30
    assert len(server.asked) == 2


async def test_kept_requests_finish_first(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, weight_version=1, in_flight="keep") as engine:
        request = ask()
        under_way = await begun(engine, request, server)
        publishing = asyncio.create_task(engine.publish_weights("/weights/v2", 2))
        await wait_for(lambda: not engine._fleet.router.is_open)
        late = asyncio.create_task(engine.generate(ask()))
        server.let_go()
        await publishing
        assert under_way.done()

        check_steps(await under_way, 5)
        check_steps(await late, 5)
    assert [span.weight_version for span in under_way.result().spans] == [1]
    assert [span.weight_version for span in late.result().spans] == [2]


async def test_a_request_that_is_aborted_as_its_stream_is_closed_ends(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        request = ask()
        under_way = await begun(engine, request, server)
        row = engine._rows[request.id]
        row.close("again")
        engine.abort(request)
        row.close("again")
        server.let_go()
        generation = await under_way

    assert generation.finish_reason == "abort"
    check_steps(generation, 5)


@pytest.mark.parametrize("ending", ["abort", "close"])
async def test_what_ends_between_two_streams_stays_ended(
    server: HttpServer, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        request = ask()
        begin = Row.begin

        def end_then_begin(row: Row) -> None:
            if row.token_ids:
                engine.abort(request) if ending == "abort" else engine._die(EngineDied("boom"))
            begin(row)

        monkeypatch.setattr(Row, "begin", end_then_begin)
        under_way = await begun(engine, request, server)
        await engine.publish_weights("/weights/v2", 2)
        server.let_go()

        with anyio.fail_after(5):
            if ending == "abort":
                assert (await under_way).finish_reason == "abort"
            else:
                with pytest.raises(EngineDied, match="boom"):
                    await under_way


async def test_a_request_whose_place_comes_as_the_gate_closes_waits_again(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with OpenAIEngine(server.url) as engine:
        acquire = engine._fleet.acquire

        async def acquire_late(affinity: str) -> Replica:
            replica = await acquire(affinity)
            engine._fleet.router.open(False)
            monkeypatch.undo()
            return replica

        monkeypatch.setattr(engine._fleet, "acquire", acquire_late)
        waiting = asyncio.create_task(engine.generate(ask(max_tokens=4)))
        await anyio.sleep(0.1)
        assert server.asked == []
        engine._fleet.router.open(True)

        assert len((await waiting).token_ids) == 4


async def test_no_stream_is_open_while_weights_change(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    open_streams: list[int] = []

    async def publish(url: str, weights: Any, weight_version: int) -> None:
        open_streams.append(sum(row.replica is not None for row in engine._rows.values()))

    async with OpenAIEngine(server.url, publish=publish) as engine:
        client = engine._fleet.replicas[0].client
        stream = client.stream

        @asynccontextmanager
        async def slow_to_close(path: str, body: bytes) -> AsyncIterator[Stream]:
            try:
                async with stream(path, body) as answer:
                    yield answer
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.1)

        monkeypatch.setattr(client, "stream", slow_to_close)
        under_way = await begun(engine, ask(), server)
        await engine.publish_weights({}, 1)
        server.let_go()
        await under_way

    assert open_streams == [0]


async def test_a_publication_that_nobody_waits_for_any_more_holds_nothing_up(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, in_flight="keep", weight_version=1) as engine:
        request = ask(max_tokens=300)
        under_way = await begun(engine, request, server)
        with anyio.move_on_after(0.05):
            await engine.publish_weights("/weights/v2", 2)

        server.let_go()
        assert len((await engine.generate(ask())).token_ids) == 60
        engine.abort(request)
        await under_way
        assert engine.weight_version == 1
    assert not [call for call in server.calls if "/pause" in call]


async def test_a_publication_goes_to_its_end_once_it_has_begun(server: HttpServer) -> None:
    began, ends = asyncio.Event(), asyncio.Event()

    async def publish(url: str, weights: Any, weight_version: int) -> None:
        began.set()
        await ends.wait()

    async with OpenAIEngine(server.url, publish=publish) as engine:
        publishing = asyncio.create_task(engine.publish_weights({}, 1))
        await began.wait()
        publishing.cancel()
        await anyio.sleep(0.01)
        assert not publishing.done()
        ends.set()
        with pytest.raises(asyncio.CancelledError):
            await publishing

        assert engine.weight_version == 1


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(["continue", "keep", "restart"]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["publish", "abort", "cancel", "pause", "ask", "wait"]), st.integers(0, 5), st.booleans()
        ),
        max_size=8,
    ),
    freezes=st.booleans(),
)
def test_whatever_happens_each_token_is_of_the_weights_that_its_span_says(
    policy: Any, steps: list[tuple[str, int, bool]], freezes: bool
) -> None:
    asyncio.run(play(policy, steps, freezes))


async def play(policy: Any, steps: list[tuple[str, int, bool]], freezes: bool) -> None:
    lacks = () if freezes else ("/pause", "/resume")
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(HttpServer(stepping, token_s=0.001, lacks=lacks)) for _ in range(2)]
        engine = await stack.enter_async_context(OpenAIEngine(urls(servers), weight_version=1, in_flight=policy))
        requests = [ask((number,), max_tokens=40) for number in range(6)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        version = 1
        for step, number, waits in steps:
            if waits:
                await anyio.sleep(0.005)
            if step == "publish":
                version += 1
                await engine.publish_weights(f"/weights/v{version}", version)
            elif step == "abort":
                engine.abort(requests[number])
            elif step == "cancel":
                tasks[number].cancel()
            elif step == "pause":
                await engine.pause()
                await engine.resume()
            elif step == "ask":
                requests.append(ask((number,), max_tokens=10))
                tasks.append(asyncio.create_task(engine.generate(requests[-1])))
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for request, generation in zip(requests, done, strict=True):
            if isinstance(generation, asyncio.CancelledError):
                continue
            assert isinstance(generation, Generation)
            check_steps(generation, request.prompt_ids[0])
            if generation.finish_reason != "abort":
                assert len(generation.token_ids) == request.params.max_tokens
        assert engine.in_flight_count == 0


# Servers -----------------------------------------------------------------------------------------------


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


# What is given -----------------------------------------------------------------------------------------


async def test_a_checkpoint_that_does_not_fit_is_never_shown_to_a_server(server: HttpServer, tmp_path: Path) -> None:
    server.root = str(write_checkpoint(tmp_path / "v1", a=[2], b=[3]))
    bad = {
        "lacks 'b'": write_checkpoint(tmp_path / "lacks", a=[2]),
        "'c', which the model doesn't have": write_checkpoint(tmp_path / "unknown", a=[2], b=[3], c=[1]),
        "'b' of version 2 has shape": write_checkpoint(tmp_path / "shape", a=[2], b=[4]),
    }
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        for complaint, folder in bad.items():
            with pytest.raises(EngineError, match=f"{complaint}.*; version 1 stays"):
                await engine.publish_weights(folder, 2)
        await engine.publish_weights(write_checkpoint(tmp_path / "v2", a=[2], b=[3]), 2)

    assert [call for call in server.calls if "rpc" in call] == ["POST /collective_rpc"]
    assert server.weights == str(tmp_path / "v2")


async def test_the_first_checkpoint_that_was_taken_is_the_measure_of_the_next(
    server: HttpServer, tmp_path: Path
) -> None:
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        await engine.publish_weights(write_checkpoint(tmp_path / "v2", a=[2]), 2)
        with pytest.raises(EngineError, match="version 2 stays"):
            await engine.publish_weights(write_checkpoint(tmp_path / "v3", b=[2]), 3)


async def test_what_is_neither_tensors_nor_a_folder_is_refused(server: HttpServer) -> None:
    async with OpenAIEngine(server.url) as engine:
        weights: Any = [1]
        with pytest.raises(
            EngineError, match="version 1 is list; give tensors by name, or a checkpoint's folder; version"
        ):
            await engine.publish_weights(weights, 1)


async def test_live_weights_need_a_folder(server: HttpServer) -> None:
    async with OpenAIEngine(server.url) as engine:
        with pytest.raises(
            EngineError, match=r"version 1 is tensors, and servers read folders; .*weights_dir.*; version 0"
        ):
            await engine.publish_weights({"a": 1}, 1)


async def test_live_weights_become_a_folder_that_goes_when_the_next_is_there_or_the_engine_ends(
    server: HttpServer, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from groupstate.engines.checkpoint import read_checkpoint

    folders = []
    server.script = lambda prompt_ids, weights: [1] * 60
    async with OpenAIEngine(server.url, weights_dir=tmp_path / "weights") as engine:
        for version in (1, 2):
            weights = {"a": torch.full((2, 3), float(version)), "b": torch.zeros(4, dtype=torch.bfloat16)}
            await engine.publish_weights(weights, version)
            folders.append(server.weights)
            headers = read_checkpoint(server.weights).headers
            assert {name: (header.dtype, header.shape) for name, header in headers.items()} == {
                "a": ("F32", (2, 3)),
                "b": ("BF16", (4,)),
            }
        with pytest.raises(EngineError, match=r"'a' of version 3 .*shape|lacks 'b'"):
            await engine.publish_weights({"a": torch.zeros(3)}, 3)
        with pytest.raises(EngineError, match="not finite"):
            await engine.publish_weights({"a": torch.full((2, 3), torch.nan), "b": torch.zeros(4)}, 3)
        assert os.listdir(tmp_path / "weights") == [Path(folders[1]).name]

    assert os.listdir(tmp_path / "weights") == []


async def test_a_checkpoint_that_was_published_as_a_folder_stays_when_the_engine_ends(
    server: HttpServer, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "step 1", a=[2])
    async with OpenAIEngine(server.url) as engine:
        await engine.publish_weights(folder, 1)

    assert (folder / "model.safetensors").exists()


async def test_the_folder_of_weights_in_force_stays_whoever_was_cancelled_meanwhile(
    server: HttpServer, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    async with OpenAIEngine(server.url, weights_dir=tmp_path) as engine:
        for version in range(1, 40):
            publishing = asyncio.create_task(engine.publish_weights({"a": torch.full((2,), float(version))}, version))
            await anyio.sleep(version * 0.0002)
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

            assert len(os.listdir(tmp_path)) <= 1
            assert (server.weights == "as started") == (engine.weight_version == 0)
            if engine.weight_version:
                assert os.listdir(tmp_path) == [Path(server.weights).name]
        assert engine.weight_version > 0


@pytest.mark.parametrize("weights", [{"a": 1}, {"a": object()}])
async def test_what_is_no_tensor_is_named(server: HttpServer, tmp_path: Path, weights: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    async with OpenAIEngine(server.url, weights_dir=tmp_path) as engine:
        with pytest.raises(EngineError, match=r"'a' of version 1 is (int|object); it must be a tensor"):
            await engine.publish_weights(weights, 1)

    assert os.listdir(tmp_path) == []


# States ------------------------------------------------------------------------------------------------


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
