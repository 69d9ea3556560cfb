"""An OpenID Connect issuer on this machine: real keys, real HTTP, and tokens that it signs, good and bad."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from aiohttp import web
from joserfc import jwk, jws

AUDIENCE = "logferry"


def encoded(part: Any) -> str:
    raw = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


class TestIssuer:
    """``asked``: how often its keys were fetched. ``status``: of its answers. Use as ``async with``."""

    __test__ = False

    def __init__(self) -> None:
        self.rsa = jwk.RSAKey.generate_key(2048)
        self.ec = jwk.ECKey.generate_key("P-256")
        self.keys: list[dict[str, Any]] = [self.public(self.rsa, "rsa"), self.public(self.ec, "ec")]
        self.asked, self.status = 0, 200
        self.discovery: dict[str, Any] = {}
        self._runner: web.AppRunner | None = None

    @staticmethod
    def public(key: Any, kid: str, **more: Any) -> dict[str, Any]:
        return {**key.as_dict(private=False), "kid": kid, "use": "sig", **more}

    async def __aenter__(self) -> TestIssuer:
        self._runner = web.AppRunner(web.Application())
        router = self._runner.app.router
        router.add_get("/realm/.well-known/openid-configuration", self._discovery)
        router.add_get("/realm/keys", self._keys)
        router.add_get("/elsewhere", self._redirect)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/realm"
        self.discovery = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _discovery(self, _: web.Request) -> web.Response:
        return web.json_response(self.discovery)

    async def _keys(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"keys": self.keys}, status=self.status)

    async def _redirect(self, _: web.Request) -> web.Response:
        raise web.HTTPFound(f"{self.url}/keys")

    def claims(self, **changed: Any) -> dict[str, Any]:
        """Those of a good token; a change to None leaves one out."""
        now = int(time.time())
        good = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 600, "groups": ["ops"]}
        return {name: value for name, value in {**good, **changed}.items() if value is not None}

    def token(
        self, kid: str | None = "rsa", key: Any = None, header: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """A token that ``key`` signs; default: the issuer's of that kid."""
        key = key or (self.ec if kid == "ec" else self.rsa)
        algorithm = "ES256" if isinstance(key, jwk.ECKey) else "RS256"
        protected = {"alg": algorithm, "typ": "JWT", **({} if kid is None else {"kid": kid}), **(header or {})}
        text = f"{encoded(protected)}.{encoded(self.claims(**claims))}"
        signer = jws.JWSRegistry(algorithms=["RS256", "ES256", "RS512"]).get_alg(protected["alg"])
        return f"{text}.{encoded(signer.sign(text.encode(), key))}"
