"""The status of real workers: healthy, with Kafka frozen, dead and back, and asked with a token over TLS."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from logferry.gateway.api.diagnosis import Diagnosis, ServiceStatus, diagnose
from logferry.gateway.api.status_schemas import Status
from logferry.gateway.token_command import new_token
from logferry.ops.cli import main
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.status.command import query_workers

from tests.support.gateway import LANES, Gateway, gateway, source_path
from tests.support.served_gateway import Gateway as SecuredGateway

BOUND_S = 90


def command(*argv: str) -> int:
    """Its exit status, also where the parser ends it."""
    try:
        return main.main(list(argv))
    except SystemExit as ended:
        return int(ended.code or 0)


def test_the_whole_of_a_healthy_gateway(workers: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    # By another name than the workers know themselves by, and one of the two alone.
    url = workers.urls[1].replace("127.0.0.1", "localhost")
    assert command("status", "--url", url) == 0
    said = capsys.readouterr().out
    assert said.startswith("dc1: no problem found")
    assert all(worker in said for worker in workers.urls)
    assert command("status", "--json", "--url", url) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["well"]
    assert not any(finding["wrong"] for finding in document["findings"])
    assert sorted(document["workers"]) == sorted(workers.urls)
    seen = [Status.model_validate(worker) for worker in document["workers"].values()]
    assert sorted(lane.lane for worker in seen for lane in worker.lanes) == list(range(LANES))
    for worker in seen:
        assert {lane.state for lane in worker.lanes} <= {"serving"}
        assert sorted(worker.group.members) == sorted(workers.urls)
        assert {worker.group.owners[str(lane.lane)] for lane in worker.lanes} <= {worker.url}
        assert worker.kafka.reachable
        assert worker.kafka.cluster_id
        assert [f"{broker.host}:{broker.port}" for broker in worker.kafka.brokers] == [workers.kafka.bootstrap]
        assert worker.kafka.partitions is not None
        assert worker.kafka.partitions.total >= LANES
        assert worker.limits["connections"].used >= 1


@pytest.mark.long
async def test_it_names_the_reason_when_kafka_freezes_dies_and_comes_back(tmp_path: Path) -> None:
    for name in ("kafka", "gateway"):
        (tmp_path / name).mkdir()
    with (
        KafkaCluster("status", tmp_path / "kafka") as kafka,
        gateway(kafka, tmp_path / "gateway", "status", 1) as running,
    ):
        await running.make_topic("nginx")
        chunk = source_path("nginx", "web1", "/chunks?seqno=")
        await running.ask("POST", chunk + "5", data=b"line\n")
        assert await seen(running, is_well) == []
        (stuck,) = (lane for lane in (await status(running)).lanes if lane.committed_ms is not None)
        assert stuck.sources == 1

        kafka.kill(1, signal.SIGSTOP)
        writing = asyncio.create_task(running.ask("POST", chunk + "9", data=b"line\n", expect=None))
        found = await seen(running, lambda found: any("does not take the batch" in one.reason for one in found))
        assert found[0].what == "Kafka does not answer"
        assert found[0].reason == f"{kafka.bootstrap}: no answer within 2 s"
        assert found[0].for_s is not None
        assert 2 <= found[0].for_s < BOUND_S

        kafka.kill(1, signal.SIGKILL)
        found = await seen(running, lambda found: found[0].reason.endswith("Connection refused"))
        assert found[0].what == "Kafka does not answer"
        assert found[0].wrong
        found = await seen(running, lambda found: any("while serving: " in finding.reason for finding in found))
        (lane,) = (finding for finding in found if finding.what.startswith("lane "))
        assert lane.wrong
        assert (await writing).status in (500, 503)

        await asyncio.to_thread(kafka.restart, 1)
        await seen(running, is_well)
        (mended,) = (lane for lane in (await status(running)).lanes if lane.lane == stuck.lane)
        assert mended.last_wait is not None
        assert mended.last_wait.ended_ms is not None
        assert mended.last_error is not None
        assert (await running.ask("POST", chunk + "9", data=b"line\n")).document["recorded_seqno"] == 9


def is_well(found: list[Diagnosis]) -> bool:
    return not any(finding.wrong for finding in found)


async def seen(running: Gateway, enough: Callable[[list[Diagnosis]], bool]) -> list[Diagnosis]:
    """What is wrong as soon as it is enough, else AssertionError. Notes that the worker is young are left out."""
    deadline = time.monotonic() + BOUND_S
    while True:
        service: ServiceStatus = await asyncio.to_thread(query_workers, running.urls, None, None)
        assert not service.silent
        found = [finding for finding in diagnose(service) if "short time ago" not in finding.what]
        if found and enough(found):
            return found
        if not found and enough([]):
            return []
        assert time.monotonic() < deadline, found


async def status(running: Gateway) -> Status:
    """Whatever is away, it answers."""
    return Status.model_validate((await running.ask("GET", "/v1/status")).document)


async def test_with_a_token_and_over_tls(
    kafka: KafkaCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, tokens = trustme.CA(), {"all": new_token(), "some": new_token()}
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "gateway.pem")
    issued.private_key_pem.write_to_path(tmp_path / "gateway.key")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    files = {"certificate": "gateway.pem", "key": "gateway.key", "ca": "ca.pem"}
    tables = "[tls]\n" + "".join(f'{setting} = "{tmp_path / file}"\n' for setting, file in files.items())
    for name, patterns in (("all", '["*"]'), ("some", '["nginx", "squid"]')):
        tables += f'[[tokens]]\nname = "{name}"\nsha256 = "{tokens[name][1]}"\nadmin = {patterns}\n'
        (tmp_path / f"{name}.token").write_text(tokens[name][0] + "\n")
    # Nobody but the options says whom to trust.
    monkeypatch.delenv("LOGFERRY_TOKEN", raising=False)

    async def run(*argv: str, token: str | None = "all", ca: bool = True) -> tuple[int, str]:
        options = ["--url", running.urls[0]]
        options += [] if token is None else ["--token-file", str(tmp_path / f"{token}.token")]
        options += ["--ca-file", str(tmp_path / "ca.pem")] if ca else []
        exit_status = await asyncio.to_thread(command, *argv, *options)
        out, err = capsys.readouterr()
        return exit_status, out + err

    context = trusting(authority)
    async with SecuredGateway(tmp_path, kafka.bootstrap, 2, tables, "https", context) as running:
        exit_status, said = await run("status")
        assert exit_status == 0, said
        assert all(url in said for url in running.urls)
        _, said = await run("status", "--json")
        assert not any(secret in said for made in tokens.values() for secret in made)
        assert (await run("status", token="some")) == (2, refusal("the token some does not have the right to do this"))
        assert (await run("status", token=None))[0] == 2
        exit_status, said = await run("status", ca=False)
        assert exit_status == 3
        assert "CERTIFICATE_VERIFY_FAILED" in said

        topic = f"nginx-{time.time_ns()}"
        assert (await run("topics", "create", topic, "--partitions", "2")) == (
            0,
            f"dc1.{topic} created with 2 partitions\n",
        )
        assert (await run("topics", "grow", topic, "--partitions", "3", token="some"))[0] == 1
        assert (await run("topics", token=None))[0] == 2
        monkeypatch.setenv("LOGFERRY_TOKEN", tokens["all"][0])
        assert topic in (await run("topics", token=None))[1]
        assert (await run("topics", ca=False))[0] == 3


def refusal(detail: str) -> str:
    return f"logferry: {detail}; pass a token with --token-file or the environment variable LOGFERRY_TOKEN\n"


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_no_answer_and_wrong_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for argv, exit_status, said in (
        (["--url", "http://127.0.0.1:1,http://127.0.0.1:2"], 3, "no gateway answers at http://127.0.0.1:1"),
        (["--url", "ftp://127.0.0.1"], 2, "is not http(s)://host[:port][/path]"),
        (["--token-file", str(tmp_path / "empty")], 2, "does not hold a token"),
        (["--ca-file", str(tmp_path / "none")], 2, "No such file"),
    ):
        assert command("status", *argv) == exit_status
        assert said in capsys.readouterr().err
