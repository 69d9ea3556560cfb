"""Records written to Kafka without the gateway, as strangers write them: what a mirror has to bring as it is.

Batches of one record and of 10,000, plain or in each codec, outside of transactions and in some that are committed or
aborted, in every partition of a topic.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

CODECS: Final = (None, "gzip", "snappy", "lz4", "zstd")
MANY: Final = 10_000
_BATCH_BYTES: Final = 1 << 20
_SIZES: Final = (1, MANY, 1, 7)


class RawLoad:
    """``async with RawLoad(bootstrap, topic, partitions) as load``: writes until it is left.

    A broker that is away ends what is under way, and it begins again: what is compared is what is stored.
    """

    def __init__(self, bootstrap: str, topic: str, partitions: int, pause_s: float = 0.0) -> None:
        self._bootstrap, self._topic, self._partitions, self._pause_s = bootstrap, topic, partitions, pause_s
        self._stop = False
        self.batches = 0
        self.aborted = 0

    async def __aenter__(self) -> RawLoad:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop = True
        async with asyncio.timeout(120):
            await self._task

    async def written(self, more: int) -> None:
        """Returns when there are so many more batches."""
        wanted = self.batches + more
        async with asyncio.timeout(120):
            while self.batches < wanted:
                await asyncio.sleep(0.02)
                if self._task.done():
                    self._task.result()

    async def _run(self) -> None:
        turn = 0
        while not self._stop:
            codec, is_transaction = CODECS[turn % len(CODECS)], turn % 2 == 0
            with suppress(KafkaError, OSError, TimeoutError):
                async with asyncio.timeout(60):
                    await self._write(turn, codec, is_transaction)
            turn += 1

    async def _write(self, turn: int, codec: str | None, is_transaction: bool) -> None:
        options: dict[str, Any] = {"transactional_id": f"raw-{self._topic}"} if is_transaction else {"acks": "all"}
        options |= {"compression_type": codec, "max_batch_size": _BATCH_BYTES}
        producer = AIOKafkaProducer(bootstrap_servers=self._bootstrap, **options)
        await producer.start()
        try:
            for step in range(4):
                if is_transaction:
                    await producer.begin_transaction()
                for index, size in enumerate(_SIZES):
                    await self._batch(producer, turn, step * len(_SIZES) + index, size)
                if is_transaction and step % 2:
                    await producer.abort_transaction()
                    self.aborted += 1
                elif is_transaction:
                    await producer.commit_transaction()
                if self._stop:
                    return
                await asyncio.sleep(self._pause_s)  # the pace of the load
        finally:
            await producer.stop()

    async def _batch(self, producer: AIOKafkaProducer, turn: int, index: int, size: int) -> None:
        batch = producer.create_batch()
        for number in range(size):
            key = None if number % 3 else b"%d" % turn
            value = b"turn %d, batch %d, record %d" % (turn, index, number)
            assert batch.append(timestamp=None, key=key, value=value) is not None, "the batch is full"
        batch.close()
        await (await producer.send_batch(batch, self._topic, partition=(turn + index) % self._partitions))
        self.batches += 1
