"""A syslog message → one JSON line. Pure.

RFC 5424 and RFC 3164; the latter also with the times of RFC 3339 that rsyslog writes, and without a host, as programs
write into ``/dev/log``. A part that is not there, or is ``-``, has no key. A message that fits neither has its whole
text as ``message``, behind the priority if there is one. Bytes that are not UTF-8 are replaced, and ``raw`` has the
whole message in base64 then. So nothing is lost.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any

FACILITIES = (
    *("kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv", "ftp", "ntp"),
    *("audit", "alert", "clock", "local0", "local1", "local2", "local3", "local4", "local5", "local6", "local7"),
)
SEVERITIES = ("emerg", "alert", "crit", "err", "warning", "notice", "info", "debug")

_PRIORITY = re.compile(r"<(0|[1-9][0-9]{0,2})>")
_NEW = re.compile(r"1 ([^ ]{1,40}) ([^ ]{1,255}) ([^ ]{1,48}) ([^ ]{1,128}) ([^ ]{1,32}) ")
_ELEMENT = re.compile(r'\[([^ =\]"]{1,32})((?: [^ =\]"]{1,32}="(?:[^"\\\]]|\\.)*")*)\]', re.DOTALL)
_PARAMETER = re.compile(r'([^ =\]"]{1,32})="((?:[^"\\\]]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(r'\\(["\\\]])')
_ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)"
_OLD = re.compile(rf"(?:({_ISO})|([A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d)) ")
_ISO_ALONE = re.compile(_ISO)
_HOST = re.compile(r"([A-Za-z0-9._:-]{1,255}) (?=[^ ])")
_TAG = re.compile(r"([^ :\[\]]{1,128})(?:\[([^\]]{1,128})\])?: ?")


def json_line(message: bytes, received: str, peer: str, has_host: bool = True) -> bytes:
    """``received``: the time on this host. ``peer``: the sender's address; empty: none. ``has_host``: RFC 3164 has the
    sender's name, as over a network."""
    message = message.rstrip(b"\r\n\0")
    record: dict[str, Any] = {"received": received}
    if peer:
        record["peer"] = peer
    try:
        text = message.decode()
    except UnicodeDecodeError:
        text = message.decode(errors="replace")
        record["raw"] = base64.b64encode(message).decode()
    record.update(fields_of(text, has_host))
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def fields_of(text: str, has_host: bool = True) -> dict[str, Any]:
    """The parts of a message."""
    found = _PRIORITY.match(text)
    if found is None or int(found[1]) > 191:
        return {"message": text}
    number = int(found[1])
    fields: dict[str, Any] = {"facility": FACILITIES[number >> 3], "severity": SEVERITIES[number & 7]}
    rest = text[found.end() :]
    new = _NEW.match(rest)
    fields.update(_old(rest, has_host) if new is None else _rfc5424(new, rest[new.end() :]))
    return fields


def _rfc5424(head: re.Match[str], rest: str) -> dict[str, Any]:
    time, host, app, pid, msgid = (None if part == "-" else part for part in head.groups())
    given = {"host": host, "app": app, "pid": pid, "msgid": msgid}
    fields: dict[str, Any] = {"time": time} if time and _ISO_ALONE.fullmatch(time) else {}
    fields.update((name, value) for name, value in given.items() if value is not None)
    if rest == "-" or rest.startswith("- "):
        rest = rest[2:]
    else:
        data: dict[str, dict[str, str]] = {}
        at = 0
        while (element := _ELEMENT.match(rest, at)) is not None:
            values = data.setdefault(element[1], {})
            for name, value in _PARAMETER.findall(element[2]):
                values[name] = _ESCAPED.sub(r"\1", value)
            at = element.end()
        if data and rest[at : at + 1] in ("", " "):
            fields["sd"] = data
            rest = rest[at + 1 :]
    fields["message"] = rest[1:] if rest.startswith("\ufeff") else rest
    return fields


def _old(rest: str, has_host: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    head = _OLD.match(rest)
    if head is not None:
        fields["time" if head[1] else "bsd_time"] = head[1] or head[2]
        rest = rest[head.end() :]
        host = _HOST.match(rest) if has_host else None
        if host is not None and not host[1].endswith(":"):
            fields["host"] = host[1]
            rest = rest[host.end() :]
    tag = _TAG.match(rest)
    if tag is not None:
        fields["app"] = tag[1]
        if tag[2]:
            fields["pid"] = tag[2]
        rest = rest[tag.end() :]
    fields["message"] = rest
    return fields
