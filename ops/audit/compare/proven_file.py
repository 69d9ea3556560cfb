"""The state file: the proof of an audit, so that the next one reads only newer data.

The file has one JSON document a line, the first with the format, the last with a digest of all lines before it. It is
written under another name and renamed, so a reader always finds a complete one; of two audits that write at once the
later one wins, and both are true. A file of another format, truncated or edited is refused until it is removed.

Its size grows with the sources, the files of the tables and their segments, not with the data that was read. The proof
of a log is the end that was read and the chain of each source. The proof of a table is the offsets that were compared,
the sums of each source, and the sums of each file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from logferry.gateway.contract.names import TopicPartition
from logferry.ops.audit.digests.findings import Finding
from logferry.ops.audit.digests.ranges import Ranges
from logferry.ops.audit.digests.sums import Cell, Tally
from logferry.ops.audit.log.chain import Chain, ForgottenSource
from logferry.ops.audit.log.original_files import ProvenOriginal
from logferry.ops.audit.log.partition import LastRecord
from logferry.ops.audit.tables.file_rows import FileFacts
from logferry.ops.audit.tables.table_reader import FileId, FileStat
from logferry.ops.cli.problems import UsageError

FORMAT: Final = "logferry audit 1"
# Findings of a partition that are stored in full; one more line counts the rest.
MAX_FINDINGS: Final = 50


@dataclass
class ProvenPartition:
    """The proof of one partition of a data centre's log. ``end``: of the part that was read and checked."""

    topic_id: str
    end: int
    tail: LastRecord | None = None
    findings: list[Finding] = field(default_factory=list)
    chains: dict[str, Chain] = field(default_factory=dict)


@dataclass
class ProvenTable:
    """The proof of one table. ``home``: the data centre whose log it was compared with. ``seen``: the offsets of each
    partition there, whose chunks are summed in ``cells``. ``firsts``: of a relocated table, the first seqno of each
    source that was read; None for any other table, whose offsets were compared, too."""

    table_id: str
    batch: int
    home: str
    firsts: dict[Cell, int] | None = None
    seen: dict[TopicPartition, Ranges] = field(default_factory=dict)
    cells: dict[Cell, Tally] = field(default_factory=dict)
    files: dict[FileId, FileFacts] = field(default_factory=dict)
    not_loaded: dict[TopicPartition, int] = field(default_factory=dict)
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
    """``scope``: the audited data centre and topics; a file of another scope is refused."""

    scope: dict[str, Any]
    partitions: dict[tuple[str, TopicPartition], ProvenPartition] = field(default_factory=dict)
    tables: dict[str, ProvenTable] = field(default_factory=dict)
    copies: dict[tuple[str, TopicPartition], ProvenCopy] = field(default_factory=dict)
    files: dict[str, ProvenOriginal] = field(default_factory=dict)


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
    lines = text.splitlines()
    try:
        doc = json.loads(lines[0])["format"]
    except (ValueError, KeyError, TypeError, IndexError):
        raise _unusable(file, f"not a state file of logferry audit; {remedy}") from None
    if doc != FORMAT:
        raise _unusable(file, f"format {doc!r} is not supported, this version writes {FORMAT!r}; {remedy}")
    try:
        whole = b"\n".join(lines[:-1]) + b"\n"
        if json.loads(lines[-1])["sha256"] != sha256(whole).hexdigest():
            raise ValueError("wrong checksum")
        state = _parsed([json.loads(line) for line in lines[:-1]])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _unusable(file, f"damaged ({error}); {remedy}") from None
    if state.scope != scope:
        named = ", ".join(f"{name} {state.scope.get(name)!r}" for name in scope if state.scope.get(name) != scope[name])
        raise _unusable(file, f"written by an audit of {named}; use a separate state file for each audit")
    return state


def write_state_file(file: Path, state: ProvenState) -> None:
    """Raises UsageError if it cannot be written; the old file is unchanged then."""
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    digest = sha256()
    try:
        with new.open("wb") as out:
            for document in _documents(state):
                line = json.dumps(document, separators=(",", ":")).encode() + b"\n"
                digest.update(line)
                out.write(line)
            out.write(json.dumps({"sha256": digest.hexdigest()}).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise _unusable(file, f"cannot be written: {error.strerror}") from None


def _unusable(file: Path, why: str) -> UsageError:
    return UsageError(f"--state-file {file}: {why}")


# ---- documents -------------------------------------------------------------------------------------------------


def _documents(state: ProvenState) -> Iterator[dict[str, Any]]:
    yield {"format": FORMAT, "scope": state.scope}
    for (dc, place), partition in state.partitions.items():
        findings = [asdict(finding) for finding in partition.findings]
        tail = None if partition.tail is None else list(partition.tail)
        yield {"at": [dc, *place], "id": partition.topic_id, "end": partition.end, "tail": tail, "findings": findings}
        for source_id, chain in partition.chains.items():
            yield {"source": source_id, "chain": _of_chain(chain)}
    for path, table in state.tables.items():
        head = {"id": table.table_id, "batch": table.batch, "home": table.home}
        yield {"table": path, **head, "moved": table.firsts is not None, "notes": table.notes}
        for place, seen in table.seen.items():
            yield {"seen": list(place), "ranges": list(seen), "not": table.not_loaded.get(place, 0)}
        for cell, tally in table.cells.items():
            first = {"first": table.firsts[cell]} if table.firsts is not None and cell in table.firsts else {}
            yield {"cell": list(cell), "sum": tally.as_list, **first}
        for file, facts in table.files.items():
            segments = [[start, *tally.as_list] for start, tally in facts.segments.items()]
            numbers = [*facts.stat, facts.rows, facts.left]
            yield {"file": list(file), "is": numbers, "sum": facts.compared.as_list, "windows": segments}
    for (dc, place), copy in state.copies.items():
        ids = [copy.original_id, copy.copy_id, copy.original, copy.copy]
        yield {"copy": [dc, *place], "is": ids, "sources": {name: one.as_list for name, one in copy.sources.items()}}
    for path, original in state.files.items():
        yield {"original": path, "inode": original.inode, "pairs": original.pairs}


def _parsed(documents: list[Any]) -> ProvenState:
    state = ProvenState(documents[0]["scope"])
    partition: ProvenPartition | None = None
    table: ProvenTable | None = None
    for doc in documents[1:]:
        if "at" in doc:
            findings = [Finding(**finding) for finding in doc["findings"]]
            tail = None if doc["tail"] is None else LastRecord(*doc["tail"])
            partition = ProvenPartition(doc["id"], doc["end"], tail, findings)
            dc, *place = doc["at"]
            state.partitions[dc, _place(place)] = partition
        elif "chain" in doc and partition is not None:
            partition.chains[doc["source"]] = _chain(doc["chain"])
        elif "table" in doc:
            firsts: dict[Cell, int] | None = {} if doc["moved"] else None
            table = state.tables[doc["table"]] = ProvenTable(doc["id"], doc["batch"], doc["home"], firsts)
            table.notes = doc["notes"]
        elif "seen" in doc and table is not None:
            at = _place(doc["seen"])
            table.seen[at], table.not_loaded[at] = _ranges(doc["ranges"]), doc["not"]
        elif "cell" in doc and table is not None:
            cell = Cell(*doc["cell"])
            table.cells[cell] = Tally.of_list(doc["sum"])
            if table.firsts is not None and "first" in doc:
                table.firsts[cell] = doc["first"]
        elif "file" in doc and table is not None:
            size, changed, rows, left = doc["is"]
            segments = {start: Tally.of_list(rest) for start, *rest in doc["windows"]}
            facts = FileFacts(FileStat(size, changed), rows, Tally.of_list(doc["sum"]), left, segments)
            table.files[FileId(*doc["file"])] = facts
        elif "copy" in doc:
            dc, *place = doc["copy"]
            sources = {name: Tally.of_list(one) for name, one in doc["sources"].items()}
            original_id, copy_id, original, copy = doc["is"]
            state.copies[dc, _place(place)] = ProvenCopy(original_id, copy_id, original, copy, sources)
        elif "original" in doc:
            state.files[doc["original"]] = ProvenOriginal(doc["inode"], doc["pairs"])
        else:
            raise ValueError(f"unknown document {next(iter(doc), None)!r}")
    return state


def _place(doc: list[Any]) -> TopicPartition:
    topic, partition = doc
    return str(topic), int(partition)


def _ranges(doc: list[list[int]]) -> Ranges:
    return Ranges([low for low, _ in doc], [high for _, high in doc])


_NUMBERS: Final = ("base", "first", "last", "first_offset", "last_offset", "chunks", "lines", "size_bytes", "last_ms")


def _of_chain(chain: Chain) -> list[Any]:
    numbers = [getattr(chain, name) for name in _NUMBERS]
    born = chain.forgotten
    forgotten = None if born is None else [list(born.covered), born.used]
    settled = [chain.settled, chain.later]
    return [numbers, f"{chain.digest:x}", settled, chain.breaks, chain.head_seen, chain.holes, forgotten]


def _chain(doc: list[Any]) -> Chain:
    numbers, digest, (settled, later), breaks, head_seen, holes, forgotten = doc
    chain = Chain(**dict(zip(_NUMBERS, numbers, strict=True)))
    chain.digest = int(digest, 16)
    chain.settled, chain.later, chain.breaks, chain.head_seen = settled, later, breaks, head_seen
    chain.holes = [(low, high) for low, high in holes]
    if forgotten is not None:
        covered, used = forgotten
        chain.forgotten = ForgottenSource([], _ranges(covered), used)
    return chain
