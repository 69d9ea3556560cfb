"""The routes about consumers: read sessions, their commits, positions. A consumer is a consumer group at Kafka.

Reading a topic, and moving a consumer's positions in it, take the right to read it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeVar

from aiohttp import web
from aiokafka.errors import UnknownTopicOrPartitionError
from logferry.gateway.api.forwarding import FORWARDED, REDIRECT, Routing
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import MAX_SEQNO, Cursor, Malformed, split_topic
from logferry.gateway.cursors import Cursors
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.request import validated
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.consumer_groups import Groups, Refused
from logferry.gateway.reading import consumer_offsets as lag
from logferry.gateway.reading import formats as frames
from logferry.gateway.reading.assignment import NOBODY
from logferry.gateway.reading.formats import Partition
from logferry.gateway.reading.registry import Readers, ended, worker_of
from logferry.gateway.selection import Wanted, unknown_topic
from pydantic import BaseModel, ConfigDict, Field, model_validator

_CONSUMER: Final = re.compile(r"[a-zA-Z0-9._-]{1,200}\Z")
_PATTERN: Final = re.compile(r"[a-zA-Z0-9._*?\[\]!-]{1,256}\Z")
_MOST_TOPICS: Final = 100
_MOST_POSITIONS: Final = 10_000

_Offset = Annotated[int, Field(ge=0, le=MAX_SEQNO)]
_T = TypeVar("_T")
_End = Literal["earliest", "latest"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Position(_Body):
    """``offset``: that of the next record to read."""

    topic: str
    partition: Annotated[int, Field(ge=0, le=2**31 - 1)]
    offset: _Offset


class CommitBody(_Body):
    """The body of ``POST …/commit``."""

    generation: Annotated[int, Field(ge=0, le=2**31 - 1)]
    positions: Annotated[list[Position], Field(min_length=1, max_length=_MOST_POSITIONS)]


class PositionWanted(_Body):
    """Topic and partition with one of ``offset`` and ``time_ms``, or a ``cursor``, which names them.

    A time means the first record that is as late.
    """

    topic: str | None = None
    partition: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    offset: _Offset | _End | None = None
    time_ms: _Offset | None = None
    cursor: str | None = None

    @model_validator(mode="after")
    def _one(self) -> PositionWanted:
        if sum(given is not None for given in (self.offset, self.time_ms, self.cursor)) != 1:
            raise ValueError("exactly one of offset, time_ms and cursor is needed")
        if {self.topic is None, self.partition is None} != {self.cursor is not None}:
            raise ValueError("topic and partition are needed, but with a cursor, which names them")
        return self


class PositionsBody(_Body):
    """The body of ``PUT …/offsets``: positions one by one, or a whole topic ``to`` an end or a time in ms."""

    positions: Annotated[list[PositionWanted], Field(min_length=1, max_length=_MOST_POSITIONS)] | None = None
    topic: str | None = None
    to: _Offset | _End | None = None

    @model_validator(mode="after")
    def _one(self) -> PositionsBody:
        if (self.positions is None) == (self.topic is None) or (self.topic is None) != (self.to is None):
            raise ValueError("either positions, or topic and to")
        return self


@dataclass(frozen=True, slots=True)
class Consumers:
    """The handlers about consumers."""

    config: Config
    kafka: Kafka
    routing: Routing
    admission: Admission
    readers: Readers
    url: str
    gate: Gate
    cursors: Cursors

    def add_to(self, routes: Routes) -> None:
        consumer = "/v1/consumers/{consumer}"
        routes.add("GET", consumer + "/stream", "stream", self.stream, Right.KNOWN, lists=("topic", "cursor"))
        routes.add("POST", consumer + "/sessions/{session}/commit", "commit", self.commit, Right.KNOWN)
        routes.add("GET", consumer + "/offsets", "offsets", self.offsets, Right.KNOWN, lists=("topic",))
        routes.add("PUT", consumer + "/offsets", "put_offsets", self.put_offsets, Right.KNOWN)

    async def stream(self, call: Call) -> web.StreamResponse:
        consumer = self._consumer(call)
        filters = {name[5:]: call.query[name] for name in call.query if name.startswith("attr.")}
        call.knows_only("from", "source_prefix", *(f"attr.{name}" for name in filters))
        start = call.query.get("from", "earliest")
        if start not in ("earliest", "latest"):
            raise Malformed(f"from: {start[:40]!r} is neither earliest nor latest")
        encoding = frames.encoding(call.request.headers.get("Accept", ""))
        topics, patterns = self._topics(call)
        if not topics and not patterns:
            raise Malformed("topic: is missing from the query")
        cursors = self._cursors(call)
        self.readers.check_room()
        prefix = call.query.get("source_prefix", "")
        wanted = Wanted(consumer, topics, patterns, self._may_read(call), prefix, filters)
        found = wanted.among(await self.readers.topics())
        if topics - found:
            raise unknown_topic(min(topics - found))
        strange = [cursor for cursor in cursors if cursor.topic not in found]
        if strange:
            raise Malformed(f"cursor: {strange[0]} is of a topic that is not read")
        if cursors:
            here = await self.cursors.here(cursors)
            settings = [lag.Setting(partition, offset) for partition, offset in here.items()]
            await self._set(consumer, await lag.resolved(self.kafka, settings))
        if start == "latest":
            await lag.start_at_latest(self.kafka, consumer, found)
        return await self.readers.stream(call.request, wanted, encoding)

    async def commit(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        consumer, session_id = self._consumer(call), call.second("session")
        worker = worker_of(session_id)
        if worker != self.url:
            return await self._elsewhere(call, session_id, worker)
        body = validated(CommitBody, await self.admission.read(call.request))
        offsets: dict[Partition, int] = {}
        for position in body.positions:
            self._add(call, offsets, (position.topic, position.partition), position.offset)
        session = self.readers.find(session_id, consumer)
        try:
            await session.commit(body.generation, offsets)
        except UnknownTopicOrPartitionError as error:
            raise unknown_topic(str(error)) from None
        committed = {"positions": frames.positions(offsets), "cursors": await self.cursors.of(offsets)}
        return json_response({"consumer": consumer, "generation": body.generation, **committed})

    async def offsets(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        consumer = self._consumer(call)
        topics, patterns = self._topics(call)
        if patterns:
            raise Malformed("topic: patterns are not known here; without any, all topics with a position are shown")
        if topics:
            missing = topics - (await self.kafka.describe(sorted(topics))).topics.keys()
            if missing:
                raise unknown_topic(min(missing))
        groups = Groups(self.kafka)
        view = await groups.view(consumer)
        committed = await groups.committed(consumer)
        if topics:
            committed = {partition: offset for partition, offset in committed.items() if partition[0] in topics}
        positions = await lag.lags(self.kafka, committed, topics, self._may_read(call))
        return json_response(
            {"consumer": consumer, "state": view.state, "members": view.members, "positions": positions}
        )

    async def put_offsets(self, call: Call) -> web.StreamResponse:
        """Sets positions, while the consumer has no live sessions: they would not hear of it."""
        call.knows_only()
        consumer = self._consumer(call)
        body = validated(PositionsBody, await self.admission.read(call.request))
        settings: dict[Partition, lag.Setting] = {}
        cursors: dict[Partition, Cursor] = {}
        for wanted in body.positions or await self._all_partitions(call, body):
            if wanted.cursor is not None:
                cursor = Cursor.parse(wanted.cursor)
                self._add(call, cursors, (cursor.topic, cursor.partition), cursor)
                continue
            partition = (wanted.topic or "", wanted.partition or 0)
            self._add(call, settings, partition, lag.Setting(partition, wanted.offset, wanted.time_ms))
        for partition, offset in (await self.cursors.here(cursors.values())).items():
            self._add(call, settings, partition, lag.Setting(partition, offset))
        offsets = await lag.resolved(self.kafka, settings.values())
        await self._set(consumer, offsets)
        return json_response({"consumer": consumer, "positions": frames.positions(offsets)})

    async def _set(self, consumer: str, offsets: dict[Partition, int]) -> None:
        groups = Groups(self.kafka)
        try:
            await groups.commit(consumer, NOBODY, offsets)
        except UnknownTopicOrPartitionError as error:
            raise unknown_topic(str(error)) from None
        except Refused:
            members = (await groups.view(consumer)).members
            detail = f"{consumer} has {members} live members, which would not hear of it; end them first"
            raise Problem("conflict", detail, members=members) from None

    # ---- input ------------------------------------------------------------------------------------------------

    def _consumer(self, call: Call) -> str:
        """The consumer of the path. Raises Malformed, and Problem ``conflict`` for a group of the gateway's own."""
        consumer = call.first("consumer")
        if not _CONSUMER.match(consumer):
            raise Malformed(f"consumer: {consumer[:200]!r} is not 1 to 200 of a-z A-Z 0-9 . _ -")
        own = f"{self.config.prefix}.gateway."
        if consumer.startswith(own):
            raise Problem("conflict", f"names that begin with {own} are of the gateway's own groups")
        return consumer

    def _may_read(self, call: Call) -> lag.MayRead:
        """Topics of the known data centres that the caller may read at the time of asking: sessions live long."""
        dcs, gate, caller = self.config.known_dcs, self.gate, call.caller
        return lambda name: name.partition(".")[0] in dcs and gate.present(caller).may_read(name)

    def _topics(self, call: Call) -> tuple[frozenset[str], tuple[str, ...]]:
        """The topics and the patterns of the query. Raises Malformed, and Problem ``forbidden``."""
        texts = call.lists["topic"]
        if len(texts) > _MOST_TOPICS:
            raise Malformed(f"topic: is given {len(texts)} times, allowed are {_MOST_TOPICS}")
        patterns = tuple(text for text in texts if any(sign in text for sign in "*?["))
        for pattern in patterns:
            if not _PATTERN.match(pattern):
                raise Malformed(f"topic: {pattern[:200]!r} is not a pattern of a-z A-Z 0-9 . _ - * ? [ ] !")
        topics = frozenset(texts) - set(patterns)
        for topic in topics:
            self._check(call, topic)
        return topics, patterns

    def _cursors(self, call: Call) -> list[Cursor]:
        """Where the session is to begin, whatever is committed. Raises Malformed, and Problem ``forbidden``."""
        found: dict[Partition, Cursor] = {}
        for text in call.lists["cursor"]:
            cursor = Cursor.parse(text)
            self._add(call, found, (cursor.topic, cursor.partition), cursor)
        return list(found.values())

    def _check(self, call: Call, topic: str) -> None:
        dc, _ = split_topic(topic)
        if dc not in self.config.known_dcs:
            raise unknown_topic(topic)
        if not call.caller.may_read(topic):
            raise Problem("forbidden", f"the token {call.caller.name} does not have the right to read {topic}")

    def _add(self, call: Call, found: dict[Partition, _T], partition: Partition, value: _T) -> None:
        self._check(call, partition[0])
        if partition in found:
            raise Malformed(f"{partition[0]}, partition {partition[1]} is given more than once")
        found[partition] = value

    async def _all_partitions(self, call: Call, body: PositionsBody) -> list[PositionWanted]:
        topic, to = body.topic or "", body.to
        self._check(call, topic)
        views = (await self.kafka.describe([topic])).topics
        if topic not in views:
            raise unknown_topic(topic)
        numbers = range(len(views[topic].partitions))
        if isinstance(to, int):
            return [PositionWanted(topic=topic, partition=number, time_ms=to) for number in numbers]
        return [PositionWanted(topic=topic, partition=number, offset=to) for number in numbers]

    async def _elsewhere(self, call: Call, session_id: str, worker: str | None) -> web.StreamResponse:
        """The session lives in another worker, if that one is alive. Never handed on twice."""
        if worker is None or FORWARDED in call.request.headers:
            raise ended(session_id)
        members = await self.kafka.group_assignment(self.config.group, self.config.state_topic)
        if members is None:
            raise Problem("not-owner-yet", "the workers are changing; whether the session lives is not known yet")
        if worker not in members:
            raise ended(session_id)
        if call.request.headers.get(REDIRECT) == "1":
            return web.Response(status=307, headers={"Location": worker + call.request.raw_path})
        return await self.routing.forward(call.request, worker, "the worker of the session")
