"""The audit beside live writers and loaders: it must not report data under way as damage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest
from logferry.ops.stack.stack import Stack

from tests.support.audit import audited
from tests.support.clients import Load


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=2) as stack:
        yield stack


@pytest.mark.parametrize("rounds", [4, pytest.param(8, marks=pytest.mark.long)])
async def test_audits_of_a_gateway_under_load_while_a_worker_is_killed(stack: Stack, topic_name: str, rounds: int):
    bootstrap = stack.cluster().bootstrap
    async with aiohttp.ClientSession() as session:
        url = f"{stack.urls()[0]}/v1/topics/{topic_name}"
        async with session.put(url, json={"partitions": 4}) as response:
            assert response.status in (200, 201), await response.text()
    chunks = []
    async with Load(topic_name, stack.urls(), seed=3) as load:
        for number in range(rounds):
            await load.acknowledged(100)
            if number == rounds // 2:
                stack.kill("gateway-0")
            report = await audited(bootstrap, "dc1", topics=[topic_name])
            assert report.exact, [str(finding) for finding in report.findings]
            chunks.append(report.chunks)
        await asyncio.to_thread(stack.wait_ready)
    assert chunks == sorted(chunks)
    assert chunks[-1] > chunks[0]
    report = await audited(bootstrap, "dc1", topics=[topic_name])
    assert report.exact
    assert not len(report.findings)
    assert report.chunks >= load.history.acknowledged()
