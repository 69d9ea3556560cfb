"""`ops/deploy/compose`: taken by the schema of the Compose specification, and each name in it leads somewhere.

`test_compose_processes.py` runs its command lines and files as processes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml
from logferry.gateway.config import load as load_gateway
from logferry.mirror.config import load as load_mirror
from logferry.ops.cli.main import COMMANDS

FOLDER: Final = Path(__file__).parents[3] / "ops" / "deploy" / "compose"
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
OURS: Final = [name for name, service in SERVICES.items() if service.get("command", [""])[0] == "logferry"]
LOADERS: Final[dict[str, Any]] = {"gateway": load_gateway, "mirror": load_mirror}


def test_the_specification_takes_it() -> None:
    """By its schema, in which no unknown key passes."""
    file = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    jsonschema.validate(COMPOSE, schema)
    wrong = {**SERVICES, "kafka-dc1": {**SERVICES["kafka-dc1"], "comand": ["x"]}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**COMPOSE, "services": wrong}, schema)


@pytest.mark.skipif(shutil.which("podman-compose") is None, reason="podman-compose is not installed")
def test_podman_compose_takes_it() -> None:
    known = subprocess.run(["podman-compose", "--help"], capture_output=True, text=True, timeout=60, check=False).stdout
    if "config" not in re.split(r"[{},]", known):
        pytest.skip("this podman-compose has no command that checks a file without running it: older than 1.0.6")
    command = ["podman-compose", "-f", str(FOLDER / "compose.yaml"), "config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)


def test_all_that_is_mounted_is_there_and_all_that_is_there_is_mounted() -> None:
    mounted = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    named = {source for source in mounted if not source.startswith(".")}
    assert named == set(COMPOSE["volumes"])
    files = {(FOLDER / source).resolve() for source in mounted - named}
    assert all(file.exists() for file in files)
    assert set(FOLDER.iterdir()) == {FOLDER / "compose.yaml", *(file for file in files if file.parent == FOLDER)}
    started = {name for service in SERVICES.values() for name in service.get("depends_on", ())}
    assert started <= set(SERVICES)


def test_there_are_two_data_centres_of_each_service() -> None:
    assert sorted(OURS) == ["gateway-dc1", "gateway-dc2", "mirror-dc1", "mirror-dc2"]
    images = {service["image"] for name, service in SERVICES.items() if name not in OURS}
    assert all(image.count("/") == 2 and ":" in image for image in images), "each by its registry and version"
    built = (FOLDER.parent / "Containerfile").read_text(encoding="utf-8")
    assert {SERVICES[name]["image"] for name in OURS} == {"${LOGFERRY_IMAGE:-logferry:0.2.0.dev0}"}
    assert "-t logferry:0.2.0.dev0 " in built
    assert "LOGFERRY_HEALTH_URL" in built


@pytest.mark.parametrize("name", OURS)
def test_a_service_takes_its_configuration_and_is_found_by_its_name(name: str) -> None:
    service, (kind, dc) = SERVICES[name], name.split("-")
    assert service["command"] == ["logferry", kind, "--config", f"/etc/logferry/{name}.toml"]
    assert kind in COMMANDS
    config = LOADERS[kind](FOLDER / f"{name}.toml")
    assert (config.dc, config.url(0)) == (dc, f"http://{name}:{config.port(0)}")
    assert service["environment"] == {"LOGFERRY_HEALTH_URL": f"http://127.0.0.1:{config.port(0)}/readyz"}
    assert [port.rpartition(":")[2] for port in service.get("ports", [])] == [str(config.port(0))] * (kind == "gateway")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "it has no tokens"
    brokers = [config.kafka.bootstrap_servers, *(one.kafka.bootstrap_servers for one in getattr(config, "remotes", []))]
    assert brokers[0] == f"kafka-{dc}:9092"
    assert set(service["depends_on"]) == {address.split(":")[0] for address in brokers}
    for broker in service["depends_on"]:
        assert SERVICES[broker]["environment"]["KAFKA_ADVERTISED_LISTENERS"] == f"PLAINTEXT://{broker}:9092"


def test_prometheus_scrapes_every_worker() -> None:
    jobs = yaml.safe_load((FOLDER / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    scraped = sorted(target for job in jobs for one in job["static_configs"] for target in one["targets"])
    expected = []
    for name in OURS:
        config = LOADERS[name.split("-")[0]](FOLDER / f"{name}.toml")
        expected += [config.url(worker).removeprefix("http://") for worker in range(config.workers)]
    assert scraped == sorted(expected)
    # As in the scrape configuration of the page Production; alerts go by these labels.
    labels = {job["job_name"]: [set(one["labels"]) for one in job["static_configs"]] for job in jobs}
    assert labels == {"logferry-gateway": [{"dc"}] * 2, "logferry-mirror": [{"target_dc"}] * 2}


def test_grafana_finds_its_source_and_the_dashboards() -> None:
    """No Grafana runs here: the files are compared with the keys that it documents."""
    source = yaml.safe_load((FOLDER / "grafana-datasource.yaml").read_text(encoding="utf-8"))
    assert source["apiVersion"] == 1
    (prometheus,) = source["datasources"]
    assert set(prometheus) == {"name", "type", "access", "url", "isDefault"}
    (port,) = SERVICES["prometheus"]["ports"]
    assert prometheus["url"] == f"http://prometheus:{port.rpartition(':')[2]}"
    (provider,) = yaml.safe_load((FOLDER / "grafana-dashboards.yaml").read_text(encoding="utf-8"))["providers"]
    assert set(provider) == {"name", "type", "allowUiUpdates", "options"}
    mounts = dict(volume.removesuffix(":ro").split(":") for volume in SERVICES["grafana"]["volumes"])
    assert mounts["../grafana"] == provider["options"]["path"]
