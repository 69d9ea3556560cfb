"""What a container wrote, as its runtime writes it down: the entries of a file, and the messages that they make."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

TIMES = b"2026-11-22T10:00:00.%09dZ"


def cri(number: int, stream: str, message: bytes, is_part: bool) -> bytes:
    return b"%b %b %b %b\n" % (TIMES % number, stream.encode(), b"P" if is_part else b"F", message)


def docker(number: int, stream: str, message: bytes, is_part: bool) -> bytes:
    """As Docker escapes: <, > and & too, and no blanks."""
    log = message.decode() + "\n" * (not is_part)
    entry = {"log": log, "stream": stream, "time": (TIMES % number).decode()}
    text = json.dumps(entry, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode() + b"\n"


WRITERS = {"cri": cri, "docker": docker}


@dataclass
class ContainerLog:
    """``told``: by stream, each message with the number of its first entry; ``open``: those that are not finished."""

    form: str
    rng: random.Random
    serial: int = 0
    told: dict[str, list[tuple[int, bytes]]] = field(default_factory=lambda: {"stdout": [], "stderr": []})
    open: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    malformed: list[bytes] = field(default_factory=list)

    def entry(self) -> bytes:
        """The next one: a part or the end of a message, or one in no form."""
        self.serial += 1
        rng, stream = self.rng, self.rng.choice(("stdout", "stdout", "stderr"))
        if rng.random() < 0.03:
            line = rng.choice((b"", b"%d no entry" % self.serial, b'{"log":%d}' % self.serial, b"\0" * 70))
            self.malformed.append(line)
            return line + b"\n"
        size = rng.choice((0, 1, 5, 40, 40, 300))
        text = b"%d:" % self.serial + (' P ü<\\n","stream":" '.encode() * size)[: size * 2]
        text = text.decode(errors="ignore").encode()
        is_part = rng.random() < (0.5 if stream in self.open else 0.2)
        number, before = self.open.pop(stream, (self.serial, b""))
        if is_part:
            self.open[stream] = number, before + text
        else:
            self.told[stream].append((number, before + text))
        return WRITERS[self.form](self.serial, stream, text, is_part)

    def end(self) -> None:
        """The container is gone: what is open has no end."""
        for stream, message in self.open.items():
            self.told[stream].append(message)
        self.open.clear()


def lines_of(content: bytes) -> dict[str, list[tuple[int, bytes]]]:
    """Of what was sent with time and stream: by stream, each line with the number of its entry; ``""``: the others."""
    found: dict[str, list[tuple[int, bytes]]] = {"stdout": [], "stderr": [], "": []}
    for line in content.split(b"\n")[:-1]:
        time, _, rest = line.partition(b" ")
        stream, _, message = rest.partition(b" ")
        if stream in (b"stdout", b"stderr"):
            found[stream.decode()].append((int(time[20:29]), message))
        else:
            found[""].append((0, line))
    return found
