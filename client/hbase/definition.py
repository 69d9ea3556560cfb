"""What a subscription is, and whether HBase fits it: its peer, and the families of its tables. Pure.

A subscription of the name N is the replication peer N of HBase, and the folder ``/logferry/hbase/N`` of ZooKeeper,
which HBase takes for another cluster. Every connector of N must have the same definition; the first one stores it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from logferry.client.hbase import messages
from logferry.gateway.contract.names import check_topic

ROOT = "/logferry/hbase"
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}\Z")
_TABLE = re.compile(r"(?:([A-Za-z0-9_]+):)?([A-Za-z0-9_][A-Za-z0-9_.-]*)\Z")
_FORMAT = 1
_DEFAULT_NAMESPACE = "default"
# How the changes of a chunk are written.
ENCODINGS = ("json", "msgpack")
# Why a peer that is not serial is refused.
_LOST = "in a trial without it 344 of 2900 changes came late, looked like duplicates and were lost"


class Unfit(Exception):
    """The subscription cannot be served; the text says why and what to do."""


class PeerDefinition(NamedTuple):
    """``tables``: as HBase's shell writes them. Of the others, empty means all. ``row_pattern``: a regular expression
    that is found in the row, by bytes. ``encoding``: of `ENCODINGS`.
    """

    topic: str
    tables: tuple[str, ...]
    families: tuple[str, ...] = ()
    qualifiers: tuple[str, ...] = ()
    row_prefixes: tuple[str, ...] = ()
    row_pattern: str = ""
    encoding: str = "json"

    def check(self) -> PeerDefinition:
        """Itself, with the tables in order, each once. Raises ValueError."""
        check_topic(self.topic)
        if not self.tables:
            raise ValueError("tables: name at least one")
        for table in self.tables:
            if not _TABLE.match(table):
                raise ValueError(f"tables: {table!r} is not TABLE or NAMESPACE:TABLE")
        try:
            re.compile(self.row_pattern.encode())
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"row pattern: {self.row_pattern!r} is no regular expression: {error}") from None
        if self.encoding not in ENCODINGS:
            raise ValueError(f"format: {self.encoding!r} is none of {', '.join(ENCODINGS)}")
        plain = {table.removeprefix(f"{_DEFAULT_NAMESPACE}:") for table in self.tables}
        families, qualifiers, prefixes = (
            tuple(sorted(set(names))) for names in (self.families, self.qualifiers, self.row_prefixes)
        )
        filters = (families, qualifiers, prefixes, self.row_pattern)
        return PeerDefinition(self.topic, tuple(sorted(plain)), *filters, self.encoding)

    def packed(self) -> bytes:
        return json.dumps({"format": _FORMAT, **self._asdict()}, ensure_ascii=False).encode()

    @classmethod
    def unpacked(cls, data: bytes, where: str) -> PeerDefinition:
        """Raises Unfit."""
        try:
            found: dict[str, Any] = json.loads(data)
            number = found.pop("format")
            if number != _FORMAT:
                raise Unfit(f"{where} has the format {number}: it needs a newer logferry")
            lists: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
            }
            return cls(**lists).check()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unfit(f"{where} is no definition of a subscription: {error}") from None

    def differences(self, given: PeerDefinition) -> str:
        """Between what is stored, this one, and what is given now, in words."""
        mine, theirs = self._asdict(), given._asdict()
        return "; ".join(
            f"{name.replace('_', ' ')}: {_shown(mine[name])} is stored, {_shown(theirs[name])} is given"
            for name in mine
            if mine[name] != theirs[name]
        )


def _shown(value: str | tuple[str, ...]) -> str:
    return (value if isinstance(value, str) else " ".join(value)) or "(none)"


def check_name(name: str) -> str:
    """HBase allows no ``-`` in the id of a peer. Raises ValueError."""
    if not _NAME.match(name):
        raise ValueError(f"{name!r} is not 1 to 64 of A-Z a-z 0-9 _, as HBase needs it for the id of a peer")
    return name


def cluster_key(hosts: Iterable[str], name: str) -> str:
    """Where the peer finds its cluster. ``hosts``: of ZooKeeper, as ``HOST:PORT``."""
    pairs = [host.rpartition(":") for host in hosts]
    ports = {port for _, _, port in pairs}
    servers = ",".join(host for host, _, _ in pairs) if len(ports) == 1 else ",".join(f"{h}:{p}" for h, _, p in pairs)
    return f"{servers}:{pairs[0][2]}:{ROOT}/{name}"


def split_table(table: str) -> tuple[bytes, bytes]:
    """Namespace and qualifier."""
    namespace, _, qualifier = table.rpartition(":")
    return (namespace or _DEFAULT_NAMESPACE).encode(), qualifier.encode()


def table_of(name: Any) -> str:
    """As HBase's shell writes a TableName."""
    namespace, qualifier = name.namespace.decode(), name.qualifier.decode()
    return qualifier if namespace == _DEFAULT_NAMESPACE else f"{namespace}:{qualifier}"


# ---- the peer -------------------------------------------------------------------------------------------------------


def peer_of(definition: PeerDefinition, key: str) -> Any:
    """The ReplicationPeer to register."""
    peer = messages.new("ReplicationPeer", clusterkey=key, replicate_all=False, serial=True)
    for table in definition.tables:
        namespace, qualifier = split_table(table)
        one = peer.table_cfs.add(families=[family.encode() for family in definition.families])
        one.table_name.namespace, one.table_name.qualifier = namespace, qualifier
    return peer


def check_peer(name: str, peer: Any, definition: PeerDefinition, key: str) -> None:
    """Raises Unfit unless HBase ships to us what the definition says, and serially."""
    if not peer.clusterkey.endswith(f":{ROOT}/{name}"):
        raise Unfit(
            f"HBase has a peer {name} that is not ours: it ships to {peer.clusterkey}. Choose another name, or remove "
            f"it in HBase's shell: remove_peer '{name}'"
        )
    if not peer.serial:
        raise Unfit(
            f"the peer {name} is not serial, so changes of a region may come out of order ({_LOST}). In HBase's shell: "
            f"disable_peer '{name}'; set_peer_serial '{name}', true; enable_peer '{name}'"
        )
    if peer.clusterkey != key:
        raise Unfit(
            f"the peer {name} looks for us at {peer.clusterkey}, and --zookeeper makes that {key}: name the servers of "
            "ZooKeeper as in the first call"
        )
    wanted, found = _shipped(peer_of(definition, key)), _shipped(peer)
    if peer.replicate_all or wanted != found:
        shown = "all tables" if peer.replicate_all else _tables_shown(found)
        raise Unfit(
            f"the peer {name} ships {shown}, but the subscription needs {_tables_shown(wanted)}. It was changed: "
            f"set it back with set_peer_tableCFs in HBase's shell, or `logferry hbase remove {name}` and subscribe"
        )


def _shipped(peer: Any) -> dict[str, frozenset[str]]:
    return {table_of(one.table_name): frozenset(f.decode() for f in one.families) for one in peer.table_cfs}


def _tables_shown(tables: Mapping[str, frozenset[str]]) -> str:
    parts = (f"{table} ({' '.join(sorted(families))})" if families else table for table, families in tables.items())
    return ", ".join(sorted(parts)) or "no table"


# ---- its tables -----------------------------------------------------------------------------------------------------


def missing_tables(definition: PeerDefinition, schemas: Iterable[Any]) -> list[str]:
    """Those that HBase does not have. Raises Unfit, with the commands that mend it, unless HBase ships every wanted
    family of the others.
    """
    found = {table_of(schema.table_name): _scopes(schema) for schema in schemas}
    problems, missing = [], []
    for table in definition.tables:
        if table not in found:
            missing.append(table)
            continue
        scopes = found[table]
        for family in definition.families or scopes:
            if family not in scopes:
                problems.append(f"{table} has no family {family}, only {' '.join(scopes)}: correct --families")
            elif scopes[family] != "1":
                problems.append(
                    f"{table} does not ship its family {family} (REPLICATION_SCOPE is {scopes[family]}). In HBase's "
                    f"shell: alter '{table}', {{NAME => '{family}', REPLICATION_SCOPE => 1}}"
                )
    if problems:
        raise Unfit("\n  ".join(problems))
    return missing


def _scopes(schema: Any) -> dict[str, str]:
    """By family; HBase's default is 0."""
    return {
        family.name.decode(): next(
            (pair.second.decode() for pair in family.attributes if pair.first == b"REPLICATION_SCOPE"), "0"
        )
        for family in schema.column_families
    }
