"""Benchmark of push delivery: one worker to one receiver, against reading the same topic over HTTP."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import Final

from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared
from logferry.ops.bench.harness.gateways import CHUNK_BYTES, filled, read_over_http, running_stack
from logferry.ops.bench.harness.peers import bare_handler
from logferry.ops.bench.harness.usage import UsageMeter, rss_mb
from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.stack.processes import ServiceWorker, Setting, configuration, free_ports, get
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 3
_POLL_S: Final = 0.05
_LONGEST_S: Final = 120.0


def push_delivery_mb_s() -> Figure:
    """64 KiB chunks of a topic with 8 partitions, as MessagePack, to a handler that reads each body and answers.

    The peer reads the same chunks over HTTP from two gateway workers, one reader a partition.
    """
    with running_stack(2) as stack, bare_handler() as (url, _), tempfile.TemporaryDirectory() as folder:
        records = filled(stack)
        worker = _worker(stack, Path(folder))
        worker.child.start()
        try:
            rounds = alternate(
                _ROUNDS,
                lambda number: _delivered(stack, worker, url, records, number),
                lambda _: read_over_http(stack, 1),
            )
        finally:
            worker.child.stop(15)
    return compared("MB/s pushed / read over HTTP", "mb_s", rounds)


def _worker(stack: Stack, folder: Path) -> ServiceWorker:
    port = free_ports(1)[0]
    file = folder / "deliver.toml"
    settings: dict[str, Setting] = {
        "dc": "dc1",
        "listen": f"127.0.0.1:{port}",
        "accept_weak_kafka": ["replication", "min-isr"],
        "allowed_networks": ["127.0.0.0/8"],
        "kafka": {"bootstrap_servers": stack.cluster().bootstrap},
    }
    file.write_text(configuration(settings))
    return ServiceWorker("deliver", file, 0, port, folder / "deliver.log", "logferry.gateway.delivery")


def _delivered(stack: Stack, worker: ServiceWorker, url: str, records: int, number: int) -> Side:
    """From the making of a subscription until the receiver has everything."""
    name = f"bench-{number}"
    body = {"topics": ["dc1.read"], "url": url, "format": "msgpack", "start": "earliest"}
    deadline = time.monotonic() + _LONGEST_S
    pid = worker.child.pid or 0
    with UsageMeter([pid]) as meter:
        GatewayClient(stack.urls()[0]).request("PUT", f"/v1/subscriptions/{name}", body)
        while _chunks(worker, name) < records:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{_chunks(worker, name)} of {records} chunks after {_LONGEST_S:g} s")
            time.sleep(_POLL_S)
    GatewayClient(stack.urls()[0]).request("DELETE", f"/v1/subscriptions/{name}")
    size = records * CHUNK_BYTES
    return {"mb_s": size / meter.wall_s / 1e6, "cpu_s_per_gb": meter.cpu_s / (size / 1e9), "rss_mb": rss_mb([pid])}


def _chunks(worker: ServiceWorker, name: str) -> float:
    try:
        text = get(worker.url, "/metrics")[1].decode()
    except OSError:
        return 0.0
    found = re.search(rf'^logferry_delivery_chunks_total{{subscription="{name}"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0
