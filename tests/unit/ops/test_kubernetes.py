"""The objects of `ops/deploy/kubernetes`: taken by the schemas of Kubernetes' API, closed, and fit for the services.

They run on no cluster here. ServiceMonitor and PodMonitor are no objects of that API: only references are checked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import certifi
import kubernetes_validate
import pytest
import yaml
from logferry.client.agent.config import parse
from logferry.client.agent.options import read
from logferry.client.files.containers import ContainerRules
from logferry.gateway.config import ServiceConfig
from logferry.gateway.config import load as load_gateway
from logferry.gateway.delivery.config import load as load_deliver
from logferry.loaders.config import load_config
from logferry.loaders.errors import EXIT_REFUSED, EXIT_USAGE
from logferry.mirror.config import load as load_mirror
from logferry.ops.cli.main import COMMANDS
from logferry.ops.commands.load import provide_java
from logferry.ops.runtime import jars

FOLDER = Path(__file__).parents[3] / "ops" / "deploy" / "kubernetes"
VERSIONS = ("1.31", "1.34", "1.37")
SERVICES: dict[str, Callable[[Path], ServiceConfig]] = {
    "gateway": load_gateway,
    "mirror": load_mirror,
    "deliver": load_deliver,
}


def objects() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    files = sorted(file.name for file in FOLDER.glob("*.yaml") if file.name != "kustomization.yaml")
    assert sorted(kustomization["resources"]) == files
    return [one for file in files for one in yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8"))]


OBJECTS = objects()
NAMED = {f"{one['kind']}/{one['metadata']['name']}": one for one in OBJECTS}


def pod_of(one: dict[str, Any]) -> dict[str, Any] | None:
    spec = one["spec"]
    template = spec["jobTemplate"]["spec"]["template"] if one["kind"] == "CronJob" else spec.get("template")
    return None if template is None else template["spec"]


PODS = {name: pod for name, one in NAMED.items() if (pod := pod_of(one)) is not None}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [name for name in NAMED if not name.startswith(("ServiceMonitor/", "PodMonitor/"))])
def test_kubernetes_takes_the_object(name: str, version: str) -> None:
    """By the schemas of its API, in which no unknown field passes."""
    kubernetes_validate.validate(NAMED[name], version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**NAMED[name], "spec": {**NAMED[name]["spec"], "specks": {}}}, version, strict=True
        )


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_closed_and_finds_what_it_mounts(name: str) -> None:
    pod = PODS[name]
    assert pod["automountServiceAccountToken"] is False
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        context = {**pod.get("securityContext", {}), **container["securityContext"]}
        assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
        # The push-client reads logs that only root may read.
        is_push = name == "DaemonSet/logferry-push"
        assert context["capabilities"] == {"drop": ["ALL"], **({"add": ["DAC_READ_SEARCH"]} if is_push else {})}
        assert context.get("runAsNonRoot", False) is not is_push
        assert "memory" in container["resources"]["limits"]
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    generated = {
        one["name"] for one in yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["configMapGenerator"]
    }
    assert {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume} <= generated


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_served_at_the_port_of_its_configuration(name: str, tmp_path: Path) -> None:
    """The file as the first container leaves it."""
    one = NAMED[f"StatefulSet/logferry-{name}"]
    pod = PODS[f"StatefulSet/logferry-{name}"]
    (first,), (container,) = pod["initContainers"], pod["containers"]
    for folder in ("config", "etc/logferry"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(FOLDER / f"{name}.toml", tmp_path / "config")
    shell = first["command"][2].replace("/config/", f"{tmp_path}/config/").replace("/etc/", f"{tmp_path}/etc/")
    pod_name = f"logferry-{name}-0"
    subprocess.run(
        [*first["command"][:2], shell], check=True, env={"POD": pod_name, "PATH": "/usr/bin:/bin"}, timeout=30
    )

    config = SERVICES[name](tmp_path / "etc" / "logferry" / f"{name}.toml")
    [port] = container["ports"]
    assert config.port(0) == port["containerPort"] == NAMED[f"Service/logferry-{name}"]["spec"]["ports"][0]["port"]
    assert config.workers == 1
    assert config.url(0) == f"https://{pod_name}.logferry-{name}.logferry.svc:{port['containerPort']}"
    assert one["spec"]["serviceName"] == f"logferry-{name}"
    assert container["command"][1] in COMMANDS
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "https", "scheme": "HTTPS"}
    selector = {"app.kubernetes.io/name": f"logferry-{name}"}
    assert one["spec"]["template"]["metadata"]["labels"] == selector
    assert one["spec"]["selector"]["matchLabels"] == selector
    assert NAMED[f"Service/logferry-{name}"]["spec"]["selector"] == selector
    assert NAMED[f"PodDisruptionBudget/logferry-{name}"]["spec"]["selector"]["matchLabels"] == selector
    assert one["spec"]["replicas"] > NAMED[f"PodDisruptionBudget/logferry-{name}"]["spec"]["maxUnavailable"]


def test_the_gateway_forwards_to_its_pods_alone() -> None:
    config = load_gateway(FOLDER / "gateway.toml")
    assert config.worker_hosts == ["logferry-gateway-*.logferry-gateway.logferry.svc"]


def test_the_loader_and_the_push_client_take_their_files(tmp_path: Path) -> None:
    (token := tmp_path / "token").write_text("t")
    assert [str(table.path) for table in load_config(FOLDER / "load.toml").tables] == ["s3://warehouse/nginx"]
    [container] = PODS["DaemonSet/logferry-push"]["containers"]
    arguments = [str(FOLDER / "push.toml") if one.endswith("push.toml") else one for one in container["args"]]
    given = read(arguments)
    assert given.get("host") == "$(NODE)"
    assert given.get("state_dir") in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert given.files[0]["paths"][0].startswith("/var/log/pods/")
    config = parse([*arguments, "--token-file", str(token), "--ca-file", certifi.where()])
    assert isinstance(config.files[0].rules, ContainerRules)


CONTAINERFILE = (FOLDER.parent / "Containerfile").read_text(encoding="utf-8")
DEFAULTS = dict(re.findall(r"^ARG (\w+)=(.*)$", CONTAINERFILE, re.M))


def fetched(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> set[str]:
    """The names of the sets of jars that a call asks the cache for."""
    asked: set[str] = set()

    def fetch(wanted: jars.JarSet) -> list[Path]:
        asked.add(wanted.name)
        return []

    monkeypatch.setattr(jars, "fetch_jars", fetch)
    what()
    return asked


def fetched_by_the_image(monkeypatch: pytest.MonkeyPatch, folder: Path, **build_arguments: str) -> set[str]:
    """By its recipe: the command is run, with a Python that notes its arguments."""
    [line] = re.findall(r"^RUN (mkdir -p /opt/logferry/cache(?:.*\\\n)*.*)$", CONTAINERFILE, re.M)
    python, noted = folder / "python", folder / "noted"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$XDG_CACHE_HOME" "$@" > {noted}\n')
    python.chmod(0o755)
    shell = line.replace("/opt/logferry/bin/python", str(python)).replace("/opt/logferry", str(folder))
    env = {**DEFAULTS, "PATH": "/usr/bin:/bin", **build_arguments}
    subprocess.run(["/bin/sh", "-c", shell], check=True, env=env, timeout=30)
    cache, *arguments = noted.read_text().splitlines()
    assert cache.replace(str(folder), "/opt/logferry") in CONTAINERFILE.partition("AS services")[2], "it looks there"
    assert arguments[:2] == ["-m", jars.__name__]
    return fetched(monkeypatch, lambda: jars.main(arguments[2:]))


def test_the_image_has_the_jars_of_each_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A root that is read-only takes none. By the code that finds the jars of `logferry load`."""
    monkeypatch.delenv("LOGFERRY_SPARK_JARS", raising=False)
    monkeypatch.setenv("JAVA_HOME", os.environ.get("JAVA_HOME", ""))
    [container] = PODS["CronJob/logferry-load"]["containers"]
    assert container["command"][:4] == ["logferry", "load", "--config", "/etc/logferry/load.toml"]
    assert {"name": "XDG_CACHE_HOME", "value": "/opt/logferry/cache"} in container["env"]
    built = fetched_by_the_image(monkeypatch, tmp_path)
    wanted, missing = {}, {}
    for file in sorted(FOLDER.parent.rglob("*.toml")):
        if "[[tables]]" in file.read_text(encoding="utf-8"):
            monkeypatch.delenv("LOGFERRY_SPARK_JARS", raising=False)
            wanted[file.name] = fetched(monkeypatch, partial(provide_java, ["--config", str(file)]))
            missing[file.name] = sorted(wanted[file.name] - built)
    assert not any(missing.values()), missing
    assert any(one.startswith("s3a-") for one in wanted["load.toml"])


def test_a_build_argument_names_the_stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = fetched_by_the_image(monkeypatch, tmp_path, STORES="")
    names = ("s3", "gs", "azure")
    s3, gs, azure = (fetched_by_the_image(monkeypatch, tmp_path, STORES=name) - plain for name in names)
    assert sorted(one.partition("-")[0] for one in s3) == ["aws", "s3a"]
    assert sorted(one.partition("-")[0] for one in gs) == ["gcs"]
    assert sorted(one.partition("-")[0] for one in azure) == ["azure"]
    assert fetched_by_the_image(monkeypatch, tmp_path, STORES="s3,gs") == plain | s3 | gs
    with pytest.raises(SystemExit):
        fetched_by_the_image(monkeypatch, tmp_path, STORES="s3,oci")


def test_prometheus_may_enter_where_it_scrapes() -> None:
    monitors = [NAMED[f"ServiceMonitor/{name}"]["spec"] for name in ("logferry", "logferry-mirror")]
    scraped = [name for monitor in monitors for name in monitor["selector"]["matchExpressions"][0]["values"]]
    assert sorted(scraped) == sorted(f"logferry-{name}" for name in SERVICES)
    # As in the scrape configuration of the page Production; alerts go by these labels.
    labels = [monitor["endpoints"][0]["relabelings"][0]["targetLabel"] for monitor in monitors]
    assert labels == ["dc", "target_dc"]
    for name in SERVICES:
        service = NAMED[f"Service/logferry-{name}"]
        assert service["metadata"]["labels"]["app.kubernetes.io/name"] == f"logferry-{name}"
        assert [port["name"] for port in service["spec"]["ports"]] == ["https"]
    assert {monitor["endpoints"][0]["port"] for monitor in monitors} == {"https"}
    opened = NAMED["NetworkPolicy/logferry-operators"]["spec"]
    assert opened["podSelector"]["matchExpressions"][0]["values"] == ["logferry-mirror", "logferry-deliver"]
    assert (
        opened["ingress"][0]["from"][1]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        == "monitoring"
    )
    [port] = PODS["DaemonSet/logferry-push"]["containers"][0]["ports"]
    served = tomllib.loads((FOLDER / "push.toml").read_text())
    assert (served["metrics_host"], served["metrics_port"]) == ("0.0.0.0", port["containerPort"])
    assert NAMED["PodMonitor/logferry-push"]["spec"]["podMetricsEndpoints"][0]["port"] == port["name"]
    opened = NAMED["NetworkPolicy/logferry-push"]["spec"]
    assert [one["port"] for one in opened["ingress"][0]["ports"]] == [port["name"]]
    assert NAMED["NetworkPolicy/logferry-closed"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}


def test_the_cron_job_gives_up_where_an_operator_must_act() -> None:
    job = NAMED["CronJob/logferry-load"]["spec"]["jobTemplate"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    rule = job["podFailurePolicy"]["rules"][0]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [EXIT_REFUSED, EXIT_USAGE])
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "else its kubelet restarts the container first"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_labels_of_pods_take_one_right(tmp_path: Path) -> None:
    """The component: the push-client's pod gets a token that may read the pods of a kubelet, and nothing else does."""
    shutil.copytree(FOLDER, tmp_path / "base")
    (tmp_path / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        "resources: [base/push.yaml]\ncomponents: [base/labels]\n"
    )
    built = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    found = {one["kind"]: one for one in yaml.safe_load_all(built.stdout)}
    for version in VERSIONS:
        for one in found.values():
            kubernetes_validate.validate(one, version, strict=True)
    assert found["ClusterRole"]["rules"] == [{"apiGroups": [""], "resources": ["nodes/pods"], "verbs": ["get"]}]
    account = found["ServiceAccount"]["metadata"]
    assert found["ClusterRoleBinding"]["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert found["ClusterRoleBinding"]["roleRef"]["name"] == found["ClusterRole"]["metadata"]["name"]
    pod = pod_of(found["DaemonSet"])
    assert pod is not None
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (account["name"], False)
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["DAC_READ_SEARCH"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["/var/lib/logferry-push"]
    assert {name["name"] for name in container["env"]} == {"NODE", "NODE_IP"}
    given = read([one.replace("=/etc/logferry", f"={FOLDER}") for one in container["args"]])
    assert given.get("kubelet_url") == "https://$(NODE_IP):10250"
    assert given.get("kubelet_token_file") == "/run/secrets/kubelet/token"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_them() -> None:
    """A change of a file changes the name of its map, and each pod uses the new one."""
    built = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True, timeout=60
    )
    found = list(yaml.safe_load_all(built.stdout))
    assert {one["metadata"]["namespace"] for one in found} == {"logferry"}
    maps = {one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap"}
    pods = [pod for one in found if "spec" in one and (pod := pod_of(one)) is not None]
    used = {volume["configMap"]["name"] for pod in pods for volume in pod["volumes"] if "configMap" in volume}
    assert used == maps
    assert len(maps) == 5
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert images == {"registry.example/logferry:0.2.0.dev0", "registry.example/logferry-push:0.2.0.dev0"}
