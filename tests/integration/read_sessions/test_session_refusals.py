"""What a reader may not know, and wrong use of sessions and positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from logferry.gateway.reading.registry import named
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster
from yarl import URL

from tests.support.read_sessions import Stream, is_caught_up, make, offsets
from tests.support.served_gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


# ---- rights -----------------------------------------------------------------------------------------------


async def test_a_reader_learns_of_what_it_may_read_alone(kafka: KafkaCluster, tmp_path: Path, topic_name: str) -> None:
    secret, sha256 = new_token()
    boss, boss_sha256 = new_token()
    tables = (
        f'[[tokens]]\nname = "reader"\nsha256 = "{sha256}"\nread = ["{topic_name}-mine"]\n'
        f'[[tokens]]\nname = "boss"\nsha256 = "{boss_sha256}"\nread = ["*"]\nwrite = ["*"]\nadmin = ["*"]\n'
    )
    async with Gateway(tmp_path, kafka.bootstrap, 1, tables) as gateway:
        for name in ("mine", "other"):
            await gateway.ask("PUT", f"/v1/topics/{topic_name}-{name}", boss, json={"partitions": 1})
            path = f"/v1/topics/{topic_name}-{name}/sources/s/chunks?seqno=1"
            assert (await gateway.ask("POST", path, boss, data=name.encode()))[0] == 200
        mine, other = f"dc1.{topic_name}-mine", f"dc1.{topic_name}-other"
        base = f"/v1/consumers/{topic_name}"
        # Every topic is set for the consumer, by a caller with the right.
        for topic in (mine, other):
            assert (await gateway.ask("PUT", f"{base}/offsets", boss, json={"topic": topic, "to": "earliest"}))[
                0
            ] == 200
        there, not_there = f"topic={other}", "topic=dc1.not-there-at-all"
        refused = [
            await gateway.ask("GET", f"{base}/{what}?{topic}", secret)
            for what in ("stream", "offsets")
            for topic in (there, not_there)
        ] + [
            await gateway.ask("PUT", f"{base}/offsets", secret, json={"topic": topic, "to": "latest"})
            for topic in (other, "dc1.not-there-at-all")
        ]
        assert [status for status, _, _ in refused] == [403] * 6
        assert (await gateway.ask("GET", f"{base}/stream?topic={mine}"))[0] == 401
        _, seen, _ = await gateway.ask("GET", f"{base}/offsets", secret)
        assert [position["topic"] for position in seen["positions"]] == [mine]
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with Stream(session, gateway.urls[0], topic_name, "topic=*") as stream:
                await stream.until(is_caught_up)
                assert set(stream.held) == {(mine, 0)}
                assert [frame["data"] for frame in stream.chunks] == [b"mine"]
                assert (await stream.commit({(other, 0): 0}))[0] == 403
                assert (await stream.commit(stream.held))[0] == 200


# ---- wrong use --------------------------------------------------------------------------------------------


GOOD: dict[str, Any] = {"generation": 1, "positions": [{"topic": "dc1.t", "partition": 0, "offset": 0}]}
NO_SESSION = "aHR0cDovLzEyNy4wLjAuMTox.0011223344556677"


def position(**changes: Any) -> dict[str, Any]:
    return {"positions": [{**GOOD["positions"][0], **changes}]}


BAD: list[tuple[str, str, Any, int, str]] = [
    # method, path after /v1/consumers/, body, status, type
    ("GET", "c/stream", None, 400, "bad-request"),
    ("GET", "c/stream?topic=", None, 400, "bad-request"),
    ("GET", "c/stream?topic=nginx", None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.%ff", None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.a%20b", None, 400, "bad-request"),
    ("GET", "c/stream?topic=*.a%20b", None, 400, "bad-request"),
    ("GET", "c/stream?topic=" + "&topic=".join(["dc1.t"] * 101), None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.t&from=9", None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.t&from=latest&from=latest", None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.t&form=latest", None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.not-there-at-all", None, 404, "unknown-topic"),
    ("GET", "c/stream?topic=dc9.t", None, 404, "unknown-topic"),
    ("GET", "c/stream?topic=__consumer_offsets", None, 400, "bad-request"),
    ("GET", "c/stream?topic={prefix}.gateway.dc1.state", None, 404, "unknown-topic"),
    ("GET", "a%20b/stream?topic=dc1.t", None, 400, "bad-request"),
    ("GET", "%ff/stream?topic=dc1.t", None, 400, "bad-request"),
    ("GET", "c" * 201 + "/stream?topic=dc1.t", None, 400, "bad-request"),
    ("GET", "{prefix}.gateway.dc1/stream?topic=dc1.t", None, 409, "conflict"),
    ("GET", "{prefix}.gateway.dc1/offsets", None, 409, "conflict"),
    ("PUT", "{prefix}.gateway.dc1/offsets", {"topic": "dc1.t", "to": "latest"}, 409, "conflict"),
    ("POST", "c/stream?topic=dc1.t", None, 405, "method-not-allowed"),
    ("POST", f"c/sessions/{NO_SESSION}/commit", GOOD, 409, "superseded"),
    ("POST", "c/sessions/%2E/commit", GOOD, 409, "superseded"),
    ("POST", "c/sessions/%ff/commit", GOOD, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", GOOD, 409, "superseded"),
    ("POST", "c/sessions/{own}.00/commit", b"", 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", b"\xff", 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", [], 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {"generation": 1}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {"generation": 1, "positions": []}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, "generation": -1}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, "generation": "1"}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, "more": 1}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, **position(offset=-1)}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, **position(offset=2**63)}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, **position(partition=2**31)}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, **position(topic="nginx")}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit?x=1", GOOD, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {"generation": 1, "positions": GOOD["positions"] * 2}, 400, "bad-request"),
    ("GET", "c/offsets?topic=nginx", None, 400, "bad-request"),
    ("GET", "c/offsets?topic=*.nginx", None, 400, "bad-request"),
    ("GET", "c/offsets?topic=dc1.not-there-at-all", None, 404, "unknown-topic"),
    ("GET", "c/offsets?limit=1", None, 400, "bad-request"),
    ("PUT", "c/offsets", b"", 400, "bad-request"),
    ("PUT", "c/offsets", {}, 400, "bad-request"),
    ("PUT", "c/offsets", {"topic": "dc1.t"}, 400, "bad-request"),
    ("PUT", "c/offsets", {"to": "latest"}, 400, "bad-request"),
    ("PUT", "c/offsets", {"topic": "dc1.t", "to": "soon"}, 400, "bad-request"),
    ("PUT", "c/offsets", {"topic": "dc1.t", "to": -1}, 400, "bad-request"),
    ("PUT", "c/offsets", {"topic": "dc1.t", "to": "latest", **position()}, 400, "bad-request"),
    ("PUT", "c/offsets", {"topic": "dc1.not-there-at-all", "to": "latest"}, 404, "unknown-topic"),
    ("PUT", "c/offsets", {"topic": "__consumer_offsets", "to": "latest"}, 400, "bad-request"),
    ("PUT", "c/offsets", {"positions": []}, 400, "bad-request"),
    ("PUT", "c/offsets", position(time_ms=1), 400, "bad-request"),
    ("PUT", "c/offsets", {"positions": [{"topic": "dc1.t", "partition": 0}]}, 400, "bad-request"),
    ("PUT", "c/offsets", position(topic="dc1.not-there-at-all"), 404, "unknown-topic"),
    ("PUT", "c/offsets", position(partition=7, topic="{there}"), 404, "not-found"),
    ("PUT", "c/offsets", position(offset=7, topic="{there}"), 416, "out-of-range"),
    ("DELETE", "c/offsets", None, 405, "method-not-allowed"),
]


async def test_bad_input_is_a_problem_and_changes_nothing(gateway: Gateway, topic_name: str) -> None:
    there = await make(gateway, topic_name, 1)
    names = {"{prefix}": gateway.prefix, "{own}": named(gateway.urls[0]), "{there}": there}

    def filled(text: str) -> str:
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    wrong = []
    for method, path, body, status, kind in BAD:
        request: dict[str, Any] = {}
        if isinstance(body, bytes):
            request["data"] = body
        elif body is not None:
            for found in body.get("positions", []) if isinstance(body, dict) else []:
                found["topic"] = filled(found["topic"])
            request["json"] = body
        url = URL(gateway.urls[0] + "/v1/consumers/" + filled(path), encoded=True)
        async with gateway.session.request(method, url, **request) as answer:
            document = await answer.json(content_type=None)
            seen = (answer.status, document["type"].rpartition("/")[2], answer.headers["Content-Type"])
        if seen != (status, kind, "application/problem+json"):
            wrong.append((method, path, body, status, kind, document))
    assert wrong == []
    for accept in ("text/plain", "image/png"):
        status, _, _ = await gateway.ask("GET", f"/v1/consumers/c/stream?topic={there}", headers={"Accept": accept})
        assert status == 400
    assert await offsets(gateway, "c") == {"consumer": "c", "state": "Dead", "members": 0, "positions": []}
    assert all(worker.running for worker in gateway.workers)
