"""The state file: the proof of an audit, so that the next one reads only newer data.

The file has lines of JSON: the format, a `ProvenState` in parts, and then a digest of all lines before it. It is
written under another name and renamed, so a reader always finds a complete one; of two audits that write at once the
later one wins, and both are true. A file of another format, truncated or edited is refused until it is removed.

Its size grows with the sources, the files of the tables and their segments, not with the data that was read. The proof
of a log is the end that was read and the chain of each source. The proof of a table is the offsets that were compared,
the sums of each source, and the sums of each file.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from logferry.gateway.contract.names import TopicPartition
from logferry.ops.audit.digests.sums import Cell, Ranges, Tally
from logferry.ops.audit.log.original_files import ProvenOriginal
from logferry.ops.audit.log.partition import ProvenPartition
from logferry.ops.audit.tables.accepted_resets import ResetJump
from logferry.ops.audit.tables.rows import FileFacts, FileId
from logferry.ops.cli.problems import UsageError
from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

FORMAT: Final = "logferry audit 2"
# Its digests did not cover the columns of a chunk: all is read again, and the accepted resets stay.
_BEFORE: Final = "logferry audit 1"


def _hashable(key: Any) -> Any:
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


K = TypeVar("K")
V = TypeVar("V")
# A dictionary whose keys are no text: JSON has its items.
Items = Annotated[
    dict[K, V],
    BeforeValidator(lambda items: {_hashable(key): value for key, value in items}),
    PlainSerializer(lambda found: list(found.items())),
]


@dataclass
class ProvenTable:
    """The proof of one table. ``home``: the data centre whose log it was compared with. ``seen``: the offsets of each
    partition there, whose chunks are summed in ``cells``. ``firsts``: of a relocated table, the first seqno of each
    source that was read; None for any other table, whose offsets were compared, too."""

    table_id: str
    batch: int
    home: str
    firsts: Items[Cell, int] | None = None
    seen: Items[TopicPartition, Ranges] = field(default_factory=dict)
    cells: Items[Cell, Tally] = field(default_factory=dict)
    files: Items[FileId, FileFacts] = field(default_factory=dict)
    not_loaded: Items[TopicPartition, int] = field(default_factory=dict)
    notes: str = ""


@dataclass
class ProvenCopy:
    """The proof of one partition in another data centre. ``original``, ``copy``: the offsets after the last equal
    records. ``sources``: chunks, bytes and digest of the compared records.
    """

    original_id: str
    copy_id: str
    original: int
    copy: int
    sources: dict[str, Tally] = field(default_factory=dict)


@dataclass
class ProvenState:
    """``scope``: the audited data centre and topics; a file of another scope is refused. ``accepted``: the accepted
    resets of each table; they are no proof, and stay when everything is read again."""

    scope: dict[str, Any]
    partitions: Items[tuple[str, TopicPartition], ProvenPartition] = field(default_factory=dict)
    tables: dict[str, ProvenTable] = field(default_factory=dict)
    copies: Items[tuple[str, TopicPartition], ProvenCopy] = field(default_factory=dict)
    files: dict[str, ProvenOriginal] = field(default_factory=dict)
    accepted: dict[str, list[ResetJump]] = field(default_factory=dict)

    def parts(self) -> Iterator[ProvenState]:
        """One part for each partition and table, and one for the rest: so that little is copied at once."""
        yield ProvenState(self.scope, copies=self.copies, files=self.files, accepted=self.accepted)
        yield from (ProvenState({}, partitions={place: proven}) for place, proven in self.partitions.items())
        yield from (ProvenState({}, tables={path: proven}) for path, proven in self.tables.items())

    def add(self, part: ProvenState) -> None:
        for mine, theirs in zip(vars(self).values(), vars(part).values(), strict=True):
            mine.update(theirs)


_STATE: Final = TypeAdapter(ProvenState)


def read_state_file(file: Path, scope: dict[str, Any]) -> ProvenState:
    """An empty state if the file does not exist yet. Raises UsageError."""
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        if not file.absolute().parent.is_dir():
            raise _unusable(file, f"the folder {file.absolute().parent} does not exist; create it") from None
        return ProvenState(scope)
    except OSError as error:
        raise _unusable(file, f"cannot be read: {error.strerror}") from None
    remedy = "remove it to start from the beginning"
    lines = text.splitlines(keepends=True) or [b""]
    try:
        form = json.loads(lines[0])["format"]
    except (ValueError, KeyError, TypeError):
        raise _unusable(file, f"not a state file of logferry audit; {remedy}") from None
    if form not in (FORMAT, _BEFORE):
        raise _unusable(file, f"format {form!r} is not supported, this version writes {FORMAT!r}; {remedy}")
    digest = sha256(memoryview(text)[: len(text) - len(lines[-1])])
    if lines[-1] != json.dumps(digest.hexdigest()).encode():
        raise _unusable(file, f"damaged (wrong checksum); {remedy}")
    try:
        state = ProvenState({})
        for line in lines[1:-1]:
            state.add(_STATE.validate_json(line))
    except ValidationError as error:
        raise _unusable(file, f"damaged ({error.errors()[0]['msg']}); {remedy}") from None
    if state.scope != scope:
        named = ", ".join(f"{name} {state.scope.get(name)!r}" for name in scope if state.scope.get(name) != scope[name])
        raise _unusable(file, f"written by an audit of {named}; use a separate state file for each audit")
    return state if form == FORMAT else ProvenState(scope, accepted=state.accepted)


def write_state_file(file: Path, state: ProvenState) -> None:
    """Raises UsageError if it cannot be written; the old file is unchanged then."""
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    digest = sha256()
    parts = (_STATE.dump_json(part) for part in state.parts())
    try:
        with new.open("wb") as out:
            for line in itertools.chain([json.dumps({"format": FORMAT}).encode()], parts):
                digest.update(line + b"\n")
                out.write(line + b"\n")
            out.write(json.dumps(digest.hexdigest()).encode())
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise _unusable(file, f"cannot be written: {error.strerror}") from None


def _unusable(file: Path, why: str) -> UsageError:
    return UsageError(f"--state-file {file}: {why}")
