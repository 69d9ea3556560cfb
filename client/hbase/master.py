"""Calls to HBase's active master: tables, and the peers of replication.

Each call has a connection of its own: there are few. Peers are changed by procedures of HBase, which have ended when a
method here returns; one that was begun before an error may still be carried out, and calling again is safe.
"""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from logferry.client.hbase import frames, messages
from logferry.client.hbase.definition import Unfit, split_table
from logferry.client.hbase.frames import CallFailed
from logferry.client.hbase.messages import ForeignBytes
from logferry.client.hbase.zookeeper import Address, Unanswered

ENABLED = 0
_TIMEOUT_S = 30.0
_PROCEDURE_S = 120.0
_LOOK_S = 0.1
_NOT_FOUND, _RUNNING = 0, 1
_MOST_ANSWER_BYTES = 64 << 20
# What a master answers that starts, or stops.
_STARTING = ("PleaseHoldException", "ServerNotRunningYetException", "MasterNotRunningException")


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
        try:
            with socket.create_connection(at, _TIMEOUT_S) as link, link.makefile("rb") as stream:
                link.sendall(frames.opening("MasterService", _user()) + frames.request(1, method, request))
                (size,) = frames.LENGTH.unpack(_exactly(stream, frames.LENGTH.size))
                if not 0 < size <= _MOST_ANSWER_BYTES:
                    raise ForeignBytes(f"an answer of {size} bytes")
                return frames.reply_of(memoryview(_exactly(stream, size)), answer)
        except (OSError, ForeignBytes) as error:
            raise Unanswered(f"the master of HBase at {at.host}:{at.port} does not answer: {error}") from None
        except CallFailed as error:
            if "AccessDenied" in error.kind:
                raise Unfit(
                    f"HBase refuses {method}: {error}. Kerberos is not supported; the user "
                    f"{_user()} needs the right to administer HBase"
                ) from None
            if error.kind.endswith(_STARTING):
                raise Unanswered(f"the master of HBase at {at.host}:{at.port} starts: {error}") from None
            raise


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
