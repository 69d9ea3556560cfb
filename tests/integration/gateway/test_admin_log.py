"""The log of administrative acts and refusals, over HTTP and in its topic."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from logferry.gateway.admin_log.records import ACTS
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Setting

from tests.support.served_gateway import Gateway

ADMIN, WRITER, STRANGER = new_token(), new_token(), new_token()
TABLES = (
    f'[[tokens]]\nname = "admin"\nsha256 = "{ADMIN[1]}"\nwrite = ["*"]\nread = ["*"]\nadmin = ["*"]\n'
    f'[[tokens]]\nname = "writer"\nsha256 = "{WRITER[1]}"\nwrite = ["nginx"]\n'
)
PATIENT = aiohttp.ClientTimeout(60)
# What changes data of the caller's own, and no rights or settings of others.
DATA = {
    *("write", "session", "heartbeat", "append", "commit", "put_table", "put_hbase_report"),
    *("lines", "hec", "hec_kind", "hec_version", "bulk", "bulk_into", "otlp"),
    *("archive_store", "archive_seal", "archive_commit"),
}


@pytest.fixture
async def gateway(kafka: KafkaCluster, tmp_path: Path) -> AsyncIterator[Gateway]:
    # Of a data centre of its own: other tests have topics of the same names.
    settings: dict[str, Setting] = {"dc": "acts", "data_centres": ["acts"]}
    async with Gateway(tmp_path, kafka.bootstrap, 2, TABLES, settings=settings) as gateway:
        yield gateway


async def page(gateway: Gateway, query: str) -> dict[str, Any]:
    status, document, _ = await gateway.ask("GET", f"/v1/admin-log?{query}", ADMIN[0], timeout=PATIENT)
    assert status == 200, document
    assert isinstance(document, dict)
    return document


async def records(gateway: Gateway, kind: str, count: int) -> list[dict[str, Any]]:
    """Once there are so many requests in them."""
    async with asyncio.timeout(90):
        while True:
            found: list[dict[str, Any]] = (await page(gateway, f"kind={kind}"))["records"]
            if sum(record["count"] for record in found) >= count:
                return found
            await asyncio.sleep(0.2)


async def test_acts_and_refusals_are_logged(gateway: Gateway) -> None:
    assert await page(gateway, "") == {"kind": "acts", "records": [], "next": 0}
    began_ms = int(time.time() * 1000)
    body = '{"partitions": 2}'
    assert (await gateway.ask("PUT", "/v1/topics/nginx", ADMIN[0], data=body, timeout=PATIENT))[0] in (200, 201)
    assert (await gateway.ask("PUT", "/v1/topics/nginx", ADMIN[0], data='{"partitions": 1}'))[0] == 409
    # Written through one worker and forgotten through both: the owner notes it, too, wherever it is.
    sources = [f"web{number}" for number in range(4)]
    for source in sources:
        path = f"/v1/topics/nginx/sources/{source}"
        assert (await gateway.ask("POST", path + "/chunks?seqno=1", WRITER[0], data=b"x"))[0] == 200
        assert (await gateway.ask("DELETE", path, ADMIN[0]))[0] == 200
        assert (await gateway.ask("DELETE", path, WRITER[0], worker=1))[0] == 403
    for number in range(200):
        assert (await gateway.ask("GET", f"/v1/topics/guess-{number}", STRANGER[0]))[0] == 401
    acts = await records(gateway, "acts", 2 + len(sources))
    keys = ("act", "caller", "address", "path", "status", "result", "facts")
    topic = ("admin", "127.0.0.1", "/v1/topics/nginx")
    made = [tuple(record[key] for key in keys) for record in acts if record["act"] == "put_topic"]
    assert [(*one[:4], one[5]) for one in made] == [("put_topic", *topic, "done"), ("put_topic", *topic, "failed")]
    assert made[0][6] == {"partitions": 2}
    by_callers = [one for one in acts if one["act"] == "forget" and not one["is_forwarded"]]
    assert [one["path"].rpartition("/")[2] for one in by_callers] == sources
    refusals = await records(gateway, "refusals", 200 + len(sources))
    counted = {(one["act"], one["caller"], one["status"]): 0 for one in refusals}
    for one in refusals:
        counted[one["act"], one["caller"], one["status"]] += one["count"]
    assert counted == {("topic", None, 401): 200, ("forget", "writer", 403): len(sources)}
    # 200 guesses are a few records: one for each window.
    assert len(refusals) < 20
    for record in acts + refusals:
        assert began_ms - 60_000 < record["first_ms"] <= record["at_ms"] < began_ms + 600_000
        assert record["worker"] in gateway.urls
    said = json.dumps(acts + refusals)
    assert not [secret for pair in (ADMIN, WRITER, STRANGER) for secret in pair if secret in said]
    # Paged, and by time.
    first = await page(gateway, "kind=acts&max=1")
    second = await page(gateway, f"kind=acts&max=1&offset={first['next']}")
    assert [*first["records"], *second["records"]] == acts[:2]
    assert (await page(gateway, f"kind=acts&time_ms={began_ms + 3_600_000}"))["records"] == []
    assert len((await page(gateway, f"kind=acts&time_ms={began_ms - 60_000}"))["records"]) >= len(acts)
    for query in ("kind=all", "offset=1&time_ms=1", "max=0", "max=1001", "other=1"):
        assert (await gateway.ask("GET", f"/v1/admin-log?{query}", ADMIN[0]))[0] == 400
    assert (await gateway.ask("GET", "/v1/admin-log", WRITER[0]))[0] == 403
    _, metrics, _ = await gateway.ask("GET", "/metrics", ADMIN[0])
    assert b'logferry_admin_log_records_total{kind="refusals",result="written"}' in metrics
    assert b'result="lost"} 1' not in metrics


async def test_each_route_that_changes_something_is_an_act_or_known_as_none(gateway: Gateway) -> None:
    _, document, _ = await gateway.ask("GET", "/v1/openapi.json")
    changing = {
        operation["operationId"]
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in ("put", "post", "delete")
    }
    assert changing - DATA == ACTS
