"""A server with the API of vLLM, SGLang or OpenAI, which says what a test writes down and fails as a test wants.

Rule: it is real HTTP over a real socket, so whatever works with it went through a network.
"""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import attrs

DEV_MODE = (
    *("/weight_info", "/is_paused", "/is_sleeping", "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache"),
    *("/update_weight_version", "/sleep", "/wake_up"),
)
"""What vLLM has only with VLLM_SERVER_DEV_MODE=1."""

Script = Callable[[Sequence[int], str], Sequence[int]]
"""(prompt ids, name of the weights) -> ids of the answer."""

BASE = "as started"
"""The weights of a server that was just started."""


def counting(prompt_ids: Sequence[int], weights: str) -> list[int]:
    """Counts on from the sum of the prompt: whoever goes on from what it said gets what it would have said."""
    tokens = list(prompt_ids)
    for _ in range(2000):
        tokens.append((tokens[-1] + 1) % 16)
    return tokens[len(prompt_ids) :]


def stepping(prompt_ids: Sequence[int], weights: str) -> list[int]:
    """Weights of version v count in steps of v, those at the start in steps of 1; broken ones stand still."""
    step = {BASE: 1, "broken": 0}.get(weights) or (0 if weights == "broken" else int(weights.rpartition("v")[2]))
    tokens = [prompt_ids[-1]]
    for _ in range(2000):
        tokens.append((tokens[-1] + step) % 97)
    return tokens[1:]


@attrs.frozen
class Fault:
    """What goes wrong with one request for tokens, the next one that comes."""

    status: int = 200
    body: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    cut_after: int | None = None
    """Tokens after which the connection is cut."""
    silent_after: int | None = None
    """Tokens after which nothing comes any more."""
    spoil: Callable[[dict[str, Any]], Any] | None = None
    """Event -> what is sent in its place: an event, bytes, or None for nothing."""
    lingers: bool = False
    """Says the end of the answer, and then nothing, and doesn't hang up."""
    cut_before: bool = False
    """The connection is cut before anything is said."""


class Gone(Exception):
    """The client has closed the connection."""


class HttpServer:
    """Starts with `async with`; `stop` and `start` let it die and come back where it was, with its first weights."""

    def __init__(
        self,
        script: Script = counting,
        *,
        token_s: float = 0.0,
        tokens_per_event: int = 1,
        context: int | None = 2000,
        lacks: Sequence[str] = (),
        model: str = "tiny",
        root: str = "tiny",
        eos: int | None = None,
    ) -> None:
        self.script = script
        self.token_s = token_s
        self.tokens_per_event = tokens_per_event
        self.context = context
        self.lacks = frozenset(lacks)
        """Paths that it doesn't have."""
        self.model = model
        self.root = root
        self.faults: deque[Fault] = deque()
        self.asked: list[dict[str, Any]] = []
        """Bodies of requests for tokens."""
        self.calls: list[str] = []
        """All other requests, as `POST /pause?mode=keep`."""
        self.refuses: dict[str, tuple[int, str]] = {}
        """Path -> status and body, for whatever should fail every time."""
        self.takes: Callable[[str], bool] = lambda folder: True
        self.key: str | None = None
        self.incremental = False
        self.running = 0
        self.running_max = 0
        self.connections: set[asyncio.StreamWriter] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._reset()

    def _reset(self) -> None:
        self.weights = BASE
        self.label = "default"
        self.asleep = False
        self.paused = False
        self.abort_count = 0
        """How often all requests were aborted."""
        self.stirred = asyncio.Event()
        self.held_after: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "HttpServer":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._reset()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def die(self) -> None:
        """As if killed: every connection is cut, nobody listens."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for writer in self.connections:
            writer.transport.abort()
        for task in self.tasks:
            task.cancel()

    async def stop(self) -> None:
        self.die()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (Gone, ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass  # `stop`.
        finally:
            self.connections.discard(writer)
            self.tasks.discard(task)
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readline()
        if not line:
            return False
        method, target, _ = line.decode().split()
        headers = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(data) if data else {}
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            self._send(writer, 401, {"error": {"message": "wrong key"}})
        elif target in ("/v1/completions", "/v1/chat/completions", "/generate"):
            self.asked.append(body)
            await self._generate(target, body, reader, writer)
        else:
            self.calls.append(f"{method} {target}")
            self._send(writer, *self._call(target, body))
        await writer.drain()
        return True

    def _send(
        self, writer: asyncio.StreamWriter, status: int, body: Any, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} Said", f"content-length: {len(data)}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + data)

    # Plain requests --------------------------------------------------------------------------------

    def _call(self, target: str, body: dict[str, Any]) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        if path in self.lacks:
            return 404, {"detail": "Not Found"}
        if path in self.refuses:
            return self.refuses[path]
        if path == "/v1/models":
            entry = {"id": self.model, "root": self.root, "max_model_len": self.context}
            return 200, {"data": [{name: value for name, value in entry.items() if value is not None}]}
        plain: dict[str, Callable[[], Any]] = {
            "/weight_info": lambda: {"weight_version": self.label},
            "/get_model_info": lambda: {"weight_version": self.label},
            "/is_paused": lambda: {"is_paused": self.paused},
            "/is_sleeping": lambda: {"is_sleeping": self.asleep},
            "/pause": lambda: self._pause(aborts="abort" in query),
            "/pause_generation": lambda: self._pause(aborts=True),
            "/resume": self._resume,
            "/continue_generation": self._resume,
            "/reset_prefix_cache": lambda: {"success": True},
            "/update_weight_version": lambda: self._name(body["new_version"]),
            "/sleep": lambda: self._sleep(True),
            "/release_memory_occupation": lambda: self._sleep(True),
            "/wake_up": lambda: self._sleep(False),
            "/resume_memory_occupation": lambda: self._sleep(False),
        }
        if path == "/collective_rpc":
            return self._load(body["kwargs"]["weights_path"], None)
        if path == "/update_weights_from_disk":
            return self._load(body["model_path"], body["weight_version"])
        if path in plain:
            return 200, plain[path]() or {"success": True}
        return 404, {"detail": "Not Found"}

    def _pause(self, *, aborts: bool) -> None:
        self.paused = True
        self.abort_count += aborts
        self._stir()

    def _resume(self) -> None:
        self.paused = False
        self._stir()

    def hold(self, tokens: int) -> None:
        """From now on answers stand still after so many tokens, until `let_go`."""
        self.held_after = tokens

    def let_go(self) -> None:
        self.held_after = None
        self._stir()

    def _stir(self) -> None:
        self.stirred.set()
        self.stirred = asyncio.Event()

    def _sleep(self, asleep: bool) -> None:
        self.asleep = asleep

    def _name(self, label: str) -> None:
        self.label = label

    def _load(self, folder: str, label: str | None) -> tuple[int, Any]:
        if not self.takes(folder):
            self.weights = "broken"
            return 500, {"error": {"message": f"{folder} doesn't fit", "code": 500}}
        self.weights = BASE if folder == self.root else folder
        if label is not None:
            self.label = label
        return 200, {"success": True, "results": [None]}

    # Tokens ----------------------------------------------------------------------------------------

    async def _generate(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fault = self.faults.popleft() if self.faults else Fault()
        if fault.cut_before:
            raise Gone
        if fault.status != 200:
            self._send(writer, fault.status, fault.body or {"error": {"message": "a fault"}}, fault.headers)
            return
        if refused := self._refusal(path, body):
            self._send(writer, 400, {"error": {"message": refused, "code": 400}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n")
        self.running += 1
        self.running_max = max(self.running, self.running_max)
        gone = asyncio.ensure_future(reader.read(1))
        stream = asyncio.ensure_future(self._stream(path, body, fault, writer))
        try:
            done, _ = await asyncio.wait({gone, stream}, return_when=asyncio.FIRST_COMPLETED)
            if stream not in done:
                raise Gone
            stream.result()
        finally:
            self.running -= 1
            for task in (gone, stream):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Gone, ConnectionError):
                    await task
        if gone.done() and not gone.cancelled():
            raise Gone
        writer.write(b"0\r\n\r\n")

    def _refusal(self, path: str, body: dict[str, Any]) -> str | None:
        if path == "/generate":
            return None
        if body["model"] != self.model:
            return f"no model {body['model']}"
        return None

    async def _stream(self, path: str, body: dict[str, Any], fault: Fault, writer: asyncio.StreamWriter) -> None:
        async for event in self._events(path, body, fault):
            spoiled = event if fault.spoil is None else fault.spoil(event)
            if spoiled is None:
                continue
            data = spoiled if isinstance(spoiled, bytes) else b"data: " + json.dumps(spoiled).encode() + b"\n\n"
            self._write_chunk(writer, data)
            await writer.drain()
            ends = any(choice.get("finish_reason") for choice in event.get("choices", ()))
            if fault.lingers and ends:
                await asyncio.Event().wait()
        self._write_chunk(writer, b"data: [DONE]\n\n")

    def _write_chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def _events(self, path: str, body: dict[str, Any], fault: Fault) -> AsyncIterator[dict[str, Any]]:
        made: list[int] = []
        asked = Asked.of(path, body)
        answer = self.script(asked.prompt_ids, self.weights)
        finish: str | None = None
        since = 0
        aborts = self.abort_count
        while finish is None:
            if len(made) == since:
                await asyncio.sleep(self.token_s * self.tokens_per_event)
            while self._stands_still(len(made)) and self.abort_count == aborts:
                await self.stirred.wait()
            if self.asleep or self.abort_count != aborts:
                finish = "abort"
                break
            made.append(answer[len(made)])
            if fault.cut_after == len(made) - 1:
                raise Gone
            if fault.silent_after == len(made) - 1:
                await asyncio.Event().wait()
            if made[-1] in asked.stop_token_ids:
                finish = "stop"
            elif len(made) == min(asked.tokens_max, len(answer)):
                finish = "length"
            if finish or len(made) - since >= self.tokens_per_event:
                yield self._event(path, asked, made, since, finish)
                since = len(made)
        if fault.cut_after == len(made):
            raise Gone
        if finish == "abort":
            yield self._event(path, asked, made, since, finish)
        if body.get("stream_options"):
            yield {"choices": [], "usage": {"completion_tokens": len(made)}}

    def _stands_still(self, said: int) -> bool:
        return self.paused or (self.held_after is not None and said >= self.held_after)

    def _event(self, path: str, asked: "Asked", made: Sequence[int], since: int, finish: str | None) -> dict[str, Any]:
        new = list(made[since:])
        text = "".join(chr(ord("a") + token) for token in new)
        if path == "/generate":
            shown = new if self.incremental else list(made)
            return {
                "text": "".join(chr(ord("a") + token) for token in shown),
                "meta_info": {
                    "completion_tokens": len(made),
                    "finish_reason": None if finish is None else {"type": finish},
                    "output_token_logprobs": [[-0.5, token, None] for token in shown],
                },
            }
        if path == "/v1/chat/completions":
            return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
        choice = {"index": 0, "text": text, "finish_reason": finish}
        if asked.with_ids:
            choice["token_ids"] = new
            choice["prompt_token_ids"] = None if since else list(asked.prompt_ids)
        if asked.with_log_probs:
            choice["logprobs"] = {"token_logprobs": [-0.5] * len(new)}
        return {"choices": [choice]}


@attrs.frozen
class Asked:
    """A request for tokens, whatever API it came by."""

    prompt_ids: Sequence[int]
    tokens_max: int
    stop_token_ids: Sequence[int]
    with_ids: bool
    with_log_probs: bool

    @classmethod
    def of(cls, path: str, body: dict[str, Any]) -> "Asked":
        if path == "/generate":
            params = body["sampling_params"]
            return cls(body["input_ids"], params["max_new_tokens"], params["stop_token_ids"], True, True)
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        ids = [ord(char) % 16 for char in prompt] if isinstance(prompt, str) else prompt
        tokens_max = body.get("max_tokens", body.get("max_completion_tokens"))
        stops = body.get("stop_token_ids", ())
        return cls(ids, tokens_max, stops, bool(body.get("return_token_ids")), body.get("logprobs") is not None)
