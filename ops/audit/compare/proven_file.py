"""What an audit has proven, in a file, so that the next one reads only what is new.

One JSON document a line, the first with the format, the last with a digest of all before it. It is written beside and
renamed into its place, so there is always a whole one; of two audits that write at once the later one stands, and both
are true. A file of another format, cut off or changed by hand is refused: whoever wants to begin anew removes it.

Its size grows with the sources, the files of the tables and the segments in them, not with what was read. What is kept
of the log is about the log (where it was read to, the chain of each source), what is kept of a table is its own: which
offsets were held against its rows, the sums of each source, and what each of its files holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from logferry.ops.audit.digests.findings import Finding
from logferry.ops.audit.digests.ranges import Ranges
from logferry.ops.audit.digests.sums import Cell, Tally
from logferry.ops.audit.log.chain import Chain, Forgotten
from logferry.ops.audit.log.original_files import KeptFile
from logferry.ops.audit.log.partition import Tail
from logferry.ops.audit.tables.file_rows import FileFacts
from logferry.ops.audit.tables.table_reader import FileId, Stat
from logferry.ops.cli.problems import WrongUse

FORMAT: Final = "logferry audit 1"
# So many findings of a partition are kept in full; what is more is one line with their number.
KEPT_FINDINGS: Final = 50

Place = tuple[str, int]


@dataclass
class KeptPartition:
    """Of one partition of a data centre's log. ``end``: up to where it was read and judged."""

    topic_id: str
    end: int
    tail: Tail | None = None
    findings: list[Finding] = field(default_factory=list)
    chains: dict[str, Chain] = field(default_factory=dict)


@dataclass
class KeptTable:
    """``home``: the data centre whose log it was compared with. ``seen``: the offsets of each partition there, whose
    chunks stand in ``cells``. ``firsts``: of a table that moved, the first seqno that was read of each source; None: it
    did not, and offsets were compared, too."""

    table_id: str
    batch: int
    home: str
    firsts: dict[Cell, int] | None = None
    seen: dict[Place, Ranges] = field(default_factory=dict)
    cells: dict[Cell, Tally] = field(default_factory=dict)
    files: dict[FileId, FileFacts] = field(default_factory=dict)
    not_loaded: dict[Place, int] = field(default_factory=dict)
    notes: str = ""


@dataclass
class KeptCopy:
    """Of one partition in another data centre. ``original``, ``copy``: the offsets behind the last equal records.

    ``sources``: chunks, bytes and digest of what was compared.
    """

    original_id: str
    copy_id: str
    original: int
    copy: int
    sources: dict[str, Tally] = field(default_factory=dict)


@dataclass
class Kept:
    """``scope``: what was audited; a file of another scope is refused."""

    scope: dict[str, Any]
    partitions: dict[tuple[str, Place], KeptPartition] = field(default_factory=dict)
    tables: dict[str, KeptTable] = field(default_factory=dict)
    copies: dict[tuple[str, Place], KeptCopy] = field(default_factory=dict)
    files: dict[str, KeptFile] = field(default_factory=dict)


def read_kept(file: Path, scope: dict[str, Any]) -> Kept:
    """An empty one where there is no file yet. Raises WrongUse."""
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        if not file.absolute().parent.is_dir():
            raise WrongUse(f"--keep {file}: there is no folder {file.absolute().parent}") from None
        return Kept(scope)
    except OSError as error:
        raise WrongUse(f"--keep {file}: {error.strerror}") from None
    anew = "remove it to begin anew"
    lines = text.splitlines()
    try:
        said = json.loads(lines[0])["format"]
    except (ValueError, KeyError, TypeError, IndexError):
        raise WrongUse(f"--keep {file}: it is not a file of logferry audit; {anew}") from None
    if said != FORMAT:
        raise WrongUse(f"--keep {file}: its format is {said!r}, this logferry writes {FORMAT!r}; {anew}")
    try:
        whole = b"\n".join(lines[:-1]) + b"\n"
        if json.loads(lines[-1])["sha256"] != sha256(whole).hexdigest():
            raise ValueError("its checksum is wrong")
        kept = _parsed([json.loads(line) for line in lines[:-1]])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise WrongUse(f"--keep {file}: it is damaged ({error}); {anew}") from None
    if kept.scope != scope:
        named = ", ".join(f"{name} {kept.scope.get(name)!r}" for name in scope if kept.scope.get(name) != scope[name])
        raise WrongUse(f"--keep {file}: it is of an audit of {named}; give each audit a file of its own")
    return kept


def write_kept(file: Path, kept: Kept) -> None:
    """Raises WrongUse when it cannot be written; the old one stands then."""
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    digest = sha256()
    try:
        with new.open("wb") as out:
            for document in _documents(kept):
                line = json.dumps(document, separators=(",", ":")).encode() + b"\n"
                digest.update(line)
                out.write(line)
            out.write(json.dumps({"sha256": digest.hexdigest()}).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise WrongUse(f"--keep {file}: it cannot be written: {error.strerror}") from None


# ---- documents -------------------------------------------------------------------------------------------------


def _documents(kept: Kept) -> Iterator[dict[str, Any]]:
    yield {"format": FORMAT, "scope": kept.scope}
    for (dc, place), partition in kept.partitions.items():
        findings = [finding.as_dict() for finding in partition.findings]
        tail = None if partition.tail is None else list(partition.tail)
        yield {"at": [dc, *place], "id": partition.topic_id, "end": partition.end, "tail": tail, "findings": findings}
        for source_id, chain in partition.chains.items():
            yield {"source": source_id, "chain": _of_chain(chain)}
    for path, table in kept.tables.items():
        moved = table.firsts is not None
        yield {
            "table": path,
            "id": table.table_id,
            "batch": table.batch,
            "home": table.home,
            "moved": moved,
            "notes": table.notes,
        }
        for place, seen in table.seen.items():
            yield {"seen": list(place), "ranges": list(seen), "not": table.not_loaded.get(place, 0)}
        for cell, tally in table.cells.items():
            first = {"first": table.firsts[cell]} if table.firsts is not None and cell in table.firsts else {}
            yield {"cell": list(cell), "sum": tally.as_list, **first}
        for file, facts in table.files.items():
            windows = [[start, *tally.as_list] for start, tally in facts.windows.items()]
            yield {
                "file": list(file),
                "is": [*facts.stat, facts.rows, facts.left],
                "sum": facts.compared.as_list,
                "windows": windows,
            }
    for (dc, place), copy in kept.copies.items():
        ids = [copy.original_id, copy.copy_id, copy.original, copy.copy]
        yield {"copy": [dc, *place], "is": ids, "sources": {name: one.as_list for name, one in copy.sources.items()}}
    for path, original in kept.files.items():
        yield {"original": path, "inode": original.inode, "pairs": original.pairs}


def _parsed(documents: list[Any]) -> Kept:
    kept = Kept(documents[0]["scope"])
    partition: KeptPartition | None = None
    table: KeptTable | None = None
    for said in documents[1:]:
        if "at" in said:
            findings = [Finding(**finding) for finding in said["findings"]]
            tail = None if said["tail"] is None else Tail(*said["tail"])
            partition = KeptPartition(said["id"], said["end"], tail, findings)
            dc, *place = said["at"]
            kept.partitions[dc, _place(place)] = partition
        elif "chain" in said and partition is not None:
            partition.chains[said["source"]] = _chain(said["chain"])
        elif "table" in said:
            firsts: dict[Cell, int] | None = {} if said["moved"] else None
            table = kept.tables[said["table"]] = KeptTable(said["id"], said["batch"], said["home"], firsts)
            table.notes = said["notes"]
        elif "seen" in said and table is not None:
            at = _place(said["seen"])
            table.seen[at], table.not_loaded[at] = _ranges(said["ranges"]), said["not"]
        elif "cell" in said and table is not None:
            cell = Cell(*said["cell"])
            table.cells[cell] = Tally.of_list(said["sum"])
            if table.firsts is not None and "first" in said:
                table.firsts[cell] = said["first"]
        elif "file" in said and table is not None:
            size, changed, rows, left = said["is"]
            windows = {start: Tally.of_list(rest) for start, *rest in said["windows"]}
            facts = FileFacts(Stat(size, changed), rows, Tally.of_list(said["sum"]), left, windows)
            table.files[FileId(*said["file"])] = facts
        elif "copy" in said:
            dc, *place = said["copy"]
            sources = {name: Tally.of_list(one) for name, one in said["sources"].items()}
            original_id, copy_id, original, copy = said["is"]
            kept.copies[dc, _place(place)] = KeptCopy(original_id, copy_id, original, copy, sources)
        elif "original" in said:
            kept.files[said["original"]] = KeptFile(said["inode"], said["pairs"])
        else:
            raise ValueError(f"what is {next(iter(said), None)!r}?")
    return kept


def _place(said: list[Any]) -> Place:
    topic, partition = said
    return str(topic), int(partition)


def _ranges(said: list[list[int]]) -> Ranges:
    return Ranges([low for low, _ in said], [high for _, high in said])


_NUMBERS: Final = ("base", "first", "last", "first_offset", "last_offset", "chunks", "lines", "size_bytes", "last_ms")


def _of_chain(chain: Chain) -> list[Any]:
    numbers = [getattr(chain, name) for name in _NUMBERS]
    born = chain.forgotten
    forgotten = None if born is None else [list(born.covered), born.used]
    settled = [chain.settled, chain.later]
    return [numbers, f"{chain.digest:x}", settled, chain.breaks, chain.head_seen, chain.holes, forgotten]


def _chain(said: list[Any]) -> Chain:
    numbers, digest, (settled, later), breaks, head_seen, holes, forgotten = said
    chain = Chain(**dict(zip(_NUMBERS, numbers, strict=True)))
    chain.digest = int(digest, 16)
    chain.settled, chain.later, chain.breaks, chain.head_seen = settled, later, breaks, head_seen
    chain.holes = [(low, high) for low, high in holes]
    if forgotten is not None:
        covered, used = forgotten
        chain.forgotten = Forgotten([], _ranges(covered), used)
    return chain
