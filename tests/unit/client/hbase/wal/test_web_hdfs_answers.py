"""Answers of HDFS that are seldom: standby NameNodes, DataNodes that die while they send, Kerberos, tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from logferry.client.hbase.definition import Unfit
from logferry.client.hbase.wal.web_hdfs import WebHdfs, web_hdfs
from logferry.client.transport.connections import Dialer

TOKEN = "KAABaGJhc2UAigGS_secret-1"


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    length: int | None = None


def refusal(status: int, kind: str, text: str = "no") -> Answer:
    body = json.dumps({"RemoteException": {"exception": kind, "javaClassName": f"x.{kind}", "message": text}})
    return Answer(status, body.encode())


class Node:
    """A server with answers of its own. ``asked``: the questions, as they came."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: Callable[[str], Answer] = lambda target: Answer(500)
        node = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                node.asked.append(self.path)
                found = node.answer(self.path)
                self.send_response(found.status)
                for name, value in found.headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(found.body) if found.length is None else found.length))
                self.end_headers()
                self.wfile.write(found.body)
                self.close_connection = found.length is not None

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    found = [Node() for _ in range(3)]
    yield found
    for one in found:
        one.close()


def store_of(*nodes: Node, token_file: Path | None = None) -> WebHdfs:
    urls = [f"webhdfs://{','.join(one.host for one in nodes)}/hbase/{name}" for name in ("WALs", "oldWALs")]
    return web_hdfs(urls, "hbase", token_file, Dialer())[0]


def listing(*names: str) -> Answer:
    statuses = [{"pathSuffix": name, "type": "FILE", "length": 0} for name in names]
    return Answer(200, json.dumps({"FileStatuses": {"FileStatus": statuses}}).encode())


def test_a_name_node_that_is_not_active_is_left_for_the_one_that_is(nodes: list[Node]) -> None:
    first, second, _ = nodes
    first.answer = lambda _: refusal(403, "StandbyException")
    second.answer = lambda _: listing("a")
    store = store_of(first, second)
    for _ in range(3):
        assert [one.name for one in store.entries("/x")] == ["a"]
    assert len(first.asked) == 1, "the one that answered is asked first"
    first.answer, second.answer = second.answer, first.answer
    assert [one.name for one in store.entries("/x")] == ["a"]
    first.answer = lambda _: refusal(403, "RetriableException", "it starts")
    with pytest.raises(OSError, match=r"no NameNode of webhdfs://.* answers; the last one: .*Exception"):
        store.entries("/x")


def test_less_than_a_data_node_promised_is_no_end_of_the_file(nodes: list[Node]) -> None:
    name_node, data_node, other = nodes
    known = {"hostName": "127.0.0.1", "infoSecurePort": 0, "xferPort": 9866}
    addresses = {"10.0.0.1": other, "10.0.0.2": data_node}
    locations = [
        {**known, "ipAddr": address, "infoPort": int(node.host.partition(":")[2])}
        for address, node in addresses.items()
    ]
    blocks: list[dict[str, object]] = [{"locations": locations}]

    def redirect(target: str) -> Answer:
        if "GET_BLOCK_LOCATIONS" in target:
            return Answer(200, json.dumps({"LocatedBlocks": {"locatedBlocks": blocks}}).encode())
        node = other if "excludedatanodes=10.0.0.2%3A9866" in target else data_node
        return Answer(307, b"", (("Location", f"http://{node.host}/webhdfs/v1/f?op=OPEN&offset=0&length=7&x=%25"),))

    name_node.answer = redirect
    data_node.answer = lambda _: Answer(200, b"0123", length=10)
    other.answer = lambda _: Answer(200, b"0123456789")
    store = store_of(name_node)
    assert store.read("/f", 5, 10) == b"0123456789"
    asked = parse_qs(urlsplit(other.asked[0]).query)
    assert (asked["offset"], asked["length"], asked["x"]) == (["5"], ["10"], ["%"])
    other.answer = data_node.answer
    blocks.clear()  # none of the block's DataNodes
    with pytest.raises(OSError, match=r"no DataNode sends it: .* cut off 6 bytes before its end"):
        store.read("/f", 5, 10)


def test_kerberos_is_refused_by_name(nodes: list[Node]) -> None:
    nodes[0].answer = lambda _: Answer(401, b"<html>", (("WWW-Authenticate", "Negotiate"),))
    with pytest.raises(Unfit, match="HDFS wants Kerberos, which is not supported: give a delegation token"):
        store_of(nodes[0]).check("/hbase/WALs")


def test_a_folder_that_may_not_be_read_is_refused_at_once(nodes: list[Node]) -> None:
    nodes[0].answer = lambda _: refusal(403, "AccessControlException", "Permission denied: user=me\nat org.apache")
    with pytest.raises(Unfit, match=r"AccessControlException: Permission denied: user=me$"):
        store_of(nodes[0]).check("/hbase/WALs")


def test_a_token_is_sent_and_never_shown(
    nodes: list[Node], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    store = store_of(nodes[0], token_file=file)
    assert "token-unencrypted" in caplog.text
    texts = []
    for answer in (refusal(403, "InvalidToken", "token (owner=hbase) is expired"), Answer(500), Answer(200, b"<html>")):
        nodes[0].answer = lambda _, answer=answer: answer  # type: ignore[misc]
        with pytest.raises(OSError) as problem:  # noqa: PT011
            store.entries("/x")
        texts.append(str(problem.value))
    asked = parse_qs(urlsplit(nodes[0].asked[0]).query)
    assert (asked["delegation"], "user.name" in asked) == ([TOKEN], False)
    file.write_text("another_1")
    nodes[0].answer = lambda _: listing()
    store.entries("/x")
    assert "delegation=another_1" in nodes[0].asked[-1]
    file.write_text("not a token: " + TOKEN)
    with pytest.raises(OSError, match="is no delegation token") as problem:
        store.entries("/x")
    nodes[0].close()
    store.close()
    file.write_text(TOKEN)
    with pytest.raises(OSError, match="no NameNode") as silent:
        store.entries("/x")
    shown = [*texts, str(problem.value), str(silent.value), caplog.text, *capsys.readouterr()]
    assert TOKEN not in "".join(shown)


def test_a_404_of_another_server_is_no_missing_file(nodes: list[Node]) -> None:
    nodes[0].answer = lambda _: Answer(404, b"<html>")
    for ask in (lambda: store_of(nodes[0]).entries("/x"), lambda: store_of(nodes[0]).read("/f", 0, 1)):
        with pytest.raises(OSError, match=r"/[xf]: 404") as problem:
            ask()
        assert not isinstance(problem.value, FileNotFoundError)
    nodes[0].answer = lambda _: refusal(404, "FileNotFoundException")
    with pytest.raises(FileNotFoundError):
        store_of(nodes[0]).entries("/x")


def test_a_redirect_to_another_protocol_is_not_followed(nodes: list[Node]) -> None:
    nodes[0].answer = lambda _: Answer(307, b"", (("Location", "ftp://127.0.0.1/f"),))
    with pytest.raises(OSError, match="names no DataNode with http"):
        store_of(nodes[0]).read("/f", 0, 1)


@pytest.mark.parametrize(
    ("wals", "text"),
    [
        ("webhdfs://one:9870,two/hbase/WALs", "'two' is not HOST:PORT"),
        ("webhdfs://one:9870", "names no folder"),
        ("webhdfs://one:9870/hbase/WALs?user.name=x", "names no folder"),
        ("swebhdfs://one:9870/hbase/WALs", "must be in one HDFS"),
        ("/hbase/WALs", "must be in one HDFS"),
    ],
)
def test_urls_that_cannot_be_used_are_refused(wals: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        web_hdfs([wals, wals.replace("WALs", "oldWALs").replace("swebhdfs", "webhdfs")], "me", None, Dialer())
    if "must be" in text:
        with pytest.raises(ValueError, match=text):
            web_hdfs(["webhdfs://one:9870/oldWALs", wals], "me", None, Dialer())
