"""`groupstate run --engine openai`, with a server beside it."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner, Result

from groupstate.cli.collecting import run as command
from tests.engines.http_server import HttpServer


@pytest.fixture
def server() -> Iterator[HttpServer]:
    """On a loop of its own, since the command has its own too."""
    server, up, done = HttpServer(), threading.Event(), threading.Event()

    async def serve() -> None:
        async with server:
            up.set()
            await anyio.to_thread.run_sync(done.wait)

    thread = threading.Thread(target=anyio.run, args=(serve,))
    thread.start()
    up.wait(10)
    yield server
    done.set()
    thread.join()


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ({"prompt": f"question {number}", "group_id": f"p{number}"} for number in range(3))
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("score.py").write_text("def reward(prompt, text):\n    return float(len(text))\n")


def invoke(*more: str) -> Result:
    given = ("--prompts", "p.jsonl", "--reward", "score.py:reward", "--out", "o.jsonl", "--run", "r", "--n", "2")
    return CliRunner().invoke(command, (*given, *more))


def test_any_server_collects_texts(server: HttpServer) -> None:
    options = ("--engine-option", f"url={server.url}", "--engine-option", "dialect=chat")
    result = invoke("--engine", "openai", *options, "--model", "tiny", "--max-tokens", "5")

    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert {(len(row["response"]), row["reward"]) for row in rows} == {(5, 5.0)}


def test_the_engine_may_stand_in_a_file(server: HttpServer) -> None:
    Path("run.toml").write_text(f'[engine]\nname = "openai"\nurls = ["{server.url}"]\ndialect = "text"\n')
    result = invoke("--config", "run.toml", "--max-tokens", "2", "--groups", "1")

    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        ((), 2, "the engine's options: the engine 'openai' needs its servers"),
        (("--engine-option", "url=http://127.0.0.1:9"), 1, "no server answers at http://127.0.0.1:9"),
        (("--engine-option", "url=http://127.0.0.1:9", "--engine-option", "slots=3"), 2, "did you mean 'slots_max'?"),
    ],
)
def test_what_cannot_be_is_named(options: tuple[str, ...], code: int, complaint: str) -> None:
    result = invoke("--engine", "openai", *options)

    assert (result.exit_code, complaint in result.stderr) == (code, True), result.stderr
    assert not Path("r").exists()
