"""ZooKeeper: where HBase and its master are, the subscriptions, and the connectors that serve them.

``/logferry/hbase/NAME`` looks like a cluster to HBase: ``hbaseid``, and under ``rs`` an ephemeral node for each
connector, as ``HOST,PORT,STARTCODE``. ``subscription`` beside them holds the definition.

An ephemeral node ends with its session: HBase then ships to the other connectors. `Registry.announce` is to be called
again when `changed` was set, and creates what is missing.
"""

from __future__ import annotations

import struct
import threading
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError, NotEmptyError
from kazoo.handlers.threading import KazooTimeoutError
from logferry.client.hbase import messages
from logferry.client.hbase.definition import ROOT, PeerDefinition, Unfit
from logferry.client.hbase.messages import ForeignBytes

_CONNECT_S = 15.0
_SESSION_S = 10.0
_DEFAULT_PORT = 2181
# HBase writes before its data: this byte, a length, and the id of the process.
_HBASE_MARK = 0xFF
_PROTOBUF_MARK = b"PBUF"


class Unanswered(Exception):
    """A service that is needed does not answer; the text says which."""


class Address(NamedTuple):
    host: str
    port: int


class Registry:
    """One session of ZooKeeper. ``hosts``: ``HOST:PORT`` each. ``hbase``: the folder of HBase. The methods raise
    Unanswered. ``changed``: the session, or a peer that is watched; ``peer_changed``: that, until it is watched again.
    """

    def __init__(self, hosts: Iterable[str], hbase: str = "/hbase") -> None:
        self.hosts = [host if ":" in host else f"{host}:{_DEFAULT_PORT}" for host in hosts]
        self._hbase = hbase.rstrip("/")
        self._zookeeper = KazooClient(",".join(self.hosts), timeout=_SESSION_S)
        self.changed = threading.Event()
        self.peer_changed = threading.Event()
        self._is_lost = False

    def __enter__(self) -> Registry:
        self._zookeeper.add_listener(self._listen)
        try:
            self._zookeeper.start(_CONNECT_S)
        except (KazooTimeoutError, KazooException, OSError) as error:
            self._zookeeper.close()
            raise Unanswered(f"no ZooKeeper answers at {','.join(self.hosts)}: {error}; check --zookeeper") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._zookeeper.stop()
        self._zookeeper.close()

    @property
    def is_connected(self) -> bool:
        return bool(self._zookeeper.connected)

    def _listen(self, state: str) -> None:
        """In a thread of the client, which must not wait."""
        if state == KazooState.LOST:
            self._is_lost = True
        self.changed.set()

    # ---- HBase -------------------------------------------------------------------------------------------------------

    def cluster_id(self) -> str:
        """HBase's own id."""
        data = self._of_hbase("hbaseid")
        if data.startswith(_PROTOBUF_MARK):
            return str(messages.parse("ClusterId", data[len(_PROTOBUF_MARK) :]).cluster_id)
        return data.decode("ascii", "replace")

    def master(self) -> Address:
        """The active master."""
        return self._server("master", "ActiveMaster", "master")

    def meta(self) -> Address:
        """The region server that has hbase:meta."""
        return self._server("meta-region-server", "MetaRegionServer", "server")

    def _server(self, name: str, message: str, field: str) -> Address:
        data = self._of_hbase(name)
        try:
            found = getattr(messages.parse(message, data.removeprefix(_PROTOBUF_MARK)), field)
        except ForeignBytes as error:
            raise Unanswered(f"{self._hbase}/{name} of ZooKeeper cannot be read: {error}") from None
        return Address(found.host_name, found.port)

    def watch_peer(self, name: str) -> None:
        """Sets `peer_changed` when HBase changes the peer from now on; not where it keeps its peers in files."""
        self.peer_changed.clear()
        self._try("get", f"{self._hbase}/replication/peers/{name}", watch=self._peer_is_changed)

    def _peer_is_changed(self, event: Any) -> None:
        """In a thread of the client, also when a session ends."""
        self.peer_changed.set()
        self.changed.set()

    def hbase_children(self, name: str) -> list[str]:
        return self._children(f"{self._hbase}/{name}")

    def hbase_data(self, name: str) -> bytes | None:
        """Without what HBase writes before it; None: there is no such node."""
        data = self._get(f"{self._hbase}/{name}")
        if data is not None and data[:1] == bytes([_HBASE_MARK]) and len(data) >= 5:
            return data[5 + struct.unpack_from(">i", data, 1)[0] :]
        return data

    def _of_hbase(self, name: str) -> bytes:
        path = f"{self._hbase}/{name}"
        data = self.hbase_data(name)
        if data is None:
            why = f"ZooKeeper at {','.join(self.hosts)} has no {path}"
            raise Unanswered(f"{why}: HBase does not run, or its folder is another one (--hbase-folder)")
        return data

    # ---- subscriptions ----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return sorted(self._children(ROOT))

    def definition(self, name: str) -> PeerDefinition | None:
        """Raises Unfit for one that cannot be read."""
        path = f"{ROOT}/{name}/subscription"
        data = self._get(path)
        return None if data is None else PeerDefinition.unpacked(data, f"{path} of ZooKeeper")

    def define(self, name: str, definition: PeerDefinition) -> None:
        """Stores the definition of a new subscription. Raises Unfit where another one is stored, or where another
        subscription writes its topic: what is filtered differently would look like duplicates.
        """
        self._check_topic(name, definition.topic)
        found = self.definition(name)
        if found is None:
            self._create(f"{ROOT}/{name}/subscription", definition.packed())
            found = self.definition(name)
            try:
                self._check_topic(name, definition.topic)
            except Unfit:  # another one was stored at the same time
                self.remove(name)
                raise
        if found is not None and found != definition:
            raise Unfit(
                f"the subscription {name} has another definition ({found.differences(definition)}): use the same "
                f"options, or `logferry hbase remove {name}` first"
            )

    def _check_topic(self, name: str, topic: str) -> None:
        for other in self.names():
            if other != name and (there := self.definition(other)) and there.topic == topic:
                raise Unfit(f"the subscription {other} writes the topic {topic}: choose another topic")

    def remove(self, name: str) -> None:
        """Also with connectors that are still announced: they end by themselves."""
        self._remove(f"{ROOT}/{name}")

    # ---- connectors -------------------------------------------------------------------------------------------------

    def connectors(self, name: str) -> list[str]:
        """As ``HOST:PORT``."""
        return sorted(":".join(node.split(",")[:2]) for node in self._children(f"{ROOT}/{name}/rs"))

    def notes(self, name: str) -> dict[str, bytes]:
        """What each connector has noted, by HOST:PORT."""
        nodes = self._children(f"{ROOT}/{name}/rs")
        found = {":".join(node.split(",")[:2]): self._get(f"{ROOT}/{name}/rs/{node}") for node in nodes}
        return {connector: note for connector, note in sorted(found.items()) if note is not None}

    def note(self, name: str, node: str, data: bytes) -> None:
        """HBase does not read what a node holds."""
        self._try("set", f"{ROOT}/{name}/rs/{node}", data)

    def announce(self, name: str, node: str) -> bool:
        """Creates what is missing of the cluster that HBase looks for; True: the node was missing. ``node``:
        ``HOST,PORT,STARTCODE``.
        """
        self._create(f"{ROOT}/{name}/hbaseid", str(uuid.uuid4()).encode())
        path = f"{ROOT}/{name}/rs/{node}"
        stat = self._try("exists", path)
        if stat is not None and not self._is_lost:
            return False
        if stat is not None:  # of the session before this one
            self._try("delete", path)
        self._is_lost = False
        self._try("create", path, b"", ephemeral=True, makepath=True)
        return True

    def withdraw(self, name: str, node: str) -> None:
        if self.is_connected:
            self._try("delete", f"{ROOT}/{name}/rs/{node}")

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def _get(self, path: str) -> bytes | None:
        found = self._try("get", path)
        return None if found is None else bytes(found[0])

    def _children(self, path: str) -> list[str]:
        return self._try("get_children", path) or []

    def _create(self, path: str, data: bytes) -> None:
        self._try("create", path, data, makepath=True)

    def _remove(self, path: str) -> None:
        for name in self._children(path):
            self._remove(f"{path}/{name}")
        self._try("delete", path)

    def _try(self, do: str, *arguments: Any, **options: Any) -> Any:
        """A call of the client by its name, bounded in time. None where the node is missing, or is there already."""
        try:
            return getattr(self._zookeeper, f"{do}_async")(*arguments, **options).get(timeout=_CONNECT_S)
        except (NoNodeError, NodeExistsError, NotEmptyError):
            return None
        except (KazooException, KazooTimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise Unanswered(f"ZooKeeper at {','.join(self.hosts)} does not answer: {why}") from None
