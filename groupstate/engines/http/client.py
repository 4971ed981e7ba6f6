"""One server over HTTP: plain requests, and answers that come as a stream of events.

Rule 1: httpx is imported here and nowhere else, and what it raises leaves this file as one of two errors: nobody was
reached, with a kind of its own where that is for want of something here, or the connection failed on the way.
Rule 2: leaving a stream, by whatever way, closes its connection unless it was read to its end; the server then knows
that nobody waits for the rest.
"""

import asyncio
import contextlib
import errno
import functools
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import anyio
import attrs
import msgspec

from groupstate.errors import EngineError, MissingExtra
from groupstate.logs import Logger

try:
    import httpx
except ImportError as error:
    raise MissingExtra("the engine 'openai'", "httpx", "openai") from error

log = Logger("groupstate.engines.openai")

CONNECT_S = 10.0
"""Until a connection stands. A server in the same cluster needs milliseconds; one that isn't there may not answer."""

IDLE_S = 2.0
"""Until an unused connection is closed here. Servers close theirs too (uvicorn after 5 s), and a request sent into one
that is just being closed is lost."""

LINE_BYTES_MAX = 64 << 20
"""Longest line of a stream: an event that repeats a prompt of a million tokens has some 8 MB."""

OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE})
"""What the system says where this process, or this machine, may have no more files open, connections among them."""

NO_PLACE_S = 0.1
"""Between tries to open one more."""

JSON = {"content-type": "application/json"}

TEXT_CHARS_MAX = 500
"""Where a server's words are cut in an error's text."""


class NotReached(Exception):
    """No connection could be made: nothing was sent."""


class NoPlace(NotReached):
    """This machine can't make one more connection, which says nothing of the server."""


class Broken(Exception):
    """The connection failed after it was made."""

    def __init__(self, text: str, *, answered: bool) -> None:
        self.answered = answered
        """Whether the answer had begun."""
        super().__init__(text)


class NoEvents(Exception):
    """What came isn't a stream of events."""


@attrs.frozen
class Answer:
    """What a server said to a plain request."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def missing(self) -> bool:
        """The server doesn't have this."""
        return self.status in (403, 404, 405)

    @property
    def late(self) -> bool:
        """Somebody on the way didn't wait, or not yet: nothing is wrong with the request."""
        return self.status in (408, 425)

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; empty if it is something else."""
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def words(self) -> str:
        """The message in a body that is an error's, else its beginning."""
        body = self.json()
        error = body.get("error", body)
        message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        text = message if isinstance(message, str) else self.body.decode(errors="replace")
        said = " ".join(text.split())[:TEXT_CHARS_MAX]
        return f"{self.status} {said}".strip()


class Stream:
    """An answer that has begun."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code

    @property
    def retry_after_s(self) -> float | None:
        """How long the server asks to wait, where it says so in seconds."""
        said = self._response.headers.get("retry-after", "")
        return float(said) if said.isascii() and said.isdigit() else None

    async def answer(self) -> Answer:
        """The whole of it, for one that is an error."""
        return Answer(self.status, await self._response.aread())

    async def events(self) -> AsyncGenerator[bytes]:
        """The data of each event.

        Raises:
            NoEvents: something else came.
        """
        lines = EventLines()
        pieces = self._response.aiter_raw()
        assert isinstance(pieces, AsyncGenerator)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                for data in lines.feed(piece):
                    yield data


class EventLines:
    """Bytes in whatever pieces, to the data of events."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        """Pieces of a line whose end hasn't come."""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """
        Raises:
            NoEvents: a line that no event stream has, or one without an end.
        """
        whole, newline, rest = piece.rpartition(b"\n")
        if not newline:
            self._begun.append(piece)
            if sum(map(len, self._begun)) > LINE_BYTES_MAX:
                raise NoEvents(f"a line of more than {LINE_BYTES_MAX} bytes")
            return
        lines = b"".join([*self._begun, whole]).split(b"\n")
        self._begun = [rest]
        for line in lines:
            field, _, value = line.rstrip(b"\r").partition(b":")
            if field == b"data":
                yield value.strip()
            elif field not in (b"", b"event", b"id", b"retry"):
                raise NoEvents(f"a line that is no event: {line[:80]!r}")


class Client:
    """Talks to one server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = {"accept-encoding": "identity"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {_usable_key(api_key)}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_waited = False
        """It was said that a request waits for a connection."""
        """Where the connections were made."""
        try:
            self._http = self._unconnected()
        except httpx.InvalidURL as error:
            raise EngineError(f"{url!r} is no URL of a server: {error}") from error

    def _unconnected(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._url,
            verify=_tls(),
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S),
        )

    def _here(self) -> httpx.AsyncClient:
        """With connections of the running loop: those of one that has ended can't even be closed."""
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop and not self._loop.is_running():
            self._http = self._unconnected()
        self._loop = loop
        return self._http

    async def get(self, path: str, *, timeout_s: float) -> Answer:
        return await self._plain("GET", path, timeout_s)

    async def post(
        self, path: str, body: Any = None, *, timeout_s: float, params: dict[str, str] | None = None
    ) -> Answer:
        return await self._plain("POST", path, timeout_s, body, params)

    async def _plain(
        self, method: str, path: str, timeout_s: float, body: Any = None, params: dict[str, str] | None = None
    ) -> Answer:
        try:
            with anyio.fail_after(timeout_s):
                while True:
                    try:
                        with _named():
                            response = await self._here().request(method, path, params=params, **_content(body))
                        return Answer(response.status_code, response.content)
                    except NoPlace as error:
                        self._waits(error)
                        await anyio.sleep(NO_PLACE_S)
        except TimeoutError:
            raise Broken(f"no answer to {path} within {timeout_s:g} s", answered=False) from None

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[Stream]:
        """Post, and read the answer as it comes.

        Raises:
            NoPlace, NotReached: nothing was sent.
            Broken: the connection failed.
        """
        try:
            with _named() as state:
                async with self._here().stream("POST", path, content=body, headers=JSON) as response:
                    state.answered = True
                    yield Stream(response)
        except NoPlace as error:
            self._waits(error)
            raise

    def _waits(self, error: NoPlace) -> None:
        if not self._has_waited:
            self._has_waited = True
            log.warning("requests wait for a connection", problem=str(error))

    async def aclose(self) -> None:
        await self._here().aclose()


def _usable_key(api_key: object) -> str:
    """Without its text in an error: logs are no place for it."""
    if not isinstance(api_key, str):
        raise EngineError(f"api_key is a {type(api_key).__name__}; it must be a string")
    if not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise EngineError(
            "api_key can't be sent in a header: it is empty, or has characters that aren't printable ASCII"
        )
    return api_key


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all: reading the authorities takes 50 ms."""
    return httpx.create_ssl_context()


def _content(body: Any) -> dict[str, Any]:
    if body is None:
        return {}
    return {"content": msgspec.json.encode(body), "headers": JSON}


class _State:
    answered = False


@contextlib.contextmanager
def _named() -> Iterator[_State]:
    """httpx's errors as ours."""
    state = _State()
    try:
        yield state
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if (own := _of_this_machine(error)) is not None:
            raise NoPlace(
                f"{own}: raise what this process (ulimit -n) or this machine may have open, or bound the requests "
                "under way (slots_max)"
            ) from error
        raise NotReached(_told(error)) from error
    except httpx.HTTPError as error:
        raise Broken(_told(error), answered=state.answered) from error


def _of_this_machine(error: BaseException | None) -> OSError | None:
    """What this machine lacks for a connection, by the causes of an error; None if it isn't that alone: a server of
    several addresses may have refused at another."""
    if isinstance(error, OSError) and error.errno in OWN_LIMITS:
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [_of_this_machine(each) for each in error.exceptions]
        return found[0] if all(found) else None
    return None if error is None else _of_this_machine(error.__cause__ or error.__context__)


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
