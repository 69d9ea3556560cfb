"""Settings → `Config`: what each means, and whether it makes sense. The one place that reads environment and token."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from logferry.client.agent.options import Settings, read
from logferry.client.files.chunking import SMALLEST_CHUNK_BYTES, starts_record
from logferry.client.transport.connections import origin_of
from logferry.client.transport.dialer import Dialer, check_pin, proxies_of
from logferry.gateway.contract.chunk import Malformed, check_attributes, check_topic

TOKEN_VARIABLE = "LOGFERRY_TOKEN"
OWN_ATTRIBUTES = ("host", "path", "split", "cut", "resumed_at")


class Files(NamedTuple):
    """Which files, and where and how their lines go. ``patterns`` are absolute."""

    patterns: tuple[str, ...]
    topic: str
    exclude: tuple[str, ...] = ()
    attributes: Mapping[str, str] = MappingProxyType({})
    record_start: re.Pattern[bytes] | None = None
    cut_lines: bool = False


class DataCentre(NamedTuple):
    """Gateways that write to one Kafka. ``name``: what the client remembers it by."""

    name: str
    urls: tuple[str, ...]
    token: str | None = None


class Config(NamedTuple):
    """``urls``: of the first data centre, ``fallbacks``: the others. ``files``: a file belongs to the first that fits.
    ``request_bytes``: of file content, at least ``line_bytes``.

    ``bytes_per_s`` counts what goes over the network; 0, like that of ``cpu_percent``, is no limit. ``deleted_bytes``:
    on the disk, of files that have no name any more and are kept open.
    """

    urls: tuple[str, ...]
    state_dir: str
    host: str
    files: tuple[Files, ...]
    check: bool = False
    status: bool = False
    json: bool = False
    once: bool = False
    token: str | None = None
    ca_file: str | None = None
    pins: tuple[str, ...] = ()
    proxies: Mapping[str, str] = MappingProxyType({})
    gzip: bool = True
    chunk_bytes: int = 256 << 10
    line_bytes: int = 1 << 20
    request_bytes: int = 2 << 20
    linger_s: float = 0.2
    idle_s: float = 30.0
    rotated_s: float = 300.0
    heartbeat_s: float = 300.0
    timeout_s: float = 60.0
    threads: int = 5
    bytes_per_s: int = 0
    cpu_percent: float = 0.0
    nice: int = 0
    deleted_bytes: int = 1 << 30
    verbose: bool = False
    name: str = ""
    fallbacks: tuple[DataCentre, ...] = ()
    failover_s: float = 60.0
    failback_s: float = 120.0
    metrics_port: int = 0

    @property
    def data_centres(self) -> tuple[DataCentre, ...]:
        """The preferred one first."""
        return (DataCentre(self.name or _name_of(self.urls), self.urls, self.token), *self.fallbacks)

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(pattern for files in self.files for pattern in files.patterns)

    def dialer(self) -> Dialer:
        return Dialer(self.ca_file, self.pins, self.proxies)


def parse(argv: Sequence[str] | None = None) -> Config:
    """Raises SystemExit(2) after a message that names the option or the file's key; SystemExit(0) after --help."""
    given = read(argv)
    try:
        return _config(given)
    except (ValueError, OSError) as error:
        given.error(error)


def _config(given: Settings) -> Config:
    if given.flags.status:
        state_dir = os.path.abspath(_required(given, "state_dir"))  # noqa: PTH100
        return Config((), state_dir, "", (), status=True, json=given.flags.json)
    line_bytes = int(_between(given, "line_bytes", 1 << 20, SMALLEST_CHUNK_BYTES, 2 << 20))
    flags = given.flags
    first, *others = _data_centres(given)
    failover_s = min(60.0, flags.timeout / 2) if flags.once else 60.0
    return Config(
        urls=first.urls,
        name=first.name,
        fallbacks=tuple(others),
        failover_s=_between(given, "failover_s", max(failover_s, 1), 1, 86_400),
        failback_s=_between(given, "failback_s", 120, 1, 86_400),
        state_dir=os.path.abspath(_required(given, "state_dir")),  # noqa: PTH100  (keeps symbolic links)
        host=_host(given),
        files=_files(given),
        check=flags.check,
        once=flags.once,
        token=first.token,
        ca_file=_ca_file(given),
        pins=tuple(_pin(given, pin) for pin in given.get("pin", ())),
        proxies=proxies_of(os.environ),
        gzip=given.get("gzip", True),
        chunk_bytes=int(_between(given, "chunk_bytes", min(256 << 10, line_bytes), SMALLEST_CHUNK_BYTES, line_bytes)),
        line_bytes=line_bytes,
        linger_s=_between(given, "linger_ms", 200, 1, 60_000) / 1000,
        idle_s=_between(given, "idle_s", 30, 0, 86_400),
        rotated_s=_between(given, "rotated_s", 300, 0, 86_400),
        heartbeat_s=_between(given, "heartbeat_s", 300, 0, 86_400),
        timeout_s=_in_bounds("--timeout", flags.timeout, 0, 86_400),
        threads=int(_between(given, "threads", 5, 1, 64)),
        bytes_per_s=int(_between(given, "bytes_per_s", 0, 0, 1 << 40)),
        cpu_percent=_between(given, "cpu_percent", 0, 0, 6400),
        nice=int(_between(given, "nice", 0, 0, 19)),
        deleted_bytes=int(_between(given, "deleted_bytes", 1 << 30, 0, 1 << 50)),
        metrics_port=int(_between(given, "metrics_port", 0, 0, 65_535)),
        verbose=flags.verbose,
    )


def _required(given: Settings, name: str) -> Any:
    value = given.get(name)
    if not value:
        raise ValueError(f"{given.label(name)} is required")
    return value


def _data_centres(given: Settings) -> list[DataCentre]:
    """The preferred one first. Each is known by its name, else by the host and port of its first URL."""
    token = _token(given)
    if not given.centres:
        first = _urls(given.label("url"), _required(given, "url"))
        others = _urls(given.label("fallback_url"), given.get("fallback_url", ()))
        found = [DataCentre(_name_of(urls), urls, token) for urls in (first, others) if urls]
    else:
        for name in ("url", "fallback_url"):
            if given.get(name):
                raise ValueError(f"{given.label(name)}: {given.flags.config} has [[datacenters]] already")
        found = [_data_centre(given, number, each, token) for number, each in enumerate(given.centres)]
    origins = [origin_of(url) for centre in found for url in dict.fromkeys(centre.urls)]
    names = [centre.name for centre in found]
    for text, every in (("name", names), ("gateway", origins)):
        if len(found) > 1 and len(set(every)) < len(every):
            raise ValueError(f"{given.label('fallback_url')}, [[datacenters]]: two data centres have the same {text}")
    return found


def _data_centre(given: Settings, number: int, table: dict[str, Any], token: str | None) -> DataCentre:
    where = f"{given.flags.config}: datacenters[{number}]."
    if not table.get("urls"):
        raise ValueError(f"{where}urls is required")
    urls = _urls(where + "urls", table["urls"])
    token = read_token(table["token_file"]) if "token_file" in table else token
    return DataCentre(table.get("name") or _name_of(urls), urls, token)


def _name_of(urls: Sequence[str]) -> str:
    _, host, port = origin_of(urls[0]) or ("", urls[0], 0)
    return f"{host}:{port}"


def _urls(label: str, urls: Sequence[str]) -> tuple[str, ...]:
    for url in urls:
        if origin_of(url) is None or "@" in url or "?" in url or "#" in url:
            raise ValueError(f"{label} {url!r} is not http(s)://host[:port][/path]")
    return tuple(urls)


def _host(given: Settings) -> str:
    host: str = given.get("host") or os.uname().nodename
    if not 1 <= len(host.encode("utf-8", "surrogateescape")) <= 255:
        raise ValueError(f"{given.label('host')} {host!r} is not 1 to 255 bytes long")
    return host


# ---- files ---------------------------------------------------------------------------------------------------


def _files(given: Settings) -> tuple[Files, ...]:
    if given.globs and given.files:
        raise ValueError(f"GLOB: {given.flags.config} has [[files]] already")
    if not given.globs and not given.files:
        raise ValueError("GLOB is required: which files to send, here or as [[files]] of --config FILE")
    groups: list[dict[str, Any]] = given.files or [{"paths": given.globs}]
    return tuple(_group(given, f"files[{number}].", group) for number, group in enumerate(groups))


def _group(given: Settings, where: str, group: dict[str, Any]) -> Files:
    def label(name: str) -> str:
        return f"{given.flags.config}: {where}{name}" if name in group and given.files else given.label(name)

    if not group.get("paths"):
        raise ValueError(f"{given.flags.config}: {where}paths is required")
    topic, start = (group.get(name, given.get(name)) for name in ("topic", "record_start"))
    if topic is None:
        raise ValueError(f"{given.label('topic')} is required")
    attributes = {**given.get("attributes", {}), **group.get("attributes", {})}
    try:
        return Files(
            patterns=tuple(os.path.abspath(pattern) for pattern in group["paths"]),  # noqa: PTH100
            topic=check_topic(topic),
            exclude=(*given.get("exclude", ()), *group.get("exclude", ())),
            attributes=_attributes(
                "--attr" if label("attributes") == "--attributes" else label("attributes"), attributes
            ),
            record_start=None if start is None else _record_start(label("record_start"), start),
            cut_lines=group.get("cut_lines", given.get("cut_lines", False)),
        )
    except Malformed as error:
        raise ValueError(f"{label('topic')}: {error}") from None


def _record_start(label: str, pattern: str) -> re.Pattern[bytes]:
    try:
        return starts_record(pattern)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def _attributes(label: str, attributes: dict[str, str]) -> dict[str, str]:
    for name in attributes:
        if name in OWN_ATTRIBUTES:
            raise ValueError(f"{label} {name}: the client sets this one itself")
    try:
        "".join(attributes.values()).encode()
        return check_attributes(attributes)
    except (Malformed, UnicodeEncodeError) as error:
        raise ValueError(f"{label}: {error}") from None


# ---- who may know what ---------------------------------------------------------------------------------------


def _token(given: Settings) -> str | None:
    path = given.get("token_file")
    if path is not None:
        return read_token(path)
    text = os.environ.get(TOKEN_VARIABLE)
    return check_token(text, TOKEN_VARIABLE) if text else None


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


def _ca_file(given: Settings) -> str | None:
    path: str | None = given.get("ca_file")
    if path is not None:
        try:
            Dialer(path)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"{given.label('ca_file')} {path}: {error.strerror or error}") from None
    return path


def _pin(given: Settings, text: str) -> str:
    try:
        return check_pin(text)
    except ValueError as error:
        raise ValueError(f"{given.label('pin')}: {error}") from None


# ---- numbers -------------------------------------------------------------------------------------------------


def _between(given: Settings, name: str, default: float, least: float, most: float) -> float:
    return _in_bounds(given.label(name), given.get(name, default), least, most)


def _in_bounds(label: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise ValueError(f"{label} {value:g} is not between {least:g} and {most:g}")
    return value
