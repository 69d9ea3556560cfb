"""Calls to HBase's active master: tables, and the peers of replication. And to the region server with hbase:meta.

Each call has a connection of its own: there are few. Peers are changed by procedures of HBase, which have ended when a
method here returns; one that was begun before an error may still be carried out, and calling again is safe.

hbase:meta has a row for each region, with the key TABLE,START,ID.ENCODED. and for serial peers the family
``rep_barrier``:

* ``seqnumDuringOpen``, in all its versions: the first sequence id after each opening of the region; after a split or
  merge also the one after its last;
* ``parent``: the names of the regions that it came out of, written with their last barrier before it is opened.
"""

from __future__ import annotations

import getpass
import re
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from logferry.client.hbase import frames, messages
from logferry.client.hbase.definition import Unfit, split_table
from logferry.client.hbase.frames import CallFailed
from logferry.client.hbase.messages import ForeignBytes
from logferry.client.hbase.zookeeper import Address, Unanswered

ENABLED = 0
_TIMEOUT_S = 30.0
_PROCEDURE_S = 120.0
# Calls of region servers wait for meta.
_META_TIMEOUT_S, _SCAN_S = 10.0, 30.0
_LOOK_S = 0.1
_NOT_FOUND, _RUNNING = 0, 1
_MOST_ANSWER_BYTES = 64 << 20
# What a master answers that starts, or stops.
_STARTING = ("PleaseHoldException", "ServerNotRunningYetException", "MasterNotRunningException")
# hbase:meta is one region, which has the same name everywhere.
_META_REGION, _REGION_NAME_TYPE = b"hbase:meta,,1", 1
_BARRIERS, _BARRIER, _PARENT = b"rep_barrier", b"seqnumDuringOpen", b"parent"
_ROWS, _ALL = 1000, (1 << 31) - 1
_LONG = struct.Struct(">q")
_REGION_NAME = re.compile(rb"\.([0-9a-f]{32})\.\Z")
# What a retry does not help against: there is no such family, or no right to read.
_UNREADABLE = ("NoSuchColumnFamilyException", "AccessDeniedException")


class HBaseMaster:
    """``find``: the address of the active master. The methods raise Unanswered, Unfit, and CallFailed where HBase
    refuses.
    """

    def __init__(self, find: Callable[[], Address]) -> None:
        self._find = find

    def tables(self, names: Iterable[str]) -> list[Any]:
        """The TableSchemas of those that exist."""
        request = messages.new("GetTableDescriptorsRequest")
        for name in names:
            namespace, qualifier = split_table(name)
            request.table_names.add(namespace=namespace, qualifier=qualifier)
        return list(self._call("GetTableDescriptors", request, "GetTableDescriptorsResponse").table_schema)

    def peers(self) -> dict[str, Any]:
        """The ReplicationPeerDescriptions by their ids."""
        found = self._call(
            "ListReplicationPeers", messages.new("ListReplicationPeersRequest"), "ListReplicationPeersResponse"
        )
        return {one.id: one for one in found.peer_desc}

    def add_peer(self, name: str, peer: Any) -> None:
        request = messages.new(
            "AddReplicationPeerRequest", peer_id=name, peer_config=peer, peer_state={"state": ENABLED}
        )
        self._procedure("AddReplicationPeer", request)

    def enable_peer(self, name: str) -> None:
        self._procedure("EnableReplicationPeer", messages.new("PeerRequest", peer_id=name))

    def disable_peer(self, name: str) -> None:
        self._procedure("DisableReplicationPeer", messages.new("PeerRequest", peer_id=name))

    def remove_peer(self, name: str) -> None:
        self._procedure("RemoveReplicationPeer", messages.new("PeerRequest", peer_id=name))

    def _procedure(self, method: str, request: Any) -> None:
        number = self._call(method, request, "ProcedureStarted").proc_id
        deadline = time.monotonic() + _PROCEDURE_S
        asked = messages.new("ProcedureResultRequest", proc_id=number)
        while (found := self._call("getProcedureResult", asked, "ProcedureResult")).state == _RUNNING:
            if time.monotonic() > deadline:
                raise Unanswered(f"{method} of HBase takes more than {_PROCEDURE_S:.0f} s: see its master's log")
            time.sleep(_LOOK_S)
        if found.state == _NOT_FOUND:  # it is kept for minutes after its end
            raise Unanswered(f"the master of HBase does not know the {method} that it began; try again")
        if found.HasField("exception"):
            problem = found.exception.generic_exception
            raise CallFailed(problem.class_name, problem.message)

    def _call(self, method: str, request: Any, answer: str) -> Any:
        at = self._find()
        who = f"the master of HBase at {at.host}:{at.port}"
        try:
            with _Link(at, who, "MasterService", _TIMEOUT_S) as link:
                return link.call(method, request, answer)
        except CallFailed as error:
            if "AccessDenied" in error.kind:
                raise Unfit(
                    f"HBase refuses {method}: {error}. Kerberos is not supported; the user "
                    f"{_user()} needs the right to administer HBase"
                ) from None
            if error.kind.endswith(_STARTING):
                raise Unanswered(f"{who} starts: {error}") from None
            raise


# ---- hbase:meta -----------------------------------------------------------------------------------------------------


class ParentRegion(NamedTuple):
    """A region that was split or merged. ``opened``: the barrier of its last opening. ``end``: that after its last
    edit.
    """

    region: str
    opened: int
    end: int


class HBaseMeta:
    """``find``: the address of the region server that has hbase:meta."""

    def __init__(self, find: Callable[[], Address]) -> None:
        self._find = find

    def parents(self, table: str) -> dict[str, tuple[ParentRegion, ...]]:
        """Of each region of the table that meta knows, those parents that have barriers. Raises Unanswered, and
        CallFailed where HBase will not show them.
        """
        name = table.encode()
        # In the order of meta, by table, start and id: a longer name continues with a byte above " ".
        scan = {"column": [{"family": _BARRIERS}], "start_row": name + b",,", "stop_row": name + b" ,,"}
        region = {"type": _REGION_NAME_TYPE, "value": _META_REGION}
        asked = messages.new("ScanRequest", region=region, scan={**scan, "max_versions": _ALL}, number_of_rows=_ROWS)
        at = self._find()
        who = f"the region server {at.host}:{at.port}, which has hbase:meta,"
        cells: list[Any] = []
        try:
            with _Link(at, who, "ClientService", _META_TIMEOUT_S) as link:
                deadline = time.monotonic() + _SCAN_S
                while True:
                    found = link.call("Scan", asked, "ScanResponse")
                    cells += (cell for result in found.results for cell in result.cell)
                    flags = ("more_results", "more_results_in_region")
                    if any(found.HasField(flag) and not getattr(found, flag) for flag in flags):
                        return parents_of(cells)
                    if time.monotonic() > deadline:
                        raise Unanswered(f"{who} does not end a scan of it")
                    asked = messages.new("ScanRequest", scanner_id=found.scanner_id, number_of_rows=_ROWS)
        except CallFailed as error:
            if error.kind.endswith(_UNREADABLE):
                raise
            raise Unanswered(f"{who} refuses a scan of it: {error}") from None
        except ForeignBytes as error:
            raise Unanswered(f"{who} gave barriers that cannot be read: {error}") from None


def parents_of(cells: Iterable[Any]) -> dict[str, tuple[ParentRegion, ...]]:
    """As `HBaseMeta.parents`, from the cells of the family. Raises ForeignBytes."""
    barriers: dict[str, list[int]] = {}
    names: dict[str, list[str]] = {}
    for cell in cells:
        region = _encoded(cell.row)
        names.setdefault(region, [])
        if cell.qualifier == _BARRIER:
            if len(cell.value) != _LONG.size:
                raise ForeignBytes(f"a barrier of {len(cell.value)} bytes")
            barriers.setdefault(region, []).append(_LONG.unpack(cell.value)[0])
        elif cell.qualifier == _PARENT:
            names[region] = [_encoded(name) for name in _joined_names(cell.value)]
    return {
        region: tuple(
            ParentRegion(parent, ordered[-2] if len(ordered) > 1 else ordered[-1], ordered[-1])
            for parent in parents
            if (ordered := sorted(barriers.get(parent, ())))
        )
        for region, parents in names.items()
    }


def _joined_names(value: bytes) -> list[bytes]:
    """FF 00 is between two names, FF FF stands for FF in a name."""
    found, name, at = [], bytearray(), 0
    while at < len(value):
        if value[at] != 0xFF:
            name.append(value[at])
            at += 1
            continue
        if value[at + 1 : at + 2] == b"\xff":
            name.append(0xFF)
        else:
            found.append(bytes(name))
            name.clear()
        at += 2
    return [*found, bytes(name)] if value else []


def _encoded(name: bytes) -> str:
    """The encoded name of the region. Raises ForeignBytes."""
    found = _REGION_NAME.search(name)
    if found is None:
        raise ForeignBytes(f"{name!r} is no name of a region")
    return found[1].decode()


# ---- a connection ---------------------------------------------------------------------------------------------------


class _Link:
    """To a service of HBase. ``who``: for messages. Raises Unanswered."""

    def __init__(self, at: Address, who: str, service: str, timeout_s: float) -> None:
        self._who, self._calls = who, 0
        self._opening = frames.opening(service, _user())
        try:
            self._link = socket.create_connection(at, timeout_s)
        except OSError as error:
            raise self._unanswered(error) from None
        self._stream = self._link.makefile("rb")

    def __enter__(self) -> _Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._link.close()

    def call(self, method: str, request: Any, answer: str) -> Any:
        """Raises Unanswered, CallFailed."""
        self._calls += 1
        try:
            self._link.sendall(self._opening + frames.request(self._calls, method, request))
            self._opening = b""
            (size,) = frames.LENGTH.unpack(_exactly(self._stream, frames.LENGTH.size))
            if not 0 < size <= _MOST_ANSWER_BYTES:
                raise ForeignBytes(f"an answer of {size} bytes")
            return frames.reply_of(memoryview(_exactly(self._stream, size)), answer)
        except (OSError, ForeignBytes) as error:
            raise self._unanswered(error) from None

    def _unanswered(self, error: Exception) -> Unanswered:
        return Unanswered(f"{self._who} does not answer: {error}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the process has a number for a user, and no name
        return "logferry"


def _exactly(stream: Any, size: int) -> bytes:
    data: bytes = stream.read(size)
    if len(data) < size:
        raise ForeignBytes(
            f"it closed the connection after {len(data)} of {size} bytes. It does so where HBase wants Kerberos, "
            "which is not supported"
        )
    return data
