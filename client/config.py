"""The command line of the push-client → `Config`. The one place that reads it, and the token's file."""

from __future__ import annotations

import argparse
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from logferry.client.batch import SMALLEST_CHUNK_BYTES, starts_record
from logferry.client.connections import origin_of
from logferry.client.dial import Dialer, check_pin, proxies_of
from logferry.gateway.contract import Malformed, check_attributes, check_topic

TOKEN_VARIABLE = "LOGFERRY_TOKEN"
OWN_ATTRIBUTES = ("host", "path", "split")
EXAMPLE = """example:
  logferry push --url http://127.0.0.1:8080 --topic nginx --state-dir /var/lib/logferry '/var/log/nginx/*.log'

Quote the patterns: the client looks for new files itself; ** stands for any number of folders. Include the names
that files get by rotation if they rotate faster than they can be noticed. exit status: 0 done; 1 (--once) some
file could not be sent completely; 2 wrong use; 3 (--once) the gateway cannot be reached.
"""


@dataclass(frozen=True)
class Config:
    """``patterns`` and ``state_dir`` are absolute. ``request_bytes``: of file content, at least ``line_bytes``."""

    urls: tuple[str, ...]
    topic: str
    state_dir: str
    patterns: tuple[str, ...]
    host: str
    attributes: dict[str, str]
    exclude: tuple[str, ...] = ()
    once: bool = False
    token: str | None = None
    ca_file: str | None = None
    pins: tuple[str, ...] = ()
    proxies: Mapping[str, str] = field(default_factory=dict)
    gzip: bool = True
    chunk_bytes: int = 256 << 10
    line_bytes: int = 1 << 20
    request_bytes: int = 2 << 20
    record_start: re.Pattern[bytes] | None = None
    cut_lines: bool = False
    linger_s: float = 0.2
    idle_s: float = 30.0
    rotated_s: float = 300.0
    heartbeat_s: float = 300.0
    timeout_s: float = 60.0
    threads: int = 4
    verbose: bool = False

    def dialer(self) -> Dialer:
        return Dialer(self.ca_file, self.pins, self.proxies)


def parse(argv: Sequence[str] | None = None) -> Config:
    """Raises SystemExit(2) after a message that names the option; SystemExit(0) after --help."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        return Config(
            urls=tuple(_url(url) for url in given.url),
            topic=check_topic(given.topic),
            state_dir=os.path.abspath(given.state_dir),  # noqa: PTH100  (keeps symbolic links)
            patterns=tuple(os.path.abspath(pattern) for pattern in given.glob),  # noqa: PTH100
            host=_host(given.host),
            attributes=_attributes(given.attr),
            exclude=tuple(given.exclude),
            once=given.once,
            token=_token(given.token_file),
            ca_file=_ca_file(given.ca_file),
            pins=tuple(_pin(pin) for pin in given.pin),
            proxies=proxies_of(os.environ),
            gzip=not given.no_gzip,
            chunk_bytes=int(_between("--chunk-bytes", given.chunk_bytes, SMALLEST_CHUNK_BYTES, given.line_bytes)),
            line_bytes=int(_between("--line-bytes", given.line_bytes, SMALLEST_CHUNK_BYTES, 2 << 20)),
            record_start=_record_start(given.record_start),
            cut_lines=given.cut_lines,
            linger_s=_between("--linger-ms", given.linger_ms, 1, 60_000) / 1000,
            idle_s=_between("--idle-s", given.idle_s, 0, 86_400),
            rotated_s=_between("--rotated-s", given.rotated_s, 0, 86_400),
            heartbeat_s=_between("--heartbeat-s", given.heartbeat_s, 0, 86_400),
            timeout_s=_between("--timeout", given.timeout, 0, 86_400),
            threads=int(_between("--threads", given.threads, 1, 64)),
            verbose=given.verbose,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry push",
        description="Sends the lines of files to a gateway, each once, whatever is killed.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("glob", nargs="+", metavar="GLOB", help="files to send")
    add("--url", action="append", required=True, help="a gateway; again for others of the same data centre,"
        " tried while the first does not answer")  # fmt: skip
    add("--topic", required=True)
    add("--state-dir", required=True, metavar="DIR", help="where the client keeps its checkpoint")
    add("--exclude", action="append", default=[], metavar="GLOB", help="files to leave out: by name, or with a"
        " slash by path")  # fmt: skip
    add("--once", action="store_true", help="send what is there and end")
    add("--timeout", type=float, default=60.0, metavar="S", help="with --once: give up so long after the last"
        " acknowledgement (60)")  # fmt: skip
    add("--token-file", metavar="FILE", help=f"the token for the gateway (what {TOKEN_VARIABLE} in the environment"
        " holds, if anything)")  # fmt: skip
    add("--ca-file", metavar="FILE", help="who signed the gateway's certificate (the system's authorities)")
    add("--pin", action="append", default=[], metavar="SHA256", help="a certificate that the gateway may show, by its"
        " fingerprint; again for others")  # fmt: skip
    add("--host", help="this host's name in sourceIds (the system's name)")
    add("--attr", action="append", default=[], metavar="NAME=VALUE", help="an attribute of every chunk")
    add("--chunk-bytes", type=int, default=256 << 10, metavar="N", help="a chunk of whole lines (262144)")
    add("--line-bytes", type=int, default=1 << 20, metavar="N", help="longer lines are split (1048576)")
    add("--cut-lines", action="store_true", help="longer lines are cut instead: the rest of them is left out")
    add("--record-start", metavar="REGEX", help="a line that fits begins a record; the lines after it that do not are"
        " part of it and stay in its chunk")  # fmt: skip
    add("--linger-ms", type=int, default=200, metavar="MS", help="how long a line may wait to be sent (200)")
    add("--idle-s", type=float, default=30.0, metavar="S", help="a last line without newline waits so long (30)")
    add("--rotated-s", type=float, default=300.0, metavar="S", help="a renamed or removed file is dropped after so"
        " long without growth (300)")  # fmt: skip
    add("--heartbeat-s", type=float, default=300.0, metavar="S", help="how often a file without news says how far it"
        " is, and when one is gone, that it is finished; 0: never (300)")  # fmt: skip
    add("--threads", type=int, default=4, metavar="N", help="requests at the same time (4)")
    add("--no-gzip", action="store_true", help="send chunks as they are")
    add("-v", "--verbose", action="store_true")
    return parser


def _url(url: str) -> str:
    if origin_of(url) is None or "@" in url or "?" in url or "#" in url:
        raise ValueError(f"--url {url!r} is not http(s)://host[:port][/path]")
    return url


def _host(given: str | None) -> str:
    host = given or os.uname().nodename
    if not 1 <= len(host.encode("utf-8", "surrogateescape")) <= 255:
        raise ValueError(f"--host {host!r} is not 1 to 255 bytes long")
    return host


def _record_start(given: str | None) -> re.Pattern[bytes] | None:
    try:
        return None if given is None else starts_record(given)
    except ValueError as error:
        raise ValueError(f"--record-start: {error}") from None


def _attributes(given: list[str]) -> dict[str, str]:
    attributes = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--attr {item!r} is not name=value")
        if name in OWN_ATTRIBUTES:
            raise ValueError(f"--attr {name}: the client sets this one itself")
        attributes[name] = value
    try:
        "".join(attributes.values()).encode()
        return check_attributes(attributes)
    except (Malformed, UnicodeEncodeError) as error:
        raise ValueError(f"--attr: {error}") from None


def _token(token_file: str | None) -> str | None:
    if token_file is not None:
        return read_token(token_file)
    given = os.environ.get(TOKEN_VARIABLE)
    return check_token(given, TOKEN_VARIABLE) if given else None


def _ca_file(path: str | None) -> str | None:
    if path is not None:
        try:
            Dialer(path)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"--ca-file {path}: {error.strerror or error}") from None
    return path


def _pin(text: str) -> str:
    try:
        return check_pin(text)
    except ValueError as error:
        raise ValueError(f"--pin: {error}") from None


def read_token(path: str) -> str:
    """The token that the file of ``--token-file`` holds. Raises ValueError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {path}: {error}") from None
    return check_token(text, f"--token-file {path}")


def check_token(text: str, where: str) -> str:
    """The token alone, fit for a header. Raises ValueError, which names ``where`` and not the token."""
    token = text.strip()
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise ValueError(f"{where}: does not hold one line with a token")
    return token


def _between(option: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise ValueError(f"{option} {value:g} is not between {least:g} and {most:g}")
    return value
