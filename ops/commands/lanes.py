"""``logferry lanes``: changes the number of lanes of gateway or mirror, and repairs a lane that cannot be read.

``--to``: see `lane_change`.

A record of the state topic that cannot be decoded stops its lane (event ``lane_stopped``). ``--forget`` writes a
tombstone for the record's key, so that the lane serves without the state of that source, copy or subscription.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
from pathlib import Path
from typing import Final

from aiokafka import AIOKafkaProducer, errors
from logferry.gateway.config import Config, ConfigError
from logferry.gateway.config import load as load_gateway
from logferry.gateway.contract.delivery_state import DeliveryState, UnitKey
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.contract.mirror_state import MirrorCheckpoint, partition_of_key
from logferry.gateway.contract.source_state import RECEIPT_KIND, Receipt, SourceState, source_of_record
from logferry.gateway.contract.upload_state import UPLOAD_KIND, UploadState
from logferry.gateway.delivery.config import DeliverConfig
from logferry.gateway.delivery.config import load as load_deliver
from logferry.gateway.kafka.client import EARLIEST, LATEST
from logferry.gateway.kafka.record_batch import KafkaRecord
from logferry.gateway.service.lane_change import Changed, ChangeRefused, LaneChange
from logferry.gateway.tls import kafka_options
from logferry.mirror.config import MirrorConfig
from logferry.mirror.config import load as load_mirror
from logferry.ops.audit.log.read import connected
from logferry.ops.cli.options import command_parser
from logferry.ops.cli.problems import CommandError, Unavailable, UsageError

_MOST_LANES: Final = 1024
_FETCH_BYTES: Final = 1 << 20
_EXAMPLE: Final = "example: logferry lanes --config gateway.toml --forget 3:81234"
_OF_GATEWAY: Final = (
    "The gateway will not know what it recorded of this source: chunks that are sent again are doubled."
)
_OF_MIRROR: Final = (
    "The mirror will not know how far it copied this partition: it stops as target-not-empty until it is resumed."
)
_OF_DELIVER: Final = (
    "Deliver will not know how far the partition was delivered: it begins where its subscription began. A receiver "
    "that follows the rule leaves out what it has taken; any other gets it twice."
)
_Configured = Config | MirrorConfig | DeliverConfig


def main(argv: list[str] | None = None) -> int:
    """0 done. Raises CommandError, whose exit status is 1 (refused or not confirmed), 2 (wrong use or configuration) or
    3 (Kafka does not answer)."""
    description = (
        "Changes the number of lanes while gateway or mirror run (--to): writers wait for some seconds, nothing is "
        "lost or doubled. All workers must have this version, and none may start or stop meanwhile. Killed at any "
        "step, the old or the new number holds; repeat it then. "
        "Or repairs a stopped lane (--forget): forgets a record of the state topic that cannot be decoded. The lane "
        "serves again within seconds. In a gateway the source starts without deduplication, in a mirror the partition "
        "stops as target-not-empty: resume it with logferry mirror resume. In deliver the partition begins where its "
        "subscription began."
    )
    parser = command_parser(
        "lanes", "--config FILE (--to N | --forget LANE:OFFSET) [OPTION ...]", description, _EXAMPLE
    )
    option = parser.add_argument
    option(
        "--config",
        required=True,
        type=Path,
        metavar="FILE",
        help="the TOML configuration of the gateway, mirror or deliver",
    )
    service = parser.add_mutually_exclusive_group()
    service.add_argument("--mirror", action="store_true", help="a lane of the mirror, not of the gateway")
    service.add_argument("--deliver", action="store_true", help="a lane of deliver, not of the gateway")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", type=int, metavar="N", help="the new number of lanes, 1 to 1024")
    what.add_argument("--forget", metavar="LANE:OFFSET", help="the record, as `logferry status` names it")
    option("--yes", action="store_true", help="do it without asking")
    args = parser.parse_args(argv)
    if args.to is not None:
        return _change(args)
    lane, _, offset = args.forget.partition(":")
    if not (lane.isdecimal() and offset.isdecimal()):
        parser.error(f"--forget: {args.forget!r} must be LANE:OFFSET, as in 3:81234")
    try:
        config: _Configured
        if args.mirror or args.deliver:
            config = load_mirror(args.config) if args.mirror else load_deliver(args.config)
        else:
            config = load_gateway(args.config)
        record = asyncio.run(_unreadable(config, int(lane), int(offset)))
        key = record.key or b""
        print(f"{config.state_topic}-{lane}, offset {offset}: key {key!r}, {len(record.value or b'')} bytes")
        print(_OF_MIRROR if args.mirror else _OF_DELIVER if args.deliver else _OF_GATEWAY)
        if not args.yes and (not sys.stdin.isatty() or input("Proceed? Type yes: ").strip() != "yes"):
            raise CommandError("nothing was changed; repeat with --yes")
        asyncio.run(_write_tombstone(config, int(lane), key))
    except ConfigError as error:
        raise UsageError(str(error)) from None
    except (errors.KafkaError, OSError, TimeoutError) as error:
        raise Unavailable(f"Kafka does not answer: {error!r}") from None
    print(f"forgotten; lane {lane} serves again within seconds")
    return 0


def _change(args: argparse.Namespace) -> int:
    if args.deliver:
        raise UsageError("--to: changes the lanes of gateway and mirror; those of deliver are fixed")
    if not 1 <= args.to <= _MOST_LANES:
        raise UsageError(f"--to: {args.to} is not 1 to {_MOST_LANES}")
    try:
        config = load_mirror(args.config) if args.mirror else load_gateway(args.config)
        changed = asyncio.run(_change_to(config, args.to))
    except ChangeRefused as error:
        raise CommandError(str(error)) from None
    except ConfigError as error:
        raise UsageError(str(error)) from None
    except (errors.KafkaError, OSError, TimeoutError) as error:
        raise Unavailable(f"Kafka does not answer: {error!r}") from None
    if not changed.paused_s:
        print(f"there are {args.to} lanes already")
        return 0
    moved = f"{changed.moved} states moved, all waited {changed.paused_s:.1f} s"
    print(f"{changed.before} lanes are {args.to} now: {moved}")
    print(f"the setting `lanes` ({config.lanes}) stays as it is: it is the number at the beginning")
    return 0


async def _change_to(config: Config | MirrorConfig, to: int) -> Changed:
    async with connected(kafka_options(config.kafka)) as kafka:
        return await LaneChange(kafka, config, to, lambda text: print(text, flush=True)).run()


async def _unreadable(config: _Configured, lane: int, offset: int) -> KafkaRecord:
    """The record at the offset, which must be one that cannot be decoded."""
    topic = config.state_topic
    async with connected(kafka_options(config.kafka)) as kafka:
        partitions = len((await kafka.describe_topic(topic)).partitions)
        if lane >= partitions:
            raise UsageError(f"--forget: there is no lane {lane}; the lanes are 0 to {partitions - 1}")
        first, end = await kafka.offset(topic, lane, EARLIEST), await kafka.offset(topic, lane, LATEST)
        if not first <= offset < end:
            raise CommandError(f"{topic}-{lane} has the offsets from {first} to before {end}, {offset} is outside")
        fetched = await kafka.fetch(topic, lane, offset, max_bytes=_FETCH_BYTES)
    record = next((record for record in fetched.records if record.offset == offset), None)
    if record is None:
        raise CommandError(f"{topic}-{lane} has no record at offset {offset}: it was compacted; nothing is to do")
    try:
        _decode(config, record.key or b"", record.value)
    except (ValueError, struct.error):
        return record
    is_gateway = isinstance(config, Config) and record.key != COUNT_KEY
    what = "to forget its source: DELETE /v1/topics/TOPIC/sources/SOURCE" if is_gateway else "it stops no lane"
    raise CommandError(f"the record at offset {offset} can be decoded; {what}")


def _decode(config: _Configured, key: bytes, value: bytes | None) -> None:
    """Raises ValueError or struct.error. A record without a value stops no lane: a fence writes such a record."""
    if value is None:
        return
    if key == COUNT_KEY and not isinstance(config, DeliverConfig):
        LaneCount.decode(value)
    elif isinstance(config, MirrorConfig):
        partition_of_key(key)
        MirrorCheckpoint.decode(value)
    elif isinstance(config, DeliverConfig):
        UnitKey.decode(key)
        DeliveryState.decode(value)
    elif key[:1] == UPLOAD_KIND:
        UploadState.decode(value)
    else:
        source_of_record(key)
        (Receipt if key[:1] == RECEIPT_KIND else SourceState).decode(value)


async def _write_tombstone(config: _Configured, lane: int, key: bytes) -> None:
    async with AIOKafkaProducer(acks="all", **kafka_options(config.kafka)) as producer:
        await producer.send_and_wait(config.state_topic, None, key=key, partition=lane)
