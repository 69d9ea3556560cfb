"""A program of its own: sends chunks to a topic by librdkafka, in transactions, and prints its rate and CPU seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgpack

TRANSACTION_S: Final = 0.05
_BATCH_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 60.0


def librdkafka_producer(bootstrap: str, topic: str, payloads: list[bytes], records: int) -> tuple[float, float]:
    """The transactional producer of confluent-kafka at full speed: transactions of 50 ms, zstd at level 1, batches of
    1 MiB. Returns MB/s (10^6), without its start, and CPU seconds of the same time.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(msgpack.packb(payloads))
        file.flush()
        command = [sys.executable, "-m", __name__, bootstrap, topic, file.name, str(records)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = json.loads(said)
    return found["bytes"] / found["took_s"] / 1e6, found["cpu_s"]


def _send(bootstrap: str, topic: str, payloads: list[bytes], records: int) -> dict[str, float]:
    from confluent_kafka import Producer

    failures: list[Any] = []

    def delivered(failure: Any, _: Any) -> None:
        if failure:
            failures.append(failure)

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": f"bench-{topic}",
            "compression.type": "zstd",
            "compression.level": 1,
            "batch.size": _BATCH_BYTES,
            "linger.ms": 5,
            "message.max.bytes": 1 << 24,
            "queue.buffering.max.kbytes": 1 << 17,
            "on_delivery": delivered,
        }
    )
    producer.init_transactions(_TIMEOUT_S)
    began, cpu_s, taken = time.perf_counter(), time.process_time(), 0
    number = 0
    while number < records:
        producer.begin_transaction()
        until = time.perf_counter() + TRANSACTION_S
        while number < records and time.perf_counter() < until:
            payload = payloads[number % len(payloads)]
            try:
                # 64 sources, each in its partition, as a key chooses it.
                producer.produce(topic, payload, key=f"s-{number % 64}")
            except BufferError:
                producer.poll(0.01)
                continue
            producer.poll(0)
            taken += len(payload)
            number += 1
        producer.commit_transaction(_TIMEOUT_S)
    took_s = time.perf_counter() - began
    if failures:
        raise RuntimeError(f"{len(failures)} records were not delivered: {failures[0]}")
    return {"bytes": taken, "took_s": took_s, "cpu_s": time.process_time() - cpu_s}


if __name__ == "__main__":
    _bootstrap, _topic, _file, _records = sys.argv[1:]
    print(json.dumps(_send(_bootstrap, _topic, msgpack.unpackb(Path(_file).read_bytes()), int(_records))))
