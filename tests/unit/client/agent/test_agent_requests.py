"""Requests: what they look like, whom they go to, who sees the token."""

from __future__ import annotations

import gzip
import io
import json

import msgpack
import pytest
from logferry.client.agent.schedule import HeartbeatReport, PushJob
from logferry.client.agent.workers import Pusher
from logferry.client.files.chunking import FileBatch, Piece
from logferry.client.transport.cluster import BACK_TO_FIRST_S, GatewayCluster
from logferry.client.transport.connections import Body, NoResponse, Reply
from logferry.client.transport.source_request import MOST_REDIRECTS, NO_ANSWER, NextStep, next_step

SOURCE = "h:/var/log/a b%.log#1"
PATH = "/v1/topics/t/sources/h%3A%2Fvar%2Flog%2Fa%20b%25.log%231"
BATCH = FileBatch(10, b"aa\nbbb\n", (Piece(0, 3, None), Piece(3, 7, None)), 99, {"host": "h"})
OPEN = PushJob("t", SOURCE, None, True, None, None)
WRITE = PushJob("t", SOURCE, None, True, 7, BATCH)
DONE = Reply(200, {}, b'{"recorded_seqno": 17}')


class Script:
    """Gives the replies in turn and notes the requests."""

    def __init__(self, *replies: Reply | NoResponse) -> None:
        self.replies = list(replies)
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    def __call__(self, url: str, headers: dict[str, str], body: Body | None, method: str = "POST") -> Reply:
        assert body is not None
        self.requests.append((url, headers, body if isinstance(body, bytes) else b"".join(body)))
        reply = self.replies.pop(0)
        if isinstance(reply, NoResponse):
            raise reply
        return reply


def session(url: str | None = None) -> Reply:
    return Reply(
        200, {}, b'{"session": 7, "recorded_seqno": 10, "url": %b}' % (b'"%b"' % url.encode() if url else b"null")
    )


def redirect(to: str) -> Reply:
    return Reply(307, {"location": to}, b"")


def unpacked(body: bytes, encoding: str) -> bytes:
    if encoding == "zstd":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return gzip.decompress(body) if encoding == "gzip" else body


def pusher(script: Script, *urls: str, token: str | None = None, encoding: str = "gzip") -> Pusher:
    return Pusher([GatewayCluster(urls or ("http://g:1/base/",), token)], script, encoding)


def test_a_session_is_asked_of_a_given_url_without_redirects() -> None:
    script = Script(session("http://w:2"))
    outcome = pusher(script).perform(OPEN)
    (url, headers, body), *_ = script.requests
    assert (url, body) == (f"http://g:1/base{PATH}/session", b"")
    assert "X-Logferry-Redirect" not in headers
    assert (outcome.answer.session, outcome.answer.recorded_seqno, outcome.url) == (7, 10, "http://w:2")


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "none"])
def test_chunks_go_as_one_body(encoding: str) -> None:
    if encoding == "zstd":
        pytest.importorskip("zstandard")
    script = Script(DONE)
    outcome = pusher(script, encoding=encoding).perform(WRITE)
    (url, headers, body), *_ = script.requests
    assert url == f"http://g:1/base{PATH}/chunks?session=7"
    assert headers["Content-Type"] == "application/vnd.msgpack"
    assert headers["X-Logferry-Redirect"] == "1"
    assert headers.get("Content-Encoding", "none") == encoding
    rows = list(msgpack.Unpacker(io.BytesIO(unpacked(body, encoding))))
    assert rows == [[13, 10, 99, {"host": "h"}, b"aa\n"], [17, 13, 99, {"host": "h"}, b"bbb\n"]]
    assert next_step(outcome.answer) is NextStep.ADVANCE


def test_a_redirect_keeps_method_and_body_and_is_remembered() -> None:
    script = Script(redirect("http://w:2" + PATH + "/chunks?session=7"), DONE)
    outcome = pusher(script).perform(WRITE)
    assert script.requests[1][0] == "http://w:2" + PATH + "/chunks?session=7"
    assert script.requests[1][2] == script.requests[0][2]
    assert outcome.url == "http://w:2"


def test_the_token_goes_to_given_urls_and_to_owners_named_by_a_session() -> None:
    script = Script(session("http://w:2"), redirect("http://w:2" + PATH + "/chunks?session=7"), DONE)
    push = pusher(script, token="secret")
    push.perform(OPEN)
    push.perform(WRITE)
    assert [headers.get("Authorization") for _, headers, _ in script.requests] == ["Bearer secret"] * 3


@pytest.mark.parametrize("to", ["http://evil:2/x", "https://g:1/x", "http://g:2/x", "//evil/x", "http://g:1@evil/x"])
def test_a_redirect_elsewhere_is_not_followed_with_a_token(to: str) -> None:
    script = Script(redirect(to), DONE)
    outcome = pusher(script, token="secret").perform(WRITE)
    assert len(script.requests) == 1
    assert next_step(outcome.answer) is NextStep.ASK


@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://h/x", "http://[::1/x", ""])
def test_a_redirect_that_is_no_web_address_is_never_followed(to: str) -> None:
    script = Script(redirect(to), DONE)
    assert next_step(pusher(script).perform(WRITE).answer) is NextStep.ASK
    assert len(script.requests) == 1


def test_an_owner_without_tls_is_not_trusted_by_one_with() -> None:
    script = Script(session("http://w:2"), DONE)
    push = pusher(script, "https://g", token="secret")
    assert push.perform(OPEN).url == "https://g"
    push.perform(WRITE._replace(url="http://w:2"))
    assert "Authorization" not in script.requests[1][1]


def test_redirects_end() -> None:
    script = Script(*[redirect("http://g:1/again")] * 99)
    assert pusher(script).perform(WRITE).answer.status == NO_ANSWER
    assert len(script.requests) == MOST_REDIRECTS


def test_without_answer_the_next_given_url_is_tried_next_time() -> None:
    script = Script(NoResponse("gone"), DONE, NoResponse("gone"), DONE)
    push = pusher(script, "http://g:1", "http://g:2")
    for _ in range(4):
        push.perform(WRITE)
    hosts = [url.partition("/v1/")[0] for url, _, _ in script.requests]
    assert hosts == ["http://g:1", "http://g:2", "http://g:2", "http://g:1"]


def test_the_first_url_is_tried_again_after_a_time() -> None:
    now = [0.0]
    cluster = GatewayCluster(["http://g:1", "http://g:2", "http://g:3"], None, clock=lambda: now[0])
    asked = []
    for later_s in (0.0, 1.0, 1.0, BACK_TO_FIRST_S, 0.0, BACK_TO_FIRST_S - 1, 1.0):
        now[0] += later_s
        asked.append(cluster.current_url()[-1])
        if later_s != BACK_TO_FIRST_S - 1:
            cluster.failed(cluster.current_url())
    assert asked == ["1", "2", "3", "1", "2", "3", "1"]


def test_of_many_that_failed_at_the_same_time_one_counts() -> None:
    cluster = GatewayCluster(["http://g:1", "http://g:2"], None)
    for _ in range(4):
        cluster.failed("http://g:1")
    assert cluster.current_url() == "http://g:2"


def test_a_heartbeat_names_what_is_known() -> None:
    script = Script(session())
    outcome = pusher(script).perform(WRITE._replace(batch=None, beat=HeartbeatReport(17, None, 5, True)))
    ((url, headers, body),) = script.requests
    assert url == f"http://g:1/base{PATH}/heartbeat?session=7"
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"position": 17, "watermark_ms": 5, "finished": True}
    assert next_step(outcome.answer) is NextStep.ADVANCE


def test_the_owner_is_left_out_when_it_shall_be_forwarded() -> None:
    script = Script(DONE, DONE)
    push = pusher(script, "http://g:1")
    push.perform(WRITE._replace(url="http://w:2"))
    push.perform(WRITE._replace(url="http://w:2", direct=False))
    (first, _, _), (second, headers, _) = script.requests
    assert first.startswith("http://w:2/")
    assert second.startswith("http://g:1/")
    assert "X-Logferry-Redirect" not in headers
