"""Hosts, names and addresses of the two data centres, and what their configurations are. Pure.

Configurations are the blocks of the pages *Production* and *Kafka*, as they are printed there. `SMALLER` and the names
of hosts that do not exist here are all that is changed, besides the folders: each change must fit the page exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

DCS: Final = ("dc1", "dc2")
BROKERS: Final = (1, 2, 3)
GATEWAYS: Final = (1, 2)
MIRROR: Final = 1
WORKERS: Final = 1
TOPIC: Final = "nginx"
WINDOW_S: Final = 20
LINK: Final = {dc: f"10.255.0.{number}" for number, dc in enumerate(DCS, 1)}
_PAGES: Final = Path(__file__).parents[2] / "ops" / "docs" / "operations"
_FENCE: Final = re.compile(r"^ *```\w+\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# The folders of the page, and where they are here.
_FOLDERS: Final = ("/etc/logferry", "/warehouse", "/var/lib/logferry-push", "/var/lib/logferry", "/var/log/nginx")
# By configuration: what is smaller than on the page.
SMALLER: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "gateway.toml": (("workers = 2\n", f"workers = {WORKERS}\n"),),
    "load.toml": (
        ("window_s = 3600 ", f"window_s = {WINDOW_S}\nlate_wait_s = 2\nsource_idle_s = 15\nmax_wait_s = 120 "),
        ('driver_memory = "2g"', 'driver_memory = "1g"\nmaster = "local[1]"'),
        ("metrics_file =", "# metrics_file ="),  # this load follows
    ),
    "push.toml": (("metrics_port = 9187\n", 'metrics_port = 9187\nheartbeat_s = 5\nhost = "@HOST@"\n'),),
}


class Host(NamedTuple):
    """A host is a network namespace. ``names``: the first one is its own."""

    dc: str
    names: tuple[str, ...]
    address: str

    @property
    def name(self) -> str:
        return self.names[0]


def other(dc: str) -> str:
    return DCS[1 - DCS.index(dc)]


def hosts() -> list[Host]:
    """Those of the page: three service hosts and a loader host in each data centre, and one of the push hosts."""
    found = []
    for number, dc in enumerate(DCS, 1):
        names = [(f"kafka{n}.{dc}.example", f"gw{n}.{dc}.example") for n in BROKERS]
        found += [Host(dc, pair, f"10.{number}.0.{10 + n}") for n, pair in zip(BROKERS, names, strict=True)]
        found += [Host(dc, (f"load1.{dc}.example",), f"10.{number}.0.21")]
        found += [Host(dc, (f"web{number}.{dc}.example",), f"10.{number}.0.31")]
    return found


def router(dc: str) -> str:
    return f"10.{DCS.index(dc) + 1}.0.1"


def hosts_file() -> str:
    """For every host: there is no resolver."""
    return "127.0.0.1 localhost\n" + "".join(f"{host.address} {' '.join(host.names)}\n" for host in hosts())


def block(page: str, begins: str) -> str:
    """The block of a page that begins with this text. Raises LookupError unless there is exactly one."""
    text = (_PAGES / f"{page}.md").read_text(encoding="utf-8")
    found = [body for body in _FENCE.findall(text) if body.startswith(begins)]
    if len(found) != 1:
        raise LookupError(f"{page}.md has {len(found)} blocks that begin with {begins!r}")
    return str(found[0])


def for_dc(text: str, page_dc: str, dc: str) -> str:
    """A block about ``page_dc`` for ``dc``: both names change places, and so do the networks."""
    if page_dc == dc:
        return text
    swapped = re.sub(r"dc[12]", lambda found: other(found[0]), text)
    return re.sub(r"\b10\.([12])\.0\.", lambda found: f"10.{3 - int(found[1])}.0.", swapped)


def replaced(text: str, old: str, new: str) -> str:
    """Raises LookupError unless ``old`` is there exactly once: then the page has changed."""
    if text.count(old) != 1:
        raise LookupError(f"the page has {text.count(old)} times {old!r}")
    return text.replace(old, new)


def configuration(name: str, host: Host, folder: Path, digests: Mapping[str, str]) -> str:
    """``gateway.toml``, ``mirror.toml``, ``load.toml``, ``audit-<dc>.toml`` or ``push.toml`` of this host.

    ``folder``: of this host. ``digests``: of the tokens, by name. Raises LookupError where the page has changed.
    """
    if name == "push.toml":
        first = 1 + int(host.name[3]) % len(GATEWAYS)  # as in rollout.sh: not the same for all
        marks = {"NEAR": host.dc, "FAR": other(host.dc), "FIRST": f"gw{first}", "SECOND": f"gw{3 - first}"}
        text = block("production", 'state_dir = "/var/lib/logferry-push"')
        marks |= {"THIRD": "gw3", "HOST": host.name.partition(".")[0]}
    else:
        text, marks = block("production", f"# {name}"), {}
        page_dc = "dc2" if name == "mirror.toml" else "dc1"
        text = text if name.startswith("audit-") else for_dc(text, page_dc, host.dc)
        own = f"gw1.{host.dc}.example"
        text = text.replace(f'advertised_host = "{own}"', f'advertised_host = "{host.names[-1]}"')
    for old, new in SMALLER.get(name, ()):
        text = replaced(text, old, new)
    for mark, value in marks.items():
        text = text.replace(f"@{mark}@", value)
    for token, digest in digests.items():
        text = text.replace(f'name = "{token}"\nsha256 = "…"', f'name = "{token}"\nsha256 = "{digest}"')
    # The third service host has no gateway here.
    text = re.sub(r'"https://gw3[^"]*",\s*', "", text)
    return moved(re.sub(r',\s*"https://gw3[^"]*"', "", text), folder)


def moved(text: str, folder: Path) -> str:
    """With the folders of the page below that of the host; tables are shared by all hosts."""
    for old in _FOLDERS:
        new = folder.parent / "warehouse" if old == "/warehouse" else folder / old[1:]
        text = re.sub(rf"(?<![\w/.-]){re.escape(old)}(?=[/\"'\s])", str(new), text)
    return text


def server_properties(template: str, host: Host, node: int, folder: Path, password: str) -> str:
    """Of a broker: the local stack's template, then the excerpt of the page *Kafka*, then its key and login."""
    dc, first = host.dc, block("kafka", "listeners=SECURE://0.0.0.0:9093,CONTROLLER://10.1.0.11:9094")
    excerpt = for_dc(first, "dc1", dc).replace(f"10.{DCS.index(dc) + 1}.0.11:9094", f"{host.address}:9094")
    excerpt = replaced(excerpt, f"SECURE://kafka1.{dc}.example", f"SECURE://{host.name}")
    voters = ",".join(f"{n}@kafka{n}.{dc}.example:9094" for n in BROKERS)
    base = template.format(
        node=node, broker=9093, controller=9094, log=folder / "kafka", voters=voters, replicas=3, in_sync=2
    )
    login = f'org.apache.kafka.common.security.scram.ScramLoginModule required username="broker" password="{password}";'
    own = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "broker.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(folder / "etc/logferry/kafka-ca.pem"),
        "listener.name.secure.scram-sha-512.sasl.jaas.config": login,
    }
    return base + excerpt + "".join(f"{name}={value}\n" for name, value in own.items())
