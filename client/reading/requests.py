"""A reader's requests, and what a response means: it is good, it is to be retried, or the caller must hear of it.

A reader's topics and start become partitions and offsets in generators without I/O: each yields the paths of requests,
is sent their replies, and returns its result.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Generator
from dataclasses import replace
from datetime import datetime
from typing import Any

from logferry.client.errors import OutOfRange, Rejected, Superseded
from logferry.client.reading.decode import ReceivedChunk, best_decoder, decode_chunk
from logferry.client.reading.subscription import Cursors, Partition, Position, ReaderOptions, ReadOffset, is_pattern
from logferry.client.transport.cluster import ANSWER_TIMEOUT_S, RETRY_S, USER_AGENT, pause_s
from logferry.client.transport.connections import Connections, Dialer, NoResponse, Reply
from logferry.client.transport.source_request import NextStep, next_step, problem_kind, read_answer

_ROOM_BYTES = 64 << 20  # above what was asked for: the largest chunk, and its encoding


class RetryLater(Exception):
    """The gateway cannot answer now, or did not. ``after_s``: the shortest pause that it asked for."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s

    def pause_s(self, failures: int) -> float:
        return pause_s(failures, RETRY_S, self.after_s)


# ---- requests ------------------------------------------------------------------------------------------------


class ReaderRequest:
    """One attempt at the present gateway: a GET, or a POST of ``body``. Raises `RetryLater` if there is no token.

    A page and a stream are asked for in the format of `best_decoder`, all else is JSON.
    """

    def __init__(
        self,
        options: ReaderOptions,
        path: str,
        body: bytes | None = None,
        is_page: bool = False,
        is_stream: bool = False,
    ) -> None:
        self._cluster = options.cluster
        self.base = options.cluster.current_url()
        self.url = self.base + path
        self.method, self.body = "GET" if body is None else "POST", body
        try:
            self.headers = {"User-Agent": USER_AGENT, **options.cluster.authorization(self.base)}
        except NoResponse as error:
            raise RetryLater(str(error)) from error
        self.headers["Accept-Encoding"] = "gzip" if is_page and options.gzip else "identity"
        if is_page or is_stream:
            self.headers["Accept"] = best_decoder().media_type
        if body is not None:
            self.headers["Content-Type"] = "application/json"

    def failed(self, error: object) -> RetryLater:
        """No response came: the next attempt goes to another gateway."""
        self._cluster.failed(self.base)
        return RetryLater(str(error))

    def answered(self, reply: Reply) -> Reply:
        """After a fault of this gateway the next attempt goes to another one."""
        if reply.status >= 500:
            self._cluster.failed(self.base)
        return reply


class ReaderRequests:
    """The requests of one thread, over kept connections. Another thread may `cut` them: what is under way ends."""

    def __init__(self, options: ReaderOptions, dialer: Dialer) -> None:
        self._options = options
        self._connections = Connections(ANSWER_TIMEOUT_S, dialer, options.page_bytes + _ROOM_BYTES)
        self.cut, self.close = self._connections.cut, self._connections.close

    def ask(self, path: str, body: bytes | None = None, is_page: bool = False) -> Reply:
        """GETs, or POSTs a ``body``. Raises `RetryLater` if no response comes."""
        request = ReaderRequest(self._options, path, body, is_page)
        try:
            reply = self._connections.exchange(request.url, request.headers, request.body, request.method)
        except NoResponse as error:
            raise request.failed(error) from None
        return request.answered(reply)


# ---- responses -----------------------------------------------------------------------------------------------


def content_of(reply: Reply) -> bytes:
    """The body of a good response, decompressed. Raises `RetryLater`, or an error for the caller."""
    if reply.status != 200:
        raise error_of(reply)
    if reply.headers.get("content-encoding") == "gzip":
        return zlib.decompress(reply.body, 16 + zlib.MAX_WBITS)
    return reply.body


def document_of(reply: Reply) -> dict[str, Any]:
    """The JSON object of a good response. Raises as `content_of` does."""
    try:
        found = json.loads(content_of(reply))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RetryLater(f"not a gateway's answer: {reply.body[:200]!r}")
    return found


def error_of(reply: Reply) -> Exception:
    """The error that a response stands for which is not good."""
    answer = read_answer(reply, opens=False)
    if next_step(answer) in (NextStep.WAIT, NextStep.AGAIN, NextStep.ADVANCE):
        return RetryLater(f"{reply.status} {answer.type}: {answer.detail}", answer.retry_after_s)
    try:
        return error_of_problem(json.loads(reply.body))
    except ValueError:
        return Rejected(f"{reply.status}: {answer.detail}", answer.type, reply.status)


def error_of_problem(document: Any) -> Exception:
    """The error of a problem document: that of a response, or of a stream's last frame."""
    if not isinstance(document, dict):
        return RetryLater(f"not a gateway's problem: {document!r}")
    kind, status = problem_kind(document), document.get("status")
    text = f"{kind or status}: {document.get('detail') or document.get('title')}"
    if kind == "out-of-range" and "first" in document:
        partition = str(document.get("topic", "")), int(document.get("partition", -1))
        return OutOfRange(text, *partition, document["first"], document["next"])
    if not isinstance(status, int) or status >= 500 or status in (408, 429):
        return RetryLater(text)
    return (Superseded if kind == "superseded" else Rejected)(text, kind, status)


def resolve_cursors(wanted: ReaderOptions) -> Generator[str, Reply, ReaderOptions]:
    """The options, their cursors resolved to a position in the data centre that is read. Waits for the mirror."""
    if not isinstance(wanted.start, Cursors):
        return wanted
    found = {}
    for partition, at in sorted(wanted.start.items()):
        found[partition] = ReadOffset((yield from _translated(wanted, partition, f"offset={at.offset}")), at.lines)
    return replace(wanted, start=Position(found))


def cursors_of(wanted: ReaderOptions, position: Position) -> Generator[str, Reply, Cursors]:
    """A position in the data centre that is read → cursors for all data centres."""
    found = {}
    for partition, at in sorted(position.items()):
        query = f"offset={at.offset}&to={partition[0].partition('.')[0]}"
        found[partition] = ReadOffset((yield from _translated(wanted, partition, query)), at.lines)
    return Cursors(found)


def translated_offset(
    wanted: ReaderOptions, partition: Partition, offset: int, from_dc: str, to_dc: str
) -> Generator[str, Reply, int]:
    """The offset of the same record in another data centre."""
    return _translated(wanted, partition, f"offset={offset}&from={from_dc}&to={to_dc}")


def _translated(wanted: ReaderOptions, partition: Partition, query: str) -> Generator[str, Reply, int]:
    return int(document_of((yield wanted.translate_path(partition, query)))["translated"])


def full_topics(wanted: ReaderOptions) -> Generator[str, Reply, list[str]]:
    """The topics of a consumer, in full; patterns unchanged."""
    found = []
    for topic in wanted.topics:
        found.append(topic if is_pattern(topic) else str(document_of((yield wanted.topic_path(topic)))["topic"]))
    return found


def start_positions(wanted: ReaderOptions) -> Generator[str, Reply, list[tuple[Partition, ReadOffset, int | None]]]:
    """Every partition to read, with its start; without ``follow`` also with its end, else with None."""
    found = []
    for topic in wanted.topics:
        document = document_of((yield wanted.topic_path(topic)))
        while any(one["next"] is None and wanted.reads(one["partition"]) for one in document["offsets"]):
            # A partition has no leader; the gateway has waited for one.
            document = document_of((yield wanted.topic_path(topic)))
        full, offsets = str(document["topic"]), document["offsets"]
        for one in offsets:
            if wanted.reads(one["partition"]):
                partition = full, int(one["partition"])
                at = yield from _start(wanted, partition, one)
                found.append((partition, at, None if wanted.follow else int(one["next"])))
    stored = wanted.stored()
    known = {partition for partition, _, _ in found}
    strange = [f"{topic}:{number}" for topic, number in sorted(stored) if (topic, number) not in known]
    if strange and len(strange) == len(stored):
        raise Rejected(f"start: the position is of {', '.join(strange)}, which is not what is read")
    return found


def lags_of(wanted: ReaderOptions, position: Position) -> Generator[str, Reply, dict[Partition, int | None]]:
    """How many offsets lie between the position and the end of each partition; None: it has no leader."""
    found: dict[Partition, int | None] = {}
    for topic in sorted({topic for topic, _ in position}):
        for one in document_of((yield wanted.topic_path(topic)))["offsets"]:
            at = position.get((topic, int(one["partition"])))
            if at is not None:
                end = None if one["next"] is None else int(one["next"])
                found[topic, int(one["partition"])] = None if end is None else max(end - at.offset, 0)
    return found


def _start(wanted: ReaderOptions, partition: Partition, offsets: dict[str, Any]) -> Generator[str, Reply, ReadOffset]:
    if isinstance(wanted.start, Position):
        return wanted.start.get(partition, ReadOffset(int(offsets["first"])))
    if isinstance(wanted.start, datetime):
        at_ms = max(int(wanted.start.timestamp() * 1000), 0)
        reply = yield wanted.page_path(partition, f"time_ms={at_ms}", 1, 0, filtered=False)
        chunks, next_offset = page_of(reply)
        return ReadOffset(chunks[0].offset if chunks else next_offset)
    return ReadOffset(int(offsets["next" if wanted.start == "latest" else "first"]))


def page_of(reply: Reply) -> tuple[list[ReceivedChunk], int]:
    """The chunks of a page, and the offset of the next one. Raises `RetryLater`, or an error for the caller."""
    content = content_of(reply)
    try:
        return [decode_chunk(row) for row in best_decoder().feed(content)], int(reply.headers["x-next-offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise RetryLater(f"not a gateway's answer: {error!r}") from None
