"""New weights over HTTP while requests are under way: which tokens came from which, and what goes on or begins anew."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
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
from groupstate.errors import EngineDied
from tests.engines.http_server import Fault, HttpServer, stepping
from tests.engines.stepping import ask, begun, check_steps, tokens_of, urls, wait_for


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
