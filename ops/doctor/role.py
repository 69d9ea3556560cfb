"""The roles of a host, by their configuration files: what each of them connects to, reads and writes.

A file is read by the code of the service itself, so what passes here is what the service takes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

from logferry.gateway.access.settings import TokenSettings
from logferry.gateway.config import ConfigError, KafkaSettings, ServiceConfig, Tls
from logferry.gateway.service.preflight import LaneSettings

ROLES: Final = ("gateway", "mirror", "deliver", "keeper", "load", "audit", "push")


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


class Check(NamedTuple):
    """One check: its area, what was checked, the result, and what the operator does about it."""

    area: str
    subject: str
    state: State
    text: str
    remedy: str = ""


class TopicRights(NamedTuple):
    """Operations on all topics that begin with ``name`` or match it, or on that one alone; ``optional`` ones for
    ``why``. ``chosen``: on those that it chooses; ``name`` describes them. ``may_lack``: it need not be there."""

    name: str
    is_prefix: bool
    operations: tuple[str, ...]
    optional: tuple[str, ...] = ()
    why: str = ""
    chosen: Callable[[str], bool] | None = None
    may_lack: bool = False

    @property
    def is_one(self) -> bool:
        return not self.is_prefix and self.chosen is None

    def takes(self, topic: str) -> bool:
        """``name`` of a loader is a pattern, as in `dc1.nginx` or `*.nginx`."""
        if self.chosen is not None:
            return self.chosen(topic)
        if self.is_prefix and self.name.endswith("."):
            return topic.startswith(self.name)
        return topic == self.name or (self.is_prefix and "." in topic and fnmatchcase(topic, self.name))


@dataclass(frozen=True)
class Cluster:
    """A Kafka that the role uses. ``service``: its state topic is there; ``durable``: prefixes that it writes.

    ``operations``: on the cluster. ``asked_groups``: whose offsets are read. ``log``: a topic of its own that keeps
    every record, written under ``transactional_id``; ``accepted``: what it may lack.
    """

    label: str
    kafka: KafkaSettings
    needs: tuple[TopicRights, ...]
    service: LaneSettings | None = None
    group: str | None = None
    durable: tuple[str, ...] = ()
    reads_time: bool = False
    operations: tuple[str, ...] = ()
    asked_groups: tuple[str, ...] = ()
    log: str | None = None
    transactional_id: str | None = None
    accepted: Sequence[str] = ()


class Endpoint(NamedTuple):
    """A gateway, or another worker, that the role calls."""

    url: str
    ca_file: str | None


@dataclass(frozen=True)
class Role:
    name: str
    clusters: Sequence[Cluster] = ()
    gateways: Sequence[Endpoint] = ()
    tls: Tls | None = None
    host: str | None = None  # under which others reach it
    folders: Sequence[tuple[str, Path]] = ()
    secrets: Sequence[Path] = field(default=())
    tokens: Sequence[TokenSettings] = ()
    worker_key: Path | None = None
    needs_java: bool = False


class Unreadable(Exception):
    """The configuration cannot be used; the text is that of the service."""


def read_role(name: str, path: Path) -> Role:
    """Raises Unreadable."""
    try:
        return {"gateway": _gateway, "mirror": _mirror, "deliver": _deliver, "keeper": _keeper, "load": _load,
                "audit": _audit, "push": _push}[name](path)  # fmt: skip
    except ConfigError as error:
        raise Unreadable(str(error)) from None
    except ModuleNotFoundError as error:
        raise Unreadable(f"{path}: {error.name} is not installed here: {name} does not run on this host") from None


_DATA: Final = ("READ", "WRITE", "DESCRIBE_CONFIGS")
_COPY: Final = ("READ", "DESCRIBE_CONFIGS")


def _service(config: ServiceConfig, clusters: Sequence[Cluster], **more: Any) -> Role:
    secrets = [path for cluster in clusters for path in _secrets(cluster.kafka)]
    if config.tls is not None:
        secrets.append(config.tls.key)
    if config.worker_key_file is not None:
        secrets.append(config.worker_key_file)
    host = config.advertised_host or config.host
    more |= {"secrets": secrets, "tokens": config.tokens, "worker_key": config.worker_key_file}
    return Role(config.service, clusters, tls=config.tls, host=host, **more)


def _own_topics(state_topic: str) -> tuple[TopicRights, ...]:
    log = TopicRights(
        "__transaction_state", False, ("DESCRIBE", "DESCRIBE_CONFIGS"), ("READ",), "completes hanging transactions"
    )
    return TopicRights(state_topic, False, _DATA), log


def _number_of_lanes(config: ServiceConfig) -> TopicRights:
    return TopicRights(f"{config.group}.lanes", False, ("READ",), may_lack=True)


def _gateway(path: Path) -> Role:
    from logferry.gateway.config import load

    config = load(path)
    own, copies = f"{config.dc}.", [TopicRights(f"{dc}.", True, _COPY) for dc in config.data_centres]
    data = TopicRights(own, True, _DATA, ("ALTER",), "grows topics over HTTP")
    needs = (data, *_own_topics(config.state_topic), _number_of_lanes(config), *copies)
    cluster = Cluster("kafka", config.kafka, needs, config, config.group, (own,), reads_time=True)
    return _service(config, [cluster])


def _mirror(path: Path) -> Role:
    from logferry.mirror.config import load

    config = load(path)
    taken = sorted({f"{dc}." for remote in config.remotes for dc in remote.taken})
    settings = ("ALTER_CONFIGS",) if config.carry_settings else ()
    copies = [TopicRights(name, True, (*_DATA, "ALTER", *settings)) for name in taken]
    local = (
        *copies,
        *_own_topics(config.state_topic),
        _number_of_lanes(config),
        TopicRights(config.history_topic, False, _DATA, ("DELETE",), "bounds its size"),
    )
    clusters = [Cluster("kafka", config.kafka, local, config, config.group)]
    for remote in config.remotes:
        remote_needs = tuple(TopicRights(f"{dc}.", True, _COPY) for dc in remote.taken)
        remote_needs += tuple(TopicRights(name, False, _COPY) for name in remote.renamed)
        clusters.append(Cluster(f"remote {remote.dc}", remote.kafka, remote_needs))
    return _service(config, clusters)


def _deliver(path: Path) -> Role:
    from logferry.gateway.delivery.config import load

    config = load(path)
    data = [TopicRights(f"{dc}.", True, _COPY) for dc in sorted(config.known_dcs)]
    needs = (*data, *_own_topics(config.state_topic), TopicRights(config.subscriptions_topic, False, _DATA))
    folders = [] if config.secrets_dir is None else [("secrets_dir", config.secrets_dir)]
    return _service(config, [Cluster("kafka", config.kafka, needs, config, config.group)], folders=folders)


def _keeper(path: Path) -> Role:
    """Without `act` it describes only; with it, also the log, the group, and what its acts need."""
    from logferry.gateway.topics.compacted_store import subscriptions_topic
    from logferry.ops.keeper.config import load

    config = load(path)
    seen = ("DESCRIBE", "DESCRIBE_CONFIGS")
    needs, delivered = [TopicRights("*", False, seen, chosen=lambda _: True)], f"{config.prefix}.deliver.{config.dc}"
    more: dict[str, Any] = {"operations": seen}
    if config.act:
        needs[0] = needs[0]._replace(operations=(*seen, "ALTER_CONFIGS"))
        needs.append(TopicRights(config.log_topic, False, ("READ", "WRITE")))
        if config.deletion.policies:
            may_lose = TopicRights("of deletion.policies", False, ("DELETE",))
            needs.append(may_lose._replace(chosen=lambda topic: config.policy(topic) is not None))
        more = {"operations": (*seen, "ALTER", "ALTER_CONFIGS"), "group": config.group, "log": config.log_topic}
        more |= {"transactional_id": f"{config.log_topic}.act", "accepted": config.accept_weak_kafka}
    if any(reader.deliver is not None for reader in config.readers):
        names = f"{delivered}.state", subscriptions_topic(config.prefix, config.dc)
        needs += [TopicRights(name, False, ("READ",)) for name in names]
    consumers = tuple(reader.consumer for reader in config.readers if reader.consumer is not None)
    cluster = Cluster("kafka", config.kafka, tuple(needs), reads_time=True, asked_groups=consumers, **more)
    role = _service(config, [cluster], gateways=[Endpoint(one.mirror, None) for one in config.readers if one.mirror])
    tokens = [Path(reader.token_file) for reader in config.readers if reader.token_file]
    return replace(role, secrets=[*role.secrets, *tokens])


def _load(path: Path) -> Role:
    from logferry.loaders.config import load_config
    from logferry.loaders.errors import LoaderConfigError

    try:
        config = load_config(path)
    except LoaderConfigError as error:
        raise Unreadable(str(error)) from None
    patterns = sorted({pattern for table in config.tables for pattern in table.topics})
    clusters = [Cluster("kafka", config.kafka, tuple(TopicRights(pattern, True, _COPY) for pattern in patterns))]
    clusters += [Cluster(f"other_kafka {dc}", kafka, ()) for dc, kafka in config.other_kafka.items()]
    called: list[Any] = [*config.gateways.values(), *([config.report] if config.report else [])]
    gateways = [Endpoint(url, str(one.ca_file) if one.ca_file else None) for one in called for url in one.urls]
    folders = [("tables", Path(str(table.path)).parent) for table in config.tables if "://" not in str(table.path)]
    if config.spark.scratch is not None:
        folders.append(("spark.scratch", config.spark.scratch))
    secrets = [path for one in clusters for path in _secrets(one.kafka)]
    secrets += [one.token_file for one in called if one.token_file]
    secrets += [path for path in (config.s3.secret_key_file, config.s3.session_token_file) if path]
    return Role("load", clusters, gateways, folders=folders, secrets=secrets, needs_java=True)


def _audit(path: Path) -> Role:
    from logferry.gateway.config import load_as
    from logferry.ops.audit.config import AuditConfig

    config = load_as(AuditConfig, path)
    names = [f"{config.dc}."] if config.dc else []
    clusters = [Cluster("kafka", config.kafka, tuple(TopicRights(name, True, ("READ",)) for name in names))]
    clusters += [Cluster(f"copy {one.dc}", one.kafka, ()) for one in config.copies]
    return Role("audit", clusters, secrets=[path for one in clusters for path in _secrets(one.kafka)])


def _push(path: Path) -> Role:
    from logferry.client.agent.config import parse

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = parse(["--config", str(path)])
    except SystemExit:
        raise Unreadable(said.getvalue().strip().rpartition("error: ")[2] or f"{path} cannot be used") from None
    gateways = [Endpoint(url, config.tls.ca_file) for centre in config.data_centres for url in centre.urls]
    secrets = [Path(centre.token_file) for centre in config.data_centres if centre.token_file]
    return Role("push", gateways=gateways, folders=[("state_dir", Path(config.state_dir))], secrets=secrets)


def _secrets(kafka: KafkaSettings) -> list[Path]:
    return [path for path in (kafka.sasl_password_file, kafka.sasl_token_file, kafka.key_file) if path is not None]
