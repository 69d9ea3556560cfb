"""``logferry read``: chunks of a topic to standard output, as they come."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final

from logferry.client import Chunk, Cursors, LogferryError, Reader, Rejected, Superseded, Unknown
from logferry.gateway.contract.chunk import Malformed
from logferry.ops.cli import gateway_client as asking
from logferry.ops.cli.problems import Problem, Unavailable, WrongUse
from logferry.ops.config import Defaults
from logferry.ops.written import FORMATS, Progress, is_cut, progress

_EXAMPLE = """examples:
  logferry read nginx                                     from the beginning, then what comes, until Ctrl-C
  logferry read nginx --from -1h --until-end              the last hour, then end
  logferry read nginx --from latest --max 10
  logferry read nginx --filter env=production --format ndjson | jq .source_id
  logferry read nginx --consumer billing                  goes on where it was; shared among all of that name
  logferry read dc1.nginx --from dc1.nginx:3:81234        one partition, from that cursor on, in any data centre

TIME: 2026-05-04T10:00:00Z, 2026-05-04 (without a zone: local time), or -90s, -15m, -1h, -7d. Formats: text is the data
alone, byte for byte; ndjson an object a line with all that is known of the chunk; msgpack the same as arrays.
With --consumer, what was written out is committed.

Exit status: 0 done, 1 the answer is no (there is no such topic, it may not be read, the position is not retained),
2 wrong use, 3 no gateway.
"""
_OPEN_S: Final = 10.0
_COMMIT_INTERVAL_S: Final = 1.0
_LOOK_S: Final = 0.25
_SILENCE_S: Final = 60.0
_RELATIVE: Final = re.compile(r"-(\d{1,9})([smhd])\Z", re.ASCII)
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def main(argv: list[str]) -> int:
    """0 done. Raises Problem: the answer is no (1), wrong use (2), no gateway there (3)."""
    args = _arguments(argv)
    try:
        with progress() as shown:
            Reading(args, sys.stdout.buffer, shown).run()
    except Unknown as unknown:
        raise Unavailable(f"no gateway answers at {args.url}: {unknown}; is it running? (logferry up)") from None
    except Rejected as rejected:
        raise _problem(rejected) from None
    except LogferryError as error:
        raise Problem(str(error)) from None
    return 0


class Reading:
    """From the reader to the output; what was written out is committed, now and then and at the end."""

    def __init__(self, args: argparse.Namespace, output: BinaryIO, shown: Progress) -> None:
        """Raises WrongUse."""
        self._reader = _reader(args, self.commit)
        self._output, self._shown = output, shown
        self._encode = FORMATS[args.format]
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
                self.commit()
                raise
            self.commit()
            self._shown.end(self._where)

    def _where(self) -> str:
        """Where to go on, in any data centre; in this one, if the gateway is gone by now."""
        try:
            return str(self._reader.cursors(_OPEN_S))
        except LogferryError:
            return str(self._reader.position)

    def _next(self) -> Chunk | None:
        """What came is written out before it waits. Raises Unavailable where there is more, and it does not come."""
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
                    f"the gateway has not answered for {_SILENCE_S:.0f} s; go on later: --from {self._reader.position}"
                )
        return chunk

    def _write(self, chunk: Chunk) -> None:
        self._output.write(self._encode(chunk))
        self._shown.count(chunk)
        if self._commits and time.monotonic() - self._committed_at > _COMMIT_INTERVAL_S:
            self.commit()

    def commit(self) -> None:
        """What another reader has meanwhile comes again there: it is told so when it is read, not here."""
        self._output.flush()
        self._committed_at = time.monotonic()
        if self._commits:
            with suppress(Superseded):
                self._reader.commit()


def _reader(args: argparse.Namespace, on_revoked: Callable[[], None]) -> Reader:
    """Raises WrongUse."""
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
            token=asking.token_of(args),
            ca_file=args.ca_file,
            on_revoked=on_revoked,
        )
    except (ValueError, OSError) as error:
        raise WrongUse(str(error)) from None


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="logferry read",
        description="Writes the chunks of a topic to standard output: those that are there, then those that come.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topic", metavar="TOPIC", help="nginx, dc1.nginx, or with --consumer a pattern, '*.nginx'")
    option = parser.add_argument
    options = [
        option("--from", metavar="WHERE", help="earliest (default), latest, a TIME, or a cursor"),
        option("--consumer", metavar="C", help="read as this consumer: from where it has committed"),
        option("--max", type=int, metavar="N", help="end after so many chunks"),
        option("--until-end", action="store_true", help="end where the topic ends now; do not wait for more"),
        option("--format", choices=tuple(FORMATS), default="text", help="how chunks are written (default: text)"),
        option("--filter", action="append", metavar="NAME=VALUE", help="only chunks with this attribute; may repeat"),
        option("--source-prefix", metavar="TEXT", help="only chunks of sources that begin so"),
        *asking.options(parser),
    ]
    Defaults("read").add_to(parser, options, argv)
    args = parser.parse_args(_joined(argv))
    if args.max is not None and args.max < 0:
        parser.error("--max: at least 0")
    return args


def _joined(argv: list[str]) -> list[str]:
    """``--from -1h`` in one word: argparse would take -1h for an option."""
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
            raise WrongUse(f"--filter {item}: is not NAME=VALUE")
        found[name] = value
    return found


def _start(text: str | None) -> tuple[Any, list[int] | None]:
    """Where to begin, and the partitions that are meant. Raises WrongUse."""
    if text in (None, "earliest", "latest"):
        return text or "earliest", None
    if found := _RELATIVE.match(str(text)):
        try:
            return datetime.now(UTC) - timedelta(**{_UNITS[found[2]]: int(found[1])}), None
        except OverflowError:
            raise WrongUse(f"--from {text}: is too long ago") from None
    with suppress(ValueError, OverflowError, OSError):
        at = datetime.fromisoformat(str(text))
        return at if at.tzinfo else at.astimezone(), None
    try:
        cursors = Cursors.parse(text or "nowhere")
    except Malformed:
        wanted = "earliest, latest, a time like 2026-05-04T10:00:00Z or -1h, or a cursor like dc1.nginx:3:81234"
        raise WrongUse(f"--from {text}: is none of {wanted}") from None
    return cursors, [number for _, number in cursors]


def _problem(rejected: Rejected) -> Problem:
    text = str(rejected)
    if rejected.status in (401, 403):
        text += f" (--token-file, or {asking.TOKEN_VARIABLE} in the environment)"
    if rejected.kind == "out-of-range":
        text += "; begin elsewhere: --from earliest, or set the consumer's positions"
    return WrongUse(text) if rejected.status in (400, 401) else Problem(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
