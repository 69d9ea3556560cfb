"""``logferry read``: writes the chunks of a topic to standard output as they arrive."""

from __future__ import annotations

import argparse
import base64
import json
import re
import select
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final

import msgpack
from logferry.client import Chunk, Cursors, LogferryError, Reader, Rejected, Superseded, Unknown
from logferry.gateway.contract.names import Malformed, visible
from logferry.ops.cli.gateway_client import RequestRefused, add_gateway_options, no_gateway, token_of
from logferry.ops.cli.options import command_parser, parse_with_file
from logferry.ops.cli.problems import CommandError, Unavailable, UsageError
from rich.console import Console
from rich.status import Status

_EXAMPLE = """examples:
  logferry read nginx                                     from the beginning, then new chunks, until Ctrl-C
  logferry read nginx --from -1h --until-end              the last hour, then exit
  logferry read nginx --from latest --max 10
  logferry read nginx --filter env=production --format ndjson | jq .source_id
  logferry read nginx --consumer billing                  resume from the commit; readers of one name share the work
  logferry read dc1.nginx --from dc1.nginx:3:81234        one partition from a cursor, in any data centre

TIME: 2026-05-04T10:00:00Z, 2026-05-04 (without a zone: local time), or -90s, -15m, -1h, -7d.
Formats: text is the data alone, byte for byte; ndjson is one object per line with all fields of the chunk; msgpack is
the same fields as arrays. On a terminal, control characters are shown escaped. With --consumer, the command commits all
chunks that it has written.

Exit status: 0 done, 1 refused (unknown topic, no right to read it, position not retained), 2 wrong use,
3 no gateway answers.
"""
_OUT_OF_RANGE: Final = "; start elsewhere with --from earliest, or set the consumer's positions"
_OPEN_S: Final = 10.0
_COMMIT_INTERVAL_S: Final = 1.0
_LOOK_S: Final = 0.25
_SILENCE_S: Final = 60.0
_TURN_S: Final = 0.2
_RELATIVE: Final = re.compile(r"-(\d{1,9})([smhd])\Z", re.ASCII)
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def main(argv: list[str]) -> int:
    """0 done. Raises CommandError, whose exit status is 1 (refused), 2 (wrong use) or 3 (no gateway answers)."""
    args, console = _arguments(argv), Console(stderr=True)
    is_shown = console.is_terminal and not sys.stdout.isatty()
    try:
        with console.status("waiting for chunks") if is_shown else nullcontext() as status:
            ReadCommand(args, sys.stdout.buffer, ReadProgress(status)).run()
    except Unknown as unknown:
        raise no_gateway(args.url, unknown) from None
    except Rejected as rejected:
        more = _OUT_OF_RANGE if rejected.kind == "out-of-range" else ""
        raise RequestRefused(rejected.status, {"detail": f"{rejected}{more}"}) from None
    except LogferryError as error:
        raise CommandError(str(error)) from None
    return 0


class ReadCommand:
    """Copies chunks from the reader to the output. Commits the written ones every second and at the end."""

    def __init__(self, args: argparse.Namespace, output: BinaryIO, shown: ReadProgress) -> None:
        """Raises UsageError."""
        self._reader = _reader(args, self.commit)
        self._output, self._shown = output, shown
        self._encode = encode = FORMATS[args.format]
        if output.isatty():
            self._encode = lambda chunk: visible(encode(chunk).decode(errors="backslashreplace"), "\t\n").encode()
        self._commits, self._ends = args.consumer is not None, bool(args.until_end)
        self._committed_at = time.monotonic()

    def run(self) -> None:
        """Raises what `Reader` does."""
        with closing(self._reader) as reader:
            reader.open(_OPEN_S)
            try:
                while (chunk := self._next()) is not None:
                    self._write(chunk)
            except KeyboardInterrupt:
                self.commit(_OPEN_S)
                raise
            self.commit()
            self._shown.end(self._where)

    def _where(self) -> str:
        """The position after the last chunk: cursors, valid in any data centre; offsets if no gateway answers now."""
        with suppress(LogferryError):
            return str(self._reader.cursors(_OPEN_S))
        return str(self._reader.position)

    def _next(self) -> Chunk | None:
        """The next chunk, None at the end. Flushes and commits before it waits.

        Raises Unavailable when chunks that exist do not arrive.
        """
        chunk = self._reader.read(0)
        if chunk is None:
            self.commit()
        patience = time.monotonic() + _SILENCE_S
        while chunk is None and not self._reader.is_over:
            if is_cut(self._output):
                raise BrokenPipeError
            chunk = self._reader.read(_LOOK_S)
            self._shown.turn()
            if self._ends and chunk is None and time.monotonic() > patience:
                raise Unavailable(
                    f"the gateway has not answered for {_SILENCE_S:.0f} s;"
                    f" resume later with --from {self._reader.position}"
                )
        return chunk

    def _write(self, chunk: Chunk) -> None:
        self._output.write(self._encode(chunk))
        self._shown.count(chunk)
        if self._commits and time.monotonic() - self._committed_at > _COMMIT_INTERVAL_S:
            self.commit()

    def commit(self, timeout_s: float | None = None) -> None:
        """Chunks of partitions that moved to another reader are read there again; the reader reports that, not this."""
        self._output.flush()
        self._committed_at = time.monotonic()
        if self._commits:
            with suppress(Superseded):
                self._reader.commit(timeout_s)


def _reader(args: argparse.Namespace, on_revoked: Callable[[], None]) -> Reader:
    """Raises UsageError."""
    start, partitions = _start(vars(args)["from"])
    try:
        return Reader(
            args.url,
            args.topic,
            consumer=args.consumer,
            start=start,
            partitions=partitions,
            source_prefix=args.source_prefix or "",
            attributes=_filters(args.filter),
            follow=not args.until_end,
            max_chunks=args.max,
            token=token_of(args),
            ca_file=args.ca_file,
            on_revoked=on_revoked,
        )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None


def _arguments(argv: list[str]) -> argparse.Namespace:
    description = "Writes the chunks of a topic to standard output: the stored ones, then new ones as they arrive."
    parser = command_parser("read", "TOPIC [OPTION ...]", description, _EXAMPLE)
    topic = "nginx, dc1.nginx, or with --consumer a pattern such as '*.nginx'"
    parser.add_argument("topic", metavar="TOPIC", help=topic)
    option = parser.add_argument
    options = [
        option("--from", metavar="WHERE", help="start: earliest (default), latest, a TIME or a cursor"),
        option("--consumer", metavar="C", help="read as this consumer, from its committed positions"),
        option("--max", type=int, metavar="N", help="exit after N chunks"),
        option(
            "--until-end", action="store_true", help="exit at the present end of the topic; do not wait for new chunks"
        ),
        option("--format", choices=tuple(FORMATS), default="text", help="output format (default: text)"),
        option("--filter", action="append", metavar="NAME=VALUE", help="only chunks with this attribute; repeatable"),
        option("--source-prefix", metavar="TEXT", help="only chunks of sources whose id begins with TEXT"),
        *add_gateway_options(parser),
    ]
    args = parse_with_file("read", parser, options, _joined(argv))
    if args.max is not None and args.max < 0:
        parser.error("--max must be at least 0")
    return args


def _joined(argv: list[str]) -> list[str]:
    """Joins ``--from -1h`` into one word: argparse would take -1h for an option."""
    found = list(argv)
    for place, word in enumerate(argv[:-1]):
        if word == "--from" and _RELATIVE.match(argv[place + 1]):
            found[place : place + 2] = [f"--from={argv[place + 1]}"]
    return found


def _filters(given: list[str] | str | None) -> dict[str, str]:
    found = {}
    for item in given.split(",") if isinstance(given, str) else given or []:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise UsageError(f"--filter {item}: expected NAME=VALUE")
        found[name] = value
    return found


def _start(text: str | None) -> tuple[Any, list[int] | None]:
    """The start of the reader, and the partitions that a cursor names. Raises UsageError."""
    if text in (None, "earliest", "latest"):
        return text or "earliest", None
    if found := _RELATIVE.match(str(text)):
        try:
            return datetime.now(UTC) - timedelta(**{_UNITS[found[2]]: int(found[1])}), None
        except OverflowError:
            raise UsageError(f"--from {text}: the time is out of range") from None
    with suppress(ValueError, OverflowError, OSError):
        at = datetime.fromisoformat(str(text))
        return at if at.tzinfo else at.astimezone(), None
    try:
        cursors = Cursors.parse(text or "nowhere")
    except Malformed:
        wanted = "earliest, latest, a time like 2026-05-04T10:00:00Z or -1h, or a cursor like dc1.nginx:3:81234"
        raise UsageError(f"--from {text}: expected {wanted}") from None
    return cursors, [number for _, number in cursors]


# ---- output --------------------------------------------------------------------------------------------------


def _ndjson(chunk: Chunk) -> bytes:
    """The gateway's NDJSON row: data that is not UTF-8 is base64 under ``data_base64``."""
    row: dict[str, Any] = chunk._asdict()
    data = row.pop("data")
    try:
        row["data"] = data.decode()
    except UnicodeDecodeError:
        row["data_base64"] = base64.b64encode(data).decode()
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


FORMATS: Final[dict[str, Callable[[Chunk], bytes]]] = {
    "text": lambda chunk: chunk.data,
    "ndjson": _ndjson,
    "msgpack": lambda chunk: bytes(msgpack.packb(list(chunk))),
}


def is_cut(output: BinaryIO) -> bool:
    """Whether the reader of the pipe is gone. It is noticed without a write, so that ``| head`` ends at once."""
    poll = select.poll()
    poll.register(output.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class ReadProgress:
    """Chunks, bytes and rate; shown where standard error is a terminal and standard output is not."""

    def __init__(self, status: Status | None) -> None:
        self._status = status
        self._chunks = self._bytes = 0
        self._began = self._turned_at = time.monotonic()

    def count(self, chunk: Chunk) -> None:
        self._chunks += 1
        self._bytes += len(chunk.data)
        self.turn()

    def turn(self) -> None:
        """Redraws the line unless it was drawn a moment ago."""
        now = time.monotonic()
        if self._status is not None and now - self._turned_at >= _TURN_S:
            self._turned_at = now
            self._status.update(self._words(now))

    def end(self, where: Callable[[], str]) -> None:
        """Prints the totals and ``where()``, the next position; on a terminal only."""
        if self._status is not None:
            self._status.stop()
            words = self._words(time.monotonic())
            self._status.console.print(f"{words}; next: {where()}", highlight=False, soft_wrap=True)

    def _words(self, now: float) -> str:
        took_s = max(now - self._began, 0.001)
        return f"{self._chunks:,} chunks, {self._bytes / 1e6:,.1f} MB, {self._bytes / 1e6 / took_s:,.1f} MB/s"
