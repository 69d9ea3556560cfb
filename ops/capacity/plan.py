"""What a company's rate takes, with one data centre lost at the peak. Pure.

The unit costs are those that `ops/docs/operations/sizing.md` lists with their circumstances: two shared cores, one
broker, no TLS. Rates are bytes of chunk data before compression. TB, GB and MB are decimal, KiB is 1,024 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

# Measured: processor seconds for a gigabyte, for a request, for a transaction.
WRITE_S_GB: Final = 4.6
READ_S_GB: Final = 1.7
REQUEST_S: Final = 80e-6
BROKER_S_GB: Final = 2.8
TRANSACTION_S: Final = 0.0023
MIRROR_S_GB: Final = 1.05
# Measured rates in MB/s: a lane, a core of Spark by parser, a core of the audit, one file that is followed.
LANE_MB: Final = 26
LOADER_MB: Final = {"access": 8.5, "lines": 26.0}
AUDIT_MB: Final = 64
FILE_MB: Final = 10
# Commits of a lane that is always busy, in a second, and its bytes in the state topic for two days.
COMMITS: Final = 50
STATE_GB: Final = 0.67
# Planning: gzip and TLS double the gateway's cost; a process is loaded to 60 %; disks are filled to 70 %, links and
# network cards to 80 %; disks of Kafka read twice of what they write while a reader catches up.
DOUBLED: Final = 2
LOAD: Final = 0.6
FULL: Final = 0.7
LINK: Final = 0.8
CATCH_UP: Final = 3
# Up to here it was measured, or the guide plans with it.
MOST_PARTITIONS: Final = 10_000
MOST_SOURCES: Final = 100_000
MOST_CONNECTIONS: Final = 20_000
GENERATIONS: Final = 15  # of a file that is rotated daily, until its source expires
CLIENT_CONNECTIONS: Final = 5
DAY_S: Final = 86_400
HOUR_S: Final = 3_600


@dataclass(frozen=True)
class Site:
    """The figures of a company. Raises ValueError, naming the option and its bounds."""

    tb_per_day: float
    peak_factor: float = 2.0
    data_centres: int = 2
    copies: int = 2
    outage_h: float = 8.0
    retention_days: float = 3.0
    readers: float = 1.0
    request_kib: float = 64.0
    replicas: int = 3
    stored_ratio: float = 0.25
    hosts: int = 10_000
    files: int = 4
    parser: str = "access"
    cores: int = 16
    disk_tb: float = 10.0
    disk_mb: float = 500.0
    nic_gbit: float = 10.0
    link_gbit: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, name = getattr(self, field.name), "--" + field.name.replace("_", "-")
            if field.name == "parser":
                if value not in LOADER_MB:
                    raise ValueError(f"{name}: {value!r} must be one of {', '.join(LOADER_MB)}")
                continue
            low, high = BOUNDS[field.name]
            if not low <= value <= high:  # also refuses what is not a number
                raise ValueError(f"{name}: {value:g} must be from {low:g} to {high:g}")
        if self.copies > self.data_centres:
            raise ValueError(f"--copies: {self.copies} must be at most the {self.data_centres} of --data-centres")


BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "tb_per_day": (0.001, 100_000),
    "peak_factor": (1, 100),
    "data_centres": (1, 20),
    "copies": (1, 20),
    "outage_h": (0, 720),
    "retention_days": (0.1, 3650),
    "readers": (0, 100),
    "request_kib": (0.1, 16_384),
    "replicas": (1, 9),
    "stored_ratio": (0.01, 1.5),
    "hosts": (1, 10_000_000),
    "files": (1, 100_000),
    "cores": (1, 1024),
    "disk_tb": (0.01, 10_000),
    "disk_mb": (1, 1_000_000),
    "nic_gbit": (0.1, 1_000),
    "link_gbit": (0.001, 10_000),
}


class Need(NamedTuple):
    """A row of the plan: of one surviving data centre, if ``part`` is not the company's."""

    part: str
    what: str
    value: float
    unit: str
    why: str


class Ceiling(NamedTuple):
    """What more hosts do not help against. ``use``: the share of the limit that is in use; above 1 it is passed.

    ``kind``: a limit of *capacity*, a *setting* that can be raised, or *unmeasured* beyond it.
    """

    name: str
    kind: str
    value: float
    limit: float
    unit: str
    remedy: str

    @property
    def use(self) -> float:
        return self.value / self.limit


@dataclass(frozen=True)
class Rates:
    """In GB/s. ``own``, ``mirrored`` and ``read``: of one survivor at the peak; ``share``: of all records that a data
    centre holds as copies, of those written elsewhere."""

    mean: float
    peak: float
    survivors: int
    own: float
    mirrored: float
    read: float
    share: float


def rates(site: Site) -> Rates:
    mean = site.tb_per_day * 1000 / DAY_S
    peak, survivors = mean * site.peak_factor, max(site.data_centres - 1, 1)
    own = peak / survivors
    kept = min(site.copies, survivors)
    share = (site.copies - 1) / (site.data_centres - 1) if site.data_centres > 1 else 0.0
    return Rates(mean, peak, survivors, own, own * (kept - 1), peak * site.readers / survivors, share)


def plan(site: Site) -> list[Need]:
    """The rows of all parts; a row of hosts says in ``why`` what decided."""
    at = rates(site)
    gateway = _gateway(site, at)
    lanes = next(int(need.value) for need in gateway if need.what == "lanes")
    return [*_company(site, at), *gateway, *_brokers(site, at, lanes), *_mirror(site, at), *_loader(site, at)]


def _company(site: Site, at: Rates) -> list[Need]:
    out = site.readers + 1 + (site.copies - 1)
    return [
        Need("company", "mean rate", at.mean * 1000, "MB/s", f"{site.tb_per_day:g} TB a day"),
        Need("company", "peak rate", at.peak * 1000, "MB/s", f"{site.peak_factor:g} times the mean"),
        Need("company", "times read", out, "times", f"over HTTP {site.readers:g}, loader 1, mirrors {site.copies - 1}"),
    ]


def _gateway(site: Site, at: Rates) -> list[Need]:
    requests = at.own * 1e9 / (site.request_kib * 1024)
    cores = requests * REQUEST_S + at.own * WRITE_S_GB + at.read * READ_S_GB
    workers = max(2, math.ceil(DOUBLED * cores / LOAD))
    network = (at.own + max(at.read, at.own * site.stored_ratio)) / _card(site)
    hosts, why = _most({"workers": workers / site.cores, "network": network})
    lanes = max(8, 2 * (workers + site.cores), math.ceil(at.own * 1000 / LANE_MB / LOAD))
    return [
        Need("gateway", "requests", requests, "1/s", f"of {site.request_kib:g} KiB"),
        Need("gateway", "cores", cores, "cores", "measured: plain bodies, no TLS"),
        Need("gateway", "workers", workers, "workers", f"gzip and TLS double it, {LOAD:.0%} busy"),
        Need("gateway", "hosts", max(2, hosts + 1), "hosts", f"{why} decides, and one host away"),
        Need("gateway", "lanes", lanes, "lanes", "2 for each worker and those of one more host"),
    ]


def _brokers(site: Site, at: Rates, lanes: int) -> list[Need]:
    """The cluster of one survivor. Its disks hold the retained time, of which the outage is at the peak."""
    written = at.own + at.mirrored
    stored = written * site.stored_ratio
    cores = lanes * COMMITS * TRANSACTION_S + written * BROKER_S_GB * site.replicas
    held_mean = at.mean * site.copies / site.data_centres
    held_lost = at.peak * min(site.copies, at.survivors) / at.survivors
    seconds, lost_s = site.retention_days * DAY_S, min(site.outage_h * HOUR_S, site.retention_days * DAY_S)
    held = held_mean * (seconds - lost_s) + max(held_mean, held_lost) * lost_s
    disk_tb = (held * site.stored_ratio + lanes * STATE_GB) * site.replicas / FULL / 1000
    disk_mb = stored * site.replicas * CATCH_UP * 1000
    out = site.stored_ratio * (written * site.replicas + at.read + at.own * (site.copies - 1))
    hosts, why = _most(
        {
            "cores": cores / LOAD / site.cores + 1,
            "disk space": disk_tb / site.disk_tb,
            "disk throughput": disk_mb / site.disk_mb + 1,
            "network": max(stored * site.replicas, out) / _card(site) + 1,
            "replication": site.replicas,
        }
    )
    return [
        Need("Kafka", "stored rate", stored * 1000, "MB/s", f"{site.stored_ratio:g} of the bytes, before replication"),
        Need("Kafka", "cores", cores, "cores", f"{lanes} lanes of {COMMITS} transactions/s, bytes of each replica"),
        Need("Kafka", "disk space", disk_tb, "TB", f"{site.retention_days:g} days, {site.replicas} replicas, 30% free"),
        Need("Kafka", "disk throughput", disk_mb, "MB/s", "three times what is written: a reader catches up"),
        Need("Kafka", "network out", out * 1000, "MB/s", "replicas, readers, loader, mirrors"),
        Need("Kafka", "brokers", hosts, "brokers", f"{why} decides"),
    ]


def _mirror(site: Site, at: Rates) -> list[Need]:
    """Sized for a data centre that returns and copies what it missed in as much time as it was away."""
    if at.share == 0:
        return []
    n = site.data_centres
    steady = at.share * at.peak * (n - 1) / n
    returning = at.share * (at.peak + at.mean * (n - 1) / n) if site.outage_h else 0.0
    copied, why = max((steady, "at the peak"), (returning, "to catch up in the time of the outage"))
    cores = copied * MIRROR_S_GB
    workers = max(2, math.ceil(DOUBLED * cores / LOAD))
    wire = copied * site.stored_ratio * 8
    backlog = at.share * at.peak * site.outage_h * HOUR_S * site.stored_ratio
    free = site.link_gbit * LINK / 8 - at.share * at.mean * (n - 1) / n * site.stored_ratio
    return [
        Need("mirror", "link", wire, "Gbit/s", f"into one data centre, {why}"),
        Need("mirror", "workers", workers, "workers", "1.05 s/GB, doubled for TLS, 60% busy"),
        Need("mirror", "lanes", max(6, 2 * workers), "lanes", "2 for each worker"),
        Need("mirror", "backlog", backlog / 1000, "TB", f"stored bytes of {site.outage_h:g} h at the peak"),
        Need("mirror", "catch-up", _hours(backlog, free), "h", f"over {site.link_gbit:g} Gbit/s, {LINK:.0%} of it"),
    ]


def _loader(site: Site, at: Rates) -> list[Need]:
    one = LOADER_MB[site.parser] / 1000
    cores = math.ceil(max(CATCH_UP * at.mean, at.peak) / one)
    backlog = at.peak * site.outage_h * HOUR_S
    audit = math.ceil(2 * DOUBLED * at.mean * 1000 / AUDIT_MB)
    return [
        Need("loader", "cores", cores, "cores", f"parser {site.parser}, three times the mean, at least the peak"),
        Need("loader", "memory", cores + 5, "GB", "1 GB a core, driver 5 GB"),
        Need("loader", "partitions", cores, "partitions", "one for each core, over all topics"),
        Need("loader", "backlog", backlog / 1000, "TB", f"away for {site.outage_h:g} h at the peak"),
        Need("loader", "catch-up", _hours(backlog, cores * one - at.mean), "h", "with the capacity above the mean"),
        Need("audit", "cores", audit, "cores", "log and rows, doubled to catch up"),
    ]


def ceilings(site: Site) -> list[Ceiling]:
    """The limits that a larger number of hosts does not move: those of capacity first, the nearest one first."""
    at, needs = rates(site), {(need.part, need.what): need.value for need in plan(site)}
    catch_up = max(needs.get(("mirror", "catch-up"), 0.0), needs["loader", "catch-up"])
    kept_h = site.retention_days * 24
    a_file = at.peak * 1000 / site.hosts / site.files
    sources = site.hosts * site.files * GENERATIONS
    connections = site.hosts * CLIENT_CONNECTIONS
    partitions = needs["loader", "partitions"] * site.copies
    found = [
        Ceiling("peak rate of one file", "capacity", a_file, FILE_MB, "MB/s", "more files on a host, or Writer"),
        Ceiling("outage and catch-up", "capacity", site.outage_h + catch_up, kept_h, "h", "retain longer, more link"),
        Ceiling("partitions", "unmeasured", partitions, MOST_PARTITIONS, "", "topics in two clusters"),
        Ceiling("sources of segments", "unmeasured", sources, MOST_SOURCES, "", "measure a load with segments"),
        Ceiling("connections to a worker", "setting", connections, MOST_CONNECTIONS, "", "limits.connections"),
    ]
    if ("mirror", "link") in needs:
        link, most = needs["mirror", "link"], site.link_gbit * LINK
        found.append(Ceiling("link between data centres", "capacity", link, most, "Gbit/s", "a faster link"))
    return sorted(found, key=lambda one: (one.kind != "capacity", -one.use))


def notes(site: Site) -> list[str]:
    """What the figures do not cover."""
    found = []
    if site.data_centres == 1:
        found.append("with one data centre nothing takes over: push-clients wait, and their files are the buffer")
    elif site.copies == 1:
        found.append("with one copy, what the lost data centre holds cannot be read or loaded until it returns")
    if site.replicas < 3:
        found.append("fewer than 3 replicas: one broker away stops writes, or one disk loses records")
    return found


def _card(site: Site) -> float:
    """GB/s of a network card that are planned with."""
    return site.nic_gbit / 8 * LINK


def _most(wanted: dict[str, float]) -> tuple[int, str]:
    name = max(wanted, key=lambda one: wanted[one])
    return math.ceil(wanted[name]), name


def _hours(backlog: float, free: float) -> float:
    """Infinite where nothing is left to catch up with."""
    if backlog == 0:
        return 0.0
    return backlog / free / HOUR_S if free > 0 else math.inf
