"""``logferry lanes``: repairs a lane whose state cannot be read.

A record of the state topic that cannot be decoded stops its lane (event ``lane_stopped``). ``--forget`` writes a
tombstone for the record's key, so that the lane serves without the state of that source, or of that copy.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer, errors
from logferry.gateway.config import Config, ConfigError
from logferry.gateway.config import load as load_gateway
from logferry.gateway.contract.mirror_state import MirrorCheckpoint, partition_of_key
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.kafka.record_batch import KafkaRecord
from logferry.gateway.tls import kafka_options
from logferry.mirror.config import MirrorConfig
from logferry.mirror.config import load as load_mirror
from logferry.ops.cli.problems import CommandError, Unavailable, UsageError

_FETCH_BYTES: Final = 1 << 20


# A record without a value stops no lane, whatever its key is: a fence writes such a record.


def _decode_source(key: bytes, value: bytes | None) -> None:
    if value is not None:
        SourceIdentity.of_state_key(key)
        SourceState.decode(value)


def _decode_checkpoint(key: bytes, value: bytes | None) -> None:
    if value is not None:
        partition_of_key(key)
        MirrorCheckpoint.decode(value)


class _Service(NamedTuple):
    """``decode``: raises ValueError. ``otherwise``: what to do about a record that can be decoded."""

    load: Callable[[Path], Config | MirrorConfig]
    decode: Callable[[bytes, bytes | None], None]
    consequence: str
    otherwise: str


_GATEWAY: Final = _Service(
    load_gateway,
    _decode_source,
    "The gateway will not know what it recorded of this source: chunks that are sent again are doubled.",
    "to forget its source: DELETE /v1/topics/TOPIC/sources/SOURCE",
)
_MIRROR: Final = _Service(
    load_mirror,
    _decode_checkpoint,
    "The mirror will not know how far it copied this partition: it stops as target-not-empty until it is resumed.",
    "it stops no lane",
)


def main(argv: list[str] | None = None) -> int:
    """0 done. Raises CommandError, whose exit status is 1 (refused or not confirmed), 2 (wrong use or configuration) or
    3 (Kafka does not answer)."""
    parser = argparse.ArgumentParser(
        prog="logferry lanes",
        description="example: logferry lanes --config gateway.toml --forget 3:81234\n\n"
        "Repairs a stopped lane: forgets a record of the state topic that cannot be decoded.\n"
        "The lane serves again within seconds. In a gateway the source starts without deduplication,\n"
        "in a mirror the partition stops as target-not-empty: resume it with logferry mirror resume.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", required=True, type=Path, metavar="FILE", help="the TOML configuration of the gateway or mirror"
    )
    parser.add_argument("--mirror", action="store_true", help="a lane of the mirror, not of the gateway")
    parser.add_argument(
        "--forget", required=True, metavar="LANE:OFFSET", help="the record, as `logferry status` names it"
    )
    parser.add_argument("--yes", action="store_true", help="do it without asking")
    args = parser.parse_args(argv)
    lane, _, offset = args.forget.partition(":")
    if not (lane.isdecimal() and offset.isdecimal()):
        parser.error(f"--forget: {args.forget!r} must be LANE:OFFSET, as in 3:81234")
    try:
        service = _MIRROR if args.mirror else _GATEWAY
        config = service.load(args.config)
        if int(lane) >= config.lanes:
            raise UsageError(f"--forget: there is no lane {lane}; the lanes are 0 to {config.lanes - 1}")
        _forget(service, config, int(lane), int(offset), is_agreed=args.yes)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    except (errors.KafkaError, OSError, TimeoutError) as error:
        raise Unavailable(f"Kafka does not answer: {error!r}") from None
    return 0


def _forget(service: _Service, config: Config | MirrorConfig, lane: int, offset: int, *, is_agreed: bool) -> None:
    record = asyncio.run(_unreadable(service, config, lane, offset))
    key = record.key or b""
    print(f"{config.state_topic}-{lane}, offset {offset}: key {key!r}, {len(record.value or b'')} bytes")
    print(service.consequence)
    if not is_agreed and (not sys.stdin.isatty() or input("Proceed? Type yes: ").strip() != "yes"):
        raise CommandError("nothing was changed; repeat with --yes")
    asyncio.run(_write_tombstone(config, lane, key))
    print(f"forgotten; lane {lane} serves again within seconds")


async def _unreadable(service: _Service, config: Config | MirrorConfig, lane: int, offset: int) -> KafkaRecord:
    """The record at the offset, which must be one that cannot be decoded."""
    topic = config.state_topic
    kafka = KafkaClient(kafka_options(config.kafka), "logferry-lanes")
    await kafka.start()
    try:
        first, end = await kafka.offset(topic, lane, EARLIEST), await kafka.offset(topic, lane, LATEST)
        if not first <= offset < end:
            raise CommandError(f"{topic}-{lane} has the offsets from {first} to before {end}, {offset} is outside")
        fetched = await kafka.fetch(topic, lane, offset, max_bytes=_FETCH_BYTES)
    finally:
        await kafka.close()
    record = next((record for record in fetched.records if record.offset == offset), None)
    if record is None:
        raise CommandError(f"{topic}-{lane} has no record at offset {offset}: it was compacted; nothing is to do")
    try:
        service.decode(record.key or b"", record.value)
    except (ValueError, struct.error):
        return record
    raise CommandError(f"the record at offset {offset} can be decoded; {service.otherwise}")


async def _write_tombstone(config: Config | MirrorConfig, lane: int, key: bytes) -> None:
    producer = AIOKafkaProducer(acks="all", **kafka_options(config.kafka))
    await producer.start()
    try:
        await producer.send_and_wait(config.state_topic, None, key=key, partition=lane)
    finally:
        await producer.stop()
