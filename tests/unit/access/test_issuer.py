"""JSON Web Tokens at the gate: a real issuer over HTTP, real keys, good tokens and hostile ones."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from joserfc import jwk
from logferry.gateway.access import issuer as issuer_module
from logferry.gateway.access.issuer import Issuer
from logferry.gateway.access.rights import NOBODY, Caller
from logferry.gateway.access.settings import IssuerSettings
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import Call, Routes, json_response

from tests.support.issuer import AUDIENCE, TestIssuer, encoded


@pytest.fixture
async def issuer() -> AsyncIterator[TestIssuer]:
    async with TestIssuer() as issuer:
        yield issuer


class Worker:
    """Router and gate of a gateway that takes tokens of the issuer. ``ahead_s``: of its clock."""

    def __init__(self, issuer: TestIssuer, *rules: dict[str, str], **settings: Any) -> None:
        self.ahead_s = 0.0
        self.entry = {"name": "issuer", "issuer": issuer.url, "audience": AUDIENCE, **settings}
        default = {"issuer": "issuer", "claim": "groups", "value": "ops"}
        self.tokens: list[dict[str, Any]] = [
            {"name": "ops", "claims": [*rules] or [default], "read": ["nginx"], "deny": {"read": ["dc2.nginx"]}},
            {"name": "any", "claims": [{"issuer": "issuer", "claim": "iss", "value": issuer.url}], "write": ["nginx"]},
        ]
        self.gate = Gate(self.config(), lambda: time.time() + self.ahead_s)
        self.routes = Routes(self.gate)
        self.seen: list[Caller] = []

        async def handler(call: Call) -> web.StreamResponse:
            self.seen.append(call.caller)
            return json_response({})

        self.routes.add("GET", "/v1/topics", "topics", handler, Right.KNOWN)

    def config(self) -> Config:
        base = {"dc": "dc1", "data_centres": ["dc1", "dc2"], "kafka": {"bootstrap_servers": "x:1"}}
        return Config.model_validate({**base, "tokens": self.tokens, "issuers": [self.entry]})

    async def ask(self, token: str) -> tuple[int, str]:
        """The status, and the name of the caller or what is wrong."""
        self.seen.clear()
        headers = {"Authorization": f"Bearer {token}"}
        answer = await self.routes(make_mocked_request("GET", "/v1/topics", headers=headers))
        assert isinstance(answer, web.Response)
        assert token not in str(answer.body)
        if answer.status == 200:
            return 200, str(self.seen[0].name)
        assert isinstance(answer.body, bytes)
        document = json.loads(answer.body)
        kinds = {401: "unauthenticated", 403: "forbidden", 503: "issuer-unavailable"}
        assert document["type"].rpartition("/")[2] == kinds[answer.status]
        return answer.status, document["detail"]


@pytest.mark.parametrize("kid", ["rsa", "ec"])
async def test_a_good_token_has_the_rights_of_the_first_entry_that_fits(issuer: TestIssuer, kid: str) -> None:
    worker = Worker(issuer)
    assert await worker.ask(issuer.token(kid)) == (200, "ops:alice")
    [caller] = worker.seen
    assert (caller.may_read("dc1.nginx"), caller.may_read("dc2.nginx")) == (True, False)
    assert caller.write.is_nothing
    assert await worker.ask(issuer.token(kid, groups=["others"])) == (200, "any:alice")
    assert worker.seen[0].write.match("dc1.nginx")
    assert issuer.asked == 1


@pytest.mark.parametrize(
    ("rule", "claims", "fits"),
    [
        ({"claim": "groups", "value": "ops"}, {"groups": "ops"}, True),
        ({"claim": "groups", "value": "ops"}, {"groups": "ops other"}, False),
        ({"claim": "groups", "value": "ops"}, {"groups": ["oper", "opsx", 1, None, ["ops"]]}, False),
        ({"claim": "groups", "value": "ops"}, {"groups": {"ops": True}}, False),
        ({"claim": "scope", "value": "logs"}, {"scope": "openid logs"}, True),
        ({"claim": "scope", "value": "logs"}, {"scope": "openid logsx"}, False),
        ({"claim": "realm_access.roles", "value": "ops"}, {"realm_access": {"roles": ["ops"]}}, True),
        ({"claim": "realm_access.roles", "value": "ops"}, {"realm_access": ["ops"]}, False),
        ({"claim": "https://x.example/groups", "value": "ops"}, {"https://x.example/groups": ["ops"]}, True),
        ({"claim": "email_verified", "value": "true"}, {"email_verified": True}, False),
    ],
)
async def test_what_a_rule_fits(issuer: TestIssuer, rule: dict[str, str], claims: dict[str, Any], fits: bool) -> None:
    worker = Worker(issuer, {"issuer": "issuer", **rule})
    status, name = await worker.ask(issuer.token(**{"groups": None, **claims}))
    assert (status, name) == (200, "ops:alice" if fits else "any:alice")


async def test_a_caller_without_an_entry_is_known_and_has_no_right(issuer: TestIssuer) -> None:
    worker = Worker(issuer)
    del worker.tokens[1]
    worker.gate.replace(worker.config().tokens, worker.config().issuers)
    assert await worker.ask(issuer.token(groups=[])) == (
        403,
        "no entry of the configuration has the claims of the token",
    )


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("alice", "ops:alice"),
        ("system:serviceaccount:logs:shipper", "ops:system:serviceaccount:logs:shipper"),
        ("a/b", "ops:a%2Fb"),
        ("a%2Fb", "ops:a%252Fb"),
        ("é\n", "ops:%C3%A9%0A"),
        ("x" * 128, "ops:" + "x" * 128),
        ("x" * 129, None),
        ("é" * 30, None),
        ("\ud800", None),
        ("", None),
        (7, None),
        (["alice"], None),
        (None, None),
    ],
)
async def test_the_name_of_a_caller(issuer: TestIssuer, subject: Any, name: str | None) -> None:
    status, found = await Worker(issuer).ask(issuer.token(sub=subject))
    assert (status, found if status == 200 else None) == (200 if name else 401, name)


def hostile(issuer: TestIssuer) -> dict[str, str]:
    """Tokens that must be refused, by what they try."""
    good = issuer.token()
    head, body, signature = good.split(".")
    stranger = jwk.RSAKey.generate_key(2048)
    now = int(time.time())
    public = issuer.rsa.as_pem(private=False)

    def unsigned(header: dict[str, Any], key: bytes = b"") -> str:
        text = f"{encoded(header)}.{body}"
        return f"{text}.{encoded(hmac.new(key, text.encode(), hashlib.sha256).digest()) if key else ''}"

    return {
        "no algorithm": unsigned({"alg": "none"}),
        "no algorithm, in capitals": unsigned({"alg": "NONE", "kid": "rsa"}),
        "no algorithm, with a signature": f"{encoded({'alg': 'none', 'kid': 'rsa'})}.{body}.{signature}",
        "the public key as a password": unsigned({"alg": "HS256", "kid": "rsa"}, public),
        "a fetched key as a password": unsigned({"alg": "HS256", "kid": "rsa"}, json.dumps(issuer.keys[0]).encode()),
        "another algorithm of RSA": issuer.token(header={"alg": "RS512"}),
        "the key of another algorithm": issuer.token(header={"kid": "ec"}),
        "a key of its own": issuer.token(key=stranger),
        "a key of its own in the header": issuer.token(
            kid=None, key=stranger, header={"jwk": stranger.as_dict(private=False), "kid": "mine"}
        ),
        "a URL of keys in the header": issuer.token(key=stranger, header={"jku": "http://127.0.0.1:1/keys"}),
        "a path as kid": issuer.token(key=stranger, header={"kid": "../../../../dev/null"}),
        "a statement as kid": issuer.token(key=stranger, header={"kid": "x' UNION SELECT 'y"}),
        "a list as kid": f"{encoded({'alg': 'RS256', 'kid': ['rsa']})}.{body}.{signature}",
        "a huge kid": f"{encoded({'alg': 'RS256', 'kid': 'k' * 2000})}.{body}.{signature}",
        "what must be understood": issuer.token(header={"crit": ["exp"], "exp": 1}),
        "a token of another kind": issuer.token(header={"typ": "logout+jwt"}),
        "no kid, and several keys": issuer.token(kid=None, header={"alg": "RS256"}, key=stranger),
        "another body": f"{head}.{encoded(issuer.claims(groups=['root']))}.{signature}",
        "another header": f"{encoded({'alg': 'RS256', 'kid': 'rsa', 'x': 1})}.{body}.{signature}",
        "no signature": f"{head}.{body}.",
        "a cut signature": good[:-4],
        "a longer signature": good + "AAAA",
        "padding": good + "==",
        "another audience": issuer.token(aud="others"),
        "a longer audience": issuer.token(aud=[AUDIENCE + "2"]),
        "an object as audience": issuer.token(aud={AUDIENCE: 1}),
        "no audience": issuer.token(aud=None),
        "another issuer": issuer.token(iss="https://other.example"),
        "an issuer with a slash": issuer.token(iss=issuer.url + "/"),
        "no issuer": issuer.token(iss=None),
        "a list as issuer": issuer.token(iss=[issuer.url]),
        "it ended": issuer.token(exp=now - 60),
        "it does not end": issuer.token(exp=None),
        "it ends in words": issuer.token(exp="2999-01-01"),
        "it ends at true": issuer.token(exp=True),
        "it ends in milliseconds": issuer.token(exp=now * 1000),
        "it ends in infinity": issuer.token(exp=float("inf")),
        "it ends at no number": issuer.token(exp=float("nan")),
        "it is of later": issuer.token(nbf=now + 300),
        "it was issued later": issuer.token(iat=now + 300),
        "nested": issuer.token(x=json.loads("[" * 900 + "]" * 900)),
        "too long": issuer.token(x="y" * 9000),
        "no JSON": f"{encoded(b'{')}.{encoded(b'}')}.{signature}",
        "a list": f"{encoded([])}.{encoded([])}.{signature}",
        "nothing": "..",
        "not of base64": f"{head}!.{body}.{signature}",
        "not of ASCII": f"{head}.é.{signature}",
    }


async def test_hostile_tokens_are_refused(issuer: TestIssuer) -> None:
    worker = Worker(issuer)
    assert await worker.ask(issuer.token()) == (200, "ops:alice")
    tried = hostile(issuer)
    answers = {what: await worker.ask(token) for what, token in tried.items()}
    # Deep, but valid: the claims are what they are.
    assert answers.pop("nested")[0] in (200, 401)
    assert {what: answer for what, answer in answers.items() if answer[0] != 401} == {}
    assert worker.gate.present(NOBODY) is NOBODY
    # None of it made the gateway ask the issuer again and again.
    assert issuer.asked == 1
    # Nor was a good one forgotten.
    assert await worker.ask(issuer.token()) == (200, "ops:alice")


async def test_dates_with_the_skew_of_clocks(issuer: TestIssuer) -> None:
    worker, now = Worker(issuer, clock_skew_s=30), int(time.time())
    token = issuer.token(exp=now + 100, nbf=now + 20)
    assert await worker.ask(token) == (200, "ops:alice")
    caller = worker.seen[0]
    for ahead_s, allowed in ((-15, False), (0, True), (125, True), (140, False)):
        worker.ahead_s = ahead_s
        fresh = issuer.token(exp=now + 100, nbf=now + 20, jti=str(ahead_s))
        assert (await worker.ask(fresh))[0] == (200 if allowed else 401), ahead_s
        if ahead_s > 0:
            # One that was verified before, and one whose stream still runs, end as well.
            assert (await worker.ask(token))[0] == (200 if allowed else 401), ahead_s
            assert worker.gate.present(caller).may_read("dc1.nginx") == allowed


async def test_rights_are_those_of_the_present_configuration(issuer: TestIssuer) -> None:
    worker = Worker(issuer)
    assert await worker.ask(issuer.token()) == (200, "ops:alice")
    caller = worker.seen[0]
    assert worker.gate.present(caller).may_read("dc1.nginx")
    assert worker.gate.entry("ops:alice").may_read("dc1.nginx")
    worker.tokens[0]["deny"] = {"read": ["nginx"]}
    worker.gate.replace(worker.config().tokens, worker.config().issuers)
    assert not worker.gate.present(caller).may_read("dc1.nginx")
    assert await worker.ask(issuer.token()) == (200, "ops:alice")
    assert issuer.asked == 1  # the same issuer keeps its keys
    # The issuer goes: its callers are nobody, and unknown.
    plain = {"name": "plain", "sha256": "0" * 64, "read": ["nginx"]}
    worker.tokens = [plain]
    worker.gate.replace(worker.config().tokens)
    assert worker.gate.present(caller) is NOBODY
    assert worker.gate.entry("ops:alice") is NOBODY
    assert (await worker.ask(issuer.token()))[0] == 401


# ---- keys --------------------------------------------------------------------------------------------------------


class Later:
    """A monotonic clock that a test puts forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_s = 0.0
        monkeypatch.setattr(Issuer.__init__, "__defaults__", (time.time, lambda: time.monotonic() + self.by_s))


async def test_a_new_key_is_fetched_once_for_all_and_not_too_often(
    issuer: TestIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later(monkeypatch)
    worker = Worker(issuer)
    old = issuer.token()
    assert {await worker.ask(old) for _ in range(3)} == {(200, "ops:alice")}
    new = jwk.RSAKey.generate_key(2048)
    issuer.keys = [issuer.public(new, "new")]
    # A short time after the last fetch it is not asked again, whatever comes.
    assert {(await worker.ask(issuer.token("new", new, jti=str(n))))[0] for n in range(50)} == {401}
    assert issuer.asked == 1
    later.by_s = issuer_module._RETRY_S + 1
    answers = await asyncio.gather(*(worker.ask(issuer.token("new", new, jti=str(n))) for n in range(50)))
    assert ({*answers}, issuer.asked) == ({(200, "ops:alice")}, 2)
    # The key that is gone is not accepted any more, also for a token that was verified with it before.
    assert (await worker.ask(old))[0] == 401


async def test_while_the_issuer_is_away_its_keys_are_used_for_a_limited_time(
    issuer: TestIssuer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = Later(monkeypatch)
    worker = Worker(issuer, keys_max_age_s=3600)
    token = issuer.token(exp=int(time.time()) + 86_400)
    assert (await worker.ask(token))[0] == 200
    issuer.status = 500
    for minutes in (6, 30, 59):
        later.by_s = 60 * minutes
        assert (await worker.ask(token))[0] == 200
        assert (await worker.ask(issuer.token("ec", jti=str(minutes))))[0] == 200
        await asyncio.gather(*(one._fetching for one in worker.gate._issuers.values() if one._fetching))
    # A key that is not known may be a new one.
    assert (await worker.ask(issuer.token("new")))[0] == 503
    later.by_s = 3601
    assert (await worker.ask(token))[0] == 503
    said = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert said == ["issuer_unreachable"]
    issuer.status = 200
    later.by_s = 3700
    assert (await worker.ask(token))[0] == 200


@pytest.mark.parametrize("what", ["away", "other issuer", "file", "not text", "redirect", "huge", "no keys", "list"])
async def test_keys_that_cannot_be_had(issuer: TestIssuer, what: str) -> None:
    url: str | None = None
    if what == "away":
        url = "http://127.0.0.1:1/keys"
    elif what == "other issuer":
        issuer.discovery["issuer"] = "https://other.example"
    elif what == "file":
        issuer.discovery["jwks_uri"] = "file:///etc/passwd"
    elif what == "not text":
        issuer.discovery["jwks_uri"] = 7
    elif what == "redirect":
        url = issuer.url.replace("/realm", "/elsewhere")
    elif what == "huge":
        issuer.keys = [{"x": "y" * (1 << 19)}]
    elif what == "no keys":
        issuer.keys = [{"kty": "oct", "k": "c2VjcmV0", "kid": "rsa"}]
    elif what == "list":
        issuer.keys = {}  # type: ignore[assignment]
    assert (await Worker(issuer, keys_url=url).ask(issuer.token()))[0] == 503


@pytest.mark.parametrize(
    "changed",
    [
        {"use": "enc"},
        {"alg": "RS512"},
        {"kty": "oct", "k": "c2VjcmV0"},
        {"kty": ["RSA"]},
        {"n": "AQAB"},
        {"n": 7},
        {"e": "A" * 400},
        {"kid": 7},
    ],
)
async def test_a_key_that_is_none_is_left_out(issuer: TestIssuer, changed: dict[str, Any]) -> None:
    issuer.keys[0] |= changed
    worker = Worker(issuer)
    assert (await worker.ask(issuer.token()))[0] == 401
    assert (await worker.ask(issuer.token("ec"))) == (200, "ops:alice")


async def test_a_token_without_kid_is_of_the_only_key(issuer: TestIssuer) -> None:
    assert await Worker(issuer).ask(issuer.token(None)) == (200, "ops:alice")
    issuer.keys.append(issuer.public(jwk.RSAKey.generate_key(2048), "second"))
    assert (await Worker(issuer).ask(issuer.token(None)))[0] == 401


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"issuer": "http://sso.example"}, "https"),
        ({"issuer": "https://user:password@sso.example"}, "https"),
        ({"keys_url": "http://sso.example/keys"}, "https"),
        ({"keys_url": "file:///etc/passwd"}, "https"),
        ({"audience": []}, "audience"),
        ({"algorithms": ["HS256"]}, "algorithms"),
    ],
)
def test_a_wrong_issuer_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        IssuerSettings.model_validate({"name": "x", "issuer": "https://sso.example", "audience": "a", **changed})


async def test_entries_and_issuers_fit_together(issuer: TestIssuer) -> None:
    with pytest.raises(ValueError, match="there is no issuer isuer"):
        Worker(issuer, {"issuer": "isuer", "claim": "groups", "value": "ops"})


def test_a_problem_of_the_gate_is_one_of_the_table() -> None:
    assert Problem("issuer-unavailable", "x").retry_after_s == 1
