"""Servers that are down, busy, slow or several: who is asked, who waits, who fails, and what is left behind."""

import asyncio
import gc
import json
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from groupstate.engines.http.client import Answer, Client, Stream
from groupstate.engines.http.routing import AFFINITIES_MAX, Replica, Router
from groupstate.engines.openai import OpenAIEngine
from groupstate.engines.port import Generation, Request, SamplingParams
from groupstate.errors import EngineDied, EngineError, EngineUnavailable
from tests.engines.http_server import Fault, HttpServer


def ask(**params: Any) -> Request:
    return Request((1, 5, 7), SamplingParams(**{"max_tokens": 4, **params}))


async def outcome(engine: OpenAIEngine, request: Request) -> Generation | Exception:
    try:
        return await engine.generate(request)
    except Exception as error:
        return error


@pytest.fixture
async def servers() -> AsyncIterator[list[HttpServer]]:
    """Two of them."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(HttpServer()) for _ in range(2)]


@pytest.fixture
def server(servers: list[HttpServer]) -> HttpServer:
    return servers[0]


def urls(servers: list[HttpServer]) -> list[str]:
    return [server.url for server in servers]


async def wait_for(condition: Any) -> None:
    """Servers are processes of others: there is nothing to wait on."""
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)


# Beginning ---------------------------------------------------------------------------------------------


async def test_a_server_that_is_not_up_is_named(servers: list[HttpServer]) -> None:
    await servers[1].stop()
    with pytest.raises(EngineError, match=f"^no server answers at {servers[1].url}: ") as caught:
        async with OpenAIEngine(urls(servers)):
            pass

    assert servers[0].url not in str(caught.value)
    await wait_for(lambda: not servers[0].connections)


async def test_a_server_without_the_model_is_named(servers: list[HttpServer]) -> None:
    servers[1].model = "other"
    with pytest.raises(
        EngineError, match=f"the server at {servers[1].url} can't be used: it has no model 'tiny'; it has"
    ):
        async with OpenAIEngine(urls(servers), model="tiny"):
            pass


async def test_servers_of_different_models_need_a_name(servers: list[HttpServer]) -> None:
    servers[1].model = "other"
    with pytest.raises(EngineError, match=r"its model is '\w+', and that of another server '\w+'; name one: model=..."):
        async with OpenAIEngine(urls(servers)):
            pass


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ((500, "{}"), "/v1/models answers 500"),
        ((200, "[]"), "/v1/models answers 200"),
        ((404, ""), "it doesn't list its models; name one: model="),
    ],
)
async def test_a_server_that_is_another_kind_is_named(
    server: HttpServer, answer: tuple[int, str], complaint: str
) -> None:
    server.refuses["/v1/models"] = answer
    with pytest.raises(EngineError, match=complaint):
        async with OpenAIEngine(server.url):
            pass


async def test_a_server_without_a_list_serves_the_model_that_is_named(server: HttpServer) -> None:
    server.refuses["/v1/models"] = (404, "")
    async with OpenAIEngine(server.url, model="tiny") as engine:
        assert len((await engine.generate(ask())).token_ids) == 4


async def test_without_a_start_the_first_request_waits_for_the_server(server: HttpServer) -> None:
    await server.stop()
    engine = OpenAIEngine(server.url, reconnect_s=10.0)
    waiting = asyncio.create_task(engine.generate(ask()))
    await anyio.sleep(0.2)
    await server.start()

    assert len((await waiting).token_ids) == 4
    await engine.aclose()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"urls": []}, "no server is given"),
        ({"urls": "localhost:8000"}, "'localhost:8000' is no URL of a server; it must be as http://host:8000"),
        ({"urls": ["http://a:1/v1", "http://a:1/"]}, "http://a:1 is given twice"),
        ({"urls": "http://a:1", "dialect": "vlm"}, "dialect is 'vlm'; it must be one of 'vllm', 'sglang', 'text'"),
        ({"urls": None}, "urls is None; it must be a URL"),
        ({"urls": {"http://a:1"}}, "urls is .*; it must be a URL, as http://host:8000, or a list"),
        ({"urls": ["http://a:1", 2]}, "a URL is 2; it must be a string"),
        *(
            ({"urls": url}, "is no URL of a server")
            for url in (
                "http://[::1",
                "http://a:99999",
                "http://a:b",
                "http://a b",
                "http://a?x=1",
                "http://a#b",
                "http://ä",
            )
        ),
        *(
            ({"urls": "http://a:1", name: value}, f"{name} is ")
            for name, values in {
                "model": (1, b"m"),
                "dialect": ({"vllm"}, None),
                "in_flight": ("", 0, "drop"),
                "weight_version": ("1", None, 1.5, True),
                "log_probs": (1, None),
                "context": (0, "x", 1.5),
                "vocabulary_size": (-1, True),
                "slots_max": (0, "x"),
                "weights_dir": (1, b"x", ""),
                "publish": ("x", 1),
                "stall_s": ("x", None, True, -1.0, float("nan")),
                "reconnect_s": ("x", -1.0),
                "api_key": (1, b"k"),
                "tokenizer": (1, "x"),
            }.items()
            for value in values
        ),
        *(({"urls": "http://a:1", "api_key": key}, "api_key can't be sent") for key in ("a\nb", "ключ", " ", "")),
        ({"urls": "http://a:1", "stall_s": 0}, "stall_s is 0; it must be above 0"),
        ({"urls": "http://a:1", "reconnect_s": float("nan")}, "reconnect_s is nan; it must be a number of seconds"),
        (
            {"urls": "http://a:1", "dialect": "text", "in_flight": "continue"},
            "knows no tokens, so in_flight='continue'",
        ),
        ({"urls": "http://a:1", "dialect": "chat", "tokenizer": object()}, "knows no tokens, so tokenizer can't be"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        OpenAIEngine(**arguments)


async def test_a_server_that_was_left_paused_and_asleep_is_roused(server: HttpServer) -> None:
    server.paused = server.asleep = True
    async with OpenAIEngine(server.url) as engine:
        assert len((await engine.generate(ask())).token_ids) == 4


# Down and busy -----------------------------------------------------------------------------------------


async def test_a_busy_server_is_asked_again(servers: list[HttpServer]) -> None:
    servers[0].faults += [Fault(503), Fault(429)]
    async with OpenAIEngine(servers[0].url) as engine:
        assert len((await engine.generate(ask())).token_ids) == 4

    assert len(servers[0].asked) == 3


async def test_another_server_is_asked_while_one_is_busy(servers: list[HttpServer]) -> None:
    servers[0].faults.append(Fault(429, headers=(("retry-after", "9"),)))
    async with OpenAIEngine(urls(servers)) as engine:
        with anyio.fail_after(5):
            assert len((await engine.generate(ask())).token_ids) == 4
        (busy,) = [view for view in engine.replicas if not view.in_rotation]

    assert (busy.url, busy.problem) == (servers[0].url, "429 a fault")
    assert len(servers[1].asked) == 1


async def test_as_long_as_a_server_asks_to_wait_is_waited(server: HttpServer) -> None:
    server.faults.append(Fault(503, headers=(("retry-after", "1"),)))
    async with OpenAIEngine(server.url) as engine:
        start_s = time.monotonic()
        await engine.generate(ask())

    assert time.monotonic() - start_s >= 1.0


async def test_a_server_that_says_nonsense_of_itself_is_asked_again(server: HttpServer) -> None:
    server.refuses["/v1/models"] = (200, '{"data": ' + "[" * 5000 + "]" * 5000 + "}")
    async with asyncio.TaskGroup() as tasks:
        engine = OpenAIEngine(server.url)
        under_way = tasks.create_task(engine.generate(ask()))
        await wait_for(lambda: server.calls)
        server.refuses.clear()
        with anyio.fail_after(5):
            assert len((await under_way).token_ids) == 4
        await engine.aclose()


async def test_a_server_that_asks_to_wait_too_long_is_not_waited_for(server: HttpServer) -> None:
    server.faults += [Fault(503, headers=(("retry-after", "25"),))] * 9
    async with OpenAIEngine(server.url, reconnect_s=0.3) as engine:
        with (
            anyio.fail_after(5),
            pytest.raises(EngineUnavailable, match=r"503 a fault, for 0.3 s now|no server is fit"),
        ):
            await engine.generate(ask())


@pytest.mark.parametrize("said", ["\u00b2", "-1", "soon", "1e3", "Fri, 31 Dec 1999 23:59:59 GMT", ""])
async def test_a_wait_that_is_no_number_of_seconds_is_passed_over(server: HttpServer, said: str) -> None:
    server.faults.append(Fault(503, headers=(("retry-after", said),)))
    async with OpenAIEngine(server.url) as engine:
        with anyio.fail_after(5):
            assert len((await engine.generate(ask())).token_ids) == 4


async def test_a_server_that_stays_busy_is_a_failure_in_the_end(server: HttpServer) -> None:
    server.faults += [Fault(503)] * 50
    async with OpenAIEngine(server.url, reconnect_s=0.3) as engine:
        with (
            anyio.fail_after(5),
            pytest.raises(EngineUnavailable, match=r"503 a fault, for 0.3 s now|no server is fit"),
        ):
            await engine.generate(ask())
        server.faults.clear()

        assert len((await engine.generate(ask())).token_ids) == 4


async def test_patience_with_a_busy_server_begins_anew_once_it_has_answered(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, reconnect_s=0.5) as engine:
        server.faults.append(Fault(503))
        server.hold(2)
        under_way = asyncio.create_task(engine.generate(ask()))
        await wait_for(lambda: any(row.piece and row.piece.token_ids for row in engine._rows.values()))
        await anyio.sleep(0.6)
        server.faults.append(Fault(503))
        await engine.publish_weights("/weights/v1", 1)
        server.let_go()

        assert len((await under_way).token_ids) == 4


async def test_a_server_that_fails_now_and_then_is_not_left_alone_for_longer_each_time(server: HttpServer) -> None:
    async with OpenAIEngine(server.url) as engine:
        start_s = time.monotonic()
        for _ in range(7):
            server.faults.append(Fault(500))
            with pytest.raises(EngineUnavailable):
                await engine.generate(ask())
            await engine.generate(ask())

    assert time.monotonic() - start_s < 6.0  # 12.7 s, if pauses added up


async def test_a_server_that_is_down_is_passed_by(servers: list[HttpServer]) -> None:
    async with OpenAIEngine(urls(servers)) as engine:
        await servers[0].stop()

        generations = await asyncio.gather(*(engine.generate(ask()) for _ in range(4)))
    assert [len(generation.token_ids) for generation in generations] == [4] * 4
    assert len(servers[1].asked) == 4


async def test_a_connection_that_fails_before_the_answer_is_tried_once_more(server: HttpServer) -> None:
    async with OpenAIEngine(server.url) as engine:
        server.faults.append(Fault(cut_before=True))
        assert len((await engine.generate(ask())).token_ids) == 4

        server.faults += [Fault(cut_before=True)] * 2
        with pytest.raises(EngineUnavailable, match=r"failed: .*after 0 tokens"):
            await engine.generate(ask())
    assert len(server.asked) == 4


async def test_a_failing_server_does_not_swallow_every_request(servers: list[HttpServer]) -> None:
    servers[0].faults += [Fault(500)] * 50
    async with OpenAIEngine(urls(servers)) as engine:
        outcomes = [await outcome(engine, ask()) for _ in range(20)]

    failed = [failure for failure in outcomes if isinstance(failure, Exception)]
    assert 1 <= len(failed) <= 5


async def test_a_server_that_dies_fails_what_is_under_way_and_keeps_what_waits(server: HttpServer) -> None:
    server.token_s = 0.01
    async with OpenAIEngine(server.url, slots_max=2, reconnect_s=20.0) as engine:
        requests = [ask(max_tokens=100) for _ in range(2)]
        under_way = [asyncio.create_task(outcome(engine, request)) for request in requests]
        await wait_for(lambda: server.running == 2)
        waiting = [asyncio.create_task(outcome(engine, ask())) for _ in range(3)]
        await anyio.lowlevel.checkpoint()
        server.die()
        with anyio.fail_after(2):
            failures = [await task for task in under_way]
        await anyio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        await server.start()

        answers = [await task for task in waiting]
    assert [type(failure) for failure in failures] == [EngineUnavailable] * 2
    assert [len(answer.token_ids) for answer in answers if isinstance(answer, Generation)] == [4] * 3


async def test_a_server_that_goes_and_comes_back_is_told_once_each(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with OpenAIEngine(server.url) as engine:
        await server.stop()
        waiting = asyncio.create_task(engine.generate(ask()))
        await anyio.sleep(0.8)  # It is asked several times meanwhile.
        await server.start()
        await waiting

    gone, back = (record.getMessage() for record in caplog.records)
    assert gone.startswith(f"event='a server is out of use' url='{server.url}' problem=")
    assert "servers_left=0" in gone
    assert back.startswith(f"event='a server is in use again' url='{server.url}'")


async def test_a_server_that_is_busy_is_nothing_to_warn_of(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults.append(Fault(429))
    async with OpenAIEngine(server.url) as engine:
        await engine.generate(ask())

    assert caplog.records == []


async def test_an_engine_whose_servers_stay_away_dies_for_everybody_at_once(servers: list[HttpServer]) -> None:
    engine = OpenAIEngine(urls(servers), reconnect_s=0.5)
    await engine.start()
    for server in servers:
        await server.stop()
    start_s = time.monotonic()
    outcomes = await asyncio.gather(*(outcome(engine, ask()) for _ in range(5)))
    took_s = time.monotonic() - start_s

    for died in outcomes:
        assert isinstance(died, EngineDied)
        assert all(server.url in str(died) for server in servers)
    assert 0.4 <= took_s < 3.0
    with pytest.raises(EngineDied, match=r"no server was reachable for 0.5 s"):
        await engine.publish_weights("/weights", 1)
    await engine.aclose()


async def test_patience_begins_anew_with_every_time_that_servers_are_down(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, reconnect_s=1.5) as engine:
        await anyio.sleep(1.6)
        await server.stop()
        waiting = asyncio.create_task(engine.generate(ask()))
        await anyio.sleep(0.3)
        await server.start()

        assert len((await waiting).token_ids) == 4


async def test_servers_that_answer_but_do_not_fit_fail_the_requests_and_not_the_engine(server: HttpServer) -> None:
    async with OpenAIEngine(server.url, reconnect_s=0.3) as engine:
        server.refuses["/v1/models"] = (503, "loading")
        server.faults.append(Fault(500))
        assert isinstance(await outcome(engine, ask()), EngineUnavailable)
        with anyio.fail_after(5), pytest.raises(EngineUnavailable, match=r"no server is fit to serve: .*503 loading"):
            await engine.generate(ask())
        del server.refuses["/v1/models"]

        assert len((await engine.generate(ask())).token_ids) == 4


async def test_a_fault_of_the_caretaker_ends_the_engine_instead_of_hanging_it(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with OpenAIEngine(server.url) as engine:

        async def broken(replica: Replica) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(engine._fleet, "_meet", broken)
        server.faults.append(Fault(500))
        await outcome(engine, ask())

        with anyio.fail_after(5), pytest.raises(EngineDied, match="failed: ZeroDivisionError: a bug"):
            await engine.generate(ask())


# Several -----------------------------------------------------------------------------------------------


async def test_the_least_loaded_server_is_asked(servers: list[HttpServer]) -> None:
    for server in servers:
        server.token_s = 0.01
    async with OpenAIEngine(urls(servers)) as engine:
        await asyncio.gather(*(engine.generate(ask(max_tokens=20)) for _ in range(6)))

    assert [server.running_max for server in servers] == [3, 3]


async def test_requests_beyond_the_slots_wait_here(servers: list[HttpServer]) -> None:
    for server in servers:
        server.token_s = 0.002
    async with OpenAIEngine(urls(servers), slots_max=2) as engine:
        await asyncio.gather(*(engine.generate(ask()) for _ in range(20)))

    assert [server.running_max for server in servers] == [2, 2]


async def test_a_session_stays_with_its_server(servers: list[HttpServer]) -> None:
    async with OpenAIEngine(urls(servers)) as engine:

        async def session(name: str) -> None:
            for turn in range(4):
                await engine.generate(Request((int(name), turn), SamplingParams(max_tokens=3), affinity=name))

        await asyncio.gather(*(session(str(number)) for number in range(6)))

    homes = [{asked["prompt"][0] for asked in server.asked} for server in servers]
    assert homes[0] & homes[1] == set()
    assert [len(home) for home in homes] == [3, 3]


async def test_a_session_moves_where_its_server_is_down(servers: list[HttpServer]) -> None:
    async with OpenAIEngine(urls(servers)) as engine:

        def turn() -> Request:
            return Request((1,), SamplingParams(max_tokens=3), affinity="s")

        await engine.generate(turn())
        (home,) = [server for server in servers if server.asked]
        (other,) = [server for server in servers if not server.asked]
        await home.stop()
        await engine.generate(turn())
        await home.start()
        await wait_for(lambda: all(view.in_rotation for view in engine.replicas))
        await engine.generate(turn())

    assert len(other.asked) == 2


async def test_sessions_are_not_remembered_for_ever() -> None:
    replicas = [Replica(f"http://{number}", Client("http://none", None)) for number in range(2)]
    router = Router(replicas, None, lambda: None)
    for replica in replicas:
        router.enter(replica)
    for number in range(AFFINITIES_MAX + 5):
        router.release(await router.acquire(str(number)))

    assert len(router._affinities) == AFFINITIES_MAX
    assert "4" not in router._affinities


async def test_a_place_that_is_handed_to_one_who_has_gone_is_given_on() -> None:
    (replica,) = replicas = [Replica("http://a", Client("http://none", None))]
    router = Router(replicas, 1, lambda: None)
    router.enter(replica)
    await router.acquire("")
    gone, next_one = (asyncio.create_task(router.acquire("")) for _ in range(2))
    await anyio.lowlevel.checkpoint()
    router.release(replica)
    gone.cancel()

    assert await next_one is replica
    assert replica.count == 1


# What is left behind -----------------------------------------------------------------------------------


async def test_a_cancelled_request_is_gone_from_the_server_at_once(server: HttpServer) -> None:
    server.token_s = 0.005
    async with OpenAIEngine(server.url) as engine:
        under_way = [asyncio.create_task(engine.generate(ask(max_tokens=1000))) for _ in range(8)]
        await wait_for(lambda: server.running == 8)
        for task in under_way:
            task.cancel()
        await asyncio.wait(under_way)
        assert engine.in_flight_count == 0

        with anyio.fail_after(1):
            while server.running:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        assert len((await engine.generate(ask())).token_ids) == 4
    await wait_for(lambda: not server.connections)


async def test_a_request_that_is_cancelled_once_more_while_its_stream_closes_closes_it_all_the_same(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    server.token_s = 0.005
    async with OpenAIEngine(server.url) as engine:
        client = engine._fleet.replicas[0].client
        stream = client.stream

        @asynccontextmanager
        async def slow_to_close(path: str, body: bytes) -> AsyncIterator[Stream]:
            async with AsyncExitStack() as stack:
                try:
                    yield await stack.enter_async_context(stream(path, body))
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(0.2)
                    closed.append(path)

        monkeypatch.setattr(client, "stream", slow_to_close)
        under_way = asyncio.create_task(engine.generate(ask(max_tokens=1000)))
        await wait_for(lambda: server.running)
        for _ in range(3):
            under_way.cancel()
            await anyio.sleep(0.02)
        with pytest.raises(asyncio.CancelledError):
            await under_way

        assert closed == ["/v1/completions"]
        assert engine.replicas[0].requests == 0


async def test_no_connection_leaks_however_requests_end(server: HttpServer) -> None:
    server.token_s = 0.001
    async with OpenAIEngine(server.url, stall_s=5.0) as engine:
        for round_ in range(6):
            requests = [ask(max_tokens=40) for _ in range(8)]
            server.faults += [Fault(500), Fault(cut_after=3), Fault(400)]
            tasks = [asyncio.create_task(outcome(engine, request)) for request in requests]
            await anyio.sleep(0.005 * round_)
            engine.abort(requests[-1])
            tasks[-2].cancel()
            await asyncio.wait(tasks)
            server.faults.clear()
        pool = engine._fleet.replicas[0].client._http._transport._pool  # type: ignore[attr-defined]

        assert engine.in_flight_count == 0
        await wait_for(lambda: not server.running and all(view.in_rotation for view in engine.replicas))
        assert all(connection.is_idle() or connection.is_closed() for connection in pool.connections)
    await wait_for(lambda: not server.connections)


async def test_answers_are_read_from_connections_that_are_kept(server: HttpServer) -> None:
    async with OpenAIEngine(server.url) as engine:
        for _ in range(5):
            await engine.generate(ask())

        assert len(server.connections) == 1


async def test_an_engine_goes_on_in_another_loop_once_its_own_has_ended(server: HttpServer) -> None:
    async def answers(engine: OpenAIEngine) -> list[int]:
        generations = await asyncio.gather(*(engine.generate(ask()) for _ in range(8)))
        return [len(generation.token_ids) for generation in generations]

    async def of_three_loops() -> list[list[int]]:
        engine = OpenAIEngine(server.url)
        try:
            return [await asyncio.to_thread(asyncio.run, answers(engine)) for _ in range(3)]
        finally:
            await engine.aclose()

    with warnings.catch_warnings():
        # A loop that has ended can't close its connections; they go with what held them.
        warnings.simplefilter("ignore", ResourceWarning)
        lengths = await of_three_loops()
        gc.collect()

    assert lengths == [[4] * 8] * 3


async def test_views_tell_what_is_wrong(servers: list[HttpServer]) -> None:
    async with OpenAIEngine(urls(servers), weight_version=3) as engine:
        await servers[1].stop()
        await asyncio.gather(*(engine.generate(ask()) for _ in range(3)))
        first, second = engine.replicas

    assert (first.in_rotation, first.weight_version, first.problem, first.requests) == (True, 3, "", 0)
    assert not second.in_rotation
    assert "connection" in second.problem.lower()


def test_errors_are_read_from_bodies_of_all_kinds() -> None:
    bodies = [
        {"error": {"message": "a  b\nc"}},
        {"detail": "a b c"},
        {"message": "a b c"},
        {"error": "a b c"},
        "a b c",
    ]
    texts = {Answer(500, json.dumps(body).encode() if body != "a b c" else b"a b c").words for body in bodies}

    assert Counter(texts) == {"500 a b c": 1}
    assert len(Answer(500, b"x" * 10_000).words) < 600
