"""What was asked for: the command line, and the TOML file of ``--config``, under one set of names.

What is given on the command line goes before what the file says. Nothing is judged here but shape: names and
types. What a value means, and whether it makes sense, is `config`'s.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

EXAMPLE = """example:
  logferry push --url http://127.0.0.1:8080 --topic nginx --state-dir /var/lib/logferry '/var/log/nginx/*.log'
  logferry push --config /etc/logferry/push.toml --check

Quote the patterns: the client looks for new files itself; ** stands for any number of folders. Include the names
that files get by rotation if they rotate faster than they can be noticed. exit status: 0 done; 1 (--once) some
file could not be sent completely; 2 wrong use; 3 (--once) the gateway cannot be reached.
"""

_TEXTS = "a string, or a list of strings"
_TABLE = "a table of strings"
_NUMBER = "a number"
_TEXT, _WHOLE, _YES = "a string", "a whole number", "true or false"

_OF_FILES = {"topic": _TEXT, "exclude": _TEXTS, "attributes": _TABLE, "record_start": _TEXT, "cut_lines": _YES}
_OF_ALL = {
    **_OF_FILES, "url": _TEXTS, "state_dir": _TEXT, "token_file": _TEXT, "ca_file": _TEXT, "pin": _TEXTS,
    "host": _TEXT, "gzip": _YES, "chunk_bytes": _WHOLE, "line_bytes": _WHOLE, "linger_ms": _NUMBER,
    "idle_s": _NUMBER, "rotated_s": _NUMBER, "heartbeat_s": _NUMBER, "threads": _WHOLE,
    "bytes_per_s": _WHOLE, "cpu_percent": _NUMBER, "nice": _WHOLE, "deleted_bytes": _WHOLE,
    "metrics_port": _WHOLE, "fallback_url": _TEXTS, "failover_s": _NUMBER, "failback_s": _NUMBER,
}  # fmt: skip
_OF_CENTRES = {"name": _TEXT, "urls": _TEXTS, "token_file": _TEXT}


class Settings(NamedTuple):
    """``values`` by the names of the file; ``files`` and ``centres``: its ``[[files]]`` and ``[[datacenters]]``;
    ``globs``: the command line's patterns."""

    values: dict[str, Any]
    labels: dict[str, str]
    files: list[dict[str, Any]]
    centres: list[dict[str, Any]]
    globs: list[str]
    flags: argparse.Namespace
    refuse: Any

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def label(self, name: str) -> str:
        """Where the value stands, for messages."""
        return self.labels.get(name, "--" + name.replace("_", "-"))

    def error(self, text: object) -> NoReturn:
        """Ends the process with exit status 2."""
        self.refuse(str(text))
        raise SystemExit(2)


def read(argv: Sequence[str] | None = None) -> Settings:
    """Raises SystemExit(2) after a message that names the option or the file and its key; SystemExit(0) for --help."""
    parser = _parser()
    flags = parser.parse_args(argv)
    values: dict[str, Any] = {}
    tables: dict[str, list[dict[str, Any]]] = {"files": [], "datacenters": []}
    if flags.config is not None:
        try:
            values, tables = _from_file(flags.config)
        except (OSError, ValueError) as error:
            parser.error(f"--config {flags.config}: {getattr(error, 'strerror', None) or error}")
    labels = {name: f"{flags.config}: {name}" for name in values}
    given = {name: value for name, value in vars(flags).items() if name in _OF_ALL and value is not None}
    for name in given:
        labels.pop(name, None)
    return Settings(
        {**values, **given}, labels, tables["files"], tables["datacenters"], flags.glob, flags, parser.error
    )


def _from_file(path: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    values = _toml().loads(Path(path).read_text(encoding="utf-8"))
    tables = {}
    for name, known in (("files", {"paths": _TEXTS, **_OF_FILES}), ("datacenters", _OF_CENTRES)):
        tables[name] = values.pop(name, [])
        if not isinstance(tables[name], list) or not all(isinstance(each, dict) for each in tables[name]):
            raise ValueError(f"{name}: is not [[{name}]]")
        for number, each in enumerate(tables[name]):
            _check(each, known, f"{name}[{number}].")
    _check(values, _OF_ALL, "")
    return values, tables


def _toml() -> Any:
    """The reader of TOML: Python's own from 3.11 on, before that ``tomli``, which the single file brings along."""
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ValueError("this Python reads no TOML: take Python 3.11, logferry-push.pyz, or install tomli")


def _check(values: dict[str, Any], known: dict[str, str], where: str) -> None:
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{where}{name}: there is no such setting")
        if not _fits(value, known[name]):
            raise ValueError(f"{where}{name}: is not {known[name]}")
        if known[name] == _TEXTS and isinstance(value, str):
            values[name] = [value]


def _fits(value: Any, kind: str) -> bool:
    if kind == _TEXTS:
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    if kind == _TABLE:
        return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    if kind == _YES:
        return isinstance(value, bool)
    if kind == _TEXT:
        return isinstance(value, str)
    return isinstance(value, int if kind == _WHOLE else (int, float)) and not isinstance(value, bool)


class _Attribute(argparse.Action):
    """``--attr NAME=VALUE``, again and again, into a table."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        name, equals, value = values.partition("=")
        if not equals:
            parser.error(f"--attr {values!r} is not name=value")
        namespace.attributes = {**(namespace.attributes or {}), name: value}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry push",
        description="Sends the lines of files to a gateway, each once, whatever is killed.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("glob", nargs="*", metavar="GLOB", help="files to send")
    add("--config", metavar="FILE", help="a TOML file with settings; the names are those of the options, with _ for -,"
        " and [[files]] with paths, topic, exclude, attributes, record_start, cut_lines; [[datacenters]] with name,"
        " urls, token_file in place of url")  # fmt: skip
    add("--url", action="append", help="a gateway; again for others of the same data centre, tried while the first"
        " does not answer")  # fmt: skip
    add("--fallback-url", action="append", metavar="URL", help="a gateway of another data centre, to go on at while"
        " the first one is gone; again for others of that same one")  # fmt: skip
    add("--failover-s", type=float, metavar="S", help="nothing of a data centre has worked for so long: go on in the"
        " next (60)")  # fmt: skip
    add("--failback-s", type=float, metavar="S", help="the first data centre has worked for so long again: come back"
        " (120)")  # fmt: skip
    add("--topic")
    add("--state-dir", metavar="DIR", help="where the client keeps its checkpoint")
    add("--check", action="store_true", help="say what would be sent and why, send nothing")
    add("--status", action="store_true", help="say where the client that runs on --state-dir is with each file")
    add("--json", action="store_true", help="with --status: for machines")
    add("--once", action="store_true", help="send what is there and end")
    add("--timeout", type=float, default=60.0, metavar="S", help="with --once: give up so long after the last"
        " acknowledgement (60)")  # fmt: skip
    add("--exclude", action="append", metavar="GLOB", help="files to leave out: by name, or with a slash by path")
    add("--token-file", metavar="FILE", help="the token for the gateway (what LOGFERRY_TOKEN in the environment"
        " holds, if anything)")  # fmt: skip
    add("--ca-file", metavar="FILE", help="who signed the gateway's certificate (the system's authorities)")
    add("--pin", action="append", metavar="SHA256", help="a certificate that the gateway may show, by its"
        " fingerprint; again for others")  # fmt: skip
    add("--host", help="this host's name in sourceIds (the system's name)")
    add("--attr", action=_Attribute, dest="attributes", metavar="NAME=VALUE", help="an attribute of every chunk")
    add("--chunk-bytes", type=int, metavar="N", help="a chunk of whole lines (262144)")
    add("--line-bytes", type=int, metavar="N", help="longer lines are split (1048576)")
    add("--cut-lines", action="store_true", default=None, help="longer lines are cut instead: the rest is left out")
    add("--record-start", metavar="REGEX", help="a line that fits begins a record; the lines after it that do not are"
        " part of it and stay in its chunk")  # fmt: skip
    add("--linger-ms", type=int, metavar="MS", help="how long a line may wait to be sent (200)")
    add("--idle-s", type=float, metavar="S", help="a last line without newline waits so long (30)")
    add("--rotated-s", type=float, metavar="S", help="a renamed or removed file is dropped after so long without"
        " growth (300)")  # fmt: skip
    add("--heartbeat-s", type=float, metavar="S", help="how often a file without news says how far it is, and when"
        " one is gone, that it is finished; 0: never (300)")  # fmt: skip
    add("--threads", type=int, metavar="N", help="requests at the same time (5)")
    add("--bytes-per-s", type=int, metavar="N", help="at most so many bytes a second over the network")
    add("--cpu-percent", type=float, metavar="P", help="at most so much of one processor, on average")
    add("--nice", type=int, metavar="N", help="lowers the priority: 0 to 19 (0)")
    add("--deleted-bytes", type=int, metavar="N", help="deleted files are kept open until they are sent; the oldest"
        " go when all together are larger (1073741824)")  # fmt: skip
    add("--metrics-port", type=int, metavar="PORT", help="figures for Prometheus at http://127.0.0.1:PORT/metrics")
    add("--no-gzip", action="store_false", default=None, dest="gzip", help="send chunks as they are")
    add("-v", "--verbose", action="store_true")
    return parser
