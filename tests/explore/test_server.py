"""Only the page that was printed gets an answer: no other host, no other page, no file, nobody without the token."""

import json
import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPResponse
from threading import Thread
from typing import Any

import pytest

from gapless.errors import ConfigError
from gapless.explore import workers
from gapless.explore.server import ExploreServer


def get(server: ExploreServer, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    body = response.read().decode("utf-8")
    connection.close()
    return response, body


def test_the_printed_address_gives_the_page_and_the_page_its_answers(explorer: ExploreServer) -> None:
    assert explorer.address.startswith(f"http://127.0.0.1:{explorer.server_port}/?token=")
    response, page = get(explorer, explorer.address.split(str(explorer.server_port))[1])
    assert (response.status, response.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
    assert explorer.token not in page
    assert "connect-src &#x27;self&#x27;" in page or "connect-src 'self'" in page
    response, body = get(explorer, "/answer?schedule=1f1b&devices=2&microbatches=2", X_Gapless_Token=explorer.token)
    assert (response.status, response.getheader("Cache-Control")) == (200, "no-store")
    assert json.loads(body)["makespan"] == 9


def test_a_bad_question_is_answered_with_its_sentence(explorer: ExploreServer) -> None:
    many = "&".join(f"a{n}=1" for n in range(50))
    for query, start in (
        ("devices=x", "devices is 'x', but"),
        (many, "the question has"),
        ("schedule=%00", "there is"),
    ):
        response, body = get(explorer, f"/answer?{query}", X_Gapless_Token=explorer.token)
        assert response.status == 200
        assert json.loads(body)["error"].startswith(start)


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {}),
        ("/?token=", {}),
        ("/?token=wrong", {}),
        ("/?token=%C3%BC", {}),
        ("/answer", {}),
        ("/answer?token=TOKEN", {}),  # other pages can make addresses, but not headers
        ("/answer", {"X_Gapless_Token": "wrong"}),
        ("/?token=TOKEN", {"Host": "evil.example"}),
        ("/?token=TOKEN", {"Host": "127.0.0.1"}),
        ("/?token=TOKEN", {"Host": "evil.example:PORT"}),
        ("/?token=TOKEN", {"Origin": "http://evil.example"}),
        ("/?token=TOKEN", {"Origin": "null"}),
        ("/?token=TOKEN", {"Sec_Fetch_Site": "cross-site"}),
        ("/answer", {"X_Gapless_Token": "TOKEN", "Origin": "http://127.0.0.1:1"}),
        ("/answer", {"X_Gapless_Token": "TOKEN", "Host": "evil.example"}),
        ("/answer", {"X_Gapless_Token": "TOKEN", "Sec_Fetch_Site": "same-site"}),
    ],
)
def test_others_are_refused(explorer: ExploreServer, path: str, headers: dict[str, str]) -> None:
    def meant(text: str) -> str:
        return text.replace("TOKEN", explorer.token).replace("PORT", str(explorer.server_port))

    response, body = get(explorer, meant(path), **{name: meant(value) for name, value in headers.items()})
    assert response.status == 403
    assert len(body.split()) > 4
    assert explorer.token not in body
    assert response.getheader("Access-Control-Allow-Origin") is None


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/..%2f..%2fetc/passwd", "/explore.js", "//etc/passwd", "/./"])
def test_there_are_no_files(explorer: ExploreServer, path: str) -> None:
    response, body = get(explorer, path, X_Gapless_Token=explorer.token)
    assert (response.status, body) == (404, "there is nothing here")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_can_be_sent_to_it(explorer: ExploreServer, method: str) -> None:
    response, _ = get(explorer, f"/?token={explorer.token}", method)
    assert response.status == 501


def test_it_listens_on_this_machine_alone_and_a_port_in_use_is_said(explorer: ExploreServer) -> None:
    assert explorer.server_address[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=f"port {explorer.server_port} can't be used .*leave --port out"):
        ExploreServer(explorer.server_port)
    with socket.socket() as other:  # a connection that says nothing stops nobody
        other.connect(("127.0.0.1", explorer.server_port))
        assert get(explorer, f"/?token={explorer.token}")[0].status == 200


HEAVY = "/answer?schedule=auto&devices=64&microbatches=32&memory_limit=20&weight_grad=0.75&latency=0.03"


def asked(server: ExploreServer, path: str) -> HTTPConnection:
    """A connection that has asked, and waits."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=100)
    connection.request("GET", path, headers={"X-Gapless-Token": server.token})
    return connection


def said(connection: HTTPConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def until(reached: Callable[[], bool], within: float = 30.0) -> None:
    deadline = time.monotonic() + within
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_long_search_holds_up_nobody_and_is_answered_or_told_off(
    explorer: ExploreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 clients timed out while one looked for `auto` on 64 devices."""
    said(asked(explorer, "/answer?schedule=gpipe"))  # there is a worker
    monkeypatch.setattr(workers, "SECONDS", 3.0)
    heavy = asked(explorer, HEAVY)
    until(lambda: explorer.workers.busy > 0)
    others = [asked(explorer, f"/answer?schedule=1f1b&devices=4&microbatches={4 + m}") for m in range(20)]
    assert all(said(other)["makespan"] > 0 for other in others)
    found = said(heavy)
    assert "makespan" in found or found["error"] == (
        "auto was not found within 3 s, so the search was stopped: use fewer devices or microbatches, or run `gapless "
        "show auto --devices 64 --microbatches 32 --memory-limit 20 --weight-grad 0.75 --latency 0.03`"
    )


def test_a_search_that_nobody_waits_for_any_more_ends(explorer: ExploreServer) -> None:
    until(lambda: explorer.workers.busy == 0)
    many = [asked(explorer, f"{HEAVY}&forward=1.{n}") for n in range(workers.MOST + 2)]  # more than there are workers
    until(lambda: explorer.workers.busy == workers.MOST)
    for connection in many:
        connection.close()
    until(lambda: explorer.workers.busy == 0)
    assert said(asked(explorer, "/answer?schedule=1f1b&devices=2&microbatches=2"))["makespan"] == 9


def test_its_end_is_that_of_its_workers() -> None:
    with ExploreServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        connection = asked(server, HEAVY)
        until(lambda: bool(server.workers.alive))
        (process,) = server.workers.alive
        server.shutdown()
        thread.join()
    connection.close()
    until(lambda: not process.is_alive())
