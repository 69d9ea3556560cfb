"""Who may use a consumer: the tokens that name it, never for logferry's own groups, nor for those of other programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request
from logferry.gateway.api.consumers import ConsumersApi
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.router import Call
from logferry.gateway.kafka.consumer_groups import ConsumerGroupDescribeRequest
from logferry.gateway.reading.consumer_offsets import check_members, strangers
from pydantic import ValidationError

KAFKA = {"bootstrap_servers": "x:1"}
TOKEN = {"name": "web", "sha256": "0" * 64, "read": ["*"]}


def api(*, prefix: str = "logferry", **rights: Any) -> tuple[ConsumersApi, Gate]:
    config = Config.model_validate({"dc": "dc1", "prefix": prefix, "kafka": KAFKA, "tokens": [{**TOKEN, **rights}]})
    gate = Gate(config)
    return ConsumersApi(config, Mock(), Mock(), Mock(), Mock(), "http://w", gate, Mock()), gate


def call(gate: Gate, consumer: str) -> Call:
    path = f"/v1/consumers/{consumer}/stream"
    return Call(make_mocked_request("GET", path), path.split("/"), {}, next(iter(gate._tokens.values())))


@pytest.mark.parametrize("consumer", ["logferry.mirror.dc1", "logferry.gateway.dc1", "logferry.x", "lf.gateway.dc1"])
def test_groups_of_logferry_itself_are_reserved(consumer: str) -> None:
    handlers, gate = api(prefix="lf")
    with pytest.raises(Problem, match="reserved"):
        handlers._consumer(call(gate, consumer), "commit")
    assert handlers._consumer(call(gate, "lfx"), "commit") == "lfx"


@pytest.mark.parametrize(
    ("patterns", "good", "bad"),
    [(None, ["anything"], []), (["web-*", "x"], ["web-1", "x"], ["web", "x1", "Web-1"]), ([], [], ["anything"])],
)
def test_a_token_uses_the_consumers_that_it_names(patterns: list[str] | None, good: list[str], bad: list[str]) -> None:
    handlers, gate = api(consumers=patterns)
    for consumer in good:
        assert handlers._consumer(call(gate, consumer), "commit") == consumer
    for consumer in bad:
        with pytest.raises(Problem, match="forbidden"):
            handlers._consumer(call(gate, consumer), "commit")


def test_a_session_ends_with_the_right_to_use_its_consumer() -> None:
    handlers, gate = api()
    may_read = handlers._may_read(call(gate, "c"), "c")
    assert may_read("dc1.nginx")
    gate.replace(Config.model_validate({"dc": "dc1", "kafka": KAFKA, "tokens": [{**TOKEN, "consumers": ["d"]}]}).tokens)
    assert not may_read("dc1.nginx")


def test_consumers_without_a_right_to_read_are_a_mistake() -> None:
    with pytest.raises(ValidationError, match="consumers restricts read"):
        api(read=[], write=["*"], consumers=["x"])


def described(kind: str, *client_ids: str, newer: tuple[str, ...] | None = None) -> Any:
    """Kafka, whose only group has members with these client ids. ``newer``: those of the newer protocol."""
    members = [(f"member-{client_id}", client_id, "/127.0.0.1", b"", b"") for client_id in client_ids]
    newer_members = [("m", None, None, 1, client_id) for client_id in newer or ()]
    newer_code = 69 if newer is None else 0

    async def send(request: Any) -> Any:
        if isinstance(request, ConsumerGroupDescribeRequest):
            return Mock(groups=[(newer_code, "", "c", "Stable", 1, 1, "uniform", newer_members, 0, {})])
        return Mock(groups=[(0, "c", "Stable", kind, "roundrobin", members)])

    async def with_coordinator(_group: str, ask: Callable[[Any], Any]) -> Any:
        return await ask(send)

    return Mock(with_coordinator=with_coordinator)


@pytest.mark.parametrize(("kind", "client_ids"), [("", ()), ("consumer", ()), ("consumer", ("logferry-abc.1",) * 2)])
async def test_groups_of_read_sessions_are_ours(kind: str, client_ids: tuple[str, ...]) -> None:
    await check_members(described(kind, *client_ids), "c")


@pytest.mark.parametrize(("kind", "client_ids"), [("consumer", ("logferry-a", "spark")), ("connect", ("logferry-a",))])
async def test_groups_of_other_programs_are_refused(kind: str, client_ids: tuple[str, ...]) -> None:
    with pytest.raises(Problem, match="conflict"):
        await check_members(described(kind, *client_ids), "c")


async def test_members_of_the_newer_protocol_are_seen() -> None:
    """DescribeGroups says that their group is dead."""
    assert await strangers(described("", newer=("spark", "logferry-a.1")), "c") == ["spark"]
    with pytest.raises(Problem, match="conflict"):
        await check_members(described("", newer=("spark",)), "c")
    await check_members(described("", newer=()), "c")
