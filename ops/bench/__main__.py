"""``make bench``, or ``python -m logferry.ops.bench [NAME,NAME ...]``: runs benchmarks and prints their figures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from logferry.ops.bench.harness.figures import Figure, append_figure, print_figures
from logferry.ops.bench.harness.rsyslog import PeerMissing
from logferry.ops.bench.suites import (
    isolation,
    latency,
    load,
    loop_lag,
    many_partitions,
    many_sources,
    mirror,
    push,
    throughput,
)

BENCHMARKS: Final[dict[str, Callable[[], Figure]]] = {
    benchmark.__name__: benchmark
    for benchmark in (
        *(throughput.ingest_vs_java_producer, throughput.small_requests_vs_bare_handler),
        *(throughput.topic_spread, throughput.read_vs_java_consumer, throughput.read_fan_out),
        *(many_sources.many_sources_rss_mb, many_sources.many_sources_takeover_s),
        many_sources.rewritten_states_takeover_s,
        *(isolation.lane_isolation, loop_lag.loop_lag_p99_ms),
        *(latency.latency_vs_kafka_transaction, latency.created_to_readable_ms),
        *(mirror.mirror_throughput_vs_mm2, mirror.mirror_cpu_vs_mm2, mirror.mirror_rss_vs_mm2),
        many_partitions.mirror_10k_partitions_rss_mb,
        *(load.load_rows_vs_structured_streaming, load.load_small_batches_vs_structured_streaming),
        load.load_thousand_batches,
        *(push.push_drain_vs_rsyslog, push.push_cpu_vs_rsyslog, push.push_rss_mb, push.push_idle_cpu_percent),
    )
}


def main(argv: list[str]) -> int:
    names = [name for argument in argv for name in argument.split(",") if name] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}; the names are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    figures = []
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            figure = BENCHMARKS[name]()
        except PeerMissing as missing:
            print(f"{name}: skipped: {missing}", file=sys.stderr)
            continue
        append_figure(figure)
        figures.append(figure)
    print_figures(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
