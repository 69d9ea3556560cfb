"""The rights that operations/kafka.md lists, and Kafka's request that grants them; without a JVM."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from logferry.gateway.kafka.client import KafkaClient, raise_for
from logferry.gateway.kafka.requests import FlexibleRequest

from tests.support.secured_kafka import Right

_PAGE: Final = Path(__file__).parents[2] / "ops/docs/operations/kafka.md"
_CLUSTER: Final = "kafka-cluster"
# Kafka's numbers.
_TYPES: Final = {"TOPIC": 2, "GROUP": 3, "CLUSTER": 4, "TRANSACTIONAL_ID": 5}
_PATTERNS: Final = {"LITERAL": 3, "PREFIXED": 4}
_OPERATIONS: Final = {
    "READ": 3,
    "WRITE": 4,
    "CREATE": 5,
    "DELETE": 6,
    "ALTER": 7,
    "DESCRIBE": 8,
    "DESCRIBE_CONFIGS": 10,
    "ALTER_CONFIGS": 11,
}
_DENY: Final = 2
ALLOW: Final = 3

ALTER_CLUSTER: Final[Right] = ("CLUSTER", _CLUSTER, "LITERAL", "ALTER")
DESCRIBE_CLUSTER: Final[Right] = ("CLUSTER", _CLUSTER, "LITERAL", "DESCRIBE")


class CreateAclsRequest(
    FlexibleRequest,
    key=30,
    version=2,
    asked="creations[type:int8 name:text pattern:int8 principal:text host:text operation:int8 permission:int8]",
    answered="throttle_time_ms:int32 results[error_code:int16 error_message:text]",
):
    def __init__(self, user: str, rights: Iterable[Right], permission: int) -> None:
        super().__init__([_rule(user, right, permission) for right in rights])


class DeleteAclsRequest(
    FlexibleRequest,
    key=31,
    version=2,
    asked="filters[type:int8 name:text pattern:int8 principal:text host:text operation:int8 permission:int8]",
    answered="throttle_time_ms:int32 results[error_code:int16 error_message:text matching[error_code:int16 "
    "error_message:text type:int8 name:text pattern:int8 principal:text host:text operation:int8 permission:int8]]",
):
    def __init__(self, user: str, rights: Iterable[Right], permission: int) -> None:
        super().__init__([_rule(user, right, permission) for right in rights])


def _rule(user: str, right: Right, permission: int) -> tuple[Any, ...]:
    kind, name, pattern, operation = right
    return (_TYPES[kind], name, _PATTERNS[pattern], f"User:{user}", "*", _OPERATIONS[operation], permission, {})


def documented(heading: str) -> list[Right]:
    """The rows of the table below the heading, without the optional ones."""
    section = _PAGE.read_text(encoding="utf-8").partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    found: list[Right] = []
    for resource, names, operations, *rest in rows[2:]:
        kind, _, pattern = resource.partition(", ")
        name = re.match("`([^`]+)`", names)
        if not any("**optional**" in text for text in rest):
            found += [
                (_upper(kind), name[1] if name else _CLUSTER, pattern.upper() or "LITERAL", _upper(operation))
                for operation in operations.split(", ")
            ]
    return found


def rights_of_script(dc: str, other: str, folder: Path) -> dict[str, list[Right]]:
    """The rights of each user in the Kafka of ``dc``, as the script of operations/kafka.md grants them."""
    [script] = [
        block for block in _PAGE.read_text(encoding="utf-8").split("```") if "kafka-rights.sh DC OTHER_DC" in block
    ]
    (folder / "rights.sh").write_text(script.removeprefix("sh\n"))
    shown = folder / "kafka-acls.sh"
    shown.write_text('#!/bin/sh\necho "$*"\n')
    shown.chmod(0o700)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["sh", str(folder / "rights.sh"), dc, other]
    said = subprocess.run(command, env=path, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[Right]] = {}
    for line in said.splitlines():
        options = dict(re.findall(r"--([a-z-]+) ([^-]\S*)", line))
        user, pattern = (
            options["allow-principal"].removeprefix("User:"),
            options.get("resource-pattern-type", "literal"),
        )
        kind = next((kind for kind in ("topic", "group", "transactional-id") if kind in options), "cluster")
        place = kind.replace("-", "_").upper(), options.get(kind, _CLUSTER), pattern.upper()
        for operation in re.findall(r"--operation (\w+)", line):
            found.setdefault(user, []).append((*place, _upper(operation)))
    return found


def _upper(name: str) -> str:
    """``DescribeConfigs`` → ``DESCRIBE_CONFIGS``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


async def grant(bootstrap: str, user: str, rights: Iterable[Right]) -> None:
    await _ask(bootstrap, CreateAclsRequest(user, rights, ALLOW))


async def deny(bootstrap: str, user: str, rights: Iterable[Right]) -> None:
    """Whatever is granted besides, until `deny_no_more`."""
    await _ask(bootstrap, CreateAclsRequest(user, rights, _DENY))


async def deny_no_more(bootstrap: str, user: str, rights: Iterable[Right]) -> None:
    await _ask(bootstrap, DeleteAclsRequest(user, rights, _DENY))


async def _ask(bootstrap: str, request: FlexibleRequest) -> None:
    kafka = KafkaClient({"bootstrap_servers": bootstrap}, "tests")
    await kafka.start()
    try:
        answer = await kafka.send(kafka.brokers()[0][0], request)
        for code, message, *_ in answer.results:
            raise_for(code, message)
    finally:
        await kafka.close()
