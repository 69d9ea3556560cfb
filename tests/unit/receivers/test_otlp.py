"""OpenTelemetry's requests: both encodings give the same lines, by the protocol's own library, and nothing dies."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.contract.names import Malformed
from logferry.gateway.receivers import otlp
from logferry.gateway.receivers.opentelemetry import response, status
from logferry.gateway.receivers.otlp import decode_json
from logferry.gateway.receivers.otlp_protobuf import decode_protobuf
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

# Some have about as many bytes as a length of one byte can tell.
TEXTS = st.text(max_size=8) | st.integers(100, 130).map("x".__mul__) | st.integers(40, 70).map("ä".__mul__)
SCALARS = st.one_of(
    TEXTS.map(lambda text: AnyValue(string_value=text)),
    st.booleans().map(lambda value: AnyValue(bool_value=value)),
    st.integers(-(2**63), 2**63 - 1).map(lambda value: AnyValue(int_value=value)),
    st.floats().map(lambda value: AnyValue(double_value=value)),
    st.binary(max_size=8).map(lambda value: AnyValue(bytes_value=value)),
    st.just(AnyValue()),
)


def _arrays(inner: st.SearchStrategy[AnyValue]) -> st.SearchStrategy[AnyValue]:
    def array(values: list[AnyValue]) -> AnyValue:
        found = AnyValue()
        found.array_value.values.extend(values)
        return found

    def pairs(values: dict[str, AnyValue]) -> AnyValue:
        found = AnyValue()
        found.kvlist_value.values.extend(KeyValue(key=key, value=value) for key, value in values.items())
        return found

    return st.lists(inner, max_size=3).map(array) | st.dictionaries(TEXTS, inner, max_size=3).map(pairs)


VALUES = st.recursive(SCALARS, _arrays, max_leaves=6)
ATTRIBUTES = st.dictionaries(TEXTS | st.sampled_from(["service.name", "a", "b", "c"]), VALUES, max_size=4).map(
    lambda found: [KeyValue(key=key, value=value) for key, value in found.items()]
)
RECORDS = st.builds(
    LogRecord,
    time_unix_nano=st.integers(0, 2**64 - 1),
    observed_time_unix_nano=st.integers(0, 2**63),
    severity_number=st.integers(0, 24),
    severity_text=TEXTS,
    body=VALUES,
    attributes=ATTRIBUTES,
    flags=st.integers(0, 2**32 - 1),
    trace_id=st.binary(max_size=16),
    span_id=st.binary(max_size=8),
    event_name=TEXTS,
    dropped_attributes_count=st.integers(0, 2**32 - 1),
)
SCOPES = st.builds(
    ScopeLogs,
    scope=st.builds(InstrumentationScope, name=TEXTS, version=TEXTS, attributes=ATTRIBUTES),
    log_records=st.lists(RECORDS, max_size=3),
    schema_url=TEXTS,
)
RESOURCES = st.builds(
    ResourceLogs, resource=st.builds(Resource, attributes=ATTRIBUTES), scope_logs=st.lists(SCOPES, max_size=2)
)
NAMES = (
    *("resourceLogs", "scopeLogs", "logRecords", "resource", "scope", "attributes", "key", "value", "body", "values"),
    *("timeUnixNano", "severityNumber", "severityText", "flags", "traceId", "droppedAttributesCount"),
    *("stringValue", "boolValue", "intValue", "doubleValue", "bytesValue", "arrayValue", "kvlistValue"),
)
REQUESTS = st.builds(ExportLogsServiceRequest, resource_logs=st.lists(RESOURCES, max_size=2))


def as_json(request: ExportLogsServiceRequest) -> bytes:
    """OTLP's JSON: that of protobuf, but ids in hexadecimal digits and enums as numbers."""

    def hexadecimal(node: Any) -> None:
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            hexadecimal(child)
        for name in ("traceId", "spanId") if isinstance(node, dict) else ():
            if isinstance(node.get(name), str):
                node[name] = base64.b64decode(node[name]).hex()

    document = MessageToDict(request, use_integers_for_enums=True)
    hexadecimal(document)
    return json.dumps(document).encode()


@given(REQUESTS)
def test_both_encodings_give_the_same_lines(request: ExportLogsServiceRequest) -> None:
    found = decode_protobuf(request.SerializeToString())
    assert found == decode_json(as_json(request))
    records = [record for one in request.resource_logs for scope in one.scope_logs for record in scope.log_records]
    lines = [json.loads(line) for one in found for line in one.lines]
    assert [line.get("time_unix_nano", 0) for line in lines] == [record.time_unix_nano for record in records]
    assert [line.get("trace_id", "") for line in lines] == [record.trace_id.hex() for record in records]
    assert all(b"\n" not in line for one in found for line in one.lines)


def long_winded(message: Message) -> bytes:
    """Protobuf with each tag and length in a byte more than it needs, which no sender writes and all may read."""
    found = b""
    for field, value in message.ListFields():
        for one in value if field.is_repeated else [value]:
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                found += _long(field.number << 3 | 2, long_winded(one))
            elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
                found += _long(field.number << 3 | 2, one.encode() if isinstance(one, str) else one)
            else:
                alone = type(message)(**{field.name: one}).SerializeToString()
                found += bytes([alone[0] | 0x80, 0]) + alone[1:]
    return found


def _long(tag: int, content: bytes) -> bytes:
    size = _size(content)
    return bytes([tag | 0x80, 0, *size[:-1], size[-1] | 0x80, 0]) + content


@given(REQUESTS)
def test_the_encoding_of_tags_and_lengths_changes_no_line(request: ExportLogsServiceRequest) -> None:
    assert decode_protobuf(long_winded(request)) == decode_protobuf(request.SerializeToString())


def test_each_record_has_its_own_attributes() -> None:
    """One after the other has other names, other values, and the same name twice."""

    def attributes(*pairs: tuple[str, str | int]) -> list[KeyValue]:
        return [
            KeyValue(
                key=key, value=AnyValue(string_value=value) if isinstance(value, str) else AnyValue(int_value=value)
            )
            for key, value in pairs
        ]

    wanted: list[list[tuple[str, str | int]]] = [
        [("a", "1"), ("b", "2")], [("a", "3"), ("b", "4")], [("a", "5"), ("c", "6")], [("a", "7"), ("c", 8)],
        [("a", "9"), ("a", "10")], [("a", ""), ("b", "ü"), ("a", "11")], [("a", "x" * 200), ("b", "12")], [],
        [("ab", "13"), ("b", "14")], [("a", "15"), ("bc", '"')], [(f"n{n}", str(n)) for n in range(1500)],
        [(f"n{n}", str(n)) for n in range(1500, 0, -1)], [("", "16"), ("x" * 127, "17"), ("x" * 128, "18")],
    ]  # fmt: skip
    scope = ScopeLogs(log_records=[LogRecord(attributes=attributes(*pairs)) for pairs in wanted])
    request = ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[scope])])
    (found,) = decode_protobuf(request.SerializeToString())
    assert [json.loads(line).get("attributes", {}) for line in found.lines] == [dict(pairs) for pairs in wanted]


def test_a_record_of_the_specification() -> None:
    """The example that opentelemetry-proto carries, shortened."""
    body = {
        "resourceLogs": [{
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "my.service"}}]},
            "scopeLogs": [{
                "scope": {"name": "my.library", "version": "1.0.0", "attributes": [
                    {"key": "my.scope.attribute", "value": {"stringValue": "some scope attribute"}}]},
                "logRecords": [{
                    "timeUnixNano": "1544712660300000000", "observedTimeUnixNano": "1544712660300000000",
                    "severityNumber": 10, "severityText": "Information",
                    "traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE19B7EC3C1B174",
                    "body": {"stringValue": "Example log record"},
                    "attributes": [{"key": "int.attribute", "value": {"intValue": "10"}},
                                   {"key": "array.attribute",
                                    "value": {"arrayValue": {"values": [{"stringValue": "many"}]}}}],
                }],
            }],
        }]
    }  # fmt: skip
    (found,) = decode_json(json.dumps(body).encode())
    assert (found.attributes, found.name("host.name", "service.name")) == ({"service.name": "my.service"}, "my.service")
    assert json.loads(found.lines[0]) == {
        "time_unix_nano": 1544712660300000000,
        "observed_time_unix_nano": 1544712660300000000,
        "severity_number": 10,
        "severity_text": "Information",
        "trace_id": "5b8efff798038103d269b633813fc60c",
        "span_id": "eee19b7ec3c1b174",
        "body": "Example log record",
        "attributes": {"int.attribute": 10, "array.attribute": ["many"]},
        "scope": {
            "name": "my.library",
            "version": "1.0.0",
            "attributes": {"my.scope.attribute": "some scope attribute"},
        },
    }


def test_resource_attributes_that_no_chunk_takes_stand_in_the_lines() -> None:
    attributes = [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in
                  (("Host.Name", "a"), ("host.name", "b"), ("ä", "c"), ("long", "x" * 5000))]  # fmt: skip
    resource = ResourceLogs(resource=Resource(attributes=attributes), scope_logs=[ScopeLogs(log_records=[LogRecord()])])
    (found,) = decode_protobuf(ExportLogsServiceRequest(resource_logs=[resource]).SerializeToString())
    assert found.attributes == {"host.name": "a"}
    assert json.loads(found.lines[0])["resource"] == {"host.name": "b", "ä": "c", "long": "x" * 5000}


@given(REQUESTS, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4), st.integers(0, 400))
def test_a_broken_body_is_malformed_and_nothing_else(
    request: ExportLogsServiceRequest, changes: list[tuple[int, int]], cut: int
) -> None:
    for decode, body in ((decode_protobuf, request.SerializeToString()), (decode_json, as_json(request))):
        broken = bytearray(body)
        for at, byte in changes:
            if at < len(broken):
                broken[at] = byte
        for raw in (bytes(broken), bytes(broken[:cut])):
            try:
                decode(raw)
            except Malformed:
                continue


@given(st.binary(max_size=60))
def test_noise_is_decoded_or_malformed(body: bytes) -> None:
    for decode in (decode_protobuf, decode_json):
        try:
            decode(body)
        except Malformed:
            continue


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.sampled_from([10**400, "1", "-1", "0x1", "\ud800", "ab", "", True])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)


@given(JSON)
def test_any_value_at_any_place_is_decoded_or_malformed(value: Any) -> None:
    """The names of the protocol with values that it does not allow there; what is decoded gives lines of JSON."""
    record = {"logRecords": [value]}
    for body in ({"resourceLogs": [value]}, {"resourceLogs": [{"scopeLogs": [record]}]}, value):
        try:
            found = decode_json(json.dumps(body).encode())
        except Malformed:
            continue
        for line in (line for one in found for line in one.lines):
            json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "record",
    [
        b'{"timeUnixNano":1e999}', b'{"timeUnixNano":"18446744073709551616"}', b'{"timeUnixNano":-1}',
        b'{"flags":NaN}', b'{"body":{"doubleValue":1' + b"0" * 400 + b"}}", b'{"body":{"boolValue":"false"}}',
        b'{"body":{"intValue":"9223372036854775808"}}', b'{"body":{"stringValue":"\\ud800"}}', b'{"attributes":[1]}',
    ],
)  # fmt: skip
def test_a_record_that_protobuf_could_not_hold_is_malformed(record: bytes) -> None:
    with pytest.raises(Malformed):
        decode_json(b'{"resourceLogs":[{"scopeLogs":[{"logRecords":[' + record + b"]}]}]}")


def nested(depth: int) -> bytes:
    value = b""
    for _ in range(depth):
        inner = b"\x0a" + _size(value) + value
        value = b"\x2a" + _size(inner) + inner
    record = b"\x2a" + _size(value) + value
    scope = b"\x12" + _size(record) + record
    logs = b"\x12" + _size(scope) + scope
    return b"\x0a" + _size(logs) + logs


def _size(of: bytes) -> bytes:
    found, number = bytearray(), len(of)
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def of_records(records: bytes) -> bytes:
    scope = b"\x12" + _size(records) + records
    return b"\x0a" + _size(scope) + scope


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (nested(40), "nested more than"),
        (of_records(b"\x12\x00" * 100_001), "records in one request"),
        (b"\x0a\x00" * 10_001, "resources in one request"),
        (b"\x0b", "wire type"),
        (b"\x0a\x05", "cut off"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "too long"),
        (b"\x08\x01", "another type"),
    ],
)
def test_limits_and_broken_fields(body: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        decode_protobuf(body)


def _field(number: int, inner: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _size(inner) + inner


# Where values may stand: each takes so many small ones and gives a request.
PLACES: dict[str, Callable[[int], bytes]] = {
    "record": lambda count: of_records(_field(2, _field(6, b"") * count)),
    "short form": lambda count: of_records(_field(2, _field(6, b"\x0a\x01k\x12\x03\x0a\x01v") * count)),
    "records": lambda count: of_records(_field(2, _field(6, b"")) * count),
    "array": lambda count: of_records(_field(2, _field(5, _field(5, _field(1, b"") * count)))),
    "map": lambda count: of_records(_field(2, _field(5, _field(6, _field(1, b"") * count)))),
    "resource": lambda count: _field(1, _field(1, _field(1, b"") * count)),
    "resources": lambda count: _field(1, _field(1, _field(1, b""))) * count,
    "scope": lambda count: _field(1, _field(2, _field(1, _field(3, b"") * count))),
}


@pytest.mark.parametrize("place", PLACES)
def test_values_are_limited_wherever_they_stand(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(otlp, "_VALUES", 1000)
    decode_protobuf(PLACES[place](1000))
    with pytest.raises(Malformed, match="more than 1000 values"):
        decode_protobuf(PLACES[place](1001))


def test_a_small_request_does_not_become_a_large_one() -> None:
    attribute = KeyValue(key="x", value=AnyValue(string_value="y" * 100_000))
    scope = ScopeLogs(log_records=[LogRecord()] * 1000)
    request = ExportLogsServiceRequest(
        resource_logs=[ResourceLogs(resource=Resource(attributes=[attribute]), scope_logs=[scope])]
    )
    for decode, body in ((decode_protobuf, request.SerializeToString()), (decode_json, as_json(request))):
        with pytest.raises(Malformed, match="bytes as lines"):
            decode(body)


@pytest.mark.parametrize("body", [b"[]", b"1", b'{"resourceLogs":1}', b'{"resourceLogs":[1]}', b"[" * 100_000, b"\xff",
                                  b'{"resourceLogs":[{"scopeLogs":[{"logRecords":[{"traceId":"xyz"}]}]}]}',
                                  b'{"a":[' + b"1," * 1_000_001 + b"1]}"])  # fmt: skip
def test_json_that_is_no_request(body: bytes) -> None:
    with pytest.raises(Malformed):
        decode_json(body)


def test_answers_as_the_library_reads_them() -> None:
    partial = ExportLogsServiceResponse.FromString(response(300, "why", is_json=False)).partial_success
    assert (partial.rejected_log_records, partial.error_message) == (300, "why")
    assert response(0, "", is_json=False) == b""
    assert json.loads(response(3, "why", is_json=True)) == {
        "partialSuccess": {"rejectedLogRecords": "3", "errorMessage": "why"}
    }
    said = Status.FromString(status(14, "x" * 200, is_json=False))
    assert (said.code, said.message) == (14, "x" * 200)
