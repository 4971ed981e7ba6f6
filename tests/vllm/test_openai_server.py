"""The engine `openai` against vLLM's own server: the contract, and what only a real server shows."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import pytest_asyncio

from groupstate import Rules, open_run
from groupstate.engines.openai import OpenAIEngine
from groupstate.engines.port import Generation, InFlight, Request, SamplingParams
from groupstate.errors import EngineDied, EngineError, EngineUnavailable, RequestRefused
from groupstate.runtime.sources import as_source
from groupstate.testing.contracts import EngineContract
from groupstate.testing.contracts.engine_kind import Make, check, closing
from tests.vllm import tiny_model
from tests.vllm.test_soak import GROWTH_MAX_BYTES, Soak
from tests.vllm.tiny_model import CONTEXT, VOCABULARY

START_S = 180.0
"""How long a server may take to start on a busy machine; 17 s are usual."""

GONE_S = 1.0
"""How long it may take to notice that nobody reads."""


class Server:
    """A process of vLLM's server, which is killed and started again at the same place."""

    def __init__(self, model: Path, log: Path) -> None:
        self.model = model
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "64", "--enforce-eager"]
        command += ["--max-num-batched-tokens", str(64 * CONTEXT), "--kv-cache-memory-bytes", str(128 << 20)]
        command += ["--seed", "0"]
        with self.log.open("ab") as log:
            environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
            # A group of its own, which is killed as one.
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait_up(self) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"no server after {START_S} s: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    async def says(self, path: str) -> Any:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{self.url}{path}")).json()

    async def running(self) -> float:
        """Requests that it works for, by its own count."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.url}/metrics")).text
        return sum(
            float(value) for value in re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (.*)$", text, re.M)
        )


@pytest.fixture(scope="session")
def process(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(models / "v0", tmp_path_factory.mktemp("server") / "log")
    yield server
    server.kill()


@pytest_asyncio.fixture(loop_scope="session")
async def server(process: Server, models: Path) -> AsyncIterator[Server]:
    """The session's server, which has the weights of `v0` and generates. A test may leave it dead."""
    if process.process is None:
        process.spawn()
        await anyio.to_thread.run_sync(process.wait_up)
    yield process
    if process.process is None:
        return
    async with OpenAIEngine(process.url) as engine:
        await engine.publish_weights(models / "v0", 0)
    async with httpx.AsyncClient() as client:
        await client.post(f"{process.url}/update_weight_version", json={"new_version": "default"})


class OpenAIServer:
    long = 1500
    death = "no server was reachable"
    sets_slots = True

    def __init__(self, server: Server, scratch: Path) -> None:
        self.server = server
        self.scratch = scratch

    def make(self, **options: Any) -> OpenAIEngine:
        return OpenAIEngine(self.server.url, weights_dir=self.scratch, **options)

    async def make_mortal(self, **options: Any) -> OpenAIEngine:
        raise NotImplementedError

    def weights(self) -> dict[str, Any]:
        return dict(tiny_model.state_dict(seed=1))

    def kill(self, engine: OpenAIEngine) -> None:
        raise NotImplementedError

    def token_count(self, engine: OpenAIEngine, request: Request) -> int:
        row = engine._rows.get(request.id)
        return 0 if row is None else len(row.token_ids) + (0 if row.piece is None else len(row.piece.token_ids))

    def is_publishing(self, engine: OpenAIEngine) -> bool:
        return bool(engine._publishing_count)

    async def requests_left(self, engine: OpenAIEngine) -> int:
        with anyio.move_on_after(GONE_S):
            await until(self.server, lambda running: running == 0)
        return int(await self.server.running())


@pytest.fixture
def kind(server: Server, tmp_path: Path) -> OpenAIServer:
    return OpenAIServer(server, tmp_path)


class TestServer(EngineContract):
    patience_s = 600.0

    # It stands at the end of this file, since it takes the server along.
    test_an_engine_that_dies_fails_everything_at_once_and_for_good = None  # type: ignore[assignment]

    @pytest_asyncio.fixture(loop_scope="session")
    async def make(self, kind: OpenAIServer) -> AsyncIterator[Make]:
        # As the contract has it, but on the loop of the tests.
        async with closing(kind.make) as make_one:
            yield make_one


def ask(prompt_ids: tuple[int, ...] = (3, 10, 17), **params: Any) -> Request:
    return Request(prompt_ids, SamplingParams(**{"max_tokens": 16, "extra": {"ignore_eos": True}, **params}))


async def until(server: Server, wanted: Callable[[float], bool]) -> None:
    """Until the server works for so many requests."""
    with anyio.fail_after(60):
        # It has no other way to say so.
        while not wanted(await server.running()):  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def greedy(engine: OpenAIEngine) -> tuple[int, ...]:
    return (await engine.generate(ask(temperature=0.0))).token_ids


async def tokens_of(engine: OpenAIEngine, request: Request, count: int = 5) -> None:
    with anyio.fail_after(60):
        while True:
            row = engine._rows.get(request.id)
            if row is not None and row.piece is not None and len(row.piece.token_ids) >= count:
                return
            await anyio.sleep(0.002)


async def test_what_a_server_says_of_itself_is_used(server: Server) -> None:
    async with OpenAIEngine(f"{server.url}/v1") as engine:
        assert engine.context == CONTEXT
        with pytest.raises(RequestRefused, match=f"the context of {CONTEXT}"):
            await engine.generate(ask((3,) * CONTEXT))
        with pytest.raises(RequestRefused, match=f"Token id {VOCABULARY} is out of vocabulary"):
            await engine.generate(ask((3, VOCABULARY)))

        check(await engine.generate(ask()))


async def test_several_tokens_may_come_in_one_event(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        plain = await engine.generate(ask(max_tokens=50, seed=3))
        few = await engine.generate(ask(max_tokens=50, seed=3, extra={"ignore_eos": True, "stream_interval": 8}))

    check(few)
    assert few.token_ids == plain.token_ids
    assert few.log_probs == pytest.approx(plain.log_probs, abs=1e-4)


async def test_log_probabilities_do_not_hang_on_temperature(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        hot, cold = [await engine.generate(ask(max_tokens=1, temperature=t, seed=1)) for t in (1.0, 0.0)]
        again = [await engine.generate(ask(max_tokens=1, temperature=2.0, seed=seed)) for seed in range(30)]

    known = {one.token_ids: one.log_probs[0] for one in (hot, cold)}
    for one in again:
        assert one.log_probs[0] == pytest.approx(known.setdefault(one.token_ids, one.log_probs[0]), abs=1e-4)
    assert max(known.values()) == pytest.approx(cold.log_probs[0], abs=1e-4)


async def test_a_cancelled_request_is_gone_from_the_server_within_a_second(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        requests = [ask(max_tokens=1900) for _ in range(8)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        for request in requests:
            await tokens_of(engine, request)
        assert await server.running() == 8
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await anyio.sleep(GONE_S)

        assert await server.running() == 0
        assert engine.in_flight_count == 0


async def test_published_weights_make_the_tokens_that_follow(server: Server, models: Path) -> None:
    async with OpenAIEngine(server.url, weight_version=4) as engine:
        before = await greedy(engine)
        requests = [ask(max_tokens=1500, seed=number) for number in range(4)]
        under_way = [asyncio.create_task(engine.generate(request)) for request in requests]
        for request in requests:
            await tokens_of(engine, request)
        await engine.publish_weights(models / "v1", 5)
        generations = [await task for task in under_way]
        after = await greedy(engine)
        version = (await server.says("/weight_info"))["weight_version"]
        alone = [await engine.generate(_rest(request, one)) for request, one in zip(requests, generations, strict=True)]

    assert before != after
    assert version == "5"
    for generation, rest in zip(generations, alone, strict=True):
        check(generation)
        assert [span.weight_version for span in generation.spans] == [4, 5]
        assert len(generation.token_ids) == 1500
        # What the new weights say after the same beginning: the log-probability of the first token that they made.
        start = generation.spans[1].start
        if rest.token_ids[0] == generation.token_ids[start]:
            assert generation.log_probs[start] == pytest.approx(rest.log_probs[0], abs=1e-3)
    assert any(
        rest.token_ids[0] == one.token_ids[one.spans[1].start] for one, rest in zip(generations, alone, strict=True)
    )


def _rest(request: Request, generation: Generation) -> Request:
    """The second piece of a request, asked for by itself."""
    from groupstate.engines.http.rows import Row

    row = Row(request, tuple(request.prompt_ids), True)
    row.pieces_kept = 1
    start = generation.spans[1].start
    return ask((*request.prompt_ids, *generation.token_ids[:start]), max_tokens=1, seed=row.seed)


async def test_live_weights_are_those_of_their_file(server: Server, models: Path, tmp_path: Path) -> None:
    async with OpenAIEngine(server.url, weights_dir=tmp_path) as engine:
        await engine.publish_weights(models / "v1", 1)
        from_folder = await greedy(engine)
        await engine.publish_weights(models / "v0", 2)
        assert await greedy(engine) != from_folder
        await engine.publish_weights(tiny_model.state_dict(seed=1), 3)

        assert await greedy(engine) == from_folder


async def test_a_cache_of_old_weights_is_not_used(server: Server, models: Path) -> None:
    async with OpenAIEngine(server.url) as engine:
        long = ask(tuple(3 + number % 200 for number in range(600)), temperature=0.0)
        before = await engine.generate(long)
        await engine.publish_weights(models / "v1", 1)
        after = await engine.generate(Request(long.prompt_ids, long.params))
        await engine.publish_weights(models / "v0", 2)
        back = await engine.generate(Request(long.prompt_ids, long.params))

    assert before.token_ids != after.token_ids
    assert before.token_ids == back.token_ids
    assert before.log_probs == pytest.approx(back.log_probs, abs=1e-4)


async def test_weights_that_break_a_server_are_not_shown_to_it(server: Server, tmp_path: Path) -> None:
    bad = dict(tiny_model.state_dict(seed=1))
    bad["nonsense"] = bad["model.norm.weight"]
    async with OpenAIEngine(server.url, weights_dir=tmp_path) as engine:
        before = await greedy(engine)
        with pytest.raises(EngineError, match=r"nonsense.*; version 0 stays"):
            await engine.publish_weights({**bad, "nonsense": bad["lm_head.weight"].clone()}, 1)

        assert await greedy(engine) == before


async def test_a_folder_that_only_the_server_could_see_and_does_not_leaves_the_old_weights(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        before = await greedy(engine)
        with pytest.raises(EngineError, match=r"no server took the weights .*; version 0 stays"):
            await engine.publish_weights("/nowhere/at/all", 1)

        assert await greedy(engine) == before


async def paused_under_way(engine: OpenAIEngine, **params: Any) -> tuple[Request, "asyncio.Task[Generation]"]:
    """A request in the middle of its answer, in an engine that was paused. On a busy machine the server may have said
    all before the pause comes, and is asked again."""
    for _ in range(10):
        request = ask(max_tokens=1500, **params)
        under_way = asyncio.create_task(engine.generate(request))
        await tokens_of(engine, request)
        await engine.pause()
        if request.id in engine._rows:
            return request, under_way
        await engine.resume()
        await under_way
    raise AssertionError("the server is always faster than the pause")


async def test_a_seed_survives_a_pause(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        calm = await engine.generate(ask(max_tokens=1500, seed=5))
        request, under_way = await paused_under_way(engine, seed=5)
        await anyio.sleep(0.1)
        piece = engine._rows[request.id].piece
        assert piece is not None
        count = len(piece.token_ids)
        await anyio.sleep(0.5)
        assert len(piece.token_ids) == count < 1500
        await engine.resume()

        assert (await under_way).token_ids == calm.token_ids


async def test_turns_of_colocated_training(server: Server, models: Path) -> None:
    async with OpenAIEngine(server.url) as engine:
        _, under_way = await paused_under_way(engine)
        for version in (1, 2):
            await engine.pause()
            await engine.sleep()
            assert await server.says("/is_sleeping") == {"is_sleeping": True}
            await engine.publish_weights(models / f"v{version % 2}", version)
            await engine.wake()
            await engine.resume()
        generation = await under_way

    check(generation)
    assert len(generation.token_ids) == 1500
    assert generation.spans[0].weight_version == 0
    assert generation.spans[-1].weight_version == 2


@pytest.mark.parametrize("dialect", ["text", "chat"])
async def test_the_server_answers_texts_too(server: Server, dialect: Any) -> None:
    async with OpenAIEngine(server.url, dialect=dialect) as engine:
        generation = await engine.generate(Request((), SamplingParams(max_tokens=40), text="hello"))

    assert generation.text
    assert (generation.token_ids, generation.finish_reason) == ((), "length")


@pytest.mark.parametrize("in_flight", ["keep", "continue", "restart"])
async def test_a_hundred_sessions_leave_nothing_in_the_server(
    in_flight: InFlight, server: Server, tmp_path: Path
) -> None:
    async with OpenAIEngine(server.url, in_flight=in_flight, weights_dir=tmp_path) as engine:
        soak = Soak(engine, seed=1)  # type: ignore[arg-type]
        with anyio.fail_after(150):
            await soak.run(100)

        assert sum(soak.ends.values()) == 100
        assert soak.publications > 0
        assert engine.in_flight_count == 0
        await until(server, lambda running: running == 0)


@pytest.mark.long
async def test_two_thousand_sessions_leave_nothing_in_the_server_and_little_here(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with OpenAIEngine(server.url, weights_dir=tmp_path) as engine:
        soak = Soak(engine, seed=2)  # type: ignore[arg-type]
        memory = []
        for _ in range(10):
            await soak.run(200)
            memory.append(own_memory_bytes())

            assert engine.in_flight_count == 0
            await until(server, lambda running: running == 0)
        with capsys.disabled():
            print(
                f"\n{dict(soak.ends)}, {soak.publications} publications, memory {[size >> 20 for size in memory]} MiB"
            )

    assert sum(soak.ends.values()) == 2000
    assert max(memory[5:]) - max(memory[:5]) < GROWTH_MAX_BYTES
    assert len(os.listdir(tmp_path)) <= 1


def own_memory_bytes() -> int:
    """Of this process; the server's is its own matter."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


async def test_a_run_outlives_its_server(server: Server, models: Path) -> None:
    """The server is killed under sessions; they fail at once, are tried again when it is back, and the batch comes."""
    failed_at: list[float] = []
    all_failed = anyio.Event()

    async def session(ctx: Any) -> Any:
        try:
            generation = await ctx.generate([3, 10, ctx.session + 4], max_tokens=1500)
        except EngineUnavailable:
            failed_at.append(time.monotonic())
            if len(failed_at) == 8:
                all_failed.set()
            raise
        return ctx.trajectory([3, 10, ctx.session + 4], generation, reward=float(ctx.session))

    async with OpenAIEngine(server.url, reconnect_s=START_S) as engine:
        await engine.publish_weights(models / "v1", 1)
        after_publication = await greedy(engine)
        async with open_run(
            rules=Rules(attempts_max=3, retry_delay_s=0.1),
            source=as_source(["first", "second"]),
            session=session,
            engine=engine,
            params=SamplingParams(extra={"ignore_eos": True}),
            group_size=4,
        ) as run:
            await run.publish_weights(1)
            sampling = asyncio.create_task(run.sample(2))
            await until(server, lambda running: running == 8)
            killed_s = time.monotonic()
            await anyio.to_thread.run_sync(server.kill)
            with anyio.fail_after(10):
                await all_failed.wait()
            assert max(failed_at) - killed_s < 2.0
            server.spawn()
            with anyio.fail_after(START_S):
                batch = await sampling

        rows = [row for group in batch.groups for row in group.rows()]
        assert len(rows) == 8
        assert {span.weight_version for row in rows for span in row.trajectory.spans} == {1}
        assert all(len(row.trajectory.response_ids) == 1500 for row in rows)
        assert await greedy(engine) == after_publication


async def test_an_engine_that_dies_fails_everything_at_once_and_for_good(server: Server) -> None:
    """In place of the contract's: what is under way fails with its connection, the engine by the server's absence."""
    async with OpenAIEngine(server.url, reconnect_s=0.5, slots_max=2) as engine:
        requests = [ask(max_tokens=1900) for _ in range(2)]
        under_way = [asyncio.create_task(engine.generate(request)) for request in requests]
        for request in requests:
            await tokens_of(engine, request)
        waiting = [asyncio.create_task(engine.generate(ask())) for _ in range(3)]
        await anyio.to_thread.run_sync(server.kill)
        outcomes = await asyncio.gather(*under_way, *waiting, return_exceptions=True)

    assert [type(one) for one in outcomes] == [EngineUnavailable] * 2 + [EngineDied] * 3
