"""Workers killed while receivers acknowledge: what was acknowledged is stored, and with a key it is stored once.

Each sender repeats a request until it is acknowledged, at another worker each time, as an agent does.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.checker import committed_records
from tests.support.gateway import Gateway, gateway

_TOPIC = "received"
_SENDERS = 8
_AFTER_EACH = 40
_KILLS = 3


class Senders:
    """Half of them send lines with a key, half bulk requests without one. ``acknowledged``: the lines, in order."""

    def __init__(self, at: Gateway) -> None:
        self.at = at
        self.acknowledged: dict[int, list[bytes]] = {sender: [] for sender in range(_SENDERS)}
        self.repeated, self.news = 0, asyncio.Event()
        self.is_over = False

    async def send(self, session: aiohttp.ClientSession, sender: int) -> None:
        number = 0
        while not self.is_over:
            line = b'{"line": "%d %d"}' % (sender, number)
            if sender % 2:
                path, body, headers = "/elasticsearch/x/_bulk", b'{"index":{}}\n' + line + b"\n", {}
            else:
                path, body = f"/v1/topics/{_TOPIC}/lines", line
                headers = {"Idempotency-Key": f"{sender}-{number}"}
            headers["X-Logferry-Source"] = str(sender)
            worker = (sender + number) % 2
            while not await self._is_acknowledged(session, self.at.urls[worker] + path, body, headers):
                worker, self.repeated = 1 - worker, self.repeated + 1
                await asyncio.sleep(0.02)
            self.acknowledged[sender].append(line)
            self.news.set()
            number += 1

    async def _is_acknowledged(
        self, session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]
    ) -> bool:
        try:
            async with session.post(url, data=body, headers=headers) as answer:
                text = await answer.read()
                assert answer.status in (200, 429, 500, 503), text
                return answer.status == 200 and b'"errors": true' not in text
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def progress(self) -> None:
        """Until each sender has some more acknowledgements."""
        enough = {sender: len(lines) + _AFTER_EACH // _SENDERS for sender, lines in self.acknowledged.items()}
        async with asyncio.timeout(120):
            while any(len(self.acknowledged[sender]) < count for sender, count in enough.items()):
                self.news.clear()
                await self.news.wait()


async def test_what_receivers_acknowledged_survives_killed_workers(kafka: KafkaCluster, tmp_path: Path) -> None:
    rules = [{"name": "*", "topic": _TOPIC}]
    with gateway(kafka, tmp_path, "killed", receivers={"lines": True, "elasticsearch": rules}) as at:
        await at.make_topic(_TOPIC, 2)
        senders = Senders(at)
        async with aiohttp.ClientSession() as session:
            tasks = [asyncio.create_task(senders.send(session, sender)) for sender in range(_SENDERS)]
            for kill in range(_KILLS):
                await senders.progress()
                await asyncio.to_thread(at.workers[kill % 2].child.restart)
                await senders.progress()
                await asyncio.to_thread(at.wait_ready)
            senders.is_over = True
            await asyncio.gather(*tasks)
    stored: dict[int, list[bytes]] = {sender: [] for sender in range(_SENDERS)}
    last: dict[bytes, int] = {}
    records = await committed_records(kafka.bootstrap, f"dc1.{_TOPIC}")
    for record in sorted(records, key=lambda record: (record.partition, record.offset)):
        key, chunk = record.key or b"", chunk_of_record(record.value or b"", record.headers)
        assert chunk.prev == last.get(key, chunk.prev), "the chain of a source is broken"
        last[key] = chunk.seqno
        for line in chunk.data.splitlines():
            found = re.search(rb"(\d+) \d+", line)
            assert found is not None
            stored[int(found[1])].append(line)
    assert senders.repeated, "no request was disturbed"
    for sender, lines in senders.acknowledged.items():
        assert len(lines) >= 2 * _KILLS * _AFTER_EACH // _SENDERS
        if sender % 2:
            # Doubled at most: the first of each, in order, is what was acknowledged.
            assert list(dict.fromkeys(stored[sender])) == lines
        else:
            assert stored[sender] == lines
