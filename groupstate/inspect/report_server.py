"""The page of a run that goes on, served on this machine.

Rule 1: only 127.0.0.1 is listened on, under a path that only who started the server knows; a request that names another
host is refused, so that no page of another site can reach it by a name of its own.
Rule 2: nothing is changed by any request.
"""

import hmac
import http.server
import secrets
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

from groupstate.errors import BadInput
from groupstate.inspect.report_live import LiveReport
from groupstate.inspect.report_page import page_html
from groupstate.version import VERSION

HOST: Final = "127.0.0.1"
REQUEST_S: Final = 30
"""After which a connection that says nothing is closed."""

HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # a page can't say this of itself
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, live: LiveReport) -> None:
        self.live = live
        self.token = secrets.token_urlsafe(18)
        self.page = page_html(live=True).encode()
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked may go before the answer is there: nothing is wrong then."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def hosts(self) -> set[str]:
        return {f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version = f"groupstate/{VERSION}"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_S

    def do_GET(self) -> None:
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this server answers to 127.0.0.1 alone\n")
            return
        url = urllib.parse.urlsplit(self.path)
        token, _, name = url.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(
                HTTPStatus.NOT_FOUND, "text/plain", b"not here: use the address that groupstate view printed\n"
            )
        elif not name:
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif name == "data":
            self._data(urllib.parse.parse_qs(url.query))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")

    do_HEAD = do_GET

    def _data(self, query: dict[str, list[str]]) -> None:
        try:
            after, state = (int(query.get(name, ["0"])[0]) for name in ("after", "state"))
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, "text/plain", b"after and state are integers\n")
            return
        data = self.server.live.data_since(max(0, after), state)
        if data is None:
            self._answer(HTTPStatus.NO_CONTENT, "", b"")
        else:
            self._answer(HTTPStatus.OK, "application/octet-stream", data)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests aren't told: the page asks every second."""


@contextmanager
def serving(live: LiveReport, port: int = 0) -> Iterator[str]:
    """Serve the page while the block runs; gives its address.

    Args:
        port: 0 for one that is free.

    Raises:
        BadInput: the port can't be listened on.
    """
    try:
        server = _Server(port, live)
    except (OSError, OverflowError) as error:
        raise BadInput(
            f"port {port} of {HOST} can't be listened on: {error}; leave --port out for a free one"
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}/{server.token}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
