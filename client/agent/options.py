"""The command line and the TOML file of ``--config``, under one set of names.

An option overrides the same setting of the file. Only names and types are checked here; `config` checks the values.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from logferry.client.files.checkpoint import MAX_LAYERS

EXAMPLE = """examples:
  logferry push --url http://127.0.0.1:8080 --topic nginx --state-dir /var/lib/logferry '/var/log/nginx/*.log'
  logferry push --config /etc/logferry/push.toml --check

Sends the lines of files to a gateway, each exactly once, whatever is killed or restarted. Also takes standard input,
syslog and the journal.
"""
NOTES = """Quote the patterns: the client looks for new files itself; ** matches any number of folders. If files rotate
faster than the client looks, include the names that rotation gives them. An option overrides its setting in FILE.

exit status: 0 done; 1 (--once) a file could not be sent completely; 2 wrong use; 3 (--once) no gateway can be reached
"""

_TEXTS = "a string, or a list of strings"
_TABLE = "a table of strings"
_NUMBER = "a number"
_TEXT, _WHOLE, _YES = "a string", "a whole number", "true or false"
_TOPICS = "a list of names, or of tables"
_T = TypeVar("_T")

_OF_FILES = {
    "topic": _TEXT, "exclude": _TEXTS, "attributes": _TABLE, "record_start": _TEXT, "cut_lines": _YES,
    "include_lines": _TEXTS, "exclude_lines": _TEXTS, "encoding": _TEXT, "start_at": _TEXT,
    "ignore_older_s": _NUMBER, "close_inactive_s": _NUMBER, "format": _TEXT, "line_fields": _TEXT,
}  # fmt: skip
_OF_ALL = {
    **_OF_FILES, "url": _TEXTS, "state_dir": _TEXT, "token_file": _TEXT, "ca_file": _TEXT, "pin": _TEXTS,
    "cert_file": _TEXT, "key_file": _TEXT, "compression": _TEXT,
    "host": _TEXT, "gzip": _YES, "chunk_bytes": _WHOLE, "line_bytes": _WHOLE, "linger_ms": _NUMBER,
    "idle_s": _NUMBER, "rotated_timeout_s": _NUMBER, "heartbeat_s": _NUMBER, "threads": _WHOLE,
    "bytes_per_s": _WHOLE, "cpu_percent": _NUMBER, "nice": _WHOLE, "max_deleted_bytes": _WHOLE,
    "kubelet_url": _TEXT, "kubelet_token_file": _TEXT, "kubelet_ca_file": _TEXT,
    "metrics_port": _WHOLE, "metrics_host": _TEXT, "link_root": _TEXTS, "fallback_url": _TEXTS,
    "failover_s": _NUMBER, "failback_s": _NUMBER,
}  # fmt: skip
_OF_GROUPS = {"paths": _TEXTS, "topics": _TOPICS, **_OF_FILES}
_OF_TOPICS = {name: kind for name, kind in _OF_FILES.items() if name not in ("exclude", "ignore_older_s")}
_OF_INPUT_TOPICS = {name: _OF_FILES[name] for name in ("topic", "attributes", "record_start", "cut_lines")}
_OF_INPUTS = {
    "type": _TEXT, "name": _TEXT, "source": _TEXT, "topic": _TEXT, "topics": _TOPICS, "attributes": _TABLE,
    "record_start": _TEXT, "cut_lines": _YES, "spool_bytes": _WHOLE, "listen": _TEXTS, "message_bytes": _WHOLE,
    "cert_file": _TEXT, "key_file": _TEXT, "client_ca_file": _TEXT, "units": _TEXTS, "start": _TEXT, "directory": _TEXT,
    "namespace": _TEXT,
}  # fmt: skip
_OF_CENTRES = {"name": _TEXT, "urls": _TEXTS, "token_file": _TEXT}


class Settings(NamedTuple):
    """``values`` by the names of the file; ``files``, ``centres``, ``inputs``: its ``[[files]]``, ``[[datacenters]]``
    and ``[[inputs]]``."""

    values: dict[str, Any]
    labels: dict[str, str]
    files: list[dict[str, Any]]
    centres: list[dict[str, Any]]
    inputs: list[dict[str, Any]]
    flags: argparse.Namespace
    refuse: Any

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def label(self, name: str) -> str:
        """Where the value was given, for messages."""
        return self.labels.get(name, "--" + name.replace("_", "-"))

    def error(self, text: object) -> NoReturn:
        """Ends the process with exit status 2."""
        self.refuse(str(text))
        raise SystemExit(2)


def read(argv: Sequence[str] | None = None, refuse: Callable[[str], NoReturn] | None = None) -> Settings:
    """Raises SystemExit(2) after a message that names the option or the key of the file; SystemExit(0) for --help.

    ``refuse``: takes the message, and raises something else.
    """
    parser = _parser()
    refuse = refuse or parser.error
    flags = parser.parse_args(argv)
    values: dict[str, Any] = {}
    tables: dict[str, list[dict[str, Any]]] = {"files": [], "datacenters": [], "inputs": []}
    if flags.config is not None:
        try:
            values, tables = _from_file(flags.config)
        except (OSError, ValueError) as error:
            refuse(f"--config {flags.config}: {getattr(error, 'strerror', None) or error}")
    labels = {name: f"{flags.config}: {name}" for name in values}
    known = {*_OF_ALL, "timeout"}
    given = {name: value for name, value in vars(flags).items() if name in known and value is not None}
    for name in given:
        labels.pop(name, None)
    found = tables["files"], tables["datacenters"], tables["inputs"]
    return Settings({**values, **given}, labels, *found, flags, refuse)


def _from_file(path: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    values = _toml().loads(Path(path).read_text(encoding="utf-8"))
    tables = {}
    for name, known in (("files", _OF_GROUPS), ("datacenters", _OF_CENTRES), ("inputs", _OF_INPUTS)):
        tables[name] = values.pop(name, [])
        if not isinstance(tables[name], list) or not all(isinstance(each, dict) for each in tables[name]):
            raise ValueError(f"{name}: must be tables, written as [[{name}]]")
        for number, each in enumerate(tables[name]):
            _check(each, known, f"{name}[{number}].")
            for at, topic in enumerate(each.get("topics", ())):
                if not isinstance(topic, str):
                    of_topic = _OF_TOPICS if name == "files" else _OF_INPUT_TOPICS
                    _check(topic, of_topic, f"{name}[{number}].topics[{at}].")
    _check(values, _OF_ALL, "")
    return values, tables


def _toml() -> Any:
    """The reader of TOML: Python's own from 3.11 on; before, ``tomli``, which the single file contains."""
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ValueError("this Python cannot read TOML: use Python 3.11 or logferry-push.pyz, or install tomli")


def _check(values: dict[str, Any], known: dict[str, str], where: str) -> None:
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{where}{name}: unknown setting")
        if not _fits(value, known[name]):
            raise ValueError(f"{where}{name}: must be {known[name]}")
        if known[name] == _TEXTS and isinstance(value, str):
            values[name] = [value]


def _fits(value: Any, kind: str) -> bool:
    if kind == _TEXTS:
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    if kind == _TOPICS:
        return isinstance(value, list) and all(isinstance(each, (str, dict)) for each in value)
    if kind == _TABLE:
        return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    if kind == _YES:
        return isinstance(value, bool)
    if kind == _TEXT:
        return isinstance(value, str)
    return isinstance(value, int if kind == _WHOLE else (int, float)) and not isinstance(value, bool)


def topic_tables(group: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The settings of each topic in an entry's ``topics``; without these there is one topic, with none of its own."""
    if "topics" not in group:
        return [{}]
    tables = [{"topic": each} if isinstance(each, str) else each for each in group["topics"]]
    names = {table.get("topic") for table in tables}
    if "topic" in group or None in names or not len(names) == len(tables) <= MAX_LAYERS or not tables:
        raise ValueError(f"{where}: must be 1 to {MAX_LAYERS} different topics, in place of topic")
    return tables


def required(given: Settings, name: str) -> Any:
    value = given.get(name)
    if not value:
        raise ValueError(f"{given.label(name)} is required")
    return value


def checked(label: str, check: Callable[[Any], _T], text: Any) -> _T:
    """What ``check`` makes of the text. Raises ValueError, which begins with ``label``."""
    try:
        return check(text)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def between(given: Settings, name: str, default: float, least: float, most: float) -> float:
    value: float = given.get(name, default)
    if not least <= value <= most:
        raise ValueError(f"{given.label(name)} {value:g} is not between {least:g} and {most:g}")
    return value


class _Attribute(argparse.Action):
    """``--attr NAME=VALUE``, any number of times, into a table."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        name, equals, value = values.partition("=")
        if not equals:
            parser.error(f"--attr {values!r} must be NAME=VALUE")
        namespace.attributes = {**(namespace.attributes or {}), name: value}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry push",
        usage="logferry push [--config FILE] [options] [GLOB ...]",
        description=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=NOTES,
    )
    add = parser.add_argument
    add("glob", nargs="*", metavar="GLOB", help="files to send")
    add("--config", metavar="FILE", help="a TOML file with settings, named as the options with _ for -; further tables"
        " are [[files]] (paths, topic or topics, exclude, attributes, start_at, encoding, and those about lines),"
        " [[inputs]] and, in place of url, [[datacenters]] (name, urls, token_file)")  # fmt: skip
    add("--url", action="append", help="URL of a gateway; repeat it for other gateways of the same data centre, which"
        " are tried while the first does not answer")  # fmt: skip
    add("--topic", help="topic that the lines are written to, without its data centre")
    add("--state-dir", metavar="DIR", help="folder of the checkpoint; one client at a time can use it")
    add("--once", action="store_true", help="send what is in the files now, then exit")
    add("--timeout", type=float, default=60.0, metavar="S", help="with --once: give up this many seconds after the last"
        " acknowledgement (default: 60)")  # fmt: skip
    add("--check", action="store_true", help="print what would be sent and why, and send nothing")
    add("--status", action="store_true", help="print how far the client that runs on --state-dir is with each file")
    add("--json", action="store_true", help="with --status: print one JSON object")
    add("--stdin", action="store_true", help="send standard input, and end when it ended and was sent")
    add("--syslog", action="append", metavar="URL", help="take syslog at tcp://HOST:PORT, tls:// (certificate in FILE),"
        " udp:// or unix:///PATH; repeat it for others")  # fmt: skip
    add("--journald", action="store_true", help="send the journal of systemd")
    add("--source", metavar="NAME", help="with one of these three: what its source id begins with (default:"
        " HOST:stdin, HOST:syslog or HOST:journald)")  # fmt: skip
    add("--exclude", action="append", metavar="GLOB", help="files to leave out, by name or (with a slash) by path")
    add("--link-root", action="append", metavar="DIR", help="folder that symbolic links among the files may lead into;"
        " repeat it for others (default: the folder that the first wildcard matched)")  # fmt: skip
    add("--attr", action=_Attribute, dest="attributes", metavar="NAME=VALUE", help="attribute of every chunk")
    add("--host", help="name of this host in source ids (default: the system's name)")
    add("--token-file", metavar="FILE", help="file with the token for the gateway (default: LOGFERRY_TOKEN in the"
        " environment, if set)")  # fmt: skip
    add("--cert-file", metavar="FILE", help="PEM file with the certificate that the client shows to the gateway")
    add("--key-file", metavar="FILE", help="PEM file with the key of that certificate (default: the same file)")
    add("--ca-file", metavar="FILE", help="PEM file with the authority of the gateway's certificate (default: the"
        " system's authorities)")  # fmt: skip
    add("--pin", action="append", metavar="SHA256", help="SHA-256 fingerprint of a certificate that the gateway may"
        " show; repeat it for others")  # fmt: skip
    add("--fallback-url", action="append", metavar="URL", help="URL of a gateway of another data centre, to fail over"
        " to; repeat it for others of that data centre")  # fmt: skip
    add("--failover-s", type=float, metavar="S", help="fail over after a data centre has been unavailable for this many"
        " seconds (default: 60)")  # fmt: skip
    add("--failback-s", type=float, metavar="S", help="fail back after the first data centre has answered for this many"
        " seconds (default: 120)")  # fmt: skip
    add("--chunk-bytes", type=int, metavar="N", help="largest chunk of whole lines (default: 262144)")
    add("--line-bytes", type=int, metavar="N", help="longest line; longer ones are split (default: 1048576)")
    add("--cut-lines", action="store_true", default=None, help="cut lines that are too long instead of splitting them:"
        " the rest is left out")  # fmt: skip
    add("--record-start", metavar="REGEX", help="pattern of a record's first line; the lines after it that do not match"
        " stay in its chunk")  # fmt: skip
    add("--include-lines", action="append", metavar="REGEX", help="send only lines in which this pattern is found;"
        " repeat it for others")  # fmt: skip
    add("--exclude-lines", action="append", metavar="REGEX", help="leave out lines in which this pattern is found;"
        " repeat it for others")  # fmt: skip
    add("--encoding", metavar="NAME", help="encoding of the files, if it is not UTF-8 and has one byte for each"
        " character: lines are sent as UTF-8 (default: utf-8)")  # fmt: skip
    add("--format", choices=("lines", "cri", "docker"), help="form of the files: lines, or what a container runtime"
        " writes, whose messages are sent (default: lines)")  # fmt: skip
    add("--line-fields", metavar="NAMES", help="with cri and docker: what is sent before each message, of time and"
        " stream; '': nothing (default: 'time stream')")  # fmt: skip
    add("--start-at", choices=("beginning", "end"), help="where to begin with files that were there before the client"
        " (default: beginning)")  # fmt: skip
    add("--ignore-older-s", type=float, metavar="S", help="leave out files that were last written longer ago, until"
        " they are written again; 0: none (default: 0)")  # fmt: skip
    add("--close-inactive-s", type=float, metavar="S", help="close a file that was sent and has not changed for so many"
        " seconds, until it changes; 0: it stays open (default: 0)")  # fmt: skip
    add("--linger-ms", type=int, metavar="MS", help="longest wait of a line before it is sent (default: 200)")
    add("--idle-s", type=float, metavar="S", help="wait of a last line without a newline (default: 30)")
    add("--rotated-timeout-s", type=float, metavar="S", help="stop following a renamed or removed file after this many"
        " seconds without growth (default: 300)")  # fmt: skip
    add("--heartbeat-s", type=float, metavar="S", help="interval at which a file without new lines reports its"
        " position; 0: never, and no report that a file is finished (default: 300)")  # fmt: skip
    add("--threads", type=int, metavar="N", help="concurrent requests (default: 5)")
    add("--bytes-per-s", type=int, metavar="N", help="limit of the bytes sent over the network; 0: none (default: 0)")
    add("--cpu-percent", type=float, metavar="P", help="limit of the average use of one processor, in percent; 0: none"
        " (default: 0)")  # fmt: skip
    add("--nice", type=int, metavar="N", help="lower priority of the process, 0 to 19 (default: 0)")
    add("--max-deleted-bytes", type=int, metavar="N", help="limit of the disk space of deleted files that are kept open"
        " until they are sent; beyond it the oldest are given up (default: 1073741824)")  # fmt: skip
    add("--metrics-port", type=int, metavar="PORT", help="serve metrics for Prometheus at"
        " http://127.0.0.1:PORT/metrics; 0: do not (default: 0)")  # fmt: skip
    add("--metrics-host", metavar="HOST", help="address that serves the metrics; 0.0.0.0 or :: are all of"
        " the machine (default: 127.0.0.1)")  # fmt: skip
    add("--kubelet-url", metavar="URL", help="URL of the node's kubelet: with cri and docker the labels of a pod become"
        " attributes (default: not asked)")  # fmt: skip
    add("--kubelet-token-file", metavar="FILE", help="file with the token for the kubelet (default: none)")
    add("--kubelet-ca-file", metavar="FILE", help="PEM file with the authority of the kubelet's certificate (default:"
        " the system's authorities)")  # fmt: skip
    add("--compression", metavar="KIND", help="gzip (the default), zstd where Python has it, or none")
    add("--no-gzip", action="store_false", default=None, dest="gzip", help="the same as --compression none")
    add("-v", "--verbose", action="store_true", help="log every request, too")
    return parser
