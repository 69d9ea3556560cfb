"""``make bench``, or ``python -m logferry.ops.bench [name,name …]``: runs benchmarks and prints their figures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from logferry.ops.bench import polling, reading
from logferry.ops.bench.harness.figures import Figure, keep, show
from logferry.ops.bench.harness.rsyslog import Missing
from logferry.ops.bench.suites import latency
from logferry.ops.bench.suites import load as loading
from logferry.ops.bench.suites import many_partitions as partitions
from logferry.ops.bench.suites import many_sources as sources
from logferry.ops.bench.suites import mirror as mirroring
from logferry.ops.bench.suites import push as pushing
from logferry.ops.bench.suites import throughput as writing

BENCHMARKS: Final[dict[str, Callable[[], Figure]]] = {
    "ingest_vs_java_producer": writing.ingest_vs_java_producer,
    "small_requests_vs_bare_handler": writing.small_requests_vs_bare_handler,
    "topic_spread": writing.topic_spread,
    "read_vs_java_consumer": reading.read_vs_java_consumer,
    "read_fan_out": reading.read_fan_out,
    "many_sources_rss_mb": sources.many_sources_rss_mb,
    "many_sources_takeover_s": sources.many_sources_takeover_s,
    "rewritten_states_takeover_s": sources.rewritten_states_takeover_s,
    "latency_vs_kafka_transaction": latency.latency_vs_kafka_transaction,
    "created_to_readable_ms": latency.created_to_readable_ms,
    "mirror_throughput_vs_mm2": mirroring.mirror_throughput_vs_mm2,
    "mirror_cpu_vs_mm2": mirroring.mirror_cpu_vs_mm2,
    "mirror_rss_vs_mm2": mirroring.mirror_rss_vs_mm2,
    "mirror_10k_partitions_rss_mb": partitions.mirror_10k_partitions_rss_mb,
    "load_rows_vs_structured_streaming": loading.load_rows_vs_structured_streaming,
    "load_small_batches_vs_structured_streaming": loading.load_small_batches_vs_structured_streaming,
    "load_thousand_batches": loading.load_thousand_batches,
    "push_drain_vs_rsyslog": pushing.push_drain_vs_rsyslog,
    "push_cpu_vs_rsyslog": pushing.push_cpu_vs_rsyslog,
    "push_rss_mb": pushing.push_rss_mb,
    "push_idle_cpu_percent": polling.push_idle_cpu_percent,
}


def main(argv: list[str]) -> int:
    names = [name for argument in argv for name in argument.split(",") if name] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    figures = []
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            figure = BENCHMARKS[name]()
        except Missing as missing:
            print(f"{name}: skipped: {missing}", file=sys.stderr)
            continue
        keep(figure)
        figures.append(figure)
    show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
