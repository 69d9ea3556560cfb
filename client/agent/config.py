"""Settings → `Config`: checks the values. The only module that reads the environment."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from logferry.client.agent.options import Settings, read, topic_tables
from logferry.client.agent.options import between as _between
from logferry.client.agent.options import checked as _checked
from logferry.client.agent.options import required as _required
from logferry.client.files.chunking import SMALLEST_CHUNK_BYTES, starts_record
from logferry.client.files.containers import LEAST_LINE_BYTES, ContainerRules, container_attributes, container_rules
from logferry.client.files.identity import attribute, printable
from logferry.client.files.lines import LineRules, compiled, one_byte_encoding
from logferry.client.inputs.inputs import spool_path
from logferry.client.inputs.settings import InputSettings, input_settings
from logferry.client.transport.cluster import read_token
from logferry.client.transport.compression import check_compression
from logferry.client.transport.connections import TlsFiles, check_pin, proxies_of
from logferry.client.transport.kubelet import KubeletSettings
from logferry.gateway.contract.names import Malformed, check_attributes, check_token, check_topic, check_url, origin_of

TOKEN_VARIABLE = "LOGFERRY_TOKEN"
OWN_ATTRIBUTES = ("host", "path", "split", "cut", "filtered", "malformed", "unfinished", "resumed_at")


class FileGroup(NamedTuple):
    """Files, and where and how their lines are sent. ``patterns`` are absolute. ``link_roots``: see `leads_out`."""

    patterns: tuple[str, ...]
    topic: str
    exclude: tuple[str, ...] = ()
    attributes: Mapping[str, str] = MappingProxyType({})
    record_start: re.Pattern[bytes] | None = None
    cut_lines: bool = False
    link_roots: tuple[str, ...] = ()
    source: str = ""  # of an input: what its source ids begin with, in place of host and path
    rules: LineRules | ContainerRules | None = None
    starts_at_end: bool = False
    ignore_older_s: float = 0.0
    close_inactive_s: float = 0.0
    more: tuple[FileGroup, ...] = ()  # the same files, for the topics beside the first one

    @property
    def topics(self) -> dict[str, FileGroup]:
        return {each.topic: each for each in (self, *self.more)}

    def attributes_of(self, host: str, path: str) -> dict[str, str]:
        """Of the chunks of a file that was first seen under this path."""
        of_container = container_attributes(path) if isinstance(self.rules, ContainerRules) else {}
        return {"host": printable(host), "path": attribute(path), **of_container, **self.attributes}


class DataCentre(NamedTuple):
    """Gateways that write to one Kafka. ``name``: its name in the checkpoint. ``token_file``: that of the token."""

    name: str
    urls: tuple[str, ...]
    token: str | None = None
    token_file: str | None = None


class Config(NamedTuple):
    """``data_centres``: the preferred one first. ``files``: a file belongs to the first match.

    ``request_bytes``: of file content, at least ``line_bytes``. ``bytes_per_s``: over the network; 0: no limit, as for
    ``cpu_percent``. ``max_deleted_bytes``: on the disk, of removed files that are kept open.
    """

    data_centres: tuple[DataCentre, ...]
    state_dir: str
    host: str
    files: tuple[FileGroup, ...]
    check: bool = False
    status: bool = False
    json: bool = False
    once: bool = False
    tls: TlsFiles = TlsFiles()
    pins: tuple[str, ...] = ()
    proxies: Mapping[str, str] = MappingProxyType({})
    compression: str = "gzip"
    chunk_bytes: int = 256 << 10
    line_bytes: int = 1 << 20
    request_bytes: int = 2 << 20
    linger_s: float = 0.2
    idle_s: float = 30.0
    rotated_timeout_s: float = 300.0
    heartbeat_s: float = 300.0
    timeout_s: float = 60.0
    threads: int = 5
    bytes_per_s: int = 0
    cpu_percent: float = 0.0
    nice: int = 0
    max_deleted_bytes: int = 1 << 30
    verbose: bool = False
    failover_s: float = 60.0
    failback_s: float = 120.0
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    kubelet: KubeletSettings | None = None
    inputs: tuple[InputSettings, ...] = ()  # the first ``files`` are their spools

    @property
    def has_files(self) -> bool:
        """Beside the spools of inputs."""
        return len(self.files) > len(self.inputs)

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(pattern for files in self.files for pattern in files.patterns)

    def group_of(self, path: str, topic: str = "") -> FileGroup:
        """The most likely entry for a file that no pattern shows any more; first those of its topic."""
        same = [files for files in self.files if topic in files.topics] or list(self.files)
        for files in same:
            if any(fnmatch.fnmatchcase(path, pattern.replace("**/", "*")) for pattern in files.patterns):
                return files.topics.get(topic, files)
        return same[0].topics.get(topic, same[0])


def parse(argv: Sequence[str] | None = None, refuse: Callable[[str], NoReturn] | None = None) -> Config:
    """Raises SystemExit(2) after a message that names the option or the key of the file; SystemExit(0) after --help.

    ``refuse``: takes the message, and raises something else.
    """
    given = read(argv, refuse)
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
    host, inputs = _host(given), _inputs(given, line_bytes)
    failover_s = min(60.0, flags.timeout / 2) if flags.once else 60.0
    return Config(
        data_centres=_data_centres(given),
        failover_s=_between(given, "failover_s", max(failover_s, 1), 1, 86_400),
        failback_s=_between(given, "failback_s", 120, 1, 86_400),
        state_dir=os.path.abspath(_required(given, "state_dir")),  # noqa: PTH100  (keeps symbolic links)
        host=host,
        inputs=inputs,
        kubelet=_kubelet(given),
        files=(*_spools(given, inputs), *_files(given, bool(inputs))),
        check=flags.check,
        once=flags.once,
        tls=_tls_files(given),
        pins=tuple(_checked(given.label("pin"), check_pin, pin) for pin in given.get("pin", ())),
        proxies=proxies_of(os.environ),
        compression=_checked(given.label("compression"), check_compression, _compression(given)),
        chunk_bytes=int(_between(given, "chunk_bytes", min(256 << 10, line_bytes), SMALLEST_CHUNK_BYTES, line_bytes)),
        line_bytes=line_bytes,
        linger_s=_between(given, "linger_ms", 200, 1, 60_000) / 1000,
        idle_s=_between(given, "idle_s", 30, 0, 86_400),
        rotated_timeout_s=_between(given, "rotated_timeout_s", 300, 0, 86_400),
        heartbeat_s=_between(given, "heartbeat_s", 300, 0, 86_400),
        timeout_s=_between(given, "timeout", 60, 0, 86_400),
        threads=int(_between(given, "threads", 5, 1, 64)),
        bytes_per_s=int(_between(given, "bytes_per_s", 0, 0, 1 << 40)),
        cpu_percent=_between(given, "cpu_percent", 0, 0, 6400),
        nice=int(_between(given, "nice", 0, 0, 19)),
        max_deleted_bytes=int(_between(given, "max_deleted_bytes", 1 << 30, 0, 1 << 50)),
        metrics_port=int(_between(given, "metrics_port", 0, 0, 65_535)),
        metrics_host=given.get("metrics_host") or "127.0.0.1",
        verbose=flags.verbose,
    )


def _compression(given: Settings) -> str:
    """``gzip`` is the older key."""
    name: str = given.get("compression", "gzip" if given.get("gzip", True) else "none")
    return name


def _data_centres(given: Settings) -> tuple[DataCentre, ...]:
    """The preferred one first. Each is known by its name, else by the host and port of its first URL."""
    options = [name for name in ("url", "fallback_url") if given.get(name)]
    if given.centres and options:
        raise ValueError(
            f"{given.label(options[0])}: {given.flags.config} has [[datacenters]] already: remove one of them"
        )
    if given.centres:
        where = f"{given.flags.config}: datacenters"
        found = [_data_centre(given, f"{where}[{n}].urls", table) for n, table in enumerate(given.centres)]
    else:
        _required(given, "url")
        found = [_data_centre(given, given.label(name), {"urls": given.get(name)}) for name in options]
    origins = [origin_of(url) for centre in found for url in dict.fromkeys(centre.urls)]
    names = [centre.name for centre in found]
    for text, every in (("name", names), ("gateway", origins)):
        if len(found) > 1 and len(set(every)) < len(every):
            raise ValueError(f"{given.label('fallback_url')}, [[datacenters]]: two data centres have the same {text}")
    return tuple(found)


def _data_centre(given: Settings, label: str, table: dict[str, Any]) -> DataCentre:
    """``label``: of its URLs."""
    urls = tuple(table.get("urls", ()))
    if not urls:
        raise ValueError(f"{label} is required")
    for url in urls:
        check_url(url, label)
    token_file = table.get("token_file", given.get("token_file"))
    _, host, port = origin_of(urls[0]) or ("", urls[0], 0)
    return DataCentre(table.get("name") or f"{host}:{port}", urls, _token(token_file), token_file)


def _host(given: Settings) -> str:
    host: str = given.get("host") or os.uname().nodename
    if not 1 <= len(host.encode("utf-8", "surrogateescape")) <= 255:
        raise ValueError(f"{given.label('host')} {host!r} is not 1 to 255 bytes long")
    return host


# ---- files ---------------------------------------------------------------------------------------------------


def _inputs(given: Settings, line_bytes: int) -> tuple[InputSettings, ...]:
    flags = given.flags
    kinds = {"stdin": flags.stdin, "syslog": flags.syslog, "journald": flags.journald}
    options = [kind for kind, is_given in kinds.items() if is_given]
    if options and given.inputs:
        raise ValueError(f"--{options[0]}: {flags.config} has [[inputs]] already: remove one of them")
    tables = given.inputs or [{"type": kind} for kind in options]
    if flags.syslog and not given.inputs:
        tables[options.index("syslog")]["listen"] = flags.syslog
    if flags.source is not None:
        if len(tables) != 1:
            raise ValueError("--source: names the source of one input: use [[inputs]] for several")
        tables[0]["source"] = flags.source
    found = []
    for number, table in enumerate(tables):
        where = f"{flags.config}: inputs[{number}]." if given.inputs else "--"
        try:
            found.append(input_settings(table, _host(given), line_bytes))
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
    names = [each.name for each in found]
    if len(set(names)) < len(names) or sum(each.kind == "stdin" for each in found) > 1:
        raise ValueError("[[inputs]]: two have the same name, or are standard input")
    if flags.once and any(each.kind != "stdin" for each in found):
        raise ValueError("--once: syslog and journald have no end")
    return tuple(found)


def _spools(given: Settings, inputs: Sequence[InputSettings]) -> Iterator[FileGroup]:
    """The files of the spools, before all others."""
    state_dir = os.path.abspath(_required(given, "state_dir"))  # noqa: PTH100
    for number, each in enumerate(inputs):
        table: dict[str, Any] = given.inputs[number] if given.inputs else {}
        names = ("topic", "topics", "attributes", "record_start", "cut_lines")
        own = {name: table[name] for name in names if name in table}
        path = glob.escape(spool_path(state_dir, each.name))
        group = _group(given, f"inputs[{number}].", {**own, "paths": [path], "format": "lines"})
        yield _of_spool(group, each)._replace(more=tuple(_of_spool(further, each) for further in group.more))


def _of_spool(group: FileGroup, settings: InputSettings) -> FileGroup:
    attributes = {**group.attributes, "path": attribute(settings.name)}
    group = group._replace(source=settings.source, exclude=(), attributes=attributes)
    group = group._replace(starts_at_end=False, ignore_older_s=0.0, close_inactive_s=0.0)  # for files of others
    rules = group.rules._replace(encoding=None) if isinstance(group.rules, LineRules) else None  # JSON is UTF-8
    return group if settings.kind == "stdin" else group._replace(record_start=None, cut_lines=False, rules=rules)


def _files(given: Settings, has_inputs: bool) -> tuple[FileGroup, ...]:
    if given.flags.glob and given.files:
        raise ValueError(f"GLOB: {given.flags.config} has [[files]] already: remove one of them")
    if not given.flags.glob and not given.files:
        if has_inputs:
            return ()
        raise ValueError("GLOB is required: name the files to send, here or as [[files]] of --config FILE")
    groups: list[dict[str, Any]] = given.files or [{"paths": given.flags.glob}]
    return tuple(_group(given, f"files[{number}].", group) for number, group in enumerate(groups))


def _group(given: Settings, where: str, group: dict[str, Any]) -> FileGroup:
    """That of the first topic, with those of the others."""
    first, *more = (
        _of_topic(given, where, group, f"topics[{number}].", own)
        for number, own in enumerate(topic_tables(group, f"{given.flags.config}: {where}topics"))
    )
    return first._replace(more=tuple(more))


def _of_topic(given: Settings, where: str, group: dict[str, Any], below: str, own: dict[str, Any]) -> FileGroup:
    """``own``: settings of this topic, from ``below`` in the table ``group``."""
    attributes = {**group.get("attributes", {}), **own.get("attributes", {})}
    group = {**group, **own, **({"attributes": attributes} if attributes else {})}

    def label(name: str) -> str:
        where_is = f"{where}{below}" if name in own else where
        is_of_file = name in group and (given.files or given.inputs)
        return f"{given.flags.config}: {where_is}{name}" if is_of_file else given.label(name)

    if not group.get("paths"):
        raise ValueError(f"{given.flags.config}: {where}paths is required")
    topic, start = (group.get(name, given.get(name)) for name in ("topic", "record_start"))
    if topic is None:
        raise ValueError(f"{given.label('topic')} is required")
    attributes = {**given.get("attributes", {}), **group.get("attributes", {})}
    include, exclude = (
        _checked(label(name), compiled, group.get(name, given.get(name, ())))
        for name in ("include_lines", "exclude_lines")
    )
    if start is not None and (include or exclude):
        raise ValueError(f"{label('record_start')}: records are kept whole: leave out include_lines and exclude_lines")
    encoding = _checked(label("encoding"), one_byte_encoding, group.get("encoding", given.get("encoding", "utf-8")))
    form = group.get("format", given.get("format", "lines"))
    lines = LineRules(include, exclude, encoding) if include or exclude or encoding else None
    start_at = group.get("start_at", given.get("start_at", "beginning"))
    if start_at not in ("beginning", "end"):
        raise ValueError(f"{label('start_at')} {start_at!r} is neither beginning nor end")
    seconds = {name: group.get(name, given.get(name, 0.0)) for name in ("ignore_older_s", "close_inactive_s")}
    for name in (name for name, value in seconds.items() if not 0 <= value <= 1e9):
        raise ValueError(f"{label(name)} {seconds[name]:g} is not between 0 and {1e9:g}")
    return FileGroup(
        patterns=tuple(os.path.abspath(pattern) for pattern in group["paths"]),  # noqa: PTH100
        topic=_checked(label("topic"), check_topic, topic),
        exclude=(*given.get("exclude", ()), *group.get("exclude", ())),
        attributes=_attributes("--attr" if label("attributes") == "--attributes" else label("attributes"), attributes),
        record_start=None if start is None else _checked(label("record_start"), starts_record, start),
        cut_lines=group.get("cut_lines", given.get("cut_lines", False)),
        link_roots=tuple(os.path.abspath(root) for root in given.get("link_root", ())),  # noqa: PTH100
        rules=_checked(label("format"), partial(_rules, given, group, lines), form),
        starts_at_end=start_at == "end",
        **seconds,
    )


def _rules(
    given: Settings, group: dict[str, Any], lines: LineRules | None, form: str
) -> LineRules | ContainerRules | None:
    def value(name: str, default: Any = None) -> Any:
        return group.get(name, given.get(name, default))

    if form == "lines":
        return lines
    if value("record_start") is not None or value("cut_lines"):
        raise ValueError("messages are kept whole: leave out record_start and cut_lines")
    if value("line_bytes", 1 << 20) < LEAST_LINE_BYTES:
        raise ValueError(f"needs a line_bytes of at least {LEAST_LINE_BYTES}: one line of the runtime may be so long")
    return container_rules(form, value("line_fields", "time stream"), lines)


def _attributes(label: str, attributes: dict[str, str]) -> dict[str, str]:
    for name in attributes:
        if name in OWN_ATTRIBUTES:
            raise ValueError(f"{label} {name}: the client sets this attribute itself: choose another name")
    try:
        "".join(attributes.values()).encode()
        return check_attributes(attributes)
    except (Malformed, UnicodeEncodeError) as error:
        raise ValueError(f"{label}: {error}") from None


# ---- tokens, certificates ---------------------------------------------------------------------------------------


def _token(path: str | None) -> str | None:
    if path is not None:
        return read_token(path)
    text = os.environ.get(TOKEN_VARIABLE)
    return check_token(text, TOKEN_VARIABLE) if text else None


def _tls_files(given: Settings) -> TlsFiles:
    files = TlsFiles(given.get("ca_file"), given.get("cert_file"), given.get("key_file"))
    if files.key_file is not None and files.cert_file is None:
        raise ValueError(f"{given.label('key_file')}: its certificate is missing, {given.label('cert_file')}")
    for name, wanted in (("ca_file", TlsFiles(files.ca_file)), ("cert_file", files)):
        try:
            wanted.context()
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"{given.label(name)} {given.get(name)}: {error.strerror or error}") from None
    return files


def _kubelet(given: Settings) -> KubeletSettings | None:
    """Its files need not be there yet: without labels everything runs."""
    url, *files = (given.get(name) for name in ("kubelet_url", "kubelet_token_file", "kubelet_ca_file"))
    if url is None:
        return None
    check_url(url, given.label("kubelet_url"))
    if files[0] is not None and not url.startswith("https:"):
        raise ValueError(f"{given.label('kubelet_url')} {url!r}: a token goes over https alone")
    return KubeletSettings(url, *files)
