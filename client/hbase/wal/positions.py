"""The file with how far each log is written. It saves reading again, and shows which files were lost meanwhile.

Without it, all logs are read from their beginnings: what the gateway has recorded, it does not record again. So the
file may be deleted, and one that is older than what is recorded does no harm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from logferry.client.hbase.definition import PeerDefinition, Unfit
from logferry.client.hbase.wal.region_order import Place

_FORMAT = 1


class LogPosition(NamedTuple):
    """``files``: the numbers of those that are not written to their ends."""

    written: Place
    files: tuple[int, ...]


def load_positions(file: Path, definition: PeerDefinition) -> dict[str, LogPosition]:
    """By log; none where there is no file. Raises Unfit, OSError."""
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
        if found["format"] != _FORMAT:
            raise Unfit(f"{file} has the format {found['format']}: it needs a newer logferry")
        stored = PeerDefinition.unpacked(json.dumps(found["definition"]).encode(), str(file))
        logs = {
            name: LogPosition(Place(int(number), int(at)), tuple(map(int, files)))
            for name, (number, at, files) in found["logs"].items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unfit(f"{file} holds no positions ({error}): delete it, and all logs are read again") from None
    if stored != definition:
        raise Unfit(
            f"{file} is of another definition ({stored.differences(definition)}): use the same options, or another file"
        )
    return logs


def save_positions(file: Path, definition: PeerDefinition, logs: Mapping[str, LogPosition]) -> None:
    """In one step: a crash leaves the file from before. Raises OSError."""
    shown = {name: [*one.written, list(one.files)] for name, one in sorted(logs.items())}
    content = {"format": _FORMAT, "definition": json.loads(definition.packed()), "logs": shown}
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, ensure_ascii=False)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
