"""Secrets with dates, denials and rights on consumers, decided without a gateway; and how a token is rotated."""

from __future__ import annotations

import hashlib
import json
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway import token_command
from logferry.gateway.access.rights import NOBODY, Caller, NamePatterns, Patterns, callers_of, role_of
from logferry.gateway.access.settings import TokenSettings
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Gate, Right

DCS = frozenset({"dc1", "dc2"})
OLD, NEW = "lf_old", "lf_new"
NOW = datetime(2027, 3, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def secret(token: str, begins: datetime | None = None, ends: datetime | None = None) -> dict[str, Any]:
    return {"sha256": sha256(token), "not_before": begins, "not_after": ends}


def settings(**rights: Any) -> TokenSettings:
    return TokenSettings.model_validate({"name": "web", "sha256": sha256(NEW), **rights})


def caller(**rights: Any) -> Caller:
    entry = settings(**rights)
    return callers_of(entry, role_of(entry, DCS))[0]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = NOW

    def __call__(self) -> float:
        return self.at.timestamp()


def gate_of(clock: Clock, *entries: dict[str, Any]) -> Gate:
    base = {"dc": "dc1", "data_centres": ["dc1", "dc2"], "kafka": {"bootstrap_servers": "x:1"}}
    return Gate(Config.model_validate({**base, "tokens": list(entries)}), clock)


def admitted(gate: Gate, token: str) -> str:
    """The name of the caller, or why there is none."""
    try:
        return str(gate.admit(Right.KNOWN, {"Authorization": f"Bearer {token}"}, []).name)
    except Problem as problem:
        return f"{problem.kind}: {problem.detail}"


# ---- dates -------------------------------------------------------------------------------------------------------


def test_two_secrets_follow_each_other_without_a_gap() -> None:
    clock = Clock()
    secrets = [secret(OLD, ends=NOW + DAY), secret(NEW, begins=NOW)]
    gate = gate_of(clock, {"name": "web", "secrets": secrets, "write": ["nginx"]})
    seen = []
    for at in (-DAY, -timedelta(seconds=1), timedelta(0), DAY - timedelta(seconds=1), DAY):
        clock.at = NOW + at
        seen.append((admitted(gate, OLD), admitted(gate, NEW)))
    early, ended = (f"unauthenticated: the token {why}" for why in ("is not valid yet", "has ended"))
    assert seen == [("web", early), ("web", early), ("web", "web"), ("web", "web"), (ended, "web")]


def test_who_streams_when_its_secret_ends_has_no_right_from_then_on() -> None:
    clock = Clock()
    gate = gate_of(clock, {"name": "web", "secrets": [secret(OLD, ends=NOW + DAY), secret(NEW)], "read": ["nginx"]})
    old, new = (gate.admit(Right.KNOWN, {"Authorization": f"Bearer {token}"}, []) for token in (OLD, NEW))
    assert gate.present(old).may_read("dc1.nginx")
    clock.at = NOW + DAY
    assert gate.present(old) is NOBODY
    assert gate.present(new).may_read("dc1.nginx")
    # What it ordered before is a matter of its entry, not of its dates.
    assert gate.entry("web").may_read("dc1.nginx")
    assert gate.entry("other") is NOBODY


@pytest.mark.parametrize(
    ("secrets", "until"),
    [
        ([secret(OLD)], None),
        ([secret(OLD, ends=NOW + 20 * DAY)], None),
        ([secret(OLD, ends=NOW + 13 * DAY)], NOW + 13 * DAY),
        ([secret(OLD, ends=NOW + 3 * DAY), secret(NEW, NOW + 2 * DAY)], None),
        ([secret(NEW, NOW + 2 * DAY), secret(OLD, ends=NOW + 3 * DAY)], None),
        # A gap between the two.
        ([secret(OLD, ends=NOW + 3 * DAY), secret(NEW, NOW + 4 * DAY)], NOW + 3 * DAY),
        ([secret(OLD, ends=NOW - DAY)], NOW),
        ([secret(OLD, NOW + DAY)], NOW),
    ],
)
def test_a_caller_that_soon_has_no_secret_is_named(
    secrets: list[dict[str, Any]], until: datetime | None, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = gate_of(Clock(), {"name": "web", "secrets": secrets, "write": ["nginx"]})
    expected = [] if until is None else [("web", f"{until:%Y-%m-%dT%H:%M:%SZ}")]
    assert gate.expiring() == expected
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["token"], line["at"]) for line in logged] == [("token_expires", *e) for e in expected]
    assert len(gate.warnings()) == len(expected)
    assert all(": " in text for text in gate.warnings())


def test_the_metric_has_the_end_of_each_caller_that_has_one() -> None:
    ends = {"name": "ends", "secrets": [secret(OLD, ends=NOW + 20 * DAY)], "write": ["nginx"]}
    gate = gate_of(Clock(), ends, {"name": "stays", "sha256": sha256(NEW), "write": ["nginx"]})
    assert [*gate.ends()] == [("ends", (NOW + 20 * DAY).timestamp())]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ('write = ["x"]', "web has no secret"),
        ('secrets = [{ sha256 = "{h}", not_after = 2027-01-01 }]\nwrite = ["x"]', "not_after"),
        ('secrets = [{ sha256 = "{h}", not_after = 2027-01-01T00:00:00 }]\nwrite = ["x"]', "timezone"),
        (
            'secrets = [{ sha256 = "{h}", not_before = 2027-01-02T00:00:00Z, not_after = 2027-01-01T00:00:00Z }]\n'
            'write = ["x"]',
            "not_before is not earlier",
        ),
        ('sha256 = "{h}"\nsecrets = [{ sha256 = "{h}" }]\nwrite = ["x"]', "have the same sha256"),
        ('sha256 = "{h}"\nwrite = ["x"]\ndeny = { wriet = ["x"] }', "deny.wriet"),
        ('sha256 = "{h}"\nread = ["x"]\nconsumers = { use = ["x"] }', "use"),
    ],
)
def test_a_wrong_entry_is_refused(entry: str, text: str) -> None:
    base = '[[tokens]]\nname = "web"\n' + entry.replace("{h}", sha256(OLD))
    raw = {"dc": "dc1", "kafka": {"bootstrap_servers": "x:1"}, **tomllib.loads(base)}
    with pytest.raises(ValueError, match=text):
        Config.model_validate(raw)


# ---- denials -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granted", "denied", "topic", "expected"),
    [
        (["*"], ["payments"], "dc1.payments", False),
        (["*"], ["payments"], "dc2.payments", False),  # its copy, too
        (["*"], ["payments"], "dc1.nginx", True),
        (["dc1.payments"], ["pay*"], "dc1.payments", False),
        (["*"], ["dc1.payments"], "dc1.payments", False),
        (["*"], ["dc1.payments"], "dc2.payments", True),  # one data centre alone
        (["*"], ["*.payments"], "dc2.payments", False),
        (["*"], ["dc2.*"], "dc2.nginx", False),
        (["nginx"], ["*"], "dc1.nginx", False),
        (["*"], ["Payments"], "dc1.payments", True),
    ],
)
def test_a_denial_is_stronger_than_a_grant(granted: list[str], denied: list[str], topic: str, expected: bool) -> None:
    patterns = Patterns(granted, DCS, denied)
    for _ in range(2):  # the second time from memory
        assert patterns.match(topic) == expected
    assert patterns.denies(topic) != expected
    assert not patterns.is_everything


def test_each_right_has_denials_of_its_own() -> None:
    for right in ("write", "read", "admin", "report"):
        held = caller(write=["*"], read=["*"], admin=["*"], report=["*"], deny={right: ["payments"]})
        sets = {name: getattr(held, name) for name in ("write", "read", "admin", "report")}
        assert {name for name, patterns in sets.items() if not patterns.match("dc1.payments")} == {right}
        assert all(patterns.match("dc1.nginx") for patterns in sets.values())
        assert held.admin.is_everything == (right != "admin")


def test_what_is_denied_is_not_seen_either() -> None:
    hidden = caller(read=["*"], deny={"read": ["payments"]})
    assert not hidden.may_see("dc1.payments")
    assert not hidden.may_see_source("dc1.payments", "web1")


def test_denied_sources() -> None:
    for held in (
        caller(write=["*"], deny={"sources": ["db*", "root"]}),
        caller(write=["*"], sources="*", deny={"sources": ["db*", "root"]}),
    ):
        sources = ("web1", "db1", "root", "rooty")
        assert [held.may_write_as("dc1.nginx", source) for source in sources] == [True, False, False, True]
        assert not held.may_see_source("dc1.nginx", "db1")
    gate = gate_of(Clock(), settings(write=["*"], deny={"sources": ["db*"]}).model_dump())
    headers = {"Authorization": f"Bearer {NEW}"}
    assert gate.admit(Right.WRITE, headers, ["", "v1", "topics", "nginx", "sources", "web1", "chunks"]).name == "web"
    # Escaped as whoever wants to pass by would do it.
    for source in ("db1", "%64b1", "d%621"):
        with pytest.raises(Problem, match="forbidden"):
            gate.admit(Right.WRITE, headers, f"/v1/topics/nginx/sources/{source}/chunks".split("/"))


def test_no_pattern_of_names_matches_nothing() -> None:
    assert not NamePatterns([]).match("x")
    assert NamePatterns().match("x")
    assert not NamePatterns(None, ["x"]).match("x")


# ---- consumers ---------------------------------------------------------------------------------------------------

ACTS = ("read", "commit", "reset")


@pytest.mark.parametrize(
    ("rights", "consumer", "allowed"),
    [
        ({}, "billing", {"read", "commit", "reset"}),
        ({"consumers": ["web-*"]}, "web-1", {"read", "commit", "reset"}),
        ({"consumers": ["web-*"]}, "billing", set()),
        ({"consumers": []}, "billing", set()),
        ({"consumers": {"read": ["*"]}}, "billing", {"read"}),
        ({"consumers": {"commit": ["billing"]}}, "billing", {"read", "commit"}),
        ({"consumers": {"reset": ["billing"]}}, "billing", {"read", "reset"}),
        ({"consumers": {"read": ["*"], "commit": ["web-*"]}}, "web-1", {"read", "commit"}),
        ({"consumers": {}}, "billing", set()),
        ({"deny": {"consumers": ["bill*"]}}, "billing", set()),
        ({"deny": {"consumers": ["bill*"]}}, "web-1", {"read", "commit", "reset"}),
        ({"consumers": {"reset": ["*"]}, "deny": {"consumers": ["billing"]}}, "billing", set()),
    ],
)
def test_rights_on_consumers(rights: dict[str, Any], consumer: str, allowed: set[str]) -> None:
    held = caller(read=["*"], **rights)
    assert {act for act in ACTS if held.may_use(consumer, act)} == allowed  # type: ignore[arg-type]


def test_nobody_may_do_anything() -> None:
    assert not any(NOBODY.may_use("billing", act) for act in ACTS)  # type: ignore[arg-type]
    assert not NOBODY.may_write_as("dc1.nginx", "web1")


# ---- the command -------------------------------------------------------------------------------------------------


def entry_of(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "gateway.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_token_with_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert token_command.main(["web", "--days", "90"]) == 0
    printed = capsys.readouterr().out
    made = TokenSettings.model_validate({**tomllib.loads(printed)["tokens"][0], "write": ["x"]})
    [found] = made.all_secrets
    assert found.sha256 == sha256(printed.splitlines()[1].removeprefix("# "))
    assert found.not_after is not None
    assert abs(found.not_after - datetime.now(UTC) - 90 * DAY) < timedelta(minutes=5)


@pytest.mark.parametrize("form", ["sha256", "list", "secrets"])
def test_a_rotation_keeps_the_present_secrets_for_the_overlap(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = datetime.now(UTC)
    gone, soon = now - DAY, now + DAY
    other = sha256("other")
    present = {
        "sha256": f'sha256 = "{sha256(OLD)}"',
        "list": f'sha256 = ["{sha256(OLD)}"]',
        "secrets": f'secrets = [{{ sha256 = "{sha256(OLD)}", not_after = 2999-01-01T00:00:00+02:00 }}, '
        f'{{ sha256 = "{sha256(NEW)}", not_after = {gone:%Y-%m-%dT%H:%M:%SZ} }}, '
        f'{{ sha256 = "{other}", not_after = {soon:%Y-%m-%dT%H:%M:%SZ} }}]',
    }
    file = entry_of(tmp_path, f'[[tokens]]\nname = "a"\n[[tokens]]\nname = "web"\n{present[form]}\nwrite = ["x"]\n')
    before = file.read_text()
    assert token_command.main(["web", "--config", str(file), "--overlap-days", "3", "--days", "30"]) == 0
    assert file.read_text() == before
    printed = capsys.readouterr().out
    made = TokenSettings.model_validate({"name": "web", "write": ["x"], **tomllib.loads(printed)})
    found = {one.sha256: one.not_after for one in made.secrets}
    new = sha256(printed.splitlines()[1].removeprefix("# "))
    expected = {sha256(OLD): 3 * DAY, new: 30 * DAY} | ({other: DAY} if form == "secrets" else {})
    assert found.keys() == expected.keys()
    for one, ends in found.items():
        assert ends is not None
        assert abs(ends - now - expected[one]) < timedelta(minutes=5)


@pytest.mark.parametrize("text", ["", '[[tokens]]\nname = "other"\n', "[[tokens", None])
def test_a_rotation_of_what_is_not_there(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none.toml" if text is None else entry_of(tmp_path, text)
    assert token_command.main(["web", "--config", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(file) in said.err or "TOML" in said.err or "Expected" in said.err
