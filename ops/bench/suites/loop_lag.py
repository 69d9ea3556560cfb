"""The lag of a worker's event loop under full load, by the histogram that the worker itself exports."""

from __future__ import annotations

import asyncio
import gzip
import re
from functools import partial
from typing import Final
from urllib.request import urlopen

import cramjam
import uvloop
from logferry.ops.bench.harness import http_load
from logferry.ops.bench.harness.figures import Figure, Side, alternate, median_ratio, medians
from logferry.ops.bench.harness.workload import chunks
from logferry.ops.bench.suites.throughput import make_topic, running_stack

_ROUNDS: Final = 5
_SECONDS: Final = 8.0
_SOURCES: Final = 32
_CHUNK_BYTES: Final = 512 * 1024
_BUCKET: Final = re.compile(r'logferry_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)')

Buckets = list[tuple[float, float]]


def read_buckets(url: str) -> Buckets:
    """Upper bound in seconds and how many were below it, in order."""
    with urlopen(f"{url}/metrics", timeout=10) as answer:
        return [(float(bound), float(count)) for bound, count in _BUCKET.findall(answer.read().decode())]


def quantile_ms(before: Buckets, after: Buckets, share: float) -> float:
    """The quantile of what was counted in between, interpolated in its bucket, in ms."""
    counted = [(bound, count - old) for (bound, count), (_, old) in zip(after, before, strict=True)]
    wanted, low, below = share * counted[-1][1], 0.0, 0.0
    for bound, count in counted:
        if count >= wanted and count > below:
            high = bound if bound != float("inf") else low
            return 1000 * (low + (high - low) * (wanted - below) / (count - below))
        low, below = bound, count
    raise RuntimeError("the worker counted nothing")


async def _load(url: str, parts: list[tuple[str, str, list[bytes]]]) -> Side:
    """``parts``: topic, Content-Encoding and bodies, each with its share of the sources."""
    share = _SOURCES // len(parts)
    before = await asyncio.to_thread(read_buckets, url)
    loads = await asyncio.gather(
        *(
            http_load.run(
                [url], topic, share, bodies, _SECONDS, headers=encoding and f"Content-Encoding: {encoding}\r\n"
            )
            for topic, encoding, bodies in parts
        )
    )
    after = await asyncio.to_thread(read_buckets, url)
    if any(tally.refused for tally, _ in loads):
        raise RuntimeError("requests were refused")
    plain_bytes = _CHUNK_BYTES * sum(tally.requests for tally, _ in loads)
    lags = {f"p{percent}_ms": quantile_ms(before, after, percent / 100) for percent in (50, 99)}
    return {**lags, "mb_s": plain_bytes / max(took for _, took in loads) / 1e6}


def loop_lag_p99_ms() -> Figure:
    """The 99th percentile of the event loop's lag in one worker at full load with packed bodies of 512 KiB.

    Half of them gzip and half zstd, beside the same bodies unpacked. ``of_plain``: the median of the rounds' ratios.
    """
    plain = chunks(32, _CHUNK_BYTES)
    packed = [
        ("gzip", "gzip", [gzip.compress(body, 6) for body in plain]),
        ("zstd", "zstd", [bytes(cramjam.zstd.compress(body, 3)) for body in plain]),
    ]
    with running_stack(1) as stack:
        [url] = stack.urls()
        for topic in ("gzip", "zstd", "plain"):
            make_topic(url, topic, 8)

        def side(_: int, parts: list[tuple[str, str, list[bytes]]]) -> Side:
            return uvloop.run(_load(url, parts))

        ours, theirs = alternate(_ROUNDS, partial(side, parts=packed), partial(side, parts=[("plain", "", plain)]))
    mine = {**medians(ours), "of_plain": median_ratio(ours, theirs, "p99_ms")}
    return Figure("loop_lag_p99_ms", "ms packed", mine, medians(theirs), len(ours), value=mine["p99_ms"])
