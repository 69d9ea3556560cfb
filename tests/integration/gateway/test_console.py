"""The console in real Chromium, against two data centres of real processes, some of which are killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

import aiohttp
import pytest
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.stack import Stack
from playwright.async_api import Page, expect

from tests.support import served_gateway
from tests.support.browser import NARROW, WIDE, Opened, chromium, needs_chromium
from tests.support.delivery import PushReceiver, Received, deliver, receiver, send, subscribe
from tests.support.gateway import Gateway

pytestmark = needs_chromium

PAGES: Final = {
    "overview": "Overview",
    "topics": "Topics",
    "topics/dc1.access": "Topics / dc1.access",
    "sources": "Sources",
    "sources/access": "Sources / access",
    "sources/access/web1%2Faccess.log": "Sources / access / web1/access.log",
    "lanes": "Lanes",
    "consumers": "Consumers",
    "consumers/billing": "Consumers / billing",
    "mirror": "Mirror",
    "subscriptions": "Subscriptions",
    "subscriptions/orders": "Subscriptions / orders",
    "tables": "Tables",
    "tables/access": "Tables / access",
    "hbase": "HBase",
    "hbase/orders_log": "HBase / orders_log",
    "tail/dc1.access": "Live tail / dc1.access",
}
MARKUP: Final = "<img src=x onerror=\"document.body.dataset.owned='1'\">"
# Reverses what stands after it.
REVERSED: Final = "log.\u202egpj.exe"


def table_report(source: str = "web1/access.log", **changes: Any) -> dict[str, Any]:
    """As a loader sends it: the hour of 10 waits for a source, and a topic of the other data centre is stopped."""
    holds = {"source_id": source, "topic": "dc1.access", "at": "2026-11-20T10:30:00Z", "seen": None, "owes": False}
    hour = {"version": 1, "rows": 1200, "since": "2026-11-20T12:00:00Z", "waits_for": []}
    newest = [
        {**hour, "segment": "2026-11-20T09", "state": "READY", "why": ""},
        {**hour, "segment": "2026-11-20T10", "state": "ACTIVE", "why": "waits", "waits_for": [holds]},
        {**hour, "segment": "2026-11-20T11", "state": "ACTIVE", "why": "not over: the low watermark is before it"},
    ]
    stopped = {"stopped": "dc2.access was recreated", "way": "logferry table reset /warehouse/access --to dc2.access=…"}
    return {
        "location": "/warehouse/access",
        "dc": "dc1",
        "topics": ["dc1.access", "dc2.access"],
        "every_s": 60,
        "batch": {"batch": 17, "kind": "load", "planned": "2026-11-20T12:00:00+00:00", "rows": 3456},
        "lag": [
            {"topic": "dc1.access", "records": 42, "seconds": 3.5},
            {"topic": "dc2.access", "records": None, "seconds": None, **stopped},
        ],
        "quarantine": {"no number in status": 12},
        "segments": {"checked": "2026-11-20T12:00:00Z", "complete": "2026-11-20T09", "failure": None, "newest": newest},
        **changes,
    }


def hbase_report(**changes: Any) -> dict[str, Any]:
    wait = {"who": "10.0.0.3", "at_ms": 1_700_000_000_000, "times": 3, "reason": "not recorded in time: 503 overloaded"}
    figures = {"calls": 812, "failed_calls": 3, "chunks": 5310, "change_age_ms": 412, "oldest_call_s": 0}
    server = {"shipped_operations": 5310, "age_ms": 41, "oldest_wal_ms": 95_000}
    dead = {"shipped_operations": None, "age_ms": None, "oldest_wal_ms": None, "problem": "the server is dead"}
    return {
        "topics": ["dc1.access"],
        "tables": ["orders", "shop:items"],
        "state": "active",
        "every_s": 60,
        "connectors": [{"connector": "10.0.0.5:16100", **figures, "waits": [wait]}, {"connector": "10.0.0.6:16100"}],
        "servers": [
            {"server": "rs1.example,16020,1795341498003", "logs": 3, "taken_over": 2, **server},
            {"server": "rs2.example,16020,1795341498004", "logs": 1, "taken_over": 0, **dead},
        ],
        "problems": ["rs2.example,16020,1795341498004: the server is dead"],
        **changes,
    }


class Site:
    """Two data centres. ``ask``: a request to a worker of the first one."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.urls = stack, stack.urls("dc1")

    async def ask(self, method: str, path: str, worker: int = 0, dc: str = "dc1", **options: Any) -> Any:
        url = self.stack.urls(dc)[worker] + path
        async with aiohttp.ClientSession() as session, session.request(method, url, **options) as answer:
            assert answer.status < 300, await answer.text()
            return await answer.json()

    async def write(
        self, source: str, seqno: int, data: bytes = b"one line\n", dc: str = "dc1", **headers: str
    ) -> None:
        path = f"/v1/topics/access/sources/{quote(source, safe='')}/chunks?seqno={seqno}"
        await self.ask("POST", path, dc=dc, data=data, headers=headers)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # So long a worker that is frozen is still a member, and missed.
    settings = {"session_timeout_ms": 15_000}
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder, ("dc1", "dc2"), workers=2, lanes=4, mirrors=1, gateway_settings=settings) as running:
        yield running


@pytest.fixture
async def site(stack: Stack) -> Site:
    """With a topic of some sources in both data centres, a consumer that is behind, and a subscription."""
    found = Site(stack)
    await asyncio.to_thread(stack.wait_ready)
    for dc in ("dc1", "dc2"):
        await found.ask("PUT", "/v1/topics/access", dc=dc, json={"partitions": 3})
        for number in (1, 2, 3):
            await found.write(f"web{number}/access.log", 10, dc=dc)
    beat = {"watermark_ms": 1_700_000_000_000, "position": 1000, "size": 3500}
    await found.ask("POST", "/v1/topics/access/sources/web1%2Faccess.log/heartbeat", json=beat)
    await found.ask("PUT", "/v1/consumers/billing/offsets", json={"topic": "dc1.access", "to": "earliest"})
    wanted = {"topics": ["dc1.access"], "url": "https://receiver.example/logs"}
    await found.ask("PUT", "/v1/subscriptions/orders", json=wanted)
    await found.ask("PUT", "/v1/tables/access", json=table_report())
    await found.ask("PUT", "/v1/hbase/orders_log", json=hbase_report())
    return found


def row(page: Page, text: str) -> Any:
    return page.locator("tbody tr").filter(has_text=text).first


async def test_each_page_shows_the_stack(site: Site) -> None:
    async with chromium(site.urls[0]) as opened:
        page = opened.page
        for state, heading in PAGES.items():
            await opened.go(state)
            await expect(page.get_by_role("heading", level=1)).to_have_text(heading)
            await expect(page.locator("#updated")).to_contain_text("Updated")
            await expect(page.locator("#trouble")).to_be_hidden()
        await opened.go("topics")
        await expect(row(page, "dc1.access")).to_contain_text("3")
        await expect(row(page, "dc2.access")).to_be_visible()
        await opened.go("sources/access")
        await expect(row(page, "web1/access.log")).to_contain_text("2.5 kB")
        await opened.go("sources/access/web1%2Faccess.log")
        await expect(page.locator("dd").filter(has_text="behind 2.5 kB")).to_be_visible()
        await expect(row(page, "dc2")).to_contain_text("10")
        await opened.go("lanes")
        for url in site.urls:
            await expect(row(page, url)).to_contain_text("answers")
        await opened.go("consumers")
        await expect(row(page, "billing")).to_contain_text("dc1.access")
        await opened.go("mirror")
        await expect(page.get_by_role("row").filter(has_text="dc2.access").first).to_contain_text("caught-up")
        await opened.go("subscriptions")
        await expect(row(page, "orders")).to_contain_text("https://receiver.example/logs")


async def test_figures_move_by_themselves(site: Site) -> None:
    async with chromium(site.urls[0]) as opened:
        await opened.go("sources/access?prefix=moves")
        await expect(opened.page.get_by_text("No source matches the search.")).to_be_visible()
        await site.write("moves", 77)
        await expect(row(opened.page, "moves")).to_contain_text("77")
        await opened.go("tail/dc1.access?prefix=moves")
        await expect(opened.page.locator(".log li")).to_have_count(1)
        await site.write("moves", 78, b"second\n")
        await expect(opened.page.locator(".log li").last).to_contain_text("second")
        await opened.go("topics?filter=dc1.access")
        await site.write("moves", 79)
        await expect(row(opened.page, "dc1.access").locator("td").nth(1)).to_contain_text("/s")


@pytest.mark.long
async def test_a_killed_worker_is_named_and_the_page_returns_when_its_own_one_does(site: Site) -> None:
    stack = site.stack
    own, other = stack.child("dc1/gateway-0"), stack.child("dc1/gateway-1")
    async with chromium(site.urls[0]) as opened:
        page = opened.page
        lanes = await page.context.new_page()
        await lanes.goto(f"{site.urls[0]}/console#/lanes")
        await expect(page.get_by_role("heading", level=2).first).to_have_text("Nothing is wrong now")
        await expect(row(lanes, site.urls[1])).to_contain_text("answers")
        other.send(signal.SIGSTOP)  # it holds its lanes, and answers nothing
        try:
            problem = page.locator(".findings .wrong").filter(has_text=f"{site.urls[1]} does not answer")
            seen = (
                expect(problem).to_be_visible(),
                expect(row(lanes, site.urls[1])).to_contain_text("does not answer"),
            )
            await asyncio.gather(*seen)
        finally:
            other.send(signal.SIGCONT)
        await expect(row(lanes, site.urls[1])).to_contain_text("answers")
        await lanes.close()
        await opened.go("lanes")
        await expect(row(page, site.urls[1])).to_be_visible()
        own.send(signal.SIGSTOP)  # one that is killed at once may be restarted before the page asks again
        try:
            await expect(page.locator("#trouble")).to_contain_text("does not answer")
            await expect(row(page, site.urls[1])).to_be_visible()  # the figures stay
        finally:
            own.send(signal.SIGKILL)
        await expect(page.locator("#trouble")).to_be_hidden()  # it was restarted
        await opened.go("mirror")
        await expect(page.get_by_role("row").filter(has_text="dc2.access").first).to_contain_text("caught-up")
        stack.kill("dc1/mirror-0", signal.SIGSTOP)
        try:
            # Once it is no member any more, it is missed in another way.
            away = page.locator("#view").get_by_text(re.compile("does not answer|has no member"))
            await expect(away.first).to_be_visible()
        finally:
            stack.kill("dc1/mirror-0", signal.SIGCONT)
        await expect(page.get_by_role("row").filter(has_text="dc2.access").first).to_contain_text("caught-up")


async def test_positions_are_set_after_a_preview(site: Site) -> None:
    async def offsets() -> dict[int, int]:
        found = await site.ask("GET", "/v1/consumers/billing/offsets")
        return {one["partition"]: one["offset"] for one in found["positions"]}

    before = await offsets()
    async with chromium(site.urls[0]) as opened:
        page = opened.page
        await opened.go("consumers/billing")
        await expect(row(page, "dc1.access")).to_be_visible()
        await page.get_by_label("To", exact=True).select_option("latest")
        await page.get_by_role("button", name="Preview").click()
        await expect(page.get_by_text("Nothing is set yet.")).to_contain_text("skipped")
        assert await offsets() == before
        await page.get_by_role("button", name="Set these positions").click()
        await expect(page.get_by_text("3 positions set.")).to_be_visible()
        ends = (await site.ask("GET", "/v1/topics/access"))["offsets"]
        assert await offsets() == {one["partition"]: one["next"] for one in ends}
        await page.get_by_label("To", exact=True).select_option("offset")
        await page.get_by_label("Offset, of every partition").fill("99999999")
        await page.get_by_role("button", name="Preview").click()
        await expect(page.get_by_role("status").filter(has_text="retained")).to_be_visible()
        await expect(page.get_by_role("button", name="Set these positions")).to_have_count(0)


async def test_a_subscription_is_paused_and_resumed(site: Site) -> None:
    async with chromium(site.urls[0]) as opened:
        await opened.go("subscriptions/orders")
        await opened.page.get_by_role("button", name="Pause").click()
        await expect(opened.page.locator("dd").filter(has_text="paused")).to_be_visible()
        assert (await site.ask("GET", "/v1/subscriptions/orders"))["is_paused"] is True
        await opened.page.get_by_role("button", name="Resume").click()
        await expect(opened.page.locator("dd").filter(has_text="delivers")).to_be_visible()


async def test_a_table_shows_whom_each_hour_waits_for_and_how_old_its_report_is(site: Site) -> None:
    await site.ask("PUT", "/v1/tables/idle", json=table_report(every_s=0.2, lag=[], segments=None))
    async with chromium(site.urls[1]) as opened:  # the other worker has it, too
        page = opened.page
        await opened.go("tables?sort=-lag")
        for text in ("stopped", "17", "42", "2026-11-20T10: web1/access.log in dc1.access"):
            await expect(row(page, "2026-11-20T09")).to_contain_text(text)
        await expect(row(page, "idle")).to_contain_text("no report")
        await page.get_by_label("Filter Tables").fill("web1 stopped")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.get_by_role("link", name="access", exact=True).click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Tables / access")
        waits = page.get_by_role("row").filter(has_text="2026-11-20T10")
        await expect(waits).to_contain_text(
            "web1/access.log in dc1.access, sent to 2026-11-20T10:30:00Z, last seen never"
        )
        await expect(row(page, "2026-11-20T11")).to_contain_text("not over: the low watermark is before it")
        await expect(row(page, "dc2.access")).to_contain_text(
            "logferry table reset /warehouse/access --to dc2.access=…"
        )
        await expect(page.get_by_text("The last report came")).to_be_hidden()
        await opened.go("tables/idle")
        await expect(page.get_by_text("The last report came")).to_contain_text("ago: the loader does not run")
        await expect(page.get_by_text("The table has no segments")).to_be_visible()
        await opened.go("tables/none")
        await expect(page.locator("#trouble")).to_contain_text("no table none is reported")
    await site.ask("DELETE", "/v1/tables/idle", worker=1)
    assert [one["name"] for one in (await site.ask("GET", "/v1/tables"))["tables"]] == ["access"]


async def test_a_subscription_of_hbase_shows_what_each_region_server_waits_for(site: Site) -> None:
    async with chromium(site.urls[0]) as opened:
        page = opened.page
        await opened.go("hbase")
        shown = row(page, "orders_log")
        for text in ("orders shop:items", "dc1.access", "1 min", "the server is dead", "0.041 s"):
            await expect(shown).to_contain_text(text)
        await expect(shown.locator("td").nth(5)).to_have_text("4")
        await expect(shown.locator(".state.bad")).to_have_text("has problems")
        await shown.get_by_role("link", name="orders_log").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("HBase / orders_log")
        await expect(row(page, "rs1.example,16020")).to_contain_text("5,310")
        await expect(row(page, "rs2.example,16020")).to_contain_text("does not answer")
        await expect(page.locator(".holders li")).to_contain_text("10.0.0.3 3 times, the last one")
        await expect(page.locator(".holders li")).to_contain_text("not recorded in time: 503 overloaded")
        await expect(row(page, "10.0.0.6:16100")).to_contain_text("none")
        await expect(page.locator("#view .trouble")).to_be_hidden()
        healthy = hbase_report(problems=[], every_s=0.2)
        await site.ask("PUT", "/v1/hbase/orders_log", json=healthy, worker=1)
        await expect(page.locator("#view .trouble")).to_contain_text("no connector runs, or none reaches the gateway")
        await opened.go("hbase")
        await expect(row(page, "orders_log").locator(".state.bad")).to_have_text("no report")
        await site.ask("PUT", "/v1/hbase/orders_log", json=hbase_report(problems=[]))
        await expect(row(page, "orders_log").locator(".state.good")).to_have_text("active")
        await site.ask("DELETE", "/v1/hbase/orders_log", worker=1)
        await expect(page.locator("main")).to_contain_text("its token needs the right report")


async def test_a_stop_of_push_delivery_is_on_the_overview_with_its_way_on(
    kafka: KafkaCluster, workers: Gateway, topic_name: str, tmp_path: Path
) -> None:
    topic = await workers.make_topic(topic_name)
    written = await send(workers, topic_name, "a", range(1, 3))

    async def rejected(_: Received) -> int:
        return 422

    async with receiver(PushReceiver(behave=rejected)) as got:
        with deliver(kafka, tmp_path, "shared"):
            await subscribe(workers, topic_name, topic, got.url)
            async with chromium(workers.urls[0]) as opened:
                page = opened.page
                stop = page.locator(".findings .wrong").filter(
                    has_text=f"{topic_name} has stopped 1 partition: rejected"
                )
                await expect(stop).to_contain_text("since")
                await expect(stop).to_contain_text(f"{topic}-0: offsets 0 to 2: status 422")
                await expect(stop).to_contain_text("correct the receiver, then resume")
                got.behave = None
                await stop.get_by_role("link", name="Its page").click()
                await expect(page.get_by_role("heading", level=1)).to_have_text(f"Subscriptions / {topic_name}")
                await page.get_by_role("button", name="Resume").click()
                await got.until(lambda: len(got.rows) == len(written), "both chunks")
                await opened.go("overview")
                await expect(page.locator("#updated")).to_contain_text("Updated")
                await expect(stop).to_have_count(0)
                assert (await workers.ask("GET", f"/v1/subscriptions/{topic_name}")).document["is_paused"] is False


async def test_when_nobody_looks_the_gateway_serves_nothing(site: Site) -> None:
    """After the last page is closed: no connection of it, and no request, also not by the worker itself."""

    async def state() -> tuple[float, dict[str, float]]:
        """Open connections besides this one, and the requests by route and status, without those of this test."""
        async with aiohttp.ClientSession() as session, session.get(site.urls[0] + "/metrics") as answer:
            text = await answer.text()
        (connections,) = re.findall(r"^logferry_connections (\S+)$", text, re.M)
        asked = re.findall(r'^logferry_requests_total\{(route="(?!metrics|status")\w+",.*)\} (\S+)$', text, re.M)
        return float(connections) - 1, {labels: float(number) for labels, number in asked}

    async with chromium(site.urls[0]) as opened:
        await expect(opened.page.locator("#updated")).to_contain_text("Updated")
        looked = await state()
        assert looked[0] > 0
    async with asyncio.timeout(60):
        while (closed := await state())[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert closed[1]['route="workers",status="200"'] >= looked[1]['route="workers",status="200"'] > 0
    # Longer than the pause between two looks of the overview, by what the gateway does itself: it reads its group.
    seen_ms = (await site.ask("GET", "/v1/status"))["group"]["seen_ms"]
    async with asyncio.timeout(60):
        while (await site.ask("GET", "/v1/status"))["group"]["seen_ms"] < seen_ms + 6000:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert await state() == closed


async def test_hostile_ids_attributes_and_data_are_text(site: Site) -> None:
    hostile = f"{MARKUP}{REVERSED}"
    written = {"X-Attr-user": quote(MARKUP)}
    data = f"</pre><script>document.body.dataset.owned='1'</script>{MARKUP}\n"
    await site.write(hostile, 10, data.encode(), **written)
    async with chromium(site.urls[0]) as opened:
        page = opened.page
        await opened.go("sources/access")
        link = page.get_by_role("link", name=MARKUP)
        await expect(link).to_contain_text("log.\\u{202e}gpj.exe")
        await link.click()
        await expect(page.get_by_role("heading", level=1)).to_contain_text(MARKUP)
        await expect(row(page, "dc1")).to_contain_text("10")
        await opened.go(f"sources/access/{quote(hostile, safe='')}?key={quote(MARKUP, safe='')}")
        await expect(page.locator("dd").filter(has_text=MARKUP)).to_be_visible()
        await opened.go(f"topics/{quote(MARKUP, safe='')}?filter={quote(MARKUP, safe='')}")
        await expect(page.locator("#trouble")).to_be_visible()
        await opened.go(f"tail/dc1.access?prefix={quote(MARKUP, safe='')}")
        await expect(page.locator(".log li")).to_contain_text(f"user={MARKUP}")
        await expect(page.locator(".log pre")).to_contain_text("</pre><script>")
        said = {MARKUP: 3}
        report = table_report(hostile, location=MARKUP, error=MARKUP, quarantine=said, lag_unknown=MARKUP)
        await site.ask("PUT", "/v1/tables/hostile", json=report)
        await opened.go("tables")
        await expect(row(page, "hostile")).to_contain_text(f"2026-11-20T10: {MARKUP}log.\\u{{202e}}gpj.exe")
        await opened.go("tables/hostile")
        await expect(page.locator(".holders li")).to_contain_text(f"{MARKUP}log.\\u{{202e}}gpj.exe in dc1.access")
        await expect(page.locator("dd").filter(has_text=MARKUP)).to_have_count(4)
        await site.ask("DELETE", "/v1/tables/hostile")
        waits = [{"who": MARKUP, "at_ms": 1, "times": 1, "reason": REVERSED}]
        hostile_connector = {"connector": MARKUP, "waits": waits}
        report = hbase_report(tables=[MARKUP], state=MARKUP, problems=[REVERSED], connectors=[hostile_connector])
        await site.ask("PUT", "/v1/hbase/hostile", json=report)
        await opened.go("hbase/hostile")
        await expect(page.locator("dd").filter(has_text=MARKUP)).to_have_count(2)
        await expect(page.locator(".holders li")).to_contain_text("log.\\u{202e}gpj.exe")
        await site.ask("DELETE", "/v1/hbase/hostile")
        assert await page.locator("main img, main script").count() == 0
        assert await page.evaluate("document.body.dataset.owned ?? null") is None


@pytest.mark.parametrize(("size", "scheme"), [(NARROW, "dark"), pytest.param(WIDE, "light", marks=pytest.mark.long)])
async def test_axe_finds_nothing_serious(
    site: Site, size: tuple[int, int], scheme: Literal["light", "dark"], tmp_path: Path
) -> None:
    async with chromium(site.urls[0], size=size, scheme=scheme) as opened:
        found = {}
        for state, heading in PAGES.items():
            await opened.go(state)
            await expect(opened.page.get_by_role("heading", level=1)).to_have_text(heading)
            await expect(opened.page.locator("body")).to_contain_text(re.compile("Updated|does not have the right"))
            found[state] = await opened.axe()
            await opened.page.screenshot(path=tmp_path / f"{state.replace('/', '-')}-{scheme}.png", full_page=True)
            is_wider = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            assert not await opened.page.evaluate(is_wider), f"{state} is wider than the screen"
        assert {state: problems for state, problems in found.items() if problems} == {}


async def test_it_is_used_by_keyboard_and_a_link_leads_to_each_state(site: Site) -> None:
    async with chromium(site.urls[0]) as opened:
        page = opened.page
        await opened.go("sources/access")
        await expect(row(page, "web2/access.log")).to_be_visible()
        await page.reload()
        await expect(row(page, "web2/access.log")).to_be_visible()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#main")).to_be_focused()
        for _ in range(4):  # two fields of the search, its button, then the filter
            await page.keyboard.press("Tab")
        await expect(page.get_by_label("Filter Sources of access")).to_be_focused()
        await page.keyboard.type("web2")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.get_by_role("button", name="Source", exact=True).focus()
        for order in ("descending", "ascending", "descending"):
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("columnheader", name="Source", exact=True)).to_have_attribute(
                "aria-sort", order
            )
        link = page.url
        assert re.search(r"#/sources/access\?(?=.*filter=web2)(?=.*sort=-source)", link)
        await page.get_by_role("row").filter(has_text="web2").get_by_role("link").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_be_focused()
        await expect(page).to_have_title("Sources / access / web2/access.log – logferry")
        fresh = await page.context.new_page()
        await fresh.goto(link)
        await expect(fresh.locator("tbody tr")).to_have_count(1)
        await expect(fresh.get_by_role("columnheader", name="Source", exact=True)).to_have_attribute(
            "aria-sort", "descending"
        )


async def test_a_hidden_tab_asks_nothing(site: Site) -> None:
    """An hour of the page's own clock, of which the gateway hears nothing."""
    async with chromium(site.urls[0]) as opened:
        page = opened.page
        await page.clock.install()
        await page.reload()
        await opened.go("topics")
        await expect(row(page, "dc1.access")).to_be_visible()
        await _hide(page, is_hidden=True)
        await page.wait_for_load_state("networkidle")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.clock.run_for(3_600_000)
        assert asked == []
        await _hide(page, is_hidden=False)
        async with page.expect_request(re.compile("/v1/topics")):
            await page.clock.run_for(1000)


async def _hide(page: Page, *, is_hidden: bool) -> None:
    """As a browser does with a tab behind another one, which cannot be had without a window."""
    await page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        is_hidden,
    )


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def guarded(kafka: KafkaCluster, tmp_path: Path) -> AsyncIterator[tuple[served_gateway.Gateway, dict[str, str]]]:
    """A gateway with tokens: of an administrator, and of a reader of one of the two topics."""
    rights = {"admin": 'admin = ["*"]\nread = ["*"]\nwrite = ["*"]', "reader": 'read = ["open"]'}
    rights["loader"] = 'report = ["*"]'
    made = {name: new_token() for name in rights}
    tables = "".join(f'[[tokens]]\nname = "{n}"\nsha256 = "{made[n][1]}"\n{rights[n]}\n' for n in rights)
    async with served_gateway.Gateway(tmp_path, kafka.bootstrap, 1, tables) as gateway:
        secret = {name: token for name, (token, _) in made.items()}
        for topic in ("open", "classified"):
            assert (await gateway.ask("PUT", f"/v1/topics/{topic}", secret["admin"], json={"partitions": 1}))[0] < 300
            body = {"topic": f"dc1.{topic}", "to": "earliest"}
            path = f"/v1/consumers/{topic}-consumer/offsets"
            assert (await gateway.ask("PUT", path, secret["admin"], json=body))[0] == 200
            wanted = {"topics": [f"dc1.{topic}"], "url": f"https://{topic}.example/logs"}
            assert (await gateway.ask("PUT", f"/v1/subscriptions/{topic}", secret["admin"], json=wanted))[0] < 300
            report = table_report(topics=[f"dc1.{topic}"], location=f"/warehouse/{topic}", lag=[], segments=None)
            assert (await gateway.ask("PUT", f"/v1/tables/{topic}", secret["loader"], json=report))[0] == 201
            report = hbase_report(topics=[f"dc1.{topic}"], tables=[f"table-{topic}"])
            assert (await gateway.ask("PUT", f"/v1/hbase/{topic}", secret["loader"], json=report))[0] == 201
            assert (await gateway.ask("PUT", f"/v1/hbase/{topic}", secret["reader"], json=report))[0] == 403
        yield gateway, secret


async def _all_text(opened: Opened, name: str) -> str:
    """Of all pages, once they show what is there of the topic."""
    shown = {
        "topics": f"dc1.{name}",
        "consumers": f"{name}-consumer",
        "tables": f"/warehouse/{name}",
        "hbase": f"table-{name}",
    }
    texts = []
    for state in (
        "overview",
        "topics",
        "sources",
        "lanes",
        "consumers",
        "mirror",
        "subscriptions",
        "tables",
        "hbase",
        "tail",
    ):
        await opened.go(state)
        await expect(opened.page.locator(f"nav a[data-page={state}][aria-current=page]")).to_be_visible()
        if state != "tail":  # it shows nothing by itself
            await expect(opened.page.locator("body")).to_contain_text(re.compile("Updated|does not have the right"))
        if state in shown:
            await expect(opened.page.locator("main")).to_contain_text(shown[state])
        await opened.page.wait_for_load_state("networkidle")
        texts.append(await opened.page.locator("body").inner_text())
    return "\n".join(texts)


async def test_a_token_sees_what_it_may_and_nothing_of_others(
    guarded: tuple[served_gateway.Gateway, dict[str, str]],
) -> None:
    gateway, secret = guarded
    async with chromium(gateway.urls[0], secret["reader"]) as opened:
        await opened.go("topics")
        await expect(row(opened.page, "dc1.open")).to_be_visible()
        text = await _all_text(opened, "open")
        assert "dc1.open" in text
        assert "open-consumer" in text
        assert "classified" not in text
        assert gateway.urls[0] not in text
        await opened.go("topics/dc1.classified")
        await expect(opened.page.locator("#trouble")).to_contain_text("does not have the right")
    async with chromium(gateway.urls[0], secret["admin"]) as opened:
        assert "classified" in await _all_text(opened, "classified")


async def test_the_token_is_in_memory_alone(guarded: tuple[served_gateway.Gateway, dict[str, str]]) -> None:
    gateway, secret = guarded
    async with chromium(gateway.urls[0], "wrong") as opened:
        page = opened.page
        await expect(page.get_by_role("alert")).to_have_text("This token is not configured here.")
        await page.get_by_label("Token").fill(secret["reader"])
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("reader")).to_be_visible()
        await opened.go("topics?filter=open")
        await expect(row(page, "dc1.open")).to_be_visible()
        stored = await page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
        assert stored[:3] == [0, 0, ""]
        assert secret["reader"] not in json.dumps(stored)
        await page.get_by_role("button", name="Forget the token").click()
        await expect(page.get_by_label("Token")).to_be_focused()
        await page.get_by_label("Token").fill(secret["reader"])
        await page.keyboard.press("Enter")
        await expect(row(page, "dc1.open")).to_be_visible()
        await page.reload()
        await expect(page.get_by_label("Token")).to_be_visible()
        assert "dc1.open" not in await page.locator("main").inner_text()
    assert secret["reader"] not in gateway.said()
