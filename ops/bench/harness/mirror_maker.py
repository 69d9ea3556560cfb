"""The compared mirrors as processes: ours, and MirrorMaker 2 with exactly-once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from logferry.ops.runtime.jars import mirror_maker_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.ports import free_ports
from logferry.ops.stack.processes import Child
from logferry.ops.stack.service_workers import ServiceWorker, Setting, configuration

_MM2: Final = """clusters = dc1, dc2
dc1.bootstrap.servers = {there}
dc2.bootstrap.servers = {here}
dc1->dc2.enabled = true
dc2->dc1.enabled = false
dc1->dc2.topics = {topics}
replication.policy.class = org.apache.kafka.connect.mirror.IdentityReplicationPolicy
replication.factor = 1
checkpoints.topic.replication.factor = 1
heartbeats.topic.replication.factor = 1
offset-syncs.topic.replication.factor = 1
offset.storage.replication.factor = 1
status.storage.replication.factor = 1
config.storage.replication.factor = 1
tasks.max = 4
dc2.exactly.once.source.support = enabled
dc1.exactly.once.source.support = enabled
dedicated.mode.enable.internal.rest = true
listeners = http://127.0.0.1:{port}
dc1.consumer.isolation.level = read_committed
dc1.consumer.auto.offset.reset = earliest
dc1.consumer.max.poll.records = 5000
dc2.producer.max.request.size = 16777216
refresh.topics.interval.seconds = 5
emit.heartbeats.enabled = false
"""


# The clusters there and here, the topics, and a folder.
MakeMirror = Callable[[KafkaCluster, KafkaCluster, str, Path], Child]


def our_mirror(there: KafkaCluster, here: KafkaCluster, topics: str, folder: Path) -> Child:
    """``topics``: a name without its data centre, or ``*`` for all."""
    port, file = free_ports(1)[0], folder / "mirror.toml"
    settings: dict[str, Setting] = {
        "dc": "dc2",
        "listen": f"127.0.0.1:{port}",
        "accept_weak_kafka": ["replication", "min-isr"],
        "remote": [{"dc": "dc1", "topics": [topics], "kafka": {"bootstrap_servers": there.bootstrap}}],
        "kafka": {"bootstrap_servers": here.bootstrap},
    }
    file.write_text(configuration(settings))
    return ServiceWorker("mirror", file, 0, port, folder / "mirror.log", "logferry.mirror").child


def mirror_maker(there: KafkaCluster, here: KafkaCluster, topics: str, folder: Path, heap: str = "1g") -> Child:
    """MirrorMaker 2 with the same topics."""
    port, file = free_ports(1)[0], folder / "mm2.properties"
    pattern = "dc1\\\\..*" if topics == "*" else f"dc1.{topics}"
    file.write_text(_MM2.format(there=there.bootstrap, here=here.bootstrap, topics=pattern, port=port))
    classpath = ":".join(map(str, mirror_maker_jars()))
    command = [str(find_java().executable), f"-Xmx{heap}", "-cp", classpath]
    return Child("mm2", [*command, "org.apache.kafka.connect.mirror.MirrorMaker", str(file)], folder / "mm2.log")
