"""Two data centres on one machine: names, addresses and configurations of each host, by the production guide."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent import config as push_config
from logferry.gateway.config import Config as GatewayConfig
from logferry.loaders.config import Config as LoaderConfig
from logferry.mirror.config import MirrorConfig
from logferry.ops.audit.config import AuditConfig

from tests.datacenters.credentials import Authority
from tests.datacenters.plan import (
    DCS,
    Host,
    block,
    configuration,
    for_dc,
    hosts,
    hosts_file,
    other,
    replaced,
    server_properties,
)

_DIGESTS = {name: f"{n:064x}" for n, name in enumerate(("web-hosts", "readers", "loader", "operator", "prometheus"))}
_MODELS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gateway.toml": GatewayConfig.model_validate,
    "mirror.toml": MirrorConfig.model_validate,
    "load.toml": LoaderConfig.model_validate,
    "audit-dc1.toml": AuditConfig.model_validate,
    "audit-dc2.toml": AuditConfig.model_validate,
}


def of(host: Host) -> list[str]:
    """The configurations that a host may have."""
    if host.name.startswith("kafka"):
        return ["gateway.toml", "mirror.toml"]
    return ["push.toml"] if host.name.startswith("web") else ["load.toml", "audit-dc1.toml", "audit-dc2.toml"]


_EACH = [(host, name) for host in hosts() for name in of(host)]


def test_the_addresses_are_those_of_the_guide_and_no_two_are_equal() -> None:
    text = (Path(__file__).parents[3] / "ops/docs/operations/production.md").read_text(encoding="utf-8")
    for dc, network in (("dc1", "10.1.0"), ("dc2", "10.2.0")):
        assert re.search(rf"3 service hosts in {dc} \|[^|]*\| {network}\.11 to 13 ", text)
        assert re.search(rf"load1\.{dc}\.example` \| {network}\.21 ", text)
        assert [host.address for host in hosts() if host.dc == dc][:4] == [f"{network}.{n}" for n in (11, 12, 13, 21)]
    assert len({host.address for host in hosts()}) == len(hosts())
    assert "10.2.0.13 kafka3.dc2.example gw3.dc2.example\n" in hosts_file()


@pytest.mark.parametrize(("host", "name"), _EACH, ids=[f"{host.name} {name}" for host, name in _EACH])
def test_each_configuration_is_accepted_and_names_hosts_that_exist(
    host: Host, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = configuration(name, host, tmp_path / host.name, _DIGESTS)
    if name == "push.toml":
        monkeypatch.setattr(push_config, "read_token", lambda path: "token")
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        authority = tmp_path / host.name / "etc/logferry/ca.pem"
        authority.parent.mkdir(parents=True)
        authority.write_bytes(Authority("tests").pem)
        found = push_config.parse(["--config", str(file)])
        assert [one.name for one in found.data_centres] == [host.dc, other(host.dc)]
    else:
        _MODELS[name](tomllib.loads(text))
    known = {one for place in hosts() for one in place.names}
    named = {one for one in re.findall(r"[\w?]+\.dc\d\.example", text) if "?" not in one}
    assert named <= known
    assert "…" not in text
    assert "@" not in text
    paths = re.findall(r'^(?!#).*"(/[^"]*)"', text, re.MULTILINE)
    assert paths
    assert all(path.startswith(str(tmp_path)) for path in paths)


@pytest.mark.parametrize("dc", DCS)
def test_workers_know_each_other_and_nobody_of_the_other_data_centre(dc: str, tmp_path: Path) -> None:
    settings = {
        host.names[-1]: tomllib.loads(configuration("gateway.toml", host, tmp_path, _DIGESTS))
        for host in hosts()
        if host.name.startswith("kafka")
    }
    own = settings[f"gw1.{dc}.example"]
    for name in settings:
        is_own = any(fnmatch(name, pattern) for pattern in own["worker_hosts"])
        assert is_own == (f".{dc}." in name)
    assert own["dc"] == dc
    assert own["data_centres"] == [other(dc)]
    assert {one["advertised_host"] for one in settings.values()} == set(settings)
    mirror = tomllib.loads(configuration("mirror.toml", hosts()[0 if dc == "dc1" else 5], tmp_path, _DIGESTS))
    assert (mirror["dc"], mirror["remote"][0]["dc"]) == (dc, other(dc))
    assert mirror["remote"][0]["kafka"]["sasl_username"] == f"mirror-{dc}"
    assert f".{other(dc)}." in mirror["remote"][0]["kafka"]["bootstrap_servers"]


def test_a_broker_has_the_settings_of_the_guide_for_its_own_host(tmp_path: Path) -> None:
    broker = next(host for host in hosts() if host.name == "kafka2.dc2.example")
    text = server_properties("log.dirs={log}\nvoters={voters}\n", broker, 2, tmp_path, "secret")
    assert "listeners=SECURE://0.0.0.0:9093,CONTROLLER://10.2.0.12:9094\n" in text
    assert "advertised.listeners=SECURE://kafka2.dc2.example:9093\n" in text
    assert "min.insync.replicas=2\n" in text
    assert "User:CN=kafka3.dc2.example" in text
    assert ".dc1." not in text


def test_a_page_that_has_changed_is_an_error() -> None:
    with pytest.raises(LookupError, match="0 times 'lanes = 99'"):
        replaced(block("production", "# gateway.toml"), "lanes = 99", "lanes = 1")
    with pytest.raises(LookupError, match="0 blocks"):
        block("production", "# no-such.toml")
    assert for_dc("kafka1.dc1.example 10.1.0.11", "dc1", "dc2") == "kafka1.dc2.example 10.2.0.11"
    assert for_dc("kafka1.dc1.example dc2", "dc1", "dc1") == "kafka1.dc1.example dc2"
