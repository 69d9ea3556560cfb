"""Benchmarks of the receivers: lines a second of one worker.

``bulk_lines_s``: against a bare handler that parses each document by `json` and throws it away. ``otlp_lines_s``:
against OpenTelemetry's collector, which writes to the same Kafka and may use all processors. ``archive_mb_s``: against
chunks.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from logferry.ops.bench.harness.figures import Figure, alternate, compared
from logferry.ops.bench.harness.gateways import (
    Load,
    Post,
    archived,
    gateway_pids,
    make_topic,
    measured,
    posted,
    running_stack,
)
from logferry.ops.bench.harness.kafka import chunks
from logferry.ops.bench.harness.peers import PeerMissing, bare_handler, collector
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 3
_WARM_UP_S: Final = 40.0
_LINES: Final = 1000
_TOPIC: Final = "received"
_PARSE_JSON: Final = "parse = lambda body: [json.loads(line) for line in body.splitlines()]"


def _lines() -> list[str]:
    """Access logs."""
    return b"".join(chunks(64, 64 * 1024)).decode().splitlines()


@contextmanager
def _receiving() -> Iterator[Stack]:
    """One worker with all receivers, and its topic."""
    rules = [{"name": "*", "topic": _TOPIC}]
    on = {"receivers": {"elasticsearch": rules, "otlp": rules, "archive": {"topics": rules}}}
    with running_stack(1, gateway_settings=on) as stack:
        make_topic(stack, _TOPIC)
        yield stack


def _compared(stack: Stack, post: Post, url: str, pid: int, path: str) -> Figure:
    rounds = alternate(
        _ROUNDS,
        lambda _: posted(stack.urls(), gateway_pids(stack), post),
        lambda _: posted([url], [pid], post._replace(path=path)),
        _WARM_UP_S,
    )
    return compared("lines/s ours / theirs", "lines_s", rounds)


def bulk_lines_s() -> Figure:
    """Elasticsearch's bulk requests of 1,000 access log lines each, 16 senders, one worker; recorded in Kafka."""
    lines, bodies = _lines(), list[bytes]()
    for at in range(0, len(lines) - _LINES, _LINES):
        documents = (json.dumps({"message": line, "host": "web1"}) for line in lines[at : at + _LINES])
        bodies.append("".join(f'{{"index":{{"_index":"app"}}}}\n{document}\n' for document in documents).encode())
    post = Post("/elasticsearch/_bulk", bodies, _LINES)
    with bare_handler(_PARSE_JSON) as (url, pid), _receiving() as stack:
        return _compared(stack, post, url, pid, post.path)


def otlp_lines_s() -> Figure:
    """OpenTelemetry's requests of 1,000 records with five attributes, 16 senders, one worker; recorded in Kafka."""
    if importlib.util.find_spec("opentelemetry") is None:
        raise PeerMissing("OpenTelemetry's package is not installed: pip install opentelemetry-proto")
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    lines, bodies = _lines(), list[bytes]()
    for at in range(0, len(lines) - _LINES, _LINES):
        request = ExportLogsServiceRequest()
        resource = request.resource_logs.add()
        for key in ("service.name", "host.name"):
            resource.resource.attributes.add(key=key).value.string_value = "web1"
        records = resource.scope_logs.add().log_records
        for number, line in enumerate(lines[at : at + _LINES]):
            record = records.add(time_unix_nano=1_700_000_000_000_000_000 + number, severity_number=9)
            record.body.string_value = line
            for name in ("method", "path", "status", "agent", "referer"):
                record.attributes.add(key=f"http.{name}").value.string_value = line[:20]
        bodies.append(request.SerializeToString())
    post = Post("/otlp/v1/logs", bodies, _LINES, "Content-Type: application/x-protobuf\r\n")
    with _receiving() as stack, tempfile.TemporaryDirectory() as folder:
        topic = make_topic(stack, "collected")
        with collector(stack.cluster().bootstrap, topic, Path(folder)) as (url, pid):
            return _compared(stack, post, url, pid, "/v1/logs")


def archive_mb_s() -> Figure:
    """Files of 4 pieces of 1 MiB by the archive's protocol, against the same pieces as chunks; 16 senders, one worker.

    A piece is written twice: when it is stored, and by the commit.
    """
    pieces = chunks(4, 1 << 20)
    with _receiving() as stack:
        make_topic(stack, "plain")
        urls, pids = stack.urls(), gateway_pids(stack)
        rounds = alternate(
            _ROUNDS,
            lambda _: archived(urls, pids, pieces),
            lambda _: measured(urls, pids, Load("plain", pieces, 16)),
            _WARM_UP_S,
        )
    return compared("MB/s by archive / as chunks", "mb_s", rounds)
