"""Benchmarks of the receivers: lines a second of one worker, against a bare handler that parses and throws away.

The handler parses as a program with the usual libraries does: each document by `json`, OpenTelemetry's requests by its
own package. It stores nothing.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Final

from logferry.ops.bench.harness.figures import Figure, alternate, compared
from logferry.ops.bench.harness.gateways import Post, gateway_pids, make_topic, posted, running_stack
from logferry.ops.bench.harness.kafka import chunks
from logferry.ops.bench.harness.peers import PeerMissing, bare_handler

_ROUNDS: Final = 3
_LINES: Final = 1000
_TOPIC: Final = "received"
_PARSE_JSON: Final = "parse = lambda body: [json.loads(line) for line in body.splitlines()]"
_PARSE_OTLP: Final = (
    "from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest\n"
    "parse = ExportLogsServiceRequest.FromString"
)


def _lines() -> list[str]:
    """Access logs."""
    return b"".join(chunks(64, 64 * 1024)).decode().splitlines()


def _compared(post: Post, parse: str) -> Figure:
    rules = [{"name": "*", "topic": _TOPIC}]
    on = {"receivers": {"elasticsearch": rules, "otlp": rules}}
    with bare_handler(parse) as (url, pid), running_stack(1, gateway_settings=on) as stack:
        make_topic(stack, _TOPIC)
        rounds = alternate(
            _ROUNDS,
            lambda _: posted(stack.urls(), gateway_pids(stack), post),
            lambda _: posted([url], [pid], post),
        )
    return compared("lines/s ours / theirs", "lines_s", rounds)


def bulk_lines_s() -> Figure:
    """Elasticsearch's bulk requests of 1,000 access log lines each, 16 senders, one worker; recorded in Kafka."""
    lines, bodies = _lines(), list[bytes]()
    for at in range(0, len(lines) - _LINES, _LINES):
        documents = (json.dumps({"message": line, "host": "web1"}) for line in lines[at : at + _LINES])
        bodies.append("".join(f'{{"index":{{"_index":"app"}}}}\n{document}\n' for document in documents).encode())
    return _compared(Post("/elasticsearch/_bulk", bodies, _LINES), _PARSE_JSON)


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
    return _compared(post, _PARSE_OTLP)
