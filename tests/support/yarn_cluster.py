"""A YARN of one node for tests: ResourceManager and NodeManager, real ones, on loopback."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Final

from logferry.ops.cli.problems import Unavailable
from logferry.ops.runtime.jars import yarn_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.processes import Child, free_ports, stop_all

_READY_S: Final = 90.0
_STOP_S: Final = 10.0
_NODES: Final = "jmx?qry=Hadoop:service=ResourceManager,name=ClusterMetrics"
_SERVER: Final = "org.apache.hadoop.yarn.server"
# Of the web server's libraries, which are older than Java 17.
_OPEN: Final = ("--add-opens=java.base/java.lang=ALL-UNNAMED", "--add-opens=java.base/java.net=ALL-UNNAMED")


class YarnCluster:
    """``folder``: HADOOP_CONF_DIR of its clients, and its data. Files are those of ``default_fs``."""

    def __init__(self, folder: Path, default_fs: str) -> None:
        ports = iter(free_ports(8))
        self.folder = folder
        rm = {name: f"127.0.0.1:{next(ports)}" for name in ("", "scheduler.", "resource-tracker.", "admin.", "webapp.")}
        nm = {name: f"127.0.0.1:{next(ports)}" for name in ("", "localizer.", "webapp.")}
        self._web = rm["webapp."]
        yarn = {
            **{f"yarn.resourcemanager.{name}address": at for name, at in rm.items()},
            **{f"yarn.nodemanager.{name}address": at for name, at in nm.items()},
            "yarn.resourcemanager.hostname": "127.0.0.1",
            "yarn.nodemanager.hostname": "127.0.0.1",
            "yarn.resourcemanager.scheduler.class": f"{_SERVER}.resourcemanager.scheduler.fifo.FifoScheduler",
            "yarn.resourcemanager.am.max-attempts": "2",
            "yarn.scheduler.minimum-allocation-mb": "256",
            "yarn.nodemanager.resource.memory-mb": "4096",
            "yarn.nodemanager.resource.cpu-vcores": "4",
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.local-dirs": str(folder / "local"),
            "yarn.nodemanager.log-dirs": str(folder / "logs"),
            "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
        }
        folder.mkdir(parents=True, exist_ok=True)
        core = {"fs.defaultFS": default_fs, "hadoop.tmp.dir": str(folder / "tmp"), "dfs.replication": "1"}
        for name, settings in (("core", core), ("yarn", yarn)):
            lines = (
                f"<property><name>{key}</name><value>{value}</value></property>" for key, value in settings.items()
            )
            (folder / f"{name}-site.xml").write_text(f"<configuration>{''.join(lines)}</configuration>")
        self._children = [self._server("resourcemanager.ResourceManager"), self._server("nodemanager.NodeManager")]

    def _server(self, name: str) -> Child:
        jars = os.pathsep.join([str(self.folder), *map(str, yarn_jars())])
        java = [str(find_java().executable), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *_OPEN]
        log = self.folder / f"{name.rpartition('.')[2].lower()}.log"
        env = {**os.environ, "JAVA_HOME": str(find_java().home)}
        return Child(name, [*java, "-cp", jars, f"{_SERVER}.{name}"], log, env)

    def __enter__(self) -> YarnCluster:
        """Returns when the node takes containers. Raises Unavailable."""
        for child in self._children:
            child.start()
        deadline = time.monotonic() + _READY_S
        while not self._has_node():
            ended = [child for child in self._children if not child.running]
            if ended or time.monotonic() > deadline:
                self.__exit__()
                raise Unavailable(f"YARN does not start:\n{(ended or self._children)[0].log_tail()}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        stop_all(self._children, _STOP_S)

    def logs(self) -> str:
        """What all containers printed."""
        files = sorted((self.folder / "logs").glob("*/*/std*"))
        return "\n".join(f"{file}:\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def _has_node(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._web}/{_NODES}", timeout=5) as answer:
                beans = json.load(answer)["beans"]
        except (OSError, ValueError, KeyError):
            return False
        return any(bean.get("NumActiveNMs") == 1 for bean in beans)
