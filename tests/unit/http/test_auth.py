"""Who may do what, decided without a gateway: tables of patterns, rights and the answers to callers."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway import token_command
from logferry.gateway.access.rights import _DECISIONS, ANYBODY, Caller, Patterns
from logferry.gateway.config import Config, ConfigError, load
from logferry.gateway.contract.names import Malformed
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.token_command import new_token

DCS = frozenset({"dc1", "dc2"})
TOKEN = "lf_the-token-of-the-tests"
OTHER = "lf_another-one"


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def config(*tokens: Mapping[str, Any], **settings: Any) -> Config:
    base = {"dc": "dc1", "data_centres": ["dc1", "dc2"], "kafka": {"bootstrap_servers": "x:1"}}
    return Config.model_validate({**base, "tokens": list(tokens), **settings})


def token(secret: str = TOKEN, name: str = "web", **lists: Any) -> dict[str, Any]:
    return {"name": name, "sha256": sha256(secret), **lists}


def admit(gate: Gate, right: Right, path: str, secret: str | None = TOKEN) -> Caller:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    return gate.admit(right, headers, path.split("/"))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("nginx", ["dc1.nginx", "dc2.nginx"], ["dc1.nginx2", "dc1.a.nginx", "dc1.Nginx"]),
        ("nginx-*", ["dc1.nginx-a", "dc2.nginx-"], ["dc1.nginx", "dc1.x-nginx-a"]),
        ("dc1.nginx", ["dc1.nginx"], ["dc2.nginx", "dc1.dc1.nginx"]),
        ("dc1.*", ["dc1.nginx", "dc1.a.b"], ["dc2.nginx"]),
        ("*.nginx", ["dc1.nginx", "dc2.nginx", "dc9.nginx"], ["dc1.a.nginx"]),
        ("*", ["dc1.nginx", "dc1.a.b"], []),
        # No data centre is called so: it is a topic's name with a dot.
        ("app.access", ["dc1.app.access", "dc2.app.access"], ["app.access", "dc1.app.error"]),
        ("log?", ["dc1.log1"], ["dc1.log", "dc1.log10"]),
        ("log[0-9]", ["dc1.log1"], ["dc1.logx"]),
    ],
)
def test_what_a_pattern_is_good_for(pattern: str, good: list[str], bad: list[str]) -> None:
    patterns = Patterns([pattern], DCS)
    for _ in range(2):  # the second time from memory
        assert [topic for topic in good if not patterns.match(topic)] == []
        assert [topic for topic in bad if patterns.match(topic)] == []


def test_no_pattern_is_good_for_nothing() -> None:
    assert not Patterns([], DCS).match("dc1.nginx")


def test_what_is_remembered_is_bounded() -> None:
    patterns = Patterns(["a*"], DCS)
    for number in range(3 * _DECISIONS):
        assert not patterns.match(f"dc1.topic-{number}")
    assert len(patterns._decided) <= _DECISIONS


WRITE, SOURCE = "/v1/topics/nginx/sources/web1%2Fa.log/chunks", "/v1/topics/nginx/sources/web1%2Fa.log"
TOPIC, LIST = "/v1/topics/nginx", "/v1/topics/nginx/sources"
READ = "/v1/topics/dc1.nginx/partitions/0/chunks"
WRITER, READER, ADMIN = token(write=["nginx"]), token(read=["dc1.nginx"]), token(admin=["nginx"])
ALL = token(admin=["*"])
OWN = token(write=["nginx"], sources="web1/*")
STRANGER = token(write=["squid"], read=["squid"], admin=["squid"])


@pytest.mark.parametrize(
    ("right", "path", "allowed", "refused"),
    [
        (Right.WRITE, WRITE, [WRITER, OWN], [READER, ADMIN, ALL, STRANGER]),
        (Right.WRITE, WRITE.replace("web1", "web2"), [WRITER], [OWN]),
        (Right.SOURCE, SOURCE, [WRITER, OWN, READER, ADMIN, ALL], [STRANGER]),
        (Right.SOURCE, SOURCE.replace("web1", "web2"), [WRITER, READER, ADMIN], [OWN, STRANGER]),
        (Right.SOURCE, LIST, [WRITER, OWN, READER, ADMIN], [STRANGER]),
        (Right.READ, READ, [READER], [WRITER, OWN, ADMIN, ALL, STRANGER]),
        (Right.READ, READ.replace("dc1", "dc2"), [], [READER]),
        (Right.TOPIC, TOPIC, [WRITER, OWN, READER, ADMIN, ALL], [STRANGER]),
        (Right.TOPIC, "/v1/topics/dc1.nginx", [WRITER, READER, ADMIN], [STRANGER]),
        (Right.TOPIC, "/v1/topics/dc2.nginx", [WRITER, ADMIN], [READER, STRANGER]),
        (Right.ADMIN, TOPIC, [ADMIN, ALL], [WRITER, OWN, READER, STRANGER]),
        (Right.ADMIN, SOURCE, [ADMIN, ALL], [WRITER, OWN, READER, STRANGER]),
        (Right.EVERYTHING, "/v1/anything", [ALL], [ADMIN, WRITER, READER]),
        (Right.KNOWN, "/v1/topics", [WRITER, READER, ADMIN, STRANGER], []),
    ],
)
def test_rights(right: Right, path: str, allowed: list[dict[str, Any]], refused: list[dict[str, Any]]) -> None:
    for settings in allowed:
        assert admit(Gate(config(settings)), right, path).name == "web"
    for settings in refused:
        with pytest.raises(Problem) as caught:
            admit(Gate(config(settings)), right, path)
        assert (caught.value.kind, caught.value.status) == ("forbidden", 403)
        assert "nginx" not in caught.value.detail


EVERY_RIGHT_BUT_OPEN = [right for right in Right if right not in (Right.OPEN, Right.METRICS)]


@pytest.mark.parametrize("right", EVERY_RIGHT_BUT_OPEN)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": f"Bearer {OTHER}"},
        {"Authorization": f"Bearer {sha256(TOKEN)}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": "Bearer \udcff\udc80"},
    ],
)
def test_without_a_known_token_nothing_is_disclosed(right: Right, headers: dict[str, str]) -> None:
    gate = Gate(config(token(write=["*"], read=["*"], admin=["*"])))
    # Not even that the name of the topic is none.
    for path in (WRITE, "/v1/topics/%FF/sources/%FF/chunks"):
        with pytest.raises(Problem) as caught:
            gate.admit(right, headers, path.split("/"))
        assert (caught.value.kind, caught.value.status) == ("unauthenticated", 401)
        assert TOKEN not in str(caught.value.document())
        assert OTHER not in str(caught.value.document())


@pytest.mark.parametrize("path", ["/v1/topics/%FF/x", "/v1/topics/a b/x", "/v1/topics//x"])
def test_a_name_that_can_be_none_is_malformed(path: str) -> None:
    gate = Gate(config(ALL))
    for right in (Right.WRITE, Right.READ, Right.ADMIN, Right.TOPIC, Right.SOURCE):
        with pytest.raises(Malformed):
            admit(gate, right, path)


def test_the_scheme_is_not_case_sensitive_and_space_does_not_matter() -> None:
    gate = Gate(config(WRITER))
    assert gate.admit(Right.KNOWN, {"Authorization": f"bearer  {TOKEN} "}, []).name == "web"


def test_open_routes_need_nothing() -> None:
    gate = Gate(config(ALL, listen="10.0.0.1:80"))
    assert gate.admit(Right.OPEN, {}, ["", "healthz"]) is ANYBODY


@pytest.mark.parametrize("listen", ["127.0.0.1:80", "10.0.0.1:80"])
def test_metrics_are_open_by_setting_alone(listen: str) -> None:
    """On loopback a proxy may be in front."""
    path = ["", "metrics"]
    for open_ones in (config(ALL, listen=listen, open_metrics=True), config()):
        assert Gate(open_ones).admit(Right.METRICS, {}, path) is ANYBODY
    closed = Gate(config(ALL, token(OTHER, "other", admin=["nginx"]), listen=listen))
    with pytest.raises(Problem, match="unauthenticated"):
        closed.admit(Right.METRICS, {}, path)
    with pytest.raises(Problem, match="forbidden"):
        closed.admit(Right.METRICS, {"Authorization": f"Bearer {OTHER}"}, path)
    assert closed.admit(Right.METRICS, {"Authorization": f"Bearer {TOKEN}"}, path).name == "web"


def test_without_tokens_everybody_may_do_everything() -> None:
    gate = Gate(config())
    for right in Right:
        caller = gate.admit(right, {}, WRITE.split("/"))
        assert caller is ANYBODY
    assert ANYBODY.may_write_as("dc1.nginx", "x")
    assert ANYBODY.may_see_source("dc1.nginx", "x")
    assert ANYBODY.may_read("dc1.nginx")
    assert ANYBODY.admin.match("dc1.nginx")


def test_tokens_are_replaced() -> None:
    gate = Gate(config(WRITER))
    gate.replace(config(token(OTHER, "new", read=["nginx"])).tokens)
    assert admit(gate, Right.READ, READ, OTHER).name == "new"
    with pytest.raises(Problem, match="unauthenticated"):
        admit(gate, Right.WRITE, WRITE, TOKEN)


def test_rights_are_those_of_now() -> None:
    gate = Gate(config(READER))
    caller = admit(gate, Right.READ, READ)
    assert gate.present(caller).may_read("dc1.nginx")
    gate.replace(config(token(read=["squid"])).tokens)
    assert not gate.present(caller).may_read("dc1.nginx")
    assert gate.present(caller).may_read("dc1.squid")
    # Another token under the same name, and then another name.
    gate.replace(config(token(OTHER, read=["nginx"])).tokens)
    assert not gate.present(caller).may_read("dc1.nginx")
    assert gate.present(admit(gate, Right.READ, READ, OTHER)).may_read("dc1.nginx")
    gate.replace(config(token(TOKEN, "other", read=["nginx"])).tokens)
    assert gate.present(caller).name == "other"
    assert not gate.present(ANYBODY).may_see("dc1.nginx")
    assert "sha256" not in repr(caller)


def test_a_caller_has_two_tokens_while_they_are_rotated() -> None:
    gate = Gate(config(WRITER))
    old = admit(gate, Right.WRITE, WRITE)
    gate.replace(config({**WRITER, "sha256": [sha256(TOKEN), sha256(OTHER)]}).tokens)
    new = admit(gate, Right.WRITE, WRITE, OTHER)
    assert new.name == old.name == admit(gate, Right.WRITE, WRITE).name  # the name is what a source belongs to
    assert gate.present(old).may_write_as("dc1.nginx", "web1/a.log")
    gate.replace(config({**WRITER, "sha256": [sha256(OTHER)]}).tokens)
    assert gate.present(new).may_write_as("dc1.nginx", "web1/a.log")
    assert not gate.present(old).may_write_as("dc1.nginx", "web1/a.log")
    with pytest.raises(Problem, match="unauthenticated"):
        admit(gate, Right.WRITE, WRITE)


def test_without_tokens_callers_of_now_are_anybody() -> None:
    gate = Gate(config())
    assert gate.present(ANYBODY) is ANYBODY
    gate.replace(config(READER).tokens)
    assert not gate.present(ANYBODY).may_read("dc1.nginx")


@pytest.mark.parametrize("listen", ["127.0.0.1:80", "10.0.0.1:80"])
def test_a_running_gateway_never_loses_its_last_token(listen: str) -> None:
    gate = Gate(config(WRITER, listen=listen))
    with pytest.raises(ValueError, match="everybody"):
        gate.replace([])
    assert admit(gate, Right.WRITE, WRITE).name == "web"
    with pytest.raises(Problem, match="unauthenticated"):
        admit(gate, Right.WRITE, WRITE, None)


# ---- the configuration ----------------------------------------------------------------------------------------

LEAST = 'dc = "dc1"\n{}\n[kafka]\nbootstrap_servers = "127.0.0.1:9092"\n{}'
ENTRY = f'[[tokens]]\nname = "a"\nsha256 = "{sha256(TOKEN)}"\nwrite = ["x"]\n'


def loaded(tmp_path: Path, plain: str, tables: str) -> Config:
    path = tmp_path / "gateway.toml"
    path.write_text(LEAST.format(plain, tables), encoding="utf-8")
    return load(path)


@pytest.mark.parametrize(
    ("plain", "tables", "named"),
    [
        ("", ENTRY.replace(sha256(TOKEN), TOKEN), "tokens.0.sha256"),
        ("", ENTRY.replace(sha256(TOKEN), sha256(TOKEN).upper()), "tokens.0.sha256"),
        ("", ENTRY.replace('"a"', '"a b"'), "tokens.0.name"),
        ("", ENTRY.replace('["x"]', "[]"), "a has no right"),
        ("", ENTRY.replace('["x"]', '["x y"]'), "tokens.0.write.0"),
        ("", ENTRY.replace("write", "read") + 'sources = "x"', "sources restricts"),
        ("", ENTRY.replace('name = "a"', f'token = "{TOKEN}"'), "tokens.0.token"),
        ("", ENTRY + ENTRY.replace('"a"', '"b"'), "a and b have the same sha256"),
        ("", ENTRY + ENTRY.replace(sha256(TOKEN), sha256(OTHER)), "a and a have the same name"),
        ("", ENTRY.replace(f'"{sha256(TOKEN)}"', "[]"), "tokens.0.sha256"),
        (
            "",
            ENTRY.replace(f'"{sha256(TOKEN)}"', f'["{sha256(TOKEN)}", "{sha256(TOKEN)}"]'),
            "a and a have the same sha256",
        ),
        ("", ENTRY.replace(f'"{sha256(TOKEN)}"', f'["{sha256(OTHER)}", "{TOKEN}"]'), "tokens.0.sha256.1"),
        ("anonymous = true", ENTRY, "anonymous"),
        ('listen = "192.0.2.1:80"', "", "without tokens the gateway serves loopback only"),
        ('listen = "0.0.0.0:80"', ENTRY, "advertised_host"),
        ('listen = "[::]:80"\nanonymous = true', "", "advertised_host"),
    ],
)
def test_refused_and_named_without_the_secret(tmp_path: Path, plain: str, tables: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, plain, tables)
    assert named in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert sha256(TOKEN) not in str(caught.value)


@pytest.mark.parametrize(
    ("plain", "tables"),
    [
        ('listen = "192.0.2.1:80"', ENTRY),
        ('listen = "192.0.2.1:80"\nanonymous = true', ""),
        ('listen = "0.0.0.0:80"\nadvertised_host = "gw1.example"', ENTRY),
        ('listen = "localhost:80"', ""),
        ('listen = "[::1]:80"', ENTRY),
    ],
)
def test_accepted(tmp_path: Path, plain: str, tables: str) -> None:
    assert sha256(TOKEN) not in repr(loaded(tmp_path, plain, tables))


def test_a_new_token_is_good_as_it_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert token_command.main(["web"]) == 0
    printed = capsys.readouterr().out
    secret = printed.splitlines()[1].removeprefix("# ")
    entry = tomllib.loads(printed)["tokens"][0]
    assert entry == {"name": "web", "sha256": sha256(secret), "write": [], "read": [], "admin": []}
    configured = loaded(tmp_path, "", printed.replace("write = []", 'write = ["nginx"]'))
    assert admit(Gate(configured), Right.WRITE, WRITE, secret).name == "web"


def test_new_tokens_differ_and_are_long() -> None:
    made = {new_token()[0] for _ in range(100)}
    assert len(made) == 100
    assert min(map(len, made)) >= 43


@pytest.mark.parametrize("argv", [["a b"], ["a", "b"], [""], ["--no"]])
def test_wrong_use(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        token_command.main(argv)
    assert (ended.value.code, capsys.readouterr().err.split()[:3]) == (2, ["usage:", "logferry", "token"])


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        token_command.main(["--help"])
    assert (ended.value.code, "example: logferry token" in capsys.readouterr().out) == (0, True)
