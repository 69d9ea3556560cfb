"""Benchmark of push delivery: two workers to one receiver, against reading the same topic over HTTP."""

from __future__ import annotations

import json
import re
import tempfile
import time
from pathlib import Path
from typing import Final

from logferry.gateway.config import MIB
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared
from logferry.ops.bench.harness.gateways import CHUNK_BYTES, filled, read_over_http, running_stack
from logferry.ops.bench.harness.peers import bare_handler
from logferry.ops.bench.harness.usage import UsageMeter, peak_rss_mb
from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.stack.processes import ServiceWorker, Setting, configuration, free_ports, get, stop_all
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 3
_POLL_S: Final = 0.05
_LONGEST_S: Final = 120.0
_WORKERS: Final = 2
# As large as the pages of the peer's answers.
_BATCH_BYTES: Final = 4 << 20


def push_delivery_mb_s() -> Figure:
    """64 KiB chunks of a topic with 8 partitions, as MessagePack, to a handler that reads each body and answers.

    The peer reads the same chunks over HTTP from two gateway workers, one reader a partition, in pages of 4 MB; so
    batches have 4 MiB. ``mb_s_1mib``: with batches of the default size.
    """
    with running_stack(2) as stack, bare_handler() as (url, _), tempfile.TemporaryDirectory() as folder:
        records = filled(stack)
        workers = _workers(stack, Path(folder))
        try:
            for worker in workers:
                worker.child.start()

            def ours(number: int) -> Side:
                small = _delivered(stack, workers, url, records, f"small-{number}", MIB)
                large = _delivered(stack, workers, url, records, f"large-{number}", _BATCH_BYTES)
                return {**large, "mb_s_1mib": small["mb_s"]}

            rounds = alternate(_ROUNDS, ours, lambda _: read_over_http(stack, 1))
        finally:
            stop_all([worker.child for worker in workers], 15)
    return compared("MB/s pushed / read over HTTP", "mb_s", rounds)


def _workers(stack: Stack, folder: Path) -> list[ServiceWorker]:
    port = free_ports(_WORKERS)[0]
    file = folder / "deliver.toml"
    settings: dict[str, Setting] = {
        "dc": "dc1",
        "listen": f"127.0.0.1:{port}",
        "workers": _WORKERS,
        "accept_weak_kafka": ["replication", "min-isr"],
        "allowed_networks": ["127.0.0.0/8"],
        "kafka": {"bootstrap_servers": stack.cluster().bootstrap},
    }
    file.write_text(configuration(settings))
    return [
        ServiceWorker(
            f"deliver-{n}", file, n, port + n, folder / f"deliver-{n}.log", module="logferry.gateway.delivery"
        )
        for n in range(_WORKERS)
    ]


def _delivered(stack: Stack, workers: list[ServiceWorker], url: str, records: int, name: str, max_bytes: int) -> Side:
    """From the making of a subscription until the receiver has everything."""
    body = {"topics": ["dc1.read"], "url": url, "format": "msgpack", "start": "earliest", "max_bytes": max_bytes}
    deadline = time.monotonic() + _LONGEST_S
    pids = [worker.child.pid or 0 for worker in workers]
    before = _taken(url)
    # Chunks are whole lines, a little less than this.
    most = records * CHUNK_BYTES * 0.99
    with UsageMeter(pids) as meter:
        GatewayClient(stack.urls()[0]).request("PUT", f"/v1/subscriptions/{name}", body)
        # The workers are asked only at the end: their metrics cost them some ms each time.
        while _taken(url) - before < most or sum(_chunks(worker, name) for worker in workers) < records:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all of {records} chunks after {_LONGEST_S:g} s")
            time.sleep(_POLL_S)
    size = _taken(url) - before
    GatewayClient(stack.urls()[0]).request("DELETE", f"/v1/subscriptions/{name}")
    peak = sum(map(peak_rss_mb, pids))
    return {"mb_s": size / meter.wall_s / 1e6, "cpu_s_per_gb": meter.cpu_s / (size / 1e9), "peak_rss_mb": peak}


def _taken(url: str) -> int:
    """The bytes that the receiver has taken so far."""
    return int(json.loads(get(url, "/")[1])["taken"])


def _chunks(worker: ServiceWorker, name: str) -> float:
    try:
        text = get(worker.url, "/metrics")[1].decode()
    except OSError:
        return 0.0
    found = re.search(rf'^logferry_delivery_chunks_total{{subscription="{name}"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0
