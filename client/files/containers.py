"""Files that a container runtime writes: their entries → the messages of the container. Pure.

An entry is a line of the file. It holds a message, or a part of one: runtimes part long messages, and some write down
what has no newline yet. Two forms are known:

    cri     ``2026-11-22T10:00:00.1Z stdout F message``; ``P`` in place of ``F``: the message continues
    docker  ``{"log":"message\\n","stream":"stdout","time":"2026-11-22T10:00:00.1Z"}``; without the newline it continues

The parts of a message are joined within its stream: stdout and stderr may alternate. The seqnos stay positions in the
file: what is sent of a chunk depends on its bytes alone, and chunks are cut where no message is open. Where that is not
possible, because a message is too long or its end does not come, the message is parted there: each part is sent as a
line, and ``unfinished`` names the streams whose last line in the chunk is such a part.

An entry that is in neither form is sent as it is, and counted in ``malformed``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from logferry.client.files.identity import attribute
from logferry.client.files.lines import LineRules

LEAST_LINE_BYTES = 128 << 10  # an entry with 16 KiB of a message, all of it escaped, and what else it holds
FIELDS = ("time", "stream")
STREAMS = ("stdout", "stderr")


class Entry(NamedTuple):
    """``message``: the message or a part of it, without its newline."""

    time: bytes
    stream: bytes
    is_part: bool
    message: bytes


_CRI = re.compile(rb"(\d{4}-\d\d-\d\dT[^ ]+) (stdout|stderr) ([FP])(?::[^ ]*)? (.*)", re.DOTALL)


def cri_entry(line: bytes) -> Entry | None:
    """None: it is none."""
    found = _CRI.fullmatch(line)
    return None if found is None else Entry(found[1], found[2], found[3] == b"P", found[4])


def docker_entry(line: bytes) -> Entry | None:
    try:
        fields = json.loads(line)
        message, stream, time = fields["log"], fields["stream"], fields["time"]
        if stream not in STREAMS or not time or " " in time:
            return None
        is_part = not message.endswith("\n")
        message = message if is_part else message[:-1]
        if "\n" in message or "\n" in time:
            return None
        return Entry(time.encode(), stream.encode(), is_part, message.encode())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _may_be_parted_cri(data: bytes) -> bool:
    return b" stdout P" in data or b" stderr P" in data


def _may_be_parted_docker(data: bytes) -> bool:
    ends = data.count(b'\\n","stream":"') - data.count(b'\\\\n","stream":"')
    return ends != data.count(b"\n")


class RuntimeForm(NamedTuple):
    """``may_be_parted``: False if each of these lines certainly holds a whole message."""

    entry: Callable[[bytes], Entry | None]
    may_be_parted: Callable[[bytes], bool]


FORMS = {
    "cri": RuntimeForm(cri_entry, _may_be_parted_cri),
    "docker": RuntimeForm(docker_entry, _may_be_parted_docker),
}


class ContainerRules(NamedTuple):
    """``fields``: which of `FIELDS` are sent before each message; ``lines``: which messages are sent."""

    form: RuntimeForm
    fields: tuple[str, ...] = FIELDS
    lines: LineRules = LineRules()

    def messages_end(self, data: bytes, begin: int, chunk_bytes: int, line_bytes: int) -> int:
        """The end of the last entry in ``chunk_bytes`` behind which no message is open; if there is none, of the first
        one in ``line_bytes``; 0: there is none.
        """
        whole = data.rfind(b"\n", begin, begin + chunk_bytes) + 1
        if whole and not self.form.may_be_parted(data[begin:whole]):
            return whole
        far, end, at, unfinished = begin + line_bytes, 0, begin, set()
        while (newline := data.find(b"\n", at, far)) >= 0:
            entry, at = self.form.entry(data[at:newline]), newline + 1
            if end and at - begin > chunk_bytes:
                break
            if entry is not None and entry.is_part:
                unfinished.add(entry.stream)
            elif entry is not None:
                unfinished.discard(entry.stream)
            if not unfinished:
                end = at
                if end - begin > chunk_bytes:
                    break
        return end

    def sent(self, data: bytes, is_whole: bool) -> tuple[bytes, dict[str, str]]:
        """What is sent of the entries, and the attributes that tell about it. Those of an entry in pieces are sent as
        they are.
        """
        if not is_whole:
            return self.lines.sent(data, False)
        sent: list[bytes] = []
        begun: dict[bytes, tuple[bytes, list[bytes]]] = {}
        malformed = left_out = 0
        for line in data[:-1].split(b"\n"):
            entry = self.form.entry(line)
            if entry is None:
                malformed += 1
                sent.append(line + b"\n")
                continue
            time, stream, is_part, message = entry
            if is_part:
                begun.setdefault(stream, (time, []))[1].append(message)
                continue
            if stream in begun:
                time, parts = begun.pop(stream)
                message = b"".join((*parts, message))
            message, told = self.lines.sent(message + b"\n", True)
            if told:
                left_out += 1
            else:
                sent.append(self._prefix(time, stream) + message)
        for stream, (time, parts) in begun.items():
            sent.append(self._prefix(time, stream) + self.lines.sent(b"".join(parts), False)[0] + b"\n")
        told = {
            "filtered": str(left_out or ""),
            "malformed": str(malformed or ""),
            "unfinished": b" ".join(begun).decode(),
        }
        return b"".join(sent), {name: value for name, value in told.items() if value}

    def _prefix(self, time: bytes, stream: bytes) -> bytes:
        values = {"time": time, "stream": stream}
        return b"".join(values[name] + b" " for name in self.fields)


def container_rules(format_name: str, fields: str, lines: LineRules | None) -> ContainerRules:
    """``fields``: names, with blanks between them. Raises ValueError."""
    names = tuple(fields.split())
    if format_name not in FORMS:
        raise ValueError(f"{format_name!r} is not one of lines, {', '.join(FORMS)}")
    if not set(names) <= set(FIELDS) or len(set(names)) < len(names):
        raise ValueError(f"line_fields {fields!r} has others than {' and '.join(FIELDS)}, or one of them twice")
    if format_name == "docker" and lines is not None and lines.encoding is not None:
        raise ValueError("what Docker writes is UTF-8: leave out encoding")
    return ContainerRules(FORMS[format_name], names, lines or LineRules())


# ---- whose file it is ------------------------------------------------------------------------------------------

_PODS = re.compile(r"/([^/_]+)_([^/_]+)_([^/_]+)/([^/]+)/[^/]+\Z")  # namespace, pod, uid, container
_LINKS = re.compile(r"/([^/_]+)_([^/_]+)_([^/]+)-([0-9a-f]{64})\.log\Z")  # pod, namespace, container, id
_DOCKER = re.compile(r"/([0-9a-f]{64})/\1-json\.log[^/]*\Z")


def container_attributes(path: str) -> dict[str, str]:
    """What the path tells: below ``/var/log/pods``, ``/var/log/containers`` or Docker's folder."""
    found = _PODS.search(path)
    if found:
        names = ("namespace", "pod", "pod_uid", "container")
        return {name: attribute(value) for name, value in zip(names, found.groups())}
    found = _LINKS.search(path)
    if found:
        names = ("pod", "namespace", "container", "container_id")
        return {name: attribute(value) for name, value in zip(names, found.groups())}
    found = _DOCKER.search(path)
    return {"container_id": found[1]} if found else {}
