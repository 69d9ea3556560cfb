"""One request over a kept connection, against a server of sockets that does as the test says."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from logferry.client.transport.connections import MOST_CONNECTIONS, Connections, NoResponse
from logferry.client.transport.responses import NextStep, next_step, read_answer
from logferry.gateway.contract.names import origin_of

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Some: Thing\r\n\r\nok"


def request(connection: socket.socket) -> bytes:
    """Reads one request, with its body."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        more = connection.recv(65536)
        if not more:
            return b""
        raw += more
    head, _, body = raw.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@pytest.fixture
def server() -> Iterator[Any]:
    """Gives each connection, in turn, to one of the functions; returns the URL and the requests."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def serve(*handlers: Callable[[socket.socket], None]) -> str:
        def run() -> None:
            for handle in handlers:
                connection, _ = listener.accept()
                with connection:
                    handle(connection)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for thread in threads:
        thread.join(10)
    listener.close()


@pytest.fixture
def connections() -> Iterator[Any]:
    kept = Connections(answer_timeout_s=5.0)
    yield kept
    kept.close()


def test_a_connection_is_kept(server: Any, connections: Any) -> None:
    requests = []

    def twice(connection: socket.socket) -> None:
        for _ in range(2):
            requests.append(request(connection))
            connection.sendall(ANSWER)

    url = server(twice)
    for number in range(2):
        reply = connections.exchange(f"{url}/p?q={number}", {"A": "b"}, b"body")
        assert (reply.status, reply.headers["x-some"], reply.body) == (200, "Thing", b"ok")
    assert [r.split(b"\r\n")[0] for r in requests] == [b"POST /p?q=0 HTTP/1.1", b"POST /p?q=1 HTTP/1.1"]
    assert all(r.endswith(b"\r\n\r\nbody") and b"\r\nA: b\r\n" in r for r in requests)


def test_one_that_was_closed_while_idle_is_replaced(server: Any, connections: Any) -> None:
    def once(connection: socket.socket) -> None:
        request(connection)
        connection.sendall(ANSWER)

    url = server(once, once)
    for _ in range(2):
        assert connections.exchange(url + "/", {}, b"").status == 200


def cut_at_once(connection: socket.socket) -> None:
    pass


def no_http(connection: socket.socket) -> None:
    request(connection)
    connection.sendall(b"SSH-2.0-whatever\r\n")


def endless(connection: socket.socket) -> None:
    request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n")
    try:
        for _ in range(20):
            connection.sendall(b"x" * 100_000)
    except OSError:
        pass


@pytest.mark.parametrize("misbehaviour", [cut_at_once, no_http, endless])
def test_what_is_no_answer(server: Any, connections: Any, misbehaviour: Any) -> None:
    with pytest.raises(NoResponse, match=r"127\.0\.0\.1"):
        connections.exchange(server(misbehaviour) + "/v1/x", {}, b"body")


@pytest.mark.parametrize("length", range(12, len(ANSWER)))
def test_half_an_answer_acknowledges_nothing(server: Any, connections: Any, length: int) -> None:
    def cut(connection: socket.socket) -> None:
        request(connection)
        connection.sendall(ANSWER.replace(b"ok", b"{}")[:length])

    try:
        reply = connections.exchange(server(cut) + "/", {}, b"")
    except NoResponse:
        return
    assert next_step(read_answer(reply, opens=False)) is NextStep.AGAIN


def test_no_answer_in_time(server: Any) -> None:
    silence = threading.Event()
    connections = Connections(answer_timeout_s=0.05)
    with pytest.raises(NoResponse, match="timed out"):
        connections.exchange(server(lambda connection: silence.wait(10) and None) + "/", {}, b"")
    silence.set()
    connections.close()


def test_an_answer_that_comes_before_the_whole_request_is_read(server: Any, connections: Any) -> None:
    """413 for a body that is too large: the other side answers and stops reading."""

    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 413 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 20):
            pass

    assert connections.exchange(server(refuse) + "/", {}, b"x" * (4 << 20)).status == 413


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://no.such.host.invalid/", "http://" + "x" * 64 + "/"])
def test_no_response(connections: Any, url: str) -> None:
    with pytest.raises(NoResponse):
        connections.exchange(url, {}, b"")


def test_connections_are_few(connections: Any) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(MOST_CONNECTIONS + 2)]
    accepted = []
    for listener in listeners:

        def answer(listener: socket.socket = listener) -> None:
            connection, _ = listener.accept()
            request(connection)
            connection.sendall(ANSWER)
            accepted.append(connection)

        thread = threading.Thread(target=answer)
        thread.start()
        connections.exchange(f"http://127.0.0.1:{listener.getsockname()[1]}/", {}, b"")
        thread.join()
    assert [connection.recv(1) for connection in accepted[:2]] == [b"", b""]  # closed by us
    connections.close()
    for each in (*listeners, *accepted):
        each.close()


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://H:80/x", ("http", "h", 80)),
        ("http://h", ("http", "h", 80)),
        ("https://h/", ("https", "h", 443)),
        ("http://[::1]:8/", ("http", "::1", 8)),
        ("ftp://h", None),
        ("http://h:99999", None),
        ("http://[::1", None),
        ("", None),
    ],
)
def test_origin(url: str, origin: Any) -> None:
    assert origin_of(url) == origin
