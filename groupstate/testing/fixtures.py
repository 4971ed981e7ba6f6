"""A pytest plugin: virtual time and written-down engines for tests of your own, beside pytest-asyncio.

    # conftest.py beside pytest.ini or pyproject.toml
    pytest_plugins = ["groupstate.testing.fixtures"]

    # a test
    async def test_an_hour_passes(virtual_loop):
        await asyncio.sleep(3600)
        assert virtual_loop.now_s == 3600

| what | |
| --- | --- |
| mark `virtual_time` | test and async fixtures run on a `VirtualLoop`: waiting takes no time, a deadlock is an error |
| `virtual_loop` | the same for whoever asks for it, and the loop; give `clock_ns=virtual_loop.clock_ns` to `open_run` |
| `scripted_engine` | makes a `ScriptedEngine` from answers, and closes it in the end |
| `open_virtual_run` | `open_run` in virtual time; in the end the log is held against the invariants |

Rule: pytest-asyncio runs the tests; this only says on which loop.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from groupstate.core.rules import Rules
from groupstate.engines.scripted import Script, ScriptedEngine
from groupstate.errors import MissingExtra
from groupstate.runtime.opening import open_run
from groupstate.runtime.run import Run
from groupstate.simulate.loop import VirtualLoop
from groupstate.testing.invariants import assert_invariants

try:
    import pytest
    import pytest_asyncio
except ModuleNotFoundError as error:
    if error.name not in ("pytest", "pytest_asyncio"):
        raise
    raise MissingExtra("groupstate.testing.fixtures", "pytest and pytest-asyncio", "testing") from error

VIRTUAL = "virtual_time"

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{VIRTUAL}: an async test that runs on a loop whose clock jumps")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: Any) -> None:
    """In pytest-asyncio's mode `strict`, what is ours is marked for it."""
    if not inspect.iscoroutinefunction(obj) or _mode(collector.config) != "strict":
        return
    marks = {mark.name for mark in (*getattr(obj, "pytestmark", ()), *collector.iter_markers())}
    asked_for = {"virtual_loop", "open_virtual_run"} & set(inspect.signature(obj).parameters)
    if "asyncio" not in marks and (asked_for or VIRTUAL in marks):
        pytest.mark.asyncio(obj)


def _mode(config: pytest.Config) -> str:
    return str(config.getoption("asyncio_mode", None) or config.getini("asyncio_mode"))


@pytest.hookimpl(specname="pytest_asyncio_loop_factories", tryfirst=True)
def pytest_asyncio_loop_factories_virtual(item: pytest.Item) -> Mapping[str, LoopFactory] | None:
    """A virtual loop for tests that want one; the others are left to whoever else has a say."""
    wants = item.get_closest_marker(VIRTUAL) is not None or "virtual_loop" in getattr(item, "fixturenames", ())
    return {"virtual": VirtualLoop} if wants else None


@pytest.hookimpl(specname="pytest_asyncio_loop_factories", trylast=True)
def pytest_asyncio_loop_factories_usual() -> Mapping[str, LoopFactory]:
    return {"asyncio": asyncio.new_event_loop}


@pytest_asyncio.fixture
async def virtual_loop() -> VirtualLoop:
    """The loop of a test in virtual time, which a test that asks for it is."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), f"this test runs on {type(loop).__name__}; mark it with virtual_time"
    return loop


@pytest_asyncio.fixture
async def scripted_engine() -> AsyncIterator[Callable[..., ScriptedEngine]]:
    """`scripted_engine(script, token_s=...)`: an engine that says what it is told, closed in the end."""
    made: list[ScriptedEngine] = []

    def make(script: Script, **options: Any) -> ScriptedEngine:
        made.append(ScriptedEngine(script, **options))
        return made[-1]

    yield make
    for engine in made:
        await engine.aclose()


@pytest.fixture
def open_virtual_run(virtual_loop: VirtualLoop) -> Callable[..., AbstractAsyncContextManager[Run]]:
    """`open_run` for a test in virtual time: in memory, on the loop's clock, without the stall warning, whose timer
    would keep a deadlock from being seen. The error of one says what the run waits for. At the end of the block the
    log is held against the invariants."""

    @asynccontextmanager
    async def opened(path: Any = None, *, rules: Rules | None = None, **options: Any) -> AsyncIterator[Run]:
        settings = {"clock_ns": virtual_loop.clock_ns, **options}
        async with open_run(path, rules=(rules or Rules()).changed(stall_s=0), **settings) as run:

            def told() -> str:
                return f"the run: {run.explain()}"

            virtual_loop.explainers.append(told)
            try:
                yield run
            finally:
                virtual_loop.explainers.remove(told)
        assert_invariants(run.ledger.log)

    return opened
