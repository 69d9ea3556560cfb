"""Stock HTTP clients with a token, each request at both workers: at one of them the source's lane is not."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from logferry.gateway.contract.names import lane_of
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.checker import digest, read_back
from tests.support.served_gateway import Gateway

# Over a mebibyte curl asks before it sends the body.
DATA = random.Random(5).randbytes(1 << 21)
Post = Callable[[str, str, Path], Any]


def by_curl(url: str, token: str, file: Path) -> Any:
    command = ["curl", "-sS", "--fail-with-body", "-H", f"Authorization: Bearer {token}", "--data-binary", f"@{file}"]
    return json.loads(subprocess.run([*command, url], capture_output=True, check=True, timeout=60).stdout)


def by_curl_from_a_pipe(url: str, token: str, file: Path) -> Any:
    """Without a Content-Length, and following redirects, should there be any."""
    command = ["curl", "-sSL", "--fail-with-body", "-H", f"Authorization: Bearer {token}", "-X", "POST", "-T", "-", url]
    with file.open("rb") as data:
        return json.loads(subprocess.run(command, stdin=data, capture_output=True, check=True, timeout=60).stdout)


def by_requests(url: str, token: str, file: Path) -> Any:
    answer = requests.post(url, data=file.read_bytes(), headers={"Authorization": f"Bearer {token}"}, timeout=60)
    answer.raise_for_status()
    return answer.json()


def by_urllib(url: str, token: str, file: Path) -> Any:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "text/plain"}
    request = urllib.request.Request(url, file.read_bytes(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture
async def gateway(kafka: KafkaCluster, tmp_path: Path) -> AsyncIterator[Gateway]:
    token, sha256 = new_token()
    tables = f'[[tokens]]\nname = "all"\nsha256 = "{sha256}"\nwrite = ["*"]\nadmin = ["*"]\n'
    async with Gateway(tmp_path, kafka.bootstrap, 2, tables) as gateway:
        gateway.session.headers["Authorization"] = f"Bearer {token}"
        yield gateway
        assert token not in gateway.said()


@pytest.mark.parametrize("post", [by_curl, by_curl_from_a_pipe, by_requests, by_urllib])
async def test_a_chunk_with_a_token_at_any_worker(
    gateway: Gateway, kafka: KafkaCluster, tmp_path: Path, topic_name: str, post: Post
) -> None:
    if "curl" in post.__name__ and shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    token = gateway.session.headers["Authorization"].removeprefix("Bearer ")
    assert (await gateway.ask("PUT", f"/v1/topics/{topic_name}", json={"partitions": 2}))[0] == 201
    sources = list({lane_of(source, 4): source for source in (f"s{number}" for number in range(20))}.values())
    assert len(sources) == 4
    (file := tmp_path / "data").write_bytes(DATA)
    for source in sources:
        for worker, url in enumerate(gateway.urls):
            chunks = f"{url}/v1/topics/{topic_name}/sources/{source}/chunks?seqno=7"
            answer = await asyncio.to_thread(post, chunks, token, file)
            assert (answer["written"], answer["duplicates"]) == (1 - worker, worker)
    stored = await read_back(kafka.bootstrap, f"dc1.{topic_name}")
    assert sorted((record.source, record.digest) for record in stored) == [(s, digest(DATA)) for s in sorted(sources)]
