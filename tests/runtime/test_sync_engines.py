"""Engines that a blocking run makes on its event loop, and closes once it is over."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import groupstate.sync
from groupstate import SamplingParams, SessionContext, Trajectory
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import BadSettings, EngineError
from tests.engines.http_server import HttpServer


class Watched(ScriptedEngine):
    """Belongs to the event loop that it was started in, as vLLM does, and says when it was closed."""

    def __init__(self) -> None:
        super().__init__(lambda prompt_ids: [7, 8])
        self.loop = asyncio.get_running_loop()
        self.closed: list[str] = []
        self.run: groupstate.sync.Run | None = None

    @classmethod
    async def start(cls) -> "Watched":
        await asyncio.sleep(0)
        return cls()

    async def aclose(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        await super().aclose()
        self.closed.append("after the run" if self.run is not None and self.run.book.closed else "before it")


class Entered(Watched):
    async def __aenter__(self) -> "Entered":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


@contextlib.asynccontextmanager
async def around() -> AsyncIterator[Watched]:
    engine = await Watched.start()
    try:
        yield engine
    finally:
        await engine.aclose()


async def session(ctx: SessionContext) -> Trajectory:
    return ctx.trajectory([1], await ctx.generate([1]), reward=float(ctx.session))


@pytest.mark.parametrize(
    "make",
    [Watched.start, lambda: Watched(), Entered.start, around],
    ids=["async", "plain", "entered by itself", "a context manager around it"],
)
def test_an_engine_that_is_made_in_the_run_is_closed_once_after_it(make: Any) -> None:
    with groupstate.sync.open_run(source=["p"], session=session, engine=make, group_size=2) as run:
        engine = run.engine
        assert isinstance(engine, Watched)
        engine.run = run
        assert [list(row.trajectory.response_ids) for row in run.sample(1).rows] == [[7, 8]] * 2
        assert engine.closed == []

    assert engine.closed == ["after the run"]


def test_an_engine_that_is_given_stays_open() -> None:
    engine = ScriptedEngine([[1]])
    with groupstate.sync.open_run(engine=engine) as run:
        assert run.engine is engine

    asyncio.run(engine.pause())


def test_an_engine_that_was_made_is_closed_where_the_run_cannot_be_opened() -> None:
    made: list[Watched] = []

    async def make() -> Watched:
        made.append(await Watched.start())
        return made[0]

    with pytest.raises(BadSettings, match="group_size"), groupstate.sync.open_run(engine=make, group_size=0):
        pass

    assert made[0].closed == ["before it"]


def test_what_making_an_engine_raises_arrives_as_itself_and_opens_no_run(tmp_path: Any) -> None:
    async def fail() -> None:
        raise EngineError("no memory")

    before = threading.active_count()
    with pytest.raises(EngineError, match=r"^no memory$"), groupstate.sync.open_run(tmp_path / "run", engine=fail):
        pass

    assert not (tmp_path / "run").exists()
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (
            lambda: None,
            "engine '<lambda>' gave None, which has no weight_version, no tokenizer, no generate, no aclose",
        ),
        (lambda model: None, r"engine '<lambda>' can't be called with \(\), since it takes \(model\)"),
        (ScriptedEngine, "engine is the class ScriptedEngine; it must be an object of it"),
        ("vllm", "engine is 'vllm'; it must be an engine"),
    ],
)
def test_what_makes_no_engine_is_refused(engine: Any, text: str) -> None:
    with pytest.raises(BadSettings, match=text), groupstate.sync.open_run(engine=engine):
        pass


def test_a_torch_engine_is_made_and_closed_by_a_blocking_run() -> None:
    pytest.importorskip("torch")
    from groupstate.engines.torch import TorchEngine
    from groupstate.engines.transformer import TransformerConfig

    config = TransformerConfig(vocabulary_size=9, context=8, width=8, layers=1, heads=1)
    params = SamplingParams(max_tokens=2)
    options = {"source": ["p"], "session": session, "params": params, "group_size": 2}
    before = threading.active_count()
    with groupstate.sync.open_run(engine=lambda: TorchEngine(config), **options) as run:
        assert len(run.sample(1).rows) == 2

    assert threading.active_count() <= before, "the engine's thread has ended"


def test_the_servers_of_an_openai_engine_are_checked_before_a_blocking_run_is_opened() -> None:
    pytest.importorskip("httpx")
    from groupstate.engines.openai import OpenAIEngine

    @contextlib.asynccontextmanager
    async def served() -> AsyncIterator[OpenAIEngine]:
        async with HttpServer() as server, OpenAIEngine(server.url) as engine:
            yield engine

    params = SamplingParams(max_tokens=2)
    options = {"source": ["p"], "session": session, "params": params, "group_size": 2}
    with groupstate.sync.open_run(engine=served, **options) as run:
        assert len(run.sample(1).rows) == 2
    with (
        pytest.raises(EngineError, match="no server answers at http://localhost:9"),
        groupstate.sync.open_run(engine=lambda: OpenAIEngine("http://localhost:9"), **options),
    ):
        pass
