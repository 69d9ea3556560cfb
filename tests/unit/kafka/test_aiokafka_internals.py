"""What this project relies on inside of aiokafka, each part by its name: a new version that changes one fails here."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import OAuthAuthenticator
from aiokafka.consumer import consumer as consumer_module
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.protocol.metadata import MetadataResponse_v1
from logferry.gateway.kafka import aiokafka_internals
from logferry.gateway.kafka.aiokafka_internals import admin

# {request: the arguments that this project gives it, the answer of its newest version}. Answers are read by position
# and by name; a "[" begins what each entry of the list before it holds.
_FETCHED = (
    "throttle_time_ms error_code session_id topics [ topics partitions [ partition error_code highwater_offset "
    "last_stable_offset log_start_offset aborted_transactions [ producer_id first_offset ] preferred_read_replica "
    "message_set ] ]"
)
_TOPIC_ERRORS = "throttle_time_ms topic_errors [ topic error_code error_message ]"
REQUESTS: dict[type[Any], tuple[list[str], str]] = {
    aiokafka_internals.FetchRequest: (
        ["max_wait_time", "min_bytes", "max_bytes", "isolation_level", "topics"],
        _FETCHED,
    ),
    aiokafka_internals.OffsetRequest: (
        ["replica_id", "isolation_level", "topics"],
        "throttle_time_ms topics [ topic partitions [ partition error_code timestamp offset ] ]",
    ),
    aiokafka_internals.OffsetCommitRequest: (
        ["consumer_group", "consumer_group_generation_id", "consumer_id", "retention_time", "topics"],
        "throttle_time_ms topics [ topic partitions [ partition error_code ] ]",
    ),
    aiokafka_internals.InitProducerIdRequest: (
        ["transactional_id", "transaction_timeout_ms"],
        "throttle_time_ms error_code producer_id producer_epoch",
    ),
    admin.CreateTopicsRequest: (["create_topic_requests", "timeout", "validate_only"], _TOPIC_ERRORS),
    admin.CreatePartitionsRequest: (["topic_partitions", "timeout", "validate_only"], _TOPIC_ERRORS),
    admin.DescribeConfigsRequest: (
        ["resources"],
        "throttle_time_ms resources [ error_code error_message resource_type resource_name config_entries "
        "[ config_names config_value read_only config_source is_sensitive config_synonyms "
        "[ config_name config_value config_source ] ] ]",
    ),
    admin.DescribeGroupsRequest: (
        ["groups"],
        "throttle_time_ms groups [ error_code group state protocol_type protocol members "
        "[ member_id client_id client_host member_metadata member_assignment ] ]",
    ),
    admin.DeleteRecordsRequest: (
        ["topics", "timeout_ms"],
        "throttle_time_ms topics [ name partitions [ partition_index low_watermark error_code tags ] tags ] tags",
    ),
}


def fields(schema: Any) -> list[str]:
    """The names in their order."""
    found: list[str] = []
    for name, kind in zip(schema.names, schema.fields, strict=True):
        found.append(name)
        entries = getattr(kind, "array_of", None)
        if hasattr(entries, "names"):
            found += ["[", *fields(entries), "]"]
    return found


@pytest.mark.parametrize("request_class", REQUESTS, ids=lambda one: one.__name__)
def test_a_request_takes_these_arguments_and_its_answer_has_these_fields(request_class: type[Any]) -> None:
    arguments, answer = REQUESTS[request_class]
    required = [*inspect.signature(request_class).parameters][: len(arguments)]
    assert required == arguments
    assert fields(request_class._CLASSES[-1].RESPONSE_TYPE.SCHEMA) == answer.split()


FUNCTIONS: dict[Callable[..., Any], set[str]] = {
    aiokafka_internals.create_conn: {
        *("host", "port", "client_id", "request_timeout_ms", "ssl_context", "security_protocol", "sasl_mechanism"),
        *("sasl_plain_username", "sasl_plain_password", "sasl_oauth_token_provider"),
    },
    aiokafka_internals._send: {"self", "request", "expect_response"},
    aiokafka_internals.AIOKafkaConnection.close: {"self", "reason"},
    aiokafka_internals.AIOKafkaClient.__init__: {
        *("client_id", "request_timeout_ms", "metadata_max_age_ms", "bootstrap_servers"),
    },
    aiokafka_internals.AIOKafkaClient.send: {"node_id", "request", "group"},
    aiokafka_internals.AIOKafkaClient.bootstrap: {"self"},
    aiokafka_internals.AIOKafkaClient.close: {"self"},
    aiokafka_internals.AIOKafkaClient.coordinator_lookup: {"coordinator_type", "coordinator_key"},
    aiokafka_internals.AIOKafkaClient.set_topics: {"topics"},
    aiokafka_internals.AIOKafkaClient.force_metadata_update: {"self"},
    GroupCoordinator.request_rejoin: {"self"},
    GroupCoordinator.close: {"self"},
    GroupCoordinator.check_errors: {"self"},
    aiokafka_internals._step: {"self", "payload"},
    aiokafka_internals.StickyPartitionAssignor.assign: {"cluster", "members"},
    Fetcher.close: {"self"},
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__qualname__)
def test_a_function_takes_these_arguments(function: Callable[..., Any]) -> None:
    assert FUNCTIONS[function] - {*inspect.signature(function).parameters} == set()


def uses(owner: type[Any], attribute: str) -> set[str]:
    """The methods that read ``self.<attribute>``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    found = set()
    for method in ast.walk(tree):
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load):
                    found.add(method.name)
    return found


@pytest.mark.parametrize(
    ("owner", "attribute", "method"),
    [
        # Our own limit is what the next fetch asks for: it is read for each request.
        (Fetcher, "_max_partition_fetch_bytes", "_get_actions_per_node"),
        # Answers wait here until they are decoded, and leave it with their last record.
        (Fetcher, "_records", "next_record"),
        (Fetcher, "_records", "fetched_records"),
        (GroupCoordinator, "generation", "_do_heartbeat"),
        (GroupCoordinator, "member_id", "_do_heartbeat"),
        (GroupCoordinator, "_coordination_task", "check_errors"),
        (consumer_module.AIOKafkaConsumer, "_closed", "stop"),
        (consumer_module.AIOKafkaConsumer, "_coordinator", "stop"),
        (consumer_module.AIOKafkaConsumer, "_fetcher", "stop"),
        (consumer_module.AIOKafkaConsumer, "_client", "stop"),
        (aiokafka_internals.AIOKafkaClient, "_conns", "close"),
        (aiokafka_internals.AIOKafkaConnection, "_writer", "close"),
        (aiokafka_internals.AIOKafkaConnection, "_read_task", "close"),
        (aiokafka_internals.AIOKafkaConnection, "_versions", "send"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_an_attribute_is_what_aiokafka_itself_works_with(owner: type[Any], attribute: str, method: str) -> None:
    assert method in uses(owner, attribute)


def test_a_refused_token_is_answered_so_that_the_broker_ends_the_login() -> None:
    """RFC 7628, sections 3.1 and 3.2.3."""

    class Token:
        async def token(self) -> str:
            return "a.b.c"

    async def said(*answers: bytes) -> list[Any]:
        login = OAuthAuthenticator(sasl_oauth_token_provider=Token())
        return [await login.step(answer) for answer in (None, *answers)]

    first = (b"n,,\1auth=Bearer a.b.c\1\1", True)
    assert asyncio.run(said(b"")) == [first, None]
    assert asyncio.run(said(b'{"status":"invalid_token"}')) == [first, (b"\1", True)]


def test_a_consumer_that_never_started_is_left() -> None:
    async def leave() -> list[Any]:
        consumer = AIOKafkaConsumer(bootstrap_servers="127.0.0.1:1", group_id="group")
        await aiokafka_internals.leave_group(consumer)
        return [consumer._closed, consumer._coordinator, consumer._fetcher, dict(consumer._client._conns)]

    assert asyncio.run(leave()) == [True, None, None, {}]


def test_stopping_a_consumer_does_what_leaving_does() -> None:
    """`leave_group` has the steps of aiokafka's `stop` in its place; a step that is new there is missing here."""
    steps = [
        ast.unparse(node.value)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(AIOKafkaConsumer.stop))))
        if isinstance(node, ast.Await)
    ]
    assert steps == ["self._client.close()", "self._coordinator.close()", "self._fetcher.close()"]


def test_record_batches_have_what_is_read_of_them() -> None:
    builder = aiokafka_internals.DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=1,
        producer_id=7,
        producer_epoch=1,
        base_sequence=-1,
        batch_size=99,
    )
    builder.append(0, timestamp=5, key=b"k", value=b"v", headers=[("h", b"w")])
    [batch] = _batches(bytes(builder.build()))
    assert (batch.base_offset, batch.next_offset, batch.producer_id) == (0, 1, 7)
    assert (batch.is_control_batch, batch.is_transactional, batch.validate_crc()) == (False, True, True)
    [record] = batch
    assert (record.offset, record.timestamp, record.key, record.value, list(record.headers)) == (
        *(0, 5, b"k", b"v"),
        [("h", b"w")],
    )
    assert aiokafka_internals.ControlRecord.parse(b"\0\0\0\0") == aiokafka_internals.ABORT_MARKER
    assert aiokafka_internals.ControlRecord.parse(b"\0\0\0\1") != aiokafka_internals.ABORT_MARKER


def _batches(raw: bytes) -> list[Any]:
    records, found = aiokafka_internals.MemoryRecords(raw), []
    while records.has_next():
        found.append(records.next_batch())
    return found


def test_a_request_of_our_own_is_built_for_the_version_that_the_broker_knows() -> None:
    """`FlexibleRequest` is prepared as aiokafka's own are, by `_CLASSES` and the versions of the connection."""

    class Mine(aiokafka_internals.Request[aiokafka_internals.RequestStruct]):  # type: ignore[misc]
        API_KEY = 99

        def build(self, request_struct_class: type[Any]) -> Any:
            return request_struct_class

    Mine._CLASSES = (type("Old", (), {"API_VERSION": 3}), type("New", (), {"API_VERSION": 4}))
    assert Mine().prepare({99: (0, 3)}).API_VERSION == 3
    assert Mine().prepare({99: (0, 9)}).API_VERSION == 4


def test_the_rights_to_topics_of_kafka_itself_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    answer = MetadataResponse_v1(
        [(1, "127.0.0.1", 9092, None)],
        1,
        [(29, "__consumer_offsets", True, []), (3, "__transaction_state", True, []), (29, "dc1.a", False, [])],
    )
    ClusterMetadata().update_metadata(answer)
    assert [record.getMessage() for record in caplog.records] == ["Topic dc1.a is not authorized for this client"]


@pytest.mark.parametrize("partitions", [5, 2])
def test_the_partitions_in_use_are_assigned_each_once_also_after_there_were_others(partitions: int) -> None:
    """Also partitions that the topic does not have, as far as the group's leader knows; and no others of it."""
    numbers = [3]
    assignor = aiokafka_internals.assignor_of("t", lambda: numbers[0])
    # By which workers of another version join the same group.
    assert (assignor.name, assignor.version) == ("sticky", aiokafka_internals.StickyPartitionAssignor.version)
    for count in (3, partitions):
        numbers[0] = count
        members = {name: assignor.metadata({"t"}) for name in ("a", "b")}
        found = assignor.assign(ClusterMetadata(), members)
        [mine, others] = [aiokafka_internals.assigned_partitions(found[name].encode(), "t") for name in ("a", "b")]
        assert sorted(mine + others) == list(range(count))
        assert abs(len(mine) - len(others)) <= 1
        assignor.on_assignment(found["a"])
