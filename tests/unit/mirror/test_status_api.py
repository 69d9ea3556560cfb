"""Who may see and resume: holders of a token with the right, and no browser for another site's page.

A browser sends such a request without asking, or names itself."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp.test_utils import RawTestServer, TestClient
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.router import Routes
from logferry.gateway.token_command import new_token
from logferry.mirror.lanes.stops import CannotResume
from logferry.mirror.remote import RemoteCluster, RemoteWait
from logferry.mirror.status_api import MirrorApi, partitions_of
from prometheus_client import CollectorRegistry

from tests.support.mirror_lane import MirrorWorld

BODY = '{"topic": "dc1.t", "partition": 0, "from": 7}'
JSON = {"Content-Type": "application/json"}


class Lane:
    state = "serving"

    def __init__(self) -> None:
        self.partitions: dict[Any, Any] = {("dc1.t", 0): None}
        self.resumed: list[tuple[Any, int | None]] = []

    async def opens(self) -> None:
        """It had failed when it was asked, and knew no partition."""
        self.partitions[("dc1.t", 0)] = None

    async def resume(self, tp: Any, start: int | None) -> int:
        if tp not in self.partitions:
            raise CannotResume("try again")
        self.resumed.append((tp, start))
        return start or 0


links: list[RemoteCluster] = []  # of the worker that `serving` serves


@pytest.fixture
def lane() -> Lane:
    return Lane()


@asynccontextmanager
async def serving(lane: Lane, patch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[TestClient[Any, Any]]:
    patch.setattr("logferry.mirror.status_api.REGISTRY", CollectorRegistry())
    world = MirrorWorld(**settings)
    ownership: Any = SimpleNamespace(
        lanes={0: lane},
        held=list,
        url="http://a",
        other_workers=list,
        is_settled=True,
        wait_for_news=lane.opens,
        number_of_lanes=lambda: 1,
    )
    routes = Routes(Gate(world.config))
    world.links["dc1"] = RemoteCluster(
        world.config.remotes[0], world.there, world.config.limits, world.budget, frozenset(), AsyncMock()
    )
    links[:] = world.links.values()
    world.links["dc1"].begun_later["dc1.t", 3] = 70
    world.here.risks = ["topics: a remedy"]
    world.targets.unaltered["dc1.t"] = "retention.ms: no right"
    world.links["dc1"].topics = dict(world.there.topics)
    MirrorApi(world.config, ownership, world.links, world.budget, world.targets, world.here).add_to(routes)
    client: TestClient[Any, Any] = TestClient(RawTestServer(routes))
    async with client:
        yield client


@pytest.fixture
async def client(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestClient[Any, Any]]:
    async with serving(lane, monkeypatch) as client:
        yield client


async def test_an_operator_resumes(client: TestClient[Any, Any], lane: Lane) -> None:
    async with client.post("/v1/resume", data=BODY, headers=JSON) as answer:
        assert answer.status == 200
    assert lane.resumed == [(("dc1.t", 0), 7)]


async def test_the_status_names_risks_of_kafkas_settings(client: TestClient[Any, Any]) -> None:
    async with client.get("/v1/status") as answer:
        assert "topics: a remedy" in (await answer.json())["warnings"]


def test_metrics_are_computed_while_lanes_follow_other_partitions() -> None:
    lane: Any = SimpleNamespace(partitions=dict.fromkeys(range(10_000)))
    ownership: Any = SimpleNamespace(held=lambda: [lane])
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.is_set():
            lane.partitions[-1] = None
            time.sleep(0)  # lets the other thread go on
            del lane.partitions[-1]
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    follows = threading.Thread(target=follow)
    follows.start()
    try:
        for _ in range(300):
            assert len(partitions_of(ownership)) >= 10_000
    finally:
        is_over.set()
        follows.join()
        sys.setswitchinterval(before)


async def test_a_resume_waits_for_a_lane_that_opens_again(client: TestClient[Any, Any], lane: Lane) -> None:
    lane.partitions.clear()
    async with client.post("/v1/resume", data=BODY, headers=JSON) as answer:
        assert answer.status == 200, await answer.text()
    # A topic that no remote has is not waited for.
    async with client.post("/v1/resume", data=BODY.replace("dc1.t", "dc1.other"), headers=JSON) as answer:
        assert answer.status == 409
    assert list(lane.partitions) == [("dc1.t", 0)]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({**JSON, "Origin": "https://elsewhere.example"}, 403),
        ({**JSON, "Origin": "null"}, 403),
        ({**JSON, "Sec-Fetch-Site": "same-origin"}, 403),
    ],
)
async def test_a_browser_does_not(
    client: TestClient[Any, Any], lane: Lane, headers: dict[str, str], status: int
) -> None:
    async with client.post("/v1/resume", data=BODY, headers=headers) as answer:
        assert (answer.status, answer.content_type) == (status, "application/problem+json")
    assert lane.resumed == []


async def test_with_tokens_only_their_holders_see_and_resume(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, sha256 = new_token()
    tokens = [{"name": "operator", "sha256": sha256, "admin": ["*"]}]
    async with serving(lane, monkeypatch, tokens=tokens) as client:
        calls = [("GET", "/v1/status"), ("GET", "/metrics"), ("POST", "/v1/resume")]
        for method, path in calls:
            for given in ({}, {"Authorization": "Bearer lf_unknown"}):
                async with client.request(method, path, data=BODY, headers={**JSON, **given}) as answer:
                    assert (answer.status, answer.headers["WWW-Authenticate"][:6]) == (401, "Bearer"), path
        assert lane.resumed == []
        for path in ("/healthz", "/readyz"):
            async with client.get(path) as answer:
                assert answer.status == 200
        for method, path in calls:
            known = {**JSON, "Authorization": f"Bearer {secret}"}
            async with client.request(method, path, data=BODY, headers=known) as answer:
                assert answer.status == 200, await answer.text()
                if path == "/v1/status":
                    document = await answer.json()
                    assert document["unaltered"] == {"dc1.t": "retention.ms: no right"}
                    assert document["warnings"][-2] == "topics: a remedy"
                    assert document["warnings"][-1].startswith("the copy of dc1.t-3 begins at offset 70 of dc1: ")
                if path == "/metrics":
                    assert 'logferry_mirror_copies_begun_later{dc="dc1"} 1.0' in await answer.text()
    assert lane.resumed == [(("dc1.t", 0), 7)]


@pytest.mark.parametrize(
    "body", ["", "[]", BODY.replace("7", "true"), BODY.replace("7", '"latest"'), BODY.replace("0", "-1"), "x" * 5000]
)
async def test_a_body_of_another_form_is_refused(client: TestClient[Any, Any], lane: Lane, body: str) -> None:
    async with client.post("/v1/resume", data=body, headers=JSON) as answer:
        assert answer.status == (413 if len(body) > 4096 else 400)
    assert lane.resumed == []


async def test_the_lag_of_a_silent_link_grows_in_the_metrics_as_well(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of a data centre since its last answer, also where nothing was waiting then."""
    async with serving(lane, monkeypatch) as client:
        async with client.get("/metrics") as answer:
            assert 'logferry_mirror_lag_seconds{dc="dc1"} 0.0' in await answer.text()
        links[0].fault = RemoteWait("it does not answer", int(time.time() * 1000) - 60_000)
        async with client.get("/metrics") as answer:
            [line] = [
                one for one in (await answer.text()).splitlines() if one.startswith("logferry_mirror_lag_seconds")
            ]
    assert float(line.split()[1]) >= 60
