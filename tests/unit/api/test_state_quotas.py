"""Sessions and heartbeats leave a state in Kafka and in memory: they count in quotas, with the bytes of their keys, and
the body of a heartbeat is small."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request
from aiohttp.web import BaseRequest
from logferry.gateway.api.sources import SourcesApi
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.router import Call, Routes
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes.dedup import Refusal

TOKEN = {"name": "tenant", "sha256": "0" * 64, "write": ["*"], "chunks_per_s": 5}
CONFIG = Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "x:1"}, "tokens": [TOKEN]})


class World:
    """The handlers of a worker that owns every lane; its lanes refuse everything and keep what they got."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []
        topics = Mock()
        topics.fresh = Mock(return_value=None)
        facts = TopicFacts("dc1.nginx", b"i" * 16, 1, 1 << 20)
        topics.facts = AsyncMock(return_value=facts)
        lane = Mock(submit=self._submit)
        forwarding: Any = Mock(answer=lambda _request, _source, here: here(lane))
        quotas, admission = Quotas(CONFIG), Admission(CONFIG.limits)
        self.routes = Routes(Gate(CONFIG))
        SourcesApi(CONFIG, topics, Mock(), forwarding, admission, Mock(), quotas).add_to(self.routes)
        self.caller = next(iter(Gate(CONFIG)._tokens.values()))

    async def _submit(self, request: Any) -> Any:
        self.submitted.append(request)
        return Mock(outcome=Refusal("superseded", "refused", None))

    def call(self, last: str, body: bytes = b"", **query: str) -> Call:
        payload = StreamReader(Mock(_reading_paused=False), 1 << 16, loop=asyncio.get_running_loop())
        payload.feed_data(body)
        payload.feed_eof()
        path = f"/v1/topics/nginx/sources/web1/{last}"
        request = make_mocked_request("POST", path, headers={"Content-Length": str(len(body))}, payload=payload)
        return Call(request, path.split("/"), query, self.caller)


async def answered(world: World, last: str, body: bytes | None = None, **query: str) -> str:
    """The kind of the problem that the handler answers with."""
    [handler] = [route.handler for route in world.routes.declared if route.path.endswith(last)]
    call = world.call(last, (b"{}" if last == "heartbeat" else b"") if body is None else body, **query)
    with pytest.raises(Problem) as caught:
        await handler(call)
    return caught.value.kind


@pytest.mark.parametrize("last", ["session", "heartbeat"])
async def test_sessions_and_heartbeats_count_as_chunks(last: str) -> None:
    world = World()
    kinds = [await answered(world, last) for _ in range(50)]
    assert kinds[:5] == ["superseded"] * 5
    assert kinds.count("quota") > 30
    assert len(world.submitted) == kinds.count("superseded")


@pytest.mark.parametrize(("last", "query"), [("session", {}), ("heartbeat", {}), ("chunks", {"seqno": "1"})])
async def test_the_bytes_of_keys_count_in_the_lane(last: str, query: dict[str, str]) -> None:
    sizes = []
    for key in ("k", "k" * 500):
        world = World()
        assert await answered(world, last, None, partition_key=key, **query) == "superseded"
        sizes.append(world.submitted[0].size_bytes)
    assert sizes[1] - sizes[0] == 499


@pytest.mark.parametrize(("size", "kind"), [(4096, "superseded"), (4097, "too-large"), (4 << 20, "too-large")])
@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_heartbeat_has_at_most_4_kib(
    size: int, kind: str, is_declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its head does not say how long it is."""
    if not is_declared:
        monkeypatch.setattr(BaseRequest, "content_length", None)
    world = World()
    assert await answered(world, "heartbeat", b'{"position": 1' + b" " * (size - 15) + b"}") == kind
    assert len(world.submitted) == (kind == "superseded")
