"""The page of a run that goes on: what its server answers, to whom, and that it keeps up."""

import http.client
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import pytest
from click.testing import CliRunner

from groupstate.cli import main as command_line
from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION
from groupstate.errors import BadInput, NotARun
from groupstate.inspect.report_live import LiveReport
from groupstate.inspect.report_server import serving
from groupstate.log.file import FileLog
from tests.histories import make
from tests.inspect.test_report import unpacked

WAIT_S = 20.0


def new_log(path: Path) -> FileLog:
    log = FileLog.create(path, inline=True, durability="os")
    log.post([ev.Record(1, 1, ev.RunStarted("r", {}, RULES_VERSION, 0))])
    return log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    made = new_log(tmp_path / "run")
    yield made
    anyio.run(made.aclose)


def ask(
    address: str, path: str = "", *, method: str = "GET", host: str | None = None
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of one request."""
    url = urlsplit(address)
    with closing(http.client.HTTPConnection(url.hostname or "", url.port, timeout=WAIT_S)) as connection:
        headers = {} if host is None else {"Host": host}
        connection.request(method, f"{url.path}{path}" if not path.startswith("/") else path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


@pytest.fixture
def address(log: FileLog) -> Iterator[str]:
    with serving(LiveReport(log.path)) as found:
        yield found


def test_the_page_is_at_the_printed_address_and_nowhere_else(address: str) -> None:
    status, body, headers = ask(address)

    assert status == 200
    assert b"<title>groupstate report</title>" in body
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["Cache-Control"] == "no-store"
    assert [ask(address, path)[0] for path in ("/", "/data", "/wrong/", "/wrong/data", "other")] == [404] * 5


@pytest.mark.parametrize("path", ["", "data"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", ""])
def test_a_request_that_names_another_host_gets_nothing(address: str, host: str, path: str) -> None:
    status, body, _ = ask(address, path, host=host)

    assert (status, b"127.0.0.1" in body) == (403, True)


def test_localhost_is_this_host_too(address: str) -> None:
    assert ask(address, host=f"localhost:{urlsplit(address).port}")[0] == 200


def test_nothing_can_be_posted(address: str) -> None:
    assert ask(address, method="POST")[0] == 501


def test_two_servers_have_two_keys(log: FileLog) -> None:
    with serving(LiveReport(log.path)) as one, serving(LiveReport(log.path)) as other:
        assert urlsplit(one).path != urlsplit(other).path
        assert ask(other, urlsplit(one).path)[0] == 404


def test_a_port_that_is_taken_is_refused(address: str, log: FileLog) -> None:
    port = urlsplit(address).port or 0

    with (
        pytest.raises(BadInput, match=f"port {port} of 127.0.0.1 can't be listened on"),
        serving(LiveReport(log.path), port),
    ):
        pass  # pragma: no cover


def test_a_question_that_makes_no_sense_is_refused(address: str) -> None:
    assert ask(address, "data?after=soon")[0] == 400


def test_who_asks_and_goes_is_no_error(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    url = urlsplit(address)
    for _ in range(20):
        with closing(socket.create_connection((url.hostname or "", url.port or 0))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(f"GET {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
    status, _, _ = ask(address)

    assert (status, capfd.readouterr().err) == (200, "")


# Keeping up -----------------------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    """The files belong to another thread or process, so here polling is right."""
    with anyio.fail_after(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.02)


def version_of(live: LiveReport) -> int:
    header, _ = unpacked(live.data_since(0, -1) or b"")
    return int(header["version"])


async def test_what_is_written_comes_with_the_next_question(log: FileLog) -> None:
    live = LiveReport(log.path, check=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(live.follow)
        await until(lambda: (live.data_since(0, -1) or b"") != b"" and version_of(live) == 0 and _seq(live) == 1)
        state = _header(live, 0, -1)["state"]
        nothing = live.data_since(1, state)
        log.post([ev.Record(2, 2, ev.WeightsPublished(1)), ev.Record(3, 3, ev.WeightsPublished(2))])
        await until(lambda: live.data_since(1, state) is not None)
        header, tables = unpacked(live.data_since(1, state) or b"")
        tasks.cancel_scope.cancel()

    assert nothing is None
    assert (header["after"], header["last_seq"], header["version"]) == (1, 3, 2)
    assert tables["versions"]["version"] == [1, 2]
    assert tables["events"]["seq"] == [2, 3]


def _header(live: LiveReport, seq: int, state: int) -> dict[str, object]:
    return unpacked(live.data_since(seq, state) or b"")[0]


def _seq(live: LiveReport) -> object:
    return _header(live, 0, -1)["last_seq"]


async def test_a_run_without_an_event_is_shown_until_it_has_one(tmp_path: Path) -> None:
    log = FileLog.create(tmp_path / "run", inline=True, durability="os")
    live = LiveReport(log.path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(live.follow)
        empty = _header(live, 0, -1)
        log.post([ev.Record(1, 1, ev.RunStarted("r", {}, RULES_VERSION, 0))])
        await until(lambda: _seq(live) == 1)
        begun = _header(live, 0, -1)
        tasks.cancel_scope.cancel()
    await log.aclose()

    assert [notice["kind"] for notice in empty["notices"]] == ["empty"]  # type: ignore[attr-defined]
    assert begun["notices"] == []


async def test_the_verdict_follows_and_finds_what_is_wrong(log: FileLog) -> None:
    live = LiveReport(log.path)

    def verdict() -> str:
        return _header(live, 0, -1)["verdict"]["state"]  # type: ignore[index]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(live.follow)
        await until(lambda: verdict() == "well")
        log.post(
            [
                ev.Record(2, 2, ev.GroupSubmitted("a", 1, ev.TRAIN, 0, 1, "submit")),
                ev.Record(3, 3, ev.GroupFinished("a")),
            ]
        )
        await until(lambda: verdict() == "wrong")
        tasks.cancel_scope.cancel()


async def test_no_log_is_called_sound_before_it_was_checked_whole(log: FileLog) -> None:
    for version in range(2, 200):
        log.post([ev.Record(version, version, ev.WeightsPublished(version))])
    live = LiveReport(log.path)
    seen = set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(live.follow)
        with anyio.fail_after(WAIT_S):
            while not any(state == "well" for state, _ in seen):
                header = _header(live, 0, -1)
                if header["last_seq"] == 199:
                    seen.add((header["verdict"]["state"], header["verdict"]["text"]))  # type: ignore[index]
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()

    assert {text.split(" events")[0] for state, text in seen if state == "well"} == {"199"}
    assert any(state == "checking" for state, _ in seen)


async def test_damage_is_said_and_what_came_before_is_shown(log: FileLog) -> None:
    for version in range(2, 40):
        log.post([ev.Record(version, version, ev.WeightsPublished(version))])
    segment = next((Path(log.path) / "log").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    live = LiveReport(log.path)
    await live.follow()
    header = _header(live, 0, -1)

    assert [notice["kind"] for notice in header["notices"]] == ["damaged"]  # type: ignore[attr-defined]
    assert 1 < int(str(header["last_seq"])) < 39
    assert header["verdict"]["state"] == "open"  # type: ignore[index]


async def test_a_run_whose_beginning_is_gone_is_followed_from_its_snapshot() -> None:
    (path,) = [path for path in make.golden_logs() if path.name == "compacted"]
    live = LiveReport(path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(live.follow)
        await until(lambda: "from" in str(_header(live, 0, -1)["verdict"]))
        header = _header(live, 0, -1)
        tasks.cancel_scope.cancel()

    assert [notice["kind"] for notice in header["notices"]] == ["gone"]  # type: ignore[attr-defined]
    assert header["verdict"]["state"] == "well"  # type: ignore[index]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        LiveReport(tmp_path, prompts=False)
    assert CliRunner().invoke(command_line, ["view", str(tmp_path)]).exit_code == 2


# The command ----------------------------------------------------------------------------------------------


@contextmanager
def viewed(*args: object) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "groupstate", "view", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_view_prints_where_it_is_and_ends_on_a_signal(log: FileLog, ending: signal.Signals) -> None:
    with viewed(log.path) as (process, address):
        status, _, _ = ask(address)
        process.send_signal(ending)
        _, errors = process.communicate(timeout=WAIT_S)

    assert (status, process.returncode, errors) == (200, 0, "")


def test_view_follows_a_run_of_another_process(log: FileLog) -> None:
    with viewed(log.path) as (_, address):
        log.post([ev.Record(2, 2, ev.WeightsPublished(7))])
        deadline = time.monotonic() + WAIT_S
        version = -1
        while version != 7 and time.monotonic() < deadline:
            header, _ = unpacked(ask(address, "data?after=0&state=-1")[1])
            version = header["version"]

    assert version == 7
