"""Serves the explorer to this machine, and to nobody else.

It listens on 127.0.0.1 alone. Any web page that is open in a browser, and any other program, can reach that too, so:
every request must carry the token that only the printed address has; its Host must be ours, or a name that somebody
points at 127.0.0.1 would do; and where a browser says which page asks, that must be ours. There are two things to get,
the page and an answer, and neither is a file.
"""

import json
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from gapless.errors import ConfigError, GaplessError
from gapless.explore import explore_page
from gapless.explore.question import read_question
from gapless.explore.workers import ClientGoneError, Workers

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class ExploreServer(ThreadingHTTPServer):
    """The server and its secret. `port` 0 is any that is free."""

    daemon_threads = True
    block_on_close = False  # a browser keeps its connections open, and nobody waits for that
    request_queue_size = 32

    def __init__(self, port: int = 0) -> None:
        self.workers = Workers()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"port {port} can't be used ({error}): leave --port out for any that is free") from None
        self.token = token_urlsafe(24)

    def server_close(self) -> None:
        """Nobody works on after it."""
        super().server_close()
        self.workers.close()

    @property
    def address(self) -> str:
        """What to open."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """What a Host may say."""
        return f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its connection is nothing to tell."""


class _Handler(BaseHTTPRequestHandler):
    server: ExploreServer
    server_version = "gapless"
    sys_version = ""
    protocol_version = "HTTP/1.1"  # connections stay open: a slider asks many times a second
    timeout: ClassVar[float] = 60.0

    def do_GET(self) -> None:
        """The page, or an answer."""
        where = urlsplit(self.path)
        if refusal := self._refusal(where.path, where.query):
            self._send(HTTPStatus.FORBIDDEN, refusal, "text/plain")
        elif where.path == "/":
            self._send(HTTPStatus.OK, explore_page.render(), "text/html")
        elif where.path == "/answer":
            try:
                self._send(HTTPStatus.OK, self._answer(where.query), "application/json")
            except ClientGoneError:
                self.close_connection = True
        else:
            self._send(HTTPStatus.NOT_FOUND, "there is nothing here", "text/plain")

    def _refusal(self, path: str, query: str) -> str:
        """Why a request is not answered; empty for one that is."""
        if self.headers.get("Host") not in self.server.hosts:
            return "this address is not that of the explorer"
        origin = self.headers.get("Origin")
        allowed = [f"http://{host}" for host in self.server.hosts]
        if origin is not None and origin not in allowed:
            return "another page may not ask the explorer"
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return "another page may not ask the explorer"
        given = parse_qs(query).get("token", [""])[0] if path == "/" else self.headers.get("X-Gapless-Token", "")
        if not compare_digest(given.encode("utf-8", "replace"), self.server.token.encode()):
            return "the token is wrong: open the address that `gapless explore` printed"
        return ""

    def _answer(self, query: str) -> str:
        try:
            return self.server.workers.answer(read_question(query), self.connection)
        except GaplessError as error:
            return json.dumps({"error": str(error)})

    def _send(self, status: HTTPStatus, text: str, kind: str) -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses have the token in them."""
