"""The arithmetic of `logferry.ops.capacity`, against figures that were computed by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from logferry.ops.capacity.__main__ import main
from logferry.ops.capacity.plan import Site, ceilings, notes, plan, rates

PAGE = Path(__file__).parents[4] / "ops" / "docs" / "operations" / "capacity.md"
# 86.4 TB a day are 1 GB/s, so that every figure can be checked in the head.
ROUND = Site(tb_per_day=86.4, peak_factor=2, request_kib=1e9 / 1024 / 10_000, hosts=1000, files=1)


def needs(site: Site) -> dict[tuple[str, str], float]:
    return {(need.part, need.what): need.value for need in plan(site)}


def test_rates_with_one_of_two_data_centres_lost() -> None:
    at = rates(ROUND)
    # All hosts write 2 GB/s to the one that is left. It copies from nobody.
    assert (at.mean, at.peak, at.survivors, at.own, at.mirrored) == pytest.approx((1, 2, 1, 2, 0))
    assert (at.read, at.share) == (2, 1)


def test_rates_with_one_of_three_lost_and_two_copies() -> None:
    at = rates(replace(ROUND, data_centres=3, copies=2))
    # Two are left with 1 GB/s each, and each copies the other's. A mirror copies half of what is written elsewhere.
    assert (at.survivors, at.own, at.mirrored, at.read, at.share) == pytest.approx((2, 1, 1, 1, 0.5))


def test_the_gateway_of_a_gigabyte_a_second() -> None:
    found = needs(ROUND)
    # 2 GB/s in 20,000 requests/s: 20,000 x 80 us + 2 x 4.6 s + 2 x 1.7 s = 14.2 cores; x 2 / 0.6 = 47.3.
    assert found["gateway", "requests"] == pytest.approx(20_000)
    assert found["gateway", "cores"] == pytest.approx(14.2)
    assert found["gateway", "workers"] == 48
    # Network: 2 GB/s in and 2 GB/s out over cards of 1 GB/s (80 % of 10 Gbit/s), and one host away.
    assert found["gateway", "hosts"] == 5
    # 2 x (48 + 16) = 128 and 2,000 MB/s / 26 / 0.6 = 128.2.
    assert found["gateway", "lanes"] == 129


def test_the_brokers_of_a_gigabyte_a_second() -> None:
    found = needs(ROUND)
    assert found["Kafka", "stored rate"] == pytest.approx(500)
    # 129 lanes x 50 x 0.0023 = 14.8; 2 GB/s x 2.8 x 3 = 16.8.
    assert found["Kafka", "cores"] == pytest.approx(31.635)
    # The data centre holds all: 1 GB/s for 64 h and 2 GB/s for 8 h = 288,000 GB; x 0.25 = 72,000 GB;
    # 129 lanes x 0.67 = 86.43 GB; x 3 / 0.7.
    assert found["Kafka", "disk space"] == pytest.approx(72_086.43 * 3 / 0.7 / 1000)
    assert found["Kafka", "disk throughput"] == pytest.approx(500 * 3 * 3)
    # 2 replicas, loader: 3 x 500; readers 500; the mirror that catches up 500.
    assert found["Kafka", "network out"] == pytest.approx(2500)
    assert found["Kafka", "brokers"] == math.ceil(308.94 / 10)


@pytest.mark.parametrize(
    ("changes", "why", "brokers"),
    [
        ({"disk_tb": 1000.0}, "disk throughput", 10),  # 4,500 MB/s / 500, one away
        ({"disk_tb": 1000.0, "disk_mb": 1e6}, "cores", 5),  # 31.6 / 0.6 / 16 = 3.3, one away
        ({"disk_tb": 1000.0, "disk_mb": 1e6, "cores": 64, "nic_gbit": 5.0}, "network", 6),  # 2.5 GB/s / 0.5, one away
        ({"tb_per_day": 0.01}, "replication", 3),
    ],
)
def test_the_resource_that_decides_on_the_brokers(changes: dict[str, Any], why: str, brokers: int) -> None:
    site = replace(ROUND, **changes)
    row = next(need for need in plan(site) if need.what == "brokers")
    assert (row.why.split(" decides")[0], row.value) == (why, brokers)


def test_the_mirror_of_a_data_centre_that_returns() -> None:
    found = needs(ROUND)
    # In as much time as it was away, it copies what came at 2 GB/s, and half of the mean that is written meanwhile.
    assert found["mirror", "link"] == pytest.approx(2.5 * 0.25 * 8)
    assert found["mirror", "workers"] == math.ceil(2 * 2.5 * 1.05 / 0.6)
    assert found["mirror", "backlog"] == pytest.approx(2 * 8 * 3600 * 0.25 / 1000)
    # 14,400 GB over 1 GB/s (80 % of 10 Gbit/s) less the 0.125 GB/s of the mean.
    assert found["mirror", "catch-up"] == pytest.approx(14_400 / 0.875 / 3600)


def test_the_loader_and_the_audit() -> None:
    found = needs(ROUND)
    assert found["loader", "cores"] == math.ceil(3000 / 8.5) == 353
    assert found["loader", "backlog"] == pytest.approx(57.6)
    assert found["loader", "catch-up"] == pytest.approx(57_600 / (353 * 0.0085 - 1) / 3600)
    assert found["audit", "cores"] == math.ceil(2 * 1000 / 64 * 2)
    # A peak above three times the mean decides.
    assert needs(replace(ROUND, peak_factor=5))["loader", "cores"] == math.ceil(5000 / 8.5)


def test_the_examples_of_the_sizing_page() -> None:
    """200 MB/s from 5,000 hosts: cores of the gateway, disk of a data centre, cores of the loader."""
    site = Site(tb_per_day=0.2 * 86.4, peak_factor=1, request_kib=1e4 / 1024, readers=0, outage_h=0)
    found = needs(site)
    assert found["gateway", "cores"] == pytest.approx(2.52)
    assert found["gateway", "workers"] == 9
    state = found["gateway", "lanes"] * 0.67 * 3 / 0.7 / 1000
    assert found["Kafka", "disk space"] - state == pytest.approx(55.5, abs=0.1)
    assert found["loader", "cores"] == 71  # the page rounds 17 MB/s on 2 cores to 72


def test_one_data_centre_has_no_mirror_and_says_that_nothing_takes_over() -> None:
    site = replace(ROUND, data_centres=1, copies=1)
    assert not [need for need in plan(site) if need.part == "mirror"]
    assert not [one for one in ceilings(site) if "link" in one.name]
    assert "nothing takes over" in notes(site)[0]
    assert rates(site).own == pytest.approx(2)


def test_a_link_that_is_too_slow_is_the_bottleneck_and_never_catches_up() -> None:
    site = replace(ROUND, link_gbit=1.0)
    first, second = ceilings(site)[:2]
    assert (first.name, first.use) == ("outage and catch-up", math.inf)
    # 0.1 GB/s do not carry the steady 0.125.
    assert second.name == "link between data centres"
    assert second.use == pytest.approx(5 / 0.8)


def test_a_setting_that_can_be_raised_is_not_the_bottleneck() -> None:
    found = ceilings(replace(ROUND, hosts=100_000))
    assert found[0].kind == "capacity"
    assert {one.name: one.use for one in found}["connections to a worker"] == pytest.approx(25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tb-per-day 0", "--tb-per-day: 0 must be from 0.001 to 100000"),
        ("--tb-per-day nan", "--tb-per-day: nan must be from"),
        ("--tb-per-day inf", "--tb-per-day: inf must be from"),
        ("--tb-per-day much", "--tb-per-day: invalid float value: 'much'"),
        ("--tb-per-day 1 --peak-factor 0.5", "--peak-factor: 0.5 must be from 1 to 100"),
        ("--tb-per-day 1 --copies 3", "--copies: 3 must be at most the 2 of --data-centres"),
        ("--tb-per-day 1 --data-centres 1", "--copies: 2 must be at most the 1 of --data-centres"),
        ("--tb-per-day 1 --replicas 2.5", "--replicas: invalid int value: '2.5'"),
        ("--tb-per-day 1 --parser xml", "--parser: 'xml' must be one of access, lines"),
        ("", "the following arguments are required: --tb-per-day"),
    ],
)
def test_bad_input_is_named(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_document_names_the_bottleneck_and_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tb-per-day", "86.4", "--link-gbit", "1", "--json"]) == 1

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    document = json.loads(capsys.readouterr().out, parse_constant=no_constant)
    assert document["bottleneck"] == "outage and catch-up"
    assert document["given"]["link_gbit"] == 1
    never = next(row for row in document["plan"] if (row["part"], row["what"]) == ("mirror", "catch-up"))
    assert never["value"] is None
    assert document["limits"][0]["use"] is None


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"```console\n\$ python -m logferry\.ops\.capacity ([^\n]*)\n(.*?)```", text, re.DOTALL)
    assert len(shown) == 1
    for arguments, output in shown:
        main(arguments.split())
        assert capsys.readouterr().out == output
