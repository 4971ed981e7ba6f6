"""The pytest plugin, as a user's project loads it: in a process of its own, in both modes of pytest-asyncio."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_run(folder: Path, mode: str, text: str) -> tuple[int, str]:
    """Exit status and output of pytest on one file."""
    (folder / "test_mine.py").write_text(textwrap.dedent(text))
    (folder / "conftest.py").write_text('pytest_plugins = ["groupstate.testing.fixtures"]\n')
    (folder / "pytest.ini").write_text(
        f"[pytest]\nasyncio_mode = {mode}\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "test_mine.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment)
    return done.returncode, done.stdout + done.stderr


MODES = pytest.mark.parametrize("mode", ["auto", "strict"])

MINE = """
    import asyncio

    import pytest
    import pytest_asyncio

    from groupstate import Rules, Trajectory
    from groupstate.testing import Deadlock, VirtualLoop

    async def session(ctx):
        await asyncio.sleep(3600)
        return Trajectory(reward=1.0)
"""


@MODES
def test_time_is_virtual_for_a_test_and_its_fixtures(tmp_path: Path, mode: str) -> None:
    status, output = pytest_run(
        tmp_path,
        mode,
        MINE
        + """
    @pytest_asyncio.fixture
    async def slow():
        await asyncio.sleep(60)
        return asyncio.get_running_loop()

    @pytest.mark.virtual_time
    async def test_marked(slow):
        await asyncio.sleep(3600)
        assert slow is asyncio.get_running_loop()
        assert isinstance(slow, VirtualLoop)
        assert slow.now_s == 3660

    async def test_asked_for(virtual_loop):
        await asyncio.sleep(3600)
        assert virtual_loop.now_s == 3600

    async def test_a_run(open_virtual_run, virtual_loop):
        async with open_virtual_run(source=["a"], session=session, group_size=2) as run:
            await run.commit(await run.sample(1))
            assert virtual_loop.now_s == 3600

    @pytest.mark.asyncio
    async def test_another_keeps_its_own_loop():
        assert not isinstance(asyncio.get_running_loop(), VirtualLoop)
    """,
    )

    assert status == 0, output
    assert "4 passed" in output


@MODES
def test_a_deadlock_is_an_error_at_once(tmp_path: Path, mode: str) -> None:
    status, output = pytest_run(
        tmp_path,
        mode,
        MINE
        + """
    async def test_hangs(open_virtual_run):
        async with open_virtual_run() as run:
            await run.sample(1)
    """,
    )

    assert status == 1
    assert "Deadlock: every task is blocked and no timer is pending" in output
    assert re.search(r"waits at \S+test_mine.py:\d+ in test_hangs: await run.sample\(1\)$", output, re.MULTILINE)
    assert "the run: sample(1) in partition 'train' waits: 0 of 1 groups are sampleable" in output


def test_a_run_whose_log_lies_fails_its_test(tmp_path: Path) -> None:
    status, output = pytest_run(
        tmp_path,
        "auto",
        MINE
        + """
    from groupstate.core import events as ev

    async def test_lies(open_virtual_run):
        async with open_virtual_run() as run:
            run.submit("a", n=1)
            log = run.ledger.log
        log._records.append(ev.Record(log.last_seq + 1, 0, ev.GroupFinished("g1")))
        from groupstate.testing import assert_invariants
        assert_invariants(log)
    """,
    )

    assert status == 1
    assert "invariant 1 is broken" in output


@MODES
def test_a_scripted_engine_says_what_it_is_told_and_passes_its_contract(tmp_path: Path, mode: str) -> None:
    status, output = pytest_run(
        tmp_path,
        mode,
        MINE
        + """
    from groupstate.engines.port import Request
    from groupstate.log.memory import MemoryLog
    from groupstate.testing import LogContract

    async def test_the_engine(scripted_engine, virtual_loop):
        engine = scripted_engine([[1, 2], [3]], token_s=0.5)
        generations = [await engine.generate(Request((1,))) for _ in range(2)]
        assert [generation.token_ids for generation in generations] == [(1, 2), (3,)]
        assert virtual_loop.now_s == 1.5

    class TestMine(LogContract):
        @pytest.fixture
        def log(self):
            return MemoryLog()
    """,
    )

    assert status == 0, output
    assert "2 skipped" in output


def test_a_failing_contract_says_what_it_compared(tmp_path: Path) -> None:
    status, output = pytest_run(
        tmp_path,
        "auto",
        MINE
        + """
    from groupstate.log.memory import MemoryLog
    from groupstate.testing import LogContract

    class Forgets(MemoryLog):
        def read(self, start=1, stop=None):
            return iter(())

    class TestMine(LogContract):
        @pytest.fixture
        def log(self):
            return Forgets()
    """,
    )

    assert status == 1
    assert "assert [] == [Record(seq=1" in output
