"""The routes about topics: list, describe, create, grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from aiohttp import web
from logferry.gateway.contract.names import check_topic
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.topics.catalog import TopicCatalog
from pydantic import BaseModel, ConfigDict, Field


class TopicBody(BaseModel):
    """The body of ``PUT /v1/topics/{topic}``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    partitions: Annotated[int, Field(ge=1, le=10_000)]
    retention_ms: Annotated[int, Field(ge=-1)] | None = None


@dataclass(frozen=True, slots=True)
class TopicsApi:
    topics: TopicCatalog
    admission: Admission

    def add_to(self, routes: Routes) -> None:
        topic = "/v1/topics/{topic}"
        routes.add("GET", "/v1/topics", "topics", self.list_topics, Right.KNOWN)
        routes.add("GET", topic, "topic", self.get_topic, Right.TOPIC)
        routes.add("PUT", topic, "put_topic", self.put_topic, Right.ADMIN)

    async def list_topics(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        return json_response({"topics": await self.topics.describe_all(call.caller.may_see)})

    async def get_topic(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        return json_response(await self.topics.describe(call.first("topic")))

    async def put_topic(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        name = check_topic(call.first("topic"))
        wanted = await self.admission.document(call.request, TopicBody)
        described, created = await self.topics.put(name, wanted.partitions, wanted.retention_ms)
        return json_response(described, status=201 if created else 200)
