"""A local HDFS for tests: a NameNode and its DataNodes, of the version that pyspark's client has."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from logferry.ops.cli.problems import Unavailable
from logferry.ops.runtime.jars import hdfs_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.processes import Child, free_ports, stop_all

_READY_S: Final = 90.0
_STOP_S: Final = 10.0
_LOOK_S: Final = 0.1
_NODE: Final = "org.apache.hadoop.hdfs.server"
NAME_NODE: Final = "namenode.NameNode"
DATA_NODE: Final = "datanode.DataNode"
_LIVE: Final = "jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"


class HdfsCluster:
    """``uri``: its root. ``web``: the NameNode's host and port of WebHDFS. The data are in ``folder``, a copy on each
    DataNode. The first one is `DATA_NODE`, the others have its name with a number from 2 on.
    """

    def __init__(self, folder: Path, data_nodes: int = 1) -> None:
        rpc, web, *ports = free_ports(2 + 3 * data_nodes)
        self.web = f"127.0.0.1:{web}"
        self.uri = f"hdfs://127.0.0.1:{rpc}"
        self._folder = folder
        settings = {
            "fs.defaultFS": self.uri,
            "dfs.namenode.name.dir": f"file://{folder}/name",
            "dfs.namenode.http-address": self.web,
            "dfs.namenode.rpc-bind-host": "127.0.0.1",
            "dfs.namenode.safemode.extension": "0",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.replication": str(data_nodes),
            "dfs.permissions.enabled": "false",
            "hadoop.tmp.dir": f"{folder}/tmp",
        }
        self._settings = settings
        self._data_ports: list[int] = []
        self._children = {NAME_NODE: self._node(NAME_NODE, folder, settings)}
        for number in range(data_nodes):
            name = DATA_NODE if not number else f"{DATA_NODE}{number + 1}"
            own = folder / f"data-node-{number + 1}"
            data, http, ipc = ports[3 * number : 3 * number + 3]
            self._data_ports += [data, http]
            addresses = {
                "dfs.datanode.data.dir": f"file://{own}/data",
                "dfs.datanode.address": f"127.0.0.1:{data}",
                "dfs.datanode.http.address": f"127.0.0.1:{http}",
                "dfs.datanode.ipc.address": f"127.0.0.1:{ipc}",
            }
            self._children[name] = self._node(name, own, {**settings, **addresses})

    def _node(self, name: str, folder: Path, settings: Mapping[str, str], *arguments: str) -> Child:
        lines = (f"<property><name>{key}</name><value>{value}</value></property>" for key, value in settings.items())
        text = f"<configuration>{''.join(lines)}</configuration>"
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("core-site.xml", "hdfs-site.xml"):
            (folder / file).write_text(text, encoding="utf-8")
        jars = os.pathsep.join([str(folder), *map(str, hdfs_jars())])
        java = [str(find_java().executable), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", jars]
        log = self._folder / f"{name.rpartition('.')[2].lower()}.log"
        return Child(name, [*java, f"{_NODE}.{name.rstrip('0123456789')}", *arguments], log)

    def __enter__(self) -> HdfsCluster:
        """Returns when files can be written. Raises Unavailable."""
        formatting = self._node(NAME_NODE, self._folder, self._settings, "-format", "-nonInteractive")
        formatting.start()
        if not formatting.wait_for_end(_READY_S) or formatting.exit_status:
            raise Unavailable(f"HDFS cannot be formatted:\n{formatting.log_tail()}")
        return self._started()

    def _started(self) -> HdfsCluster:
        for child in self._children.values():
            child.start()
        deadline = time.monotonic() + _READY_S
        while not self._has_data_nodes():
            ended = [child for child in self._children.values() if not child.running]
            if ended or time.monotonic() > deadline:
                self.__exit__()
                raise Unavailable(f"HDFS does not start:\n{(ended or list(self._children.values()))[0].log_tail()}")
            time.sleep(_LOOK_S)
        return self

    def __exit__(self, *_: object) -> None:
        stop_all(list(self._children.values()), _STOP_S)

    def kill(self, node: str) -> None:
        """SIGKILL to `NAME_NODE`, or to a DataNode."""
        self._children[node].send(signal.SIGKILL)

    def restart(self) -> None:
        """Starts what was killed, on its data and ports. Returns when files can be written. Raises Unavailable."""
        self._started()

    def _has_data_nodes(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.web}/{_LIVE}", timeout=5) as answer:
                beans = json.load(answer)["beans"]
        except (OSError, ValueError, KeyError):
            return False
        known = {"NumLiveDataNodes": len(self._children) - 1, "FSState": "Operational"}
        are_known = any(known.items() <= bean.items() for bean in beans)
        # The NameNode takes one that was killed for alive, for minutes.
        return are_known and all(_listens(port) for port in self._data_ports)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
